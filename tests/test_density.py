"""Energy spectra: exact where small, and near the truth where estimated."""

import numpy as np
import pytest
import torch

from gccompress import density
from gccompress.density import squared_values
from gccompress.roles import Space


def decaying(rows: int, cols: int, seed: int, power: float = 1.0) -> torch.Tensor:
    """Return a weight whose singular values fall like a power of their index."""
    generator = torch.Generator().manual_seed(seed)
    side = min(rows, cols)
    left = torch.linalg.qr(torch.randn(rows, side, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(cols, side, generator=generator))[0]
    return left * (1 + torch.arange(side)) ** -power @ right.T


def oracle(weights: list[torch.Tensor], space: Space) -> np.ndarray:
    """Return squared singular values of the stack of normalised weights."""
    scaled = [w.double() / w.double().norm() for w in weights]
    stack = torch.cat(scaled, 0 if space is Space.INPUT else 1)
    return torch.linalg.svdvals(stack).square().numpy()


@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
@pytest.mark.parametrize(("rows", "cols"), [(30, 50), (50, 30), (40, 40)])
def test_small_stacks_are_exact(space: Space, rows: int, cols: int) -> None:
    weights = [decaying(rows, cols, seed) for seed in range(2)]
    found = squared_values(weights, space)
    wanted = oracle(weights, space)
    np.testing.assert_allclose(found[: len(wanted)], wanted[: len(found)], atol=1e-6)
    assert found.sum() == pytest.approx(2.0, abs=1e-5)


@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
@pytest.mark.parametrize("power", [0.3, 1.0])
def test_estimated_tails_are_near_the_true_ones(
    space: Space, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [decaying(300, 400, seed, power) for seed in range(2)]
    wanted = oracle(weights, space)
    monkeypatch.setattr(density, "EXACT_UP_TO", 10)
    found = squared_values(weights, space)
    assert len(found) >= len(wanted[wanted > 1e-12]) or len(found) == len(wanted)
    assert (np.diff(found) <= 1e-12).all()
    for rank in (20, 60, 120, 200):
        assert found[rank:].sum() == pytest.approx(wanted[rank:].sum(), rel=0.1, abs=0.02)


def test_the_same_seed_gives_the_same_estimate_and_dtype_matters_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(density, "EXACT_UP_TO", 10)
    weight = decaying(200, 300, 0)
    first = squared_values([weight], Space.INPUT)
    assert (squared_values([weight], Space.INPUT) == first).all()
    half = squared_values([weight.bfloat16()], Space.INPUT)
    assert half[50:].sum() == pytest.approx(first[50:].sum(), abs=0.02)


def test_degenerate_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = torch.zeros(20, 30)
    assert squared_values([zero], Space.INPUT).sum() == 0.0
    monkeypatch.setattr(density, "EXACT_UP_TO", 4)
    assert squared_values([zero], Space.INPUT).sum() == 0.0
    one = squared_values([torch.ones(20, 30)], Space.INPUT)
    assert one[0] == pytest.approx(1.0, abs=0.05) and one.sum() == pytest.approx(1.0)
