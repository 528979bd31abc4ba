"""What every candidate move would cost: one pass over the matrices, kept in the cache as spectra.

After a survey a plan at any budget takes a second, since only eigenvalues are looked at.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

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
from gccompress.roles import Role, Space
from gccompress.sizes import low_rank_params, shared_input_params, shared_output_params
from gccompress.view import ModelView, model_shape
from gccompress.weight_source import WeightSource
from gccompress.width import order_neurons

logger = logging.getLogger(__name__)

SURVEY_VERSION = 2
QUANTIZED_BITS = (4, 8)
QUANTIZED_GROUP = 64


@dataclass(frozen=True)
class Segment:
    """One candidate: adjacent layers of one role factored with one basis, at any rank.

    Attributes:
        role: the projection.
        layers: first to last, adjacent.
        space: the side of the shared basis; for one layer, the cheaper side to compute with.
        dense: parameters of the matrices as they are.
        per_rank: parameters of one rank.
        saved: `[limit]` nats per token that each further rank saves, descending.
    """

    role: Role
    layers: tuple[int, ...]
    space: Space
    dense: int
    per_rank: int
    saved: NDArray[np.float64]

    def tail(self) -> NDArray[np.float64]:
        """Return the predicted loss in nats per token at rank 0, 1, ..., limit."""
        return np.append(np.cumsum(self.saved[::-1])[::-1], 0.0)

    def move(self, rank: int) -> LowRank | ShareInput | ShareOutput:
        """Return the move that this candidate is at `rank`."""
        loss = float(self.saved[rank:].sum())
        saves = self.dense - rank * self.per_rank
        if len(self.layers) == 1:
            layer = self.layers[0]
            return LowRank(role=self.role, layer=layer, rank=rank, loss=loss, saves=saves)
        kind = ShareInput if self.space is Space.INPUT else ShareOutput
        return kind(roles=(self.role,), layers=self.layers, rank=rank, loss=loss, saves=saves)


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

    def move(self, width: int) -> ResizeMlp:
        """Return the move that this candidate is at `width` neurons."""
        gone = self.inner - width
        loss, saves = float(self.losses[gone]), gone * self.per_neuron
        return ResizeMlp(layer=self.layer, width=width, loss=loss, saves=saves)


@dataclass(frozen=True)
class Survey:
    """All candidates of one model under one calibration.

    Attributes:
        widths: the MLP of every layer.
        segments: every run of 1 to `longest` adjacent layers of each role, where shared at all.
        quantized: predicted loss in nats per token of round-to-nearest of all projections, by bits.
    """

    segments: tuple[Segment, ...]
    widths: tuple[Width, ...]
    quantized: dict[int, float]


def survey(
    view: ModelView,
    moments: Moments,
    spaces: Mapping[Role, Space],
    *,
    longest: int,
    damping: Damping,
    cache: Path,
) -> Survey:
    """Price every run of up to `longest` adjacent layers of each role, in its space.

    A role whose space is NONE is only factored alone. Finished roles are read from the cache, so
    an interrupted survey goes on where it was. Raises `NumericalError` from the factorisation.
    """
    segments: list[Segment] = []
    widths: list[Width] = []
    quantized = dict.fromkeys(QUANTIZED_BITS, 0.0)
    for role in track(view.roles, "Pricing every rank (projections)"):
        space = spaces.get(role, Space.NONE)
        key = [SURVEY_VERSION, moments.hash, role, space, longest, asdict(damping)]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        path = cache / "surveys" / f"{name}.safetensors"
        table = read_table(path)
        if table is None:
            table = _price_role(view, moments, role, space, longest, damping)
            with new_file(path) as temporary:
                save_file(table, temporary)
        for bits in QUANTIZED_BITS:
            quantized[bits] += float(table.pop(f"rtn{bits}").sum())
        if role is Role.DOWN:
            per_neuron = model_shape(view).per_neuron
            for layer in range(view.num_layers):
                inner = view.shape(role, layer)[1]
                losses = table.pop(f"width-{layer}")
                widths.append(Width(layer, inner, per_neuron, losses))
        segments += make_segments(view, role, space, table)
    return Survey(tuple(segments), tuple(widths), quantized)


def _price_role(
    view: ModelView,
    moments: Moments,
    role: Role,
    space: Space,
    longest: int,
    damping: Damping,
) -> dict[str, NDArray[np.float64]]:
    """Return `"first-last": saved` for every segment of a role, and the losses of rounding."""
    table: dict[str, NDArray[np.float64]] = {}
    rounding: dict[int, list[float]] = {bits: [] for bits in QUANTIZED_BITS}
    recent: list[Side] = []
    for layer in range(view.num_layers):
        matrix = weighted(view, moments, role, layer, damping)
        for bits in QUANTIZED_BITS:
            rounded = linalg.round_to_nearest(view.weight(role, layer), bits, QUANTIZED_GROUP)
            rounding[bits].append(matrix.loss(rounded))
        if role is Role.DOWN:
            order = order_neurons(matrix, f"layer {layer} {role}")
            table[f"width-{layer}"] = _numpy(order.losses)
        alone = linalg.side(matrix, linalg.alone_space(view.shape(role, layer)))
        table[f"{layer}-{layer}"] = _numpy(linalg.spectrum([alone], f"layer {layer} {role}"))
        if space is Space.NONE or longest == 1:
            continue
        recent = [*recent, linalg.side(matrix, space)][-longest:]
        for length in range(2, len(recent) + 1):
            first = layer - length + 1
            what = f"layers {first} to {layer} {role}"
            table[f"{first}-{layer}"] = _numpy(linalg.spectrum(recent[-length:], what))
    return table | {f"rtn{bits}": np.array(losses) for bits, losses in rounding.items()}


def make_segments(
    source: WeightSource, role: Role, space: Space, table: Mapping[str, NDArray[np.float64]]
) -> Iterator[Segment]:
    """Yield the segments of a `"first-last": saved` table, first layer first."""
    spans = {tuple(int(number) for number in name.split("-")): name for name in table}
    for (first, last), name in sorted(spans.items()):  # files keep no order, plans must
        saved, layers = table[name], tuple(range(first, last + 1))
        shapes = [source.shape(role, layer) for layer in layers]
        if len(layers) == 1:
            side, per_rank = linalg.alone_space(shapes[0]), low_rank_params(shapes[0], 1)
        elif space is Space.INPUT:
            side, per_rank = space, shared_input_params(shapes, 1)
        else:
            side, per_rank = space, shared_output_params(shapes, 1)
        dense = sum(rows * cols for rows, cols in shapes)
        yield Segment(role, layers, side, dense, per_rank, saved)


def read_table(path: Path) -> dict[str, NDArray[np.float64]] | None:
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
