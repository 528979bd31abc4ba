"""A plan from the weights alone, streamed: what can be known of a 70B model on a laptop.

Continuity and weight spectra, no text and no gradients: an ordering of moves and strategies by the
weight energy they lose, not a prediction of perplexity (docs/method.md, "Without calibration").
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

import gccompress
from gccompress.continuity import analyze, space_of
from gccompress.density import squared_values
from gccompress.errors import PlanError
from gccompress.files import cache_folder, new_file
from gccompress.models import pick_device
from gccompress.plan import AnyMove, Budget, Plan, PlannedModel, Prediction, plan_params
from gccompress.planner import strategies
from gccompress.planner.candidates import Candidate, Choice
from gccompress.planner.choice import PlanOptions, decoder_budget
from gccompress.planner.survey import Segment, make_segments, read_table
from gccompress.progress import track
from gccompress.roles import PAPER_SPACE, Role, Space
from gccompress.shards import WeightStream, open_stream
from gccompress.sizes import ModelShape
from gccompress.view import ModelView, model_shape

logger = logging.getLogger(__name__)

TABLE_VERSION = 1
LONGEST = 2  # layers on one basis: no more than two weights are in memory at a time
NEEDS_TEXT = "needs calibration: what a layer or a neuron does is not seen in its weights"
STRATEGIES = ("ranks", "share", "lowrank")
NOTE = (
    "made from weights alone: an ordering by lost weight energy, no perplexity; plan again without "
    "--no-calibration before applying"
)


def choose_from_weights(
    model: str | Path,
    budget: Budget,
    *,
    options: PlanOptions | None = None,
    device: str = "auto",
    revision: str | None = None,
    cache_dir: str | None = None,
) -> Choice:
    """Return the plan of least lost weight energy at `budget`, and the others beside it.

    Args:
        model: alias, hub id, folder or .gguf file; its weights are streamed, two at a time.
        budget: what to keep.
        options: spaces, multiple and group count; `auto` means `ranks` here.
        device: where to multiply.
        revision: of a hub model.
        cache_dir: where finished projections are kept; started again, it goes on after them.

    Raises:
        PlanError: the budget cannot be met, or the strategy needs calibration.
        ModelError: the model cannot be had.
    """
    options = options or PlanOptions()
    strategy = "ranks" if options.strategy == "auto" else options.strategy
    if strategy not in STRATEGIES:
        raise PlanError(f"--strategy {strategy} {NEEDS_TEXT}; leave out --no-calibration")
    stream = open_stream(model, revision=revision, cache_dir=cache_dir)
    shape, dtype = _shape(stream)
    target = decoder_budget(budget, shape)
    spaces: Mapping[Role, Space] = PAPER_SPACE
    if options.spaces == "measured":
        spaces = space_of(analyze(model, device=device, folded=False, cache_dir=cache_dir))
    segments = _price(stream, spaces, pick_device(device), cache_folder(cache_dir))
    short = [one for one in segments if len(one.layers) <= options.longest]
    found = {
        "ranks": _tried(lambda: strategies.allocated(short, (), target, options.multiple)),
        "share": _tried(
            lambda: strategies.share(segments, spaces, target, options.multiple, LONGEST)
        ),
        "lowrank": _tried(lambda: strategies.lowrank(segments, target, options.multiple)),
    }
    chosen = found[strategy]
    if isinstance(chosen, PlanError):
        raise chosen
    candidates = tuple(_candidate(name, moves, shape) for name, moves in found.items()) + tuple(
        Candidate(name, (), None, reason=NEEDS_TEXT) for name in ("width", "plain", "prune")
    )
    prediction = next(one.prediction for one in candidates if one.strategy == strategy)
    assert prediction is not None  # noqa: S101 - its moves exist
    plan = Plan(
        strategy=strategy,
        budget=budget,
        model=PlannedModel(
            name=stream.name,
            hash=stream.hash,
            model_type=stream.config["model_type"],
            layers=shape.layers,
            decoder_params=shape.decoder_params(),
            total_params=shape.total_params,
            matrices=shape.matrices,
        ),
        calibration=None,
        prediction=prediction,
        options={"spaces": options.spaces, "multiple": options.multiple, "stored": str(dtype)},
        versions={"gccompress": gccompress.__version__},
        notes=(NOTE,),
        moves=tuple(move.model_copy(update={"loss": None}) for move in chosen),
    )
    return Choice(plan, candidates)


def _tried(make: Any) -> list[AnyMove] | PlanError:
    try:
        moves: list[AnyMove] = make()
    except PlanError as error:
        return error
    return moves


def _shape(stream: WeightStream) -> tuple[ModelShape, torch.dtype]:
    """Return the model's sizes, from its config on the meta device, and how it is stored."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(stream.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    dtype = stream.rows(Role.DOWN, 0, 0, 1).dtype
    return model_shape(ModelView(model), dtype), dtype


def _price(
    stream: WeightStream,
    spaces: Mapping[Role, Space],
    device: torch.device,
    cache: Path,
) -> list[Segment]:
    """Price every segment by the energy that each further rank saves, projection by projection."""
    segments: list[Segment] = []
    for role in track(stream.roles, "Spectra of the weights (projections)"):
        space = spaces.get(role, Space.NONE)
        key = [TABLE_VERSION, stream.hash, role, space, LONGEST]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        path = cache / "spectra" / f"{name}.safetensors"
        table = read_table(path)
        if table is None:
            table = _spectra(stream, role, space, device)
            with new_file(path) as temporary:
                save_file(table, temporary)
        segments += make_segments(stream, (role,), space, table)
    return segments


def _spectra(
    stream: WeightStream, role: Role, space: Space, device: torch.device
) -> dict[str, NDArray[np.float64]]:
    """Return `"first-last": energy` of every segment of a role, as a share of all projections'."""
    table: dict[str, NDArray[np.float64]] = {}
    share = stream.num_layers * len(stream.roles)
    previous: torch.Tensor | None = None
    for layer in range(stream.num_layers):
        weight = stream.weight(role, layer).to(device)
        table[f"{layer}-{layer}"] = squared_values([weight], Space.INPUT) / share
        if previous is not None and space is not Space.NONE:
            table[f"{layer - 1}-{layer}"] = squared_values([previous, weight], space) / share
        previous = weight
    return table


def _candidate(strategy: str, moves: list[AnyMove] | PlanError, shape: ModelShape) -> Candidate:
    if isinstance(moves, PlanError):
        return Candidate(strategy, (), None, reason=str(moves))
    decoder, total = plan_params(tuple(moves), shape)
    prediction = Prediction(
        params_kept=decoder / shape.decoder_params(),
        params=total,
        bytes=total * shape.bytes_per_param,
        energy_lost=sum(move.loss or 0.0 for move in moves),
    )
    before = shape.decoder_params() + shape.head_params
    return Candidate(strategy, tuple(moves), prediction, before / (decoder + shape.head_params))
