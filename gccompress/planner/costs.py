"""What candidates take of a budget that is no share of the parameters: time on this device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gccompress.errors import PlanError
from gccompress.plan import AnyMove, DropLayers, ResizeMlp
from gccompress.planner.band import USUAL
from gccompress.planner.latency import LatencyTable
from gccompress.planner.survey import Segment, Width

STEPS = 256  # shares of the parameters that a goal is looked for at

Moves = list[AnyMove]


@dataclass(frozen=True)
class Nanoseconds:
    """A budget of prefill time, from a table measured on the device."""

    table: LatencyTable
    unit = "nanoseconds of the projections"

    def ranks(self, segment: Segment, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return nanoseconds; a basis of several roles with one input is one product a layer."""
        if segment.space.value == "output" or len(segment.roles) == 1:
            each = sum(self.table.rank_costs(role, ranks) for role in segment.roles)
        else:
            each = self.table.shared_costs(segment.roles, ranks)
        return np.asarray(len(segment.layers) * each, dtype=np.int64)

    def dense(self, segment: Segment) -> int:
        """Return nanoseconds."""
        return len(segment.layers) * sum(self.table.dense_cost(role) for role in segment.roles)

    def widths(self, width: Width, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return nanoseconds."""
        del width
        return self.table.width_costs(sizes)


def meet(
    make: Callable[[int], Moves], good: Callable[[Moves], bool], dense: int, *, largest: bool
) -> Moves:
    """Return the moves of the largest (or smallest) budget of parameters that reach a goal.

    Args:
        make: from decoder-projection parameters to moves; may raise `PlanError`.
        good: whether moves reach the goal; from some budget on they do (or up to some budget).
        dense: parameters of the dense model's projections.
        largest: look for the largest budget that is good, else for the smallest.

    Raises:
        PlanError: no budget is good; what `make` said last, or that.
    """
    best: Moves | None = None
    failed: PlanError | None = None
    low, high = 0, STEPS  # invariant: `low` is too small (or too good), `high` the other
    while high - low > 1:
        middle = (low + high) // 2
        try:
            moves = make(dense * middle // STEPS)
            reached = good(moves)
        except PlanError as error:
            failed = error
            low = middle  # nothing so small can be made
            continue
        if reached:
            best = moves
        if reached == largest:
            low = middle
        else:
            high = middle
    if best is None:
        raise failed or PlanError("nothing that this strategy can do reaches it")
    return best


def total_loss(moves: Sequence[AnyMove]) -> float:
    """Return the predicted nats per token of moves, uncalibrated."""
    return sum(losses_by_kind(moves).values())


def losses_by_kind(moves: Sequence[AnyMove]) -> dict[str, float]:
    """Return the predicted nats per token of moves, uncalibrated, by kind as `band.USUAL` has."""
    found = dict.fromkeys(USUAL, 0.0)
    for move in moves:
        found[_kind(move)] += move.loss or 0.0
    return found


def _kind(move: AnyMove) -> str:
    match move:
        case DropLayers():
            return "drop"
        case ResizeMlp():
            return "width"
        case _:
            return "rank"
