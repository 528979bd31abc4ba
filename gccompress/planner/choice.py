"""What plans are searched by, and the ways in: `choose` and `make_plan`; `search` does the work."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from gccompress.calibration import CalibrationOptions
from gccompress.continuity import ContinuityReport, analyze
from gccompress.errors import GccompressError, PlanError
from gccompress.files import cache_folder, write_text
from gccompress.linalg import Damping
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher
from gccompress.plan import Budget, Plan, PlannedModel
from gccompress.planner.band import Band
from gccompress.planner.candidates import Choice
from gccompress.recipe import Recipe
from gccompress.sizes import ModelShape, bytes_of
from gccompress.view import ModelView

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "ranks", "width", "plain", "share", "lowrank", "prune"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

LARGEST_NLL = 100.0  # nats per token that are shown as a perplexity; far beyond any use
HEADER_BYTES = 4096  # of a safetensors file, and about this much again per 30 tensors


@dataclass(frozen=True)
class PlanOptions:
    """How plans are searched.

    Attributes:
        strategy: which candidate becomes the plan; `auto` is the allocated one.
        spaces: shared spaces from what was `measured` on this model, or the `paper`'s table, or
            `any`: every role may share either.
        longest: most adjacent layers that `auto` lets share a basis (1: none).
        group: layers per group of the uniform `share` strategy.
        multiple: ranks are multiples of this.
        damping: of the moments.
        probe: measure `chosen` or `all` candidates in memory on held-out text, or `none`.
    """

    strategy: Strategy = "auto"
    spaces: Literal["measured", "paper", "any"] = "measured"
    longest: int = 3
    group: int = 2
    multiple: int = 32
    damping: Damping = field(default_factory=Damping)
    probe: Literal["chosen", "all", "none"] = "chosen"

    def __post_init__(self) -> None:
        """Raise `PlanError` for what is no option; the command line and recipes say it earlier."""
        for name in ("strategy", "spaces", "probe"):
            known = get_args(get_type_hints(PlanOptions)[name])
            if getattr(self, name) not in known:
                found = getattr(self, name)
                raise PlanError(f"plan option {name} {found!r}; wanted one of {', '.join(known)}")
        if self.longest < 1 or self.multiple < 1 or self.group < 2:
            raise PlanError("plan options: longest and multiple are at least 1, group at least 2")


def choose(
    loaded: LoadedModel,
    budget: Budget,
    *,
    options: PlanOptions | None = None,
    calibration: CalibrationOptions | None = None,
    cache_dir: str | None = None,
) -> Choice:
    """Return the plan that meets `budget`, and all candidates side by side.

    Raises:
        PlanError: the chosen strategy cannot meet the budget; says the closest that can be.
        TextError, NumericalError, UnsupportedModelError: from the stages it runs.
    """
    from gccompress.planner.search import Search

    return Search(loaded, options, calibration, cache_dir).choose(budget)


def decoder_budget(budget: Budget, shape: ModelShape) -> int:
    """Return the decoder-projection parameters that a budget allows."""
    dense = shape.decoder_params()
    if budget.keep is not None:
        return int(budget.keep * dense)
    if budget.max_size is None:
        raise PlanError(f"budget '{budget}' is none of size; give --keep or --max-size")
    rest = shape.total_params - dense
    # Room for the file's header, which names every tensor.
    header = HEADER_BYTES + 400 * shape.layers * len(shape.matrices)
    allowed = (budget.max_size - header) // shape.bytes_per_param - rest
    if allowed < 1:
        floor = rest * shape.bytes_per_param + header
        raise PlanError(
            f"--max-size {budget.max_size} bytes: embeddings, norms and the file's header alone "
            f"take {floor} at the {shape.bytes_per_param} bytes a parameter that the model is "
            "stored in; raise it"
        )
    return min(allowed, dense)


def continuity_of(loaded: LoadedModel, cache_dir: str | None = None) -> ContinuityReport:
    """Return a model's continuity, measured once and then read from the cache by its hash."""
    name = loaded.source.hash.removeprefix("sha256:")
    path = cache_folder(cache_dir) / "continuity" / f"{name}.json"
    if path.exists():
        try:
            found = ContinuityReport.from_json(path.read_text(encoding="utf-8"))
            return found.model_copy(update={"model": loaded.source.name})
        except GccompressError as error:
            logger.warning("%s: %s; measuring again", path, error)
    report = analyze(loaded, device=str(loaded.model.device))
    write_text(path, report.to_json())
    return report


def make_plan(
    model: Any,
    *,
    keep: float | None = None,
    max_size: int | str | None = None,
    speedup: float | None = None,
    max_loss: float | None = None,
    options: PlanOptions | None = None,
    calibration: CalibrationOptions | None = None,
    device: str = "auto",
    cache_dir: str | None = None,
) -> Plan:
    """Return the plan that `gccompress plan` would write.

    Args:
        model: path, alias, hub id, a model in memory, or what `open_model` returned.
        keep: share of decoder-projection parameters to keep, in (0, 1].
        max_size: or bytes of the whole checkpoint, a number or such as `200MB`.
        speedup: or dense over compressed prefill time on this device, at least 1.
        max_loss: or nats per token that held-out text may get worse: the smallest such model.
        options: how plans are searched; the strategy is one of its fields.
        calibration: text and estimates.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        cache_dir: where moments, spectra and sampled text are kept.

    Raises:
        PlanError: the budget is no budget, or cannot be met; says the closest that can be.
    """
    budget = budget_of(keep, max_size, speedup, max_loss)
    loaded = open_model(model, device=device, cache_dir=cache_dir)
    return choose(
        loaded, budget, options=options, calibration=calibration, cache_dir=cache_dir
    ).plan


def budget_of(
    keep: float | None = None,
    max_size: int | str | None = None,
    speedup: float | None = None,
    max_loss: float | None = None,
) -> Budget:
    """Return a checked budget. Raises `PlanError` unless exactly one, valid, is given."""
    if sum(value is not None for value in (keep, max_size, speedup, max_loss)) != 1:
        raise PlanError(
            "give one budget: --keep SHARE, such as 0.8, --max-size BYTES, --speedup TIMES or "
            "--max-loss NATS"
        )
    if keep is not None:
        if not _is_number(keep) or not 0 < keep <= 1:
            raise PlanError(f"--keep {keep!r}; wanted a share in (0, 1], such as 0.8")
        return Budget(keep=keep)
    if speedup is not None:
        if not _is_number(speedup) or speedup < 1:
            raise PlanError(f"--speedup {speedup!r}; wanted a ratio of at least 1, such as 1.3")
        return Budget(speedup=speedup)
    if max_loss is not None:
        if not _is_number(max_loss) or max_loss <= 0:
            raise PlanError(f"--max-loss {max_loss!r}; wanted nats per token above 0, such as 0.1")
        return Budget(max_loss=max_loss)
    assert max_size is not None  # noqa: S101 - one of them is given
    try:
        size = bytes_of(max_size) if isinstance(max_size, str) else int(max_size)
    except (OverflowError, ValueError) as error:
        raise PlanError(f"--max-size: {error}") from error
    if size < 1:
        raise PlanError(f"--max-size {max_size}; wanted a positive number of bytes, such as 200MB")
    return Budget(max_size=size)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def options_of(recipe: Recipe) -> tuple[PlanOptions, CalibrationOptions]:
    """Return a recipe's plan and calibration sections as options."""
    plan, text = recipe.plan, recipe.calibration
    damping = Damping(plan.damping_a, plan.damping_g)
    options = PlanOptions(
        plan.strategy, plan.spaces, plan.longest, plan.group, plan.multiple, damping, plan.probe
    )
    return options, CalibrationOptions(
        text.source,
        text.tokens,
        text.seqlen,
        text.heldout_tokens,
        text.seed,
        Fisher.parse(text.fisher),
        text.spread,
    )


def perplexities(dense_nll: float, band: Band) -> dict[str, float]:
    """Return dense, expected, low and high perplexity, for a rise of the loss in a band."""
    rises = {"dense_ppl": 0.0, "ppl": band.rise, "ppl_low": band.low, "ppl_high": band.high}
    # Bounded: the second order of a hopeless plan is beyond what a float can hold as perplexity.
    return {name: math.exp(min(dense_nll + rise, LARGEST_NLL)) for name, rise in rises.items()}


def planned_model(loaded: LoadedModel, view: ModelView, shape: ModelShape) -> PlannedModel:
    """Return what a plan records of its model."""
    return PlannedModel(
        name=loaded.source.name,
        hash=loaded.source.hash,
        revision=loaded.source.revision,
        model_type=view.model.config.model_type,
        layers=shape.layers,
        decoder_params=shape.decoder_params(),
        total_params=shape.total_params,
        matrices=shape.matrices,
    )
