"""How the energy of a weight is spread over its singular values, without a decomposition.

Exact from the Gram matrix of the shorter side where that is small; else stochastic Lanczos
quadrature (Golub and Meurant; Lin, Saad and Yang 2016), which only multiplies by the weight.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gccompress.roles import Space

EXACT_UP_TO = 1024  # width of a Gram matrix that is decomposed outright, in a second or so
PROBES = 8
STEPS = 32


def squared_values(weights: Sequence[Tensor], space: Space, seed: int = 0) -> NDArray[np.float64]:
    """Return the squared singular values of stacked weights, descending, each weight at norm 1.

    INPUT stacks `[sum out, in]`, OUTPUT `[out, sum in]`: the tail beyond rank k is what a basis of
    rank k shared by all of them must lose, as a share of each weight's energy. Every weight is
    divided by its Frobenius norm first, so the values sum to the number of weights that are not 0.

    Args:
        weights: `[out, in]` each, alike on the side of `space`, any float dtype, on one device.
        space: the shared side; for one weight both give the same.
        seed: of the probes; the same seed, the same estimate.

    Returns:
        `[min(sum out, in)]` or `[min(out, sum in)]` values; estimates where the shorter side is
        wider than `EXACT_UP_TO`, exact in their sum.
    """
    turned = [w if space is Space.INPUT else w.T for w in weights]
    scaled = [(w, _inverse_norm(w)) for w in turned]
    energy = sum(1.0 for _, scale in scaled if scale)
    rows, cols = sum(len(w) for w in turned), turned[0].shape[1]
    if cols <= EXACT_UP_TO or rows <= EXACT_UP_TO:
        stack = torch.cat([w.double() * scale for w, scale in scaled])
        gram = stack.T @ stack if cols <= rows else stack @ stack.T
        return torch.linalg.eigvalsh(gram).flip(0).clamp_min(0).cpu().numpy()
    nodes, shares = _quadrature(scaled, cols, seed)
    return _spread(nodes, shares * cols, min(rows, cols), energy)


def _inverse_norm(weight: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(weight, dtype=torch.float32))
    return 1.0 / norm if norm else 0.0


def _quadrature(
    scaled: Sequence[tuple[Tensor, float]], cols: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return nodes and shares of the spectral density of the stack's Gram matrix `[cols, cols]`.

    Lanczos with full reorthogonalisation from `PROBES` random starts, all multiplied together.
    """
    device = scaled[0][0].device
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(cols, PROBES, generator=generator, dtype=torch.float32).to(device)
    basis = [start / start.norm(dim=0)]
    diagonal, beside = [], []
    for step in range(STEPS):
        v = torch.zeros_like(start)
        for weight, scale in scaled:
            w = weight.float()
            v += scale**2 * (w.T @ (w @ basis[-1]))
        alpha = (v * basis[-1]).sum(0)
        diagonal.append(alpha.double().cpu())
        for _ in range(2):  # twice is enough (Kahan and Parlett)
            for q in basis:
                v -= (v * q).sum(0) * q
        beta = v.norm(dim=0)
        if step + 1 == STEPS or not bool((beta > 1e-7 * alpha.abs().clamp_min(1e-30)).all()):
            break
        beside.append(beta.double().cpu())
        basis.append(v / beta)
    nodes, shares = [], []
    for probe in range(PROBES):
        t = torch.diag(torch.stack([d[probe] for d in diagonal]))
        if beside:
            off = torch.stack([b[probe] for b in beside])[: len(t) - 1]
            t = t + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(t)
        nodes.append(values.clamp_min(0).numpy())
        shares.append(vectors[0].square().numpy() / PROBES)
    return np.concatenate(nodes), np.concatenate(shares)


def _spread(
    nodes: NDArray[np.float64], counts: NDArray[np.float64], length: int, energy: float
) -> NDArray[np.float64]:
    """Return `length` descending values whose density is `counts` values at each of `nodes`."""
    order = np.argsort(-nodes)
    nodes, counts = nodes[order], counts[order]
    at = np.searchsorted(np.cumsum(counts), np.arange(length) + 0.5)
    values = nodes[np.minimum(at, len(nodes) - 1)]
    total = values.sum()
    return values * (energy / total) if total else values
