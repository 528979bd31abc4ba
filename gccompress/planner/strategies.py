"""The strategies that compete: layers, neurons, ranks and bases, uniform or at one price.

Each returns the moves that meet a budget of decoder-projection parameters, or says why it cannot.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gccompress.errors import PlanError
from gccompress.moments import LayerInfluence
from gccompress.plan import AnyMove, DropLayers, ShareInput, ShareOutput
from gccompress.planner.allocate import Allocation, Costs, Params, Scales, allocate, private_loss
from gccompress.planner.survey import Segment, Width
from gccompress.roles import Role, Space
from gccompress.sizes import ModelShape, rank_for_share

UNIFORM_BISECTIONS = 40
LayerBudget = Callable[[int], int]  # from layers that stay to what their projections may cost
PATIENCE = 2  # dropped layers more that lost before dropping stops
PLAIN_MULTIPLE = 64  # what runtimes for stock models like their MLP widths to divide by


def prune(shape: ModelShape, influence: Sequence[LayerInfluence], budget: int) -> list[AnyMove]:
    """Drop the layers of least block influence until the budget is met (ShortGPT).

    Raises:
        PlanError: even one layer is more than the budget.
    """
    per_layer = shape.decoder_params() // shape.layers
    keep = budget // per_layer
    if keep < 1:
        raise PlanError(
            f"dropping layers cannot meet {budget} decoder parameters: one layer has {per_layer}"
        )
    if keep >= shape.layers:
        return []
    ranked = sorted(range(shape.layers), key=lambda layer: influence[layer].influence)
    layers = tuple(sorted(ranked[: shape.layers - keep]))
    loss = sum(influence[layer].drop_loss for layer in layers)
    return [DropLayers(layers=layers, loss=loss, saves=per_layer * len(layers))]


def plain(
    shape: ModelShape,
    influence: Sequence[LayerInfluence],
    widths: Sequence[Width],
    budget: int,
    *,
    multiple: int,
    scales: Scales,
) -> list[AnyMove]:
    """Drop layers and give all others one width: a stock model of its family, loaded everywhere.

    Every number of dropped layers is tried with the width that it leaves room for.

    Raises:
        PlanError: even the least of both is more than the budget.
    """
    if budget >= shape.decoder_params():
        return []
    per_layer, inner = shape.decoder_params() // shape.layers, widths[0].inner
    rest = per_layer - inner * shape.per_neuron
    multiple = max(multiple, PLAIN_MULTIPLE) if inner > 2 * PLAIN_MULTIPLE else multiple
    ranked = sorted(range(shape.layers), key=lambda layer: influence[layer].influence)
    best: list[AnyMove] | None = None
    least = float("inf")
    for count in range(shape.layers):
        gone, kept = sorted(ranked[:count]), sorted(ranked[count:])
        width = (budget // len(kept) - rest) // shape.per_neuron // multiple * multiple
        if width < multiple:
            continue
        drop = sum(influence[layer].drop_loss for layer in gone)
        moves: list[AnyMove] = []
        if gone:
            saves = per_layer * count
            moves.append(DropLayers(layers=tuple(gone), loss=drop, saves=saves))
        narrowed = [widths[layer].move(width) for layer in kept] if width < inner else []
        loss = scales.drop * drop + scales.width * sum(one.loss or 0.0 for one in narrowed)
        if loss < least:
            best, least = [*moves, *narrowed], loss
    if best is None:
        raise PlanError(
            f"dropping layers and one width for all cannot meet {budget} decoder parameters; "
            "raise the budget or lower --multiple"
        )
    return best


def lowrank(segments: Sequence[Segment], budget: int, multiple: int) -> list[AnyMove]:
    """Factor every matrix alone, each to the same share of its size."""
    return uniform([one for one in segments if len(one.matrices) == 1], budget, multiple)


def share(
    segments: Sequence[Segment],
    spaces: Mapping[Role, Space],
    budget: int,
    multiple: int,
    group: int,
) -> list[AnyMove]:
    """Share bases over groups of `group` adjacent layers, all to the same share of their size.

    A role whose space is NONE stays dense, so the others are cut deeper. Layers left over at the
    end form a shorter group.
    """
    layers = 1 + max(one.layers[-1] for one in segments)
    wanted = {tuple(range(first, min(first + group, layers))) for first in range(0, layers, group)}
    cut = [
        one
        for one in segments
        if one.layers in wanted
        and len(one.roles) == 1
        and spaces.get(one.roles[0], Space.NONE) is not Space.NONE
        and (len(one.layers) == 1 or one.space is spaces[one.roles[0]])
    ]
    dense = sum(one.dense for one in segments if len(one.matrices) == 1)
    left_alone = dense - sum(one.dense for one in cut)
    if not cut:
        raise PlanError("no role shares a space, so there is no basis to share")
    if left_alone >= budget:
        raise PlanError(
            f"sharing cannot meet {budget} decoder parameters: roles that share no space keep "
            f"{left_alone}"
        )
    return uniform(cut, budget - left_alone, multiple)


def allocated(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    budget: int,
    multiple: int,
    scales: Scales = Scales(),  # noqa: B008 - frozen
    costs: Costs = Params(),  # noqa: B008 - stateless
) -> list[AnyMove]:
    """Let every size of every candidate given compete at one price per unit of the budget."""
    allocation = allocate(segments, widths, budget, multiple=multiple, scales=scales, costs=costs)
    return moves_of(allocation, segments, multiple)


def with_drops(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    influence: Sequence[LayerInfluence],
    budget: LayerBudget,
    multiple: int,
    scales: Scales,
    costs: Costs,
) -> tuple[list[AnyMove], Allocation]:
    """Let dropped layers compete too: the layers of least predicted loss go, one more at a time.

    Goes on while dropping one more was predicted to be better within the last `PATIENCE` tries.

    Args:
        segments: candidates, every matrix alone among them.
        widths: candidates for whole MLPs.
        influence: of every layer.
        budget: what the projections may cost when so many layers stay.
        multiple: ranks and widths are multiples of this.
        scales: what a predicted nat of each kind is worth.
        costs: what candidates cost.

    Raises:
        PlanError: the budget cannot be met, whatever is dropped.
    """
    ranked = sorted(range(len(influence)), key=lambda layer: influence[layer].drop_loss)
    per_layer = sum(one.dense for one in segments if one.layers == (0,) and len(one.roles) == 1)
    best: tuple[float, list[AnyMove], Allocation] | None = None
    failed: PlanError | None = None
    since = 0
    for count in range(len(ranked)):
        gone = tuple(sorted(ranked[:count]))
        try:
            found = allocate(
                segments,
                widths,
                budget(len(ranked) - count),
                multiple=multiple,
                scales=scales,
                costs=costs,
                dropped=frozenset(gone),
            )
        except PlanError as error:
            failed = error
            continue
        drop = sum(influence[layer].drop_loss for layer in gone)
        loss = found.loss + scales.drop * drop
        if best is None or loss < best[0]:
            head: list[AnyMove] = []
            if gone:
                head.append(DropLayers(layers=gone, loss=drop, saves=per_layer * count))
            best, since = (loss, [*head, *moves_of(found, segments, multiple)], found), 0
            continue
        since += 1
        if since == PATIENCE:
            break
    if best is None:
        assert failed is not None  # noqa: S101 - no budget was met, so each try failed
        raise failed
    return best[1], best[2]


def moves_of(allocation: Allocation, segments: Sequence[Segment], multiple: int) -> list[AnyMove]:
    """Return the moves of an allocation, shared ones with their gain over private factors."""
    alone = {one.matrices[0]: one for one in segments if len(one.matrices) == 1}
    found: list[AnyMove] = []
    for chosen in allocation.chosen:
        move, candidate = chosen.move, chosen.option.candidate
        if isinstance(move, ShareInput | ShareOutput) and isinstance(candidate, Segment):
            private = private_loss(
                candidate, [alone[key] for key in candidate.matrices], move.rank, multiple
            )
            gain = private - (move.loss or 0.0)
            move = move.model_copy(update={"gain": gain if gain < float("inf") else None})
        if move is not None:
            found.append(move)
    return found


def width(
    segments: Sequence[Segment],
    widths: Sequence[Width],
    budget: int,
    multiple: int,
    costs: Costs = Params(),  # noqa: B008 - stateless
) -> list[AnyMove]:
    """Remove MLP neurons only, where they cost least."""
    dense = [replace(one, saved=one.saved[:0]) for one in segments if len(one.matrices) == 1]
    return allocated(dense, widths, budget, multiple, costs=costs)


def uniform(segments: Sequence[Segment], budget: int, multiple: int) -> list[AnyMove]:
    """Factor all segments to the same share of their size, as near the budget as ranks allow."""
    if budget >= sum(one.dense for one in segments):
        return []  # a rank just below the dense size would lose something for nothing

    def ranks(share: float) -> list[int]:
        return [
            min(len(one.saved), rank_for_share(one.dense, one.per_rank, share, multiple))
            for one in segments
        ]

    def params(share: float) -> int:
        return sum(one.per_rank * rank for one, rank in zip(segments, ranks(share), strict=True))

    low, high = 0.0, 1.0
    for _ in range(UNIFORM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if params(middle) <= budget else (low, middle)
    chosen = ranks(low)
    if not all(chosen):
        one = segments[chosen.index(0)]
        raise PlanError(
            f"{budget} decoder parameters leave layer {one.layers[0]} {'+'.join(one.roles)} no "
            f"rank at a multiple of {multiple}; raise the budget or lower --multiple"
        )
    return [
        one.move(rank)
        for one, rank in zip(segments, chosen, strict=True)
        if rank * one.per_rank < one.dense
    ]
