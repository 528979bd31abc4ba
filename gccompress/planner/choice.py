"""From a model to a Plan: analyse, calibrate, price, let the strategies compete, probe."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, cast, get_args, get_type_hints

import gccompress
from gccompress.calibration import (
    Calibrated,
    CalibrationOptions,
    calibrate,
    damping_warnings,
)
from gccompress.continuity import ContinuityReport, analyze, space_of
from gccompress.errors import GccompressError, PlanError
from gccompress.files import cache_folder, write_text
from gccompress.linalg import Damping
from gccompress.models import LoadedModel, open_model, stored_dtype
from gccompress.moments import Fisher
from gccompress.plan import (
    AnyMove,
    Budget,
    Plan,
    PlannedModel,
    Prediction,
    plan_params,
)
from gccompress.planner import strategies
from gccompress.planner.allocate import Scales
from gccompress.planner.candidates import Candidate, Choice
from gccompress.planner.probe import Probe, Prober
from gccompress.planner.survey import QUANTIZED_BITS, QUANTIZED_GROUP, Survey, survey
from gccompress.recipe import Recipe
from gccompress.roles import PAPER_SPACE, Role, Space
from gccompress.sizes import ModelShape, bytes_of
from gccompress.view import ModelView, model_shape

logger = logging.getLogger(__name__)

Strategy = Literal["auto", "ranks", "width", "plain", "share", "lowrank", "prune"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

# Measured over predicted loss without a probe: METHOD's measurements lie between 1.8 and 3.4.
UNPROBED_SCALE = (1.5, 2.5, 4.0)
# The same by kind of move, in the middle of what was measured, where no probe says better.
USUAL_SCALES = Scales(rank=2.5, width=3.0, drop=1.1)
LARGEST_NLL = 100.0  # nats per token that are shown as a perplexity; far beyond any use
HEADER_BYTES = 4096  # of a safetensors file, and about this much again per 30 tensors


@dataclass(frozen=True)
class PlanOptions:
    """How plans are searched.

    Attributes:
        strategy: which candidate becomes the plan; `auto` is the allocated one.
        spaces: shared spaces from what was `measured` on this model, or the `paper`'s table.
        longest: most adjacent layers that `auto` lets share a basis (1: none).
        group: layers per group of the uniform `share` strategy.
        multiple: ranks are multiples of this.
        damping: of the moments.
        probe: measure `chosen` or `all` candidates in memory on held-out text, or `none`.
    """

    strategy: Strategy = "auto"
    spaces: Literal["measured", "paper"] = "measured"
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
    options = options or PlanOptions()
    cache = cache_folder(cache_dir)
    view = ModelView(loaded.model)
    shape = model_shape(view, stored_dtype(loaded))
    target = decoder_budget(budget, shape)
    spaces = _spaces(loaded, options, cache_dir)
    calibrated = calibrate(loaded, view, calibration or CalibrationOptions(), cache)
    priced = survey(
        view,
        calibrated.moments,
        spaces,
        longest=max(options.longest, options.group),  # `share` wants its groups priced too
        damping=options.damping,
        cache=cache,
    )

    def moves_of(name: Strategy, scales: Scales) -> list[AnyMove] | PlanError:
        return _moves(name, priced, calibrated, shape, target, spaces, options, scales)

    found = {name: moves_of(name, USUAL_SCALES) for name in STRATEGIES}
    prober = None
    if options.probe != "none" and len(calibrated.heldout):
        prober = Prober(view, calibrated.moments, options.damping, calibrated.heldout)
        _probe_and_calibrate(prober, found, moves_of, options)
    chosen = found[options.strategy]
    if isinstance(chosen, PlanError):
        raise chosen
    if prober is not None:  # after `auto` has looked for the best of what plans can do
        for bits in QUANTIZED_BITS:
            prober.measure_rounded(f"rtn{bits}", bits, QUANTIZED_GROUP)
    candidates = tuple(
        _candidate(name, moves, shape, prober) for name, moves in found.items()
    ) + tuple(_quantized(bits, priced, shape, prober) for bits in QUANTIZED_BITS)
    prediction = candidates[STRATEGIES.index(options.strategy)].prediction
    assert prediction is not None  # noqa: S101 - its moves exist
    plan = Plan(
        strategy=options.strategy,
        budget=budget,
        model=planned_model(loaded, view, shape),
        calibration=calibrated.record,
        prediction=prediction,
        options=_recorded(options),
        versions={name: version(name) for name in ("torch", "transformers")}
        | {"gccompress": gccompress.__version__},
        notes=damping_warnings(view, calibrated.moments.tokens),
        moves=tuple(chosen),
    )
    for note in plan.notes:
        logger.warning("%s", note)
    return Choice(plan, candidates)


def decoder_budget(budget: Budget, shape: ModelShape) -> int:
    """Return the decoder-projection parameters that a budget allows."""
    dense = shape.decoder_params()
    if budget.keep is not None:
        return int(budget.keep * dense)
    assert budget.max_size is not None  # noqa: S101 - the schema says one of the two
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


def _spaces(
    loaded: LoadedModel, options: PlanOptions, cache_dir: str | None
) -> Mapping[Role, Space]:
    if options.spaces == "paper":
        return PAPER_SPACE
    return space_of(continuity_of(loaded, cache_dir))


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
        options: how plans are searched; the strategy is one of its fields.
        calibration: text and estimates.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        cache_dir: where moments, spectra and sampled text are kept.

    Raises:
        PlanError: the budget is no budget, or cannot be met; says the closest that can be.
    """
    budget = budget_of(keep, max_size)
    loaded = open_model(model, device=device, cache_dir=cache_dir)
    return choose(
        loaded, budget, options=options, calibration=calibration, cache_dir=cache_dir
    ).plan


def budget_of(keep: float | None, max_size: int | str | None) -> Budget:
    """Return a checked budget. Raises `PlanError` unless exactly one, valid, is given."""
    if (keep is None) == (max_size is None):
        raise PlanError("give one budget: --keep SHARE, such as 0.8, or --max-size BYTES")
    if keep is not None:
        if not isinstance(keep, int | float) or not 0 < keep <= 1:  # also refuses NaN
            raise PlanError(f"--keep {keep!r}; wanted a share in (0, 1], such as 0.8")
        return Budget(keep=keep)
    assert max_size is not None  # noqa: S101 - one of the two is given
    try:
        size = bytes_of(max_size) if isinstance(max_size, str) else int(max_size)
    except (OverflowError, ValueError) as error:
        raise PlanError(f"--max-size: {error}") from error
    if size < 1:
        raise PlanError(f"--max-size {max_size}; wanted a positive number of bytes, such as 200MB")
    return Budget(max_size=size)


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
    )


def _moves(
    strategy: Strategy,
    priced: Survey,
    calibrated: Calibrated,
    shape: ModelShape,
    target: int,
    spaces: Mapping[Role, Space],
    options: PlanOptions,
    scales: Scales,
) -> list[AnyMove] | PlanError:
    """Return a strategy's moves, or its reason for having none."""
    segments, widths, multiple = priced.segments, priced.widths, options.multiple
    short = [one for one in segments if len(one.layers) <= options.longest]
    try:
        match strategy:
            case "auto":
                return strategies.allocated(short, widths, target, multiple, scales)
            case "ranks":
                return strategies.allocated(short, (), target, multiple)
            case "width":
                return strategies.width(segments, widths, target, multiple)
            case "plain":
                influence = calibrated.moments.influence
                return strategies.plain(
                    shape, influence, widths, target, multiple=multiple, scales=scales
                )
            case "share":
                return strategies.share(segments, spaces, target, multiple, options.group)
            case "lowrank":
                return strategies.lowrank(segments, target, multiple)
            case "prune":
                return strategies.prune(shape, calibrated.moments.influence, target)
    except PlanError as error:
        return error


def _probe_and_calibrate(
    prober: Prober,
    found: dict[Strategy, list[AnyMove] | PlanError],
    moves_of: Callable[[Strategy, Scales], list[AnyMove] | PlanError],
    options: PlanOptions,
) -> None:
    """Measure candidates, and let kinds of move compete at what they measured.

    Dropping layers is always measured, it costs no factorisation. The second order under-states
    kinds of move differently, so the probes of strategies of one kind scale their kind before
    `plain` and `auto`, which mix kinds, are made again; should another strategy still measure
    better than `auto`, `auto` takes its moves.
    """
    wanted: set[Strategy] = {"prune", options.strategy}
    if options.strategy == "plain":
        wanted |= {"width"}
    if options.strategy == "auto":
        wanted |= {"width", "ranks"}
    if options.probe == "all":
        wanted = set(STRATEGIES)
    for name in STRATEGIES:
        if name in wanted - {"auto", "plain"}:
            _measure(prober, name, found[name])
    usual = USUAL_SCALES
    scales = Scales(
        rank=_scale(prober, "ranks", found["ranks"], usual.rank),
        width=_scale(prober, "width", found["width"], usual.width),
        drop=_scale(prober, "prune", found["prune"], usual.drop),
    )
    logger.debug("measured over predicted loss: %s", scales)
    for name in ("plain", "auto"):
        found[name] = moves_of(name, scales)
        if name in wanted:
            _measure(prober, name, found[name])
    best = min(prober.found, key=lambda name: prober.found[name].rise, default="auto")
    if "auto" in prober.found and prober.found[best].rise < prober.found["auto"].rise:
        logger.info("auto: the moves of %s measured better and are taken", best)
        found["auto"] = found[cast(Strategy, best)]
        prober.found["auto"] = prober.found[best]


def _measure(prober: Prober, name: Strategy, moves: list[AnyMove] | PlanError) -> None:
    if not isinstance(moves, PlanError):
        prober.measure(name, moves)


def _scale(prober: Prober, name: Strategy, moves: list[AnyMove] | PlanError, usual: float) -> float:
    """Return measured over predicted loss of a probed strategy, within what can be believed."""
    if isinstance(moves, PlanError) or name not in prober.found:
        return usual
    predicted = sum(move.loss or 0.0 for move in moves)
    if predicted <= 0:
        return usual
    return min(max(prober.found[name].rise / predicted, 0.5), 20.0)


def _candidate(
    strategy: Strategy,
    moves: list[AnyMove] | PlanError,
    shape: ModelShape,
    prober: Prober | None,
) -> Candidate:
    if isinstance(moves, PlanError):
        return Candidate(strategy, (), None, reason=str(moves))
    decoder, total = plan_params(tuple(moves), shape)
    loss = sum(move.loss or 0.0 for move in moves)
    probe = prober.found.get(strategy) if prober else None
    prediction = Prediction(
        params_kept=decoder / shape.decoder_params(),
        params=total,
        bytes=total * shape.bytes_per_param,
        loss=loss,
        **perplexities(prober.dense_nll if prober else None, loss, probe),
        measured=probe is not None,
    )
    before = shape.decoder_params() + shape.head_params
    return Candidate(strategy, tuple(moves), prediction, before / (decoder + shape.head_params))


def perplexities(dense_nll: float | None, loss: float, probe: Probe | None) -> dict[str, float]:
    """Return dense, expected, low and high perplexity; nothing where the dense NLL is unknown.

    Probed: the measurement and two standard errors. Otherwise the second-order prediction times
    the range of ratios that docs/method.md measured.
    """
    if dense_nll is None:
        return {}
    if probe is None:
        low, middle, high = (loss * scale for scale in UNPROBED_SCALE)
    else:
        margin = 2 * probe.error if math.isfinite(probe.error) else abs(probe.rise)
        low, middle, high = probe.rise - margin, probe.rise, probe.rise + margin
    rises = {"dense_ppl": 0.0, "ppl": middle, "ppl_low": low, "ppl_high": high}
    # Bounded: the second order of a hopeless plan is beyond what a float can hold as perplexity.
    return {name: math.exp(min(dense_nll + rise, LARGEST_NLL)) for name, rise in rises.items()}


def _quantized(bits: int, priced: Survey, shape: ModelShape, prober: Prober | None) -> Candidate:
    """Return the reference row of round-to-nearest on all decoder projections."""
    decoder = shape.decoder_params()
    rest = shape.total_params - decoder
    per_weight = bits + (16 + bits) / QUANTIZED_GROUP
    loss = priced.quantized[bits]
    dense_nll, probe = (prober.dense_nll, prober.found[f"rtn{bits}"]) if prober else (None, None)
    prediction = Prediction(
        params_kept=1.0,
        params=shape.total_params,
        bytes=rest * shape.bytes_per_param + int(decoder * per_weight / 8),
        loss=loss,
        **perplexities(
            prober.dense_nll if prober else None,
            loss,
            prober.found[f"rtn{bits}"] if prober else None,
        ),
        measured=prober is not None,
    )
    return Candidate(f"rtn{bits}", (), prediction, reason="reference: same shapes, fewer bits")


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


def _recorded(options: PlanOptions) -> dict[str, str | int | float | bool | None]:
    return {
        "spaces": options.spaces,
        "longest": options.longest,
        "group": options.group,
        "multiple": options.multiple,
        "damping_a": options.damping.a,
        "damping_g": options.damping.g,
    }
