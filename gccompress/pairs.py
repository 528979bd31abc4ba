"""What two adjacent layers of one role have in common."""

from dataclasses import dataclass

from torch import Tensor

from gccompress import spectra
from gccompress.gram import Alignment, ExactGram, exact_alignments, sketched_alignment
from gccompress.krylov import Leading
from gccompress.layers import (
    ANGLE_COUNTS,
    MATCHED,
    NO_SCALES,
    Layer,
    Sides,
    Variant,
    Way,
    take_apart,
)


@dataclass(frozen=True)
class PairMetrics:
    """One role in two adjacent layers; None where it cannot be measured.

    That is: a zero weight, too low a rank, other shapes, a leading direction that is not one.

    Attributes:
        v1: `|cos|` of the leading right singular vectors (input space).
        u1: `|cos|` of the leading left singular vectors (output space).
        degenerate: the leading value of a layer is within tolerance of its second, or could not
            be told apart from it; then v1 and u1 are None.
        gaps: `(s_1 - s_2) / s_1` of the two layers.
        residuals: `||W^T u - s v|| / s` of their leading pairs.
        gram_in: sigma^2-weighted alignment of all right vectors, a multiple of random (`1 / in`).
        gram_out: the same of all left vectors, a multiple of random (`1 / out`).
        gram_in_error: standard error of gram_in, 0 where it is exact.
        gram_out_error: the same of gram_out.
        sigma2_in: `sum_i w_i |<v_i, v'_i>|`, `w_i = s_i^2 / sum s^2`, over the directions known.
        sigma2_out: the same of the left vectors.
        sigma2_share: share of the first weight's energy `||W||_F^2` in those directions.
        angles_in: mean cosine of the principal angles, one per `ANGLE_COUNTS`, input space.
        angles_out: the same in the output space.
    """

    v1: float | None
    u1: float | None
    degenerate: bool
    gaps: tuple[float | None, float | None]
    residuals: tuple[float | None, float | None]
    gram_in: float | None
    gram_out: float | None
    gram_in_error: float | None
    gram_out_error: float | None
    sigma2_in: float | None
    sigma2_out: float | None
    sigma2_share: float | None
    angles_in: tuple[float | None, ...]
    angles_out: tuple[float | None, ...]


def pair_metrics(first: Tensor, second: Tensor) -> PairMetrics:
    """Measure two weights `[out, in]` of one role in adjacent layers, whole and in fp64.

    A side on which the shapes differ is not measured. Formulas: METHOD section 1 (`spectra`).
    """
    layers = [take_apart(weight, NO_SCALES, Way.FULL) for weight in (first, second)]
    return compare(layers[0], layers[1])[0]


def compare(first: Layer, second: Layer) -> tuple[PairMetrics, ...]:
    """Measure two adjacent layers, raw and folded."""
    grams = _alignments(first, second)
    return tuple(
        _compare(a, b, inner, outer)
        for a, b, (inner, outer) in zip(first, second, grams, strict=True)
    )


def _alignments(first: Layer, second: Layer) -> list[tuple[Alignment | None, Alignment | None]]:
    pairs = [(a.gram, b.gram) for a, b in zip(first, second, strict=True)]
    exact = [(a, b) for a, b in pairs if isinstance(a, ExactGram) and isinstance(b, ExactGram)]
    if exact:
        return exact_alignments(tuple(a for a, _ in exact), tuple(b for _, b in exact))
    return [
        (sketched_alignment(a.inner, b.inner), sketched_alignment(a.outer, b.outer))
        for a, b in pairs
        if isinstance(a, Sides) and isinstance(b, Sides)
    ]


def _compare(
    first: Variant, second: Variant, inner: Alignment | None, outer: Alignment | None
) -> PairMetrics:
    a, b = first.leading, second.leading
    same_out, same_in = (x == y for x, y in zip(first.shape, second.shape, strict=True))
    measured = len(a.values) > 0 and len(b.values) > 0
    certain = a.certain and b.certain
    v1, sigma2_in, angles_in = _side(a, b, a.right, b.right) if same_in else _UNKNOWN
    u1, sigma2_out, angles_out = _side(a, b, a.left, b.left) if same_out else _UNKNOWN
    width_out, width_in = first.shape
    return PairMetrics(
        v1=v1 if certain else None,
        u1=u1 if certain else None,
        degenerate=measured and not certain,
        gaps=(a.gap, b.gap),
        residuals=(_first(a.residuals), _first(b.residuals)),
        gram_in=None if inner is None else inner.value * width_in,
        gram_out=None if outer is None else outer.value * width_out,
        gram_in_error=None if inner is None else inner.error * width_in,
        gram_out_error=None if outer is None else outer.error * width_out,
        sigma2_in=sigma2_in,
        sigma2_out=sigma2_out,
        sigma2_share=_share(a, b),
        angles_in=angles_in,
        angles_out=angles_out,
    )


def _first(values: Tensor) -> float | None:
    return float(values[0]) if len(values) else None


_Side = tuple[float | None, float | None, tuple[float | None, ...]]
_UNKNOWN: _Side = (None, None, (None,) * len(ANGLE_COUNTS))


def _side(first: Leading, second: Leading, basis: Tensor, next_basis: Tensor) -> _Side:
    """Measure one space from the bases `[d, k]` of its singular vectors."""
    count = _matched(first, second)
    matched = spectra.matched_alignment(
        first.values[:count].to(basis), basis[:, :count], next_basis[:, : _known(second)]
    )
    settled = min(first.settled, second.settled)
    angles = tuple(
        spectra.mean_angle_cosine(basis, next_basis, k) if k <= settled else None
        for k in ANGLE_COUNTS
    )
    return spectra.leading_cosine(basis, next_basis), matched, angles


def _known(layer: Leading) -> int:
    return len(layer.values) if layer.whole else min(layer.settled, MATCHED)


def _matched(first: Leading, second: Leading) -> int:
    """Return how many directions of the first layer the index-matched alignment covers."""
    if first.whole and second.whole:
        return len(first.values)
    return min(_known(first), _known(second))


def _share(first: Leading, second: Leading) -> float | None:
    count = _matched(first, second)
    if count == 0 or first.total == 0.0:
        return None
    return min(1.0, float(first.values[:count].double().square().sum()) / first.total)
