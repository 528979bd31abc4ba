"""Factorisations against brute force: optimality, refits, degenerate moments, rounding."""

import pytest
import torch

from gccompress import linalg
from gccompress.errors import NumericalError
from gccompress.linalg import Side, Weighted
from gccompress.roles import Space


def positive(n: int, seed: int, rank: int | None = None) -> torch.Tensor:
    """Return a random positive (semi-)definite matrix of the given rank."""
    x = torch.randn(rank or 3 * n, n, dtype=torch.float64, generator=torch.manual_seed(seed))
    return x.T @ x / len(x)


def matrix(rows: int, cols: int, seed: int = 0) -> Weighted:
    """Return a random weight with random moments."""
    w = torch.randn(rows, cols, dtype=torch.float64, generator=torch.manual_seed(seed))
    return Weighted(w, positive(cols, seed + 1), positive(rows, seed + 2))


def test_loss_is_the_expected_square_of_the_gradient_times_the_output_change() -> None:
    one = matrix(5, 7)
    other = one.weight + torch.randn_like(one.weight)
    d = one.weight - other
    by_hand = 0.5 * torch.trace(one.a @ d @ one.g @ d.T)
    assert one.loss(other) == pytest.approx(float(by_hand))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 4), (4, 1)])
@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
def test_low_rank_is_optimal_and_its_tail_is_its_loss(shape: tuple[int, int], space: Space) -> None:
    one = matrix(*shape)
    saved = linalg.spectrum([linalg.side(one, space)], "w")
    # The oracle: a truncated SVD of A^(1/2) W G^(1/2).
    left, right = (_root(m) for m in (one.a, one.g))
    singular = torch.linalg.svdvals(left @ one.weight @ right)
    for rank in range(1, min(shape) + 1):
        factors = linalg.factor([one], space, rank, "w")
        oracle = float(singular[rank:].square().sum() / 2)
        assert one.loss(factors.product(0)) == pytest.approx(oracle, abs=1e-8)
        assert float(saved[rank:].sum()) == pytest.approx(oracle, abs=1e-8)


@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
def test_full_rank_gives_the_weights_back(space: Space) -> None:
    group = [matrix(6, 6, seed) for seed in (1, 11, 21)]
    factors = linalg.factor(group, space, 6, "w")
    for index, one in enumerate(group):
        torch.testing.assert_close(factors.product(index), one.weight, atol=1e-8, rtol=0)


@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
def test_refit_is_the_best_coefficient_and_never_above_the_tail(space: Space) -> None:
    group = [matrix(5, 8, seed) for seed in (1, 11, 21)]
    rank = 3
    factors = linalg.factor(group, space, rank, "w")
    loss = sum(one.loss(factors.product(i)) for i, one in enumerate(group))
    tail = float(linalg.spectrum([linalg.side(one, space) for one in group], "w")[rank:].sum())
    assert loss <= tail + 1e-9
    for index, one in enumerate(group):
        coef = factors.coefs[index].clone().requires_grad_()
        w = coef @ factors.basis if space is Space.INPUT else factors.basis @ coef
        d = one.weight - w
        (0.5 * ((one.a @ d) * (d @ one.g)).sum()).backward()
        assert coef.grad is not None
        assert float(coef.grad.abs().max()) < 1e-7


@pytest.mark.parametrize("space", [Space.INPUT, Space.OUTPUT])
def test_identical_matrices_share_for_free(space: Space) -> None:
    one = matrix(6, 8)
    alone = linalg.spectrum([linalg.side(one, space)], "w")
    together = linalg.spectrum([linalg.side(one, space)] * 3, "w")
    torch.testing.assert_close(together, 3 * alone)


def test_a_planted_common_input_space_is_cheaper_to_share_than_the_output_space() -> None:
    generator = torch.manual_seed(0)
    basis = torch.randn(3, 12, dtype=torch.float64, generator=generator)
    eye = torch.eye(12, dtype=torch.float64)
    group = [
        Weighted(torch.randn(12, 3, dtype=torch.float64, generator=generator) @ basis, eye, eye)
        for _ in range(4)
    ]
    tails = {
        space: float(linalg.spectrum([linalg.side(w, space) for w in group], "w")[3:].sum())
        for space in (Space.INPUT, Space.OUTPUT)
    }
    assert tails[Space.INPUT] == pytest.approx(0.0, abs=1e-8)
    assert tails[Space.OUTPUT] > 1.0


def test_sides_balanced_and_product_unchanged() -> None:
    one = matrix(6, 9)
    for space in (Space.INPUT, Space.OUTPUT):
        factors = linalg.factor([one], space, 4, "w")
        along = 1 if space is Space.INPUT else 0
        torch.testing.assert_close(
            factors.basis.square().sum(along), factors.coefs[0].square().sum(1 - along)
        )


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_rank_deficient_moments_are_damped_and_say_so(tokens: int) -> None:
    w = torch.randn(6, 8, dtype=torch.float64, generator=torch.manual_seed(0))
    one = Weighted(w, positive(8, 1, tokens), positive(6, 2, tokens))
    for space in (Space.INPUT, Space.OUTPUT):
        factors = linalg.factor([one], space, 4, "w")
        assert 0 < factors.jitter <= linalg.LARGEST_JITTER
        assert all(bool(torch.isfinite(t).all()) for t in (factors.basis, *factors.coefs))
        # With the true rank of the data, what the data can see is reproduced.
        full = linalg.factor([one], space, 6, "w")
        assert one.loss(full.product(0)) < 1e-6 * one.loss(torch.zeros_like(w))


def test_a_dead_moment_costs_nothing_and_gives_finite_factors() -> None:
    w = torch.randn(4, 5, dtype=torch.float64)
    one = Weighted(w, linalg.shrink(torch.zeros(5, 5), 0.0), linalg.shrink(torch.zeros(4, 4), 0.1))
    assert one.loss(torch.zeros_like(w)) < 1e-100
    factors = linalg.factor([one], Space.INPUT, 2, "w")
    assert bool(torch.isfinite(factors.product(0)).all())


def test_not_finite_and_negative_moments_are_refused_by_name() -> None:
    bad = torch.eye(3, dtype=torch.float64)
    bad[1, 1] = float("nan")
    with pytest.raises(NumericalError, match="layer 7 k.*not finite"):
        linalg.cholesky(bad, "layer 7 k")
    with pytest.raises(NumericalError, match="layer 7 k.*not positive"):
        linalg.cholesky(torch.diag(torch.tensor([1.0, -1.0, 1.0]).double()), "layer 7 k")


def test_shrink_keeps_the_trace_and_symmetry() -> None:
    m = positive(5, 3)
    for share in (0.0, 0.03, 0.5, 0.99):
        shrunk = linalg.shrink(m, share)
        assert float(shrunk.trace()) == pytest.approx(float(m.trace()))
        torch.testing.assert_close(shrunk, shrunk.T)


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 64), (8, 16), (8, 64)])
def test_round_to_nearest_is_within_half_a_step_and_exact_on_its_own_grid(
    bits: int, group: int
) -> None:
    w = torch.randn(5, 70, generator=torch.manual_seed(0))
    rounded = linalg.round_to_nearest(w, bits, group)
    assert rounded.shape == w.shape
    width = min(group, 70)
    for start in range(0, 70, width):
        part = w[:, start : start + width]
        step = (part.amax(1).clamp_min(0) - part.amin(1).clamp_max(0)) / (2**bits - 1)
        error = (rounded[:, start : start + width] - part).abs().amax(1)
        # The scale is a float16 and the zero point whole: a little over half a step at the ends.
        assert bool((error <= step * 1.06 + 1e-6).all())
    assert bool((linalg.round_to_nearest(torch.zeros(2, 8), bits, group) == 0).all())


def test_sides_of_one_matrix_have_the_same_nonzero_spectrum() -> None:
    one = matrix(4, 9)
    inside = linalg.spectrum([linalg.side(one, Space.INPUT)], "w")
    outside = linalg.spectrum([linalg.side(one, Space.OUTPUT)], "w")
    torch.testing.assert_close(inside[:4], outside)
    assert float(inside[4:].abs().max()) < 1e-9


def test_spectrum_of_a_zero_weight_is_zero() -> None:
    zero = Side(torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64))
    assert float(linalg.spectrum([zero], "w").abs().max()) == 0.0


def _root(m: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(m)
    return vectors @ values.clamp_min(0).sqrt().diag() @ vectors.T
