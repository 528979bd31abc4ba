"""Predicted against measured prefill speed-up of plans, and what multiples of sizes are worth.

    OMP_NUM_THREADS=1 python benchmarks/latency.py --data ../shared/data

Model: smollm2-135m, float32. Each plan's modules are built as `apply` builds them, with random
weights of the right shapes, since time does not depend on their values; dense and compressed model
then read 512 tokens in turns. With one thread its own CPU time counts, so that other programs on
the machine do not. The plans are those of `gccompress plan`, unprobed.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from gccompress import moves as moves_module
from gccompress.apply import compress
from gccompress.calibration import CalibrationOptions
from gccompress.files import cache_folder, write_text
from gccompress.linalg import Factors
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher
from gccompress.plan import AnyMove, Factoring, LowRank, Plan, ResizeMlp, ShareInput, move_matrices
from gccompress.planner import PlanOptions, budget_of, choose
from gccompress.planner.latency import LatencyTable, speedup
from gccompress.planner.timing import Clock, Products, latency_table
from gccompress.progress import track
from gccompress.roles import Role, Space
from gccompress.sampling import evaluating, new_cache, next_logits
from gccompress.view import ModelView, model_shape

TOKENS, SEQLEN = 512, 512
WANTED = (
    ("width", 0.8),
    ("width", 0.6),
    ("plain", 0.8),
    ("ranks", 0.9),
    ("ranks", 0.8),
    ("share", 0.8),
    ("auto", 0.9),
    ("auto", 0.8),
    ("auto", 0.6),
    ("prune", 0.8),
)
TURNS, DECODED = 5, 8
MULTIPLES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Row:
    """One plan: predicted and measured speed-up of prefill, measured of decoding.

    Measured are least over least times of all turns; `low` and `high` are of single turns.
    """

    name: str
    predicted: float
    measured: float
    low: float
    high: float
    decode: float


def plans(loaded: LoadedModel, data: Path, cache: Path) -> Iterator[tuple[str, Plan]]:
    """Yield the wanted plans, and one that shares bases between roles of the same input."""
    held = 4 * SEQLEN
    calibration = CalibrationOptions(
        str(data / "protocol/calibration.txt.xz"),
        32 * SEQLEN - held,
        SEQLEN,
        held,
        0,
        Fisher(True, 1),
    )
    options = PlanOptions(spaces="paper", probe="none")
    choices = {
        keep: choose(
            loaded,
            budget_of(keep, None),
            options=options,
            calibration=calibration,
            cache_dir=str(cache),
        )
        for keep in sorted({keep for _, keep in WANTED})
    }
    for name, keep in WANTED:
        choice = choices[keep]
        [found] = [one for one in choice.candidates if one.strategy == name]
        yield f"{name} {keep}", choice.plan.model_copy(update={"moves": tuple(found.moves)})
    layers = range(choice.plan.model.layers)
    shared: list[AnyMove] = []
    for layer in layers:
        shared.append(ShareInput(roles=(Role.Q, Role.K, Role.V), layers=(layer,), rank=256))
        shared.append(ShareInput(roles=(Role.GATE, Role.UP), layers=(layer,), rank=384))
    yield (
        "one basis for Q, K, V (rank 256), one for gate, up (384)",
        choice.plan.model_copy(update={"moves": tuple(shared)}),
    )
    alone = [
        LowRank(role=role, layer=layer, rank=rank)
        for layer in layers
        for role, rank in ((Role.Q, 224), (Role.GATE, 352), (Role.UP, 352))
    ]
    yield (
        "Q (rank 224), gate, up (352) alone",
        choice.plan.model_copy(update={"moves": tuple(alone)}),
    )


@contextmanager
def random_weights() -> Iterator[None]:
    """Let plans be built of random numbers, which takes no time and no moments."""

    def factors(view: ModelView, moments: Any, move: Factoring, damping: Any) -> Factors:
        shapes = [view.shape(role, layer) for role, layer in move_matrices(move)]
        rows, columns = shapes[0]
        output = not isinstance(move, ShareInput | LowRank)
        basis = torch.randn(rows, move.rank) if output else torch.randn(move.rank, columns)
        coefs = [
            torch.randn(move.rank, columns) if output else torch.randn(rows, move.rank)
            for rows, columns in shapes
        ]
        space = Space.OUTPUT if output else Space.INPUT
        return Factors(space, basis / columns, tuple(one / move.rank for one in coefs), 0.0)

    def narrow(view: ModelView, moments: Any, move: ResizeMlp, damping: Any) -> Any:
        hidden = view.shape(Role.DOWN, move.layer)[0]
        return torch.arange(move.width), torch.randn(hidden, move.width) / hidden, 0.0

    with mock.patch.multiple(moves_module, factor_move=factors, narrow=narrow):
        yield


def measure(name: str, dense: Any, plan: Plan, predicted: float) -> Row:
    """Time a plan's model and the dense one in turns, after one turn of warm-up."""
    view = ModelView(copy.deepcopy(dense))
    with random_weights():
        model, _ = compress(view, mock.Mock(), plan)
    turns = [(_turn(dense), _turn(model)) for _ in range(TURNS + 1)][1:]
    (slow, slow_step), (fast, fast_step) = (
        (min(one[side][0] for one in turns), min(one[side][1] for one in turns)) for side in (0, 1)
    )
    single = [before[0] / after[0] for before, after in turns]
    return Row(name, predicted, slow / fast, min(single), max(single), slow_step / fast_step)


def _turn(model: Any) -> tuple[float, float]:
    """Return the seconds of a prefill and, the median, of a token after it."""
    ids = torch.arange(TOKENS).remainder(256).unsqueeze(0)
    clock = Clock(model.device)
    with evaluating(model):
        cache = new_cache(model)
        seconds = []
        for _ in range(DECODED + 1):
            start = clock.now()
            ids = next_logits(model, ids, cache).argmax(-1, keepdim=True)
            seconds.append(clock.seconds(start, clock.now()))
    return seconds[0], statistics.median(seconds[1:])


def multiples(view: ModelView) -> list[tuple[int, float, float]]:
    """Return, by multiple, the time of widths and of ranks over that of multiples of 64.

    Sizes are the odd multiples next to those of 64, between which times are interpolated.
    """
    products = Products(view, TOKENS)
    (rows, columns), hidden = view.shape(Role.Q, 0), view.shape(Role.DOWN, 0)[0]
    rulers = {"mlp": (896, 1024, 1152, 1280), "rank": (128, 192, 256, 320)}
    made: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {}
    sizes: dict[tuple[str, int], list[int]] = {}
    for kind, ruler in rulers.items():
        for multiple in MULTIPLES:
            off = [point + sign * multiple for point in ruler[1:-1] for sign in (-1, 1)]
            sizes[kind, multiple] = list(ruler) if multiple == 64 else off
        for size in sorted({one for m in MULTIPLES for one in sizes[kind, m]}):
            if kind == "mlp":
                made[f"mlp {size}"] = (lambda size=size: products.mlp(size), hidden)  # type: ignore[misc]
            else:
                made[f"rank {size}"] = (
                    lambda size=size: torch.nn.Sequential(  # type: ignore[misc]
                        products.linear(columns, size), products.linear(size, rows)
                    ),
                    columns,
                )
    with evaluating(view.model):
        for key in track([*made] * 3, "Timing multiples"):
            make, width = made[key]
            products.time(key, make(), width, 3)

    def over(kind: str, multiple: int) -> float:
        ruler = rulers[kind]
        line = [products.ratio(f"{kind} {point}") for point in ruler]
        found = [
            products.ratio(f"{kind} {size}") / float(np.interp(size, ruler, line))
            for size in sizes[kind, multiple]
        ]
        return statistics.mean(found)

    return [(multiple, over("mlp", multiple), over("rank", multiple)) for multiple in MULTIPLES]


def markdown(
    rows: list[Row],
    table: LatencyTable,
    seconds: float,
    found: list[tuple[int, float, float]],
    command: str,
) -> str:
    """Return the results as a Markdown page."""
    at = table.measured
    lines = [
        "# Prefill: predicted and measured",
        "",
        f"`{command}`",
        "",
        f"{at.device}, torch {at.torch}, {at.threads} thread(s), {at.dtype}; SmolLM2-135M, "
        f"{at.tokens} tokens, batch 1, logits of the last token. The table took {seconds:.0f} s.",
        f"Measured: dense over compressed, the least times of {TURNS} turns each (lowest and "
        "highest of single turns). Decoding is not predicted.",
        "",
        "| plan | predicted | measured | error | decoding, measured |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        error = row.predicted / row.measured - 1
        lines.append(
            f"| {row.name} | {row.predicted:.3f} | {row.measured:.3f} ({row.low:.3f}, "
            f"{row.high:.3f}) | {error:+.1%} | {row.decode:.3f} |"
        )
    worst = max(abs(row.predicted / row.measured - 1) for row in rows)
    total = table.rest + at.layers * table.layer
    parts = {
        "the projections": at.layers * sum(table.roles.values()),
        "activations": at.layers * table.activation,
        "attention itself, norms, residual sums": at.layers * table.layer_rest,
        "embedding, masks, last norm, output projection": table.rest,
    }
    lines += ["", f"Largest error: {worst:.1%}.", "", "## Where a dense prefill's time goes", ""]
    lines += ["| part | ms | share |", "|---|---|---|"]
    lines += [f"| {name} | {1e3 * one:.1f} | {one / total:.1%} |" for name, one in parts.items()]
    lines += [
        "",
        "## Multiples",
        "",
        "Time of sizes that are odd multiples of m, over the time interpolated between multiples "
        "of 64.",
        "",
        "| m | MLP width | rank (576 x 576) |",
        "|---|---|---|",
    ]
    lines += [f"| {multiple} | {mlp:.3f} | {rank:.3f} |" for multiple, mlp, rank in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the table, every plan and the multiples, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/latency.md"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    cache = cache_folder(options.cache_dir)
    loaded = open_model("smollm2-135m", dtype=torch.float32, cache_dir=str(cache))
    view = ModelView(loaded.model)
    shape = model_shape(view)
    start = time.perf_counter()
    table = latency_table(view, cache, tokens=TOKENS)
    seconds = time.perf_counter() - start
    rows = []
    for name, plan in plans(loaded, options.data, cache):
        row = measure(name, loaded.model, plan, speedup(plan.moves, shape, table))
        rows.append(row)
        print(row, flush=True)
    command = f"OMP_NUM_THREADS=1 python benchmarks/latency.py --data {options.data}"
    write_text(options.out, markdown(rows, table, seconds, multiples(view), command))


if __name__ == "__main__":
    main()
