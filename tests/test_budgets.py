"""Budgets of time and of loss, sweeps, findings and kept probes, on tiny models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gccompress.calibration import CalibrationOptions
from gccompress.errors import PlanError
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher
from gccompress.plan import AnyMove, LowRank, Plan
from gccompress.planner import PlanOptions, budget_of, choose, keeps_of, make_plan, sweep
from gccompress.planner.costs import meet
from gccompress.planner.latency import LatencyTable, speedup
from gccompress.planner.search import Search
from gccompress.roles import Role
from tests.tiny import tiny_folder

CALIBRATION = CalibrationOptions("self", 256, 32, 128, 0, Fisher(True, 1))
OPTIONS = PlanOptions(multiple=4, spaces="paper")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A tiny Llama of four layers from a folder."""
    folder = tiny_folder(tmp_path_factory.mktemp("model") / "tiny", "llama", layers=4)
    return open_model(folder, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache folder that the module's tests share."""
    return str(tmp_path_factory.mktemp("cache"))


def planned(loaded: LoadedModel, cache: str, **budget: Any) -> Plan:
    """Return a plan for a budget."""
    return make_plan(loaded, **budget, options=OPTIONS, calibration=CALIBRATION, cache_dir=cache)


@pytest.mark.parametrize("strategy", ["auto", "ranks", "width", "plain", "lowrank", "prune"])
def test_a_speedup_is_predicted_to_be_reached(
    loaded: LoadedModel, cache: str, strategy: str
) -> None:
    options = PlanOptions(**{**vars(OPTIONS), "strategy": strategy, "probe": "none"})
    search = Search(loaded, options, CALIBRATION, cache)
    try:
        choice = search.choose(budget_of(speedup=1.05))
    except PlanError:
        pytest.skip(f"this machine's latencies leave {strategy} nothing that is faster")
    plan = choice.plan
    assert speedup(plan.moves, search.shape, search.latency) >= 1.04
    shown = next(one for one in choice.candidates if one.strategy == strategy)
    assert shown.speedup == pytest.approx(speedup(plan.moves, search.shape, search.latency))


def test_a_speedup_that_nothing_reaches_is_refused(loaded: LoadedModel, cache: str) -> None:
    with pytest.raises(PlanError, match="budget of|reaches"):
        planned(loaded, cache, speedup=1e6)
    assert planned(loaded, cache, speedup=1.0).moves == ()


def test_factors_that_are_slower_than_dense_are_no_candidates(
    loaded: LoadedModel, cache: str
) -> None:
    """With a table on which small products cost as much as large ones, ranks save no time."""
    search = Search(loaded, PlanOptions(**{**vars(OPTIONS), "probe": "none"}), CALIBRATION, cache)
    table = search.latency
    flat = {role: curve.model_copy(update={"seconds": tuple(1.0 for _ in curve.seconds)})
            for role, curve in table.reads.items()}  # fmt: skip
    slow = LatencyTable(**{**dict(table), "reads": flat})
    search.__dict__["latency"] = slow
    moves = search._moves("auto", budget_of(speedup=1.05), _usual())
    if isinstance(moves, PlanError):
        return
    assert not any(isinstance(move, LowRank) for move in moves)


def _usual() -> Any:
    from gccompress.planner.search import USUAL_SCALES

    return USUAL_SCALES


def test_the_smallest_plan_within_a_loss(loaded: LoadedModel, cache: str) -> None:
    plan = planned(loaded, cache, max_loss=0.02)
    found = plan.prediction
    assert found.measured and found.ppl is not None and found.dense_ppl is not None
    assert math.log(found.ppl / found.dense_ppl) <= 0.02 + 1e-9
    tighter = planned(loaded, cache, max_loss=0.002).prediction
    assert found.params_kept < tighter.params_kept
    assert str(plan.budget) == "at most 0.02 nats per token worse"
    assert Plan.parse(plan.to_yaml()) == plan.model_copy(
        update={"moves": Plan.parse(plan.to_yaml()).moves}
    )


def test_a_loss_below_every_step_is_refused(loaded: LoadedModel, cache: str) -> None:
    with pytest.raises(PlanError):
        planned(loaded, cache, max_loss=1e-12)


def test_budgets_of_size_and_loss_agree_without_a_probe(loaded: LoadedModel, cache: str) -> None:
    options = PlanOptions(**{**vars(OPTIONS), "probe": "none"})
    search = Search(loaded, options, CALIBRATION, cache)
    plan = search.choose(budget_of(max_loss=0.05)).plan
    smaller = search._of_size(
        "auto", int((plan.prediction.params_kept - 0.05) * search.shape.decoder_params()), _usual()
    )
    from gccompress.planner.search import _scaled_loss

    assert _scaled_loss(list(plan.moves), _usual()) <= 0.05 < _scaled_loss(smaller, _usual())


def test_a_goal_is_met_from_either_side() -> None:
    def make(params: int) -> list[AnyMove]:
        if params < 20:
            raise PlanError("too small")
        return [LowRank(role=Role.Q, layer=0, rank=params)]

    def rank(moves: list[AnyMove]) -> int:
        assert isinstance(moves[0], LowRank)
        return moves[0].rank

    assert rank(meet(make, lambda moves: rank(moves) <= 100, 256, largest=True)) == 100
    assert rank(meet(make, lambda moves: rank(moves) >= 100, 256, largest=False)) == 100
    assert rank(meet(make, lambda moves: True, 256, largest=False)) == 20
    with pytest.raises(PlanError, match="too small|reaches"):
        meet(make, lambda moves: False, 256, largest=True)
    with pytest.raises(PlanError, match="too small"):
        meet(make, lambda moves: rank(moves) < 20, 256, largest=True)


def test_a_sweep_is_a_plan_per_share_from_one_calibration(
    loaded: LoadedModel, cache: str, tmp_path: Path
) -> None:
    curve = sweep(
        loaded, keeps_of("0.9:0.6:0.15"), options=OPTIONS, calibration=CALIBRATION, cache_dir=cache
    )
    assert curve.keeps == (0.9, 0.75, 0.6)
    kept = [choice.plan.prediction.params_kept for choice in curve.choices]
    assert kept == sorted(kept, reverse=True)
    assert all(choice.plan.prediction.measured for choice in curve.choices)
    curve.save(tmp_path / "plans")
    names = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert names == ["curve.json", "curve.png", "plan-0.6.yaml", "plan-0.75.yaml", "plan-0.9.yaml"]
    data = json.loads((tmp_path / "plans/curve.json").read_text())
    assert [point["keep"] for point in data["points"]] == [0.9, 0.75, 0.6]
    assert Plan.load(tmp_path / "plans/plan-0.6.yaml").budget.keep == 0.6
    curve.table()


@pytest.mark.parametrize(
    "text", ["0.9", "0.5:0.9", "a:b", "0.9:0", "1.2:0.5", "0.9:0.5:0", "1:0.001:0.001"]
)
def test_a_sweep_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--sweep"):
        keeps_of(text)


def test_the_default_step_of_a_sweep() -> None:
    assert keeps_of("0.95:0.8") == (0.95, 0.9, 0.85, 0.8)


def test_probes_are_kept_and_used_again(
    loaded: LoadedModel, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(loaded, cache, keep=0.8)
    monkeypatch.setattr("gccompress.planner.probe.window_losses", None)  # would raise if called
    monkeypatch.setattr("gccompress.planner.probe.applied", lambda *args: None)
    again = planned(loaded, cache, keep=0.8)
    assert again.prediction == first.prediction


def test_damaged_probes_are_made_again(
    loaded: LoadedModel, cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = planned(loaded, cache, keep=0.8)
    for path in (Path(cache) / "probes").iterdir():
        path.write_text("{damaged")
    again = planned(loaded, cache, keep=0.8)
    assert "damaged" in caplog.text
    assert again.prediction == first.prediction


def test_any_space_lets_every_role_share(loaded: LoadedModel, cache: str) -> None:
    options = PlanOptions(**{**vars(OPTIONS), "spaces": "any", "probe": "none"})
    choice = choose(
        loaded, budget_of(0.6), options=options, calibration=CALIBRATION, cache_dir=cache
    )
    assert not any("no sharing was considered" in one for one in choice.plan.findings)
    paper = planned(loaded, cache, keep=0.6)
    # V with Q and K on one basis is considered inside a layer: they read the same input.
    assert any(one.startswith(("o", "down", "k", "q")) for one in paper.findings)
    assert {*choice.plan.findings} <= {line.rstrip(".") for line in choice.sentences()}


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"speedup": 0.9}, "--speedup"),
        ({"speedup": float("nan")}, "--speedup"),
        ({"max_loss": 0}, "--max-loss"),
        ({"max_loss": float("inf")}, "--max-loss"),
        ({"keep": 0.8, "max_loss": 0.1}, "give one budget"),
        ({}, "give one budget"),
    ],
)
def test_budgets_that_are_none_are_refused(budget: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        budget_of(**budget)
