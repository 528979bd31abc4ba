"""The rows of benchmarks/quality.py at keep 0.8 on three small models of other families.

    python benchmarks/tiny_quality.py --cache-dir FOLDER [--data ../shared/data] [--only tiny-llama]

Models: benchmarks/tiny_models.py. As many tokens of the same texts as there, in windows of 256.
Finished rows are kept in FOLDER and skipped.
"""

import argparse
import json
import math
import platform
from importlib.metadata import version
from pathlib import Path

import quality
import torch
from tiny_models import MULTIPLE, SEQLEN, TINY, open_tiny

from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.files import cache_folder, write_text
from gccompress.linalg import round_to_nearest
from gccompress.moments import Fisher
from gccompress.planner import PlanOptions, budget_of, choose
from gccompress.planner.probe import window_losses
from gccompress.planner.survey import QUANTIZED_BITS, QUANTIZED_GROUP
from gccompress.text import Windows, load_windows
from gccompress.view import ModelView, model_shape

KEEP = 0.8
CALIBRATION_TOKENS, HELD_OUT_TOKENS, TEST_TOKENS = 32 * 512, 4 * 512, 24 * 512
PRODUCT = ("auto", "plain", "ranks", "width")


class TinyBench(quality.Bench):
    """One of the small models, its windows and the rows measured so far."""

    def __init__(self, name: str, data: Path, cache: Path) -> None:
        """Load the model and the protocol's texts, and the rows there are."""
        self.cache, self.data = cache, data
        self.loaded = open_tiny(cache, name)
        self.view = ModelView(self.loaded.model)
        self.shape = model_shape(self.view)
        self.calibration = self._text("calibration", CALIBRATION_TOKENS)
        self.test = self._text("test", TEST_TOKENS)
        self.results = cache / "tiny_quality" / f"{name}.json"
        self.rows = json.loads(self.results.read_text()) if self.results.exists() else {}

    def _text(self, name: str, tokens: int) -> Windows:
        path = self.data / f"protocol/{name}.txt.xz"
        return load_windows(path, self.loaded, seqlen=SEQLEN, tokens=tokens)

    def moments(self, fisher, kind=quality.Moments, windows=None):  # type: ignore[no-untyped-def]
        """Return moments of the first calibration windows, all of them by default."""
        return super().moments(fisher, kind, windows or len(self.calibration))


def rounded_rows(bench: TinyBench) -> None:
    """Round every projection to nearest: same shapes, fewer bits."""
    view = bench.view
    matrices = [(role, layer) for role in view.roles for layer in range(view.num_layers)]
    for bits in QUANTIZED_BITS:
        key = f"rtn{bits} @ 1.0"
        if key in bench.rows:
            continue
        originals = [view.weight(role, layer).clone() for role, layer in matrices]
        for (role, layer), weight in zip(matrices, originals, strict=True):
            view.set_weight(role, layer, round_to_nearest(weight, bits, QUANTIZED_GROUP))
        loss = window_losses(view, bench.test).mean().item()
        for (role, layer), weight in zip(matrices, originals, strict=True):
            view.set_weight(role, layer, weight)
        share = (bits + (16 + bits) / QUANTIZED_GROUP) / 16
        name = f"{bits}-bit round to nearest ({share:.2f} of the bytes at 16 bit)"
        row = {"name": name, "keep": 1.0, "kept": 1.0, "predicted": 0.0, "ppl": math.exp(loss)}
        bench.rows[key] = row
        write_text(bench.results, json.dumps(bench.rows, indent=1))


def product_rows(bench: TinyBench) -> None:
    """What `gccompress plan` does: moments of 7/8 of the windows, plans probed on the others."""
    wanted = {strategy: f"product: {strategy}" for strategy in PRODUCT}
    if all(f"{name} @ {KEEP}" in bench.rows for name in wanted.values()):
        return
    calibration = CalibrationOptions(
        str(bench.data / "protocol/calibration.txt.xz"),
        CALIBRATION_TOKENS - HELD_OUT_TOKENS,
        SEQLEN,
        HELD_OUT_TOKENS,
        0,
        Fisher(True, 1),
    )
    options = PlanOptions(spaces="paper", multiple=MULTIPLE, probe="all")
    moments = calibrate(bench.loaded, bench.view, calibration, bench.cache).moments
    choice = choose(
        bench.loaded,
        budget_of(KEEP, None),
        options=options,
        calibration=calibration,
        cache_dir=str(bench.cache),
    )
    for one in choice.candidates:
        if one.strategy in wanted and one.prediction is not None:
            moves = list(one.moves)
            name = wanted[one.strategy]
            bench.row(name, KEEP, moments, lambda moves=moves: moves, options.damping)  # type: ignore[misc]


def measure(name: str, data: Path, cache: Path) -> None:
    """Measure the rows of a model that are missing."""
    bench = TinyBench(name, data, cache)
    bench.row("dense", 1.0, bench.moments(Fisher(True, 0)), list)
    rounded_rows(bench)
    quality.allocated_rows(bench, KEEP)
    quality.uniform_rows(bench, KEEP)
    product_rows(bench)


def markdown(found: dict[str, dict[str, dict[str, float | str]]], command: str) -> str:
    """Return the results as a Markdown page, the least mean rise first."""
    names = list(found)
    dense = {name: float(found[name]["dense @ 1.0"]["ppl"]) for name in names}

    def rises(key: str) -> list[float]:
        return [math.log(float(found[name][key]["ppl"]) / dense[name]) for name in names]

    keys = [key for key in found[names[0]] if all(key in found[name] for name in names)]
    keys.sort(key=lambda key: sum(rises(key)))
    lines = [
        f"# Quality at keep {KEEP}, small models of three families",
        "",
        f"`{command}`",
        "",
        f"torch {version('torch')}, transformers {version('transformers')}, "
        f"{platform.machine()}, {torch.get_num_threads()} threads",
        "",
        "Test perplexity, and the rise over the dense model in nats per token. The models: "
        "`benchmarks/tiny_models.py`.",
        "",
        "| what | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for key in keys:
        shown = [
            f"{float(found[name][key]['ppl']):.5g} ({rise:+.3f})"
            for name, rise in zip(names, rises(key), strict=True)
        ]
        lines.append(f"| {found[names[0]][key]['name']} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what is missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tiny_quality.md"))
    parser.add_argument("--only", choices=TINY, action="append")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--fresh", action="store_true", help="measure the product's rows again")
    options = parser.parse_args()
    cache = cache_folder(options.cache_dir)
    files = {name: cache / "tiny_quality" / f"{name}.json" for name in TINY}
    for name in options.only or TINY:
        if options.fresh and files[name].exists():
            rows = json.loads(files[name].read_text())
            kept = {key: row for key, row in rows.items() if not key.startswith("product")}
            write_text(files[name], json.dumps(kept, indent=1))
        measure(name, options.data, cache)
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    command = f"python benchmarks/tiny_quality.py --data {options.data}"
    write_text(options.out, markdown(found, command))
    write_text(options.out.with_suffix(".json"), json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
