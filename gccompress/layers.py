"""What is kept of one layer's weight, raw and folded, for the comparison with its neighbours.

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
    ExactGram,
    Sketch,
    sketch,
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


NO_SCALES = Scales(None, None)


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
    overlaps = vectors @ vectors.T
    overlaps.diagonal().sub_(1.0)
    if len(squares) and float(overlaps.abs().max()) > 1e-3:
        return False
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
    samples = _sample(stored, scales, seed)
    if not 0.0 <= samples[0].total < float("inf"):
        refuse_non_finite(weight, name)
    found = _krylov(stored, NO_SCALES, random_rows(_BLOCK, weight.shape[1], seed, stored.like))
    results = [found]
    if not scales.empty:
        # Products of the raw weight, scaled, are nearly those of the folded one.
        before = 1.0 if scales.before is None else scales.before.to(found.products)
        results.append(_krylov(stored, scales, found.products * before))
    return tuple(
        _variant(weight, result, sample) for result, sample in zip(results, samples, strict=True)
    )


def _variant(weight: Tensor, found: Ritz, sample: "_Sample") -> Variant:
    vectors, squares, whole = _cut(found)
    values = squares.sqrt()
    count = len(values)
    divided = values.to(vectors)[:, None]
    images, products = _images(found)[:count], found.products[:count]
    left = images / divided
    gram = Sides(
        sketch((products / divided).T, sample.in_rows, left @ sample.left, sample.total),
        sketch(images.T, sample.out_rows, vectors @ sample.right, sample.total),
    )
    lead = _leading(left.T, values, vectors.T, found.residuals, sample.total, whole)
    return Variant((weight.shape[0], weight.shape[1]), lead, gram)


def _krylov(stored: Stored, scales: Scales, start: Tensor) -> Ritz:
    """Search the right singular vectors of a (folded) stored weight from rows `[b, in]`."""
    before = None if scales.before is None else scales.before.to(start)
    after = None if scales.after is None else scales.after.to(start)

    def apply(rows: Tensor) -> tuple[Tensor, Tensor]:
        right = (rows if before is None else rows * before).T.contiguous()
        image, product = stored.visit(right, None if after is None else after.square())
        if before is not None:
            product = product * before
        return product, (image if after is None else image * after[:, None]).T

    return ritz(apply, start, _LARGE)


def _images(found: Ritz) -> Tensor:
    assert found.images is not None
    return found.images


@dataclass(frozen=True)
class _Sample:
    """Products of a (folded) weight with standard normal `right` `[in, s]` and `left` `[out, s]`.

    Attributes:
        out_rows: `[out, s]`, `W right`.
        in_rows: `[in, s]`, `W^T left`.
        total: `||W||_F^2`.
    """

    right: Tensor
    left: Tensor
    out_rows: Tensor
    in_rows: Tensor
    total: float


def _sample(stored: Stored, scales: Scales, seed: int) -> list[_Sample]:
    """Sample both sides of a weight, raw and folded, in one visit."""
    out, width = stored.weight.shape
    right = random_rows(SKETCH, width, seed + 1, stored.like).T
    left = random_rows(SKETCH, out, seed + 2, stored.like).T
    before = right.new_ones(width) if scales.before is None else scales.before.to(right)
    after = left.new_ones(out) if scales.after is None else scales.after.to(left)
    rights = [right] if scales.before is None else [right, right * before[:, None]]
    lefts = [left] if scales.after is None else [left, left * after[:, None]]
    weights = torch.stack(
        [torch.ones_like(after), after.square()][: 1 + (scales.after is not None)]
    )
    image, product, energies = stored.survey(torch.cat(rights, 1), torch.cat(lefts, 1), weights)
    raw = _Sample(
        right, left, image[:, :SKETCH], product[:SKETCH].T, float(energies[0].double().sum())
    )
    if scales.empty:
        return [raw]
    # The last columns are the scaled ones, or the raw ones where that side has no scale.
    total = float((energies[-1].double() * before.double().square()).sum())
    out_rows = image[:, -SKETCH:] * after[:, None]
    in_rows = product[-SKETCH:].T * before[:, None]
    return [raw, _Sample(right, left, out_rows, in_rows, total)]


def seed_of(role: str, layer: int, seed: int = 0) -> int:
    """Return the seed of one weight; those of different weights are unrelated."""
    return zlib.crc32(f"{seed} {role} {layer}".encode()) * 4
