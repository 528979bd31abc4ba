"""One price for every parameter: the ranks, segments and widths that lose least under a budget.

For a price tau every size of every candidate costs `predicted loss + tau * parameters`. The best
cut of a role's layers into segments is a dynamic programme over segment ends; the MLP's roles are
cut together, since a layer's MLP is either factored or narrowed. Bisection on tau meets the budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gccompress.errors import PlanError
from gccompress.plan import AnyMove
from gccompress.planner.survey import Segment, Width
from gccompress.roles import MLP, Role
from gccompress.sizes import largest_saving_rank

BISECTIONS = 60


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


@dataclass(frozen=True)
class Option:
    """One candidate with all the sizes it can have, the smallest first.

    Attributes:
        candidate: what it is.
        sizes: rank or width of each; 0 means dense, which comes last where it is possible.
        params: parameters of each.
        losses: predicted nats per token of each, calibrated by kind.
    """

    candidate: Segment | Width
    sizes: NDArray[np.int64]
    params: NDArray[np.int64]
    losses: NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """An option at one of its sizes."""

    option: Option
    index: int

    @property
    def params(self) -> int:
        """Parameters it takes."""
        return int(self.option.params[self.index])

    @property
    def loss(self) -> float:
        """Predicted nats per token, calibrated by kind."""
        return float(self.option.losses[self.index])

    @property
    def move(self) -> AnyMove | None:
        """The move, or None when it stays dense."""
        size = int(self.option.sizes[self.index])
        return self.option.candidate.move(size) if size else None


def allocate(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    budget: int,
    *,
    multiple: int,
    scales: Scales = Scales(),  # noqa: B008 - frozen
) -> tuple[Chosen, ...]:
    """Return the choice with the least predicted loss whose parameters are at most `budget`.

    Args:
        segments: candidates; every layer of every role has one of its own.
        widths: candidates for whole MLPs, at most one a layer.
        budget: decoder-projection parameters allowed.
        multiple: ranks and widths are multiples of this.
        scales: what a predicted nat of each kind is worth.

    Raises:
        PlanError: the budget is below the smallest that these candidates reach.
    """
    by_role: dict[Role, list[Option]] = {}
    for segment in segments:
        option = _segment_sizes(segment, multiple, scales.rank)
        if len(option.sizes):
            by_role.setdefault(segment.role, []).append(option)
    sized = {one.layer: _width_sizes(one, multiple, scales.width) for one in widths}
    narrowed = {layer: option for layer, option in sized.items() if len(option.sizes)}
    smallest = _best(by_role, narrowed, float("inf"))
    if _params(smallest) > budget:
        dense = sum(segment.dense for segment in segments if len(segment.layers) == 1)
        raise PlanError(
            f"budget of {budget} decoder parameters ({budget / dense:.3f} kept): the smallest this "
            f"strategy reaches is {_params(smallest)} ({_params(smallest) / dense:.3f} kept) with "
            f"sizes in steps of {multiple}; raise the budget, lower --multiple or use another "
            "strategy"
        )
    low, high, best = 1e-18, 1.0, smallest
    for _ in range(BISECTIONS):
        tau = (low * high) ** 0.5
        choice = _best(by_role, narrowed, tau)
        if _params(choice) <= budget:
            high, best = tau, choice
        else:
            low = tau
    return _fill(best, budget)


def _segment_sizes(segment: Segment, multiple: int, scale: float) -> Option:
    """Return every rank of a segment that saves, and dense for one layer."""
    limit = min(len(segment.saved), largest_saving_rank(segment.dense, segment.per_rank))
    step = min(multiple, limit)  # a matrix smaller than the multiple can still be factored
    ranks = np.arange(step, limit + 1, step) if step else np.array([], dtype=np.int64)
    losses, params = segment.tail()[ranks] * scale, ranks * segment.per_rank
    if len(segment.layers) == 1:
        ranks, losses = np.append(ranks, 0), np.append(losses, 0.0)
        params = np.append(params, segment.dense)
    return Option(segment, ranks.astype(np.int64), params.astype(np.int64), losses)


def _width_sizes(width: Width, multiple: int, scale: float) -> Option:
    """Return every width of an MLP below its own; none where the multiple is not below it."""
    sizes = np.arange(multiple, width.inner, multiple)
    losses = width.losses[width.inner - sizes] * scale
    return Option(width, sizes.astype(np.int64), sizes * width.per_neuron, losses)


def _best(
    by_role: Mapping[Role, list[Option]], narrowed: Mapping[int, Option], tau: float
) -> tuple[Chosen, ...]:
    """Return the cheapest choice at price `tau` (infinite: the smallest)."""
    found: list[Chosen] = []
    cuts = {role: _Cuts(options, tau) for role, options in by_role.items()}
    for role, cut in cuts.items():
        if role not in MLP or not narrowed:
            found += cut.best(0, cut.layers)
    mlp = [cut for role, cut in cuts.items() if role in MLP]
    if mlp and narrowed:
        found += _best_mlps(mlp, {layer: _cheapest(one, tau) for layer, one in narrowed.items()})
    return tuple(found)


def _best_mlps(
    cuts: Sequence["_Cuts"], narrowed: Mapping[int, tuple[float, Chosen]]
) -> list[Chosen]:
    """Choose for every layer's MLP: narrowed, or in a run of layers that are factored or dense."""
    layers = cuts[0].layers
    cost = [0.0] + [float("inf")] * layers
    start_of_run: list[int | None] = [None] * (layers + 1)  # None: narrowed
    for end in range(1, layers + 1):
        for start in range(end):
            total = cost[start] + sum(cut.cost(start, end) for cut in cuts)
            if total < cost[end]:
                cost[end], start_of_run[end] = total, start
        if end - 1 in narrowed and cost[end - 1] + narrowed[end - 1][0] < cost[end]:
            cost[end], start_of_run[end] = cost[end - 1] + narrowed[end - 1][0], None
    found: list[Chosen] = []
    end = layers
    while end:
        first = start_of_run[end]
        if first is None:
            found.append(narrowed[end - 1][1])
            end -= 1
        else:
            found += [chosen for cut in cuts for chosen in cut.best(first, end)]
            end = first
    return found


class _Cuts:
    """The cheapest cuts of every run of layers of one role at one price."""

    def __init__(self, options: Sequence[Option], tau: float) -> None:
        """Price every segment once."""
        self.layers = 1 + max(_segment(one).layers[-1] for one in options)
        self._ends: list[list[tuple[int, float, Chosen]]] = [[] for _ in range(self.layers + 1)]
        # Shorter segments first: at a tie the private alternative stays.
        for one in sorted(options, key=lambda o: len(_segment(o).layers)):
            layers = _segment(one).layers
            self._ends[layers[-1] + 1].append((layers[0], *_cheapest(one, tau)))
        self._runs: dict[int, tuple[list[float], list[tuple[int, Chosen] | None]]] = {}

    def cost(self, start: int, end: int) -> float:
        """Return the price of layers `start` to `end`, exclusive."""
        return self._run(start)[0][end]

    def best(self, start: int, end: int) -> list[Chosen]:
        """Return the cut of layers `start` to `end`, exclusive, in order."""
        last, found = self._run(start)[1], []
        while end > start:
            step = last[end]
            assert step is not None  # noqa: S101 - every layer has a segment of its own
            end, chosen = step
            found.append(chosen)
        return found[::-1]

    def _run(self, start: int) -> tuple[list[float], list[tuple[int, Chosen] | None]]:
        """Return, for every end, the price from `start` and the last segment with its start."""
        if start not in self._runs:
            cost = [float("inf")] * (self.layers + 1)
            last: list[tuple[int, Chosen] | None] = [None] * (self.layers + 1)
            cost[start] = 0.0
            for end in range(start + 1, self.layers + 1):
                for first, price, chosen in self._ends[end]:
                    if first >= start and cost[first] + price < cost[end]:
                        cost[end], last[end] = cost[first] + price, (first, chosen)
            self._runs[start] = cost, last
        return self._runs[start]


def _segment(option: Option) -> Segment:
    assert isinstance(option.candidate, Segment)  # noqa: S101 - widths are kept apart
    return option.candidate


def _cheapest(option: Option, tau: float) -> tuple[float, Chosen]:
    """Return the price and the size of an option at `tau`."""
    infinite = tau == float("inf")
    prices = option.params.astype(float) if infinite else option.losses + tau * option.params
    index = int(np.argmin(prices))
    return float(prices[index]), Chosen(option, index)


def _fill(choice: tuple[Chosen, ...], budget: int) -> tuple[Chosen, ...]:
    """Spend what the bisection left over, one size at a time where it saves most."""
    chosen = list(choice)
    left = budget - _params(choice)
    while True:
        best, gain = -1, 0.0
        for index, one in enumerate(chosen):
            if one.index + 1 == len(one.option.sizes):
                continue
            step = Chosen(one.option, one.index + 1)
            more = step.params - one.params
            if more <= left and (one.loss - step.loss) / more > gain:
                best, gain = index, (one.loss - step.loss) / more
        if best < 0:
            return tuple(chosen)
        left += chosen[best].params
        chosen[best] = Chosen(chosen[best].option, chosen[best].index + 1)
        left -= chosen[best].params


def _params(choice: Sequence[Chosen]) -> int:
    return sum(one.params for one in choice)
