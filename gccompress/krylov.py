"""Leading singular directions of one weight by a block Krylov method that checks its residuals.

Golub and Underwood (1977) with full reorthogonalisation and thick restarts; torch only.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Leading values closer than this (of the first) leave the direction undetermined: rounding a
# weight to bf16 alone moves it by about half as much.
GAP_TOLERANCE = 2e-3
VECTOR_TOLERANCE = 5e-4  # largest sine of the angle between a leading vector and the true one
ANGLE_TOLERANCE = 0.05  # relative residual up to which a direction counts for principal angles
RANK_FLOOR = 32 * torch.finfo(torch.float32).eps  # squares below it, of the first: rounding

_ROUNDING = 3e-3  # of a block's products: what is new in them below this is orthogonalised again
_PASSES = 3


@dataclass(frozen=True)
class Leading:
    """The leading singular triplets of a weight `[out, in]`, largest value first.

    Attributes:
        left: `[out, k]`, orthonormal columns (output space).
        values: `[k]`, in the units of the weight they were computed from.
        right: `[in, k]`, orthonormal columns (input space).
        residuals: `[k]`, `||W^T u - s v|| / s`, fp64 on the CPU.
        total: `||W||_F^2` in the same units.
        whole: these are all directions that carry weight.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    residuals: Tensor
    total: float
    whole: bool

    @property
    def gap(self) -> float | None:
        """`(s_1 - s_2) / s_1`; 1 for a weight of rank one, None for one that is all zero."""
        if len(self.values) == 0:
            return None
        if len(self.values) == 1:
            return 1.0
        first, second = self.values[:2].tolist()
        return 1.0 - second / first

    @property
    def certain(self) -> bool:
        """Whether the first direction is one: a gap to the second, and a residual to match."""
        gap = self.gap
        if gap is None or gap <= GAP_TOLERANCE:
            return False
        return float(self.residuals[0]) <= 1.01 * VECTOR_TOLERANCE * squared_gap(gap)

    @property
    def settled(self) -> int:
        """How many leading directions have a residual within `ANGLE_TOLERANCE`."""
        within = (self.residuals <= ANGLE_TOLERANCE).long().cumprod(0)
        return int(within.sum())


def squared_gap(gap: float) -> float:
    """Turn a relative gap of singular values into that of their squares."""
    return 1.0 - (1.0 - gap) ** 2


@dataclass(frozen=True)
class Search:
    """How far to go.

    Attributes:
        block: directions multiplied at once.
        count: directions wanted.
        largest: directions of the basis, at which it restarts from its best half.
        first_check: blocks before the first look at the residuals, so many that they hold `count`.
        check_every: blocks between looks.
        settle: how many directions must come within `ANGLE_TOLERANCE`.
        settle_blocks: blocks to spend on that; the first direction alone may take `blocks`.
        blocks: products with the weight and its transpose, at most.
    """

    block: int
    count: int
    largest: int
    first_check: int
    check_every: int
    settle: int
    settle_blocks: int
    blocks: int


@dataclass(frozen=True)
class Ritz:
    """Ritz vectors of a positive semi-definite matrix A, largest value first.

    Attributes:
        vectors: `[k, n]`, orthonormal rows.
        squares: `[k]`, the values, fp64 on the CPU.
        products: `[k, n]`, A times the vectors.
        images: `[k, m]`, what the second result of `apply` became for the vectors, if any.
        residuals: `[k]`, `||A v - t v|| / t`, fp64 on the CPU.
    """

    vectors: Tensor
    squares: Tensor
    products: Tensor
    images: Tensor | None
    residuals: Tensor


Apply = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def ritz(apply: Apply, start: Tensor, search: Search) -> Ritz:
    """Return the leading eigenvectors of a positive semi-definite matrix.

    Goes on until the first vector is within `VECTOR_TOLERANCE` of the true one, or is known to
    have a neighbour within `GAP_TOLERANCE`, and `search.settle` directions have settled.

    Args:
        apply: takes rows `[b, n]`, returns their products `[b, n]` and, if wanted later for the
            Ritz vectors, another linear image `[b, m]`.
        start: `[b, n]`, where to start from; random rows will do.
        search: how far to go; `largest` is to be well below n.
    """
    basis = _Basis(apply, start, search)
    while True:
        fresh, coupling = basis.extend()
        done = basis.blocks >= search.blocks
        since = basis.blocks - search.first_check
        if done or (since >= 0 and since % search.check_every == 0):
            squares, vectors = basis.rayleigh_ritz()
            bounds = (coupling @ vectors[-len(coupling) :]).norm(dim=0)
            relative = bounds / squares.clamp_min(torch.finfo(squares.dtype).tiny)
            settled = basis.blocks >= search.settle_blocks or is_settled(
                squares, relative, search.settle
            )
            if done or (settled and is_decided(squares, relative)):
                return basis.result(squares, vectors)
        if basis.rows + len(fresh) > search.largest:
            basis.restart()
        basis.fresh = fresh


def is_decided(squares: Tensor, residuals: Tensor) -> bool:
    """Tell whether the leading vector is known well enough, or known to have a close neighbour.

    Args:
        squares: `[k]`, Ritz values, largest first.
        residuals: `[k]`, relative, of their vectors.
    """
    first, second = squares[:2].tolist()
    if first <= 0.0:
        return True
    own, next_own = residuals[:2].tolist()
    gap = 1.0 - second / first
    surely_apart = gap - next_own * second / first
    if gap + own <= squared_gap(GAP_TOLERANCE):
        return True
    return bool(own <= VECTOR_TOLERANCE * max(0.0, surely_apart))


def is_settled(
    squares: Tensor, residuals: Tensor, count: int, tolerance: float = ANGLE_TOLERANCE
) -> bool:
    """Tell whether the leading `count` directions are within a tolerance, or rounding."""
    within = residuals[:count] <= tolerance
    return bool((within | (squares[:count] <= RANK_FLOOR * squares[0])).all())


class _Basis:
    """An orthonormal basis with its products, grown block by block."""

    def __init__(self, apply: Apply, start: Tensor, search: Search) -> None:
        self._apply = apply
        self._search = search
        self.fresh = torch.linalg.qr(start.T).Q.T
        self.rows = 0
        self.blocks = 0
        size, width = search.largest, start.shape[1]
        self._vectors = start.new_empty(size, width)
        self._products = start.new_empty(size, width)
        self._images: Tensor | None = None
        self._projected = torch.zeros(size, size, dtype=torch.float64)

    def extend(self) -> tuple[Tensor, Tensor]:
        """Take the fresh block in; return the next one and how it is coupled to the last."""
        old, new = self.rows, self.rows + len(self.fresh)
        products, images = self._apply(self.fresh)
        self._vectors[old:new] = self.fresh
        self._products[old:new] = products
        if images is not None:
            if self._images is None:
                self._images = images.new_empty(self._search.largest, images.shape[1])
            self._images[old:new] = images
        inner = (self.fresh @ self._products[:new].T).double().cpu()
        self._projected[old:new, :new] = inner
        self._projected[:new, old:new] = inner.T
        self.rows, self.blocks = new, self.blocks + 1
        return self._next(products)

    def _next(self, products: Tensor) -> tuple[Tensor, Tensor]:
        known = self._vectors[: self.rows]
        outside = products - (products @ known.T) @ known
        outside = outside - (outside @ known.T) @ known
        fresh, triangle = torch.linalg.qr(outside.T)
        smallest = float(triangle.diagonal().abs().min())
        if smallest <= _ROUNDING * float(products.norm(dim=1).max()):
            # The space is all but exhausted: some of what is left is rounding, and that is not
            # orthogonal to anything until it has been made so at its own scale.
            for _ in range(_PASSES):
                fresh = torch.linalg.qr(fresh - known.T @ (known @ fresh)).Q
        return fresh.T, triangle.double().cpu()

    def rayleigh_ritz(self) -> tuple[Tensor, Tensor]:
        """Return the leading values `[count]` and coefficients `[rows, count]`, fp64 on the CPU."""
        projected = self._projected[: self.rows, : self.rows]
        squares, vectors = torch.linalg.eigh((projected + projected.T) / 2)
        count = self._search.count
        return squares.flip(0)[:count].clamp_min(0.0), vectors.flip(1)[:, :count]

    def restart(self) -> None:
        """Keep the best half of the basis."""
        projected = self._projected[: self.rows, : self.rows]
        squares, vectors = torch.linalg.eigh((projected + projected.T) / 2)
        keep = max(self._search.count, self.rows // 2)
        turn = vectors.flip(1)[:, :keep].T.to(self._vectors)
        for stored in (self._vectors, self._products, self._images):
            if stored is not None:
                stored[:keep] = turn @ stored[: self.rows]
        self._projected.zero_()
        self._projected[:keep, :keep] = squares.flip(0)[:keep].diag()
        self.rows = keep

    def result(self, squares: Tensor, vectors: Tensor) -> Ritz:
        """Return the Ritz vectors with residuals computed from the products themselves."""
        turn = vectors.T.to(self._vectors)
        found, products = (turn @ x[: self.rows] for x in (self._vectors, self._products))
        images = None if self._images is None else turn @ self._images[: self.rows]
        rest = products - squares.to(found)[:, None] * found
        norms = rest.norm(dim=1).double().cpu()
        relative = norms / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        return Ritz(found, squares, products, images, relative)


def random_rows(count: int, width: int, seed: int, like: Tensor) -> Tensor:
    """Return standard normal `[count, width]`, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(like.device)


class Stored:
    """A weight in the type it is stored in, multiplied block of rows by block of rows in fp32.

    Only one block is ever held widened, so that it stays in the processor's cache.
    """

    BLOCK_BYTES = 4 << 20  # of a widened block, on the CPU
    CUDA_BLOCK_BYTES = 1 << 30

    def __init__(self, weight: Tensor, device: torch.device) -> None:
        """Take a weight `[out, in]` of any float dtype; `device` is where to compute."""
        self.weight = weight
        self.device = device
        self._factor = 1.0  # a power of two that keeps squares inside the range of fp32
        budget = self.CUDA_BLOCK_BYTES if device.type == "cuda" else self.BLOCK_BYTES
        self._rows = max(1, min(len(weight), budget // (4 * max(1, weight.shape[1]))))
        self._buffer = torch.empty(self._rows, weight.shape[1], device=device)

    @property
    def like(self) -> Tensor:
        """An fp32 tensor on the device, for others to be made like."""
        return self._buffer

    def survey(
        self, right: Tensor, left: Tensor, row_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read the weight once; return `W right`, `left^T W` and the energies of its columns.

        To be called first: it sets the scale of a weight whose squares leave the range of fp32.

        Args:
            right: `[in, c]`, fp32 on the device.
            left: `[out, c']`.
            row_weights: `[k, out]`; the energies are `[k, in]`, `sum_i weight_ki W_ij^2`.
        """
        image = right.new_empty(len(self.weight), right.shape[1])
        product = right.new_zeros(left.shape[1], self.weight.shape[1])
        energies = right.new_zeros(len(row_weights), self.weight.shape[1])
        for rows, block in self._blocks():
            torch.mm(block, right, out=image[rows])
            product.addmm_(left[rows].T, block)
            energies.addmm_(row_weights[:, rows], block.square_())
        total = float(energies[0].double().sum())
        if self._factor == 1.0 and not 1e-24 <= total <= 1e24:
            largest = self._largest()
            if largest > 0.0 and math.isfinite(largest):
                self._factor = 2.0 ** -math.frexp(largest)[1]
                return self.survey(right, left, row_weights)
        return image, product, energies

    def _largest(self) -> float:
        pieces = (self.weight[i : i + self._rows] for i in range(0, len(self.weight), self._rows))
        return max(float(piece.abs().amax().double()) for piece in pieces)

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows widened to fp32, all in one buffer, with their places."""
        for start in range(0, len(self.weight), self._rows):
            rows = slice(start, min(start + self._rows, len(self.weight)))
            block = self._buffer[: rows.stop - start]
            if self._factor == 1.0:
                block.copy_(self.weight[rows])
            else:
                block.copy_(self.weight[rows].double() * self._factor)
            yield rows, block

    def visit(self, right: Tensor, row_weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Read the weight once; return `X = W right` `[out, c]` and `(row_weights X)^T W`.

        Args:
            right: `[in, c]`, fp32 on the device.
            row_weights: `[out]`; None is all ones.
        """
        out, width = self.weight.shape
        image = right.new_empty(out, right.shape[1])
        product = right.new_zeros(right.shape[1], width)
        for rows, block in self._blocks():
            side = torch.mm(block, right, out=image[rows])
            if row_weights is not None:
                side = side * row_weights[rows, None]
            product.addmm_(side.T, block)
        return image, product
