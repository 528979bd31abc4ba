"""Whitening, spectra and shared bases: the only place with one-letter maths, all in float64.

Notation (METHOD in docs/method.md): a weight is `W [out, in]`, `G = E[x x^T] [in, in]` the second
moment of its input, `A = E[g g^T] [out, out]` of the loss gradient at its output. The model of the
loss of replacing W by W' is `1/2 tr(A D G D^T)`, `D = W - W'`, in nats per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gccompress.errors import NumericalError
from gccompress.roles import Space

FIRST_JITTER = 1e-10  # of the mean diagonal; enough for a positive matrix that only lost rounding
LARGEST_JITTER = 1e-2
SMALLEST_PIVOT = 1e-6  # of the root mean diagonal: below it a pivot is rounding


@dataclass(frozen=True)
class Damping:
    """How far moments are shrunk to their mean diagonal, each in [0, 1).

    Attributes:
        a: for output gradients; the estimate is noisy (METHOD: 0.03 was best).
        g: for inputs; steadies the least directions, the more the fewer tokens there are.
    """

    a: float = 0.03
    g: float = 0.003


@dataclass(frozen=True)
class Weighted:
    """One matrix with its metric: `weight [out, in]`, `g [in, in]`, `a [out, out]`, all float64."""

    weight: Tensor
    g: Tensor
    a: Tensor

    def loss(self, approximation: Tensor) -> float:
        """Return `1/2 tr(A D G D^T)` in nats per token for `approximation [out, in]`."""
        d = self.weight - approximation.to(self.weight)
        return 0.5 * float(((self.a @ d) * (d @ self.g)).sum())


@dataclass(frozen=True)
class Factors:
    """A factorisation of a group of matrices.

    Attributes:
        space: INPUT (`W_l ~ coefs[l] @ basis`) or OUTPUT (`W_l ~ basis @ coefs[l]`).
        basis: `[rank, in]` or `[out, rank]`.
        coefs: per matrix `[out, rank]` or `[rank, in]`.
        jitter: largest share of the mean diagonal that had to be added to a moment (0: none).
    """

    space: Space
    basis: Tensor
    coefs: tuple[Tensor, ...]
    jitter: float

    def product(self, index: int) -> Tensor:
        """Return the approximation `[out, in]` of matrix `index`."""
        coef = self.coefs[index]
        return coef @ self.basis if self.space is Space.INPUT else self.basis @ coef


def shrink(moment: Tensor, share: float) -> Tensor:
    """Return `(1 - share) M + share mean(diag M) I` in float64.

    A moment that is all zero (a dead channel set, or no gradient) becomes the identity times the
    smallest positive normal number, so that nothing divides by zero and its loss stays nothing.
    """
    m = moment.double()
    mean = float(m.diagonal().mean())
    if mean == 0.0:
        return torch.eye(len(m), dtype=m.dtype, device=m.device) * torch.finfo(m.dtype).tiny ** 0.5
    m = (m + m.T).mul_((1 - share) / 2)  # one copy, however large
    m.diagonal().add_(share * mean)
    return m


def cholesky(moment: Tensor, what: str) -> tuple[Tensor, float]:
    """Return the lower factor of a positive (semi-)definite matrix and the jitter that it took.

    The jitter, a share of the mean diagonal, is 0 where none was needed; it grows tenfold until
    the factorisation succeeds.

    Raises:
        NumericalError: not finite, or not positive even with `LARGEST_JITTER`.
    """
    if not bool(torch.isfinite(moment).all()):
        raise NumericalError(f"{what}: its moment is not finite; calibrate again with other text")
    mean = moment.diagonal().mean()
    jitter = 0.0
    damped = moment
    while True:
        factor, failed = torch.linalg.cholesky_ex(damped)
        # A factor with a pivot lost to rounding would pass the test and give a wild inverse.
        if not failed and bool(factor.diagonal().min() > SMALLEST_PIVOT * mean.sqrt()):
            return factor, jitter
        jitter = jitter * 10 if jitter else FIRST_JITTER
        if jitter > LARGEST_JITTER:
            raise NumericalError(
                f"{what}: its moment is not positive definite (damping {LARGEST_JITTER} of the "
                "mean diagonal did not help); calibrate with more tokens"
            )
        damped = moment.clone()
        damped.diagonal().add_(jitter * mean)


def alone_space(shape: tuple[int, int]) -> Space:
    """Return the side on which a single matrix `(out, in)` is cheaper to factor."""
    return Space.INPUT if shape[1] <= shape[0] else Space.OUTPUT


@dataclass(frozen=True)
class Side:
    """What one matrix brings to a shared basis in one space, enough to price it.

    INPUT: `moment` is G, `form` is `W^T A W`, both `[in, in]`.
    OUTPUT: `moment` is A, `form` is `W G W^T`, both `[out, out]`.
    """

    moment: Tensor
    form: Tensor


def side(matrix: Weighted, space: Space) -> Side:
    """Return the moment and quadratic form of a matrix on the side of `space`."""
    w = matrix.weight
    if space is Space.INPUT:
        return Side(matrix.g, w.T @ matrix.a @ w)
    return Side(matrix.a, w @ matrix.g @ w.T)


def spectrum(sides: Sequence[Side], what: str) -> Tensor:
    """Return the loss in nats per token that each further rank of a shared basis saves, descending.

    The sum beyond rank k is the predicted loss at rank k, with the group's mean moment as the
    metric of the shared side; refitting each coefficient on its own moment only lowers it.
    A group of one is plain low rank: both spaces give the same nonzero values.
    """
    whitened, _, _ = _whitened_form(sides, what)
    return torch.linalg.eigvalsh(whitened).flip(0).clamp_min(0) / 2


def factor(group: Sequence[Weighted], space: Space, rank: int, what: str) -> Factors:
    """Return the rank-`rank` factors of a group with one shared basis in `space`.

    INPUT: `B = V_k^T S^-1` with `S = chol(mean G)` and V the leading eigenvectors of
    `S^T (sum W^T A W) S`; then `C_l = W_l G_l B^T (B G_l B^T)^-1`.
    OUTPUT: `U = S^-T Q_k` with `S = chol(mean A)` and Q those of `S^T (sum W G W^T) S`; then
    `C_l = (U^T A_l U)^-1 U^T A_l W_l`.

    Raises:
        NumericalError: a moment that cannot be factored; never a random or zero factor.
    """
    whitened, s, jitter = _whitened_form([side(w, space) for w in group], what)
    vectors = torch.linalg.eigh(whitened).eigenvectors.flip(1)[:, :rank]
    if space is Space.INPUT:
        basis = torch.linalg.solve_triangular(s.T, vectors, upper=True).T
        coefs = tuple(
            _solve(basis @ w.g @ basis.T, basis @ w.g @ w.weight.T, what).T for w in group
        )
    else:
        basis = torch.linalg.solve_triangular(s.T, vectors, upper=True)
        coefs = tuple(_solve(basis.T @ w.a @ basis, basis.T @ w.a @ w.weight, what) for w in group)
    for tensor in (basis, *coefs):
        if not bool(torch.isfinite(tensor).all()):
            raise NumericalError(f"{what}: its factors are not finite; calibrate with more tokens")
    return _balanced(Factors(space, basis, coefs, jitter))


def round_to_nearest(weight: Tensor, bits: int, group: int) -> Tensor:
    """Return `weight` after asymmetric round-to-nearest in groups along the input dimension.

    The reference that every structural move is shown beside: `bits` a value plus a float16 scale
    and a `bits` wide zero point a group, dequantised again. Shape and dtype are kept.
    """
    rows, cols = weight.shape
    width = min(group, cols)
    padded = -cols % width
    w = torch.nn.functional.pad(weight, (0, padded), mode="replicate").reshape(rows, -1, width)
    low = w.amin(-1, keepdim=True).clamp_max(0)
    high = w.amax(-1, keepdim=True).clamp_min(0)
    top = 2**bits - 1
    scale = ((high - low) / top).half().to(w.dtype).clamp_min(torch.finfo(torch.float16).tiny)
    zero = (-low / scale).round()
    q = ((w / scale).round() + zero).clamp(0, top)
    return ((q - zero) * scale).reshape(rows, -1)[:, :cols]


def _whitened_form(sides: Sequence[Side], what: str) -> tuple[Tensor, Tensor, float]:
    """Return `S^T F S`, S and the jitter, F the summed quadratic form on the shared side."""
    moment = _sum([one.moment for one in sides])
    s, jitter = cholesky(moment if len(sides) == 1 else moment / len(sides), what)
    whitened = s.T @ _sum([one.form for one in sides]) @ s
    return (whitened + whitened.T).div_(2), s, jitter


def _sum(matrices: Sequence[Tensor]) -> Tensor:
    """Return the sum of square matrices; of one, itself, as they may be large."""
    if len(matrices) == 1:
        return matrices[0]
    total = matrices[0] + matrices[1]
    for one in matrices[2:]:
        total += one
    return total


def _solve(left: Tensor, right: Tensor, what: str) -> Tensor:
    """Return `left^-1 right` for a positive definite `left`."""
    s, _ = cholesky((left + left.T) / 2, what)
    return torch.cholesky_solve(right, s)


def _balanced(factors: Factors) -> Factors:
    """Scale each rank direction so that basis and coefficients have the same mean square norm.

    The product is unchanged; stored in 16 bits neither side then loses range, and training
    moves both alike.
    """
    along = 1 if factors.space is Space.INPUT else 0
    basis_norm = factors.basis.square().sum(along).sqrt()
    coef_norm = (
        sum(
            (c.square().sum(1 - along) for c in factors.coefs),
            torch.zeros_like(basis_norm),
        )
        / len(factors.coefs)
    ).sqrt()
    # A direction that no coefficient uses is left as it is.
    scale = torch.where(
        (basis_norm > 0) & (coef_norm > 0), (coef_norm / basis_norm).sqrt(), basis_norm.new_ones(())
    )
    if factors.space is Space.INPUT:
        basis = factors.basis * scale[:, None]
        coefs = tuple(c / scale for c in factors.coefs)
    else:
        basis = factors.basis * scale
        coefs = tuple(c / scale[:, None] for c in factors.coefs)
    return Factors(factors.space, basis, coefs, factors.jitter)
