"""A plan laid out by layer and projection, and two plans beside each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from gccompress.errors import PlanError
from gccompress.files import new_file
from gccompress.plan import Plan, Prediction
from gccompress.plan_file import Cell, PlanFile, cells, planned_roles
from gccompress.roles import Role

LEGEND = (
    ". dense; rank r: factored alone; in r, out r: on a basis of r input or output directions that "
    "all cells with the same letter share; width w: neurons left."
)


@dataclass(frozen=True)
class PlanOverview:
    """A plan's moves by matrix.

    Attributes:
        file: the plan.
        cells: what becomes of every matrix.
    """

    file: PlanFile
    cells: dict[tuple[Role, int], Cell]

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress plan show --json` prints."""
        plan, letters = self.file.plan, _letters(self.cells)
        return {
            "plan": self.file.name,
            "model": plan.model.name,
            "layers": plan.model.layers,
            "strategy": plan.strategy,
            "budget": str(plan.budget),
            "prediction": plan.prediction.model_dump(mode="json"),
            "findings": list(plan.findings),
            "notes": list(plan.notes),
            "matrices": [
                {
                    "layer": layer,
                    "role": role.value,
                    "do": cell.do,
                    "size": cell.size,
                    "move": cell.move,
                    "group": letters.get(cell.move) if cell.group else None,
                    "share": cell.share,
                }
                for (role, layer), cell in sorted(
                    self.cells.items(), key=lambda one: (one[0][1], list(Role).index(one[0][0]))
                )
            ],
        }

    def table(self) -> Table:
        """Return one row a layer, one column a projection."""
        plan, letters = self.file.plan, _letters(self.cells)
        table = Table(
            title=f"{escape(plan.model.name)}: {plan.budget}, strategy {plan.strategy}\n"
            + ", ".join(f"{label} {value}" for label, value in prediction_rows(plan.prediction)),
            caption=LEGEND,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        table.add_column("layer", justify="right")
        roles = planned_roles(plan)
        for role in roles:
            table.add_column(role.value, no_wrap=True)
        for layer in range(plan.model.layers):
            row = [self.cells[role, layer] for role in roles]
            table.add_row(str(layer), *(_short(cell, letters) for cell in row))
        return table

    def sentences(self) -> Iterator[str]:
        """Yield what the planner found of sharing, and what it noted."""
        for line in self.file.plan.findings:
            yield f"{line}."
        for line in self.file.plan.notes:
            yield f"Note: {line}."

    def save_figure(self, path: str | Path) -> None:
        """Draw depth by projection, coloured by the share kept, into an image file.

        Raises:
            PlanError: a plan that does not say how large its model's matrices are, or a name
                that does not end like that of an image, such as `.png`.
        """
        from gccompress.report.plan_figure import plan_figure

        path = Path(path)
        figure = plan_figure(self.file.plan)
        kinds = figure.canvas.get_supported_filetypes()
        kind = path.suffix.removeprefix(".").lower()
        if kind not in kinds:
            raise PlanError(f"figure {path}: wanted a name ending in one of .{', .'.join(kinds)}")
        with new_file(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150)


def show_plan(plan: Plan | str | Path) -> PlanOverview:
    """Lay out a plan, or the file of one, by layer and projection.

    Raises:
        PlanError: no plan, or an invalid move; names its line.
    """
    file = PlanFile.open(plan)
    return PlanOverview(file, cells(file.plan))


@dataclass(frozen=True)
class Change:
    """One matrix that two plans treat differently."""

    role: Role
    layer: int
    before: Cell
    after: Cell


@dataclass(frozen=True)
class PlanDiff:
    """What is different between two plans, from `before` to `after`.

    Attributes:
        before: the first plan.
        after: the second.
        changes: matrices whose move, size or group differs, by layer.
    """

    before: PlanFile
    after: PlanFile
    changes: tuple[Change, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress plan diff --json` prints."""
        files = (self.before, self.after)
        return {
            "plans": [file.name for file in files],
            "same_model": self.before.plan.model.hash == self.after.plan.model.hash,
            "same_moves": not self.changes,
            "predictions": [file.plan.prediction.model_dump(mode="json") for file in files],
            "facts": [
                {"what": what, "before": one, "after": other} for what, one, other in self._facts()
            ],
            "matrices": [
                {
                    "layer": one.layer,
                    "role": one.role.value,
                    "before": self._cell(self.before, one.before),
                    "after": self._cell(self.after, one.after),
                }
                for one in self.changes
            ],
        }

    def tables(self) -> Iterator[Table]:
        """Yield the facts side by side, then the matrices that differ."""
        names = [escape(file.name) for file in (self.before, self.after)]
        facts = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name in ("", *names):
            facts.add_column(name, overflow="fold")
        for what, one, other in self._facts():
            mark = "" if one == other else "[bold]"
            facts.add_row(f"{mark}{what}", escape(one), f"{mark}{escape(other)}")
        yield facts
        if not self.changes:
            return
        table = Table(
            title="\nMatrices that differ; nats are those of the move, with its whole group",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        table.add_column("layer", justify="right")
        for name in ("projections", *names, "nats", "nats"):
            table.add_column(name, justify="right" if name == "nats" else "left")
        for layer, roles, old, new in self._rows():
            row = [", ".join(role.value for role in roles)]
            row += [f"{cell.text}{_layers(cell)}" for cell in (old, new)]
            row += [_nats(self._loss(self.before, old)), _nats(self._loss(self.after, new))]
            table.add_row(str(layer), *row)
        yield table

    def _rows(self) -> Iterator[tuple[int, list[Role], Cell, Cell]]:
        """Yield the changes, those of one layer by the same two moves together."""
        rows: dict[tuple[int, int | None, int | None], list[Change]] = {}
        for one in self.changes:
            rows.setdefault((one.layer, one.before.move, one.after.move), []).append(one)
        for (layer, *_), group in rows.items():
            yield layer, [one.role for one in group], group[0].before, group[0].after

    def _facts(self) -> Iterator[tuple[str, str, str]]:
        """Yield what else can differ, in words: the model, how it was planned, what it gives."""
        one, other = self.before.plan, self.after.plan
        yield "model", _model(one), _model(other)
        yield "strategy", one.strategy, other.strategy
        yield "budget", str(one.budget), str(other.budget)
        yield "calibration", _calibration(one), _calibration(other)
        for name in sorted(one.options.keys() | other.options.keys()):
            values = one.options.get(name), other.options.get(name)
            if values[0] != values[1]:
                yield f"option {name}", str(values[0]), str(values[1])
        yield "moves", str(len(one.moves)), str(len(other.moves))
        rows = [dict(prediction_rows(p.prediction)) for p in (one, other)]
        for label in dict.fromkeys([*rows[0], *rows[1]]):
            yield label, rows[0].get(label, "-"), rows[1].get(label, "-")

    def _cell(self, file: PlanFile, cell: Cell) -> dict[str, Any]:
        return {
            "do": cell.do,
            "size": cell.size,
            "layers": sorted({layer for _, layer in cell.group}) or None,
            "loss": self._loss(file, cell),
        }

    @staticmethod
    def _loss(file: PlanFile, cell: Cell) -> float | None:
        return 0.0 if cell.move is None else file.plan.moves[cell.move].loss


def diff_plans(before: Plan | str | Path, after: Plan | str | Path) -> PlanDiff:
    """Compare two plans, or files of them, matrix by matrix.

    Losses and savings recorded with a move do not make it another.

    Raises:
        PlanError: one of them is no plan, or contradicts itself; names the line.
    """
    files = PlanFile.open(before), PlanFile.open(after)
    old, new = (cells(file.plan) for file in files)
    absent = Cell("absent", "absent", share=None)  # in a model without this layer or projection
    changes = [
        Change(role, layer, old.get((role, layer), absent), new.get((role, layer), absent))
        for layer in range(max(file.plan.model.layers for file in files))
        for role in Role
        if (role, layer) in old or (role, layer) in new
    ]
    return PlanDiff(*files, tuple(one for one in changes if _what(one.before) != _what(one.after)))


def prediction_rows(found: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a prediction with their names, those that it has."""
    yield "kept", f"{found.params_kept:.4f}"
    yield "parameters", f"{found.params:,}"
    yield "bytes", f"{found.bytes:,}"
    if found.loss is not None:
        yield "nats (2nd order)", f"{found.loss:.4g}"
    if found.energy_lost is not None:
        yield "energy lost", f"{100 * found.energy_lost:.3g}%"
    if found.dense_ppl is not None:
        yield "dense perplexity", f"{found.dense_ppl:.4g}"
    if found.ppl is not None:
        how = "measured" if found.measured else "extrapolated"
        bounds = [one for one in (found.ppl_low, found.ppl_high) if one is not None]
        band = " to ".join(f"{one:.4g}" for one in bounds)
        yield "perplexity", f"{found.ppl:.4g} ({band}, {how})"


def _model(plan: Plan) -> str:
    return f"{plan.model.name} ({plan.model.hash[:19]})"


def _calibration(plan: Plan) -> str:
    text = plan.calibration
    return "none" if text is None else f"{text.source}, {text.tokens} tokens ({text.hash[:19]})"


def _what(cell: Cell) -> tuple[str, int | None, tuple[tuple[Role, int], ...]]:
    return cell.do, cell.size, tuple(sorted(cell.group))


def _letters(found: dict[tuple[Role, int], Cell]) -> dict[int | None, str]:
    """Return a letter for each move whose basis is shared: a to z, then aa, ab, ..."""
    shared = sorted({c.move for c in found.values() if c.group and c.move is not None})
    return {move: _letter(index) for index, move in enumerate(shared)}


def _letter(index: int) -> str:
    rest, last = divmod(index, 26)
    return (_letter(rest - 1) if rest else "") + chr(ord("a") + last)


def _short(cell: Cell, letters: dict[int | None, str]) -> str:
    if cell.do == "dense":
        return "."
    return f"{cell.text} {letters[cell.move]}" if cell.group else cell.text


def _layers(cell: Cell) -> str:
    """Return what a shared basis serves, in words."""
    if not cell.group:
        return ""
    layers = sorted({layer for _, layer in cell.group})
    roles = "+".join(role.value for role in Role if role in {one for one, _ in cell.group})
    run = layers == list(range(layers[0], layers[-1] + 1))
    span = f"{layers[0]} to {layers[-1]}" if run else ", ".join(map(str, layers))
    return f", {roles} of {span}" if len(layers) > 1 else f", {roles}"


def _nats(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4g}"
