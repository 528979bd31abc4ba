"""Polishing: it helps, it never leaves the model worse, and it trains nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress.apply import compress
from gccompress.errors import GccompressError, NumericalError
from gccompress.models import open_model
from gccompress.plan import LowRank, ResizeMlp, ShareInput
from gccompress.polish import PolishOptions, polish, replaced_parameters
from gccompress.roles import Role
from gccompress.text import Windows
from gccompress.view import ModelView
from tests.test_apply import moments_of, plan_for
from tests.test_moments import windows
from tests.tiny import FAMILIES, tiny_model


def compressed_and_dense(family: str, tmp_path: Path) -> tuple[Any, Any]:
    """Return a compressed tiny model and the dense one it came from."""
    model, dense = tiny_model(family, layers=3), tiny_model(family, layers=3)
    view = ModelView(model)
    inner = view.shape(Role.DOWN, 1)[1]
    moves = (
        LowRank(role=Role.Q, layer=0, rank=10),
        ShareInput(roles=(Role.K,), layers=(0, 1), rank=10),
        ResizeMlp(layer=1, width=inner // 2),
    )
    plan = plan_for(open_model(model), moves)
    return compress(view, moments_of(view, tmp_path), plan)[0], dense


def heldout() -> Windows:
    """Return windows that no step sees."""
    return Windows.of(windows(5).ids.flip(1)[3:], "held out")


OPTIONS = PolishOptions(steps=12, rate=3e-3, every=3, patience=5)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_lowers_the_held_out_kl_and_touches_only_what_was_replaced(
    family: str, tmp_path: Path
) -> None:
    model, dense = compressed_and_dense(family, tmp_path)
    trained = replaced_parameters(model, dense)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = {id(parameter) for parameter in trained}
    names = {name for name, value in model.named_parameters() if id(value) in wanted}
    done = polish(model, dense, trained, windows=windows(8), heldout=heldout(), options=OPTIONS)
    assert done.after <= done.before
    assert done.curve[0] == (0, done.before, None)  # not NaN: it is written as JSON
    assert min(one[1] for one in done.curve) == done.after
    changed = {
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed <= names
    assert bool(changed) == (done.best_step > 0)
    layers = {name.split(".")[2] for name in names if ".layers." in name or ".h." in name}
    assert layers == {"0", "1"}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_does_lower_it(tmp_path: Path) -> None:
    model, dense = compressed_and_dense("llama", tmp_path)
    trained = replaced_parameters(model, dense)
    # Judged on the text it trains on: a few steps must fit that.
    done = polish(model, dense, trained, windows=windows(4), heldout=windows(4), options=OPTIONS)
    assert done.best_step > 0
    assert done.after < 0.95 * done.before


def test_when_nothing_improves_the_closed_form_stays_to_the_bit(tmp_path: Path) -> None:
    model, dense = compressed_and_dense("llama", tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wild = PolishOptions(steps=6, rate=10.0, every=1, patience=2)
    trained = replaced_parameters(model, dense)
    done = polish(model, dense, trained, windows=windows(4), heldout=heldout(), options=wild)
    assert done.best_step == 0 and done.after == done.before
    assert done.steps == 2  # patience
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loss_that_is_not_finite_stops_with_the_best_so_far(tmp_path: Path) -> None:
    model, dense = compressed_and_dense("llama", tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trained = replaced_parameters(model, dense)
    with pytest.raises(NumericalError, match="polish step"):
        polish(
            model,
            dense,
            trained,
            windows=windows(4),
            heldout=heldout(),
            options=PolishOptions(steps=20, rate=1e30, every=100),
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_same_seed_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        model, dense = compressed_and_dense("llama", tmp_path)
        trained = replaced_parameters(model, dense)
        polish(model, dense, trained, windows=windows(8), heldout=heldout(), options=OPTIONS)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_nothing_to_train_or_to_judge_by_is_refused(tmp_path: Path) -> None:
    model, dense = compressed_and_dense("llama", tmp_path)
    with pytest.raises(GccompressError, match="nothing to train"):
        polish(model, dense, [], windows=windows(4), heldout=heldout())
    none = Windows.of(torch.zeros(0, 12, dtype=torch.int64), "none")
    with pytest.raises(GccompressError, match="held-out"):
        trained = replaced_parameters(model, dense)
        polish(model, dense, trained, windows=windows(4), heldout=none)


@pytest.mark.parametrize("numbers", [{"rate": 0.0}, {"rate": math.nan}, {"steps": 0}])
def test_numbers_that_cannot_train_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(GccompressError, match="polish"):
        PolishOptions(**numbers)  # type: ignore[arg-type]
