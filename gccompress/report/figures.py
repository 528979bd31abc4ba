"""Figures of a continuity report: roles against depth, as a heat map and as lines."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from gccompress.roles import Role, Space

if TYPE_CHECKING:
    from gccompress.continuity import ContinuityReport, RoleContinuity

# Okabe and Ito's palette, told apart by any colour vision; markers repeat the difference.
_STYLES: dict[Role, tuple[str, str]] = {
    Role.Q: ("#0072B2", "o"),
    Role.K: ("#56B4E9", "s"),
    Role.V: ("#000000", "x"),
    Role.O: ("#D55E00", "D"),
    Role.GATE: ("#009E73", "^"),
    Role.UP: ("#E69F00", "v"),
    Role.DOWN: ("#CC79A7", "P"),
}
_MARKERS = "osD^vPX"
_TITLES = {
    Space.INPUT: "input space: |cos| of leading right singular vectors v1",
    Space.OUTPUT: "output space: |cos| of leading left singular vectors u1",
}
_ANNOTATED_PAIRS = 12  # more numbers than this do not fit into the cells


def continuity_figure(report: "ContinuityReport", space: Space) -> Figure:
    """Draw one space: a heat map of roles x pairs over lines with the random level.

    With folded measures there is a second column for them. `space` is INPUT or OUTPUT; the
    report must have at least one pair.
    """
    columns = [False, True] if report.has_folded else [False]
    figure = Figure(figsize=(1.6 + 6.2 * len(columns), 7.4), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row")
    names = {False: "raw weights", True: "norm scales folded in"}
    for column, folded in enumerate(columns):
        image = _heat_map(axes[0][column], report, space, folded)
        _lines(axes[1][column], report, space, folded)
        if len(columns) > 1:
            axes[0][column].set_title(names[folded], fontsize=10)
    axes[1][0].set_ylabel("|cos|")
    figure.colorbar(image, ax=list(axes[0]), label="|cos|", aspect=12, pad=0.015)
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    # A model may be named by a long path, or one with a dollar sign in it.
    name = _short(report.model, 60)
    figure.suptitle(f"{name}, {_TITLES[space]}", fontsize=11, parse_math=False)
    return figure


def drift_figure(reports: Sequence["ContinuityReport"], role: Role) -> Figure:
    """Draw one role in several models: |cos| against depth, one panel per space.

    Depth is the place of a pair among the model's pairs, 0 the first and 1 the last, so that
    models of different numbers of layers share an axis. Models are coloured in their order, from
    dark to light: of one model during training, from early to late.
    """
    from matplotlib import colormaps

    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    having = [report for report in reports if role in report.roles]
    colours = colormaps["viridis"].resampled(len(having) + 1)
    for axes, space in zip(panels, (Space.INPUT, Space.OUTPUT), strict=True):
        levels = set()
        for index, report in enumerate(having):
            row = report.roles[role]
            values = _values(row, space, False)
            depths = [i / max(1, len(values) - 1) for i in range(len(values))]
            style = {"color": colours(index), "marker": _MARKERS[index % len(_MARKERS)]}
            axes.plot(depths, values, label=_short(report.model, 40), lw=1.3, ms=4, **style)
            levels.add(row.random_v1 if space is Space.INPUT else row.random_u1)
        for index, level in enumerate(sorted(levels)):
            label = "random" if index == 0 else None
            axes.axhline(level, color="0.3", ls="--", lw=1.0, label=label)
        axes.set_title(_TITLES[space], fontsize=10)
        axes.set_xlabel("depth (first pair of layers 0, last 1)")
        axes.set_ylim(0.0, 1.02)
        axes.grid(axis="y", color="0.9", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("|cos|")
    handles, labels = panels[0].get_legend_handles_labels()
    labels = [label.replace("$", r"\$") for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.suptitle(f"{role.value}: continuity of adjacent layers", fontsize=11)
    return figure


def _short(name: str, most: int) -> str:
    """Cut a long path to its end."""
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _values(row: "RoleContinuity", space: Space, folded: bool) -> list[float]:
    """Return a role's cosine per pair, NaN where it is unknown."""
    measures = row.measures(folded=folded)
    values = measures.v1 if space is Space.INPUT else measures.u1
    return [math.nan if value is None else value for value in values]


def _heat_map(axes: Axes, report: "ContinuityReport", space: Space, folded: bool) -> AxesImage:
    rows = [_values(row, space, folded) for row in report.roles.values()]
    image = axes.imshow(rows, aspect="auto", cmap=_colours(), vmin=0.0, vmax=1.0)
    axes.set_yticks(range(len(rows)), [role.value for role in report.roles])
    axes.tick_params(labelbottom=True)
    _pair_ticks(axes, report.num_pairs)
    if report.num_pairs <= _ANNOTATED_PAIRS:
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                text = "-" if math.isnan(value) else f"{value:.2f}"
                shade = "black" if value > 0.55 or math.isnan(value) else "white"
                axes.text(x, y, text, ha="center", va="center", color=shade, fontsize=8)
    return image


def _colours() -> Colormap:
    from matplotlib import colormaps

    return colormaps["cividis"].with_extremes(bad="#dddddd")


def _lines(axes: Axes, report: "ContinuityReport", space: Space, folded: bool) -> None:
    levels = []
    for role, row in report.roles.items():
        colour, marker = _STYLES[role]
        values = _values(row, space, folded)
        axes.plot(
            range(len(values)), values, color=colour, marker=marker, label=role.value, lw=1.3, ms=4
        )
        levels.append(row.random_v1 if space is Space.INPUT else row.random_u1)
    # Widths differ between roles, and the level of random directions with them: a band.
    low, high = min(levels), max(levels)
    span = f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"
    axes.axhspan(low, high, color="0.6", alpha=0.4, lw=0)
    axes.axhline(high, color="0.3", ls="--", lw=1.2, label=f"random ({span})")
    axes.set_ylim(0.0, 1.02)
    axes.set_xlabel("adjacent layers")
    axes.grid(axis="y", color="0.9", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    _pair_ticks(axes, report.num_pairs)


def _pair_ticks(axes: Axes, pairs: int) -> None:
    """Label about eight pairs as `l-l+1`."""
    step = max(1, math.ceil(pairs / 8))
    ticks = list(range(0, pairs, step))
    axes.set_xticks(ticks, [f"{i}-{i + 1}" for i in ticks])
    axes.set_xlim(-0.5, pairs - 0.5)
