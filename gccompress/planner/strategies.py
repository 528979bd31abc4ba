"""The strategies that compete: layers, neurons, ranks and bases, uniform or at one price.

Each returns the moves that meet a budget of decoder-projection parameters, or says why it cannot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gccompress.errors import PlanError
from gccompress.moments import LayerInfluence
from gccompress.plan import AnyMove, DropLayers
from gccompress.planner.allocate import Scales, allocate
from gccompress.planner.survey import Segment, Width
from gccompress.roles import Role, Space
from gccompress.sizes import ModelShape, rank_for_share

UNIFORM_BISECTIONS = 40
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
    return uniform([one for one in segments if len(one.layers) == 1], budget, multiple)


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
        if one.layers in wanted and spaces.get(one.role, Space.NONE) is not Space.NONE
    ]
    dense = sum(one.dense for one in segments if len(one.layers) == 1)
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
) -> list[AnyMove]:
    """Let every size of every candidate given compete at one price per parameter."""
    chosen = allocate(segments, widths, budget, multiple=multiple, scales=scales)
    return [one.move for one in chosen if one.move is not None]


def width(
    segments: Sequence[Segment], widths: Sequence[Width], budget: int, multiple: int
) -> list[AnyMove]:
    """Remove MLP neurons only, where they cost least."""
    dense = [replace(one, saved=one.saved[:0]) for one in segments if len(one.layers) == 1]
    return allocated(dense, widths, budget, multiple)


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
            f"{budget} decoder parameters leave layer {one.layers[0]} {one.role} no rank at a "
            f"multiple of {multiple}; raise the budget or lower --multiple"
        )
    return [
        one.move(rank)
        for one, rank in zip(segments, chosen, strict=True)
        if rank * one.per_rank < one.dense
    ]
