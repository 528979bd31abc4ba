"""Speed, memory and correctness of `gccompress analyze`; writes benchmarks/results/analyze.*.

    python benchmarks/analyze.py [--temporary FOLDER] [--only smollm2,8b,70b,layers]

smollm2: against torch's SVD of the same 210 matrices. 8b, 70b: files of those shapes, written by
this script, with planted directions. Ratios are of times taken in one run.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from planted import MODULES, Shapes, describe, expected_cosine, write_model
from torch import Tensor

from gccompress import spectra
from gccompress.all_pairs import working_bytes
from gccompress.architectures import ArchSpec
from gccompress.continuity import ContinuityReport, analyze
from gccompress.files import write_text
from gccompress.gram import multiplies_bf16
from gccompress.layers import ANGLE_COUNTS, MATCHED, NO_SCALES, Way, seed_of, take_apart
from gccompress.roles import READS_RESIDUAL, Role
from gccompress.shards import open_stream

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "8b": Shapes(hidden=4096, inner=14336, keys=1024),
    "70b": Shapes(hidden=8192, inner=28672, keys=1024),
    "layers": Shapes(hidden=1024, inner=2816, keys=1024),
}
LAYERS = {"8b": 4, "70b": 2, "layers": 32}


@dataclass(frozen=True)
class InMemory:
    """A `WeightSource` over tensors: what is timed is then arithmetic alone."""

    spec: ArchSpec
    weights: dict[Role, list[Tensor]]
    scales: dict[Role, list[Tensor | None]]

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles."""
        return tuple(self.weights)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.weights[Role.Q])

    def shape(self, role: Role, layer: int) -> tuple[int, int]:
        """Return `(out, in)`."""
        rows, columns = self.weights[role][layer].shape
        return rows, columns

    def weight(self, role: Role, layer: int) -> Tensor:
        """Return the weight."""
        return self.weights[role][layer]

    def in_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the scale of the norm before it."""
        return self.scales[role][layer]

    def out_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return None: a Llama has no norm there."""
        del role, layer


def smollm2() -> dict[str, Any]:
    """Compare with torch's SVD, at one thread and at all."""
    stream = open_stream("smollm2-135m")
    layers = range(stream.num_layers)
    source = InMemory(
        stream.spec,
        {role: [stream.weight(role, i) for i in layers] for role in stream.roles},
        {role: [stream.in_scale(role, i) for i in layers] for role in stream.roles},
    )
    result: dict[str, Any] = {"matrices": len(stream.roles) * stream.num_layers, "threads": {}}
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        result["threads"][str(count)] = _against_svd(source, compared=count == threads)
    torch.set_num_threads(threads)
    started = time.perf_counter()
    analyze("smollm2-135m", progress=False)
    result["from_disk_seconds"] = time.perf_counter() - started
    return result


def _against_svd(source: InMemory, *, compared: bool) -> dict[str, Any]:
    matrices = [(role, i) for role in source.roles for i in range(source.num_layers)]
    leading = _seconds(lambda: _leading_only(source, matrices), 3)
    raw = _seconds(lambda: sweep_in_memory(source, folded=False), 3)
    folded = _seconds(lambda: sweep_in_memory(source, folded=True), 3)
    decomposed: dict[tuple[Role, int], tuple[Tensor, Tensor, Tensor]] = {}
    started = time.perf_counter()
    for role, i in matrices:
        left, values, right = torch.linalg.svd(source.weight(role, i), full_matrices=False)
        decomposed[role, i] = (left[:, :MATCHED].clone(), values, right[:MATCHED].T.clone())
    svd = time.perf_counter() - started
    return {
        "svd_seconds": svd,
        "leading_seconds": leading,
        "raw_seconds": raw,
        "folded_seconds": folded,
        "leading_ratio": svd / leading,
        "raw_ratio": svd / raw,
        "folded_ratio": svd / folded,
        "differences": _differences(sweep_in_memory(source, folded=False), decomposed, source)
        if compared
        else None,
    }


def sweep_in_memory(source: InMemory, *, folded: bool) -> dict[Role, Any]:
    """Run the analyzer's sweep on tensors."""
    from gccompress.all_pairs import Kept, Settings, sweep

    return sweep(source, Settings(folded=folded), Kept(None), progress=False)


def _leading_only(source: InMemory, matrices: list[tuple[Role, int]]) -> None:
    """Do what the SVD is there for: the leading 32 directions of every matrix."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool:
        tasks = [
            pool.submit(take_apart, source.weight(*key), NO_SCALES, Way.GRAM, seed=seed_of(*key))
            for key in matrices
        ]
        for task in tasks:
            task.result()
    torch.set_num_threads(threads)


def _seconds(call: Callable[[], object], times: int) -> float:
    """Return the best of several runs."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken)


def _differences(
    pairs: dict[Role, Any], svd: dict[tuple[Role, int], Any], source: InMemory
) -> dict[str, dict[str, float]]:
    """Return the largest differences to the SVD, of a pair and of a role's mean."""
    names = ["v1", "u1", *(f"angles_in_{k}" for k in ANGLE_COUNTS),
             *(f"angles_out_{k}" for k in ANGLE_COUNTS), "gram_in", "gram_out"]  # fmt: skip
    found = {name: {"pair": 0.0, "mean": 0.0} for name in names}
    for role in source.roles:
        rows = []
        for i, (pair, *_) in enumerate(pairs[role]):
            if not pair.degenerate:
                measured = (pair.v1, pair.u1, *pair.angles_in, *pair.angles_out, pair.gram_in,
                            pair.gram_out)  # fmt: skip
                wanted = _by_svd(svd[role, i], svd[role, i + 1], source, role, i)
                rows.append([a - b for a, b in zip(measured, wanted, strict=True)])
        for name, column in zip(names, zip(*rows, strict=True), strict=True):
            entry = found[name]
            entry["pair"] = max(entry["pair"], *(abs(value) for value in column))
            entry["mean"] = max(entry["mean"], abs(sum(column)) / len(column))
    return found


def _by_svd(first: Any, second: Any, source: InMemory, role: Role, i: int) -> tuple[float, ...]:
    """Return the measures of a pair from the SVDs of its weights, and the products for Gram."""
    left, _, right = first
    left2, _, right2 = second
    a, b = source.weight(role, i), source.weight(role, i + 1)
    angles = [
        spectra.mean_angle_cosine(x, y, k)
        for x, y in ((right, right2), (left, left2))
        for k in ANGLE_COUNTS
    ]
    grams = (spectra.gram_alignment(a, b), spectra.gram_alignment(a.T, b.T))
    widths = (a.shape[1], a.shape[0])
    values = (
        spectra.leading_cosine(right, right2),
        spectra.leading_cosine(left, left2),
        *angles,
        *(None if x is None else x * n for x, n in zip(grams, widths, strict=True)),
    )
    return tuple(float("nan") if value is None else value for value in values)


def on_disk(name: str, folder: Path) -> dict[str, Any]:
    """Measure a model written to disk: time beside reading and converting, memory, correctness."""
    shapes, layers = SHAPES[name], LAYERS[name]
    model = write_model(folder / name, shapes, layers)
    runs: dict[str, list[dict[str, Any]]] = {}
    for _ in range(2):
        for cache in ("warm", "cold"):
            for job in ("read", "analyze", "analyze-raw"):
                _page_cache(model, cache == "warm")
                runs.setdefault(f"{job} {cache}", []).append(_job(job, model))
    best = {key: min(rows, key=lambda row: row["seconds"]) for key, rows in runs.items()}
    reports = {key: row.pop("report", None) for key, row in best.items()}
    report = ContinuityReport.model_validate(reports["analyze warm"])
    result = {
        "layers": layers,
        "bytes": 2 * shapes.layer_params * layers,
        "runs": best,
        "peak_bytes": max(row["peak_bytes"] for row in best.values()),
        "planted": _planted(report, shapes),
    }
    for cache in ("warm", "cold"):
        read = best[f"read {cache}"]["seconds"]
        result[f"ratio_{cache}"] = best[f"analyze {cache}"]["seconds"] / read
        result[f"ratio_raw_{cache}"] = best[f"analyze-raw {cache}"]["seconds"] / read
    shutil.rmtree(model)
    return result


def _planted(report: ContinuityReport, shapes: Shapes) -> dict[str, dict[str, float]]:
    """Return per role the planted and the measured cosine, and the largest difference."""
    found = {}
    for role, row in report.roles.items():
        values = row.v1 if role in READS_RESIDUAL else row.u1
        wanted = expected_cosine(shapes, role)
        known = [value for value in values if value is not None]
        found[role.value] = {
            "planted": wanted,
            "measured": sum(known) / len(known),
            "largest_difference": max(abs(value - wanted) for value in known),
            "gram_in": row.gram_in_mean or 0.0,
            "gram_in_error": row.gram_in_mean_error or 0.0,
        }
    return found


def linear(folder: Path) -> dict[str, Any]:
    """Measure 4, 8, 16 and 32 layers of one model."""
    shapes = SHAPES["layers"]
    whole = write_model(folder / "layers", shapes, LAYERS["layers"])
    seconds = {}
    for count in (4, 8, 16, 32):
        part = folder / f"layers-{count}"
        part.mkdir()
        for i in range(count):
            (part / f"layer-{i:02}.safetensors").symlink_to(whole / f"layer-{i:02}.safetensors")
        describe(part, shapes, count)
        seconds[str(count)] = min(_job("analyze", part)["seconds"] for _ in range(4))
        shutil.rmtree(part)
    shutil.rmtree(whole)
    return {"seconds": seconds, "per_layer": {k: v / int(k) for k, v in seconds.items()}}


def _page_cache(model: Path, warm: bool) -> None:
    """Put the files into the page cache, or out of it."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            if warm:
                while stream.read(1 << 24):
                    pass
            else:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _job(job: str, model: Path) -> dict[str, Any]:
    """Run one job in a process of its own."""
    command = [sys.executable, __file__, "--job", job, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def run_job(job: str, model: Path) -> None:
    """Do what `_job` asked for; memory is counted above what the imports took."""
    import transformers  # noqa: F401  (its import is no part of the measurement)

    def peak() -> int:
        # Not ru_maxrss: a child's starts at that of the process that forked it.
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    stream = open_stream(model)
    torch.randn(64, 64) @ torch.randn(64, 64)
    before = peak()
    started = time.perf_counter()
    row: dict[str, Any] = {}
    if job == "read":
        for role in stream.roles:
            for layer in range(stream.num_layers):
                stream.weight(role, layer).to(torch.float32)
        row["seconds"] = time.perf_counter() - started
    else:
        with tempfile.TemporaryDirectory() as cache:
            report = analyze(
                open_stream(model, cache_dir=cache),
                folded=job == "analyze",
                progress=False,
                cache_dir=cache,
            )
        row = {"seconds": report.seconds, "report": json.loads(report.to_json())}
        row["with_hash_seconds"] = time.perf_counter() - started
    row["peak_bytes"] = peak() - before
    sys.stdout.write(json.dumps(row) + "\n")


def main() -> None:
    """Run what is asked for and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--temporary", type=Path, default=None)
    parser.add_argument("--only", default="smollm2,8b,70b,layers")
    parser.add_argument("--job", default=None, help=argparse.SUPPRESS)
    parser.add_argument("model", type=Path, nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_job(arguments.job, arguments.model)
        return
    file = RESULTS / "analyze.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.only.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.temporary) as folder:
            results[name] = (
                smollm2() if name == "smollm2"
                else linear(Path(folder)) if name == "layers"
                else on_disk(name, Path(folder))
            )  # fmt: skip
        results[name]["load_average"] = os.getloadavg()[0]
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "bf16_units": multiplies_bf16(torch.device("cpu")),
    }
    write_text(file, json.dumps(results, indent=1) + "\n")
    write_text(RESULTS / "analyze.md", describe_results(results))


def describe_results(results: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# gccompress analyze: speed, memory, correctness", ""]
    machine = results["machine"]
    lines += ["    python benchmarks/analyze.py", ""]
    lines += [
        f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, "
        f"{'with' if machine['bf16_units'] else 'without'} matrix units for bf16 (AMX).",
        "",
    ]
    if "smollm2" in results:
        lines += _smollm2_lines(results["smollm2"])
    for name in ("8b", "70b"):
        if name in results:
            lines += _disk_lines(name, results[name])
    if "layers" in results:
        lines += _layer_lines(results["layers"])
    return "\n".join(lines) + "\n"


def _smollm2_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"## SmolLM2-135M: {result['matrices']} matrices", "",
        "Times of the SVD (`torch.linalg.svd(full_matrices=False)`, fp32) as multiples of ours.",
        f"Load average of the machine at the end: {result['load_average']:.1f}. Where other "
        "processes took part of the processors, the SVD with several threads waits for the slowest "
        "of them at every step; only the row of one thread is then a fair comparison.", "",
        "| threads | SVD, s | 32 leading directions of all | + Gram, all pairs | + folded |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for count, row in result["threads"].items():
        cells = [
            f"{row[f'{k}_seconds']:.2f} s, {row[f'{k}_ratio']:.1f} x"
            for k in ("leading", "raw", "folded")
        ]
        lines.append(f"| {count} | {row['svd_seconds']:.1f} | {' | '.join(cells)} |")
    lines += ["", f"From the GGUF file, folded, with hashing: {result['from_disk_seconds']:.1f} s.",
              "", "Largest difference to the SVD (Gram: to the fp64 products):", "",
              "| measure | of a pair | of a role's mean |", "|---|---|---|"]  # fmt: skip
    differences = list(result["threads"].values())[-1]["differences"]
    for name, row in differences.items():
        lines.append(f"| {name} | {row['pair']:.1e} | {row['mean']:.1e} |")
    return [*lines, ""]


def _disk_lines(name: str, result: dict[str, Any]) -> list[str]:
    shapes = SHAPES[name]
    largest = working_bytes((shapes.hidden, shapes.inner), 2) / 1e9
    lines = [
        f"## {name.upper()} shapes: {shapes.hidden} x {shapes.inner}, {result['layers']} layers, "
        f"{result['bytes'] / 1e9:.1f} GB of bf16", "",
        f"Peak memory above the interpreter's: {result['peak_bytes'] / 1e9:.2f} GB "
        f"(formula: {largest:.2f} GB for the largest weight, per worker). "
        f"Load average: {result['load_average']:.1f}.", "",
        "| page cache | read and convert | raw | raw and folded | with hashing |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for cache in ("warm", "cold"):
        runs = result["runs"]
        both = runs[f"analyze {cache}"]
        lines.append(
            f"| {cache} | {runs[f'read {cache}']['seconds']:.2f} s "
            f"| {runs[f'analyze-raw {cache}']['seconds']:.2f} s, "
            f"{result[f'ratio_raw_{cache}']:.1f} x | {both['seconds']:.2f} s, "
            f"{result[f'ratio_{cache}']:.1f} x | {both['with_hash_seconds']:.2f} s |"
        )
    lines += ["", "| role | planted cosine, after noise | measured | largest difference "
              "| Gram, input |", "|---|---|---|---|---|"]  # fmt: skip
    for role, row in result["planted"].items():
        lines.append(
            f"| {role} | {row['planted']:.4f} | {row['measured']:.4f} "
            f"| {row['largest_difference']:.4f} | {row['gram_in']:.2f} +- "
            f"{row['gram_in_error']:.2f} |"
        )
    return [*lines, ""]


def _layer_lines(result: dict[str, Any]) -> list[str]:
    lines = [f"## Time against layers (1024 x 2816, load {result['load_average']:.1f})", ""]
    lines += ["| layers | s | s per layer |", "|---|---|---|"]
    for count, seconds in result["seconds"].items():
        lines.append(f"| {count} | {seconds:.2f} | {result['per_layer'][count]:.3f} |")
    return [*lines, ""]


if __name__ == "__main__":
    assert set(MODULES) == set(Role)
    main()
