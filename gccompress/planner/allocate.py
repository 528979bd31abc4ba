"""One price for every unit of the budget: the ranks, bases and widths that lose least under it.

For a price tau every size of every candidate costs `predicted loss + tau * cost`; `cuts` finds the
cheapest choice, bisection on tau meets the budget. The budget is in parameters, or in nanoseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gccompress.errors import PlanError
from gccompress.planner.cuts import Chosen, Gone, Option, cheapest_cuts
from gccompress.planner.survey import Segment, Width
from gccompress.sizes import largest_saving_rank

BISECTIONS = 32  # of a price between 1e-18 and 1: to a millionth part of itself


@dataclass(frozen=True)
class Scales:
    """Measured over predicted loss, by kind of move, so that kinds can compete.

    Attributes:
        rank: for factored matrices, alone or shared.
        width: for removed neurons.
        drop: for dropped layers.
    """

    rank: float = 1.0
    width: float = 1.0
    drop: float = 1.0


class Costs(Protocol):
    """What candidates take of a budget, in whole units."""

    unit: str

    def ranks(self, segment: Segment, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of a segment at each rank."""

    def dense(self, segment: Segment) -> int:
        """Return the cost of a segment's matrices as they are."""

    def widths(self, width: Width, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the cost of an MLP at each width."""


class Params:
    """A budget of decoder-projection parameters."""

    unit = "decoder parameters"

    def ranks(self, segment: Segment, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return parameters."""
        return ranks * segment.per_rank

    def dense(self, segment: Segment) -> int:
        """Return parameters."""
        return segment.dense

    def widths(self, width: Width, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return parameters."""
        return sizes * width.per_neuron


@dataclass(frozen=True)
class Allocation:
    """The choice that loses least, and the price at which it was found.

    Attributes:
        chosen: every candidate with its size; dense and dropped ones too.
        tau: nats per unit of the budget.
        options: everything it was chosen from.
    """

    chosen: tuple[Chosen, ...]
    tau: float
    options: tuple[Option, ...] = field(repr=False, default=())

    @property
    def cost(self) -> int:
        """What it takes of the budget."""
        return _cost(self.chosen)

    @property
    def loss(self) -> float:
        """Predicted nats per token, calibrated by kind, without the dropped layers' own."""
        return sum(one.loss for one in self.chosen)


def allocate(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    budget: int,
    *,
    multiple: int,
    scales: Scales = Scales(),  # noqa: B008 - frozen
    costs: Costs = Params(),  # noqa: B008 - stateless
    dropped: frozenset[int] = frozenset(),
) -> Allocation:
    """Return the choice with the least predicted loss whose cost is at most `budget`.

    Args:
        segments: candidates; every layer of every role has one of its own.
        widths: candidates for whole MLPs, at most one a layer.
        budget: what it may cost, in the unit of `costs`.
        multiple: ranks and widths are multiples of this.
        scales: what a predicted nat of each kind is worth.
        costs: what candidates cost.
        dropped: layers that are gone: they cost nothing here, and nothing spans them.

    Raises:
        PlanError: the budget is below the smallest that these candidates reach.
    """
    options = _options(segments, widths, multiple, scales, costs, dropped)
    smallest = cheapest_cuts(options, float("inf"))
    if _cost(smallest) > budget:
        dense = sum(costs.dense(one) for one in segments if len(one.matrices) == 1)
        raise PlanError(
            f"budget of {budget} {costs.unit} ({budget / dense:.3f} kept): the smallest this "
            f"strategy reaches is {_cost(smallest)} ({_cost(smallest) / dense:.3f} kept) with "
            f"sizes in steps of {multiple}; raise the budget, lower --multiple or use another "
            "strategy"
        )
    low, high, best = 1e-18, 1.0, smallest
    for _ in range(BISECTIONS):
        tau = (low * high) ** 0.5
        choice = cheapest_cuts(options, tau)
        if _cost(choice) <= budget:
            high, best = tau, choice
        else:
            low = tau
    return Allocation(_fill(best, budget), high, options)


def private_loss(segment: Segment, alone: Sequence[Segment], rank: int, multiple: int) -> float:
    """Return the least predicted loss of the same matrices, each by itself, at no more parameters.

    Infinite where the private alternative cannot be as small.

    Args:
        segment: a shared candidate.
        alone: the segments of its matrices, one each.
        rank: of the shared basis.
        multiple: of private ranks.
    """
    options = [option for one in alone if (option := _segment_sizes(one, multiple, 1.0, Params()))]
    smallest = tuple(Chosen(option, 0) for option in options)
    budget = rank * segment.per_rank
    if _cost(smallest) > budget:
        return float("inf")
    # One after the other from the smallest is right where losses are convex in size, as they are.
    return sum(one.loss for one in _fill(smallest, budget))


def _options(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    multiple: int,
    scales: Scales,
    costs: Costs,
    dropped: frozenset[int],
) -> tuple[Option, ...]:
    """Return every candidate with its sizes."""
    found: list[Option] = []
    for segment in segments:
        if not dropped & set(segment.layers):
            option = _segment_sizes(segment, multiple, scales.rank, costs)
            found += [] if option is None else [option]
        elif len(segment.matrices) == 1:
            nothing = np.zeros(1, dtype=np.int64)
            gone = Gone(segment.roles[0], segment.layers[0])
            found.append(Option(gone, nothing, nothing, np.zeros(1)))
    for width in widths:
        # None where the multiple is not below what the MLP has.
        sizes = np.arange(multiple, width.inner, multiple, dtype=np.int64)
        if len(sizes) and width.layer not in dropped:
            losses = width.losses[width.inner - sizes] * scales.width
            found.append(Option(width, sizes, costs.widths(width, sizes), losses))
    return tuple(found)


def _segment_sizes(segment: Segment, multiple: int, scale: float, costs: Costs) -> Option | None:
    """Return every rank of a segment that saves, and dense for one matrix; None without any."""
    limit = min(len(segment.saved), largest_saving_rank(segment.dense, segment.per_rank))
    step = min(multiple, limit)  # a matrix smaller than the multiple can still be factored
    ranks = np.arange(step, limit + 1, step) if step else np.array([], dtype=np.int64)
    sizes = ranks.astype(np.int64)
    losses, cost = segment.tail()[ranks] * scale, costs.ranks(segment, sizes)
    if len(segment.matrices) == 1:
        cheaper = cost < costs.dense(segment)  # in time, a factored matrix can be the dearer one
        sizes, losses, cost = sizes[cheaper], losses[cheaper], cost[cheaper]
        sizes, losses = np.append(sizes, 0), np.append(losses, 0.0)
        cost = np.append(cost, costs.dense(segment))
    return Option(segment, sizes, cost.astype(np.int64), losses) if len(sizes) else None


def _fill(choice: tuple[Chosen, ...], budget: int) -> tuple[Chosen, ...]:
    """Spend what the bisection left over, one size at a time where it saves most."""
    chosen = list(choice)
    left = budget - _cost(choice)
    while True:
        best, gain = -1, 0.0
        for index, one in enumerate(chosen):
            if one.index + 1 == len(one.option.sizes):
                continue
            step = Chosen(one.option, one.index + 1)
            more, saved = step.cost - one.cost, one.loss - step.loss
            rate = saved / more if more > 0 else float("inf") if saved > 0 else 0.0
            if more <= left and rate > gain:
                best, gain = index, rate
        if best < 0:
            return tuple(chosen)
        left += chosen[best].cost
        chosen[best] = Chosen(chosen[best].option, chosen[best].index + 1)
        left -= chosen[best].cost


def _cost(choice: Sequence[Chosen]) -> int:
    return sum(one.cost for one in choice)
