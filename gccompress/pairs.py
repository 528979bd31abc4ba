"""What is kept of one layer's weight, and what two adjacent layers then have in common.

Three ways, chosen by the smaller side of a role's weights: see `Way`.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from gccompress import spectra
from gccompress.errors import NumericalError
from gccompress.gram import (
    EXACT_UP_TO,
    SKETCH,
    Alignment,
    ExactGram,
    Sketch,
    exact_alignments,
    sketch,
    sketched_alignment,
)
from gccompress.krylov import RANK_FLOOR, Leading, Ritz, Search, Stored, random_rows, ritz

ANGLE_COUNTS = (8, 32)
MATCHED = 32  # leading directions in the index-matched alignment of a weight not fully decomposed

FULL_UP_TO = 128  # smaller side up to which a weight is decomposed whole, in fp64
DENSE_UP_TO = 256  # and up to which its Gram matrix is, in fp32

_BLOCK = 48
_LARGE = Search(
    block=_BLOCK, count=_BLOCK, largest=8 * _BLOCK, first_check=2, check_every=1,
    settle=max(ANGLE_COUNTS), settle_blocks=8, blocks=24,
)  # fmt: skip
# With the Gram matrix at hand products are cheap and bases are not: narrow blocks, and a power of
# the matrix, in which what is wanted stands further apart.
_NARROW = 16
_POWER = 3


class Way(StrEnum):
    """How the weights of a role are taken apart.

    FULL: the whole decomposition in fp64 (smaller side up to `FULL_UP_TO`, or asked for).
    GRAM: the Gram matrix of the smaller side in fp32, up to `gram.EXACT_UP_TO`; its leading
        vectors dense up to `DENSE_UP_TO`, else by block Krylov, dense again where that fails.
    STREAM: block Krylov on the weight itself, Gram alignments estimated.
    """

    FULL = "full"
    GRAM = "gram"
    STREAM = "stream"


def way_of(shapes: Sequence[tuple[int, int]], *, full: bool = False) -> Way:
    """Return the way for a role whose layers have these shapes `(out, in)`."""
    side = max((min(shape) for shape in shapes), default=0)
    if full or side <= FULL_UP_TO:
        return Way.FULL
    return Way.GRAM if side <= EXACT_UP_TO else Way.STREAM


@dataclass(frozen=True)
class Scales:
    """Norm scales to fold in: `before` `[in]`, `after` `[out]`; None is none."""

    before: Tensor | None
    after: Tensor | None

    @property
    def empty(self) -> bool:
        """Whether folding would change nothing."""
        return self.before is None and self.after is None

    def fold(self, weight: Tensor) -> Tensor:
        """Return `diag(after) W diag(before)`."""
        if self.before is not None:
            weight = weight * self.before.to(weight)
        return weight if self.after is None else self.after.to(weight)[:, None] * weight


@dataclass(frozen=True)
class Sides:
    """The sketches of both sides of a weight."""

    inner: Sketch
    outer: Sketch


@dataclass(frozen=True)
class Variant:
    """One weight `[out, in]`, raw or folded, as far as pairs need it."""

    shape: tuple[int, int]
    leading: Leading
    gram: ExactGram | Sides


Layer = tuple[Variant, ...]  # raw, then folded where a norm stands beside the weight


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
    layers = [take_apart(weight, Scales(None, None), Way.FULL) for weight in (first, second)]
    return compare(layers[0], layers[1])[0]


def take_apart(
    weight: Tensor,
    scales: Scales,
    way: Way,
    *,
    device: torch.device | None = None,
    seed: int = 0,
    name: str = "weight",
) -> Layer:
    """Return what pairs need of one weight, raw and, where there are scales, folded.

    Args:
        weight: `[out, in]`, any float dtype; read once or several times, never changed.
        scales: norm scales to fold in.
        way: how, see `Way`.
        device: where to compute; None is where the weight is.
        seed: of the random starts and sketches.
        name: of the weight and layer, for errors.

    Raises:
        NumericalError: a value of the weight is NaN or infinite.
    """
    device = weight.device if device is None else device
    if way is Way.STREAM:
        return _streamed(weight, scales, device, seed, name)
    normal = spectra.normalised(weight.to(device), torch.float64 if way is Way.FULL else None)
    refuse_non_finite(normal, name, weight)
    raw = ExactGram.of(normal)
    grams = [raw]
    if not scales.empty:
        side = scales.before if raw.tall else scales.after
        other = scales.after if raw.tall else scales.before
        if other is None and side is not None:
            grams.append(ExactGram(normal, raw.gram, side.to(normal)))
        else:
            grams.append(ExactGram.of(scales.fold(normal)))
    shape = (weight.shape[0], weight.shape[1])
    lead = _whole if way is Way.FULL else _from_gram
    return tuple(Variant(shape, lead(gram, seed), gram) for gram in grams)


def refuse_non_finite(values: Tensor, what: str, original: Tensor | None = None) -> None:
    """Raise `NumericalError` if a tensor (or what was made of `original`) is not all finite."""
    if bool(torch.isfinite(values.sum())):
        return
    tensor = values if original is None else original
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise NumericalError(
            f"{what} has {bad} of {tensor.numel()} values NaN or inf, wanted finite numbers; "
            "the model's files are damaged, fetch them again"
        )


def _whole(gram: ExactGram, seed: int) -> Leading:
    """Decompose a weight whole."""
    del seed
    found = spectra.decompose(gram.scaled_weight())
    # Rounding of an fp64 decomposition; nothing was left out that could be far off.
    residuals = torch.zeros(found.rank, dtype=torch.float64)
    total = float(found.values.square().sum())
    return Leading(found.left, found.values, found.right, residuals, total, True)


def _from_gram(gram: ExactGram, seed: int) -> Leading:
    """Find leading directions with the Gram matrix of the smaller side."""
    matrix = gram.scaled_gram()
    side = len(matrix)
    found = None
    if side > DENSE_UP_TO:
        found = _powers(matrix, seed)
    if found is None or not _is_enough(found):
        found = _dense(matrix)
    vectors, squares, whole = _cut(found)
    values = squares.sqrt()
    near = vectors.T
    scaled = gram.scaled_weight()
    far = (scaled @ near if gram.tall else scaled.T @ near) / values.to(near)
    left, right = (far, near) if gram.tall else (near, far)
    return _leading(left, values, right, found.residuals, gram.total, whole)


def _powers(matrix: Tensor, seed: int) -> Ritz:
    """Search the leading eigenvectors of a Gram matrix with a power of it."""
    side = len(matrix)
    search = Search(
        block=_NARROW, count=MATCHED + 8, largest=side // 2, first_check=min(8, side // 32),
        check_every=2, settle=max(ANGLE_COUNTS), settle_blocks=14, blocks=14, power=_POWER,
    )  # fmt: skip
    unit = matrix / matrix.diagonal().sum()

    def apply(rows: Tensor) -> tuple[Tensor, None]:
        for _ in range(_POWER):
            rows = rows @ unit
        return rows, None

    found = ritz(apply, random_rows(search.block, side, seed, matrix), search)
    return _rotated(found.vectors, matrix)


def _rotated(rows: Tensor, matrix: Tensor) -> Ritz:
    """Return the Ritz vectors of a symmetric matrix in the span of orthonormal rows."""
    products = rows @ matrix
    squares, turn = torch.linalg.eigh((rows @ products.T).double())
    turn = turn.flip(1).T.to(rows)
    squares = squares.flip(0).clamp_min(0.0)
    rows, products = turn @ rows, turn @ products
    rest = (products - squares.to(rows)[:, None] * rows).norm(dim=1).double()
    tiny = torch.finfo(squares.dtype).tiny
    return Ritz(rows, squares.cpu(), products, None, (rest / squares.clamp_min(tiny)).cpu())


def _dense(matrix: Tensor) -> Ritz:
    """Return the leading eigenvectors of a small symmetric matrix from the dense solver."""
    vectors = torch.linalg.eigh(matrix).eigenvectors.flip(1)[:, : MATCHED + 8]
    return _rotated(vectors.T.contiguous(), matrix)


def _is_enough(found: Ritz) -> bool:
    """Tell whether a search settled the first pair and the directions for the angles."""
    vectors, squares, whole = _cut(found)
    lead = _leading(vectors.T, squares.sqrt(), vectors.T, found.residuals, 0.0, whole)
    return lead.certain and lead.settled >= min(max(ANGLE_COUNTS), len(squares))


def _cut(found: Ritz) -> tuple[Tensor, Tensor, bool]:
    """Return vectors and squares above rounding, and whether those are all there are."""
    keep = int((found.squares > RANK_FLOOR * found.squares[0]).sum())
    return found.vectors[:keep], found.squares[:keep], keep < len(found.squares)


def _leading(
    left: Tensor, values: Tensor, right: Tensor, residuals: Tensor, total: float, whole: bool
) -> Leading:
    return Leading(left, values, right, residuals[: len(values)], total, whole)


def _streamed(weight: Tensor, scales: Scales, device: torch.device, seed: int, name: str) -> Layer:
    """Take a large weight apart by products with it alone, a block of its rows at a time."""
    stored = Stored(weight, device)
    if not 0.0 <= stored.total < float("inf"):
        refuse_non_finite(weight, name)
    start = random_rows(_BLOCK, weight.shape[1], seed, stored.like)
    raw = _krylov(stored, Scales(None, None), start)
    results = [raw]
    if not scales.empty:
        before = 1.0 if scales.before is None else scales.before.to(start)
        results.append(_krylov(stored, scales, raw.products * before))
    grams = _sketches(stored, scales, results, seed)
    shape = (weight.shape[0], weight.shape[1])
    variants = []
    for found, gram in zip(results, grams, strict=True):
        vectors, squares, whole = _cut(found)
        values = squares.sqrt()
        left = _images(found)[: len(values)].T / values.to(vectors)
        variants.append(
            Variant(
                shape,
                _leading(left, values, vectors.T, found.residuals, gram.inner.total, whole),
                gram,
            )
        )
    return tuple(variants)


def _krylov(stored: Stored, scales: Scales, start: Tensor) -> Ritz:
    """Search the right singular vectors of a (folded) stored weight from rows `[b, in]`."""
    before = None if scales.before is None else scales.before.to(start)
    after = None if scales.after is None else scales.after.to(start)

    def apply(rows: Tensor) -> tuple[Tensor, Tensor]:
        right = (rows if before is None else rows * before).T.contiguous()
        image, product = stored.visit(right, row_weights=None if after is None else after**2)
        if before is not None:
            product = product * before
        return product, (image if after is None else image * after[:, None]).T

    return ritz(apply, start, _LARGE)


def _images(found: Ritz) -> Tensor:
    assert found.images is not None
    return found.images


def _sketches(stored: Stored, scales: Scales, results: Sequence[Ritz], seed: int) -> list[Sides]:
    """Sketch both sides of a weight, raw and folded, in one visit."""
    out, width = stored.weight.shape
    right = random_rows(SKETCH, width, seed + 1, stored.like).T
    left = random_rows(SKETCH, out, seed + 2, stored.like).T
    before = 1.0 if scales.before is None else scales.before.to(right)[:, None]
    after = 1.0 if scales.after is None else scales.after.to(left)[:, None]
    rights = [right] if scales.before is None else [right, right * before]
    lefts = [left] if scales.after is None else [left, left * after]
    image, product = stored.visit(torch.cat(rights, 1), torch.cat(lefts, 1))
    sides = []
    for index, found in enumerate(results):
        # The last piece is the folded one, or the raw one where that side has no scale.
        out_rows, in_rows = image[:, -SKETCH:], product[-SKETCH:].T
        if index == 0:
            out_rows, in_rows, total = image[:, :SKETCH], product[:SKETCH].T, stored.total
        else:
            out_rows, in_rows = out_rows * after, in_rows * before
            total = stored.total_of(scales.before, scales.after)
        vectors, squares, _ = _cut(found)
        values = squares.sqrt().to(right)
        kept = len(values)
        left_vectors = _images(found)[:kept] / values[:, None]
        inner = sketch((found.products[:kept] / values[:, None]).T, in_rows, left_vectors @ left,
                       total)  # fmt: skip
        outer = sketch(_images(found)[:kept].T, out_rows, vectors @ right, total)
        sides.append(Sides(inner, outer))
    return sides


def seed_of(role: str, layer: int, seed: int = 0) -> int:
    """Return the seed of one weight; those of different weights are unrelated."""
    return zlib.crc32(f"{seed} {role} {layer}".encode()) * 4


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
