"""Moments that say little or nothing: each is damped, says so, and gives a plan that works."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress.apply import apply_plan
from gccompress.calibration import CalibrationOptions
from gccompress.models import LoadedModel, open_model
from gccompress.plan import Plan
from gccompress.planner import PlanOptions, budget_of, choose
from gccompress.roles import Role
from gccompress.view import ModelView
from tests.tiny import tiny_folder

SEQLEN = 32


def dead_channel(view: ModelView) -> None:
    """Let one input channel of attention and MLP be zero in every layer."""
    for layer in range(view.num_layers):
        block = view.layer(layer)
        for name in ("input_layernorm", "post_attention_layernorm"):
            block.get_submodule(name).weight[3] = 0.0  # type: ignore[index, operator]


def dead_neurons(view: ModelView) -> None:
    """Let five neurons of every MLP never be active."""
    for layer in range(view.num_layers):
        for role in (Role.GATE, Role.UP):
            weight = view.weight(role, layer).clone()
            weight[7:12] = 0.0
            view.set_weight(role, layer, weight)


def dead_head(view: ModelView) -> None:
    """Let the first KV head of every layer write nothing."""
    for layer in range(view.num_layers):
        weight = view.weight(Role.V, layer).clone()
        weight[: view.model.config.head_dim] = 0.0
        view.set_weight(Role.V, layer, weight)


def dead_layer(view: ModelView) -> None:
    """Let one layer write nothing, so that nothing in it has a gradient."""
    for role in (Role.O, Role.DOWN):
        view.set_weight(role, 1, torch.zeros_like(view.weight(role, 1)))


def nothing(view: ModelView) -> None:
    """Leave the model as it is."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Ordinary words, enough of them."""
    file = tmp_path / "text.txt"
    words = "one two three of the quick brown foxes jump over lazy dogs while it rains outside"
    file.write_text(" ".join(f"{word} {i % 7}" for i in range(99) for word in words.split()))
    return file


def dead_model(folder: Path, kill: Callable[[ModelView], None]) -> LoadedModel:
    """Return a tiny Llama of which something is dead, saved so that plans find it again."""
    view = ModelView(open_model(tiny_folder(folder / "whole", "llama"), device="cpu").model)
    with torch.no_grad():
        kill(view)
    view.model.save_pretrained(folder / "whole")
    return open_model(folder / "whole", device="cpu", cache_dir=folder)


def plan_and_apply(loaded: LoadedModel, source: str, tmp_path: Path, **calibration: Any) -> Plan:
    """Return a plan by every strategy at once, after carrying it out and checking its numbers."""
    wanted = {"tokens": 8 * SEQLEN, "seqlen": SEQLEN, "heldout_tokens": 2 * SEQLEN} | calibration
    options = PlanOptions(multiple=4, spaces="paper", probe="all")
    choice = choose(
        loaded,
        budget_of(0.7),
        options=options,
        calibration=CalibrationOptions(source, **wanted),
        cache_dir=str(tmp_path),
    )
    for one in choice.candidates:
        if one.prediction is None:
            continue
        assert math.isfinite(one.prediction.loss) and one.prediction.loss >= 0
        assert one.prediction.ppl is not None and math.isfinite(one.prediction.ppl)
    plan = choice.plan
    assert plan.options["damping_a"] == 0.03 and plan.options["damping_g"] == 0.003
    applied = apply_plan(plan, loaded, None, cache_dir=str(tmp_path))
    ids = torch.arange(3, 20)[None]
    assert bool(torch.isfinite(applied.model(input_ids=ids).logits).all())
    assert applied.jitter == 0.0  # the stated damping was enough
    return plan


DEAD = {
    dead_channel: ("q", "gate"),
    dead_neurons: ("down",),
    dead_head: ("o",),
    dead_layer: (),
    nothing: (),
}


@pytest.mark.parametrize("kill", DEAD, ids=lambda kill: kill.__name__)
def test_what_is_dead_is_damped_said_and_planned(
    kill: Callable[[ModelView], None], text: Path, tmp_path: Path
) -> None:
    plan = plan_and_apply(dead_model(tmp_path, kill), str(text), tmp_path)
    silent = [note for note in plan.notes if "never active" in note]
    assert [note.partition(":")[0] for note in silent] == list(DEAD[kill])


def test_constant_text(tmp_path: Path) -> None:
    file = tmp_path / "constant.txt"
    file.write_text("a" * 5000)
    plan_and_apply(dead_model(tmp_path, nothing), str(file), tmp_path)


def test_one_window_of_fewer_tokens_than_channels(text: Path, tmp_path: Path) -> None:
    plan = plan_and_apply(dead_model(tmp_path, nothing), str(text), tmp_path, tokens=SEQLEN)
    assert any("its moment has rank" in note for note in plan.notes)


def test_everything_dead_at_once(tmp_path: Path) -> None:
    def kill(view: ModelView) -> None:
        for one in (dead_channel, dead_neurons, dead_head, dead_layer):
            one(view)

    file = tmp_path / "constant.txt"
    file.write_text("a" * 5000)
    plan_and_apply(dead_model(tmp_path, kill), str(file), tmp_path, tokens=SEQLEN)
