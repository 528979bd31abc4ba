"""Leading directions and Gram alignments of single weights, against decompositions in fp64."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gccompress.errors import NumericalError
from gccompress.gram import Sketch, exact_alignments, mean_error, sketched_alignment
from gccompress.krylov import ANGLE_TOLERANCE, GAP_TOLERANCE, Leading, Search, Stored, ritz
from gccompress.layers import (
    EXACT_UP_TO,
    FULL_UP_TO,
    NO_SCALES,
    Layer,
    Scales,
    Sides,
    Way,
    take_apart,
    way_of,
)
from gccompress.pairs import PairMetrics, compare
from gccompress.subspace import leading_eigenvectors

# Shapes that take each way through the code; the last two as if they were larger than they are.
CASES = [
    (Way.GRAM, (160, 200)),  # dense solver on the Gram matrix
    (Way.GRAM, (400, 300)),  # block Krylov on its powers, tall
    (Way.GRAM, (300, 420)),  # the same, wide
    (Way.STREAM, (500, 560)),
    (Way.STREAM, (620, 500)),
]


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_values(shape: tuple[int, int], values: Tensor, seed: int = 0) -> Tensor:
    """Return a weight of given leading singular values."""
    left = torch.linalg.qr(randn(shape[0], len(values), seed=seed)).Q
    right = torch.linalg.qr(randn(shape[1], len(values), seed=seed + 1)).Q
    return left * values @ right.T


def decaying(
    shape: tuple[int, int], seed: int = 0, first: float = 1.3, step: float = 0.97
) -> Tensor:
    """Return a weight whose values fall by `step`, the first `first` times above the second."""
    values = step ** torch.arange(min(shape), dtype=torch.float64)
    values[0] = first
    return with_values(shape, values, seed)


def leading(weight: Tensor, way: Way, seed: int = 0, scales: Scales = NO_SCALES) -> Leading:
    return take_apart(weight, scales, way, seed=seed)[-1].leading


# --- leading directions ------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "shape"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_leading_directions_are_those_of_the_svd(
    way: Way, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = decaying(shape).to(dtype)
    found = leading(weight, way)
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    assert found.certain and found.settled >= 32
    assert abs(float(found.right[:, 0].double() @ right[0])) > 1 - 1e-6
    assert abs(float(found.left[:, 0].double() @ left[:, 0])) > 1 - 1e-6
    ratios = found.values[:32] / found.values[0]
    torch.testing.assert_close(ratios, values[:32] / values[0], atol=2e-3, rtol=0)
    cosines = torch.linalg.svdvals(right[:8] @ found.right[:, :8].double())
    assert float(cosines.min()) > 0.999
    share = float(found.values[:32].square().sum()) / found.total
    assert share == pytest.approx(
        float(values[:32].square().sum() / values.square().sum()), abs=1e-3
    )


@pytest.mark.parametrize(("way", "shape"), CASES)
def test_the_residual_is_what_it_says(way: Way, shape: tuple[int, int]) -> None:
    weight = decaying(shape, step=0.995)
    found = leading(weight, way)
    scaled = weight * float(found.total) ** 0.5 / weight.norm()
    for i in (0, 7, 31):
        u, v = found.left[:, i].double(), found.right[:, i].double()
        value = float(found.values[i])
        # Searched from the smaller side or the input: one of the two equations holds exactly.
        ways = (scaled.T @ u - value * v, scaled @ v - value * u)
        wanted = max(float(rest.norm()) for rest in ways) / value
        assert float(found.residuals[i]) == pytest.approx(wanted, rel=0.05, abs=5e-6)
    basis = found.right.double()
    torch.testing.assert_close(
        basis.T @ basis, torch.eye(basis.shape[1]).double(), atol=1e-3, rtol=0
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    gap=st.floats(0.0, 0.05),
    case=st.sampled_from(CASES[1:]),
)
def test_what_is_called_certain_is_right_and_a_wide_gap_is_certain(
    seed: int, gap: float, case: tuple[Way, tuple[int, int]]
) -> None:
    way, shape = case
    values = 1.0 / (1.0 + 0.02 * torch.arange(min(shape), dtype=torch.float64))
    values[1:] *= (1.0 - gap) / values[1]
    weight = with_values(shape, values, seed)
    found = leading(weight, way, seed)
    _, _, right = torch.linalg.svd(weight, full_matrices=False)
    assert found.gap == pytest.approx(gap, abs=1e-4)
    if found.certain:
        assert abs(float(found.right[:, 0].double() @ right[0])) > 1 - 1e-6
    if gap > 1.5 * GAP_TOLERANCE:
        assert found.certain
    if gap < 0.9 * GAP_TOLERANCE:
        assert not found.certain


@pytest.mark.parametrize(("way", "shape"), [(Way.FULL, (40, 60)), *CASES])
def test_two_equal_leading_values_are_degenerate(way: Way, shape: tuple[int, int]) -> None:
    values = 0.9 ** torch.arange(min(shape), dtype=torch.float64)
    values[1] = values[0]
    first, second = (with_values(shape, values, seed) for seed in (1, 5))
    [found] = compare(*(take_apart(x, NO_SCALES, way, seed=3) for x in (first, second)))
    assert found.degenerate and found.v1 is None and found.u1 is None
    assert all(gap is not None and abs(gap) < 1e-4 for gap in found.gaps)
    assert found.gram_in is not None and found.angles_in[0] is not None


def test_a_flat_spectrum_never_settles_and_gives_no_angles() -> None:
    """All values equal: any 32 directions are as good as any other."""
    flat = torch.linalg.qr(randn(520, 500)).Q
    found = leading(flat, Way.STREAM)
    assert not found.certain
    noisy = randn(900, 820)
    [pair] = compare(*(take_apart(x, NO_SCALES, Way.STREAM) for x in (noisy, noisy.flip(0))))
    settled = leading(noisy, Way.STREAM).settled
    assert (pair.angles_in[1] is None) == (settled < 32)


def test_seeds_agree() -> None:
    weight = decaying((600, 520), step=0.985)
    one, other = (leading(weight, Way.STREAM, seed) for seed in (0, 77))
    assert abs(float(one.right[:, 0] @ other.right[:, 0])) > 1 - 1e-6
    again = leading(weight, Way.STREAM, 0)
    assert torch.equal(one.right, again.right) and torch.equal(one.left, again.left)


@pytest.mark.parametrize("side", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("way", "shape"), CASES)
def test_folding_is_scaling_the_weight(
    way: Way, shape: tuple[int, int], side: tuple[bool, bool]
) -> None:
    scales = Scales(
        before=0.5 + randn(shape[1], seed=8).abs() if side[0] else None,
        after=0.5 + randn(shape[0], seed=9).abs() if side[1] else None,
    )
    weights = [decaying(shape, seed) for seed in (1, 7)]
    layers = [take_apart(w.float(), scales, way, seed=i) for i, w in enumerate(weights)]
    oracles = [take_apart(scales.fold(w), NO_SCALES, Way.FULL) for w in weights]
    found, wanted = compare(*layers)[1], compare(*oracles)[0]
    assert found.v1 == pytest.approx(wanted.v1, abs=1e-3)
    assert found.u1 == pytest.approx(wanted.u1, abs=1e-3)
    assert found.angles_in[0] == pytest.approx(wanted.angles_in[0], abs=5e-3)
    for value, error, exact in grams(found, wanted):
        assert abs(value - exact) <= 4 * error + 1e-4 * exact


def grams(found: PairMetrics, wanted: PairMetrics) -> list[tuple[float, float, float]]:
    rows = [
        (found.gram_in, found.gram_in_error, wanted.gram_in),
        (found.gram_out, found.gram_out_error, wanted.gram_out),
    ]
    assert all(value is not None for row in rows for value in row)
    return rows  # type: ignore[return-value]


@pytest.mark.parametrize(("way", "shape"), CASES)
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_a_weight_of_low_rank(way: Way, shape: tuple[int, int], rank: int) -> None:
    values = 0.8 ** torch.arange(rank, dtype=torch.float64)
    weight = with_values(shape, values)
    found = leading(weight, way)
    assert found.whole and len(found.values) == rank
    assert found.certain
    [pair] = compare(*(take_apart(weight, NO_SCALES, way, seed=s) for s in (1, 2)))
    assert pair.v1 == pytest.approx(1.0, abs=1e-5)
    assert (pair.angles_in[0] is None) == (rank < 8) and pair.angles_in[1] is None
    assert pair.sigma2_share == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(("way", "shape"), CASES)
@pytest.mark.parametrize("power", [-30, 18, 30])
def test_scale_does_not_matter(way: Way, shape: tuple[int, int], power: int) -> None:
    weight = decaying(shape)
    [pair] = compare(
        take_apart(weight.float(), NO_SCALES, way, seed=1),
        take_apart((weight * 10.0**power).float(), NO_SCALES, way, seed=9),
    )
    assert pair.v1 == pytest.approx(1.0, abs=1e-5) and pair.u1 == pytest.approx(1.0, abs=1e-5)
    assert pair.gram_in is not None and math.isfinite(pair.gram_in)


@pytest.mark.parametrize(("way", "shape"), [(Way.FULL, (40, 60)), *CASES])
def test_zero_and_non_finite_weights(way: Way, shape: tuple[int, int]) -> None:
    zero = torch.zeros(shape)
    [pair] = compare(*(take_apart(x, NO_SCALES, way) for x in (zero, decaying(shape).float())))
    known = dataclasses.asdict(pair)
    assert not pair.degenerate
    for name in ("v1", "u1", "gram_in", "gram_out", "sigma2_in", "sigma2_share"):
        assert known[name] is None
    assert pair.angles_in == (None, None)
    for bad in (math.nan, math.inf):
        weight = decaying(shape).to(torch.bfloat16)
        weight[3, 5] = bad
        with pytest.raises(NumericalError, match="layer 9: weight has 1 of "):
            take_apart(weight, NO_SCALES, way, name="layer 9: weight")


def test_a_weight_may_be_a_transposed_view() -> None:
    """GPT-2's are."""
    weight = decaying((560, 500)).float()
    straight = leading(weight, Way.STREAM, 3)
    turned = leading(weight.T.contiguous().T, Way.STREAM, 3)
    torch.testing.assert_close(straight.values, turned.values)


def test_the_way_is_chosen_by_the_smaller_side_of_any_layer() -> None:
    assert way_of([]) is Way.FULL
    assert way_of([(FULL_UP_TO, 9999)]) is Way.FULL
    assert way_of([(9999, FULL_UP_TO + 1)]) is Way.GRAM
    assert way_of([(EXACT_UP_TO, EXACT_UP_TO), (64, 64)]) is Way.GRAM
    assert way_of([(64, 64), (EXACT_UP_TO + 1, 9999)]) is Way.STREAM
    assert way_of([(8192, 28672)], full=True) is Way.FULL
    assert FULL_UP_TO < EXACT_UP_TO


# --- the search itself -------------------------------------------------------------------------


def test_a_restarted_search_ends_where_an_unrestarted_one_does() -> None:
    matrix = decaying((300, 300), step=0.99)
    gram = (matrix.T @ matrix).float()
    start = randn(16, 300).float()
    search = Search(
        block=16, count=32, largest=260, first_check=2, check_every=1, settle=16,
        settle_blocks=16, blocks=16,
    )  # fmt: skip
    free = ritz(lambda rows: (rows @ gram, None), start, search)
    cramped = dataclasses.replace(search, largest=80, blocks=40, settle_blocks=40)
    restarted = ritz(lambda rows: (rows @ gram, None), start, cramped)
    for found in (free, restarted):
        assert float(found.residuals[:16].max()) <= 1.1 * ANGLE_TOLERANCE
    torch.testing.assert_close(free.squares[:8], restarted.squares[:8], rtol=1e-3, atol=0)


@pytest.mark.parametrize("case", ["decaying", "flat", "outlier", "rank 5", "zero", "one entry"])
def test_subspace_iteration_finds_the_leading_eigenvectors(case: str) -> None:
    weight = {
        "decaying": decaying((320, 300)),
        "flat": torch.linalg.qr(randn(320, 300)).Q,
        "outlier": decaying((320, 300), first=100.0),
        "rank 5": with_values((320, 300), 0.8 ** torch.arange(5, dtype=torch.float64)),
        "zero": torch.zeros(320, 300, dtype=torch.float64),
        "one entry": torch.eye(320, 300, dtype=torch.float64) * torch.eye(320, 300)[0],
    }[case]
    gram = weight.T @ weight
    gram = (gram / gram.trace().clamp_min(1e-30)).float()
    found = leading_eigenvectors(gram, randn(48, 300).float(), 32)
    assert (found is None) == (case in ("rank 5", "zero", "one entry"))
    if found is None:
        return
    if case == "flat":  # every vector is one
        assert float(1.0 - found.squares[1] / found.squares[0]) < GAP_TOLERANCE
        return
    values, vectors = torch.linalg.eigh(gram.double())
    torch.testing.assert_close(found.squares[0], values[-1], rtol=1e-4, atol=0)
    assert abs(float(found.vectors[0].double() @ vectors[:, -1])) > 1 - 1e-6
    torch.testing.assert_close(found.vectors @ found.vectors.T, torch.eye(48), atol=1e-4, rtol=0)


def test_a_folded_direction_with_no_part_in_the_raw_start_is_found() -> None:
    """The scales lift one of the raw weight's weakest directions above all others."""
    for way, width in ((Way.GRAM, 300), (Way.STREAM, 500)):
        weight = torch.zeros(600, width)
        weight.diagonal().copy_(torch.linspace(1.0, 0.1, width))
        scale = torch.ones(width)
        scale[-3] = 100.0
        found = leading(weight, way, scales=Scales(scale, None))
        assert found.certain
        assert abs(float(found.right[width - 3, 0])) > 1 - 1e-6


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("shape", [(600, 400), (400, 600)])
def test_alignments_from_rounded_products(
    fast: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccompress.gram.multiplies_bf16", lambda device: fast)
    scales = Scales(0.5 + randn(shape[1], seed=8).abs(), None)
    shared = decaying(shape, 3)
    weights = [shared + 0.05 * randn(*shape, seed=seed) for seed in (1, 2)]
    layers = [take_apart(w.float(), scales, Way.GRAM, seed=4 * i) for i, w in enumerate(weights)]
    oracles = [take_apart(w, scales, Way.FULL) for w in weights]
    for found, wanted in zip(compare(*layers), compare(*oracles), strict=True):
        assert found.gram_in == pytest.approx(wanted.gram_in, rel=1e-3 if fast else 1e-5)
        assert found.gram_out == pytest.approx(wanted.gram_out, rel=1e-3 if fast else 1e-5)


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_products_do_not_depend_on_the_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stored, "BLOCK_BYTES", rows * 4 * 50)
    weight, right = randn(100, 50, seed=1), randn(50, 4, seed=2)
    left, ones = randn(100, 3, seed=3), torch.ones(1, 100)
    stored = Stored(weight.bfloat16(), torch.device("cpu"))
    wide = weight.bfloat16().double()
    image, product, energies = stored.survey(right.float(), left.float(), ones)
    torch.testing.assert_close(image.double(), wide @ right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(product.double(), left.T @ wide, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(energies[0].double(), wide.square().sum(0), rtol=1e-4, atol=1e-4)
    weights = randn(100, seed=4)
    image, product = stored.visit(right.float(), weights.float())
    wanted = (weights[:, None] * (wide @ right)).T @ wide
    torch.testing.assert_close(product.double(), wanted, rtol=1e-3, atol=1e-2)


# --- Gram alignment ----------------------------------------------------------------------------


def sketches(weight: Tensor, seed: int) -> Sides:
    [variant] = take_apart(weight, NO_SCALES, Way.STREAM, seed=seed)
    assert isinstance(variant.gram, Sides)
    return variant.gram


def test_estimated_alignments_are_within_their_errors() -> None:
    """Many draws: within 4 standard errors each, and the errors neither too large nor too small."""
    shape = (500, 560)
    shared = decaying(shape, seed=1)
    first, second = shared + decaying(shape, seed=5), shared + decaying(shape, seed=9)
    [exact] = compare(*(take_apart(x, NO_SCALES, Way.FULL) for x in (first, second)))
    scores = []
    for draw in range(12):
        layers = [
            take_apart(x.float(), NO_SCALES, Way.STREAM, seed=100 * draw + 50 * i)
            for i, x in enumerate((first, second))
        ]
        [found] = compare(*layers)
        for value, error, wanted in grams(found, exact):
            assert 0.0 < error < 0.1 * wanted
            scores.append((value - wanted) / error)
    assert max(abs(score) for score in scores) < 4.0
    spread = math.sqrt(sum(score**2 for score in scores) / len(scores))
    assert 0.4 < spread < 1.8


def test_a_dominant_direction_adds_nothing_to_the_error() -> None:
    """It is taken out exactly; only the rest is sampled."""
    shape = (500, 560)
    noise = [randn(*shape, seed=seed) for seed in (1, 2)]
    strong = (
        200.0
        * torch.linalg.qr(randn(500, 1, seed=3)).Q
        @ torch.linalg.qr(randn(560, 1, seed=4)).Q.T
    )
    layers = [take_apart(x + strong, NO_SCALES, Way.STREAM, seed=i) for i, x in enumerate(noise)]
    [found] = compare(*layers)
    [exact] = compare(*(take_apart(x + strong, NO_SCALES, Way.FULL) for x in noise))
    for value, error, wanted in grams(found, exact):
        assert error < 0.02 * wanted
        assert abs(value - wanted) < 4 * error + 1e-3 * wanted


def test_the_same_sketch_of_both_layers_would_be_biased() -> None:
    """Why the seeds of layers differ: with one Z the estimate is of something else."""
    weight = randn(500, 560, seed=1)
    same = sketches(weight, 4)
    other = sketches(weight, 8)
    truth = float((weight.T @ weight).square().sum() / weight.square().sum() ** 2)
    biased, fair = (
        sketched_alignment(same.inner, same.inner),
        sketched_alignment(same.inner, other.inner),
    )
    assert biased is not None and fair is not None
    assert abs(fair.value - truth) < 4 * fair.error
    assert abs(biased.value - truth) > 4 * biased.error


def test_exact_alignments_share_products_and_know_other_shapes() -> None:
    def layer(shape: tuple[int, int], seed: int) -> Layer:
        scales = Scales(0.5 + randn(shape[1], seed=3).abs(), None)
        return take_apart(decaying(shape, seed), scales, Way.GRAM)

    for one, other in (
        ((200, 160), (200, 160)),
        ((150, 200), (150, 200)),
        ((200, 160), (240, 160)),
    ):
        a, b = layer(one, 1), layer(other, 5)
        rows = exact_alignments(
            tuple(v.gram for v in a),  # type: ignore[misc]
            tuple(v.gram for v in b),  # type: ignore[misc]
        )
        for variant, (inner, outer) in enumerate(rows):
            scale = 0.5 + randn(one[1], seed=3).abs() if variant else torch.ones(one[1]).double()
            first, second = decaying(one, 1) * scale, decaying(other, 5) * scale
            total = float(first.square().sum() * second.square().sum())
            assert inner is not None
            wanted = float((first @ second.T).square().sum()) / total
            assert inner.value == pytest.approx(wanted, rel=1e-4)
            assert (outer is None) == (one != other)
            if outer is not None:
                wanted = float((first.T @ second).square().sum()) / total
                assert outer.value == pytest.approx(wanted, rel=1e-4)


def test_the_error_of_a_mean() -> None:
    assert mean_error([]) is None and mean_error([None]) is None
    assert mean_error([0.0, 0.0]) == 0.0
    assert mean_error([0.1, None, 0.1]) == pytest.approx(math.sqrt(2 * 2 * 0.01) / 2)


def test_sketches_of_other_widths_or_of_nothing_are_not_compared() -> None:
    empty = Sketch(torch.zeros(5, 0), torch.zeros(5, 64), 0.0)
    full = Sketch(torch.zeros(5, 0), torch.ones(5, 64), 1.0)
    wider = Sketch(torch.zeros(6, 0), torch.ones(6, 64), 1.0)
    assert sketched_alignment(empty, full) is None
    assert sketched_alignment(full, wider) is None
