"""Leading eigenvectors of a symmetric matrix at hand: Chebyshev-filtered subspace iteration.

Zhou, Saad, Tiago and Chelikowsky (2006). Few, large operations: what small matrices need.
"""

import math

import torch
from torch import Tensor

from gccompress.krylov import (
    ANGLE_TOLERANCE,
    GAP_TOLERANCE,
    VECTOR_TOLERANCE,
    Ritz,
    is_decided,
    is_settled,
    squared_gap,
)

_ROUNDS = 8
# Unlike a Krylov space, a block brings all its directions close to the tolerance at once: with
# that of a single direction, the angles of 32 were off by 0.011.
_SETTLED = 0.4 * ANGLE_TOLERANCE
_DEGREES = (2, 10)  # of a filter
_SAFETY = 3.0  # by how much a filter is to bring residuals below what is wanted
_DYNAMIC = 12.0  # largest logarithm of the ratio a filter may open between wanted directions


def leading_eigenvectors(matrix: Tensor, start: Tensor, settle: int) -> Ritz | None:
    """Return leading eigenvectors of a positive semi-definite matrix.

    Each round damps what lies below the smallest Ritz value of the block by a Chebyshev
    polynomial, of the degree that the residuals ask for, and rotates the block to Ritz vectors.

    Args:
        matrix: `[n, n]`, fp32, of trace about 1.
        start: `[b, n]`, rows to start from, b > settle: some random, none need be orthonormal.
        settle: how many directions must come within the tolerance of angles.

    Returns:
        `[b, n]` Ritz vectors; None if they have not come so far in the rounds there are, or the
        rank is below b.
    """
    rows = start
    for _ in range(_ROUNDS):
        rows = torch.linalg.qr(rows.T).Q.T
        found = rotated(rows, matrix)
        if not bool(found.squares[-1] > 0.0):
            return None
        settled = is_settled(found.squares, found.residuals, settle, _SETTLED)
        if settled and is_decided(found.squares, found.residuals):
            return found
        rows = _filtered(matrix, found, settle)
    return None


def rotated(rows: Tensor, matrix: Tensor) -> Ritz:
    """Return the Ritz vectors of a symmetric matrix in the span of orthonormal rows `[b, n]`."""
    products = rows @ matrix
    squares, turn = torch.linalg.eigh((rows @ products.T).double())
    turn = turn.flip(1).T.to(rows)
    squares = squares.flip(0).clamp_min(0.0)
    rows, products = turn @ rows, turn @ products
    rest = torch.addcmul(products, rows, squares.to(rows)[:, None], value=-1.0)
    relative = rest.norm(dim=1).double() / squares.clamp_min(torch.finfo(squares.dtype).tiny)
    return Ritz(rows, squares.cpu(), products, None, relative.cpu())


def _filtered(matrix: Tensor, found: Ritz, settle: int) -> Tensor:
    """Apply a Chebyshev polynomial that is at most 1 on `[0, smallest Ritz value]`."""
    half = float(found.squares[-1]) / 2
    before, now = found.vectors, found.products / half - found.vectors
    for _ in range(_degree(found, settle) - 1):
        # T_(k+1)(x) = 2 x T_k(x) - T_(k-1)(x) with x = A / half - 1
        before, now = now, torch.addmm(before + 2 * now, now, matrix, beta=-1.0, alpha=2 / half)
    return now


def _degree(found: Ritz, settle: int) -> int:
    """Return the degree that takes the leading vector and the last wanted one far enough.

    Outside the interval T_d grows like `cosh(d acosh(x))`. Degrees are bounded so that the first
    direction does not drown the last one in rounding.
    """
    edge = float(found.squares[-1])
    first, second, last = (float(found.squares[i]) for i in (0, 1, settle - 1))
    growth, last_growth = (max(math.acosh(max(1.0, 2 * x / edge - 1)), 1e-3) for x in (first, last))
    gap = max(1.0 - second / first, squared_gap(GAP_TOLERANCE) / 4)
    wanted = _SAFETY * float(found.residuals[0]) / (VECTOR_TOLERANCE * gap)
    last_wanted = _SAFETY * float(found.residuals[:settle].max()) / _SETTLED
    degree = max(
        math.acosh(max(1.0, wanted)) / growth, math.acosh(max(1.0, last_wanted)) / last_growth
    )
    bound = _DYNAMIC / max(growth - last_growth, 1e-3)
    low, high = _DEGREES
    return max(low, min(high, math.ceil(degree), int(bound)))
