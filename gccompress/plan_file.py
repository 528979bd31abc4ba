"""A plan as a person holds it: the lines of its moves, and what it makes of every matrix."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

from gccompress.errors import MoveError, PlanError
from gccompress.plan import (
    AnyMove,
    DropLayers,
    LowRank,
    Plan,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_matrices,
    move_params,
    read_plan_text,
)
from gccompress.roles import Role
from gccompress.sizes import ModelShape
from gccompress.yaml_files import lines_of_items


@dataclass(frozen=True)
class PlanFile:
    """A plan, and where it was read from.

    Attributes:
        plan: its content.
        name: the path, or the plan's model for one that was never written.
        lines: line in the file of each move, from 1; empty for a plan in memory.
    """

    plan: Plan
    name: str
    lines: tuple[int, ...] = ()

    @classmethod
    def open(cls, plan: "Plan | str | Path | PlanFile") -> "PlanFile":
        """Read a plan's file, or wrap a plan, and check it against itself.

        Raises:
            PlanError: no plan, moves that contradict each other, or moves that the matrices named
                in it do not allow; names the line.
        """
        if isinstance(plan, PlanFile):
            return plan
        if isinstance(plan, Plan):
            plan.check_moves()
            file = cls(plan, f"plan for {plan.model.name}")
        else:
            text = read_plan_text(plan)
            read = Plan.parse(text, str(plan))
            file = cls(read, str(plan), lines_of_items(text, "moves"))
        shape = decoder_shape(file.plan)
        if shape is not None:
            file.check_sizes(shape)
        return file

    def check_sizes(self, shape: ModelShape) -> None:
        """Raise `PlanError`, naming the line, for a move that this model's matrices do not allow.

        Such as a projection it has not, a rank above what they have, or one that saves nothing.
        """
        for number, move in enumerate(self.plan.moves):
            try:
                move_params(move, shape)
            except PlanError as error:
                self.refuse(number, str(error))

    def line(self, number: int) -> int | None:
        """Return the line of a move, from 1; None for a plan in memory."""
        return self.lines[number] if self.lines else None

    def refuse(self, number: int, why: str) -> NoReturn:
        """Raise `PlanError` for a move, naming its line."""
        fault = MoveError(self.name, number, self.plan.moves[number].do, why)
        raise (fault.at(self.lines[number]) if self.lines else fault) from None


@dataclass(frozen=True)
class Cell:
    """What a plan makes of one matrix.

    Attributes:
        do: the kind of move, or `dense`.
        text: the same with its size, in a word or two.
        size: rank or width; None where there is none.
        move: number of the move in the plan, from 0; None for dense.
        group: the matrices that share its basis, itself among them; empty where it is alone.
        share: parameters kept, of its own or its group's dense ones, in [0, 1]; None where the
            plan does not say how large the matrices are.
    """

    do: str = "dense"
    text: str = "dense"
    size: int | None = None
    move: int | None = None
    group: tuple[tuple[Role, int], ...] = ()
    share: float | None = 1.0


def planned_roles(plan: Plan) -> tuple[Role, ...]:
    """Return the roles that a plan's model has; all where the plan does not say."""
    return tuple(
        role for role in Role if plan.model.matrices is None or role in plan.model.matrices
    )


def decoder_shape(plan: Plan) -> ModelShape | None:
    """Return the sizes of a plan's model as far as its projections go; None in a plan without."""
    if plan.model.matrices is None:
        return None
    return ModelShape(
        layers=plan.model.layers,
        matrices=dict(plan.model.matrices),
        layer_params=0,
        total_params=plan.model.total_params,
        head_params=0,
        biases_per_neuron=0,
        bytes_per_param=1,
    )


def cells(plan: Plan) -> dict[tuple[Role, int], Cell]:
    """Return what becomes of every matrix, by role and layer.

    Raises:
        PlanError: a move that the matrices named in the plan do not allow.
    """
    shape = decoder_shape(plan)
    roles = planned_roles(plan)
    found = {(role, layer): Cell() for role in roles for layer in range(plan.model.layers)}
    for number, move in enumerate(plan.moves):
        matrices, word, size = _effect(move, roles)
        text = word if size is None else f"{word} {size}"
        share = None if shape is None else _share(move, shape)
        shared = isinstance(move, ShareInput | ShareOutput) and len(matrices) > 1
        cell = Cell(move.do, text, size, number, matrices if shared else (), share)
        found |= dict.fromkeys(matrices, cell)
    return found


def _effect(
    move: AnyMove, roles: tuple[Role, ...]
) -> tuple[tuple[tuple[Role, int], ...], str, int | None]:
    """Return the matrices a move changes, the word for what it does, and its rank or width."""
    matrices = tuple(one for one in move_matrices(move) if one[0] in roles)
    match move:
        case DropLayers():
            return tuple((role, layer) for layer in move.layers for role in roles), "dropped", None
        case LowRank():
            return matrices, "rank", move.rank
        case ShareInput():
            return matrices, "in", move.rank
        case ShareOutput():
            return matrices, "out", move.rank
        case ResizeMlp():
            return matrices, "width", move.width
        case _:
            assert_never(move)


def _share(move: AnyMove, shape: ModelShape) -> float:
    """Return the share of a move's dense parameters that it keeps."""
    sizes = [shape.matrices[role] for role, _ in move_matrices(move) if role in shape.matrices]
    dense = sum(rows * cols for rows, cols in sizes)
    return move_params(move, shape) / dense if dense else 0.0
