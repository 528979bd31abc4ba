"""Perplexity of every strategy by one protocol: the yardsticks of docs/method.md, row by row.

    python benchmarks/quality.py --data ../shared/data

Model: smollm2-135m. Moments: the first 32 windows of 512 tokens of the calibration text, labels of
the data. Score: exp(mean NLL) over the first 24 windows of 512 tokens of the test text, float32.
Finished rows are kept in the results' JSON file and skipped, so an interrupted run goes on.
"""

import argparse
import json
import lzma
import math
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.files import cache_folder, write_text
from gccompress.linalg import Damping
from gccompress.models import open_model
from gccompress.moments import Fisher, Moments, collect_moments
from gccompress.moves import applied
from gccompress.plan import AnyMove, plan_params
from gccompress.planner import PlanOptions, budget_of, choose, strategies
from gccompress.planner.probe import window_losses
from gccompress.planner.survey import Segment, survey
from gccompress.roles import PAPER_SPACE, Role, Space
from gccompress.text import Windows, cut_windows
from gccompress.view import ModelView, model_shape

WRONG_SPACE = {
    role: {Space.INPUT: Space.OUTPUT, Space.OUTPUT: Space.INPUT, Space.NONE: Space.NONE}[space]
    for role, space in PAPER_SPACE.items()
}
BASIS_SHARING_SPACE = {
    role: Space.NONE if role in (Role.O, Role.DOWN) else Space.INPUT for role in Role
}
NO_DAMPING = Damping(a=0.0, g=0.0)
DAMPED = Damping(a=0.03, g=0.0)
CALIBRATION_WINDOWS, TEST_WINDOWS, SEQLEN = 32, 24, 512


class WithoutFisher(Moments):
    """The same inputs, all outputs alike: whitening by G alone."""

    def __init__(self, folder: Path) -> None:
        """Open finished moments."""
        super().__init__(folder)
        self.hash += "-g"

    def a(self, role: Role, layer: int) -> torch.Tensor:
        """Return the identity in the place of A."""
        return torch.eye(len(super().a(role, layer)), dtype=torch.float64)


class Plain(WithoutFisher):
    """Neither inputs nor outputs are weighted: plain SVD."""

    def __init__(self, folder: Path) -> None:
        """Open finished moments."""
        super().__init__(folder)
        self.hash += "-plain"

    def g(self, role: Role, layer: int) -> torch.Tensor:
        """Return the identity in the place of G."""
        return torch.eye(len(super().g(role, layer)), dtype=torch.float64)


class HalfFisher(Moments):
    """G of all windows, A of the first half: what the first rows of the method used."""

    def __init__(self, folder: Path, half: Moments) -> None:
        """Open finished moments; `half` has the A to use."""
        super().__init__(folder)
        self.hash += f"-{half.hash}"
        self._half = half

    def a(self, role: Role, layer: int) -> torch.Tensor:
        """Return A of the half."""
        return self._half.a(role, layer)


class Bench:
    """The model, its windows and the rows measured so far."""

    def __init__(self, data: Path, results: Path, cache: Path) -> None:
        """Load the model and the protocol's texts, and what `results` already holds."""
        self.cache, self.data = cache, data
        self.loaded = open_model("smollm2-135m", dtype=torch.float32, cache_dir=str(cache))
        self.view = ModelView(self.loaded.model)
        self.shape = model_shape(self.view)
        self.calibration = self.windows(data / "protocol/calibration.txt.xz", CALIBRATION_WINDOWS)
        self.test = self.windows(data / "protocol/test.txt.xz", TEST_WINDOWS)
        self.results = results
        self.rows = json.loads(results.read_text()) if results.exists() else {}

    def windows(self, path: Path, count: int) -> Windows:
        """Return the first windows of a protocol text, tokenised whole, no special tokens."""
        text = lzma.open(path, "rt", encoding="utf-8").read()
        return cut_windows(text, self.loaded.tokenizer, SEQLEN, count, source=path.name)

    def moments(self, fisher: Fisher, kind: type[Moments] = Moments, windows: int = 32) -> Moments:
        """Return moments of the first calibration windows."""
        used = self.calibration.slice(0, windows)
        collected = collect_moments(
            self.view, used, model_hash=self.loaded.source.hash, cache=self.cache, fisher=fisher
        )
        return kind(collected.folder)

    def segments(
        self, moments: Moments, spaces: dict[Role, Space], longest: int, damping: Damping
    ) -> Sequence[Segment]:
        """Price the candidates."""
        return survey(
            self.view, moments, spaces, longest=longest, damping=damping, cache=self.cache
        ).segments

    def row(
        self,
        name: str,
        keep: float,
        moments: Moments,
        moves: Callable[[], list[AnyMove]],
        damping: Damping = NO_DAMPING,
    ) -> None:
        """Measure one row, unless it is there."""
        key = f"{name} @ {keep}"
        if key in self.rows:
            return
        start = time.perf_counter()
        made = tuple(moves())
        decoder, _ = plan_params(made, self.shape)
        with applied(self.view, moments, made, damping):
            nll = float(window_losses(self.view, self.test).mean())
        self.rows[key] = {
            "name": name,
            "keep": keep,
            "kept": decoder / self.shape.decoder_params(),
            "predicted": sum(move.loss or 0.0 for move in made),
            "ppl": math.exp(nll),
            "seconds": time.perf_counter() - start,
        }
        write_text(self.results, json.dumps(self.rows, indent=1))
        print(key, self.rows[key], flush=True)

    def budget(self, keep: float) -> int:
        """Return decoder parameters."""
        return int(keep * self.shape.decoder_params())


def uniform_rows(bench: Bench, keep: float) -> None:
    """Uniform ranks: what the field does, and the paper's spaces against the wrong ones."""
    full = bench.moments(Fisher(True, 0))
    g_only = bench.moments(Fisher(True, 0), WithoutFisher)
    plain = bench.moments(Fisher(True, 0), Plain)
    budget = bench.budget(keep)

    def alone(moments: Moments) -> list[AnyMove]:
        segments = bench.segments(moments, PAPER_SPACE, 2, NO_DAMPING)
        return strategies.lowrank(segments, budget, 1)

    def pairs(moments: Moments, spaces: dict[Role, Space]) -> list[AnyMove]:
        segments = bench.segments(moments, spaces, 2, NO_DAMPING)
        return strategies.share(segments, spaces, budget, 1, 2)

    def basis_sharing() -> list[AnyMove]:
        segments = bench.segments(g_only, BASIS_SHARING_SPACE, 2, NO_DAMPING)
        cut = [
            one
            for one in segments
            if (len(one.layers) == 2 and one.layers[0] % 2 == 0)
            or (len(one.layers) == 1 and BASIS_SHARING_SPACE[one.roles[0]] is Space.NONE)
        ]
        return strategies.uniform(cut, budget, 1)

    bench.row("plain SVD per layer", keep, plain, lambda: alone(plain))
    bench.row("whitened SVD per layer (SVD-LLM style)", keep, g_only, lambda: alone(g_only))
    bench.row("Basis-Sharing style pairs, whitened by G", keep, g_only, basis_sharing)
    bench.row("pairs in the wrong spaces, G", keep, g_only, lambda: pairs(g_only, WRONG_SPACE))
    bench.row("pairs in the wrong spaces, G and A", keep, full, lambda: pairs(full, WRONG_SPACE))
    bench.row("pairs in the paper's spaces, G", keep, g_only, lambda: pairs(g_only, PAPER_SPACE))
    bench.row("per layer, G and A, uniform", keep, full, lambda: alone(full))
    bench.row("pairs in the paper's spaces, G and A", keep, full, lambda: pairs(full, PAPER_SPACE))


def allocated_rows(bench: Bench, keep: float) -> None:
    """Ranks allocated by one price, and layers dropped."""
    budget = bench.budget(keep)
    full = bench.moments(Fisher(True, 0))

    def auto(moments: Moments, longest: int, damping: Damping, multiple: int) -> list[AnyMove]:
        segments = bench.segments(moments, PAPER_SPACE, longest, damping)
        return strategies.allocated(segments, (), budget, multiple)

    def row(name: str, moments: Moments, longest: int, damping: Damping, multiple: int) -> None:
        bench.row(name, keep, moments, lambda: auto(moments, longest, damping, multiple), damping)

    bench.row(
        "drop layers by block influence (ShortGPT)",
        keep,
        full,
        lambda: strategies.prune(bench.shape, full.influence, budget),
    )
    row("allocated, alone", full, 1, NO_DAMPING, 1)
    row("allocated, segments up to 4", full, 4, NO_DAMPING, 1)
    default = bench.moments(Fisher(True, 1))
    for multiple in (1, 8, 32):
        name = f"allocated, segments up to 3, 1 draw, A shrunk, multiples of {multiple}"
        row(name, default, 3, DAMPED, multiple)


def product_rows(bench: Bench, keep: float, *, spread: bool = False) -> None:
    """What `gccompress plan` does: 28 of the 32 windows for the moments, 4 to probe plans on.

    `spread` takes 32 windows from all over the calibration text, as the product does by itself, and
    not the protocol's first 32.
    """
    text = bench.data / "protocol/calibration.txt.xz"
    held = 4 * SEQLEN
    calibration = CalibrationOptions(
        str(text), CALIBRATION_WINDOWS * SEQLEN - held, SEQLEN, held, 0, Fisher(True, 1), spread
    )
    moments = calibrate(bench.loaded, bench.view, calibration, bench.cache).moments
    multiple = PlanOptions().multiple
    shown = ("auto", "plain", "ranks", "width") if keep == 0.8 and not spread else ("auto", "plain")
    where = ", windows from all over the text" if spread else ""
    wanted = {name: f"product: {name}, multiples of {multiple}{where}" for name in shown}
    if all(f"{name} @ {keep}" in bench.rows for name in wanted.values()):
        return
    options = PlanOptions(
        spaces="paper", multiple=multiple, probe="all" if len(shown) > 2 else "chosen"
    )
    choice = choose(
        bench.loaded,
        budget_of(keep, None),
        options=options,
        calibration=calibration,
        cache_dir=str(bench.cache),
    )
    for one in choice.candidates:
        if one.strategy in wanted and one.prediction is not None:
            moves = list(one.moves)
            name = wanted[one.strategy]
            bench.row(name, keep, moments, lambda moves=moves: moves, options.damping)  # type: ignore[misc]


def estimate_rows(bench: Bench, keep: float) -> None:
    """What worse and better estimates of A are worth."""
    budget = bench.budget(keep)
    half = bench.moments(Fisher(True, 0), windows=CALIBRATION_WINDOWS // 2)
    mixed = HalfFisher(bench.moments(Fisher(True, 0)).folder, half)
    segments = bench.segments(mixed, PAPER_SPACE, 2, NO_DAMPING)
    alone = [one for one in segments if len(one.layers) == 1]
    bench.row(
        "per layer, G and A, uniform, A of 16 windows",
        keep,
        mixed,
        lambda: strategies.lowrank(segments, budget, 1),
    )
    bench.row(
        "pairs in the paper's spaces, G and A, A of 16 windows",
        keep,
        mixed,
        lambda: strategies.share(segments, PAPER_SPACE, budget, 1, 2),
    )
    bench.row(
        "allocated, alone, A of 16 windows",
        keep,
        mixed,
        lambda: strategies.allocated(alone, (), budget, 1),
    )
    best = bench.moments(Fisher(True, 5))
    bench.row(
        "allocated, alone, 5 draws, A shrunk",
        keep,
        best,
        lambda: strategies.allocated(bench.segments(best, PAPER_SPACE, 1, DAMPED), (), budget, 1),
        DAMPED,
    )


def yardsticks(bench: Bench) -> None:
    """Run the rows that others, or the method's table, have numbers for."""
    allocated_rows(bench, 0.8)
    uniform_rows(bench, 0.8)
    for keep in (0.9, 0.6):
        allocated_rows(bench, keep)
    estimate_rows(bench, 0.8)


def markdown(bench: Bench, command: str) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Quality of every strategy, SmolLM2-135M",
        "",
        f"`{command}`",
        "",
        "torch {}, transformers {}, {}, {} threads".format(
            version("torch"), version("transformers"), platform.machine(), torch.get_num_threads()
        ),
        "",
        "| keep | what | kept | predicted (nats) | measured (nats) | test perplexity |",
        "|---|---|---|---|---|---|",
    ]
    dense = bench.rows["dense @ 1.0"]["ppl"]
    for row in sorted(bench.rows.values(), key=lambda row: (-row["keep"], row["ppl"])):
        rise = math.log(row["ppl"] / dense)
        lines.append(
            f"| {row['keep']} | {row['name']} | {row['kept']:.4f} | {row['predicted']:.3f} "
            f"| {rise:.3f} | {row['ppl']:.5g} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality.md"))
    parser.add_argument("--only", choices=("yardsticks", "product"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    bench = Bench(options.data, options.out.with_suffix(".json"), cache_folder(options.cache_dir))
    bench.row("dense", 1.0, bench.moments(Fisher(True, 0)), list)
    if options.only != "product":
        yardsticks(bench)
    if options.only != "yardsticks":
        for keep in (0.8, 0.9, 0.6, 0.7, 0.5):
            product_rows(bench, keep)
        for keep in (0.8, 0.9, 0.6, 0.7, 0.5):
            product_rows(bench, keep, spread=True)
    command = f"python benchmarks/quality.py --data {options.data}"
    write_text(options.out, markdown(bench, command))


if __name__ == "__main__":
    main()
