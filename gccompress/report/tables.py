"""Tables of what was measured, for the terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from gccompress.roles import Role, Space

if TYPE_CHECKING:
    from gccompress.continuity import ContinuityReport, RoleContinuity

_WORDS = {Space.INPUT: "shares input", Space.OUTPUT: "shares output", Space.NONE: "none"}


def continuity_table(report: "ContinuityReport") -> Table:
    """Return the means per role, each beside its random level, and the verdict; 80 columns wide."""
    layers = f"{report.num_layers} layers, mean over {report.num_pairs} adjacent pairs"
    if report.num_pairs < 1:
        layers = "one layer, no adjacent pairs to compare"
    notes = ["gram: alignment of the whole spectrum as a multiple of random."]
    notes += _gram_error([report])
    if report.has_folded:
        notes.append("folded: norm scales folded in; = where no norm stands beside the weight.")
    notes += _degenerate([report])
    table = _role_table(f"Continuity of {escape(report.model)}: {layers}", notes)
    columns = ["\nv1", "random\nv1", "\nu1", "random\nu1", "gram\nin", "gram\nout"]
    columns += ["folded\nv1", "folded\nu1"] if report.has_folded else []
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nverdict")
    for role, row in report.roles.items():
        table.add_row(role.value, *_numbers(row, report.has_folded), _verdict(row))
    return table


def _role_table(title: str, notes: Sequence[str]) -> Table:
    """Return an empty table whose rows begin with a role, with the verdict's rule below."""
    from gccompress.continuity import RULE

    table = Table(
        title=title,
        caption=" ".join([*notes, RULE]),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("\nrole", no_wrap=True)
    return table


def comparison_table(reports: Sequence["ContinuityReport"]) -> Table:
    """Return the means of every role, model by model."""
    notes = ["gram: alignment of the whole spectrum as a multiple of random."]
    notes += [*_gram_error(reports), *_degenerate(reports)]
    title = f"Continuity of {len(reports)} models: means over adjacent pairs of layers"
    table = _role_table(title, notes)
    table.add_column("\nmodel", overflow="fold")
    for name in ("\nv1", "random\nv1", "\nu1", "random\nu1", "gram\nin", "gram\nout"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nverdict")
    for role in Role:
        having = [report for report in reports if role in report.roles]
        for index, report in enumerate(having):
            row = report.roles[role]
            label = role.value if index == 0 else ""
            last = index == len(having) - 1
            cells = (escape(report.model), *_numbers(row, False), _verdict(row))
            table.add_row(label, *cells, end_section=last)
    return table


def _degenerate(reports: Sequence["ContinuityReport"]) -> list[str]:
    """Say which pairs have no leading direction to compare."""
    found = []
    for report in reports:
        name = f"{escape(report.model)}: " if len(reports) > 1 else ""
        for role, row in report.roles.items():
            variants = [("", row)] if row.folded is None else [("", row), (" folded", row.folded)]
            for kind, measures in variants:
                count = sum(measures.degenerate)
                if count:
                    found.append(f"{name}{role.value}{kind} {count} of {report.num_pairs} pairs")
    if not found:
        return []
    return [
        f"Degenerate, left out of v1 and u1 (*): {', '.join(found)}; their leading singular "
        "values are too close to have a direction each."
    ]


def _gram_error(reports: Sequence["ContinuityReport"]) -> list[str]:
    """Say how far estimated Gram alignments may be off."""
    rows = [row for report in reports for row in report.roles.values()]
    errors = [row.gram_in_mean_error for row in rows] + [row.gram_out_mean_error for row in rows]
    largest = max((error for error in errors if error is not None), default=0.0)
    return [f"Estimated, standard error up to {largest:.2g}."] if largest > 0.0 else []


def _numbers(row: "RoleContinuity", folded: bool) -> list[str]:
    """Return the cells of a role's numbers, in the order of the columns."""
    cosines = (row.v1_mean, row.random_v1, row.u1_mean, row.random_u1)
    cells = [_cell(value, 3) for value in cosines]
    if any(row.degenerate):
        cells[0], cells[2] = f"{cells[0]}*", f"{cells[2]}*"
    cells += [_cell(row.gram_in_mean, 2), _cell(row.gram_out_mean, 2)]
    if folded and row.folded is None:
        cells += ["=", "="]
    elif folded and row.folded is not None:
        cells += [_cell(row.folded.v1_mean, 3), _cell(row.folded.u1_mean, 3)]
    return cells


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _verdict(row: "RoleContinuity") -> str:
    """Return the raw verdict, and the folded one where it is another."""
    folded = row.measures(folded=True).verdict
    note = "" if folded is row.verdict else f" (folded: {_WORDS[folded]})"
    return _WORDS[row.verdict] + note
