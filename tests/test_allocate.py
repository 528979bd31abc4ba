"""The allocation against brute force over every cut and rank, and what it promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccompress.errors import PlanError
from gccompress.plan import move_layers
from gccompress.planner import strategies
from gccompress.planner.allocate import Chosen, Scales, allocate
from gccompress.planner.survey import Segment, Width
from gccompress.roles import Role, Space


def segment(role: Role, first: int, last: int, saved: list[float], dense: int) -> Segment:
    """Return a segment of square matrices of `dense` parameters each."""
    layers = tuple(range(first, last + 1))
    side = round(dense**0.5)
    return Segment(
        roles=(role,),
        layers=layers,
        space=Space.INPUT,
        dense=dense * len(layers),
        per_rank=side * (1 + len(layers)),
        saved=np.sort(np.array(saved))[::-1].copy(),
    )


def random_segments(seed: int, layers: int = 3, size: int = 6) -> list[Segment]:
    """Return two roles, one of which may share pairs."""
    rng = np.random.default_rng(seed)
    found = []
    for role in (Role.K, Role.V):
        for layer in range(layers):
            found.append(segment(role, layer, layer, list(rng.exponential(size=size)), size**2))
    for layer in range(layers - 1):
        found.append(segment(Role.K, layer, layer + 1, list(rng.exponential(size=size)), size**2))
    return found


def brute_force(segments: list[Segment], budget: int) -> float:
    """Return the least loss over every cut of every role and every rank."""
    options: dict[Role, dict[int, float]] = {}
    for role in (Role.K, Role.V):
        mine = [one for one in segments if one.roles == (role,)]
        layers = 1 + max(one.layers[-1] for one in mine)
        best: list[dict[int, float]] = [{0: 0.0}] + [{} for _ in range(layers)]
        for end in range(1, layers + 1):
            for one in mine:
                if one.layers[-1] + 1 != end:
                    continue
                sizes = [
                    (rank * one.per_rank, float(one.saved[rank:].sum()))
                    for rank in range(1, len(one.saved) + 1)
                    if rank * one.per_rank < one.dense
                ]
                if len(one.layers) == 1:
                    sizes.append((one.dense, 0.0))
                for (before, loss), (size, more) in itertools.product(
                    best[one.layers[0]].items(), sizes
                ):
                    total = before + size
                    if loss + more < best[end].get(total, float("inf")):
                        best[end][total] = loss + more
        options[role] = best[layers]
    return min(
        a + b
        for (n, a), (m, b) in itertools.product(options[Role.K].items(), options[Role.V].items())
        if n + m <= budget
    )


def params(choice: tuple[Chosen, ...]) -> int:
    """Return the parameters of a choice."""
    return sum(one.cost for one in choice)


def part_of(one: Chosen) -> Segment:
    """Return the segment that was chosen."""
    assert isinstance(one.option.candidate, Segment)
    return one.option.candidate


def parts(choice: tuple[Chosen, ...]) -> list[Segment]:
    """Return the segments of a choice."""
    return [part_of(one) for one in choice]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), keep=st.floats(0.4, 1.0))
def test_within_budget_complete_and_near_the_true_optimum(seed: int, keep: float) -> None:
    segments = random_segments(seed)
    budget = int(keep * 6 * 36)
    choice = allocate(segments, (), budget, multiple=1).chosen
    assert params(choice) <= budget
    covered = sorted((part.roles[0], layer) for part in parts(choice) for layer in part.layers)
    assert covered == sorted((role, layer) for role in (Role.K, Role.V) for layer in range(3))
    loss = sum(one.loss for one in choice)
    optimum = brute_force(segments, budget)
    # A price finds the lower convex hull; between its corners it may miss by one step's worth.
    largest = max(float(one.saved.max()) for one in segments)
    assert optimum - 1e-9 <= loss <= optimum + 2 * largest


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), keep=st.floats(0.4, 0.95))
def test_letting_segments_compete_never_loses(seed: int, keep: float) -> None:
    segments = random_segments(seed)
    alone = [one for one in segments if len(one.layers) == 1]
    budget = int(keep * 6 * 36)
    # At equal price, not at equal budget: compare with the slack that a hull step leaves.
    free = sum(one.loss for one in allocate(segments, (), budget, multiple=1).chosen)
    private = sum(one.loss for one in allocate(alone, (), budget, multiple=1).chosen)
    largest = max(float(one.saved.max()) for one in segments)
    assert free <= private + 2 * largest


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), keep=st.floats(0.4, 1.0), multiple=st.sampled_from([1, 2, 3, 8]))
def test_ranks_are_multiples_and_save(seed: int, keep: float, multiple: int) -> None:
    segments = random_segments(seed)
    try:
        choice = allocate(segments, (), int(keep * 216), multiple=multiple).chosen
    except PlanError:
        return
    for one in choice:
        size = int(one.option.sizes[one.index])
        if size:
            # A matrix that is smaller than the multiple has one size only.
            assert size % multiple == 0 or size < multiple
            assert one.cost < one.option.costs[-1] or len(part_of(one).layers) > 1


def test_everything_kept_is_dense_and_nothing_lost() -> None:
    choice = allocate(random_segments(0), (), 216, multiple=1).chosen
    assert all(one.move is None for one in choice)


def test_a_budget_too_small_says_the_smallest() -> None:
    alone = [one for one in random_segments(0) if len(one.layers) == 1]
    with pytest.raises(PlanError, match="smallest this strategy reaches is 72 "):
        allocate(alone, (), 10, multiple=1)


def test_identical_layers_share_when_it_saves() -> None:
    saved = [4.0, 3.0, 2.0, 1.0]
    alone = [segment(Role.K, layer, layer, saved, 16) for layer in (0, 1)]
    # Identical matrices: the pair loses twice as much per rank, at three quarters of the size.
    pair = segment(Role.K, 0, 1, [2 * s for s in saved], 16)
    choice = allocate([*alone, pair], (), 24, multiple=1).chosen
    assert [part.layers for part in parts(choice)] == [(0, 1)]


def test_uniform_strategies_meet_the_budget_and_never_grow_a_matrix() -> None:
    segments = random_segments(3)
    moves = strategies.lowrank(segments, 150, 1)
    assert len(moves) == 6
    assert 216 - sum(move.saves for move in moves) <= 150
    shared = strategies.share(segments, {Role.K: Space.INPUT, Role.V: Space.NONE}, 180, 1, 2)
    assert {(move.do, move_layers(move)) for move in shared} == {
        ("share_input", (0, 1)),
        ("low_rank", (2,)),
    }
    assert 216 - sum(move.saves for move in shared) <= 180
    with pytest.raises(PlanError, match="share no space keep 108"):
        strategies.share(segments, {Role.K: Space.INPUT}, 100, 1, 2)
    with pytest.raises(PlanError, match="no rank"):
        strategies.lowrank(segments, 10, 1)


def mlp(seed: int, layers: int = 4) -> tuple[list[Segment], list[Width]]:
    """Return gate, up and down of 6 x 6 with pairs of gate, and widths of six neurons."""
    rng = np.random.default_rng(seed)
    segments = [
        segment(role, layer, layer, list(rng.exponential(size=6)), 36)
        for role in (Role.GATE, Role.UP, Role.DOWN)
        for layer in range(layers)
    ]
    segments += [
        segment(Role.GATE, layer, layer + 1, list(rng.exponential(size=6)), 36)
        for layer in range(layers - 1)
    ]
    widths = [
        Width(layer, 6, 18, np.append(0.0, np.cumsum(np.sort(rng.exponential(size=6)))))
        for layer in range(layers)
    ]
    return segments, widths


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), keep=st.floats(0.4, 0.95))
def test_an_mlp_is_narrowed_or_factored_never_both(seed: int, keep: float) -> None:
    segments, widths = mlp(seed)
    budget = int(keep * 4 * 3 * 36)
    choice = allocate(segments, widths, budget, multiple=1).chosen
    assert params(choice) <= budget
    covered = []
    for one in choice:
        if isinstance(one.option.candidate, Width):
            roles = (Role.GATE, Role.UP, Role.DOWN)
            covered += [(role, one.option.candidate.layer) for role in roles]
        else:
            covered += [(part_of(one).roles[0], layer) for layer in part_of(one).layers]
    assert len(covered) == len(set(covered)) == 12
    # Freedom to narrow is never worse, up to what a hull step leaves over.
    slack = 2 * max(float(one.saved.max()) for one in segments)
    without = allocate(segments, (), budget, multiple=1)
    assert sum(one.loss for one in choice) <= sum(one.loss for one in without.chosen) + slack


def test_the_scale_of_a_kind_decides_between_kinds() -> None:
    segments, widths = mlp(1)
    budget = 300
    for scales, kind in ((Scales(rank=1e6), Width), (Scales(width=1e6), Segment)):
        choice = allocate(segments, widths, budget, multiple=1, scales=scales).chosen
        changed = [one for one in choice if one.move is not None]
        assert changed and all(isinstance(one.option.candidate, kind) for one in changed)


def test_width_alone_leaves_other_matrices_dense() -> None:
    segments, widths = mlp(2)
    segments += random_segments(2, layers=4)
    moves = strategies.width(segments, widths, 600, 1)
    assert moves and {move.do for move in moves} == {"resize_mlp"}
    assert 4 * 3 * 36 + 8 * 36 - sum(move.saves for move in moves) <= 600


def test_a_multiple_that_no_width_has_leaves_the_other_moves() -> None:
    segments = [one for one in random_segments(0) if len(one.layers) == 1]
    mlp = [segment(Role.UP, layer, layer, [2.0, 1.0, 0.5, 0.2], 16) for layer in range(3)]
    widths = [Width(layer, 4, 12, np.linspace(0, 1, 5)) for layer in range(3)]
    with pytest.raises(PlanError, match="in steps of 4; .*lower --multiple"):
        strategies.width(mlp, widths, 40, multiple=4)
    found = strategies.allocated([*segments, *mlp], widths, 170, multiple=4)
    assert found and all(move.do == "low_rank" for move in found)
