"""Scores against naive oracles in float64; the evaluation's keys, table and refusals."""

import json
import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from gccompress.checkpoints import compress_in_place, save_checkpoint
from gccompress.errors import GccompressError, NumericalError, TextError
from gccompress.evaluation import (
    HELDOUT_SEED,
    Evaluation,
    evaluate,
    kl_to_baseline,
    measure_speed,
    perplexity,
)
from gccompress.models import open_model
from gccompress.scores import compare_speed, score_windows
from gccompress.text import Windows, load_windows
from tests.mixed import mixed_layout, random_tensors
from tests.tiny import FAMILIES, TEXT, tiny_folder, tiny_model, tiny_tokenizer, tokens


def windows_of(count: int = 3, length: int = 24) -> Windows:
    return Windows.of(tokens(count, length), "test")


def naive_shares(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[n, seqlen - 1, vocab]` the plain way, softmax in float64."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits[:, :-1].double().log_softmax(-1)


@pytest.mark.parametrize("some_at_once", [1 << 26, 5 * 320, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_the_naive_one_however_it_is_cut(
    family: str, some_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccompress.scores.LOGITS_AT_ONCE", some_at_once)
    model, windows = tiny_model(family), windows_of()
    labels = windows.ids[:, 1:, None]
    nll = -naive_shares(model, windows.ids).gather(-1, labels)[..., 0].mean(1)
    found = perplexity(model, windows)
    assert found.nll == pytest.approx(float(nll.mean()), abs=1e-5)
    assert found.value == pytest.approx(math.exp(float(nll.mean())), rel=1e-5)
    spread = float(nll.std()) / math.sqrt(3)
    assert found.stderr == pytest.approx(found.value * spread, rel=1e-3)
    assert (found.dataset, found.seqlen, found.tokens) == ("test", 24, 3 * 23)


@pytest.mark.parametrize("some_at_once", [1 << 26, 5 * 320])
@pytest.mark.parametrize("family", FAMILIES)
def test_kl_is_from_the_baseline_to_the_model(
    family: str, some_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccompress.scores.LOGITS_AT_ONCE", some_at_once)
    model, baseline, windows = tiny_model(family), tiny_model(family, seed=1), windows_of()
    with torch.no_grad():  # sharper, or the two directions are alike
        baseline.get_output_embeddings().weight.mul_(6.0)
    q, p = naive_shares(model, windows.ids), naive_shares(baseline, windows.ids)
    forward = float((p.exp() * (p - q)).sum(-1).mean())
    backward = float((q.exp() * (q - p)).sum(-1).mean())
    assert abs(forward - backward) > 0.01 * forward, "the test could not tell them apart"
    assert kl_to_baseline(model, baseline, windows) == pytest.approx(forward, rel=1e-4)


def test_a_model_is_no_distance_from_itself() -> None:
    model = tiny_model("llama")
    assert kl_to_baseline(model, model, windows_of()) == 0.0


def test_scores_of_both_models_in_one_pass_are_those_of_each() -> None:
    model, baseline, windows = tiny_model("llama"), tiny_model("gpt2"), windows_of()
    both = score_windows(model, windows, baseline=baseline)
    assert torch.equal(both.nll, score_windows(model, windows).nll)
    assert both.baseline_nll is not None
    assert torch.equal(both.baseline_nll, score_windows(baseline, windows).nll)


def test_scoring_is_without_dropout_and_leaves_the_mode_alone() -> None:
    model, windows = tiny_model("gpt2"), windows_of()
    quiet = perplexity(model, windows)
    model.train()
    assert perplexity(model, windows) == quiet
    assert model.training


def test_one_window_has_no_standard_error() -> None:
    assert perplexity(tiny_model("llama"), windows_of(1)).stderr is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
def test_a_compressed_model_is_scored_like_any_other(family: str, tmp_path: Path) -> None:
    dense = tiny_model(family)
    plain = open_model((tiny_model(family), tiny_tokenizer()))
    layout = mixed_layout(dense)
    model = compress_in_place(dense, layout, random_tensors(layout))
    (tmp_path / "model").mkdir()
    save_checkpoint(model, tiny_tokenizer(), tmp_path / "model")
    found = evaluate(
        tmp_path / "model",
        baseline=plain,
        tokens=64,
        seqlen=16,
        prompt="The river",
        device="cpu",
        cache_dir=tmp_path / "cache",
    )
    windows = load_windows(
        "self", plain, seqlen=16, tokens=64, seed=HELDOUT_SEED, cache_dir=tmp_path / "cache"
    )
    shares = naive_shares(model, windows.ids)
    nll = -float(shares.gather(-1, windows.ids[:, 1:, None]).mean())
    assert found.perplexity.nll == pytest.approx(nll, abs=1e-5)
    assert found.baseline is not None and found.params < found.baseline.params
    assert found.bytes == sum(
        file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors")
    )


def test_a_non_finite_window_is_named_and_never_dropped() -> None:
    model = tiny_model("llama")
    ids = tokens(4, 12)
    special = 299
    ids[ids == special] = 298
    ids[2, 3] = special
    with torch.no_grad():
        model.get_input_embeddings().weight[special] = float("nan")
    with pytest.raises(NumericalError, match="window 2: loss of the model is nan"):
        perplexity(model, Windows.of(ids, "test"))
    good = tiny_model("llama")
    with pytest.raises(NumericalError, match="window 2: loss of the baseline"):
        kl_to_baseline(good, model, Windows.of(ids, "test"))


def test_a_perplexity_beyond_any_number_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e5)
    with pytest.raises(NumericalError, match="nats per token"):
        perplexity(model, windows_of())


def test_vocabularies_must_agree_for_a_kl() -> None:
    with pytest.raises(GccompressError, match="baseline has 400 tokens.*the model 320"):
        kl_to_baseline(tiny_model("llama"), tiny_model("llama", vocab_size=400), windows_of())


def test_speed_is_of_what_it_says() -> None:
    lengths: list[int] = []
    model = tiny_model("llama", layers=1)
    model.register_forward_pre_hook(
        lambda _, __, kw: lengths.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    speed = measure_speed(model, prompt_tokens=40, new_tokens=3, repeats=2)
    assert lengths == [40, 1, 1, 1] * 3, "a warm-up and two repeats"
    assert speed.prefill_tokens_per_s > 0 and speed.decode_tokens_per_s > 0
    assert (speed.prompt_tokens, speed.new_tokens, speed.repeats) == (40, 3, 2)


def test_the_prompt_fits_the_models_positions() -> None:
    """The tiny models have 256 positions, GPT-2 no more than that in its table."""
    pair = compare_speed([tiny_model("llama"), tiny_model("gpt2")], new_tokens=6, repeats=1)
    assert [speed.prompt_tokens for speed in pair] == [250, 250]
    with pytest.raises(TextError, match="no room"):
        measure_speed(tiny_model("gpt2"), new_tokens=256)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return tiny_folder(root / "small", layers=2), tiny_folder(root / "dense", layers=3)


@pytest.fixture(scope="module")
def both(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    return evaluate(
        folders[0],
        baseline=folders[1],
        tokens=96,
        seqlen=16,
        prompt="The river",
        device="cpu",
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


def test_the_keys_that_callers_rely_on(both: Evaluation) -> None:
    found = json.loads(both.to_json())
    assert {"dataset", "seqlen", "tokens", "value", "stderr"} <= set(found["perplexity"])
    assert {"kl_to_baseline", "tasks", "params", "bytes", "versions"} <= set(found)
    assert found["prefill_tokens_per_s"] > 0 and found["decode_tokens_per_s"] > 0
    assert set(found["baseline"]) < set(found), "the same keys for both models"
    assert found["versions"]["torch"] == torch.__version__


def test_an_evaluation_is_of_these_two_models(
    both: Evaluation, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    small, dense = (open_model(folder, device="cpu") for folder in folders)
    windows = load_windows(
        "self", dense, seqlen=16, tokens=96, seed=HELDOUT_SEED, cache_dir=tmp_path
    )
    assert both.text_hash == windows.hash, "sampled from the baseline"
    assert both.perplexity.value == perplexity(small.model, windows).value
    assert both.baseline is not None
    assert both.baseline.perplexity.value == perplexity(dense.model, windows).value
    assert both.kl_to_baseline == kl_to_baseline(small.model, dense.model, windows)
    assert both.perplexity.tokens == 6 * 15
    hashes = (both.model_hash, both.baseline.model_hash)
    assert hashes == (small.source.hash, dense.source.hash)
    weights = sum(file.stat().st_size for file in folders[0].glob("*.safetensors"))
    assert both.bytes == weights
    assert set(both.continuations) == {"baseline", "model"}


def test_default_text_is_not_what_plans_are_calibrated_on(
    both: Evaluation, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    dense = open_model(folders[1], device="cpu")
    seen = load_windows("self", dense, seqlen=16, tokens=96, seed=0, cache_dir=tmp_path)
    assert both.text_hash != seen.hash


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_a_tied_head_counts_once(tmp_path: Path, family: str, tied: bool) -> None:
    folder = tiny_folder(tmp_path / "m", family, layers=1)
    found = evaluate(
        folder, tokens=32, seqlen=16, speed=False, device="cpu", cache_dir=tmp_path / "c"
    )
    model = open_model(folder, device="cpu").model
    stored = {id(one): one.numel() for one in model.parameters()}
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == tied
    assert found.params == sum(stored.values())
    assert 0 < found.bytes - 4 * found.params < 10_000, "a file is its tensors and a header"
    assert found.prefill_tokens_per_s is None and found.baseline is None
    in_memory = evaluate(
        (model, tiny_tokenizer()), tokens=32, seqlen=16, speed=False, cache_dir=tmp_path / "c"
    )
    assert (in_memory.params, in_memory.bytes) == (found.params, 4 * found.params)
    assert in_memory.perplexity.value > 1


def test_text_from_a_file(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    options: dict[str, Any] = {"seqlen": 16, "speed": False, "device": "cpu"}
    found = evaluate(folders[0], text=tmp_path / "a.txt", tokens=64, **options)
    assert found.perplexity.dataset == str(tmp_path / "a.txt")
    with pytest.raises(TextError, match="too short"):
        evaluate(folders[0], text=tmp_path / "a.txt", tokens=4096, **options)


def test_json_round_trip_and_what_is_no_evaluation(both: Evaluation) -> None:
    assert Evaluation.from_json(both.to_json()) == both
    data = json.loads(both.to_json())
    for changed, said in (
        ({"surprise": 1}, "surprise"),
        ({"version": 2}, "version"),
        ({"params": "many"}, "params"),
    ):
        with pytest.raises(GccompressError, match=said):
            Evaluation.from_json(json.dumps(data | changed))
    with pytest.raises(GccompressError, match="not an evaluation"):
        Evaluation.from_json("[]")


def shown(evaluation: Evaluation) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(evaluation.table())
    return capture.get()


def test_the_table_shows_both_models_and_the_change(both: Evaluation) -> None:
    text = shown(both)
    assert both.baseline is not None
    for one in (both, both.baseline):
        assert f"{one.params:,}" in text and f"{one.perplexity.value:.3f}" in text
    assert f"{100 * (both.params / both.baseline.params - 1):+.1f}%" in text
    assert f"{both.kl_to_baseline:.4f}" in text and "decode" in text
    alone = both.model_copy(update={"baseline": None, "kl_to_baseline": None})
    text = shown(alone)
    assert "baseline" not in text and f"{both.params:,}" in text


@pytest.mark.real
@pytest.mark.slow
def test_the_dense_model_has_the_protocols_perplexity(data_folder: Path) -> None:
    loaded = open_model("smollm2-135m", device="cpu")
    path = data_folder / "protocol" / "test.txt.xz"
    windows = load_windows(path, loaded, seqlen=512, tokens=24 * 512)
    whole = loaded.tokenizer(
        lzma.open(path, "rt", encoding="utf-8").read(), add_special_tokens=False, verbose=False
    )["input_ids"]
    assert windows.ids.flatten().tolist() == whole[: 24 * 512]
    found = perplexity(loaded.model, windows)
    assert found.tokens == 24 * 511
    assert found.value == pytest.approx(25.880, abs=0.01)
