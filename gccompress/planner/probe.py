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
from gccompress.planner.band import USUAL, Band, Known, extrapolated, probed
from gccompress.planner.costs import losses_by_kind
from gccompress.scores import score_windows
from gccompress.text import Windows
from gccompress.view import ModelView

logger = logging.getLogger(__name__)

PROBE_VERSION = 2  # of the factorisation and the score; probes kept by another are not taken up


@dataclass(frozen=True)
class Probe:
    """What a plan costs on held-out windows.

    Attributes:
        rise: mean rise of the NLL over the dense model, nats per token.
        error: standard error of the rise, from its spread over windows (paired).
        windows: how many.
    """

    rise: float
    error: float
    windows: int

    @property
    def band(self) -> Band:
        """The 90% band of the rise on other text of this kind."""
        return probed(self.rise, self.error, self.windows)


@dataclass(frozen=True)
class Kept:
    """What is kept of a probe.

    Attributes:
        nll: of each window `[n]`, nats per token.
        losses: predicted by kind of move, uncalibrated; empty where nothing is predicted.
    """

    nll: list[float]
    losses: dict[str, float]


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
        self._kept: dict[str, Kept] = _read(self._path)
        if "dense" not in self._kept:
            self._keep("dense", {})
        self._dense = self._nll("dense")
        self.dense_nll = float(self._dense.mean())
        self.found: dict[str, Probe] = {}

    def measure(self, strategy: str, moves: Sequence[AnyMove]) -> Probe:
        """Carry the moves out in memory, score the model, and put it back."""
        plan = tuple(moves)
        work = applied(self._view, self._moments, plan, self._damping)
        return self._measure(strategy, _key(plan), work, losses_by_kind(plan))

    def measure_rounded(self, name: str, bits: int, group: int) -> Probe:
        """Round every projection to nearest, score the model, and put it back."""
        return self._measure(name, f"rtn {bits} {group}", _rounded(self._view, bits, group), {})

    def extrapolated(self, moves: Sequence[AnyMove]) -> Band:
        """Return the band of a plan that was not measured, from all that were, by any run."""
        known = [
            Known(one.losses, float((self._nll(key) - self._dense).mean()))
            for key, one in self._kept.items()
            if one.losses
        ]
        return extrapolated(losses_by_kind(moves), known)

    def _nll(self, key: str) -> torch.Tensor:
        return torch.tensor(self._kept[key].nll, dtype=torch.float64)

    def _measure(
        self, name: str, key: str, work: AbstractContextManager[None], losses: dict[str, float]
    ) -> Probe:
        """Score the model as `work` makes it against the dense one, unless that is known."""
        if key not in self._kept:
            with work:
                self._keep(key, losses)
        rise = self._nll(key) - self._dense
        error = float(rise.std() / len(rise) ** 0.5) if len(rise) > 1 else math.nan
        self.found[name] = Probe(float(rise.mean()), error, len(rise))
        return self.found[name]

    def _keep(self, key: str, losses: dict[str, float]) -> None:
        """Score the model as it is, and write that down at once."""
        self._kept[key] = Kept(window_losses(self._view, self._windows).tolist(), losses)
        if self._path is not None:
            # Another run of the same model may have added to the file meanwhile.
            self._kept = _read(self._path) | self._kept
            write_text(
                self._path, json.dumps({key: asdict(one) for key, one in self._kept.items()})
            )


def _read(path: Path | None) -> dict[str, Kept]:
    """Return the probes of a file; a damaged one counts as none and is said so."""
    if path is None or not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(key): Kept(
                [float(nll) for nll in one["nll"]],
                {kind: float(one["losses"][kind]) for kind in USUAL if kind in one["losses"]},
            )
            for key, one in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
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
