"""Pure integers: rank <-> parameters, and where a factorisation stops saving. No torch here.

A weight is `[out, in]`. Sizes count weights only; biases are the same before and after.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gccompress.roles import MLP, Role


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal LM that a plan needs.

    Attributes:
        layers: number of decoder layers.
        matrices: `(out, in)` of each role's weight, the same in every layer.
        layer_params: all parameters of one decoder layer (weights, biases, norms).
        total_params: all parameters of the model, tied ones once.
        head_params: parameters of the output projection, tied or not: it is multiplied either way.
        biases_per_neuron: bias entries that go with one MLP neuron.
        bytes_per_param: bytes of a stored parameter (4 for float32, 2 for bfloat16).
    """

    layers: int
    matrices: dict[Role, tuple[int, int]]
    layer_params: int
    total_params: int
    head_params: int
    biases_per_neuron: int
    bytes_per_param: int

    @property
    def per_neuron(self) -> int:
        """Weights of one MLP neuron: a row of gate (if there is one) and up, a column of down."""
        inner = self.matrices[Role.DOWN][1]
        return (
            sum(rows * cols for role, (rows, cols) in self.matrices.items() if role in MLP) // inner
        )

    def decoder_params(self) -> int:
        """Return the parameters of all projections in all layers: the denominator of `keep`."""
        return self.layers * sum(rows * cols for rows, cols in self.matrices.values())


def low_rank_params(shape: tuple[int, int], rank: int) -> int:
    """Return the parameters of `[out, rank] @ [rank, in]`."""
    rows, cols = shape
    return rank * (rows + cols)


def shared_input_params(shapes: Sequence[tuple[int, int]], rank: int) -> int:
    """Return the parameters of one basis `[rank, in]` and a coefficient `[out, rank]` each."""
    return rank * (shapes[0][1] + sum(rows for rows, _ in shapes))


def shared_output_params(shapes: Sequence[tuple[int, int]], rank: int) -> int:
    """Return the parameters of one basis `[out, rank]` and a coefficient `[rank, in]` each."""
    return rank * (shapes[0][0] + sum(cols for _, cols in shapes))


def largest_saving_rank(dense: int, per_rank: int, multiple: int = 1) -> int:
    """Return the largest rank, a multiple of `multiple`, strictly smaller than dense (0: none).

    `dense` is the parameters of the dense group, `per_rank` those that one rank costs.
    """
    return (dense - 1) // per_rank // multiple * multiple


def rank_for_share(dense: int, per_rank: int, share: float, multiple: int = 1) -> int:
    """Return the largest rank whose parameters are at most `share` of the dense group's."""
    return int(share * dense) // per_rank // multiple * multiple


def bytes_of(text: str) -> int:
    """Return bytes from such as `200MB`, `1.5 GiB`, `123456`. Raises `ValueError`."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", start=1):
        units |= {letter: 1000**power, f"{letter}B": 1000**power, f"{letter}IB": 1024**power}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in units:
        raise ValueError(f"{text!r} is no size; wanted bytes such as 200MB, 1.5GiB or 123456")
    return int(Fraction(match[1]) * units[match[2].upper()])
