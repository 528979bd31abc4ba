"""The whole curve: one plan per budget, calibrated and priced once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.calibration import CalibrationOptions
from gccompress.errors import PlanError
from gccompress.files import new_folder
from gccompress.models import LoadedModel
from gccompress.plan import Budget
from gccompress.planner.candidates import Choice, shown_range
from gccompress.planner.choice import PlanOptions

if TYPE_CHECKING:
    from rich.table import Table

STEP = 0.05
MOST_POINTS = 100


@dataclass(frozen=True)
class Curve:
    """Plans of one model at several budgets, the largest first."""

    keeps: tuple[float, ...]
    choices: tuple[Choice, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress plan --sweep --json` prints."""
        return {
            "points": [
                {"keep": keep, **choice.to_dict(self.file(keep))}
                for keep, choice in zip(self.keeps, self.choices, strict=True)
            ]
        }

    @staticmethod
    def file(keep: float) -> Path:
        """Return the name of a point's plan inside the folder."""
        return Path(f"plan-{keep:.4g}.yaml")

    def save(self, folder: str | Path) -> None:
        """Write every plan, `curve.json` and, where there is a perplexity to draw, `curve.png`.

        Into a new folder, whole or not at all.
        """
        from gccompress.report.curve_figure import curve_figure

        with new_folder(Path(folder)) as temporary:
            for keep, choice in zip(self.keeps, self.choices, strict=True):
                choice.plan.save(temporary / self.file(keep))
            (temporary / "curve.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
            if any(choice.plan.prediction.ppl is not None for choice in self.choices):
                curve_figure(self).savefig(temporary / "curve.png", dpi=150)

    def table(self) -> "Table":
        """Return one row per budget."""
        from rich.table import Table

        first = self.choices[0].plan
        dense = first.prediction.dense_ppl
        on = "" if dense is None else f"; perplexity on held-out text, dense {dense:.2f}"
        table = Table(title=f"{first.model.name}, {first.strategy}{on}", title_justify="left")
        for name in ("asked", "kept", "size", "nats, 2nd order", "perplexity", "prefill"):
            table.add_column(name, justify="right")
        table.add_column("best of the others")
        for keep, choice in zip(self.keeps, self.choices, strict=True):
            found, own = choice.plan.prediction, choice.plan.strategy
            others = [
                (one.prediction.ppl, one.strategy)
                for one in choice.candidates
                if one.moves and one.strategy != own and one.prediction and one.prediction.ppl
            ]
            speed = next(one.speedup for one in choice.candidates if one.strategy == own)
            table.add_row(
                f"{keep:g}",
                f"{found.params_kept:.3f}",
                f"{found.bytes / 1e6:.0f} MB",
                f"{found.loss or 0.0:.3f}",
                shown_range(found),
                "-" if speed is None else f"{speed:.2f}x",
                "{1} {0:.2f}".format(*min(others)) if others else "-",
            )
        return table


def sweep(
    loaded: LoadedModel,
    keeps: Sequence[float],
    *,
    options: PlanOptions | None = None,
    calibration: CalibrationOptions | None = None,
    cache_dir: str | None = None,
) -> Curve:
    """Return a plan for every share in `keeps`.

    The model is calibrated and priced once. How far the second order is from what is measured, by
    kind of move, is probed at the middle budget and used for all; each point's own plan is measured
    as `choose` does.

    Raises:
        PlanError: a share that is none, or a budget that cannot be met.
    """
    from gccompress.planner.search import Search

    if not keeps or not all(0 < keep <= 1 for keep in keeps):
        raise PlanError(f"--sweep {list(keeps)}; wanted shares in (0, 1], such as 0.95:0.5")
    search = Search(loaded, options, calibration, cache_dir)
    ordered = sorted(set(keeps), reverse=True)
    middle = Budget(keep=ordered[len(ordered) // 2])
    scales = search.scales_at(middle)
    return Curve(
        tuple(ordered),
        tuple(search.choose(Budget(keep=keep), scales) for keep in ordered),
    )


def keeps_of(text: str) -> tuple[float, ...]:
    """Return the shares of `HIGH:LOW` or `HIGH:LOW:STEP`. Raises `PlanError`."""
    wanted = "wanted HIGH:LOW or HIGH:LOW:STEP, such as 0.95:0.5:0.05"
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
        high, low, step = numbers if len(numbers) == 3 else (*numbers, STEP)
    except ValueError:
        raise PlanError(f"--sweep {text!r}; {wanted}") from None
    if not (0 < low <= high <= 1 and step > 0) or (high - low) / step > MOST_POINTS:
        raise PlanError(f"--sweep {text!r}; {wanted}, at most {MOST_POINTS} of them")
    count = int((high - low) / step + 1e-9) + 1
    return tuple(round(high - index * step, 6) for index in range(count))
