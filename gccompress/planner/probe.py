"""Probes: the loss of a plan measured in memory on calibration text that no moment has seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gccompress.linalg import Damping, round_to_nearest
from gccompress.moments import Moments
from gccompress.moves import applied
from gccompress.plan import AnyMove
from gccompress.scores import score_windows
from gccompress.text import Windows
from gccompress.view import ModelView


@dataclass(frozen=True)
class Probe:
    """What a plan costs on held-out windows.

    Attributes:
        rise: mean rise of the NLL over the dense model, nats per token.
        error: standard error of the rise, from its spread over windows (paired).
    """

    rise: float
    error: float


class Prober:
    """Measures plans against the dense model on the same held-out windows, each plan once.

    Attributes:
        dense_nll: of the dense model, nats per token.
        found: what was measured, by strategy.
    """

    def __init__(
        self, view: ModelView, moments: Moments, damping: Damping, windows: Windows
    ) -> None:
        """Score the dense model; raises `NumericalError` naming a window of non-finite loss."""
        self._view, self._moments, self._damping = view, moments, damping
        self._windows = windows
        self._dense = window_losses(view, windows)
        self._seen: dict[tuple[AnyMove, ...], Probe] = {}
        self.dense_nll = float(self._dense.mean())
        self.found: dict[str, Probe] = {}

    def measure(self, strategy: str, moves: Sequence[AnyMove]) -> Probe:
        """Carry the moves out in memory, score the model, and put it back."""
        plan = tuple(moves)
        if plan not in self._seen:
            with applied(self._view, self._moments, plan, self._damping):
                self._seen[plan] = self._rise()
        self.found[strategy] = self._seen[plan]
        return self.found[strategy]

    def measure_rounded(self, name: str, bits: int, group: int) -> Probe:
        """Round every projection to nearest, score the model, and put it back."""
        view = self._view
        matrices = [(role, layer) for role in view.roles for layer in range(view.num_layers)]
        originals = [view.weight(role, layer).clone() for role, layer in matrices]
        try:
            for (role, layer), weight in zip(matrices, originals, strict=True):
                view.set_weight(role, layer, round_to_nearest(weight, bits, group))
            self.found[name] = self._rise()
        finally:
            for (role, layer), weight in zip(matrices, originals, strict=True):
                view.set_weight(role, layer, weight)
        return self.found[name]

    def _rise(self) -> Probe:
        """Score the model as it is now against the dense one."""
        rise = window_losses(self._view, self._windows) - self._dense
        error = float(rise.std() / len(rise) ** 0.5) if len(rise) > 1 else math.nan
        return Probe(float(rise.mean()), error)


def window_losses(view: ModelView, windows: Windows) -> torch.Tensor:
    """Return the mean NLL of each window `[n]`, nats per token, float64."""
    losses = score_windows(view.model, windows).nll
    assert losses is not None  # noqa: S101 - asked for
    return losses.double()
