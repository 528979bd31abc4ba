"""Plans from weights alone: streamed, ordered, never mistaken for a prediction."""

from pathlib import Path

import pytest
import torch

from gccompress.apply import apply_plan
from gccompress.errors import PlanError
from gccompress.models import open_model
from gccompress.plan import LowRank, Plan, plan_params
from gccompress.planner import PlanOptions, budget_of
from gccompress.planner import weights_only as module
from gccompress.planner.weights_only import choose_from_weights
from gccompress.roles import Role
from gccompress.view import ModelView, model_shape
from tests.tiny import FAMILIES, tiny_folder, tiny_model

OPTIONS = PlanOptions(multiple=4, spaces="paper")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_an_ordering_within_the_budget(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", family, layers=3)
    choice = choose_from_weights(
        folder, budget_of(0.7, None), options=OPTIONS, cache_dir=str(tmp_path / "cache")
    )
    loaded = open_model(folder, cache_dir=tmp_path)
    shape = model_shape(ModelView(loaded.model))
    decoder, total = plan_params(choice.plan.moves, shape)
    assert decoder <= 0.7 * shape.decoder_params()
    prediction = choice.plan.prediction
    assert prediction.params == total
    assert choice.plan.model.total_params == shape.total_params
    assert choice.plan.model.hash == loaded.source.hash
    assert prediction.ppl is None and prediction.loss is None
    assert prediction.energy_lost is not None and 0 < prediction.energy_lost < 1
    assert all(move.loss is None for move in choice.plan.moves)
    lost = {one.strategy: one.prediction for one in choice.candidates}
    assert lost["ranks"].energy_lost <= lost["lowrank"].energy_lost + 1e-9
    assert lost["width"] is None and lost["prune"] is None
    assert Plan.parse(choice.plan.to_yaml()).moves == choice.plan.moves


def test_the_energy_lost_is_that_of_truncated_weights(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "llama", layers=3)
    options = PlanOptions(multiple=1, spaces="paper", longest=1)
    choice = choose_from_weights(
        folder, budget_of(0.6, None), options=options, cache_dir=str(tmp_path / "cache")
    )
    view = ModelView(open_model(folder, cache_dir=tmp_path).model)
    lost = 0.0
    for move in choice.plan.moves:
        assert isinstance(move, LowRank)
        values = torch.linalg.svdvals(view.weight(move.role, move.layer).double()).square()
        lost += float(values[move.rank :].sum() / values.sum())
    wanted = lost / (3 * len(view.roles))
    assert choice.plan.prediction.energy_lost == pytest.approx(wanted, rel=1e-5)


def test_a_weight_that_is_of_low_rank_is_cut_first(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "llama", layers=2)
    model = tiny_model("llama", layers=2)
    view = ModelView(model)
    for layer in range(2):
        rows, cols = view.shape(Role.GATE, layer)
        view.set_weight(Role.GATE, layer, torch.randn(rows, 3) @ torch.randn(3, cols))
    model.save_pretrained(folder)
    choice = choose_from_weights(
        folder, budget_of(0.85, None), options=OPTIONS, cache_dir=str(tmp_path / "cache")
    )
    assert {(move.role, move.layer) for move in choice.plan.moves} == {
        (Role.GATE, 0),
        (Role.GATE, 1),
    }
    assert choice.plan.prediction.energy_lost == pytest.approx(0.0, abs=1e-6)


def test_it_is_not_applied_and_says_why(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "llama", layers=3)
    plan = choose_from_weights(
        folder, budget_of(0.7, None), options=OPTIONS, cache_dir=str(tmp_path / "cache")
    ).plan
    with pytest.raises(PlanError, match="without --no-calibration"):
        apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "cache"))
    assert any("no perplexity" in note for note in plan.notes)


@pytest.mark.parametrize("strategy", ["width", "prune"])
def test_strategies_that_need_text_are_refused(strategy: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny", "llama", layers=3)
    options = PlanOptions(multiple=4, spaces="paper", strategy=strategy)
    with pytest.raises(PlanError, match="needs calibration"):
        choose_from_weights(folder, budget_of(0.7, None), options=options, cache_dir=str(tmp_path))


def test_finished_projections_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "tiny", "llama", layers=3)
    spectra, seen = module._spectra, []

    def dies_at_down(stream, role, *rest):  # type: ignore[no-untyped-def]
        seen.append(role)
        if role is Role.DOWN and seen.count(Role.DOWN) == 1:
            raise KeyboardInterrupt
        return spectra(stream, role, *rest)

    monkeypatch.setattr(module, "_spectra", dies_at_down)
    arguments = (folder, budget_of(0.7, None))
    cache = str(tmp_path / "cache")
    with pytest.raises(KeyboardInterrupt):
        choose_from_weights(*arguments, options=OPTIONS, cache_dir=cache)
    again = choose_from_weights(*arguments, options=OPTIONS, cache_dir=cache)
    assert seen == [*ModelView(tiny_model("llama", layers=1)).roles, Role.DOWN]
    fresh = choose_from_weights(*arguments, options=OPTIONS, cache_dir=str(tmp_path / "fresh"))
    assert fresh.plan == again.plan
