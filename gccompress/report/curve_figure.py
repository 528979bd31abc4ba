"""The figure of a sweep: perplexity against what is kept, with bands."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from gccompress.errors import PlanError

if TYPE_CHECKING:
    from gccompress.planner.curve import Curve

_COLOUR = "#0072B2"
_OTHERS = {
    "plain": ("#009E73", "s"),
    "prune": ("#D55E00", "D"),
    "width": ("#E69F00", "v"),
    "ranks": ("#56B4E9", "^"),
    "share": ("#CC79A7", "P"),
    "lowrank": ("#999999", "x"),
}


def curve_figure(curve: "Curve") -> Figure:
    """Draw the chosen strategy with its band, and of the others what was measured.

    Raises:
        PlanError: no plan has a perplexity, so there is nothing to draw.
    """
    plans = [choice.plan for choice in curve.choices]
    found = [plan.prediction for plan in plans if plan.prediction.ppl is not None]
    if not found:
        raise PlanError("no perplexity was predicted, so there is no curve to draw")
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    kept = [one.params_kept for one in found]
    low = [one.ppl_low or 0.0 for one in found]
    high = [one.ppl_high or 0.0 for one in found]
    axes.fill_between(kept, low, high, color=_COLOUR, alpha=0.2, linewidth=0)
    axes.plot(kept, [one.ppl or 0.0 for one in found], "o-", color=_COLOUR, label=plans[0].strategy)
    for name, (colour, marker) in _OTHERS.items():
        points = [
            (one.prediction.params_kept, one.prediction.ppl)
            for choice in curve.choices
            for one in choice.candidates
            if one.strategy == name
            and name != plans[0].strategy
            and one.prediction is not None
            and one.prediction.measured
            and one.prediction.ppl is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=colour, label=name)
    if found[0].dense_ppl is not None:
        axes.axhline(found[0].dense_ppl, color="black", linewidth=0.8, linestyle=":", label="dense")
    axes.set_yscale("log")
    axes.invert_xaxis()
    axes.set_xlabel("share of the decoder projections' parameters kept")
    axes.set_ylabel("perplexity, held-out calibration text")
    axes.set_title(plans[0].model.name[-60:], fontsize=11, parse_math=False)
    axes.legend(frameon=False)
    return figure
