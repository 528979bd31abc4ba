"""One model's search for plans: calibrated and priced once, then any number of budgets."""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import cast

import gccompress
from gccompress.calibration import CalibrationOptions, calibrate, damping_warnings
from gccompress.continuity import space_of
from gccompress.errors import PlanError
from gccompress.files import cache_folder
from gccompress.models import LoadedModel, stored_dtype
from gccompress.plan import (
    AnyMove,
    Budget,
    Plan,
    Prediction,
    plan_params,
)
from gccompress.planner import strategies
from gccompress.planner.allocate import Allocation, Costs, Params, Scales
from gccompress.planner.band import USUAL
from gccompress.planner.candidates import Candidate, Choice
from gccompress.planner.choice import (
    STRATEGIES,
    PlanOptions,
    Strategy,
    continuity_of,
    decoder_budget,
    perplexities,
    planned_model,
)
from gccompress.planner.costs import Nanoseconds, losses_by_kind, meet, total_loss
from gccompress.planner.latency import LatencyTable, speedup
from gccompress.planner.probe import Prober
from gccompress.planner.survey import QUANTIZED_BITS, QUANTIZED_GROUP, Segment, bases, survey
from gccompress.planner.timing import latency_table
from gccompress.planner.verdicts import sharing_findings
from gccompress.roles import PAPER_SPACE, Role, Space
from gccompress.view import ModelView, model_shape

logger = logging.getLogger(__name__)

# Measured over predicted loss by kind of move, where no probe says better.
USUAL_SCALES = Scales(**{name: kind.scale for name, kind in USUAL.items()})
LOSS_TRIES = 6  # probes that a budget of loss may take to be met by measurement

Moves = list[AnyMove]
Found = dict[Strategy, Moves | PlanError]


class Search:
    """Plans for one model under one calibration; see `choose`."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: PlanOptions | None = None,
        calibration: CalibrationOptions | None = None,
        cache_dir: str | None = None,
    ) -> None:
        """Calibrate, and price every candidate.

        Raises:
            TextError, NumericalError, UnsupportedModelError: from the stages it runs.
        """
        self.options = options or PlanOptions()
        self.loaded = loaded
        self.view = ModelView(loaded.model)
        self.shape = model_shape(self.view, stored_dtype(loaded))
        self._cache = cache_folder(cache_dir)
        self.spaces = self._spaces(cache_dir)
        self.calibrated = calibrate(
            loaded, self.view, calibration or CalibrationOptions(), self._cache
        )
        shared = bases(
            self.view.roles,
            self.spaces,
            max(self.options.longest, self.options.group),  # `share` wants its groups priced too
            both=self.options.spaces == "any",
            joint=self.options.longest > 1,
        )
        self.priced = survey(
            self.view,
            self.calibrated.moments,
            shared,
            damping=self.options.damping,
            cache=self._cache,
        )
        self._allocation: Allocation | None = None

    @cached_property
    def prober(self) -> Prober | None:
        """What measures plans; None without held-out text or where no probe is wanted."""
        if self.options.probe == "none" or not len(self.calibrated.heldout):
            return None
        return Prober(
            self.view,
            self.calibrated.moments,
            self.options.damping,
            self.calibrated.heldout,
            self._cache,
        )

    @cached_property
    def latency(self) -> LatencyTable:
        """The latency of this model's parts on its device, measured when first needed."""
        return latency_table(self.view, self._cache)

    def choose(self, budget: Budget, scales: Scales | None = None) -> Choice:
        """Return the plan that meets `budget`, and all candidates side by side.

        Args:
            budget: what to meet.
            scales: measured over predicted loss by kind of move; None probes for them.

        Raises:
            PlanError: the chosen strategy cannot meet the budget; says the closest that can be.
        """
        if budget.max_size is not None:
            decoder_budget(budget, self.shape)  # says at once what no plan can meet
        found, scales = self._candidates(budget, scales)
        chosen = found[self.options.strategy]
        if isinstance(chosen, PlanError):
            raise chosen
        if budget.max_loss is not None and self.prober is not None:
            found[self.options.strategy] = chosen = self._within(budget.max_loss, chosen, scales)
        if self.prober is not None:  # after `auto` has looked for the best of what plans can do
            for bits in QUANTIZED_BITS:
                self.prober.measure_rounded(f"rtn{bits}", bits, QUANTIZED_GROUP)
        candidates = tuple(
            self._candidate(name, moves, budget) for name, moves in found.items()
        ) + tuple(self._quantized(bits) for bits in QUANTIZED_BITS)
        prediction = candidates[STRATEGIES.index(self.options.strategy)].prediction
        assert prediction is not None  # noqa: S101 - its moves exist
        plan = Plan(
            strategy=self.options.strategy,
            budget=budget,
            model=planned_model(self.loaded, self.view, self.shape),
            calibration=self.calibrated.record,
            prediction=prediction,
            options=self._recorded(),
            versions={name: version(name) for name in ("torch", "transformers")}
            | {"gccompress": gccompress.__version__},
            notes=damping_warnings(self.view, self.calibrated.moments),
            findings=sharing_findings(chosen, self._allocation, self.options.spaces),
            moves=tuple(chosen),
        )
        for note in plan.notes:
            logger.warning("%s", note)
        return Choice(plan, candidates)

    def scales_at(self, budget: Budget) -> Scales:
        """Return measured over predicted loss by kind of move, probed at a budget."""
        return self._candidates(budget, None)[1]

    def _candidates(self, budget: Budget, scales: Scales | None) -> tuple[Found, Scales]:
        """Return the moves of every strategy, measured as far as is wanted, and the scales."""
        if self.prober is not None:
            self.prober.found.clear()
        first = scales or USUAL_SCALES
        found: Found = {name: self._moves(name, budget, first) for name in STRATEGIES}
        if scales is None:
            return found, self._probe_and_calibrate(found, budget)
        for name in STRATEGIES:
            if name == self.options.strategy or self.options.probe == "all":
                self._measure(name, found[name])
        return found, scales

    def _spaces(self, cache_dir: str | None) -> Mapping[Role, Space]:
        if self.options.spaces != "measured":
            return PAPER_SPACE
        return space_of(continuity_of(self.loaded, cache_dir))

    def _moves(self, name: Strategy, budget: Budget, scales: Scales) -> Moves | PlanError:
        """Return a strategy's moves for a budget, or its reason for having none."""
        dense = self.shape.decoder_params()
        try:
            if budget.speedup is not None:
                return self._fast(name, budget.speedup, scales)
            if budget.max_loss is not None:
                limit = budget.max_loss
                return meet(
                    lambda params: self._of_size(name, params, scales),
                    lambda moves: _scaled_loss(moves, scales) <= limit,
                    dense,
                    largest=False,
                )
            return self._of_size(name, decoder_budget(budget, self.shape), scales)
        except PlanError as error:
            return error

    def _of_size(self, name: Strategy, target: int, scales: Scales) -> Moves:
        """Return a strategy's moves that keep at most `target` decoder parameters."""
        priced, multiple = self.priced, self.options.multiple
        influence = self.calibrated.moments.influence
        match name:
            case "auto":
                return self._auto(lambda layers: target, scales, Params())
            case "ranks":
                return strategies.allocated(self._short(), (), target, multiple)
            case "width":
                return strategies.width(priced.segments, priced.widths, target, multiple)
            case "plain":
                return strategies.plain(
                    self.shape, influence, priced.widths, target, multiple=multiple, scales=scales
                )
            case "share":
                return strategies.share(
                    priced.segments, self.spaces, target, multiple, self.options.group
                )
            case "lowrank":
                return strategies.lowrank(priced.segments, target, multiple)
            case "prune":
                return strategies.prune(self.shape, influence, target)

    def _auto(self, budget: strategies.LayerBudget, scales: Scales, costs: Costs) -> Moves:
        moves, self._allocation = strategies.with_drops(
            self._short(),
            self.priced.widths,
            self.calibrated.moments.influence,
            budget,
            self.options.multiple,
            scales,
            costs,
        )
        return moves

    def _fast(self, name: Strategy, wanted: float, scales: Scales) -> Moves:
        """Return a strategy's moves whose prefill is predicted `wanted` times as fast as dense."""
        table, multiple = self.latency, self.options.multiple
        costs = Nanoseconds(table)
        layers = self.shape.layers
        if wanted <= 1.0:
            return []
        match name:
            case "auto":
                return self._auto(lambda left: table.cost_budget(wanted, left), scales, costs)
            case "ranks" | "width":
                target = table.cost_budget(wanted, layers)
                if name == "ranks":
                    return strategies.allocated(self._short(), (), target, multiple, costs=costs)
                segments, widths = self.priced.segments, self.priced.widths
                return strategies.width(segments, widths, target, multiple, costs)
            case _:
                return meet(
                    lambda params: self._of_size(name, params, scales),
                    lambda moves: speedup(moves, self.shape, table) >= wanted,
                    self.shape.decoder_params(),
                    largest=True,
                )

    def _short(self) -> list[Segment]:
        """Return the candidates that `auto` and `ranks` may use."""
        return [one for one in self.priced.segments if len(one.layers) <= self.options.longest]

    def _probe_and_calibrate(self, found: Found, budget: Budget) -> Scales:
        """Measure candidates, and let kinds of move compete at what they measured.

        Dropping layers is always measured, it costs no factorisation. The second order under-states
        kinds of move differently, so the probes of strategies of one kind scale their kind before
        `plain` and `auto`, which mix kinds, are made again; should another strategy still measure
        better than `auto`, `auto` takes its moves. Returns the scales.
        """
        if self.prober is None:
            return USUAL_SCALES
        strategy = self.options.strategy
        wanted: set[Strategy] = {"prune", strategy}
        if strategy == "plain":
            wanted |= {"width"}
        if strategy == "auto":
            wanted |= {"width", "ranks"}
        if self.options.probe == "all":
            wanted = set(STRATEGIES)
        for name in STRATEGIES:
            if name in wanted - {"auto", "plain"}:
                self._measure(name, found[name])
        usual = USUAL_SCALES
        scales = Scales(
            rank=self._scale("ranks", found, usual.rank),
            width=self._scale("width", found, usual.width),
            drop=self._scale("prune", found, usual.drop),
        )
        logger.debug("measured over predicted loss: %s", scales)
        for name in ("plain", "auto"):
            found[name] = self._moves(name, budget, scales)
            if name in wanted:
                self._measure(name, found[name])
        if budget.max_loss is None:
            self._best_of_all(found)
        return scales

    def _best_of_all(self, found: Found) -> None:
        """Let `auto` take the moves of a strategy that measured better than its own."""
        assert self.prober is not None  # noqa: S101 - called with one
        probes = self.prober.found
        best = min(probes, key=lambda name: probes[name].rise, default="auto")
        if "auto" in probes and probes[best].rise < probes["auto"].rise:
            logger.info("auto: the moves of %s measured better and are taken", best)
            found["auto"] = found[cast(Strategy, best)]
            probes["auto"] = probes[best]

    def _measure(self, name: Strategy, moves: Moves | PlanError) -> None:
        if not isinstance(moves, PlanError) and self.prober is not None:
            self.prober.measure(name, moves)

    def _scale(self, name: Strategy, found: Found, usual: float) -> float:
        """Return measured over predicted loss of a probed strategy, within what can be believed."""
        moves = found[name]
        if isinstance(moves, PlanError) or self.prober is None or name not in self.prober.found:
            return usual
        predicted = total_loss(moves)
        if predicted <= 0:
            return usual
        return min(max(self.prober.found[name].rise / predicted, 0.5), 20.0)

    def _within(self, limit: float, moves: Moves, scales: Scales) -> Moves:
        """Return the smallest plan found whose measured loss is within the limit.

        Raises:
            PlanError: none of those tried is; says what was measured.
        """
        assert self.prober is not None  # noqa: S101 - called with one
        name = self.options.strategy
        best: Moves | None = None
        aim = limit
        for _ in range(LOSS_TRIES):
            self.prober.measure(name, moves)
            rise = self.prober.found[name].rise
            if rise <= limit and (best is None or _saves(moves) > _saves(best)):
                best = moves
            if 0.9 * limit <= rise <= limit or not moves:
                break
            aim *= min(max(limit / max(rise, 1e-6), 0.4), 2.5) * (0.9 if rise > limit else 1.0)
            again = self._moves(name, Budget(max_loss=aim), scales)
            if isinstance(again, PlanError) or (again == moves and rise <= limit):
                break
            moves = again
        if best is None:
            raise PlanError(
                f"--max-loss {limit:g}: the least that was tried measured {rise:.4f} nats on "
                "held-out text; allow more, or use a smaller --multiple"
            )
        self.prober.measure(name, best)
        return best

    def _candidate(self, name: Strategy, moves: Moves | PlanError, budget: Budget) -> Candidate:
        if isinstance(moves, PlanError):
            return Candidate(name, (), None, reason=str(moves))
        decoder, total = plan_params(tuple(moves), self.shape)
        loss = total_loss(moves)
        prediction = Prediction(
            params_kept=decoder / self.shape.decoder_params(),
            params=total,
            bytes=total * self.shape.bytes_per_param,
            loss=loss,
            **self._perplexities(name, moves),
            measured=self.prober is not None and name in self.prober.found,
        )
        if budget.speedup is not None:
            return Candidate(
                name, tuple(moves), prediction, speedup(moves, self.shape, self.latency)
            )
        before = self.shape.decoder_params() + self.shape.head_params
        limit = before / (decoder + self.shape.head_params)
        return Candidate(name, tuple(moves), prediction, limit)

    def _perplexities(self, name: str, moves: Sequence[AnyMove]) -> dict[str, float]:
        """Return a candidate's perplexities, measured or extrapolated; none without a prober."""
        if self.prober is None:
            return {}
        probe = self.prober.found.get(name)
        band = self.prober.extrapolated(moves) if probe is None else probe.band
        return perplexities(self.prober.dense_nll, band)

    def _quantized(self, bits: int) -> Candidate:
        """Return the reference row of round-to-nearest on all decoder projections."""
        decoder = self.shape.decoder_params()
        rest = self.shape.total_params - decoder
        per_weight = bits + (16 + bits) / QUANTIZED_GROUP
        loss = self.priced.quantized[bits]
        name = f"rtn{bits}"
        prediction = Prediction(
            params_kept=1.0,
            params=self.shape.total_params,
            bytes=rest * self.shape.bytes_per_param + int(decoder * per_weight / 8),
            loss=loss,
            **self._perplexities(name, ()),
            measured=self.prober is not None,
        )
        return Candidate(name, (), prediction, reason="reference: same shapes, fewer bits")

    def _recorded(self) -> dict[str, str | int | float | bool | None]:
        options = self.options
        return {
            "spaces": options.spaces,
            "longest": options.longest,
            "group": options.group,
            "multiple": options.multiple,
            "damping_a": options.damping.a,
            "damping_g": options.damping.g,
        }


def _saves(moves: Moves) -> int:
    return sum(move.saves for move in moves)


def _scaled_loss(moves: Moves, scales: Scales) -> float:
    """Return the predicted nats per token of moves, each kind times its scale."""
    return sum(getattr(scales, kind) * loss for kind, loss in losses_by_kind(moves).items())
