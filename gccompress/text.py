"""Text -> windows of tokens: a file, a hub data set, or text sampled from the model itself.

Text is tokenised as one piece without special tokens, then cut into windows of equal length.
"""

import codecs
import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch import Tensor

from gccompress.architectures import spec_for
from gccompress.errors import TextError
from gccompress.sampling import sample_text, start_token
from gccompress.sources import COMPRESSED

if TYPE_CHECKING:
    from gccompress.models import LoadedModel

# Characters read for the tokens wanted before a text is refused: a compressed file of blanks
# would unpack without end. Ordinary text has 3 to 6 characters a token.
MOST_CHARACTERS_PER_TOKEN = 256
LEAST_CHARACTERS = 1 << 16
BLOCK = 1 << 18  # bytes unpacked at a time
LONGEST_LINE = 1 << 26  # characters of one JSONL row
# The last tokens of a cut text are not those of the whole; farther in they are.
MARGIN_TOKENS = 64
SPREAD = 16  # times as much text is read as is used, where windows are spread over it

JSON_FIELDS = ("text", "page")
TEXT_SUFFIXES = (".txt", ".jsonl")
NOT_TEXT = (".json", ".csv", ".parquet", ".arrow", ".zip", ".zst", ".bz2", ".tar", ".pdf", ".html")
WIKITEXT2 = "Salesforce/wikitext:wikitext-2-raw-v1"
FORMS = "wanted self, wikitext2, a .txt or .jsonl file (also .gz, .xz) or a hub data set owner/name"
_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<split>[\w.-]+))?")


@dataclass(frozen=True)
class Windows:
    """Text ready for a model.

    Attributes:
        ids: token ids, int64 `[n, seqlen]`, on the CPU.
        source: where the text is from, as the user gave it.
        hash: "sha256:..." over the ids and their shape.
        note: how the windows were made.
    """

    ids: Tensor
    source: str
    hash: str
    note: str = ""

    @classmethod
    def of(cls, ids: Tensor, source: str, note: str = "") -> "Windows":
        """Wrap ids `[n, seqlen]`, hashing them."""
        ids = ids.to("cpu", torch.int64).contiguous()
        digest = hashlib.sha256(f"{list(ids.shape)}\n".encode())
        digest.update(ids.numpy().tobytes())
        return cls(ids, source, f"sha256:{digest.hexdigest()}", note)

    @property
    def seqlen(self) -> int:
        """Tokens of a window."""
        return self.ids.shape[1]

    def __len__(self) -> int:
        """Return the number of windows."""
        return len(self.ids)

    def slice(self, start: int, stop: int) -> "Windows":
        """Return windows `start` to `stop`, exclusive, with a hash of their own."""
        return self.select(range(start, min(stop, len(self))))

    def select(self, indices: Sequence[int]) -> "Windows":
        """Return some windows, in the order given, with a hash of their own."""
        return Windows.of(self.ids[list(indices)], self.source, self.note)


def load_windows(
    source: str | Path,
    loaded: "LoadedModel",
    *,
    seqlen: int = 512,
    tokens: int = 16384,
    seed: int = 0,
    skip_tokens: int = 0,
    spread: bool = False,
    split: str = "train",
    cache_dir: str | Path | None = None,
) -> Windows:
    """Return `tokens // seqlen` windows of a text.

    Args:
        source: `self` (text sampled from the model), `wikitext2`, a file, or a hub data set
            written `owner/name`, `owner/name:config`, either with `@split` after it.
        loaded: model and tokenizer.
        seqlen: tokens of a window.
        tokens: tokens of all windows.
        seed: of sampled text.
        skip_tokens: tokens of the text left out before the first window; not for `self`.
        spread: take the windows evenly from the first `SPREAD` times as many that the text has,
            rather than its first ones: neighbours are about the same thing. Not for `self`.
        split: of a hub data set whose name has no `@split`.
        cache_dir: where sampled text is kept.

    Raises:
        TextError: missing, unreadable, binary, empty, too short, or out of the model's range.
    """
    name = str(source)
    count = _window_count(name, loaded.model.config, seqlen, tokens)
    if name == "self":
        note = (
            f"sampled from the model, temperature 1, from token {start_token(loaded)}, seed {seed}"
        )
        sampled = sample_text(loaded, count=count, seqlen=seqlen, seed=seed, cache_dir=cache_dir)
        return Windows.of(sampled, name, note)
    if loaded.tokenizer is None:
        raise TextError(f"text {name}: the model has no tokenizer; pass a pair (model, tokenizer)")
    pieces = _pieces(name, split)
    bos = _bos(loaded)
    width = seqlen - (bos is not None)
    read = count * SPREAD if spread else count
    ids = _first_tokens(pieces, loaded.tokenizer, skip_tokens + read * width, name)
    there = max(count, min(read, (len(ids) - skip_tokens) // width))
    windows = _cut(ids, seqlen, there, bos=bos, skip=skip_tokens, source=name)
    windows = windows.select(evenly(there, count))
    vocabulary = loaded.model.config.get_text_config().vocab_size
    if int(windows.ids.max()) >= vocabulary:
        raise TextError(
            f"text {name}: the tokenizer gives token {int(windows.ids.max())}, the model has "
            f"{vocabulary}; pass the tokenizer that belongs to the model"
        )
    return windows


def evenly(total: int, count: int) -> list[int]:
    """Return `count` of `total` indices, evenly spaced, each in the middle of its part."""
    return [(2 * index + 1) * total // (2 * count) for index in range(count)]


def cut_windows(
    text: str,
    tokenizer: Any,
    seqlen: int,
    count: int,
    *,
    source: str = "text",
    bos: int | None = None,
) -> Windows:
    """Tokenise a text whole, no special tokens, and cut it into its first `count` windows.

    Args:
        text: all of it.
        tokenizer: of the model.
        seqlen: tokens of a window.
        count: number of windows.
        source: what to call the text.
        bos: token put in front of each window, inside `seqlen`.

    Raises:
        TextError: empty or too short.
    """
    return _cut(_tokenise(text, tokenizer), seqlen, count, bos=bos, skip=0, source=source)


def _cut(
    ids: list[int], seqlen: int, count: int, *, bos: int | None, skip: int, source: str
) -> Windows:
    """Cut tokens into windows `[count, seqlen]`, each with `bos` in front if there is one."""
    width = seqlen - (bos is not None)
    needed = skip + count * width
    if len(ids) < needed:
        if not ids:
            raise TextError(f"text {source} is empty; wanted {needed} tokens of text")
        raise TextError(
            f"text {source} is too short: found {len(ids)} tokens, needed {needed} ({count} windows"
            f" of {seqlen}{f' after {skip} skipped' if skip else ''}); give a longer text or ask "
            "for fewer tokens"
        )
    body = torch.tensor(ids[skip:needed], dtype=torch.int64).view(count, width)
    if bos is None:
        return Windows.of(body, source, "tokenised whole, no special tokens")
    first = torch.full((count, 1), bos)
    note = f"tokenised whole, BOS (token {bos}) in front of each window, as its family needs"
    return Windows.of(torch.cat([first, body], 1), source, note)


def _window_count(name: str, config: Any, seqlen: int, tokens: int) -> int:
    """Return the number of windows asked for, if the model can take them."""
    if seqlen < 2:
        raise TextError(f"text {name}: windows of {seqlen} tokens; raise --seqlen to 2 or more")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and seqlen > positions:
        raise TextError(
            f"text {name}: windows of {seqlen} tokens, but the model has {positions} positions; "
            f"lower --seqlen to {positions} or less"
        )
    if tokens < seqlen:
        raise TextError(
            f"text {name}: {tokens} tokens are less than one window of {seqlen}; "
            "ask for more tokens or lower --seqlen"
        )
    return tokens // seqlen


def _bos(loaded: "LoadedModel") -> int | None:
    """Return the token that each window must begin with, None where the family needs none."""
    config = loaded.model.config.get_text_config()
    if not spec_for(config.model_type.removeprefix(COMPRESSED)).needs_bos:
        return None
    bos = getattr(loaded.tokenizer, "bos_token_id", None)
    bos = config.bos_token_id if bos is None else bos
    if bos is None:
        raise TextError(
            f"model {loaded.source.name}: its family needs a BOS token and its tokenizer has none; "
            "pass the tokenizer that belongs to the model"
        )
    return int(bos)


def _tokenise(text: str, tokenizer: Any) -> list[int]:
    # verbose=False: longer than the model's context is no mistake here, the ids are cut later.
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return cast(list[int], ids)


def _first_tokens(pieces: Iterator[str], tokenizer: Any, needed: int, name: str) -> list[int]:
    """Return at least the first `needed` tokens of the text, or all where it has fewer.

    Only as much is read as gives them, with a margin within which cutting could show.
    """
    most = max(needed * MOST_CHARACTERS_PER_TOKEN, LEAST_CHARACTERS)
    wanted, size, parts = max(8 * needed, LEAST_CHARACTERS), 0, []
    while True:
        while size < wanted and (piece := next(pieces, None)) is not None:
            parts.append(piece)
            size += len(piece)
        ids = _tokenise("".join(parts), tokenizer)
        if size < wanted or len(ids) >= needed + MARGIN_TOKENS:
            return ids
        if size >= most:
            raise TextError(
                f"text {name}: its first {size} characters give only {len(ids)} tokens, needed "
                f"{needed}; this is no ordinary text, give another"
            )
        wanted = min(2 * size, most)


def _pieces(name: str, split: str) -> Iterator[str]:
    """Find the text by its name and return its pieces, in order."""
    path = Path(name).expanduser()
    if name == "wikitext2":
        return _hub_pieces(f"{WIKITEXT2}@{split}", name)
    if path.is_file():
        return _file_pieces(path)
    if path.is_dir():
        raise TextError(f"text {name} is a folder; {FORMS}")
    match = _HUB.fullmatch(name)
    if match and not name.startswith(".") and path.suffix not in (*TEXT_SUFFIXES, ".gz", ".xz"):
        return _hub_pieces(name if match["split"] else f"{name}@{split}", name)
    raise TextError(f"text {name}: no such file ({path.absolute()}); {FORMS}")


def _file_pieces(path: Path) -> Iterator[str]:
    """Yield the text of a file: as it is, or the rows of a JSONL file."""
    packed = path.suffix if path.suffix in (".gz", ".xz") else ""
    kind = Path(path.name.removesuffix(packed)).suffix
    if kind in NOT_TEXT:
        raise TextError(f"text {path}: {kind} is not read; {FORMS}")
    opened: Any = {".gz": gzip.open, ".xz": lzma.open, "": open}[packed]
    text = _decoded(path, opened)
    return _rows(path, text) if kind == ".jsonl" else text


def _decoded(path: Path, opened: Any) -> Iterator[str]:
    """Yield a file's characters, unpacked block by block."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        with cast(BinaryIO, opened(path, "rb")) as file:
            while block := file.read(BLOCK):
                yield _checked(decoder.decode(block), path)
            yield _checked(decoder.decode(b"", final=True), path)
    except UnicodeDecodeError as error:
        raise TextError(
            f"text {path} is not text: byte {error.object[error.start]:#04x} is not UTF-8; {FORMS}"
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise TextError(
            f"text {path} is damaged or not what its name says ({error}); fetch it again"
        ) from error
    except OSError as error:
        raise TextError(f"text {path} cannot be read: {error.strerror or error}") from error


def _checked(text: str, path: Path) -> str:
    if "\0" in text:
        raise TextError(f"text {path} is binary: it has NUL bytes; {FORMS}")
    return text


def _lines(text: Iterator[str], path: Path) -> Iterator[str]:
    """Yield the lines of a stream of characters; a line without end is refused."""
    rest = ""
    for piece in text:
        *whole, rest = (rest + piece).split("\n")
        yield from whole
        if len(rest) > LONGEST_LINE:
            raise TextError(f"text {path}: a line of more than {len(rest)} characters is no row")
    yield rest


def _rows(path: Path, text: Iterator[str]) -> Iterator[str]:
    """Yield the text field of every row of a JSONL file, a blank line between rows."""
    for number, line in enumerate(_lines(text, path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TextError(f"text {path}, line {number}: not JSON ({error})") from error
        yield _field(row, f"{path}, line {number}") + "\n\n"


def _field(row: Any, where: str) -> str:
    """Return a row's text."""
    if isinstance(row, dict):
        for field in JSON_FIELDS:
            if isinstance(row.get(field), str):
                return str(row[field])
    found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
    raise TextError(
        f"text {where}: found {found or 'no field'}, wanted a string field "
        f"{' or '.join(JSON_FIELDS)}; rename the field that holds the text"
    )


def _hub_pieces(address: str, name: str) -> Iterator[str]:
    """Yield the rows of a hub data set, a blank line between rows."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    match = _HUB.fullmatch(address)
    assert match is not None
    offline = constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
    try:
        # Streaming reads only the rows it needs, but knows nothing of what was fetched before.
        rows = datasets.load_dataset(
            match["name"],
            match["config"],
            split=match["split"],
            streaming=not offline and name != "wikitext2",
        )
        for number, row in enumerate(rows):
            yield _field(row, f"{name}, row {number}") + "\n\n"
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        why = str(error).strip().splitlines()
        raise TextError(
            f"text {name}: hub data set {match['name']} ({match['config'] or 'default'}, split "
            f"{match['split']}) cannot be had{', offline' if offline else ''} "
            f"({type(error).__name__}: {why[0] if why else ''}); pass a FILE of text instead, or "
            "self for text sampled from the model"
        ) from error
