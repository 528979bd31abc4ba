"""Symmetric matrices as upper halves: sums of outer products in memory, packed rows on disk.

A sum is a strip of block rows, each from its diagonal block to the right: 9/16 of the memory and
of the work of the whole matrix. On disk every row starts at its diagonal element: half.
"""

import torch
from torch import Tensor

STRIPS = 8  # more gain little, and their products become too narrow to be fast
_MIRROR = 1024  # rows mirrored at once


def new_sum(n: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a sum of `n`-wide outer products that is nothing yet, float32, flat."""
    size = sum((stop - start) * (n - start) for start, stop in _bounds(n))
    return torch.zeros(size, dtype=torch.float32, device=device)


def sum_bytes(n: int) -> int:
    """Return the bytes of a sum of `n`-wide outer products."""
    return 4 * sum((stop - start) * (n - start) for start, stop in _bounds(n))


def add_outer(total: Tensor, x: Tensor) -> None:
    """Add `x^T x` of `x [tokens, n]`, float32, to a sum in place."""
    for start, block in _strips(total, x.shape[1]):
        block.addmm_(x[:, start : start + len(block)].T, x[:, start:])


def packed(total: Tensor, n: int) -> Tensor:
    """Return the upper half of a sum of `n`-wide outer products, `[n (n + 1) / 2]`, on the CPU."""
    out = torch.empty(n * (n + 1) // 2, dtype=torch.float32)
    at = 0
    for start, block in _strips(total.cpu(), n):
        for row in range(len(block)):
            length = n - start - row
            out[at : at + length] = block[row, row:]
            at += length
    return out


def unpacked(half: Tensor) -> Tensor:
    """Return the symmetric float64 matrix `[n, n]` whose rows from the diagonal are `half`."""
    n = width_of(half)
    m = torch.empty(n, n, dtype=torch.float64)
    at = 0
    for row in range(n):
        m[row, row:] = half[at : at + n - row]
        at += n - row
    for start in range(0, n, _MIRROR):
        rows = m[start : start + _MIRROR, start:]
        corner = rows[:, : len(rows)]
        corner.copy_(corner.triu() + corner.triu(1).T)
        m[start + len(rows) :, start : start + len(rows)] = rows[:, len(rows) :].T
    return m


def diagonal(half: Tensor) -> Tensor:
    """Return the diagonal `[n]` of a packed half."""
    lengths = torch.arange(width_of(half), 0, -1)
    return half[lengths.cumsum(0) - lengths]


def width_of(half: Tensor) -> int:
    """Return n of a packed half `[n (n + 1) / 2]`."""
    return int((2 * len(half)) ** 0.5)


def _bounds(n: int) -> list[tuple[int, int]]:
    height = -(-n // STRIPS)
    return [(start, min(start + height, n)) for start in range(0, n, height)]


def _strips(total: Tensor, n: int) -> list[tuple[int, Tensor]]:
    """Return the first row and the view `[rows, n - first row]` of every strip."""
    found, at = [], 0
    for start, stop in _bounds(n):
        size = (stop - start) * (n - start)
        found.append((start, total[at : at + size].view(stop - start, n - start)))
        at += size
    return found
