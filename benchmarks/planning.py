"""What planning takes: seconds and memory by stage, at an 8B model's shapes, and cheaper ways.

    OMP_NUM_THREADS=1 python benchmarks/planning.py --data ../shared/data

Four parts (`--only`): stages of a plan of smollm2-135m; a calibration window by Fisher estimate;
neurons removed in blocks against one at a time; the largest steps at the shapes of an 8B model, on
synthetic moments. Finished rows are kept in the results' JSON file, so a run that was cut goes on.
"""

import argparse
import json
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gccompress import halves, linalg
from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.files import cache_folder, write_text
from gccompress.gradients import accumulating, add_gradients
from gccompress.linalg import Damping, Weighted
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher, Moments, collect_moments, weighted
from gccompress.planner import PlanOptions, budget_of, continuity_of
from gccompress.planner.search import Search
from gccompress.roles import Role, Space
from gccompress.text import Windows, cut_windows, load_windows
from gccompress.view import ModelView
from gccompress.width import order_neurons, refit

MODEL = "smollm2-135m"
SEQLEN, WINDOWS, HELDOUT = 512, 32, 8
KEEPS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
BLOCKS = (1, 32, 128, 256)
HIDDEN, KV, INNER, TOKENS = 4096, 1024, 14336, 16384  # of an 8B Llama, and of a calibration
PARTS = ("stages", "fisher", "blocks", "steps")


class Bench:
    """The rows measured so far."""

    def __init__(self, results: Path, data: Path, cache: Path) -> None:
        """Read what `results` already holds."""
        self.results, self.data, self.cache = results, data, cache
        self.rows: dict[str, dict[str, Any]] = (
            json.loads(results.read_text()) if results.exists() else {}
        )

    def done(self, key: str) -> bool:
        """Return whether a row is there."""
        return key in self.rows

    def add(self, key: str, **row: Any) -> None:
        """Keep a row."""
        self.rows[key] = row
        write_text(self.results, json.dumps(self.rows, indent=1))
        print(key, row, flush=True)

    def timed(self, key: str, work: Callable[[], object]) -> None:
        """Measure work that is done once: wall and processor seconds, and the peak of memory."""
        if self.done(key):
            return
        with measured() as spent:
            work()
        self.add(key, **vars(spent))

    def model(self) -> LoadedModel:
        """Return the model in float32."""
        return open_model(MODEL, dtype=torch.float32, cache_dir=str(self.cache))

    def windows(self, loaded: LoadedModel, count: int) -> Windows:
        """Return the first windows of the protocol's calibration text."""
        return load_windows(
            self.data / "protocol/calibration.txt.xz",
            loaded,
            seqlen=SEQLEN,
            tokens=count * SEQLEN,
            cache_dir=self.cache,
        )


@dataclass
class Spent:
    """What a step took; `peak_gb` is of the whole process, `before_gb` what it held already."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_gb: float = 0.0
    before_gb: float = 0.0


@contextmanager
def measured() -> Iterator[Spent]:
    """Measure the block; the peak is the kernel's, reset first (Linux)."""
    spent = Spent(before_gb=_memory("VmRSS"))
    Path("/proc/self/clear_refs").write_text("5")
    wall, processor = time.perf_counter(), time.process_time()
    yield spent
    spent.wall_s = time.perf_counter() - wall
    spent.cpu_s = time.process_time() - processor
    spent.peak_gb = _memory("VmHWM")


def _memory(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024 / 1e9


def stages(bench: Bench) -> None:
    """Plan the model with nothing cached, stage by stage, then at every budget."""
    names = ["open", "continuity", "calibrate", "price", *(f"plan {keep}" for keep in KEEPS)]
    keys = [f"stage {name}" for name in names]
    if all(bench.done(key) for key in keys):
        return
    scratch = bench.cache / "planning-benchmark"
    text = str(bench.data / "protocol/calibration.txt.xz")
    options = CalibrationOptions(text, WINDOWS * SEQLEN, SEQLEN, HELDOUT * SEQLEN)
    with measured() as spent:
        loaded = bench.model()
    if not bench.done(keys[0]):
        bench.add(keys[0], **vars(spent))
    bench.timed(keys[1], lambda: continuity_of(loaded, str(scratch)))
    view = ModelView(loaded.model)
    bench.timed(keys[2], lambda: calibrate(loaded, view, options, scratch))
    bench.timed(keys[3], lambda: Search(loaded, PlanOptions(), options, str(scratch)))
    search = Search(loaded, PlanOptions(), options, str(scratch))
    for keep in KEEPS:
        bench.timed(f"stage plan {keep}", lambda keep=keep: search.choose(budget_of(keep)))  # type: ignore[misc]
    shutil.rmtree(scratch)


def fisher(bench: Bench) -> None:
    """Time one calibration window by how A is estimated."""
    kinds = [Fisher(True, 0), Fisher(True, 1), Fisher(True, 5)]
    if all(bench.done(f"window {kind}") for kind in kinds):
        return
    loaded = bench.model()
    view = ModelView(loaded.model)
    ids = bench.windows(loaded, 3).ids
    for kind in kinds:
        state: dict[str, Tensor] = {}
        with accumulating(view, range(view.num_layers), state):
            add_gradients(view.model, ids[:1], kind, 0, 0)  # first touches of memory
            with measured() as spent:
                for index in (1, 2):
                    add_gradients(view.model, ids[index : index + 1], kind, index, index)
        spent.wall_s, spent.cpu_s = spent.wall_s / 2, spent.cpu_s / 2
        bench.add(f"window {kind}", **vars(spent))


def blocks(bench: Bench) -> None:
    """Compare what removing neurons in blocks is predicted to cost, layer by layer."""
    loaded = bench.model()
    view = ModelView(loaded.model)
    text = (bench.data / "protocol/calibration.txt.xz").read_bytes()
    windows = _protocol_windows(loaded, text)
    moments = collect_moments(
        view, windows, model_hash=loaded.source.hash, cache=bench.cache, fisher=Fisher(True, 1)
    )
    for layer in range(view.num_layers):
        if bench.done(f"blocks {layer}"):
            continue
        down = weighted(view, moments, Role.DOWN, layer, Damping())
        row: dict[str, Any] = {}
        for block in BLOCKS:
            with measured() as spent:
                losses = order_neurons(down, f"layer {layer}", block).losses
            inner = len(losses) - 1
            row[str(block)] = {
                "cpu_s": spent.cpu_s,
                "losses": [float(losses[inner * quarter // 4]) for quarter in (1, 2, 3)],
            }
        bench.add(f"blocks {layer}", **row)


def _protocol_windows(loaded: LoadedModel, packed: bytes) -> Windows:
    """Return the windows whose moments benchmarks/quality.py keeps in the cache."""
    import lzma

    text = lzma.decompress(packed).decode("utf-8")
    return cut_windows(text, loaded.tokenizer, SEQLEN, WINDOWS, source="calibration.txt.xz")


def steps(bench: Bench) -> None:
    """Take the largest steps of one layer of an 8B model, on synthetic moments read from disk."""
    folder = bench.cache / "planning-benchmark-8b"
    moments = _synthetic(folder)
    generator = torch.Generator().manual_seed(2)

    def weight(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator) / cols**0.5

    def read(role: Role, w: Tensor) -> Weighted:
        damping = Damping()
        g = linalg.shrink(moments.g(role, 0), damping.g)
        return Weighted(w.double(), g, linalg.shrink(moments.a(role, 0), damping.a))

    gate, down = weight(INNER, HIDDEN), weight(HIDDEN, INNER)
    bench.timed("8b read moments of gate", lambda: read(Role.GATE, gate))
    bench.timed("8b read moments of down", lambda: read(Role.DOWN, down))
    if not all(bench.done(f"8b {name}") for name in ("gate: A side", "gate: rounding priced")):
        one = read(Role.GATE, gate)
        bench.timed("8b gate: A side", lambda: linalg.side(one, Space.INPUT))
        rounded = linalg.round_to_nearest(gate, 4, 64)
        bench.timed("8b gate: rounding priced", lambda: one.loss(rounded))
        del one
    if not bench.done("8b gate: spectrum of three layers, one basis"):
        side = linalg.side(read(Role.GATE, gate), Space.INPUT)
        bench.timed("8b gate: spectrum alone", lambda: linalg.spectrum([side], "gate"))
        three = [side, *(linalg.Side(side.moment.clone(), side.form.clone()) for _ in range(2))]
        key = "8b gate: spectrum of three layers, one basis"
        bench.timed(key, lambda: linalg.spectrum(three, "gate"))
        del side, three
    if not bench.done("8b gate: factors of rank 2048"):
        one = read(Role.GATE, gate)
        bench.timed(
            "8b gate: factors of rank 2048",
            lambda: linalg.factor([one], Space.INPUT, 2048, "gate"),
        )
        del one
    wanted = [f"8b down: order of {INNER} neurons, blocks of {block}" for block in (32, 256)]
    if not all(bench.done(key) for key in (*wanted, "8b down: refit on 10752 neurons")):
        one = read(Role.DOWN, down)
        for key, block in zip(wanted, (32, 256), strict=True):
            bench.timed(key, lambda block=block: order_neurons(one, "down", block))  # type: ignore[misc]
        kept = torch.arange(INNER * 3 // 4)
        bench.timed("8b down: refit on 10752 neurons", lambda: refit(one, kept, "down"))


def _synthetic(folder: Path) -> Moments:
    """Return moments of one layer of an 8B model's MLP, made of random tokens unless there."""
    if not (folder / "meta.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(1)
        halved = {}
        widths = {"g.q": HIDDEN, "g.gate": HIDDEN, "g.down": INNER, "a.gate": INNER}
        for name, width in (widths | {"a.down": HIDDEN}).items():
            total = halves.new_sum(width)
            scale = torch.logspace(0, -2, width)
            for _ in range(4):  # fewer tokens than a calibration has: they only fill the matrix
                x = torch.randn(512, width, generator=generator)
                halves.add_outer(total, x * scale)
            halved[name] = halves.packed(total, width)
        save_file(halved, folder / "layer_000.safetensors")
        layers = [{"influence": 0.0, "drop_loss": 0.0}]
        meta = {"version": 1, "hash": "sha256:0", "tokens": 2048, "labels": 1, "layers": layers}
        write_text(folder / "meta.json", json.dumps(meta))
    return Moments(folder)


def markdown(bench: Bench, command: str) -> str:
    """Return the results as a Markdown page."""
    rows = bench.rows
    versions = (
        f"torch {version('torch')}, {platform.machine()}, {torch.get_num_threads()} thread(s)"
    )
    lines = ["# What planning takes", "", f"`{command}`", "", versions, ""]

    def table(title: str, prefix: str, head: str) -> None:
        lines.extend([f"## {title}", "", f"| {head} | wall (s) | processor (s) | peak (GB) |"])
        lines.append("|---|---|---|---|")
        for key, row in rows.items():
            if key.startswith(prefix):
                lines.append(
                    f"| {key.removeprefix(prefix)} | {row['wall_s']:.1f} | {row['cpu_s']:.1f} "
                    f"| {row['peak_gb']:.2f} |"
                )
        lines.append("")

    table(f"A plan of {MODEL}, nothing cached", "stage ", "stage")
    table("One calibration window of 512 tokens", "window ", "Fisher estimate")
    lines += _blocks_table(rows)
    table("Steps of one layer at 8B shapes (4096, 14336)", "8b ", "step")
    return "\n".join(lines)


def _blocks_table(rows: dict[str, dict[str, Any]]) -> list[str]:
    layers = [row for key, row in rows.items() if key.startswith("blocks ")]
    if not layers:
        return []
    lines = [
        f"## Neurons removed in blocks, sum over {len(layers)} layers of {MODEL}",
        "",
        "Predicted loss, nats per token, over that of one at a time, a share of neurons gone.",
        "",
        "| block | 25% gone | 50% gone | 75% gone | processor (s) a layer |",
        "|---|---|---|---|---|",
    ]
    sums = {
        block: [sum(row[block]["losses"][place] for row in layers) for place in range(3)]
        for block in map(str, BLOCKS)
    }
    for block, losses in sums.items():
        ratios = " | ".join(
            f"{loss / single - 1:+.2%}" for loss, single in zip(losses, sums["1"], strict=True)
        )
        seconds = sum(row[block]["cpu_s"] for row in layers) / len(layers)
        lines.append(f"| {block} | {ratios} | {seconds:.2f} |")
    return [*lines, ""]


def main() -> None:
    """Measure what is missing and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planning.md"))
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--cache-dir", type=Path, default=None)
    options = parser.parse_args()
    cache = cache_folder(options.cache_dir)
    bench = Bench(options.out.with_suffix(".json"), options.data, cache)
    parts = {"stages": stages, "fisher": fisher, "blocks": blocks, "steps": steps}
    for name in options.only or PARTS:
        parts[name](bench)
    command = f"OMP_NUM_THREADS=1 python benchmarks/planning.py --data {options.data}"
    write_text(options.out, markdown(bench, command))


if __name__ == "__main__":
    main()
