"""What every candidate move would cost: one pass over the matrices, kept in the cache as spectra.

After a survey a plan at any budget takes a second, since only eigenvalues are looked at.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from gccompress import linalg
from gccompress.files import new_file
from gccompress.linalg import Damping, Side
from gccompress.moments import Moments, weighted
from gccompress.plan import LowRank, ResizeMlp, ShareInput, ShareOutput
from gccompress.progress import track
from gccompress.roles import MLP, SAME_INPUT, Role, Space
from gccompress.sizes import low_rank_params, shared_input_params, shared_output_params
from gccompress.view import ModelView, model_shape
from gccompress.weight_source import WeightSource
from gccompress.width import order_neurons

logger = logging.getLogger(__name__)

SURVEY_VERSION = 3
QUANTIZED_BITS = (4, 8)
QUANTIZED_GROUP = 64

Table = dict[str, NDArray[np.float64]]  # spectra by `first-last`, and what else a pass priced


@dataclass(frozen=True)
class Segment:
    """One candidate: matrices factored with one basis, at any rank.

    Attributes:
        roles: one projection, or several that read the same input.
        layers: first to last, adjacent.
        space: the side of the shared basis; for one matrix, the cheaper side to compute with.
        dense: parameters of the matrices as they are.
        per_rank: parameters of one rank.
        saved: `[limit]` nats per token that each further rank saves, descending.
    """

    roles: tuple[Role, ...]
    layers: tuple[int, ...]
    space: Space
    dense: int
    per_rank: int
    saved: NDArray[np.float64]

    @property
    def matrices(self) -> tuple[tuple[Role, int], ...]:
        """What it covers."""
        return tuple((role, layer) for layer in self.layers for role in self.roles)

    def tail(self) -> NDArray[np.float64]:
        """Return the predicted loss in nats per token at rank 0, 1, ..., limit."""
        return np.append(np.cumsum(self.saved[::-1])[::-1], 0.0)

    def move(self, rank: int) -> LowRank | ShareInput | ShareOutput:
        """Return the move that this candidate is at `rank`."""
        loss = float(self.saved[rank:].sum())
        saves = self.dense - rank * self.per_rank
        if len(self.matrices) == 1:
            role, layer = self.matrices[0]
            return LowRank(role=role, layer=layer, rank=rank, loss=loss, saves=saves)
        kind = ShareInput if self.space is Space.INPUT else ShareOutput
        return kind(roles=self.roles, layers=self.layers, rank=rank, loss=loss, saves=saves)


@dataclass(frozen=True)
class Width:
    """One candidate: the MLP of one layer with fewer neurons, at any width.

    Attributes:
        layer: which.
        inner: neurons it has.
        per_neuron: weights of one.
        losses: `[inner + 1]` predicted nats per token when 0, 1, ... inner neurons are gone.
    """

    layer: int
    inner: int
    per_neuron: int
    losses: NDArray[np.float64]

    @property
    def roles(self) -> tuple[Role, ...]:
        """What it covers; a family without a gate has none to narrow."""
        return MLP

    @property
    def layers(self) -> tuple[int, ...]:
        """Where."""
        return (self.layer,)

    def move(self, width: int) -> ResizeMlp:
        """Return the move that this candidate is at `width` neurons."""
        gone = self.inner - width
        loss, saves = float(self.losses[gone]), gone * self.per_neuron
        return ResizeMlp(layer=self.layer, width=width, loss=loss, saves=saves)


@dataclass(frozen=True)
class Basis:
    """Which matrices a shared basis may span.

    Attributes:
        roles: one projection, or several that read the same input.
        space: the side they share.
        longest: most adjacent layers.
    """

    roles: tuple[Role, ...]
    space: Space
    longest: int


@dataclass(frozen=True)
class Survey:
    """All candidates of one model under one calibration.

    Attributes:
        segments: every matrix alone, and every group of matrices that may share a basis.
        widths: the MLP of every layer.
        quantized: predicted loss in nats per token of round-to-nearest of all projections, by bits.
    """

    segments: tuple[Segment, ...]
    widths: tuple[Width, ...]
    quantized: dict[int, float]


def bases(
    roles: Sequence[Role],
    spaces: Mapping[Role, Space],
    longest: int,
    *,
    both: bool = False,
    joint: bool = False,
) -> tuple[Basis, ...]:
    """Return the bases that may be shared.

    Args:
        roles: of the model.
        spaces: which space each role shares over layers; NONE is none.
        longest: most adjacent layers on one basis.
        both: let every role share either space, whatever `spaces` says.
        joint: let roles of one layer that read the same input share an input basis, and over
            adjacent layers too where each of them shares its input space.
    """
    found = [
        Basis((role,), space, longest)
        for role in roles
        for space in ((Space.INPUT, Space.OUTPUT) if both else (spaces.get(role, Space.NONE),))
        if space is not Space.NONE and longest > 1
    ]
    for group in SAME_INPUT if joint else ():
        for count in range(2, len(group) + 1):
            together = group[:count]
            if set(together) <= set(roles):
                shared = both or all(spaces.get(role) is Space.INPUT for role in together)
                found.append(Basis(together, Space.INPUT, longest if shared else 1))
    return tuple(found)


def survey(
    view: ModelView,
    moments: Moments,
    shared: Sequence[Basis],
    *,
    damping: Damping,
    cache: Path,
) -> Survey:
    """Price every matrix alone, every MLP's widths, and every group that may share a basis.

    What is finished is read from the cache, so an interrupted survey goes on where it was. Raises
    `NumericalError` from the factorisation.
    """
    segments: list[Segment] = []
    widths: list[Width] = []
    quantized = dict.fromkeys(QUANTIZED_BITS, 0.0)

    def table(key: list[Any], price: Callable[[], Table]) -> Table:
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        path = cache / "surveys" / f"{name}.safetensors"
        found = read_table(path)
        if found is None:
            found = price()
            with new_file(path) as temporary:
                save_file(found, temporary)
        return found

    base = [SURVEY_VERSION, moments.hash, asdict(damping)]
    work: list[Role | Basis] = [*view.roles, *shared]
    for item in track(work, "Pricing every rank (projections and bases)"):
        if isinstance(item, Basis):
            key = [*base, item.roles, item.space, item.longest]
            priced = table(key, partial(_price_shared, view, moments, item, damping))
            segments += make_segments(view, item.roles, item.space, priced)
            continue
        priced = table([*base, item], partial(_price_alone, view, moments, item, damping))
        for bits in QUANTIZED_BITS:
            quantized[bits] += float(priced.pop(f"rtn{bits}").sum())
        if item is Role.DOWN:
            per_neuron = model_shape(view).per_neuron
            for layer in range(view.num_layers):
                inner = view.shape(item, layer)[1]
                widths.append(Width(layer, inner, per_neuron, priced.pop(f"width-{layer}")))
        segments += make_segments(view, (item,), Space.NONE, priced)
    return Survey(tuple(segments), tuple(widths), quantized)


def _price_alone(view: ModelView, moments: Moments, role: Role, damping: Damping) -> Table:
    """Return `"layer-layer": saved` of a role, the losses of rounding, and of an MLP's widths."""
    found: Table = {}
    rounding: dict[int, list[float]] = {bits: [] for bits in QUANTIZED_BITS}
    for layer in range(view.num_layers):
        matrix = weighted(view, moments, role, layer, damping)
        for bits in QUANTIZED_BITS:
            rounded = linalg.round_to_nearest(view.weight(role, layer), bits, QUANTIZED_GROUP)
            rounding[bits].append(matrix.loss(rounded))
        if role is Role.DOWN:
            order = order_neurons(matrix, f"layer {layer} {role}")
            found[f"width-{layer}"] = _numpy(order.losses)
        alone = linalg.side(matrix, linalg.alone_space(view.shape(role, layer)))
        found[f"{layer}-{layer}"] = _numpy(linalg.spectrum([alone], f"layer {layer} {role}"))
    return found | {f"rtn{bits}": np.array(losses) for bits, losses in rounding.items()}


def _price_shared(view: ModelView, moments: Moments, basis: Basis, damping: Damping) -> Table:
    """Return `"first-last": saved` of every group of matrices that one basis may span."""
    found: Table = {}
    recent: list[list[Side]] = []
    names = "+".join(basis.roles)
    for layer in range(view.num_layers):
        matrices = [weighted(view, moments, role, layer, damping) for role in basis.roles]
        recent.append([linalg.side(matrix, basis.space) for matrix in matrices])
        recent = recent[-basis.longest :]
        for length in range(1 if len(basis.roles) > 1 else 2, len(recent) + 1):
            first = layer - length + 1
            sides = [side for layers in recent[-length:] for side in layers]
            what = f"layers {first} to {layer} {names}"
            found[f"{first}-{layer}"] = _numpy(linalg.spectrum(sides, what))
    return found


def make_segments(
    source: WeightSource, roles: tuple[Role, ...], space: Space, table: Table
) -> Iterator[Segment]:
    """Yield the segments of a `"first-last": saved` table, first layer first."""
    spans = {tuple(int(number) for number in name.split("-")): name for name in table}
    for (first, last), name in sorted(spans.items()):  # files keep no order, plans must
        saved, layers = table[name], tuple(range(first, last + 1))
        shapes = [source.shape(role, layer) for layer in layers for role in roles]
        if len(shapes) == 1:
            side, per_rank = linalg.alone_space(shapes[0]), low_rank_params(shapes[0], 1)
        elif space is Space.INPUT:
            side, per_rank = space, shared_input_params(shapes, 1)
        else:
            side, per_rank = space, shared_output_params(shapes, 1)
        dense = sum(rows * cols for rows, cols in shapes)
        yield Segment(roles, layers, side, dense, per_rank, saved)


def read_table(path: Path) -> Table | None:
    """Return a cached table, or None when there is none; a damaged one is removed and said so."""
    if not path.exists():
        return None
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        logger.warning("%s: damaged (%s); pricing again", path, error)
        path.unlink(missing_ok=True)
        return None


def _numpy(saved: Tensor) -> NDArray[np.float64]:
    return saved.cpu().numpy()
