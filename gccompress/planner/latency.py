"""Seconds of a prefill by part, measured on this device over a model's real shapes, not from FLOPs.

`timing` measures it. What it can and cannot say: docs/latency.md.
"""

from collections.abc import Sequence
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from gccompress.errors import GccompressError
from gccompress.plan import (
    AnyMove,
    DropLayers,
    LowRank,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    Strict,
    move_matrices,
)
from gccompress.roles import MLP, Role
from gccompress.sizes import ModelShape

NANO = 1e9  # nanoseconds of a second


class Curve(Strict):
    """Seconds by size, linear between the sizes measured and constant beyond them.

    Attributes:
        sizes: ranks or widths, ascending.
        seconds: of each.
    """

    sizes: tuple[int, ...] = Field(min_length=1)
    seconds: tuple[float, ...]

    @model_validator(mode="after")
    def _ordered(self) -> "Curve":
        if len(self.sizes) != len(self.seconds) or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes ascend, and each has its seconds")
        return self

    def at(self, sizes: int | Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of any sizes, in their shape."""
        return np.interp(np.asarray(sizes, dtype=float), self.sizes, self.seconds)


class Measured(Strict):
    """What a table was measured on; another value of any of it is another table.

    Attributes:
        device: name of the processor.
        torch: version.
        threads: that torch computes with.
        dtype: of weights and activations.
        tokens: read at once, batch size 1, with a cache, logits of the last token only.
        model_type: the family, whose attention and norms these are.
        attention: name of the attention implementation.
        layers: number of decoder layers.
        heads: query heads and key heads.
        vocabulary: tokens of the output projection.
        matrices: `(out, in)` of each role.
    """

    device: str
    torch: str
    threads: int
    dtype: str
    tokens: int
    model_type: str
    attention: str
    layers: int
    heads: tuple[int, int]
    vocabulary: int
    matrices: dict[Role, tuple[int, int]]


class LatencyTable(Strict):
    """Seconds of each part of one prefill; a prefill takes the sum of its parts.

    `seconds = rest + layers * (layer_rest + activation + sum of the roles)`, where a narrowed MLP
    counts by `width` instead of activation, gate, up and down.

    Attributes:
        version: of this format.
        measured: on what.
        rest: embedding, positions, masks, last norm and output projection.
        layer_rest: of one layer: attention itself, norms, residual sums.
        activation: of one MLP: what is not one of its products.
        roles: the dense product of each role.
        reads: products `[tokens, in] -> [tokens, rank]` for a role's `in`.
        writes: products `[tokens, rank] -> [tokens, out]` for a role's `out`.
        widths: a whole MLP by its neurons.
        joins: what computing a fused weight's roles one by one adds, by its roles joined with `+`.
    """

    version: Literal[1] = 1
    measured: Measured
    rest: float
    layer_rest: float
    activation: float
    roles: dict[Role, float]
    reads: dict[Role, Curve]
    writes: dict[Role, Curve]
    widths: Curve
    joins: dict[str, float] = Field(default_factory=dict)

    def dense(self, role: Role) -> float:
        """Return the seconds of a role's dense product in one layer."""
        return self.roles[role]

    def low_rank(self, role: Role, rank: int) -> float:
        """Return the seconds of a role's two factors in one layer, alone or from a shared basis."""
        return float(self.reads[role].at(rank) + self.writes[role].at(rank))

    def shared(self, roles: Sequence[Role], rank: int) -> float:
        """Return the seconds of roles that read one input by one basis, in one layer.

        The basis' product is computed once: see `modeling.SharedBases`.
        """
        return float(_shared(self, roles, np.asarray(rank)))

    def width(self, neurons: int) -> float:
        """Return the seconds of a whole MLP: gate, up, activation, down."""
        return float(self.widths.at(neurons))

    @property
    def mlp(self) -> float:
        """Seconds of a dense MLP."""
        return self.activation + sum(self.roles[role] for role in self.roles if role in MLP)

    @property
    def layer(self) -> float:
        """Seconds of a whole dense layer: what dropping it saves."""
        return self.layer_rest + self.activation + sum(self.roles.values())

    def rank_costs(self, role: Role, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return nanoseconds in one layer of a role at each rank, in the shape of `ranks`.

        A basis shared over layers saves no time: every layer multiplies by it.
        """
        return self.shared_costs((role,), ranks)

    def shared_costs(self, roles: Sequence[Role], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return nanoseconds in one layer of roles that read one input by one basis."""
        return _nano(_shared(self, roles, ranks))

    def width_costs(self, widths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return nanoseconds of an MLP at each width, beyond the dense activation.

        The activation counts as part of a layer (`layer_cost`), so that these compare with
        `mlp_dense_cost` and with `dense_cost` and `rank_costs` of the MLP's roles.
        """
        return _nano(self.widths.at(widths) - self.activation)

    def dense_cost(self, role: Role) -> int:
        """Return nanoseconds of a role's dense product in one layer."""
        return int(_nano(self.roles[role]))

    def mlp_dense_cost(self) -> int:
        """Return nanoseconds of the products of a dense MLP: the sum of its `dense_cost`."""
        return sum(self.dense_cost(role) for role in self.roles if role in MLP)

    def layer_cost(self) -> int:
        """Return nanoseconds of what no move but dropping changes in a layer."""
        return int(_nano(self.layer_rest + self.activation))

    def cost_budget(self, speedup: float, layers: int) -> int:
        """Return the nanoseconds that the products of `layers` layers may take for a speed-up.

        Negative or zero when the rest alone is too slow. `layers` are those that stay; the
        speed-up is over the dense model.
        """
        total = self.rest + self.measured.layers * self.layer
        return int(
            _nano(total / speedup - self.rest - layers * (self.layer_rest + self.activation))
        )

    def to_json(self) -> str:
        """Return the table as JSON."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "LatencyTable":
        """Read a table. Raises `GccompressError` for what is none."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "file"
            raise GccompressError(
                f"latency table: {where}: {first['msg']}; remove the file, it is measured again"
            ) from error


def _nano(seconds: float | NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(np.asarray(seconds) * NANO).astype(np.int64)


def _shared(
    table: LatencyTable, roles: Sequence[Role], ranks: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return seconds of one product with a basis and one with each role's coefficients."""
    seconds = table.reads[roles[0]].at(ranks)
    for role in roles:
        seconds = seconds + table.writes[role].at(ranks)
    return seconds


def predicted_seconds(moves: Sequence[AnyMove], shape: ModelShape, table: LatencyTable) -> float:
    """Return the seconds of one prefill of the model that `moves` make."""
    seconds = table.rest + shape.layers * table.layer
    replaced: set[tuple[Role, int]] = set()
    for move in moves:
        replaced.update(move_matrices(move))
        match move:
            case DropLayers():
                seconds -= len(move.layers) * table.layer
            case LowRank():
                seconds += table.low_rank(move.role, move.rank) - table.dense(move.role)
            case ShareInput():
                dense = sum(table.dense(role) for role in move.roles)
                seconds += len(move.layers) * (table.shared(move.roles, move.rank) - dense)
            case ShareOutput():
                for role, _ in move_matrices(move):
                    seconds += table.low_rank(role, move.rank) - table.dense(role)
            case ResizeMlp():
                seconds += table.width(move.width) - table.mlp
            case _:
                assert_never(move)
    for names, join in table.joins.items():
        roles = {Role(name) for name in names.split("+")}
        seconds += join * len({layer for role, layer in replaced if role in roles})
    return seconds


def speedup(moves: Sequence[AnyMove], shape: ModelShape, table: LatencyTable) -> float:
    """Return the dense model's seconds over those of the model that `moves` make."""
    return predicted_seconds((), shape, table) / predicted_seconds(moves, shape, table)
