"""A plan reviewed: what its file says of sizes and losses against what is true of its moves now."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from gccompress import linalg
from gccompress.apply import damping_of
from gccompress.calibration import calibrate, options_of_record, recall, recall_heldout
from gccompress.density import squared_values
from gccompress.files import cache_folder
from gccompress.linalg import Damping
from gccompress.models import stored_dtype
from gccompress.moments import Moments, weighted
from gccompress.moves import move_space
from gccompress.plan import (
    AnyMove,
    Calibration,
    DropLayers,
    LowRank,
    Plan,
    PlannedModel,
    Prediction,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_matrices,
    plan_params,
)
from gccompress.plan_file import PlanFile, decoder_shape
from gccompress.planned import Opened, open_planned
from gccompress.planner.choice import perplexities, planned_model
from gccompress.planner.probe import Prober
from gccompress.progress import track
from gccompress.report.plan_overview import prediction_rows
from gccompress.roles import Role
from gccompress.sizes import ModelShape
from gccompress.text import Windows
from gccompress.view import ModelView, model_shape
from gccompress.width import order_neurons

if TYPE_CHECKING:
    from rich.table import Table

REMADE = "its numbers were made again by plan check, as its moves had others"
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
        """Whether the plan says another loss or saving than is true."""
        return self.stated.saves != self.found.saves or not _near(self.stated.loss, self.found.loss)


@dataclass(frozen=True)
class Review:
    """A plan's numbers, as written and as they are.

    Attributes:
        file: the plan as it is.
        plan: the same moves with the numbers that are true now.
        moves: each move.
        probed: the perplexity was measured in memory for this review.
    """

    file: PlanFile
    plan: Plan
    moves: tuple[Reviewed, ...]
    probed: bool

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
            "over_budget": self._over_budget(),
            "stated": self.file.plan.prediction.model_dump(mode="json"),
            "found": self.plan.prediction.model_dump(mode="json"),
            "moves": [
                {
                    "number": one.number,
                    "line": one.line,
                    "differs": one.differs,
                    "stated": {"loss": one.stated.loss, "saves": one.stated.saves},
                    "found": {"loss": one.found.loss, "saves": one.found.saves},
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
        for name in ("line", "saves", "found", "nats", "found"):
            table.add_column(name, justify="right")
        table.add_column("move")
        for one in wrong:
            numbers = [f"{one.stated.saves:,}", f"{one.found.saves:,}"]
            numbers += [_nats(one.stated.loss), _nats(one.found.loss)]
            line = str(one.line or "-")
            table.add_row(line, *numbers, f"moves[{one.number}] {_words(one.stated)}")
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
        over = self._over_budget()
        if over:
            yield f"Note: {over}."

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

    def _over_budget(self) -> str | None:
        """Return by how much the moves miss the plan's budget, in words, or None."""
        budget, found = self.plan.budget, self.plan.prediction
        if budget.keep is not None and found.params_kept > budget.keep:
            return f"{found.params_kept:.4f} is kept, over the budget of {budget.keep:g}"
        if budget.max_size is not None and found.bytes > budget.max_size:
            return f"the weights take {found.bytes} bytes, over the budget of {budget.max_size}"
        return None


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
    recorded = decoder_shape(file.plan)
    if recorded is not None:  # so that most mistakes are found before the model is opened
        file.check_sizes(recorded)
    cache = cache_folder(cache_dir)
    damping = damping_of(file.plan)
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
    view = opened.view
    shape = model_shape(view, stored_dtype(opened.loaded))
    file.check_sizes(shape)
    moves = file.plan.moves
    identity = planned_model(opened.loaded, view, shape)
    if not opened.other:  # under the name and revision that the plan knows it by
        identity = file.plan.model.model_copy(update={"matrices": identity.matrices})
    if file.plan.calibration is None:
        losses = [_energy(view, file, number) for number in range(len(moves))]
        priced = _priced(file, shape, losses)
        found = _prediction(file.plan, priced, sum(losses), shape)
        return _review(file, identity, None, priced, found)
    moments, heldout, record = _recalled(opened, file.plan.calibration, cache, probe)
    losses = [
        predicted_loss(view, moments, move, damping) for move in track(moves, "Pricing moves")
    ]
    priced = _priced(file, shape, losses)
    found = _prediction(file.plan, priced, sum(losses), shape)
    probed = heldout is not None and len(heldout) > 0
    if heldout is not None and probed:
        prober = Prober(view, moments, damping, heldout)
        measured = prober.measure(file.plan.strategy, moves)
        rises = perplexities(prober.dense_nll, sum(losses), measured)
        found = found.model_copy(update={**rises, "measured": True})
    return _review(file, identity, record, priced, found, probed=probed)


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


def _priced(file: PlanFile, shape: ModelShape, losses: Sequence[float]) -> tuple[Reviewed, ...]:
    """Return every move beside itself with its loss and savings made again."""
    dense = shape.decoder_params()
    weights_only = file.plan.calibration is None  # whose moves say no loss in nats
    priced = []
    for number, (move, loss) in enumerate(zip(file.plan.moves, losses, strict=True)):
        saves = dense - plan_params((move,), shape)[0]
        found = move.model_copy(update={"loss": None if weights_only else loss, "saves": saves})
        line = file.lines[number] if file.lines else None
        priced.append(Reviewed(number, line, move, found))
    return tuple(priced)


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
    rises = perplexities(math.log(stated.dense_ppl), loss, None)
    return found.model_copy(update={**rises, "measured": False})


def _review(
    file: PlanFile,
    model: PlannedModel,
    calibration: Calibration | None,
    moves: tuple[Reviewed, ...],
    prediction: Prediction,
    *,
    probed: bool = False,
) -> Review:
    update: dict[str, Any] = {
        "model": model,
        "calibration": calibration,
        "prediction": prediction,
        "moves": tuple(one.found for one in moves),
    }
    notes = file.plan.notes
    if REMADE not in notes and any(one.differs for one in moves):
        update["notes"] = (*notes, REMADE)
    return Review(file, file.plan.model_copy(update=update), moves, probed)


def predicted_loss(view: ModelView, moments: Moments, move: AnyMove, damping: Damping) -> float:
    """Return the second-order loss of a move in nats per token, as a survey prices it.

    Raises:
        NumericalError: a moment that cannot be factored, naming layer and role.
    """
    match move:
        case DropLayers():
            return sum(moments.influence[layer].drop_loss for layer in move.layers)
        case ResizeMlp():
            down = weighted(view, moments, Role.DOWN, move.layer, damping)
            order = order_neurons(down, f"layer {move.layer} {Role.DOWN}")
            return float(order.losses[down.weight.shape[1] - move.width])
        case LowRank() | ShareInput() | ShareOutput():
            matrices, space = move_matrices(move), move_space(view, move)
            sides = [
                linalg.side(weighted(view, moments, role, layer, damping), space)
                for role, layer in matrices
            ]
            spectrum = linalg.spectrum(sides, f"layer {matrices[0][1]} {matrices[0][0]}")
            return float(spectrum[move.rank :].sum())
        case _:
            assert_never(move)


def _energy(view: ModelView, file: PlanFile, number: int) -> float:
    """Return the weight energy a move loses, as a share of all projections'.

    Raises:
        PlanError: a kind of move whose cost is not seen in weights.
    """
    move = file.plan.moves[number]
    if not isinstance(move, LowRank | ShareInput | ShareOutput):
        file.refuse(number, "its cost is not seen in weights alone, of which the plan was made")
    weights = [view.weight(role, layer) for role, layer in move_matrices(move)]
    values = squared_values(weights, move_space(view, move))
    return float(values[move.rank :].sum()) / (view.num_layers * len(view.roles))


def _near(one: float | None, other: float | None) -> bool:
    """Return whether two numbers are the same but for rounding."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-12)


def _nats(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"


def _words(move: AnyMove) -> str:
    """Return what a move does, as its line in the file has it."""
    found = []
    for name, value in move.model_dump(mode="json", exclude={"do", "loss", "saves"}).items():
        words = ", ".join(map(str, value)) if isinstance(value, list) else value
        found.append(f"{name} {words}")
    return f"{move.do}: {'; '.join(found)}"
