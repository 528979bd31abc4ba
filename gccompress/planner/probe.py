"""Plans tried in memory: what a candidate costs on held-out text, before anything is written."""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gccompress.files import write_text
from gccompress.linalg import Damping, round_to_nearest
from gccompress.moments import Moments
from gccompress.moves import applied
from gccompress.plan import AnyMove
from gccompress.scores import score_windows
from gccompress.text import Windows
from gccompress.view import ModelView

logger = logging.getLogger(__name__)

PROBE_VERSION = 1  # of the factorisation and the score; probes kept by another are not taken up


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
        self,
        view: ModelView,
        moments: Moments,
        damping: Damping,
        windows: Windows,
        cache: Path | None = None,
    ) -> None:
        """Score the dense model, or take up what `cache` (a folder) has of this model and text.

        Raises `NumericalError` naming a window of non-finite loss.
        """
        self._view, self._moments, self._damping = view, moments, damping
        self._windows = windows
        key = json.dumps([PROBE_VERSION, moments.hash, windows.hash, asdict(damping)])
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._path = None if cache is None else cache / "probes" / f"{name}.json"
        self._kept: dict[str, list[float]] = _read(self._path)
        if "dense" not in self._kept:
            self._keep("dense", window_losses(view, windows).tolist())
        self._dense = torch.tensor(self._kept["dense"], dtype=torch.float64)
        self.dense_nll = float(self._dense.mean())
        self.found: dict[str, Probe] = {}

    def measure(self, strategy: str, moves: Sequence[AnyMove]) -> Probe:
        """Carry the moves out in memory, score the model, and put it back."""
        plan = tuple(moves)
        work = applied(self._view, self._moments, plan, self._damping)
        return self._measure(strategy, _key(plan), work)

    def measure_rounded(self, name: str, bits: int, group: int) -> Probe:
        """Round every projection to nearest, score the model, and put it back."""
        return self._measure(name, f"rtn {bits} {group}", _rounded(self._view, bits, group))

    def _measure(self, name: str, key: str, work: AbstractContextManager[None]) -> Probe:
        """Score the model as `work` makes it against the dense one, unless that is known."""
        if key not in self._kept:
            with work:
                self._keep(key, window_losses(self._view, self._windows).tolist())
        rise = torch.tensor(self._kept[key], dtype=torch.float64) - self._dense
        error = float(rise.std() / len(rise) ** 0.5) if len(rise) > 1 else math.nan
        self.found[name] = Probe(float(rise.mean()), error)
        return self.found[name]

    def _keep(self, key: str, losses: list[float]) -> None:
        """Write down what was measured at once."""
        self._kept[key] = losses
        if self._path is not None:
            # Another run of the same model may have added to the file meanwhile.
            self._kept = _read(self._path) | self._kept
            write_text(self._path, json.dumps(self._kept))


def _read(path: Path | None) -> dict[str, list[float]]:
    """Return the probes of a file; a damaged one counts as none and is said so."""
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(key): [float(loss) for loss in losses] for key, losses in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        logger.warning("%s: damaged (%s); plans are tried again", path, error)
        return {}


def _key(moves: tuple[AnyMove, ...]) -> str:
    """Return what tells plans apart: what is done, not what was predicted of it."""
    done = [move.model_dump(mode="json", exclude={"loss", "gain", "saves"}) for move in moves]
    return hashlib.sha256(json.dumps(done, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _rounded(view: ModelView, bits: int, group: int) -> Iterator[None]:
    """Round every projection of the model to nearest meanwhile."""
    matrices = [(role, layer) for role in view.roles for layer in range(view.num_layers)]
    originals = [view.weight(role, layer).clone() for role, layer in matrices]
    try:
        for (role, layer), weight in zip(matrices, originals, strict=True):
            view.set_weight(role, layer, round_to_nearest(weight, bits, group))
        yield
    finally:
        for (role, layer), weight in zip(matrices, originals, strict=True):
            view.set_weight(role, layer, weight)


def window_losses(view: ModelView, windows: Windows) -> torch.Tensor:
    """Return the mean NLL of each window `[n]`, nats per token, float64."""
    losses = score_windows(view.model, windows).nll
    assert losses is not None  # noqa: S101 - asked for
    return losses.double()
