"""One price for every parameter: the ranks and segments that lose least under a budget.

For a price tau each segment costs `tail loss + tau * size`; per role the best cut of the layers
into segments is a dynamic programme over segment ends; bisection on tau meets the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gccompress.errors import PlanError
from gccompress.planner.survey import Segment
from gccompress.roles import Role
from gccompress.sizes import largest_saving_rank

BISECTIONS = 60


@dataclass(frozen=True)
class Chosen:
    """A segment at a rank; rank None leaves it dense (single layers only)."""

    segment: Segment
    rank: int | None

    @property
    def params(self) -> int:
        """Parameters it takes."""
        if self.rank is None:
            return self.segment.dense
        return self.rank * self.segment.per_rank

    @property
    def loss(self) -> float:
        """Predicted nats per token."""
        return 0.0 if self.rank is None else float(self.segment.saved[self.rank :].sum())


@dataclass(frozen=True)
class _Options:
    """The sizes one segment can have, with the loss of each; the last may be dense."""

    segment: Segment
    ranks: NDArray[np.int64]  # -1 means dense
    params: NDArray[np.float64]
    losses: NDArray[np.float64]


def allocate(segments: Sequence[Segment], budget: int, multiple: int) -> tuple[Chosen, ...]:
    """Return the choice with the least predicted loss whose parameters are at most `budget`.

    Args:
        segments: candidates; every layer of every role has one of its own.
        budget: decoder-projection parameters allowed.
        multiple: ranks are multiples of this.

    Raises:
        PlanError: the budget is below the smallest that these segments reach.
    """
    by_role: dict[Role, list[_Options]] = {}
    for segment in segments:
        options = _options(segment, multiple)
        if len(options.ranks):
            by_role.setdefault(segment.role, []).append(options)
    smallest = _best(by_role, float("inf"))
    if _params(smallest) > budget:
        dense = sum(segment.dense for segment in segments if len(segment.layers) == 1)
        raise PlanError(
            f"budget of {budget} decoder parameters ({budget / dense:.3f} kept): the smallest this "
            f"strategy reaches is {_params(smallest)} ({_params(smallest) / dense:.3f} kept); "
            "raise the budget or use another strategy"
        )
    low, high, best = 1e-18, 1.0, smallest
    for _ in range(BISECTIONS):
        tau = (low * high) ** 0.5
        choice = _best(by_role, tau)
        if _params(choice) <= budget:
            high, best = tau, choice
        else:
            low = tau
    return _fill(best, budget, multiple)


def _options(segment: Segment, multiple: int) -> _Options:
    """Return the sizes of a segment: every rank that saves, and dense for one layer."""
    limit = min(len(segment.saved), largest_saving_rank(segment.dense, segment.per_rank))
    step = min(multiple, limit)  # a matrix smaller than the multiple can still be factored
    ranks = np.arange(step, limit + 1, step) if step else np.array([], dtype=np.int64)
    losses, params = segment.tail()[ranks], (ranks * segment.per_rank).astype(np.float64)
    if len(segment.layers) == 1:
        ranks, losses = np.append(ranks, -1), np.append(losses, 0.0)
        params = np.append(params, float(segment.dense))
    return _Options(segment, ranks.astype(np.int64), params, losses)


def _best(by_role: dict[Role, list[_Options]], tau: float) -> tuple[Chosen, ...]:
    """Return the cheapest cut of every role at price `tau` (infinite: the smallest)."""
    return tuple(chosen for options in by_role.values() for chosen in _best_cut(options, tau))


def _best_cut(options: Sequence[_Options], tau: float) -> list[Chosen]:
    """Cut layers 0..L of one role into segments of least `loss + tau * size`."""
    layers = 1 + max(one.segment.layers[-1] for one in options)
    cost = [0.0] + [float("inf")] * layers
    last: list[Chosen | None] = [None] * (layers + 1)
    for one in sorted(options, key=lambda o: (o.segment.layers[-1], len(o.segment.layers))):
        prices = one.params if tau == float("inf") else one.losses + tau * one.params
        pick = int(np.argmin(prices))
        start, end = one.segment.layers[0], one.segment.layers[-1] + 1
        total = cost[start] + float(prices[pick])
        # Strictly cheaper only: at a tie the private alternative, seen first, stays.
        if total < cost[end]:
            rank = int(one.ranks[pick])
            cost[end], last[end] = total, Chosen(one.segment, None if rank < 0 else rank)
    cut: list[Chosen] = []
    end = layers
    while end:
        chosen = last[end]
        assert chosen is not None  # noqa: S101 - every layer has a segment of its own
        cut.append(chosen)
        end = chosen.segment.layers[0]
    return cut[::-1]


def _fill(choice: tuple[Chosen, ...], budget: int, multiple: int) -> tuple[Chosen, ...]:
    """Spend what the bisection left over, one rank step at a time where it saves most."""
    chosen = list(choice)
    left = budget - _params(choice)
    while True:
        best, gain = -1, 0.0
        for index, one in enumerate(chosen):
            step = _step(one, multiple)
            if step is None or step.params - one.params > left:
                continue
            worth = (one.loss - step.loss) / (step.params - one.params)
            if worth > gain:
                best, gain = index, worth
        if best < 0:
            return tuple(chosen)
        step = _step(chosen[best], multiple)
        assert step is not None  # noqa: S101 - it was just found
        left -= step.params - chosen[best].params
        chosen[best] = step


def _step(chosen: Chosen, multiple: int) -> Chosen | None:
    """Return the next larger size of a choice, or None at the top."""
    if chosen.rank is None:
        return None
    limit = min(
        len(chosen.segment.saved),
        largest_saving_rank(chosen.segment.dense, chosen.segment.per_rank),
    )
    if chosen.rank + multiple <= limit:
        return replace(chosen, rank=chosen.rank + multiple)
    return replace(chosen, rank=None) if len(chosen.segment.layers) == 1 else None


def _params(choice: Sequence[Chosen]) -> int:
    return sum(one.params for one in choice)
