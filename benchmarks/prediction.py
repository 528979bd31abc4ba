"""Is the band honest? What `plan` predicts, against what its plans cost on other text.

    python benchmarks/prediction.py --cache-dir FOLDER [--only MODEL] [--keep 0.8] [--fresh]

Compared are rises over the dense model in nats per token: predicted from held-out windows of the
protocol's calibration text, measured on its test text with the plan carried out in memory; shown
as perplexities at the dense model's level on the test text. Finished plans are skipped.
"""

import argparse
import hashlib
import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from tiny_models import MULTIPLE, SEQLEN, TINY, open_tiny

import gccompress
from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.files import cache_folder, write_text
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher
from gccompress.moves import applied
from gccompress.plan import AnyMove
from gccompress.planner import Candidate, PlanOptions, budget_of, choose
from gccompress.planner.probe import window_losses
from gccompress.text import load_windows
from gccompress.view import ModelView

SMOLLM2 = "smollm2-135m"
MODELS = (*TINY, SMOLLM2)
KEEPS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
CALIBRATION_TOKENS, HELDOUT_TOKENS, TEST_TOKENS = 28 * 512, 4096, 24 * 512
CARRY_OUT = ("moves.py", "linalg.py", "width.py")  # what a measurement depends on, beside moments


@dataclass(frozen=True)
class Predicted:
    """One row of what `plan` printed.

    Attributes:
        model: which.
        keep: the budget.
        strategy: the row.
        key: of the moves, see `Bench.key`.
        dense: key of the model without moves.
        kept: share of decoder parameters it keeps.
        second_order: predicted nats per token by kind of move, uncalibrated.
        probed: measured on the held-out windows, or extrapolated.
        rise: predicted rise over dense, nats per token.
        low: of the band.
        high: of the band.
    """

    model: str
    keep: float
    strategy: str
    key: str
    dense: str
    kept: float
    second_order: dict[str, float]
    probed: bool
    rise: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """Losses of a model under some moves, nats per token, one of each window.

    Attributes:
        key: of the moves; of the dense model without moves.
        test: `[windows]` of the test text.
        heldout: `[windows]` of the held-out calibration text.
    """

    key: str
    test: list[float]
    heldout: list[float]


class Journal:
    """Finished work: a file of JSON lines, each a `Predicted` or a `Measured`."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        self.predicted = [Predicted(**one) for one in found if "strategy" in one]
        self.measured = {one["key"]: Measured(**one) for one in found if "test" in one}

    def forget(self, unwanted: Callable[[Predicted], bool]) -> None:
        """Drop predictions; measurements stay true, their key says what they depend on."""
        self.predicted = [one for one in self.predicted if not unwanted(one)]
        rows: list[Predicted | Measured] = [*self.predicted, *self.measured.values()]
        write_text(self.path, "".join(json.dumps(asdict(one)) + "\n" for one in rows))

    def add(self, *rows: Predicted | Measured) -> None:
        """Keep rows, on disk too."""
        for one in rows:
            if isinstance(one, Predicted):
                self.predicted.append(one)
            else:
                self.measured[one.key] = one
        with self.path.open("a") as file:
            file.write("".join(json.dumps(asdict(one)) + "\n" for one in rows))


class Bench:
    """One model with its texts and moments."""

    def __init__(self, name: str, data: Path, cache: Path) -> None:
        """Load it and calibrate, from the cache where that was done before."""
        self.name, self.cache = name, cache
        self.loaded = open_named(name, cache)
        self.view = ModelView(self.loaded.model)
        # `plan --strategy auto` probes what `auto` needs and extrapolates the other rows.
        self.options = PlanOptions("auto", spaces="paper")
        if name in TINY:
            self.options = replace(self.options, multiple=MULTIPLE)
        seqlen = SEQLEN if name in TINY else 512
        self.calibration = CalibrationOptions(
            str(data / "protocol/calibration.txt.xz"),
            CALIBRATION_TOKENS,
            seqlen,
            HELDOUT_TOKENS,
            0,
            Fisher(True, 1),
        )
        calibrated = calibrate(self.loaded, self.view, self.calibration, cache)
        self.moments, self.heldout = calibrated.moments, calibrated.heldout
        self.test = load_windows(
            data / "protocol/test.txt.xz", self.loaded, seqlen=seqlen, tokens=TEST_TOKENS
        )
        code = b"".join(
            (Path(gccompress.__file__).parent / name).read_bytes() for name in CARRY_OUT
        )
        self._code = hashlib.sha256(code).hexdigest()
        self.dense = self.key(())

    def key(self, moves: Sequence[AnyMove]) -> str:
        """Return a hash of the moves and of all that their result depends on."""
        said = [
            self._code,
            self.moments.hash,
            self.heldout.hash,
            self.test.hash,
            asdict(self.options.damping),
            [move.model_dump(mode="json", exclude={"loss", "saves"}) for move in moves],
        ]
        return f"{self.name}:{hashlib.sha256(json.dumps(said).encode()).hexdigest()[:20]}"

    def predict(self, keep: float, journal: Journal) -> None:
        """Plan, keep what was printed, and measure its moves on the test text."""
        choice = choose(
            self.loaded,
            budget_of(keep, None),
            options=self.options,
            calibration=self.calibration,
            cache_dir=str(self.cache),
        )
        rows = []
        for one in choice.candidates:
            if one.prediction is not None and one.moves:
                self.measure(one.moves, journal)
                rows.append(self._row(one, keep))
        journal.add(*rows)  # all at once, so that a budget is there or not

    def _row(self, one: Candidate, keep: float) -> Predicted:
        found = one.prediction
        assert found is not None and found.dense_ppl is not None
        assert found.ppl is not None and found.ppl_low is not None and found.ppl_high is not None
        second_order: dict[str, float] = {}
        for move in one.moves:
            second_order[move.do] = second_order.get(move.do, 0.0) + (move.loss or 0.0)
        low, rise, high = (
            math.log(value / found.dense_ppl)
            for value in (found.ppl_low, found.ppl, found.ppl_high)
        )
        key = self.key(one.moves)
        return Predicted(
            *(self.name, keep, one.strategy, key, self.dense, found.params_kept),
            *(second_order, found.measured, rise, low, high),
        )

    def measure(self, moves: Sequence[AnyMove], journal: Journal) -> None:
        """Carry moves out in memory and score both texts, unless that was done."""
        key = self.key(moves)
        if key not in journal.measured:
            with applied(self.view, self.moments, tuple(moves), self.options.damping):
                losses = [
                    window_losses(self.view, text).tolist() for text in (self.test, self.heldout)
                ]
            journal.add(Measured(key, *losses))


def open_named(name: str, cache: Path) -> LoadedModel:
    """Load one of `MODELS` in float32."""
    if name in TINY:
        return open_tiny(cache, name)
    return open_model(name, dtype=torch.float32, cache_dir=str(cache))


@dataclass(frozen=True)
class Compared:
    """A prediction beside what was measured, rises in nats per token.

    Attributes:
        row: the prediction.
        dense: NLL of the dense model on the test text.
        rise: measured on the test text.
        error: standard error of that, paired over windows.
    """

    row: Predicted
    dense: float
    rise: float
    error: float

    @property
    def inside(self) -> bool:
        """Whether the band holds the measured rise."""
        return self.row.low <= self.rise <= self.row.high

    def perplexity(self, rise: float) -> float:
        """Return a rise as perplexity at the dense model's level on the test text."""
        return math.exp(min(self.dense + rise, 100.0))


def compare(journal: Journal) -> list[Compared]:
    """Join predictions and measurements; rows that say the same of the same moves count once."""
    found: dict[tuple[Any, ...], Compared] = {}
    for row in journal.predicted:
        measured = journal.measured[row.key]
        dense = journal.measured[row.dense].test
        rises = [one - base for one, base in zip(measured.test, dense, strict=True)]
        error = statistics.stdev(rises) / len(rises) ** 0.5
        identity = (row.key, row.probed, round(row.rise, 9), round(row.low, 9), round(row.high, 9))
        compared = Compared(row, statistics.fmean(dense), statistics.fmean(rises), error)
        found.setdefault(identity, compared)
    return list(found.values())


def summary(rows: Sequence[Compared]) -> dict[str, float]:
    """Return coverage, rank correlation and widths of some rows."""
    ratios = [math.log(one.rise / one.row.rise) for one in rows if min(one.rise, one.row.rise) > 0]
    halves = [(one.row.high - one.row.low) / 2 for one in rows]
    return {
        "plans": len(rows),
        "coverage": statistics.fmean(one.inside for one in rows),
        "spearman": float(
            spearmanr([one.row.rise for one in rows], [one.rise for one in rows]).statistic
        ),
        "half_width_nats": statistics.median(halves),
        "half_width_of_rise": statistics.median(
            half / one.row.rise for half, one in zip(halves, rows, strict=True)
        ),
        "log_ratio_mean": statistics.fmean(ratios),
        "log_ratio_sd": statistics.stdev(ratios),
    }


def groups(rows: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Return the rows together, by kind of prediction, and by kind and model."""
    made = {"all": list(rows)}
    for kind, probed in (("probed", True), ("extrapolated", False)):
        mine = [one for one in rows if one.row.probed is probed]
        made[kind] = mine
        for model in MODELS:
            made[f"{kind}, {model}"] = [one for one in mine if one.row.model == model]
    return {name: mine for name, mine in made.items() if len(mine) > 2}


def markdown(rows: Sequence[Compared], command: str) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Predicted with a band, against measured",
        "",
        f"`{command}`",
        "",
        f"torch {version('torch')}, transformers {version('transformers')}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads",
        "",
        "Predicted: the rise over the dense model in nats per token that `plan` prints as a "
        f"perplexity, from {HELDOUT_TOKENS} held-out tokens of the protocol's calibration text. "
        f"Measured: the rise on the first {TEST_TOKENS} tokens of its test text, the plan carried "
        "out in memory. Perplexities are both rises at the dense model's level on the test text.",
        "",
        "Probed plans were measured on the held-out tokens; extrapolated ones (`~`) were not.",
        "",
        "| plans | number | measured inside the band | Spearman | half width of the band, nats "
        "| of the rise | log(measured / predicted) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mine in groups(rows).items():
        one = summary(mine)
        lines.append(
            f"| {name} | {one['plans']} | {100 * one['coverage']:.0f}% | {one['spearman']:.3f} "
            f"| {one['half_width_nats']:.3f} | {100 * one['half_width_of_rise']:.0f}% "
            f"| {one['log_ratio_mean']:+.2f}, sd {one['log_ratio_sd']:.2f} |"
        )
    lines += [
        "",
        "![predicted against measured](prediction.png)",
        "",
        "| model | keep | strategy | kept | predicted perplexity | measured | inside |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = row.row
        low, middle, high = (row.perplexity(rise) for rise in (said.low, said.rise, said.high))
        lines.append(
            f"| {said.model} | {said.keep} | {said.strategy} | {said.kept:.3f} "
            f"| {'' if said.probed else '~'}{middle:.4g} ({low:.4g} to {high:.4g}) "
            f"| {row.perplexity(row.rise):.4g} | {'yes' if row.inside else '**no**'} |"
        )
    return "\n".join(lines) + "\n"


def figure(rows: Sequence[Compared], path: Path) -> None:
    """Draw predicted with its band over measured, both as perplexity over dense, log axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(11, 5.2), sharex=True, sharey=True)
    largest = max(row.rise for row in rows) * 1.3
    for axis, probed in zip(axes, (True, False), strict=True):
        mine = [row for row in rows if row.row.probed is probed]
        axis.plot([0.003, largest], [0.003, largest], color="black", linewidth=0.8)
        for model in MODELS:
            shown = [row for row in mine if row.row.model == model]
            if shown:
                middle = [row.row.rise for row in shown]
                below = [max(row.row.rise - max(row.row.low, 1e-4), 0.0) for row in shown]
                above = [row.row.high - row.row.rise for row in shown]
                axis.errorbar(
                    [row.rise for row in shown],
                    middle,
                    [below, above],
                    fmt="o",
                    markersize=3.5,
                    linewidth=0.8,
                    label=model,
                )
        kind = "probed on held-out text" if probed else "extrapolated"
        share = statistics.fmean(row.inside for row in mine) if mine else 0.0
        axis.set_title(f"{kind}: {len(mine)} plans, {100 * share:.0f}% inside the band")
        axis.set(xscale="log", yscale="log", xlabel="measured on the test text (nats per token)")
    axes[0].set_ylabel("predicted rise over the dense model (nats per token)")
    axes[0].set_ylim(0.003, 2 * largest)
    axes[0].legend(frameon=False)
    drawn.tight_layout()
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def write_results(journal: Journal, out: Path, command: str) -> None:
    """Write the page, the numbers and the figure."""
    rows = compare(journal)
    rows.sort(key=lambda row: (MODELS.index(row.row.model), -row.row.keep, row.rise))
    write_text(out, markdown(rows, command))
    plans = [{**asdict(row), "inside": row.inside} for row in rows]
    summaries = {name: summary(mine) for name, mine in groups(rows).items()}
    write_text(
        out.with_suffix(".json"),
        json.dumps({"command": command, "summary": summaries, "plans": plans}, indent=1),
    )
    figure(rows, out.with_suffix(".png"))


def work(journal: Journal, names: Iterable[str], keeps: Iterable[float], data: Path) -> None:
    """Plan and measure what is missing."""
    done = {(row.model, row.keep) for row in journal.predicted}
    for name in names:
        missing = [keep for keep in keeps if (name, keep) not in done]
        if not missing:
            continue
        bench = Bench(name, data, journal.path.parent)
        bench.measure((), journal)
        for keep in missing:
            bench.predict(keep, journal)
            print(f"{name} @ {keep}: done", flush=True)


def main() -> None:
    """Measure what is missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prediction.md"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--keep", type=float, choices=KEEPS, action="append")
    parser.add_argument("--fresh", action="store_true", help="plan again; same moves stay measured")
    options = parser.parse_args()
    names, keeps = options.only or MODELS, options.keep or KEEPS
    journal = Journal(cache_folder(options.cache_dir) / "prediction.jsonl")
    if options.fresh:
        journal.forget(lambda row: row.model in names and row.keep in keeps)
    work(journal, names, keeps, options.data)
    command = f"python benchmarks/prediction.py --data {options.data}"
    write_results(journal, options.out, command)


if __name__ == "__main__":
    main()
