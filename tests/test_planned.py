"""A plan finds its model again: by its files, or by its tensors where it was made in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress.apply import apply_plan
from gccompress.calibration import CalibrationOptions
from gccompress.errors import ModelError, PlanError
from gccompress.files import cache_folder
from gccompress.moments import Fisher
from gccompress.plan import Plan
from gccompress.planned import open_planned
from gccompress.planner import PlanOptions, make_plan
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

CALIBRATION = CalibrationOptions("self", 64, 16, 0, 0, Fisher(True, 1))
OPTIONS = PlanOptions(strategy="lowrank", multiple=4, spaces="paper", probe="none")


def planned(model: Any, cache: Path) -> Plan:
    """Return a plan made from a model in memory."""
    pair = (model, tiny_tokenizer())
    return make_plan(pair, keep=0.8, options=OPTIONS, calibration=CALIBRATION, cache_dir=str(cache))


def saved(model: Any, folder: Path) -> Path:
    """Save a model with its tokenizer."""
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_planned_in_memory_is_known_from_its_folder(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, layers=2)
    plan = planned(model, tmp_path / "cache")
    folder = saved(model, tmp_path / "folder")
    opened = open_planned(plan, folder, cache=cache_folder(tmp_path / "cache"))
    assert not opened.other and opened.loaded.source.path == folder
    assert opened.loaded.source.hash == plan.model.hash
    # Where its moments are gone too, they come out the same again.
    done = apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "empty"))
    assert done.reload_max_abs_diff is not None and done.reload_max_abs_diff < 1e-4


def test_also_in_16_bits(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=2).to(torch.bfloat16)
    plan = planned(model, tmp_path / "cache")
    folder = saved(model, tmp_path / "folder")
    opened = open_planned(plan, folder, cache=cache_folder(tmp_path / "cache"))
    assert not opened.other and opened.loaded.model.dtype == torch.float32


def test_another_weight_another_model(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=2)
    plan = planned(model, tmp_path / "cache")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    folder = saved(model, tmp_path / "folder")
    cache = cache_folder(tmp_path / "cache")
    with pytest.raises(PlanError, match="--allow-other-model"):
        open_planned(plan, folder, cache=cache)
    assert open_planned(plan, folder, cache=cache, allow_other_model=True).other
    with pytest.raises(ModelError, match="say so with --model"):
        open_planned(plan, cache=cache)


def test_a_revision_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", layers=2)
    plan = planned(model, tmp_path / "cache")
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"revision": "plans"})})
    seen: list[str | None] = []

    def remember(model: Any, *, revision: str | None, **options: Any) -> Any:
        seen.append(revision)
        raise ModelError("not there")

    monkeypatch.setattr("gccompress.planned.open_model", remember)
    for model, revision in ((None, None), (None, "mine"), ("there", None), ("there", "mine")):
        with pytest.raises(ModelError):
            open_planned(plan, model, revision=revision, cache=tmp_path)
    assert seen == ["plans", "mine", None, "mine"]
