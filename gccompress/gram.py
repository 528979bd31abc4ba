"""Gram alignment of two weights: exact where that is cheap, else estimated with its error.

`<W^T W, W'^T W'> / (||W||_F^2 ||W'||_F^2)` and the same of the transposes, METHOD section 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Exact alignment takes 2 min(out, in) operations per weight and side, a sketch 2 * SKETCH.
# Up to this smaller side the exact one still costs no more than the search for directions.
EXACT_UP_TO = 768
_GRAM_BLOCK = 96
_ROUNDED_FROM = 384  # smaller side from which products of bf16 are worth the conversion
SKETCH = 64  # columns; unrelated flat spectra are then off by sqrt(2) / 64 = 2.2 %


@dataclass(frozen=True)
class Alignment:
    """A Gram alignment and its standard error: 0 where it is exact."""

    value: float
    error: float


@dataclass(frozen=True)
class ExactGram:
    """A weight with the Gram matrix of its smaller side, with scales folded into that side.

    Attributes:
        weight: `[out, in]`, without the scale.
        gram: `W^T W` when `in <= out`, else `W W^T`, without the scale.
        scale: `[in]` or `[out]`, what the side of `gram` is multiplied by; None is all ones.
    """

    weight: Tensor
    gram: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, weight: Tensor) -> "ExactGram":
        """Compute the Gram matrix of a weight `[out, in]`."""
        tall = weight.shape[1] <= weight.shape[0]
        return cls(weight, _gram(weight.T if tall else weight))

    @property
    def tall(self) -> bool:
        """Whether `gram` is that of the input side."""
        return self.weight.shape[1] <= self.weight.shape[0]

    @cached_property
    def rounded(self) -> Tensor:
        """The weight without the scale, in bf16 where products of that are much faster."""
        worth = self.weight.dtype == torch.float32 and min(self.weight.shape) >= _ROUNDED_FROM
        fast = worth and multiplies_bf16(self.weight.device)
        return self.weight.bfloat16() if fast else self.weight

    def scaled_gram(self) -> Tensor:
        """Return the Gram matrix with the scale on both sides."""
        if self.scale is None:
            return self.gram
        return self.scale[:, None] * self.gram * self.scale

    def scaled_weight(self) -> Tensor:
        """Return the weight with the scale."""
        if self.scale is None:
            return self.weight
        return self.weight * (self.scale if self.tall else self.scale[:, None])

    @property
    def total(self) -> float:
        """`||W||_F^2` with the scale."""
        diagonal = self.gram.diagonal()
        return float((diagonal if self.scale is None else diagonal * self.scale.square()).sum())


def _gram(rows: Tensor) -> Tensor:
    """Return `A A^T` of rows `[n, d]`; a large one block by block, each pair of blocks once."""
    step = max(_GRAM_BLOCK, -(-len(rows) // 6))
    if step >= len(rows):
        return rows @ rows.T
    gram = rows.new_empty(len(rows), len(rows))
    for i in range(0, len(rows), step):
        part = rows[i : i + step] @ rows[: i + step].T
        gram[i : i + step, : part.shape[1]] = part
        gram[: part.shape[1], i : i + step] = part.T
    return gram


def exact_alignments(
    first: tuple[ExactGram, ...], second: tuple[ExactGram, ...]
) -> list[tuple[Alignment | None, Alignment | None]]:
    """Return `(input, output)` alignments of two layers, variant by variant (raw, folded).

    A side on which the shapes differ gives None, and so does a weight that is zero. Variants that
    differ by a scale alone share their products.
    """
    results: list[tuple[Alignment | None, Alignment | None]] = []
    products: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for a, b in zip(first, second, strict=True):
        total = a.total * b.total
        if total == 0.0 or not math.isfinite(total):
            results.append((None, None))
            continue
        same_out, same_in = (x == y for x, y in zip(a.weight.shape, b.weight.shape, strict=True))
        if same_out and same_in:
            key = (id(a.weight), id(b.weight))
            if key not in products:
                products[key] = (a.gram * b.gram, _cross_squares(a, b))
            near_terms, far_terms = products[key]
            if a.scale is None or b.scale is None:
                near, far = float(near_terms.sum()), float(far_terms.sum())
            else:
                both = a.scale * b.scale
                near = float(both @ near_terms @ both)
                far = float(a.scale.square() @ far_terms @ b.scale.square())
            inner: float | None = near if a.tall else far
            outer: float | None = far if a.tall else near
        else:
            left, right = a.scaled_weight(), b.scaled_weight()
            inner = float((left @ right.T).square().sum()) if same_in else None
            outer = float((left.T @ right).square().sum()) if same_out else None
        results.append((_exact(inner, total), _exact(outer, total)))
    return results


def _cross_squares(first: ExactGram, second: ExactGram) -> Tensor:
    """Return the squares of `W^T W'`, or of `W W'^T` for wide weights.

    Only sums over all of them are wanted, in which the rounding of bf16 averages out; where one
    entry outweighs all others, 0.4 % of it are left.
    """
    a, b = first.rounded, second.rounded
    product = a.T @ b if first.tall else a @ b.T
    return product.to(first.weight.dtype).square_()


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether a device is a processor that multiplies bf16 several times faster than fp32.

    That is one with matrix units (AMX); a torch that cannot tell counts as one without.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return device.type == "cpu" and supported is not None and bool(supported())


def _exact(product: float | None, total: float) -> Alignment | None:
    return None if product is None else Alignment(product / total, 0.0)


@dataclass(frozen=True)
class Sketch:
    """The input side of a weight W, compressed; the output side is that of its transpose.

    Attributes:
        lead: `[d, k]`, `W^T U` for k orthonormal leading left vectors U: this part is exact.
        rest: `[d, SKETCH]`, `W^T (I - U U^T) Z` with Z standard normal: this part is sampled.
        total: `||W||_F^2`.
    """

    lead: Tensor
    rest: Tensor
    total: float


def sketched_alignment(first: Sketch, second: Sketch) -> Alignment | None:
    """Estimate the alignment of two layers from independent sketches, without bias.

    `W^T W = L L^T + R^T R` with `L = W^T U` and `R = (I - U U^T) W`; the product of two such sums
    has four terms, of which `<L L^T, L' L'^T>` is exact and the others are means over the columns
    of Z and Z' (Hutchinson, 1989; Meyer et al., Hutch++, 2021). The error is the two-way standard
    error over rows and columns. None when a weight is zero or the shapes differ.
    """
    total = first.total * second.total
    if total == 0.0 or first.lead.shape[0] != second.lead.shape[0]:
        return None
    exact = float((first.lead.T @ second.lead).square().sum())
    rows = (second.lead.T @ first.rest).square().sum(0).double()
    columns = (first.lead.T @ second.rest).square().sum(0).double()
    both = (first.rest.T @ second.rest).square().double()
    value = exact + float(rows.mean() + columns.mean() + both.mean())
    spread = (rows + both.mean(1)).var() / len(rows) + (columns + both.mean(0)).var() / len(columns)
    return Alignment(value / total, math.sqrt(float(spread)) / total)


def mean_error(errors: list[float | None]) -> float | None:
    """Return the standard error of a mean of per-pair alignments; neighbours share a sketch.

    That makes the errors of neighbouring pairs correlated, by one half at most.
    """
    known = [error for error in errors if error is not None]
    if not known:
        return None
    return math.sqrt(2.0 * math.fsum(error**2 for error in known)) / len(known)


def sketch(lead: Tensor, product: Tensor, overlap: Tensor, total: float) -> Sketch:
    """Make a sketch from `lead = W^T U` `[d, k]`, `product = W^T Z` `[d, s]`, `overlap = U^T Z`."""
    return Sketch(lead, product - lead @ overlap, total)


def is_exact(shapes: Iterable[tuple[int, int]]) -> bool:
    """Tell whether weights of these shapes, the layers of one role, are aligned exactly."""
    return max((min(shape) for shape in shapes), default=0) <= EXACT_UP_TO
