"""Singular vectors of one weight and how they line up with those of another (torch only, fp64).

Formulas: METHOD section 1 of this project, after arXiv 2605.04971.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """The singular value decomposition of a weight `[out, in]`, largest value first, in fp64.

    Attributes:
        left: `[out, rank]`, orthonormal columns (output space).
        values: `[rank]`, in units of the weight's largest absolute entry.
        right: `[in, rank]`, orthonormal columns (input space).
    """

    left: Tensor
    values: Tensor
    right: Tensor

    @property
    def rank(self) -> int:
        """Numerical rank: how many singular values stand above rounding."""
        return len(self.values)


def normalised(weight: Tensor, dtype: torch.dtype | None = torch.float64) -> Tensor:
    """Return `weight` in `dtype` divided by its largest absolute entry; zeros stay zeros.

    `dtype` None is fp32, divided before it is narrowed.

    Every measure of this module ignores the scale of a weight; dividing first keeps squares and
    fourth powers of very small or very large weights inside the range of fp64.
    """
    dtype = torch.float32 if dtype is None else dtype
    weight = weight.to(torch.promote_types(weight.dtype, dtype))
    largest = weight.abs().amax() if weight.numel() else weight.new_zeros(())
    return (weight / torch.where(largest == 0, 1.0, largest)).to(dtype)


def decompose(weight: Tensor) -> Spectrum:
    """Return the spectrum of `weight` `[out, in]` from the Gram matrix of its shorter side.

    The eigenvectors of `W W^T` (or `W^T W`) are the singular vectors of that side; the other side
    is `W^T u / s`. In fp64 this is exact to rounding for every direction that carries weight;
    values below `sqrt(max(out, in) * eps)` of the largest cannot be told from zero and are cut.
    """
    weight = normalised(weight)
    out_features, in_features = weight.shape
    if out_features > in_features:
        turned = decompose(weight.T)
        return Spectrum(turned.right, turned.values, turned.left)
    squares, left = torch.linalg.eigh(weight @ weight.T)
    squares, left = squares.flip(0), left.flip(1)
    floor = squares[0] * max(out_features, in_features) * torch.finfo(torch.float64).eps
    rank = int((squares > floor).sum())
    values, left = squares[:rank].sqrt(), left[:, :rank]
    return Spectrum(left, values, weight.T @ left / values)


def leading_cosine(first: Tensor, second: Tensor) -> float | None:
    """Return `|<first[:, 0], second[:, 0]>|` of two `[d, rank]` bases; None when one is empty."""
    if first.shape[1] == 0 or second.shape[1] == 0:
        return None
    return _share(float((first[:, 0] @ second[:, 0]).abs()))


def matched_alignment(values: Tensor, first: Tensor, second: Tensor) -> float | None:
    """Return `sum_i w_i |<first_i, second_i>|` with `w_i = s_i^2 / sum s^2`.

    Args:
        values: `[rank]`, the singular values `s` that belong to `first`.
        first: `[d, rank]`, singular vectors of one weight.
        second: `[d, rank']`, those of the next; directions without a partner count as 0.
    """
    both = min(first.shape[1], second.shape[1])
    if both == 0:
        return None
    weights = values.square() / values.square().sum()
    cosines = (first[:, :both] * second[:, :both]).sum(0).abs()
    return _share(float(weights[:both] @ cosines))


def mean_angle_cosine(first: Tensor, second: Tensor, count: int) -> float | None:
    """Return the mean cosine of the principal angles between the leading `count` directions.

    The cosines are the singular values of `first_k^T second_k` (Bjorck and Golub, 1973).
    None when either basis `[d, rank]` has fewer than `count` columns.
    """
    if min(first.shape[1], second.shape[1]) < count:
        return None
    cosines = torch.linalg.svdvals(first[:, :count].T @ second[:, :count])
    return _share(float(cosines.clamp(max=1.0).mean()))


def gram_alignment(first: Tensor, second: Tensor) -> float | None:
    """Return `<A^T A, B^T B> / (||A||_F^2 ||B||_F^2)` for `A` `[n, d]` and `B` `[m, d]`.

    This is the sigma^2-weighted alignment of all right singular vectors,
    `sum_ij p_i q_j <v_i, v'_j>^2`, without any decomposition; pass transposes for the left ones.
    Unrelated weights give about `1 / d`. None when a weight is zero.
    """
    first, second = normalised(first), normalised(second)
    scale = float(first.square().sum() * second.square().sum())
    if scale == 0.0:
        return None
    width = first.shape[1]
    if max(first.shape[0], second.shape[0]) <= width:
        inner = (first @ second.T).square().sum()
    else:
        inner = ((first.T @ first) * (second.T @ second)).sum()
    return float(inner) / scale


def random_cosine(width: int) -> float:
    """Return the expected `|cos|` of two random unit vectors in R^width: `sqrt(2 / (pi d))`."""
    return min(1.0, math.sqrt(2.0 / (math.pi * width)))


def random_angle_cosine(count: int, width: int) -> float | None:
    """Return the expected mean cosine between two random `count`-dimensional subspaces of R^width.

    The squared cosines follow Wachter's law (1980) with both shares `a = count / width`; its mean
    root has a closed form that tends to `8 / (3 pi) sqrt(a)` for small `a`. None if count > width.
    """
    if count > width:
        return None
    share = count / width
    # Past half the space the subspaces must meet: 2k - d cosines are exactly 1.
    certain = max(0.0, 2.0 * share - 1.0) / share
    edge = math.sqrt(4.0 * share * (1.0 - share))
    if edge == 0.0:
        return certain
    gap = abs(1.0 - 2.0 * share)
    spread = 1.0 if gap == 0.0 else 1.0 - gap / edge * math.atan(edge / gap)
    return certain + edge / (math.pi * share) * spread


def _share(value: float) -> float:
    """Return `value` cut to [0, 1]: rounding may carry a cosine a hair past 1."""
    return min(1.0, max(0.0, value))
