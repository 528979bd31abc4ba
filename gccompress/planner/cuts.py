"""The cheapest cuts of layers into segments at one price: dynamic programmes over segment ends.

Every role is cut by itself, except where one candidate covers several roles (a narrowed MLP, one
basis for Q and K): then a second programme chooses, run of layers by run, between such a candidate
and the roles' own cuts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gccompress.plan import AnyMove
from gccompress.planner.survey import Segment, Width
from gccompress.roles import MLP, SAME_INPUT, Role

# Roles that one candidate may cover together; each group is cut apart from the others.
_GROUPS: tuple[frozenset[Role], ...] = (
    *(frozenset(group) for group in SAME_INPUT if not set(group) & set(MLP)),
    frozenset(MLP),
)


@dataclass(frozen=True)
class Gone:
    """A projection of a dropped layer: it takes nothing.

    Attributes:
        role: the projection.
        layer: the dropped layer.
    """

    role: Role
    layer: int

    @property
    def roles(self) -> tuple[Role, ...]:
        """What it covers."""
        return (self.role,)

    @property
    def layers(self) -> tuple[int, ...]:
        """Where."""
        return (self.layer,)


@dataclass(frozen=True)
class Option:
    """One candidate with all the sizes it can have, the smallest first.

    Attributes:
        candidate: what it is.
        sizes: rank or width of each; 0 means dense, which comes last where it is possible.
        costs: of each, in the unit of the budget, integers.
        losses: predicted nats per token of each, calibrated by kind.
    """

    candidate: Segment | Width | Gone
    sizes: NDArray[np.int64]
    costs: NDArray[np.int64]
    losses: NDArray[np.float64]


@dataclass(frozen=True)
class Chosen:
    """An option at one of its sizes."""

    option: Option
    index: int

    @property
    def cost(self) -> int:
        """What it takes of the budget."""
        return int(self.option.costs[self.index])

    @property
    def loss(self) -> float:
        """Predicted nats per token, calibrated by kind."""
        return float(self.option.losses[self.index])

    @property
    def move(self) -> AnyMove | None:
        """The move, or None when nothing is done to the matrices."""
        size = int(self.option.sizes[self.index])
        if isinstance(self.option.candidate, Gone) or not size:
            return None
        return self.option.candidate.move(size)


@dataclass(frozen=True)
class _Priced:
    """An option at the size that is cheapest at one price."""

    first: int
    last: int
    price: float
    chosen: Chosen


def cheapest_cuts(options: Sequence[Option], tau: float) -> tuple[Chosen, ...]:
    """Return the choice of least `loss + tau * cost` that covers every role of every layer once.

    Args:
        options: every layer of every role has one of its own.
        tau: nats per unit of the budget; infinite asks for the smallest.
    """
    alone: dict[Role, list[_Priced]] = {}
    joint: dict[frozenset[Role], list[tuple[frozenset[Role], _Priced]]] = {}
    for option in options:
        roles = option.candidate.roles
        if len(roles) == 1:
            alone.setdefault(roles[0], []).append(_cheapest(option, tau))
        else:
            group = next(group for group in _GROUPS if group >= set(roles))
            joint.setdefault(group, []).append((frozenset(roles), _cheapest(option, tau)))
    found: list[Chosen] = []
    for group in _GROUPS:
        cuts = {role: _Cuts(alone[role]) for role in Role if role in group and role in alone}
        if group in joint:
            found += _cut_together(cuts, joint[group])
        else:
            found += [chosen for cut in cuts.values() for chosen in cut.best(0, cut.layers)]
    return tuple(found)


def _cut_together(
    cuts: Mapping[Role, "_Cuts"], joint: Sequence[tuple[frozenset[Role], _Priced]]
) -> list[Chosen]:
    """Choose run by run: a candidate for several roles, or every role's own cut."""
    layers = next(iter(cuts.values())).layers
    ending: list[list[tuple[frozenset[Role], _Priced]]] = [[] for _ in range(layers + 1)]
    for roles, one in joint:
        ending[one.last + 1].append((roles, one))
    cost = [0.0] + [float("inf")] * layers
    step: list[tuple[int, frozenset[Role], Chosen | None]] = [(0, frozenset(), None)] * (layers + 1)
    for end in range(1, layers + 1):
        for start in range(end):
            total = cost[start] + sum(cut.cost(start, end) for cut in cuts.values())
            if total < cost[end]:
                cost[end], step[end] = total, (start, frozenset(), None)
        for roles, one in ending[end]:
            others = (cut for role, cut in cuts.items() if role not in roles)
            total = cost[one.first] + one.price + sum(cut.cost(one.first, end) for cut in others)
            if total < cost[end]:
                cost[end], step[end] = total, (one.first, roles, one.chosen)
    found: list[Chosen] = []
    end = layers
    while end:
        start, roles, chosen = step[end]
        found += [] if chosen is None else [chosen]
        for role, cut in cuts.items():
            found += [] if role in roles else cut.best(start, end)
        end = start
    return found


class _Cuts:
    """The cheapest cuts of every run of layers of one role at one price."""

    def __init__(self, priced: Sequence[_Priced]) -> None:
        """Take the priced segments of a role."""
        self.layers = 1 + max(one.last for one in priced)
        self._ends: list[list[_Priced]] = [[] for _ in range(self.layers + 1)]
        # Shorter segments first: at a tie the private alternative stays.
        for one in sorted(priced, key=lambda one: one.last - one.first):
            self._ends[one.last + 1].append(one)
        self._runs: dict[int, tuple[list[float], list[_Priced | None]]] = {}

    def cost(self, start: int, end: int) -> float:
        """Return the price of layers `start` to `end`, exclusive."""
        return self._run(start)[0][end]

    def best(self, start: int, end: int) -> list[Chosen]:
        """Return the cut of layers `start` to `end`, exclusive, in order."""
        last, found = self._run(start)[1], []
        while end > start:
            step = last[end]
            assert step is not None  # noqa: S101 - every layer has a segment of its own
            end = step.first
            found.append(step.chosen)
        return found[::-1]

    def _run(self, start: int) -> tuple[list[float], list[_Priced | None]]:
        """Return, for every end, the price from `start` and the last segment."""
        if start not in self._runs:
            cost = [float("inf")] * (self.layers + 1)
            last: list[_Priced | None] = [None] * (self.layers + 1)
            cost[start] = 0.0
            for end in range(start + 1, self.layers + 1):
                for one in self._ends[end]:
                    if one.first >= start and cost[one.first] + one.price < cost[end]:
                        cost[end], last[end] = cost[one.first] + one.price, one
            self._runs[start] = cost, last
        return self._runs[start]


def price_at(option: Option, tau: float) -> float:
    """Return the least `loss + tau * cost` of an option."""
    return float((option.losses + tau * option.costs).min())


def _cheapest(option: Option, tau: float) -> _Priced:
    """Return the price and the size of an option at `tau`."""
    infinite = tau == float("inf")
    prices = option.costs.astype(float) if infinite else option.losses + tau * option.costs
    index = int(np.argmin(prices))
    layers = option.candidate.layers
    return _Priced(layers[0], layers[-1], float(prices[index]), Chosen(option, index))
