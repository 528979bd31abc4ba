"""Windows of text: the protocol's cut, every kind of file, bad input, and text a model samples."""

import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress import sampling
from gccompress.calibration import CalibrationOptions, read_windows
from gccompress.errors import NumericalError, TextError
from gccompress.models import LoadedModel, open_model
from gccompress.text import SPREAD, Windows, cut_windows, load_windows
from tests.tiny import BOS, EOS, FAMILIES, TEXT, VOCAB, tiny_model, tiny_tokenizer, tokens

LONG = " ".join([TEXT] * 40)
SHORT = "few words"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return open_model((tiny_model("llama", layers=2), tiny_tokenizer()))


def whole_ids(text: str) -> list[int]:
    return tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]


def write(path: Path, text: str) -> Path:
    opened: Any = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.xz", "a.raw.xz"])
def test_windows_are_the_first_tokens_of_the_whole_text(
    loaded: LoadedModel, tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / name, LONG)
    windows = load_windows(path, loaded, seqlen=16, tokens=100, skip_tokens=5)
    assert windows.ids.shape == (6, 16)  # the rest of 100 tokens makes no window
    assert windows.ids.dtype == torch.int64
    assert windows.ids.flatten().tolist() == whole_ids(LONG)[5 : 5 + 96]


def test_reading_only_the_beginning_gives_what_the_whole_gives(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccompress.text.LEAST_CHARACTERS", 100)
    monkeypatch.setattr("gccompress.text.BLOCK", 37)  # characters of more than one byte are split
    text = LONG.replace("forty", "vierzig Brücken — ")
    path = write(tmp_path / "a.txt", text)
    for count in (1, 10, 50):
        windows = load_windows(path, loaded, seqlen=32, tokens=32 * count)
        assert windows.ids.flatten().tolist() == whole_ids(text)[: 32 * count]


@pytest.mark.parametrize("count", [1, 3, 7])
def test_spread_windows_are_whole_windows_from_all_over(
    loaded: LoadedModel, tmp_path: Path, count: int
) -> None:
    path = write(tmp_path / "a.txt", LONG)
    there = len(whole_ids(LONG)) // 16
    spread = load_windows(path, loaded, seqlen=16, tokens=16 * count, spread=True)
    read = min(there, SPREAD * count)
    first = load_windows(path, loaded, seqlen=16, tokens=16 * read)
    places = [first.ids.tolist().index(row) for row in spread.ids.tolist()]
    assert len(spread) == count and places == sorted(set(places))
    # One from each part of the text, none beyond what is read.
    assert [place * count // read for place in places] == list(range(count))


def test_a_text_of_just_enough_windows_gives_all_of_them(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    text = TEXT * 2
    count = len(whole_ids(text)) // 16
    path = write(tmp_path / "a.txt", text)
    first = load_windows(path, loaded, seqlen=16, tokens=16 * count)
    spread = load_windows(path, loaded, seqlen=16, tokens=16 * count, spread=True)
    assert torch.equal(spread.ids, first.ids)
    with pytest.raises(TextError, match="too short"):
        load_windows(path, loaded, seqlen=16, tokens=16 * (count + 1), spread=True)


def test_held_out_windows_are_from_all_over_and_in_no_moment(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    path = str(write(tmp_path / "a.txt", LONG))
    options = CalibrationOptions(path, 16 * 12, 16, 16 * 3)
    used, heldout = read_windows(loaded, options, tmp_path)
    rows = load_windows(path, loaded, seqlen=16, tokens=16 * 15, spread=True).ids.tolist()
    assert [rows.index(row) for row in heldout.ids.tolist()] == [2, 7, 12]
    assert sorted(used.ids.tolist() + heldout.ids.tolist()) == sorted(rows)
    used, heldout = read_windows(loaded, replace(options, spread=False), tmp_path)
    assert used.ids.flatten().tolist() == whole_ids(LONG)[: 16 * 12]
    assert heldout.ids.flatten().tolist() == whole_ids(LONG)[16 * 12 : 16 * 15]


def test_cut_windows_is_the_same_cut(loaded: LoadedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", LONG)
    cut = cut_windows(LONG, loaded.tokenizer, 32, 4, source="a")
    assert cut.hash == load_windows(path, loaded, seqlen=32, tokens=128).hash


@pytest.mark.parametrize("field", ["text", "page"])
@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
def test_rows_are_joined_by_a_blank_line(
    loaded: LoadedModel, tmp_path: Path, field: str, suffix: str
) -> None:
    rows = [TEXT[:90], TEXT[90:] + "\nmore", "é"]
    lines = [json.dumps({"id": 1, field: row}) for row in rows]
    path = write(tmp_path / f"a.jsonl{suffix}", "\n".join([*lines[:2], "", lines[2]]) + "\n")
    expected = whole_ids("\n\n".join(rows) + "\n\n")
    windows = load_windows(path, loaded, seqlen=len(expected), tokens=len(expected))
    assert windows.ids[0].tolist() == expected


def test_a_byte_order_mark_is_no_text(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + LONG.encode())
    windows = load_windows(tmp_path / "a.txt", loaded, seqlen=16, tokens=16)
    assert windows.ids[0].tolist() == whole_ids(LONG)[:16]


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_family_that_needs_bos_gets_it_in_every_window(tmp_path: Path, family: str) -> None:
    loaded = open_model((tiny_model(family, layers=2), tiny_tokenizer()))
    path = write(tmp_path / "a.txt", LONG)
    windows = load_windows(path, loaded, seqlen=16, tokens=64)
    assert windows.ids.shape == (4, 16)
    assert windows.ids[:, 0].tolist() == [BOS] * 4
    assert windows.ids[:, 1:].flatten().tolist() == whole_ids(LONG)[:60]
    assert "BOS" in windows.note


def test_the_hash_is_of_tokens_and_shape() -> None:
    ids = torch.arange(24).view(4, 6)
    windows = Windows.of(ids, "a")
    assert windows.hash == Windows.of(ids.int(), "b").hash
    assert windows.hash != Windows.of(ids.view(6, 4), "a").hash
    assert windows.hash != Windows.of(ids + 1, "a").hash
    part = windows.slice(1, 3)
    assert torch.equal(part.ids, ids[1:3]) and part.hash == Windows.of(ids[1:3], "a").hash
    assert (len(part), part.seqlen) == (2, 6)


def one_line(raised: pytest.ExceptionInfo[Exception]) -> str:
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt.gz", gzip.compress(b""), "is empty"),
        ("a.txt", b"few words", f"found {len(whole_ids(SHORT))} tokens, needed 32"),
        ("a.txt", b"text\0" * 99, "NUL"),
        ("a.txt", b"\x89PNG\xff\xfe" * 99, "not UTF-8"),
        ("a.txt", b"cut in a letter \xc3", "not UTF-8"),
        ("a.txt.gz", b"no gzip", "damaged"),
        ("a.txt.gz", gzip.compress(LONG.encode())[:80], "damaged"),
        ("a.txt.xz", b"no xz", "damaged"),
        ("a.txt.xz", lzma.compress(LONG.encode())[:80], "damaged"),
        ("a.jsonl", b'{"text": "a"}\nnot json', "line 2: not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", b'{"body": "x", "title": "y"}', "found body, title, wanted"),
        ("a.jsonl", b'{"text": 3}', "found text, wanted a string"),
        ("a.jsonl", b"[1, 2]", "found list"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.parquet", b"PAR1", ".parquet is not read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip bytes hold the time
)
def test_bad_files_are_one_clear_line(
    loaded: LoadedModel, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TextError) as raised:
        load_windows(path, loaded, seqlen=16, tokens=32)
    message = one_line(raised)
    assert said in message and str(path) in message


@pytest.mark.parametrize("kind", ["gz", "xz"])
def test_a_file_that_unpacks_without_end_is_refused_early(
    loaded: LoadedModel, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blanks are few tokens each million, so a limit on tokens alone would not stop."""

    def blank(text: str, tokenizer: Any) -> list[int]:
        seen.append(len(text))
        return [3]

    seen: list[int] = []
    monkeypatch.setattr("gccompress.text._tokenise", blank)
    path = tmp_path / f"a.txt.{kind}"
    packed = {"gz": gzip.compress, "xz": lzma.compress}[kind](b" " * 40_000_000)
    assert len(packed) < 50_000
    path.write_bytes(packed)
    with pytest.raises(TextError, match="no ordinary text"):
        load_windows(path, loaded, seqlen=16, tokens=4096)
    assert max(seen) < 2_000_000


def test_a_line_that_unpacks_without_end_is_no_row(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccompress.text.LONGEST_LINE", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b" " * 5_000_000))
    with pytest.raises(TextError, match="no row"):
        load_windows(path, loaded, seqlen=16, tokens=32)


@pytest.mark.parametrize(
    "name", ["missing.txt", "a/b.txt", "wikitext", "./owner/name", "x.jsonl.xz"]
)
def test_a_missing_file_is_said_with_what_was_wanted(loaded: LoadedModel, name: str) -> None:
    with pytest.raises(TextError, match="no such file.*wikitext2, a .txt or .jsonl file"):
        load_windows(name, loaded, seqlen=16, tokens=32)


def test_a_folder_is_no_text(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(TextError, match="is a folder"):
        load_windows(tmp_path, loaded, seqlen=16, tokens=32)


@pytest.mark.parametrize(
    ("seqlen", "tokens", "said"),
    [(1, 32, "--seqlen"), (64, 32, "less than one window"), (512, 1024, "256 positions")],
)
def test_windows_that_cannot_be(
    loaded: LoadedModel, tmp_path: Path, seqlen: int, tokens: int, said: str
) -> None:
    path = write(tmp_path / "a.txt", LONG)
    with pytest.raises(TextError, match=said):
        load_windows(path, loaded, seqlen=seqlen, tokens=tokens)


def test_text_needs_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", LONG)
    model = tiny_model("llama", layers=1)
    with pytest.raises(TextError, match="no tokenizer"):
        load_windows(path, open_model(model), seqlen=16, tokens=32)
    small = tiny_model("llama", layers=1, vocab_size=100)
    with pytest.raises(TextError, match="the model has 100"):
        load_windows(path, open_model((small, tiny_tokenizer())), seqlen=16, tokens=32)


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("wikitext2", ("Salesforce/wikitext", "wikitext-2-raw-v1", "test")),
        ("owner/name", ("owner/name", None, "test")),
        ("owner/name:en", ("owner/name", "en", "test")),
        ("owner/name:en@dev", ("owner/name", "en", "dev")),
    ],
)
def test_hub_data_sets(
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    address: tuple[str, str | None, str],
) -> None:
    import datasets

    asked = []

    def load(path: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((path, config, split))
        return [{"text": TEXT}, {"text": TEXT}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    windows = load_windows(name, loaded, seqlen=32, tokens=64, split="test")
    assert asked == [address]
    assert windows.ids.flatten().tolist() == whole_ids(f"{TEXT}\n\n{TEXT}\n\n")[:64]


def test_a_hub_data_set_that_cannot_be_had_names_the_remedy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(TextError) as raised:
        load_windows("wikitext2", loaded, seqlen=32, tokens=64)
    message = one_line(raised)
    assert "Salesforce/wikitext" in message and "pass a FILE" in message


def sampled(loaded: LoadedModel, cache: Path, **kw: Any) -> Windows:
    return load_windows("self", loaded, **{"seqlen": 16, "tokens": 80, "cache_dir": cache, **kw})


def test_self_text_is_reproducible_and_seeded(loaded: LoadedModel, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first = sampled(loaded, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), state)
    assert first.ids.shape == (5, 16)
    assert first.ids[:, 0].tolist() == [BOS] * 5
    assert 0 <= int(first.ids.min()) and int(first.ids.max()) < VOCAB
    assert len({tuple(row) for row in first.ids.tolist()}) == 5
    assert sampled(loaded, tmp_path / "b").hash == first.hash
    assert sampled(loaded, tmp_path / "b", seed=1).hash != first.hash
    other = open_model((tiny_model("llama", layers=2, seed=1), tiny_tokenizer()))
    assert sampled(other, tmp_path / "a").hash != first.hash


def test_self_text_is_kept_and_an_interrupted_call_goes_on(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MOST_ROWS", 2)
    whole = sampled(loaded, tmp_path / "whole")
    real, made = sampling._sample, []

    def until_third(*args: Any) -> torch.Tensor:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(args)
        return real(*args)

    monkeypatch.setattr(sampling, "_sample", until_third)
    with pytest.raises(KeyboardInterrupt):
        sampled(loaded, tmp_path / "cut")
    made.clear()
    resumed = sampled(loaded, tmp_path / "cut")
    assert len(made) == 1, "only the batch that was missing"
    assert resumed.hash == whole.hash
    made.clear()
    assert sampled(loaded, tmp_path / "cut").hash == whole.hash
    assert not made, "all from the cache"
    damaged = sorted((tmp_path / "cut").rglob("batch-*.safetensors"))[0]
    damaged.write_bytes(b"damaged")
    assert sampled(loaded, tmp_path / "cut").hash == whole.hash
    assert len(made) == 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mistral"])
def test_sampling_follows_the_models_probabilities(family: str, tmp_path: Path) -> None:
    """Oracle: the share of each second token, and the mean loss against the model's entropy."""
    model = tiny_model(family, layers=2)
    loaded = open_model((model, tiny_tokenizer()))
    windows = sampled(loaded, tmp_path, tokens=12 * 1024, seqlen=12)
    with torch.no_grad():
        shares = model(windows.ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    counts = torch.bincount(windows.ids[:, 1], minlength=VOCAB).double() / len(windows)
    expected = shares[0, 0].exp()
    spread = (expected * (1 - expected) / len(windows)).sqrt()
    assert bool(((counts - expected).abs() < 5 * spread + 2 / len(windows)).all())
    entropy = -(shares.exp() * shares).sum(-1)
    loss = -shares.gather(-1, windows.ids[:, 1:, None])[..., 0]
    gap = (loss - entropy).mean(1)  # zero on average, position by position
    assert abs(float(gap.mean())) < 5 * float(gap.std()) / len(gap) ** 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_roomy_cache_gives_the_logits_of_no_cache(family: str) -> None:
    model, ids = tiny_model(family), tokens(2, 24)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = sampling.new_cache(model, 24)
        first = sampling.next_logits(model, ids[:, :9], cache)
        assert torch.allclose(first, whole[:, 8], atol=1e-4)
        for position in range(9, 24):
            step = sampling.next_logits(model, ids[:, position : position + 1], cache)
            assert torch.allclose(step, whole[:, position], atol=1e-4)


def test_self_text_starts_from_eos_where_there_is_no_bos(tmp_path: Path) -> None:
    model = tiny_model("qwen2", layers=1, bos_token_id=None, eos_token_id=[EOS, 7])
    assert sampled(open_model(model), tmp_path).ids[:, 0].tolist() == [EOS] * 5
    bare = tiny_model("qwen2", layers=1, bos_token_id=None, eos_token_id=None)
    with pytest.raises(TextError, match="neither a BOS nor an EOS"):
        sampled(open_model(bare), tmp_path)


def test_a_damaged_model_gives_no_text(tmp_path: Path) -> None:
    loaded = open_model((tiny_model("llama", layers=1), tiny_tokenizer()))
    with torch.no_grad():
        loaded.model.get_output_embeddings().weight[5] = float("nan")
    with pytest.raises(NumericalError, match="sampled text, token 1"):
        sampled(loaded, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_greedy_continuation_is_what_generate_gives(loaded: LoadedModel) -> None:
    ids = torch.tensor([loaded.tokenizer("The river")["input_ids"]])
    expected = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
    )
    text = loaded.tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert sampling.continue_greedily(loaded, "The river", 12) == text


def test_protocol_text_has_its_windows(loaded: LoadedModel, data_folder: Path) -> None:
    path = data_folder / "protocol" / "test.txt.xz"
    text = lzma.open(path, "rt", encoding="utf-8").read()
    windows = load_windows(path, loaded, seqlen=128, tokens=24 * 128)
    assert windows.ids.flatten().tolist() == whole_ids(text)[: 24 * 128]
