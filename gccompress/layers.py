"""What is kept of one layer's weight, raw and folded, for the comparison with its neighbours.

Three ways, chosen by the smaller side of a role's weights: see `Way`.
"""

import dataclasses
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
from gccompress.subspace import leading_eigenvectors, rotated

ANGLE_COUNTS = (8, 32)
MATCHED = 32  # leading directions in the index-matched alignment of a weight not fully decomposed

FULL_UP_TO = 128  # smaller side up to which a weight is decomposed whole, in fp64

_BLOCK = 48
_SUBSPACE_FROM = 3 * _BLOCK  # side from which a block is small enough beside a Gram matrix
_SAFE = (1e-16, 1e16)  # squared norms whose products stay well inside the range of fp32
_LARGE = Search(
    block=_BLOCK, count=_BLOCK, largest=8 * _BLOCK, first_check=2, check_every=1,
    settle=max(ANGLE_COUNTS), settle_blocks=8, blocks=24,
)  # fmt: skip
_FRESH = 8  # random rows among those that the search of a folded weight starts from


class Way(StrEnum):
    """How the weights of a role are taken apart.

    FULL: the whole decomposition in fp64 (smaller side up to `FULL_UP_TO`, or asked for).
    GRAM: the Gram matrix of the smaller side in fp32, up to `gram.EXACT_UP_TO`; its leading
        vectors by subspace iteration, dense where that fails.
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
    shape = (weight.shape[0], weight.shape[1])
    if way is Way.FULL:
        normal = spectra.normalised(weight.to(device))
        refuse_non_finite(normal, name, weight)
        grams = _variants(ExactGram.of(normal), scales)
        return tuple(Variant(shape, _whole(gram), gram) for gram in grams)
    raw = ExactGram.of(weight.to(device, torch.float32))
    if not _SAFE[0] <= raw.total <= _SAFE[1]:
        refuse_non_finite(weight, name)
        raw = ExactGram.of(spectra.normalised(weight.to(device), None))
    found = None
    variants = []
    for gram in _variants(raw, scales):
        found = _from_gram(gram, seed, found)
        variants.append(Variant(shape, _leading_of(gram, found), gram))
    return tuple(variants)


def _variants(raw: ExactGram, scales: Scales) -> list[ExactGram]:
    """Return a weight raw and, where there are scales, folded."""
    if scales.empty:
        return [raw]
    side = scales.before if raw.tall else scales.after
    other = scales.after if raw.tall else scales.before
    if other is None and side is not None:
        return [raw, dataclasses.replace(raw, scale=side.to(raw.weight))]
    return [raw, ExactGram.of(scales.fold(raw.weight))]


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


def _whole(gram: ExactGram) -> Leading:
    """Decompose a weight whole."""
    found = spectra.decompose(gram.scaled_weight())
    # Rounding of an fp64 decomposition; nothing was left out that could be far off.
    residuals = torch.zeros(found.rank, dtype=torch.float64)
    total = float(found.values.square().sum())
    return Leading(found.left, found.values, found.right, residuals, total, True)


def _from_gram(gram: ExactGram, seed: int, raw: Ritz | None) -> Ritz:
    """Find leading eigenvectors of the Gram matrix of the smaller side, dense where that fails.

    `raw` is what was found for the same weight without its scale: where to start from.
    """
    matrix = gram.scaled_gram()
    matrix = matrix / matrix.diagonal().sum().clamp_min(torch.finfo(matrix.dtype).tiny)
    if len(matrix) < _SUBSPACE_FROM:
        return _dense(matrix)
    rows = random_rows(_BLOCK, len(matrix), seed, matrix)
    if raw is None:
        rows = (rows @ matrix) @ matrix
    else:
        near = raw.vectors if gram.scale is None else raw.vectors * gram.scale
        rows = _beside(near, rows)
    found = leading_eigenvectors(matrix, rows, max(ANGLE_COUNTS))
    return _dense(matrix) if found is None else found


def _beside(near: Tensor, rows: Tensor) -> Tensor:
    """Return the first rows of `near` and `_FRESH` or more random ones, `_BLOCK` in all.

    The random ones find what the others have no part of.
    """
    near = near[: _BLOCK - _FRESH]
    return torch.cat([near, rows[: _BLOCK - len(near)]])


def _leading_of(gram: ExactGram, found: Ritz) -> Leading:
    """Turn eigenvectors of the Gram matrix, of trace 1, into singular triplets of the weight."""
    vectors, squares, whole = _cut(found)
    values = (squares * gram.total).sqrt()
    near = vectors.T
    scaled = gram.scaled_weight()
    far = (scaled @ near if gram.tall else scaled.T @ near) / values.to(near)
    left, right = (far, near) if gram.tall else (near, far)
    return _leading(left, values, right, found.residuals, gram.total, whole)


def _dense(matrix: Tensor) -> Ritz:
    """Return the leading eigenvectors of a small symmetric matrix from the dense solver."""
    vectors = torch.linalg.eigh(matrix).eigenvectors.flip(1)[:, :_BLOCK]
    return rotated(vectors.T.contiguous(), matrix)


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
        start = _beside(
            found.products * before, random_rows(_BLOCK, weight.shape[1], seed + 3, stored.like)
        )
        results.append(_krylov(stored, scales, start))
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
