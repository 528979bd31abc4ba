"""One move priced by itself, as a survey prices it among all others: for moves written by hand."""

from math import inf
from typing import assert_never

from gccompress import linalg
from gccompress.density import squared_values
from gccompress.linalg import Damping
from gccompress.moments import Moments, weighted
from gccompress.moves import move_space
from gccompress.plan import (
    AnyMove,
    DropLayers,
    Factoring,
    LowRank,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_matrices,
    plan_params,
)
from gccompress.planner.allocate import private_loss
from gccompress.planner.survey import Segment
from gccompress.roles import Role, Space
from gccompress.sizes import shared_input_params, shared_output_params
from gccompress.view import ModelView, model_shape
from gccompress.width import order_neurons


def reprice(
    view: ModelView, moments: Moments, move: AnyMove, damping: Damping, multiple: int
) -> AnyMove:
    """Return a move with its loss, what it saves and what sharing gains made again.

    Args:
        view: the dense model.
        moments: of its calibration.
        move: what is done; its own numbers do not matter.
        damping: of the moments.
        multiple: of the private ranks that a shared basis is compared with.

    Raises:
        PlanError: a move that the model's matrices do not allow.
        NumericalError: a moment that cannot be factored, naming layer and role.
    """
    shape = model_shape(view)
    saves = shape.decoder_params() - plan_params((move,), shape)[0]
    match move:
        case DropLayers():
            loss = sum(moments.influence[layer].drop_loss for layer in move.layers)
            return move.model_copy(update={"loss": loss, "saves": saves})
        case ResizeMlp():
            down = weighted(view, moments, Role.DOWN, move.layer, damping)
            order = order_neurons(down, f"layer {move.layer} {Role.DOWN}")
            loss = float(order.losses[down.weight.shape[1] - move.width])
            return move.model_copy(update={"loss": loss, "saves": saves})
        case LowRank():
            alone = _segment(view, moments, (move.role,), (move.layer,), None, damping)
            loss = float(alone.tail()[move.rank])
            return move.model_copy(update={"loss": loss, "saves": saves})
        case ShareInput() | ShareOutput():
            space = move_space(view, move)
            group = _segment(view, moments, move.roles, move.layers, space, damping)
            each = [
                _segment(view, moments, (role,), (layer,), None, damping)
                for role, layer in group.matrices
            ]
            loss = float(group.tail()[move.rank])
            gain = private_loss(group, each, move.rank, multiple) - loss
            numbers = {"loss": loss, "saves": saves, "gain": gain if gain < inf else None}
            return move.model_copy(update=numbers)
        case _:
            assert_never(move)


def energy_lost(view: ModelView, move: Factoring) -> float:
    """Return the weight energy that a factoring move loses, as a share of all projections'."""
    weights = [view.weight(role, layer) for role, layer in move_matrices(move)]
    values = squared_values(weights, move_space(view, move))
    return float(values[move.rank :].sum()) / (view.num_layers * len(view.roles))


def _segment(
    view: ModelView,
    moments: Moments,
    roles: tuple[Role, ...],
    layers: tuple[int, ...],
    space: Space | None,
    damping: Damping,
) -> Segment:
    """Return a group of matrices with the loss that each rank saves; None is the cheaper side."""
    matrices = [(role, layer) for layer in layers for role in roles]
    shapes = [view.shape(role, layer) for role, layer in matrices]
    side = space or linalg.alone_space(shapes[0])
    sides = [
        linalg.side(weighted(view, moments, role, layer, damping), side) for role, layer in matrices
    ]
    saved = linalg.spectrum(sides, f"layer {layers[0]} {'+'.join(roles)}").cpu().numpy()
    params = shared_input_params if side is Space.INPUT else shared_output_params
    dense = sum(rows * cols for rows, cols in shapes)
    return Segment(roles, layers, side, dense, params(shapes, 1), saved)
