"""The seven projections of a decoder layer, and which space each one shares with its neighbours.

The paper's rule (arXiv 2605.04971): a projection that reads the residual stream next to a
nonlinearity shares its input space, one that writes it after a nonlinearity its output space.
"""

from enum import StrEnum


class Role(StrEnum):
    """A projection of a decoder layer, independent of what a model family calls it."""

    Q = "q"
    K = "k"
    V = "v"
    O = "o"  # noqa: E741 - the field's own letter
    GATE = "gate"
    UP = "up"
    DOWN = "down"


class Space(StrEnum):
    """The side of a weight `[out, in]` that adjacent layers share."""

    INPUT = "input"
    OUTPUT = "output"
    NONE = "none"


PAPER_SPACE: dict[Role, Space] = {
    Role.Q: Space.INPUT,
    Role.K: Space.INPUT,
    Role.V: Space.NONE,
    Role.O: Space.OUTPUT,
    Role.GATE: Space.INPUT,
    Role.UP: Space.INPUT,
    Role.DOWN: Space.OUTPUT,
}

READS_RESIDUAL: frozenset[Role] = frozenset({Role.Q, Role.K, Role.V, Role.GATE, Role.UP})
WRITES_RESIDUAL: frozenset[Role] = frozenset({Role.O, Role.DOWN})

# The roles whose inner dimension is the MLP's neurons: rows of gate and up, columns of down.
MLP: tuple[Role, ...] = (Role.GATE, Role.UP, Role.DOWN)

# Roles that read the very same input vector, so that one input second moment serves them all.
SAME_INPUT: tuple[tuple[Role, ...], ...] = (
    (Role.Q, Role.K, Role.V),
    (Role.O,),
    (Role.GATE, Role.UP),
    (Role.DOWN,),
)
