"""Tables of what was measured, for the terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from gccompress.roles import Space

if TYPE_CHECKING:
    from gccompress.continuity import ContinuityReport, RoleContinuity

_WORDS = {Space.INPUT: "shares input", Space.OUTPUT: "shares output", Space.NONE: "none"}


def continuity_table(report: "ContinuityReport") -> Table:
    """Return the means per role, each beside its random level, and the verdict; 80 columns wide."""
    from gccompress.continuity import RULE

    layers = f"{report.num_layers} layers, mean over {report.num_pairs} adjacent pairs"
    if report.num_pairs < 1:
        layers = "one layer, no adjacent pairs to compare"
    notes = ["gram: alignment of the whole spectrum as a multiple of random."]
    if report.has_folded:
        notes.append("folded: norm scales folded in; = where no norm stands beside the weight.")
    table = Table(
        title=f"Continuity of {escape(report.model)}: {layers}",
        caption=" ".join([*notes, RULE]),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("\nrole", no_wrap=True)
    columns = ["\nv1", "random\nv1", "\nu1", "random\nu1", "gram\nin", "gram\nout"]
    columns += ["folded\nv1", "folded\nu1"] if report.has_folded else []
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nverdict")
    for role, row in report.roles.items():
        table.add_row(role.value, *_numbers(row, report.has_folded), _verdict(row))
    return table


def _numbers(row: "RoleContinuity", folded: bool) -> list[str]:
    """Return the cells of a role's numbers, in the order of the columns."""
    cosines = (row.v1_mean, row.random_v1, row.u1_mean, row.random_u1)
    cells = [_cell(value, 3) for value in cosines]
    cells += [_cell(row.gram_in_mean, 2), _cell(row.gram_out_mean, 2)]
    if folded and row.folded is None:
        cells += ["=", "="]
    elif row.folded is not None:
        cells += [_cell(row.folded.v1_mean, 3), _cell(row.folded.u1_mean, 3)]
    return cells


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _verdict(row: "RoleContinuity") -> str:
    """Return the raw verdict, and the folded one where it is another."""
    folded = row.measures(folded=True).verdict
    note = "" if folded is row.verdict else f" (folded: {_WORDS[folded]})"
    return _WORDS[row.verdict] + note
