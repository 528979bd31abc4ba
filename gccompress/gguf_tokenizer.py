"""The tokenizer of a GGUF file, from a fast tokenizer's own description (tokenizer.json).

Two kinds: byte-level BPE (GPT-2, SmolLM2, Llama 3, Qwen) and SentencePiece-like BPE (Llama 2).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gccompress.errors import UnsupportedModelError

logger = logging.getLogger("gccompress")

# llama.cpp knows how text is cut before BPE by a name, see its llama-vocab.cpp; the patterns as
# the models' own tokenizer.json has them.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ADVICE = (
    "export --format dense and give that folder to llama.cpp's convert_hf_to_gguf.py, which knows "
    "more of them"
)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as GGUF stores it.

    Attributes:
        model: "gpt2" (byte-level BPE) or "llama" (SentencePiece).
        pre: how text is cut before merging, by llama.cpp's name; "" for SentencePiece.
        tokens: by id, one for each row of the embedding.
        types: of each token, numbers of `gguf.TokenType`.
        scores: of each token, for SentencePiece: the higher is merged first.
        merges: "left right" in order, for byte-level BPE.
        special: "bos", "eos", "unk", "pad" -> id.
        add_bos: whether text begins with the BOS token.
        add_space_prefix: whether a space is put before text.
        chat_template: as the tokenizer has it.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    special: dict[str, int]
    add_bos: bool
    add_space_prefix: bool
    chat_template: str | None


def vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Return what a GGUF file says of a fast tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        rows: of the model's embedding.

    Raises:
        UnsupportedModelError: of a kind that is neither of the two, or with more tokens than rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedModelError(
            f"tokenizer {type(tokenizer).__name__} is not a fast one; {_ADVICE}"
        )
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(f"tokenizer of kind {model['type']}, wanted BPE; {_ADVICE}")
    sentencepiece = bool(model.get("byte_fallback"))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    tokens, types = _tokens(spec, rows, sentencepiece)
    special = {
        name: int(number)
        for name in ("bos", "eos", "unk", "pad")
        if (number := getattr(tokenizer, f"{name}_token_id", None)) is not None and number < rows
    }
    if sentencepiece and "unk" in special:
        types[special["unk"]] = _UNKNOWN
    first = tokenizer("a")["input_ids"][:1]
    return Vocabulary(
        model="llama" if sentencepiece else "gpt2",
        pre="" if sentencepiece else _pre(spec),
        tokens=tokens,
        types=types,
        scores=_scores(tokens, merges) if sentencepiece else [],
        merges=[] if sentencepiece else merges,
        special=special,
        add_bos="bos" in special and first == [special["bos"]],
        add_space_prefix=sentencepiece and _adds_space(spec),
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def _tokens(spec: Mapping[str, Any], rows: int, bytes_: bool) -> tuple[list[str], list[int]]:
    """Return the tokens by id and their types; ids that no token has are unused."""
    by_id = {number: (token, _NORMAL) for token, number in spec["model"]["vocab"].items()}
    if bytes_:
        for number, (token, _) in by_id.items():
            if len(token) == 6 and token.startswith("<0x"):
                by_id[number] = (token, _BYTE)
    for added in spec["added_tokens"]:
        if added["id"] >= rows:  # such as those a tokenizer's class adds of itself
            logger.warning(
                "token %r has no embedding (%d rows) and is left out", added["content"], rows
            )
            continue
        kind = _CONTROL if added["special"] else _USER_DEFINED
        by_id[added["id"]] = (added["content"], kind)
    if max(by_id) >= rows:
        raise UnsupportedModelError(
            f"tokenizer has a token {max(by_id)}, the model embeddings for {rows} tokens; a GGUF "
            "file has one for each"
        )
    filled = [by_id.get(number, (f"[PAD{number}]", _UNUSED)) for number in range(rows)]
    return [token for token, _ in filled], [kind for _, kind in filled]


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores that make SentencePiece merge in the order of `merges`."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank[token]) - 1 if token in rank else 0.0 for token in tokens]


def _adds_space(spec: Mapping[str, Any]) -> bool:
    """Whether the normalizer or pre-tokenizer puts a space before text, as Llama 2's does."""
    normalizer, pre = spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    prepends = any(step.get("type") == "Prepend" for step in steps)
    return prepends or pre.get("prepend_scheme") in ("first", "always")


def _pre(spec: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how text is cut; raise when it has none that is known here."""
    pre = spec.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre]) if spec.get("normalizer") in (None, _NFC) else []
    kinds = [step.get("type") for step in steps]
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    plain = len(levels) == 1 and not levels[0]["add_prefix_space"]
    own = plain and levels[0].get("use_regex", True)
    if own and kinds == ["ByteLevel"]:
        return "gpt-2"
    if own and kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if plain and not own and kinds == ["Split", "ByteLevel"]:
        name = _PATTERNS.get(steps[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise UnsupportedModelError(
        f"tokenizer cuts text by {' and '.join(map(str, kinds)) or 'an unknown normalizer'} in a "
        f"way that has no name in GGUF known here; {_ADVICE}"
    )


_NFC = {"type": "NFC"}
