"""The programme over segments of one and of several roles, against brute force over every cover."""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccompress.errors import PlanError
from gccompress.moments import LayerInfluence
from gccompress.plan import DropLayers, ShareInput
from gccompress.planner import strategies
from gccompress.planner.allocate import Params, Scales, allocate, private_loss
from gccompress.planner.cuts import Option, cheapest_cuts, price_at
from gccompress.planner.survey import Segment, Width
from gccompress.planner.verdicts import sharing_findings
from gccompress.roles import Role, Space

LAYERS = 3
ROLES = (Role.Q, Role.K, Role.V, Role.GATE, Role.UP, Role.DOWN)


def candidate(roles: tuple[Role, ...], first: int, last: int, saved: Sequence[float]) -> Segment:
    """Return a segment of 6 x 6 matrices."""
    layers = tuple(range(first, last + 1))
    count = len(layers) * len(roles)
    values = np.sort(np.array(saved))[::-1].copy()
    return Segment(roles, layers, Space.INPUT, 36 * count, 6 * (1 + count), values)


def model(seed: int) -> tuple[list[Segment], list[Width]]:
    """Return all kinds of candidates: alone, over layers, over roles, over both, and widths."""
    rng = np.random.default_rng(seed)

    def saved(count: int) -> list[float]:
        return list(count * rng.exponential(size=6))

    segments = [candidate((role,), i, i, saved(1)) for role in ROLES for i in range(LAYERS)]
    for roles in ((Role.K,), (Role.GATE,)):
        segments += [candidate(roles, i, i + 1, saved(1)) for i in range(LAYERS - 1)]
    for roles in ((Role.Q, Role.K), (Role.Q, Role.K, Role.V), (Role.GATE, Role.UP)):
        segments += [candidate(roles, i, i, saved(1)) for i in range(LAYERS)]
        segments += [candidate(roles, i, i + 1, saved(1)) for i in range(LAYERS - 1)]
    costs = [np.append(0.0, np.cumsum(np.sort(rng.exponential(size=6)))) for _ in range(LAYERS)]
    return segments, [Width(i, 6, 18, losses) for i, losses in enumerate(costs)]


def least_price(options: Sequence[Option], tau: float) -> float:
    """Return the price of the best exact cover of all matrices, by trying every one."""
    parts = [
        (frozenset((r, i) for i in one.candidate.layers for r in one.candidate.roles),
         price_at(one, tau))
        for one in options
    ]  # fmt: skip
    cells = sorted({cell for covered, _ in parts for cell in covered})

    @cache
    def best(left: frozenset[tuple[Role, int]]) -> float:
        if not left:
            return 0.0
        cell = min(left)
        fits = (one for one in parts if cell in one[0] and one[0] <= left)
        return min(price + best(left - covered) for covered, price in fits)

    attention = frozenset(cell for cell in cells if cell[0] in (Role.Q, Role.K, Role.V))
    return best(attention) + best(frozenset(cells) - attention)


def all_options(seed: int) -> tuple[Option, ...]:
    """Return the options of a model."""
    segments, widths = model(seed)
    return allocate(segments, widths, 10**6, multiple=1).options


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), power=st.floats(-4, 0))
def test_no_cover_is_cheaper_when_candidates_are_aligned(seed: int, power: float) -> None:
    """Roles beside a joint candidate are cut at its ends, so it may miss covers that interlock."""
    options, tau = all_options(seed), 10**power
    chosen = cheapest_cuts(options, tau)
    price = sum(one.loss + tau * one.cost for one in chosen)
    cells = [
        (role, i)
        for one in chosen
        for i in one.option.candidate.layers
        for role in one.option.candidate.roles
    ]
    assert len(cells) == len(set(cells)) == LAYERS * len(ROLES)
    assert price >= least_price(options, tau) - 1e-9
    aligned = tuple(one for one in options if len(one.candidate.layers) == 1)
    chosen = cheapest_cuts(aligned, tau)
    price = sum(one.loss + tau * one.cost for one in chosen)
    assert price == pytest.approx(least_price(aligned, tau))


def test_one_basis_for_several_roles_is_taken_when_it_is_free() -> None:
    segments, widths = model(3)
    same = [candidate((Role.Q, Role.K), i, i, [5.0, 4.0, 3.0]) for i in range(LAYERS)]
    kept = [one for one in segments if len(one.roles) == 1 and len(one.layers) == 1]
    found = allocate([*kept, *same], widths, 400, multiple=1)
    moves = [one.move for one in found.chosen]
    joint = [one for one in moves if isinstance(one, ShareInput)]
    assert joint and all(one.roles == (Role.Q, Role.K) for one in joint)


def test_the_gain_of_sharing_is_against_private_factors_of_the_same_size() -> None:
    saved = [4.0, 2.0, 1.0, 0.5, 0.25, 0.1]
    alone = [candidate((Role.K,), i, i, saved) for i in range(2)]
    pair = candidate((Role.K,), 0, 1, [2 * value for value in saved])
    # Three shared ranks take 54; private ranks take 12 each, so four of them: two and two.
    assert private_loss(pair, alone, 3, 1) == pytest.approx(2 * sum(saved[2:]))
    # The allocation's own moves say the difference.
    moves = strategies.allocated([*alone, pair], (), 54, 1)
    assert [type(one) for one in moves] == [ShareInput]
    assert moves[0].gain == pytest.approx(2 * sum(saved[2:]) - 2 * sum(saved[3:]))
    # One shared rank takes 18, two private ones at least 24: private cannot be so small.
    assert private_loss(pair, alone, 1, 1) == float("inf")


def influence(losses: Sequence[float]) -> list[LayerInfluence]:
    """Return layers that cost so much to drop."""
    return [LayerInfluence(loss, loss) for loss in losses]


def test_layers_go_when_that_costs_less_than_everything_else() -> None:
    segments, widths = model(5)
    dense = LAYERS * len(ROLES) * 36
    budget = dense * 2 // 3
    moves, _ = strategies.with_drops(
        segments, widths, influence([1e3, 1e-3, 1e3]), lambda left: budget, 1, Scales(), Params()
    )
    assert isinstance(moves[0], DropLayers) and moves[0].layers == (1,)
    assert moves[0].saves == dense // 3
    assert all(1 not in getattr(one, "layers", (0,)) for one in moves[1:])
    assert dense - sum(one.saves for one in moves) <= budget
    # And stay when they are dear.
    moves, allocation = strategies.with_drops(
        segments, widths, influence([1e3] * 3), lambda left: budget, 1, Scales(), Params()
    )
    assert not any(isinstance(one, DropLayers) for one in moves)
    assert allocation.cost <= budget


def test_a_budget_below_everything_but_dropping_drops() -> None:
    segments, _ = model(6)
    fixed = [one for one in segments if len(one.matrices) == 1]
    fixed = [Segment(o.roles, o.layers, o.space, o.dense, o.per_rank, o.saved[:0]) for o in fixed]
    layer = len(ROLES) * 36
    moves, _ = strategies.with_drops(
        fixed, (), influence([3, 1, 2]), lambda left: 2 * layer, 1, Scales(), Params()
    )
    assert [type(one) for one in moves] == [DropLayers] and moves[0].layers == (1,)
    with pytest.raises(PlanError, match="budget of"):
        strategies.with_drops(
            fixed, (), influence([3, 1, 2]), lambda left: layer - 1, 1, Scales(), Params()
        )


def test_what_became_of_sharing_is_said_for_every_role() -> None:
    saved = [4.0, 2.0, 1.0, 0.5, 0.25, 0.1]
    alone = [candidate((role,), i, i, saved) for role in (Role.K, Role.V) for i in range(2)]
    good = candidate((Role.K,), 0, 1, [2 * value for value in saved])
    found = allocate([*alone, good], (), 100, multiple=1)
    moves = strategies.moves_of(found, [*alone, good], 1)
    k, v = sharing_findings(moves, found, "paper")
    assert k.startswith("k in layers 0 to 1 shares its input basis: ") and "nats better than" in k
    assert v == "v: no sharing was considered (paper)"
    bad = candidate((Role.K,), 0, 1, [10.0] * 6)
    found = allocate([*alone, bad], (), 100, multiple=1)
    lost = next(iter(sharing_findings(strategies.moves_of(found, alone, 1), found, "any")))
    assert lost.startswith("k: sharing was considered and lost by ")


def spans(options: Sequence[Option]) -> Iterator[int]:
    """Yield how many layers candidates span."""
    for one in options:
        yield len(one.candidate.layers)


def test_candidates_over_a_dropped_layer_are_left_out() -> None:
    segments, widths = model(7)
    options = allocate(segments, widths, 10**6, multiple=1, dropped=frozenset({1})).options
    assert set(spans(options)) == {1}
    assert (
        sum(one.cost for one in cheapest_cuts(options, 0.0) if one.option.candidate.layers == (1,))
        == 0
    )
