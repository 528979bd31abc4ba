"""Width: which inner dimensions of an MLP can go, in which order, and at what loss (float64).

Optimal brain surgeon in the K-FAC metric, removed in blocks: see docs/method.md, "Width".
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gccompress.errors import NumericalError
from gccompress.linalg import Weighted, cholesky

BLOCK = 32  # neurons removed at a time: the losses stay exact, only the order is coarser


@dataclass(frozen=True)
class NeuronOrder:
    """The order in which the neurons of one MLP go.

    Attributes:
        removed: `[inner]` neuron indices, the cheapest first.
        losses: `[inner + 1]`, predicted nats per token when the first n are gone and the rest of
            the down projection is refitted; the last is that of removing all.
        jitter: share of the mean diagonal added to a moment to factor it (0: none).
    """

    removed: Tensor
    losses: Tensor
    jitter: float

    def kept(self, width: int) -> Tensor:
        """Return the indices of the `width` neurons that stay, ascending."""
        return self.removed[len(self.removed) - width :].sort().values


def order_neurons(down: Weighted, what: str, block: int = BLOCK) -> NeuronOrder:
    """Order the inputs of a down projection `[hidden, inner]` by what removing them costs.

    With `X = chol(A)^T W` and `P = G^-1`, removing j and refitting the others costs
    `1/2 ||X_j||^2 / P_jj` (optimal brain surgeon, Hassibi and Stork 1993, with the Hessian
    `A x G`). The `block` cheapest go together; X and P are updated for all of them at once, so
    the losses are exact for the sets removed and only the order is greedy. Beside `down` it takes
    the memory of two matrices `[inner, inner]`; see docs/scale.md for the time.

    Raises:
        NumericalError: a moment that cannot be factored.
    """
    left, jitter_a = cholesky(down.a, what)
    x = left.T @ down.weight
    p, jitter_g = _inverse(down.g, what)
    n = x.shape[1]  # neurons still there: the first n columns of x, rows and columns of p
    there = torch.arange(n, device=x.device)
    removed: list[Tensor] = []
    losses = [x.new_zeros(1)]
    total = x.new_zeros(())
    while n:
        price = x[:, :n].square().sum(0) / p.diagonal()[:n]
        count = min(block, n)
        gone = price.argsort(stable=True)[:count]
        removed.append(there[gone])
        rows, columns = p[gone, :n], x[:, gone]
        # Cholesky of the block: its steps are the removals one after another, in this order.
        step, _ = cholesky(rows[:, gone], what)
        scaled = torch.linalg.solve_triangular(step, columns.T, upper=False)
        running = scaled.square().sum(1).cumsum(0) / 2
        losses.append(total + running)
        total = total + running[-1]
        n -= count
        holes, last = _holes(gone, n)
        for one in (there, rows.T, x.T, p, p.T):
            one[holes] = one[last]
        across = torch.linalg.solve_triangular(step, rows[:, :n], upper=False)
        x[:, :n].addmm_(scaled.T, across, alpha=-1)
        p[:n, :n].addmm_(across.T, across, alpha=-1)
    found = NeuronOrder(torch.cat(removed), torch.cat(losses), max(jitter_a, jitter_g))
    if not bool(torch.isfinite(found.losses).all()):
        raise NumericalError(f"{what}: neuron prices are not finite; calibrate with more tokens")
    return found


def _inverse(moment: Tensor, what: str) -> tuple[Tensor, float]:
    """Return the inverse of a moment, and the jitter; two matrices of its size at most."""
    root, jitter = cholesky(moment, what)
    return torch.cholesky_inverse(root), jitter


def _holes(gone: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return where below n something is gone, and what stays from n on, to be moved there."""
    stays = torch.ones(n + len(gone), dtype=torch.bool, device=gone.device)
    stays[gone] = False
    return (~stays[:n]).nonzero()[:, 0], n + stays[n:].nonzero()[:, 0]


def refit(down: Weighted, kept: Tensor, what: str) -> Tensor:
    """Return the `[hidden, kept]` weight that best replaces a down projection on fewer inputs.

    `W G[:, S] G[S, S]^-1`: least squares in the metric of the inputs (A drops out).
    """
    root, _ = cholesky(down.g[kept[:, None], kept], what)
    return torch.cholesky_solve((down.weight @ down.g[:, kept]).T, root).T
