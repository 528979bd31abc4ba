"""Candidates side by side: what the strategies would give, as a table, as JSON and in words."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.plan import AnyMove, DropLayers, LowRank, Plan, Prediction, ResizeMlp

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Candidate:
    """One way to meet the budget, for the comparison that `plan` prints.

    Attributes:
        strategy: its name; `rtn4`, `rtn8` are round-to-nearest references, not made by plans.
        moves: what it does (empty for the references).
        prediction: its cost; None when it cannot meet the budget.
        speedup: arithmetic limit on prefill, dense over compressed multiply-adds.
        reason: why it cannot meet the budget, or a remark.
    """

    strategy: str
    moves: tuple[AnyMove, ...]
    prediction: Prediction | None
    speedup: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Choice:
    """A plan and everything it was chosen from."""

    plan: Plan
    candidates: tuple[Candidate, ...]

    def to_dict(self, plan_path: Path) -> dict[str, Any]:
        """Return what `gccompress plan --json` prints."""
        return {
            "plan_path": str(plan_path),
            "chosen": self.plan.strategy,
            "candidates": [_flat(one) for one in self.candidates],
            "moves": [move.model_dump(mode="json") for move in self.plan.moves],
        }

    def table(self) -> "Table":
        """Return the candidates side by side, the chosen one marked."""
        from rich.table import Table

        dense = self.plan.prediction.dense_ppl
        on = (
            "" if dense is None else f"; perplexity on held-out calibration text, dense {dense:.2f}"
        )
        table = Table(title=f"{self.plan.model.name}: {self.plan.budget}{on}", title_justify="left")
        table.add_column("strategy")
        for name in ("kept", "size", "nats, 2nd order", "perplexity", "prefill"):
            table.add_column(name, justify="right")
        table.add_column("remark")
        for one in self.candidates:
            mark = "> " if one.strategy == self.plan.strategy else "  "
            found = one.prediction
            if found is None:
                table.add_row(mark + one.strategy, *["-"] * 5, one.reason)
                continue
            speed = "-" if one.speedup is None else f"{one.speedup:.2f}x"
            size = f"{found.bytes / 1e6:.0f} MB"
            loss = "-" if found.loss is None else f"{found.loss:.3f}"
            if found.energy_lost is not None:
                loss = f"{100 * found.energy_lost:.2f}% energy"
            kept = f"{found.params_kept:.3f}"
            table.add_row(
                mark + one.strategy, kept, size, loss, shown_range(found), speed, one.reason
            )
        return table

    def sentences(self) -> Iterator[str]:
        """Yield what the plan does and what it is expected to cost, in words."""
        counts: dict[str, int] = {}
        for move in self.plan.moves:
            if isinstance(move, DropLayers):
                names = ", ".join(str(layer) for layer in move.layers)
                yield f"Layers {names} (counted from 0) are dropped."
                continue
            if isinstance(move, ResizeMlp):
                role = "mlp"
            else:
                role = move.role if isinstance(move, LowRank) else "+".join(move.roles)
            key = f"{role} {move.do.replace('_', ' ')}"
            counts[key] = counts.get(key, 0) + 1
        if counts:
            yield "Moves: " + ", ".join(f"{key} x{count}" for key, count in counts.items()) + "."
        found = self.plan.prediction
        if found.ppl is not None:
            how = "measured in memory" if found.measured else "extrapolated"
            yield f"Perplexity on held-out calibration text: {shown_range(found)}, {how}."
        elif self.plan.calibration is not None:
            yield "No held-out text was asked for, so no perplexity is predicted."
        yield from (f"{found}." for found in self.plan.findings)
        for note in self.plan.notes:
            yield f"Note: {note}."


def shown_range(found: Prediction) -> str:
    """Return a predicted perplexity with its band; `~` marks what was not measured."""
    if found.ppl is None:
        return "-"
    about = "" if found.measured else "~"
    shown = (
        "-" if one is None else f"{one:.2f}" if one < 1e5 else f"{one:.0e}"
        for one in (found.ppl, found.ppl_low, found.ppl_high)
    )
    return "{}{} ({} to {})".format(about, *shown)


def _flat(one: Candidate) -> dict[str, Any]:
    found = one.prediction
    return {
        "strategy": one.strategy,
        "params_kept": found and found.params_kept,
        "bytes": found and found.bytes,
        "predicted_ppl": found and found.ppl,
        "predicted_ppl_low": found and found.ppl_low,
        "predicted_ppl_high": found and found.ppl_high,
        "predicted_speedup": one.speedup,
        "loss": found and found.loss,
        "energy_lost": found and found.energy_lost,
        "measured": bool(found and found.measured),
        "reason": one.reason or None,
    }
