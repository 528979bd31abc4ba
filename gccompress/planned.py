"""The model that a plan was made for, opened and recognised by its content."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gccompress.errors import ModelError, PlanError
from gccompress.models import LoadedModel, memory_hash, open_model
from gccompress.moments import find_moments
from gccompress.plan import Plan
from gccompress.view import ModelView

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A plan's model in memory.

    Attributes:
        loaded: with the hash that the plan knows it by, unless it is another model.
        view: of the same model.
        other: it is not the model that the plan was made for, which was allowed.
    """

    loaded: LoadedModel
    view: ModelView
    other: bool


def open_planned(
    plan: Plan,
    model: Any = None,
    *,
    allow_other_model: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    cache: Path,
    trust_remote_code: bool = False,
) -> Opened:
    """Return the model of a plan.

    Args:
        plan: what names it.
        model: where it is now (path, alias, hub id, in memory); None: where the plan found it.
        allow_other_model: accept one whose content is not the plan's.
        device: where to compute.
        dtype: number type to compute in; None: as the plan was made where its moments have to be
            made again, which come out the same only so, else as `open_model` chooses.
        revision: of a hub model; None: the plan's own, where `model` is None too.
        cache: where the plan's moments are looked for.
        trust_remote_code: run code that the model's folder brings.

    Raises:
        ModelError: there is no such model; says so of the name in the plan.
        PlanError: another model, or one with another number of layers.
    """
    record = plan.calibration
    if dtype is None and record is not None and find_moments(record.hash, cache) is None:
        dtype = record.dtype
    try:
        loaded = open_model(
            plan.model.name if model is None else model,
            device=device,
            dtype=dtype,
            revision=plan.model.revision if model is None and revision is None else revision,
            cache_dir=cache,
            trust_remote_code=trust_remote_code,
        )
    except ModelError as error:
        if model is not None:
            raise
        raise type(error)(
            f"{error}; the plan names it so: if the model is elsewhere, say so with --model"
        ) from error
    other = not _is_planned(loaded, plan)
    if other and not allow_other_model:
        raise PlanError(
            f"the plan is for {plan.model.name} ({plan.model.hash[:19]}), this is "
            f"{loaded.source.name} ({loaded.source.hash[:19]}); make a plan for it, or pass "
            "--allow-other-model"
        )
    if other:
        logger.warning("the plan was made for another model (%s)", plan.model.name)
    else:
        loaded = replace(loaded, source=replace(loaded.source, hash=plan.model.hash))
    view = ModelView(loaded.model)
    if view.num_layers != plan.model.layers:
        raise PlanError(
            f"the plan is for {plan.model.layers} layers, {loaded.source.name} has "
            f"{view.num_layers}; make a plan for it"
        )
    return Opened(loaded, view, other)


def _is_planned(loaded: LoadedModel, plan: Plan) -> bool:
    """Return whether a model is the plan's: its files, or its tensors where it was planned so."""
    if loaded.source.hash == plan.model.hash:
        return True
    dtype = None if plan.calibration is None else plan.calibration.dtype
    return memory_hash(loaded.model, dtype) == plan.model.hash
