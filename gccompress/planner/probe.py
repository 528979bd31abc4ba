"""A probe: the loss of a plan measured in memory on calibration text that no moment has seen."""

from dataclasses import dataclass

import torch
from torch import nn

from gccompress.apply import applied
from gccompress.errors import NumericalError
from gccompress.linalg import Damping
from gccompress.moments import Moments
from gccompress.plan import AnyMove
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


def window_losses(view: ModelView, windows: Windows) -> torch.Tensor:
    """Return the mean NLL in nats per token of each window `[n]`, float64.

    Raises:
        NumericalError: a non-finite loss, naming the window.
    """
    losses = []
    with torch.inference_mode():
        for index, ids in enumerate(windows.ids):
            ids = ids[None].to(view.model.device)
            logits = view.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits, ids[0, 1:])
            if not bool(torch.isfinite(loss)):
                raise NumericalError(f"held-out window {index}: loss is {float(loss)}")
            losses.append(loss.double().cpu())
    return torch.stack(losses)


def probe(
    view: ModelView,
    moments: Moments | None,
    moves: tuple[AnyMove, ...],
    damping: Damping,
    *,
    windows: Windows,
    dense: torch.Tensor,
) -> Probe:
    """Measure a plan against the dense losses `[n]` of the same windows."""
    with applied(view, moments, moves, damping):
        rise = window_losses(view, windows) - dense
    error = float(rise.std() / len(rise) ** 0.5) if len(rise) > 1 else float("nan")
    return Probe(float(rise.mean()), error)
