"""Planning on tiny models: budgets met, strategies side by side, predictions, refusals."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gccompress.apply import apply_plan
from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.errors import GccompressError, PlanError
from gccompress.linalg import Damping
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher
from gccompress.moves import applied
from gccompress.plan import (
    DropLayers,
    Plan,
    Prediction,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_params,
    plan_params,
)
from gccompress.planner import STRATEGIES, PlanOptions, band, budget_of, choose, make_plan
from gccompress.planner.survey import bases, survey
from gccompress.recipe import Recipe
from gccompress.roles import PAPER_SPACE, Role
from gccompress.view import ModelView, model_shape
from tests.tiny import FAMILIES, tiny_folder

CALIBRATION = CalibrationOptions("self", 256, 32, 128, 0, Fisher(True, 1))
OPTIONS = PlanOptions(multiple=4, spaces="paper", damping=Damping(0.03, 1e-3))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama of five layers from a folder."""
    folder = tiny_folder(tmp_path_factory.mktemp("model") / "tiny", "llama", layers=5)
    return open_model(folder, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder that the module's tests share."""
    return str(tmp_path_factory.mktemp("cache"))


def plan(loaded: LoadedModel, cache: str, keep: float = 0.8, **options: Any) -> Plan:
    """Return a plan with the module's calibration."""
    chosen = PlanOptions(**{**vars(OPTIONS), **options})
    budget = budget_of(keep, None)
    return choose(loaded, budget, options=chosen, calibration=CALIBRATION, cache_dir=cache).plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("keep", [0.9, 0.7, 0.5])
def test_budgets_are_met_and_nearly_used(
    loaded: LoadedModel, cache: str, strategy: str, keep: float
) -> None:
    found = plan(loaded, cache, keep, strategy=strategy, probe="none")
    shape = model_shape(ModelView(loaded.model))
    decoder, total = plan_params(found.moves, shape)
    kept = decoder / shape.decoder_params()
    assert kept <= keep
    assert found.prediction.params_kept == pytest.approx(kept)
    assert found.prediction.params == total
    # A layer of five; a few ranks or neurons of a tiny model.
    step = 0.2 if strategy in ("prune", "plain") else 0.06
    assert kept > keep - step
    saved = sum(move.saves for move in found.moves)
    assert shape.decoder_params() - decoder == saved
    for move in found.moves:
        if not isinstance(move, DropLayers):
            assert move_params(move, shape) > 0  # also raises where a matrix would grow


def test_the_chosen_plan_is_the_least_predicted_of_its_kind(
    loaded: LoadedModel, cache: str
) -> None:
    budget = budget_of(0.7, None)
    options = PlanOptions(**{**vars(OPTIONS), "multiple": 1, "probe": "none"})
    choice = choose(loaded, budget, options=options, calibration=CALIBRATION, cache_dir=cache)
    losses = {
        one.strategy: one.prediction.loss for one in choice.candidates if one.prediction is not None
    }
    assert losses["auto"] <= losses["ranks"] < losses["lowrank"]
    assert losses["ranks"] < losses["share"]
    assert losses["auto"] <= losses["width"]
    assert losses["rtn8"] < losses["rtn4"]
    assert set(losses) == {*STRATEGIES, "rtn8", "rtn4"}


def test_predicted_loss_is_what_the_factors_lose_by_the_same_formula(
    loaded: LoadedModel, cache: str
) -> None:
    """For matrices factored alone the tail is exact; for groups the refit can only lower it."""
    from gccompress.moments import weighted
    from gccompress.moves import factor_move, narrow
    from gccompress.plan import LowRank, move_matrices

    found = plan(loaded, cache, 0.6, probe="none", longest=3)
    view = ModelView(loaded.model)
    calibrated = calibrate(loaded, view, CALIBRATION, Path(cache))
    moments, damping = calibrated.moments, OPTIONS.damping
    for move in found.moves:
        assert not isinstance(move, DropLayers)
        if isinstance(move, ResizeMlp):
            kept, weight, _ = narrow(view, moments, move, damping)
            down = weighted(view, moments, Role.DOWN, move.layer, damping)
            full = torch.zeros_like(down.weight)
            full[:, kept] = weight
            assert down.loss(full) == pytest.approx(move.loss, rel=1e-5)
            continue
        factors = factor_move(view, moments, move, damping)
        loss = sum(
            weighted(view, moments, role, layer, damping).loss(factors.product(index))
            for index, (role, layer) in enumerate(move_matrices(move))
        )
        assert move.loss is not None
        if isinstance(move, LowRank):
            assert loss == pytest.approx(move.loss, rel=1e-5, abs=1e-12)
        else:
            assert loss <= move.loss * (1 + 1e-6) + 1e-12


def test_a_probe_is_the_measured_rise_on_the_heldout_windows(
    loaded: LoadedModel, cache: str
) -> None:
    found = plan(loaded, cache, 0.6, probe="chosen")
    view = ModelView(loaded.model)
    calibrated = calibrate(loaded, view, CALIBRATION, Path(cache))
    ids = calibrated.heldout.ids
    assert len(ids) == 4

    def perplexity() -> float:
        with torch.no_grad():
            logits = loaded.model(ids).logits[:, :-1].flatten(0, 1)
        return math.exp(float(nn.functional.cross_entropy(logits, ids[:, 1:].flatten())))

    prediction = found.prediction
    assert prediction.measured
    assert prediction.dense_ppl == pytest.approx(perplexity(), rel=1e-4)
    with applied(view, calibrated.moments, found.moves, OPTIONS.damping):
        assert prediction.ppl == pytest.approx(perplexity(), rel=1e-4)
    assert prediction.ppl_low <= prediction.ppl <= prediction.ppl_high


def test_plain_leaves_a_stock_model(loaded: LoadedModel, cache: str, tmp_path: Path) -> None:
    for keep in (0.85, 0.6):
        found = plan(loaded, cache, keep, strategy="plain")
        widths = {move.width for move in found.moves if isinstance(move, ResizeMlp)}
        assert len(widths) <= 1
        assert {move.do for move in found.moves} <= {"drop_layers", "resize_mlp"}
        again = open_model(loaded.source.path, cache_dir=cache)
        apply_plan(found, again, tmp_path / str(keep), cache_dir=cache)
        config = json.loads((tmp_path / str(keep) / "config.json").read_text())
        assert config["model_type"] == "llama" and "gccompress" not in config


def test_auto_measures_no_worse_than_any_single_strategy(loaded: LoadedModel, cache: str) -> None:
    for keep in (0.8, 0.5):
        options = PlanOptions(**{**vars(OPTIONS), "probe": "all"})
        choice = choose(
            loaded,
            budget_of(keep, None),
            options=options,
            calibration=CALIBRATION,
            cache_dir=cache,
        )
        measured = {
            one.strategy: one.prediction.ppl
            for one in choice.candidates
            if one.prediction is not None and one.prediction.measured
        }
        assert set(measured) == {*STRATEGIES, "rtn4", "rtn8"}
        plans = [measured[name] for name in STRATEGIES]
        assert measured["auto"] <= min(ppl for ppl in plans if ppl is not None)
        dense = choice.plan.prediction.dense_ppl
        assert measured["rtn8"] == pytest.approx(dense, rel=0.02)


def test_what_was_measured_narrows_the_bands_of_what_was_not(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    """A plan that a later run does not probe is predicted from what earlier ones measured."""

    def ranks(keep: float, **options: Any) -> Prediction:
        found = choose(
            loaded,
            budget_of(keep, None),
            options=PlanOptions(**{**vars(OPTIONS), "strategy": "prune", **options}),
            calibration=CALIBRATION,
            cache_dir=str(tmp_path),
        )
        [prediction] = [one.prediction for one in found.candidates if one.strategy == "ranks"]
        assert prediction is not None
        return prediction

    def width(found: Prediction) -> float:
        assert found.ppl is not None and found.ppl_low is not None and found.ppl_high is not None
        assert found.ppl_low < found.ppl < found.ppl_high
        return math.log(found.ppl_high / found.dense_ppl) / math.log(found.ppl / found.dense_ppl)

    alone = ranks(0.6)
    measured = ranks(0.7, probe="all")
    taught = ranks(0.6)
    assert measured.measured and not alone.measured and not taught.measured
    assert width(taught) < width(alone)
    assert measured.ppl < taught.ppl


def test_without_a_probe_the_band_is_wide_and_says_so(loaded: LoadedModel, cache: str) -> None:
    found = plan(loaded, cache, 0.6, probe="none").prediction
    assert not found.measured
    assert found.ppl is None and found.dense_ppl is None


def test_same_inputs_same_plan_and_the_cache_changes_nothing(
    loaded: LoadedModel, cache: str, tmp_path: Path
) -> None:
    first = plan(loaded, cache, 0.75)
    assert plan(loaded, cache, 0.75) == first
    fresh = plan(loaded, str(tmp_path), 0.75)
    assert fresh.to_yaml() == first.to_yaml()


def test_a_size_budget_is_a_budget_of_the_whole_checkpoint(
    loaded: LoadedModel, cache: str, tmp_path: Path
) -> None:
    whole = model_shape(ModelView(loaded.model)).total_params * 4
    limit = int(0.85 * whole)
    found = choose(
        loaded,
        budget_of(None, limit),
        options=OPTIONS,
        calibration=CALIBRATION,
        cache_dir=cache,
    ).plan
    again = open_model(loaded.source.path, cache_dir=cache)
    done = apply_plan(found, again, tmp_path / "out", cache_dir=cache)
    assert 0.8 * limit < done.bytes_after <= limit


def test_budgets_that_no_plan_can_meet_say_the_closest(loaded: LoadedModel, cache: str) -> None:
    with pytest.raises(PlanError, match="smallest this strategy reaches"):
        plan(loaded, cache, 0.001, probe="none")
    with pytest.raises(PlanError, match="one layer has"):
        plan(loaded, cache, 0.1, strategy="prune", probe="none")
    with pytest.raises(PlanError, match="embeddings, norms"):
        choose(loaded, budget_of(None, 1000), calibration=CALIBRATION, cache_dir=cache)


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.1, float("nan"), float("inf"), "0.5"])
def test_a_share_outside_zero_to_one_is_refused(keep: float) -> None:
    with pytest.raises(PlanError, match="wanted a share in"):
        budget_of(keep, None)


def test_sizes_are_read_in_the_usual_units() -> None:
    sizes = {"200MB": 200_000_000, "1.5GiB": 1_610_612_736, "123": 123, " 2 kb ": 2000, "1M": 10**6}
    for text, size in sizes.items():
        assert budget_of(None, text).max_size == size
        assert Recipe.parse(f"model: m\nbudget: {{max_size: '{text}'}}").budget.max_size == size
    assert budget_of(None, 3e5).max_size == 300_000
    assert budget_of(None, "9" * 400 + "MB").max_size == int("9" * 400) * 10**6
    for text in ("", "MB", "-1MB", "1XB", "0", "1e9"):
        with pytest.raises(PlanError):
            budget_of(None, text)
    with pytest.raises(GccompressError, match="budget.max_size.*200MB"):
        Recipe.parse("model: m\nbudget: {max_size: much}")
    with pytest.raises(PlanError, match="max-size"):
        budget_of(None, float("nan"))
    with pytest.raises(PlanError, match="one budget"):
        budget_of(None, None)
    with pytest.raises(PlanError, match="one budget"):
        budget_of(0.5, 100)


def test_keeping_everything_does_nothing(loaded: LoadedModel, cache: str) -> None:
    found = plan(loaded, cache, 1.0)
    assert found.moves == ()
    assert found.prediction.ppl == pytest.approx(found.prediction.dense_ppl)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_keeping_everything_does_nothing_by_any_strategy(
    loaded: LoadedModel, cache: str, strategy: str
) -> None:
    found = plan(loaded, cache, 1.0, strategy=strategy, probe="none", multiple=5)
    assert found.moves == () and found.prediction.params_kept == 1.0


def test_few_tokens_are_damped_with_a_warning_and_still_give_a_plan(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    few = CalibrationOptions("self", 32, 32, 32, 0, Fisher(True, 0))
    found = make_plan(
        loaded,
        keep=0.8,
        options=PlanOptions(multiple=4, spaces="paper"),
        calibration=few,
        cache_dir=str(tmp_path),
    )
    assert any("32 calibration tokens for an input of width 96" in note for note in found.notes)
    assert found.prediction.ppl is not None and math.isfinite(found.prediction.ppl)


def test_less_than_a_window_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(GccompressError, match="less than one window"):
        make_plan(
            loaded,
            keep=0.8,
            options=OPTIONS,
            calibration=CalibrationOptions("self", 16, 32),
            cache_dir=str(tmp_path),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_a_plan_that_can_be_carried_out(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", family, layers=3)
    loaded = open_model(folder, cache_dir=tmp_path)
    options = PlanOptions(multiple=4, damping=Damping(0.03, 1e-3))  # spaces as measured
    found = make_plan(
        loaded, keep=0.7, options=options, calibration=CALIBRATION, cache_dir=str(tmp_path)
    )
    done = apply_plan(found, folder, tmp_path / "out", cache_dir=str(tmp_path))
    assert done.params_after == found.prediction.params
    assert done.reload_max_abs_diff is not None and done.reload_max_abs_diff < 1e-4


def test_an_interrupted_survey_goes_on(
    loaded: LoadedModel, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gccompress.planner import survey as module

    view = ModelView(loaded.model)
    moments = calibrate(loaded, view, CALIBRATION, Path(cache)).moments
    shared = bases(view.roles, PAPER_SPACE, 2, joint=True)
    whole = survey(view, moments, shared, damping=Damping(), cache=tmp_path / "a")
    price, seen = module._price_alone, []

    def dies_at_down(*args: Any) -> Any:
        seen.append(args[2])
        if args[2] is Role.DOWN and seen.count(Role.DOWN) == 1:
            raise KeyboardInterrupt
        return price(*args)

    monkeypatch.setattr(module, "_price_alone", dies_at_down)
    with pytest.raises(KeyboardInterrupt):
        survey(view, moments, shared, damping=Damping(), cache=tmp_path / "b")
    again = survey(view, moments, shared, damping=Damping(), cache=tmp_path / "b")
    assert seen == [*view.roles, Role.DOWN]
    assert again.quantized == whole.quantized
    for one, other in zip(again.segments, whole.segments, strict=True):
        assert (one.roles, one.layers, one.per_rank) == (other.roles, other.layers, other.per_rank)
        assert (one.saved == other.saved).all()


def test_a_damaged_survey_is_made_again(
    loaded: LoadedModel, cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = ModelView(loaded.model)
    moments = calibrate(loaded, view, CALIBRATION, Path(cache)).moments
    first = survey(view, moments, (), damping=Damping(), cache=tmp_path)
    for path in (tmp_path / "surveys").iterdir():
        path.write_bytes(b"damaged")
    again = survey(view, moments, (), damping=Damping(), cache=tmp_path)
    assert "damaged" in caplog.text
    assert again.quantized == first.quantized


@pytest.mark.parametrize(("group", "longest"), [(4, 3), (2, 1), (9, 2)])
def test_groups_are_shared_whatever_longest_says(
    loaded: LoadedModel, cache: str, group: int, longest: int
) -> None:
    found = plan(loaded, cache, strategy="share", group=group, longest=longest, probe="none")
    shared = [one for one in found.moves if isinstance(one, ShareInput | ShareOutput)]
    assert {one.layers for one in shared} >= {tuple(range(min(group, 5)))}
    auto = plan(loaded, cache, group=group, longest=longest, probe="none")
    for move in auto.moves:
        if isinstance(move, ShareInput | ShareOutput):
            assert len(move.layers) <= longest


def test_a_hopeless_prediction_is_still_a_number(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(band.USUAL, "rank", band.Kind(1e6, 3.0))
    budget = budget_of(0.3, None)
    options = PlanOptions(**{**vars(OPTIONS), "strategy": "prune", "multiple": 1})
    choice = choose(
        loaded, budget, options=options, calibration=CALIBRATION, cache_dir=str(tmp_path)
    )
    assert any((one.prediction.ppl or 0) > 1e40 for one in choice.candidates if one.prediction)
    for one in choice.to_dict(Path("plan.yaml"))["candidates"]:
        for name in ("predicted_ppl", "predicted_ppl_low", "predicted_ppl_high"):
            assert one[name] is None or math.isfinite(one[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlen": 0}, "--seqlen to 2"),
        ({"seqlen": 1}, "--seqlen to 2"),
        ({"seqlen": -3}, "--seqlen to 2"),
        ({"heldout_tokens": -1}, "--heldout-tokens 0"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_numbers_of_tokens_that_make_no_sense(
    loaded: LoadedModel, tmp_path: Path, change: dict[str, int], message: str
) -> None:
    options = CalibrationOptions(**{**vars(CALIBRATION), **change})
    with pytest.raises(GccompressError, match=message):
        calibrate(loaded, ModelView(loaded.model), options, tmp_path)
    assert not list(tmp_path.iterdir())


def test_held_out_tokens_below_a_window_are_said(
    loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = CalibrationOptions(**{**vars(CALIBRATION), "heldout_tokens": 31})
    found = calibrate(loaded, ModelView(loaded.model), options, tmp_path)
    assert len(found.heldout) == 0 and "less than one window of 32" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"strategy": "magic"}, {"spaces": "mine"}, {"probe": "some"}, {"multiple": 0}, {"group": 1}],
)
def test_options_that_are_none(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="plan option"):
        PlanOptions(**change)
