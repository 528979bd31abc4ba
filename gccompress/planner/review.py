"""A plan reviewed: what its file says of sizes and losses against what is true of its moves now."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.apply import damping_of
from gccompress.calibration import calibrate, options_of_record, recall, recall_heldout
from gccompress.files import cache_folder
from gccompress.models import stored_dtype
from gccompress.moments import Moments
from gccompress.plan import (
    AnyMove,
    Calibration,
    LowRank,
    Plan,
    PlannedModel,
    Prediction,
    ShareInput,
    ShareOutput,
    plan_params,
)
from gccompress.plan_file import PlanFile
from gccompress.planned import Opened, open_planned
from gccompress.planner.band import extrapolated
from gccompress.planner.choice import perplexities, planned_model
from gccompress.planner.costs import losses_by_kind
from gccompress.planner.latency import speedup
from gccompress.planner.probe import Prober
from gccompress.planner.reprice import energy_lost, reprice
from gccompress.planner.timing import latency_table
from gccompress.planner.verdicts import sharing_findings
from gccompress.progress import track
from gccompress.report.plan_overview import prediction_rows
from gccompress.sizes import ModelShape
from gccompress.text import Windows
from gccompress.view import ModelView, model_shape

if TYPE_CHECKING:
    from rich.table import Table

REMADE = "numbers made again by plan check; those in the file were not its moves'"
NUMBERS = ("saves", "loss", "gain")  # of a move, which follow from what it does
PERPLEXITIES = ("dense_ppl", "ppl", "ppl_low", "ppl_high")  # of a prediction
TOLERANCE = 2e-3  # relative: losses are written to four digits, and machines differ in the last


@dataclass(frozen=True)
class Reviewed:
    """One move with its numbers made again.

    Attributes:
        number: its place in the plan, from 0.
        line: its line in the file, from 1; None for a plan in memory.
        stated: the move as the plan has it.
        found: the same move with what is true now.
    """

    number: int
    line: int | None
    stated: AnyMove
    found: AnyMove

    @property
    def differs(self) -> bool:
        """Whether the plan says another loss, saving or gain than is true."""
        one, other = self.stated, self.found
        if one.saves != other.saves or not _near(one.loss, other.loss):
            return True
        if not isinstance(one, ShareInput | ShareOutput) or one.gain is None:
            return False
        assert isinstance(other, ShareInput | ShareOutput)  # noqa: S101 - the same move
        # A gain is what is left of two losses, and no more exact than they are.
        return not _near(one.gain, other.gain, TOLERANCE * (other.loss or 0.0))


@dataclass(frozen=True)
class Review:
    """A plan's numbers, as written and as they are.

    Attributes:
        file: the plan as it is.
        plan: the same moves with the numbers that are true now.
        moves: each move.
        probed: the perplexity was measured in memory for this review.
        missed: by how much the moves miss the plan's budget, in words; None where they meet it.
    """

    file: PlanFile
    plan: Plan
    moves: tuple[Reviewed, ...]
    probed: bool
    missed: str | None = None

    @property
    def differs(self) -> bool:
        """Whether any number of the plan is not what it says."""
        return bool(self._different_rows()) or any(one.differs for one in self.moves)

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress plan check --json` prints."""
        return {
            "plan": self.file.name,
            "differs": self.differs,
            "probed": self.probed,
            "missed_budget": self.missed,
            "stated": self.file.plan.prediction.model_dump(mode="json"),
            "found": self.plan.prediction.model_dump(mode="json"),
            "moves": [
                {
                    "number": one.number,
                    "line": one.line,
                    "differs": one.differs,
                    "stated": {name: getattr(one.stated, name, None) for name in NUMBERS},
                    "found": {name: getattr(one.found, name, None) for name in NUMBERS},
                }
                for one in self.moves
            ],
        }

    def tables(self) -> Iterator["Table"]:
        """Yield the plan's numbers as written and as found, then the moves that differ."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        plan = self.file.plan
        style: dict[str, Any] = {
            "title_justify": "left",
            "box": box.SIMPLE_HEAD,
            "show_edge": False,
            "pad_edge": False,
        }
        table = Table(title=f"{escape(self.file.name)}: {plan.budget}", **style)
        for name in ("", "the plan says", "found", ""):
            table.add_column(name)
        different = self._different_rows()
        stated, found = (dict(prediction_rows(p.prediction)) for p in (plan, self.plan))
        for label in dict.fromkeys([*stated, *found]):
            mark = "differs" if label in different else ""
            table.add_row(label, stated.get(label, "-"), found.get(label, "-"), mark)
        yield table
        wrong = [one for one in self.moves if one.differs]
        if not wrong:
            return
        table = Table(title="\nMoves whose numbers differ", **style)
        table.add_column("line", justify="right")
        for name in NUMBERS:
            table.add_column(name, justify="right")
            table.add_column("found", justify="right")
        table.add_column("move")
        for one in wrong:
            cells = [_cell(getattr(move, name, None)) for name in NUMBERS
                     for move in (one.stated, one.found)]  # fmt: skip
            words = f"moves[{one.number}] {_words(one.stated)}"
            table.add_row(str(one.line or "-"), *cells, words)
        yield table

    def sentences(self) -> Iterator[str]:
        """Yield the outcome in words."""
        count = sum(one.differs for one in self.moves)
        if self.differs:
            yield (
                f"The plan's numbers are not those of its moves ({count} of {len(self.moves)} "
                "moves differ)."
            )
        else:
            yield f"The plan's numbers hold ({len(self.moves)} moves)."
        if not self.probed and self.plan.calibration is not None:
            yield "Its perplexity was not measured."
        if self.missed:
            yield f"Note: {self.missed}."

    def _different_rows(self) -> set[str]:
        """Return the names of the predictions that differ."""
        stated, found = self.file.plan.prediction, self.plan.prediction
        pairs = {
            "kept": (stated.params_kept, found.params_kept),
            "nats (2nd order)": (stated.loss, found.loss),
            "energy lost": (stated.energy_lost, found.energy_lost),
            "dense perplexity": (stated.dense_ppl, found.dense_ppl),
            "perplexity": (stated.ppl, found.ppl),
        }
        exact = {
            "parameters": stated.params != found.params,
            "bytes": stated.bytes != found.bytes,
        }
        return {name for name, pair in pairs.items() if not _near(*pair)} | {
            name for name, differs in exact.items() if differs
        }


def check_plan(
    plan: Plan | str | Path,
    model: Any = None,
    *,
    probe: bool = True,
    allow_other_model: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> Review:
    """Make the numbers of a plan again for the moves that it has, as after editing them by hand.

    Args:
        plan: a plan, or the path of one.
        model: where the model is now; None: where the plan found it.
        probe: also measure the perplexity in memory, on the held-out windows; else it stays what
            the plan says where nothing differs, and is extrapolated where something does.
        allow_other_model: review the moves on a model with another hash: its moments are
            collected, and the reviewed plan is for it.
        device: where to compute.
        dtype: number type to compute in.
        revision: of a hub model.
        cache_dir: where the moments are looked for; made again where they are not there.
        trust_remote_code: run code that the model's folder brings.

    Raises:
        PlanError: an invalid plan or move, named by its line; another model; or text that is no
            longer what the plan was made with.
    """
    file = PlanFile.open(plan)
    cache = cache_folder(cache_dir)
    damping_of(file.plan)  # what does not fit is found before the model is opened
    opened = open_planned(
        file.plan,
        model,
        allow_other_model=allow_other_model,
        device=device,
        dtype=dtype,
        revision=revision,
        cache=cache,
        trust_remote_code=trust_remote_code,
    )
    shape = model_shape(opened.view, stored_dtype(opened.loaded))
    file.check_sizes(shape)
    if file.plan.calibration is None:
        return _by_energy(file, opened, shape)
    return _by_moments(file, opened, shape, cache, probe)


def _by_moments(
    file: PlanFile, opened: Opened, shape: ModelShape, cache: Path, probe: bool
) -> Review:
    """Review a plan by what its calibration says and, if wanted, by a probe."""
    plan, view = file.plan, opened.view
    assert plan.calibration is not None  # noqa: S101 - called for such plans
    moments, heldout, record = _recalled(opened, plan.calibration, cache, probe)
    damping, multiple = damping_of(plan), plan.options.get("multiple")
    steps = multiple if isinstance(multiple, int) and multiple > 0 else 1
    moves = tuple(
        Reviewed(n, file.line(n), move, reprice(view, moments, move, damping, steps))
        for n, move in enumerate(track(plan.moves, "Pricing (moves)"))
    )
    loss = sum(one.found.loss or 0.0 for one in moves)
    found = _prediction(plan, moves, loss, shape)
    if opened.other:  # of which the plan knows no perplexity
        found = found.model_copy(update=dict.fromkeys(PERPLEXITIES) | {"measured": False})
    probed = heldout is not None and len(heldout) > 0
    if heldout is not None and probed:  # without what other runs measured: it is checked here
        prober = Prober(view, moments, damping, heldout)
        measured = prober.measure(plan.strategy, plan.moves)
        rises = perplexities(prober.dense_nll, measured.band)
        found = found.model_copy(update={**rises, "measured": True})
    missed = _missed(plan, found)
    if plan.budget.speedup is not None:
        missed = _slow(plan, plan.budget.speedup, view, shape, cache)
    reviewed = _repaired(file, _identity(plan, opened, shape), record, moves, found)
    return Review(file, reviewed, moves, probed, missed)


def _by_energy(file: PlanFile, opened: Opened, shape: ModelShape) -> Review:
    """Review a plan that was made from weights alone.

    Raises:
        PlanError: a kind of move whose cost is not seen in weights; names its line.
    """
    moves, lost, dense = [], 0.0, shape.decoder_params()
    for number, move in enumerate(file.plan.moves):
        if not isinstance(move, LowRank | ShareInput | ShareOutput):
            file.refuse(number, "its cost is not seen in weights, of which the plan was made")
        lost += energy_lost(opened.view, move)
        saves = dense - plan_params((move,), shape)[0]
        found = move.model_copy(update={"loss": None, "saves": saves})
        moves.append(Reviewed(number, file.line(number), move, found))
    priced = tuple(moves)
    prediction = _prediction(file.plan, priced, lost, shape)
    identity = _identity(file.plan, opened, shape)
    reviewed = _repaired(file, identity, None, priced, prediction)
    return Review(file, reviewed, priced, False, _missed(file.plan, prediction))


def _identity(plan: Plan, opened: Opened, shape: ModelShape) -> PlannedModel:
    """Return the model under the name that the plan knows it by, unless it is another."""
    found = planned_model(opened.loaded, opened.view, shape)
    if opened.other:
        return found
    return found.model_copy(update={"name": plan.model.name, "revision": plan.model.revision})


def _recalled(
    opened: Opened, record: Calibration, cache: Path, probe: bool
) -> tuple[Moments, Windows | None, Calibration]:
    """Return a plan's moments, the windows to probe on if that is wanted, and their record."""
    loaded, view = opened.loaded, opened.view
    if opened.other:  # another model has moments of its own
        again = calibrate(loaded, view, options_of_record(record), cache)
        return again.moments, again.heldout if probe else None, again.record
    moments = recall(loaded, view, record, cache)
    return moments, recall_heldout(loaded, record, cache) if probe else None, record


def _prediction(
    plan: Plan, moves: Sequence[Reviewed], loss: float, shape: ModelShape
) -> Prediction:
    """Return what a plan's moves are expected to give, as far as that is known without a probe.

    The stated perplexity stays where neither size nor loss differs; else it is extrapolated from
    the stated one of the dense model.
    """
    stated = plan.prediction
    decoder, total = plan_params(plan.moves, shape)
    found = stated.model_copy(
        update={
            "params_kept": decoder / shape.decoder_params(),
            "params": total,
            "bytes": total * shape.bytes_per_param,
            "energy_lost" if plan.calibration is None else "loss": loss,
        }
    )
    same = stated.params == total and not any(one.differs for one in moves)
    if stated.dense_ppl is None or (same and _near(stated.loss, found.loss)):
        return found
    band = extrapolated(losses_by_kind([one.found for one in moves]), known=())
    rises = perplexities(math.log(stated.dense_ppl), band)
    return found.model_copy(update={**rises, "measured": False})


def _repaired(
    file: PlanFile,
    model: PlannedModel,
    calibration: Calibration | None,
    moves: tuple[Reviewed, ...],
    prediction: Prediction,
) -> Plan:
    """Return the plan with the numbers that were found."""
    update: dict[str, Any] = {
        "model": model,
        "calibration": calibration,
        "prediction": prediction,
        "moves": tuple(one.found for one in moves),
    }
    if any(one.differs for one in moves):
        spaces = str(file.plan.options.get("spaces"))
        update["findings"] = sharing_findings(update["moves"], None, spaces)
        if REMADE not in file.plan.notes:
            update["notes"] = (*file.plan.notes, REMADE)
    return file.plan.model_copy(update=update)


def _missed(plan: Plan, found: Prediction) -> str | None:
    """Return by how much a prediction misses a plan's budget of size or loss, or None."""
    budget = plan.budget
    if budget.keep is not None and found.params_kept > budget.keep:
        return f"{found.params_kept:.4f} is kept, over the budget of {budget.keep:g}"
    if budget.max_size is not None and found.bytes > budget.max_size:
        return f"the weights take {found.bytes} bytes, over the budget of {budget.max_size}"
    if budget.max_loss is not None and found.ppl is not None and found.dense_ppl is not None:
        rise = math.log(found.ppl / found.dense_ppl)
        if rise > budget.max_loss:
            return f"{rise:.4f} nats are lost, over the budget of {budget.max_loss:g}"
    return None


def _slow(plan: Plan, wanted: float, view: ModelView, shape: ModelShape, cache: Path) -> str | None:
    """Return by how much the moves miss a budget of speed on this device, or None."""
    found = speedup(plan.moves, shape, latency_table(view, cache))
    if found >= wanted:
        return None
    return f"prefill is predicted {found:.3f} times as fast, short of the budget of {wanted:g}"


def _near(one: float | None, other: float | None, within: float = 1e-12) -> bool:
    """Return whether two numbers are the same but for rounding, or for `within`."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=within)


def _cell(number: int | float | None) -> str:
    return "-" if number is None else f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def _words(move: AnyMove) -> str:
    """Return what a move does, as its line in the file has it."""
    found = []
    for name, value in move.model_dump(mode="json", exclude={"do", *NUMBERS}).items():
        words = ", ".join(map(str, value)) if isinstance(value, list) else value
        found.append(f"{name} {words}")
    return f"{move.do}: {'; '.join(found)}"
