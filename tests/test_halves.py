"""Upper halves against whole matrices, at widths around the strips' edges."""

import pytest
import torch

from gccompress import halves


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 64, 65, 1030])
def test_sums_of_outer_products_come_back_whole(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    total = halves.new_sum(n)
    rows = [torch.randn(5, n, generator=generator) for _ in range(3)]
    for x in rows:
        halves.add_outer(total, x)
    half = halves.packed(total, n)
    assert halves.sum_bytes(n) == total.nbytes
    assert half.shape == (n * (n + 1) // 2,) and halves.width_of(half) == n
    found = halves.unpacked(half)
    x = torch.cat(rows)
    torch.testing.assert_close(found.float(), x.T @ x, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, found.T)
    upper = torch.ones(n, n, dtype=torch.bool).triu()
    assert torch.equal(found[upper].float(), half)  # row after row, as files have it


def test_a_sum_takes_little_more_than_half() -> None:
    assert halves.sum_bytes(4096) < 0.57 * 4 * 4096**2


@pytest.mark.parametrize("n", [1, 5, 64])
def test_the_diagonal_of_a_half(n: int) -> None:
    m = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    m = m + m.T
    half = m[torch.ones(n, n, dtype=torch.bool).triu()]
    assert torch.equal(halves.diagonal(half), m.diagonal())
    assert torch.equal(halves.unpacked(half), m)
