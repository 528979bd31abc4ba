"""What polishing on the calibration text alone is worth, and how much it over-fits.

    python benchmarks/polish.py --data ../shared/data

Model, texts and score are those of benchmarks/quality.py: smollm2-135m, 28 of the 32 calibration
windows of 512 tokens for moments and training, 4 held out to choose the state that is kept, 24 test
windows in fp32. Plans are the planner's `auto` of the day. "Next" is the KL to the dense model on
the 24 windows of the calibration text after those 32: seen by no step and no choice of state, it is
what the options' defaults were chosen by; the test text was not looked at for that. Finished rows
are lines of the results' JSON lines and skipped; closed forms are kept in the cache.
"""

import argparse
import json
import lzma
import math
import platform
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gccompress.apply import compress
from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.checkpoints import load_checkpoint, save_checkpoint
from gccompress.files import cache_folder, new_folder, write_text
from gccompress.models import open_model
from gccompress.moments import Fisher
from gccompress.plan import Plan
from gccompress.planner import PlanOptions, budget_of, choose
from gccompress.polish import PolishOptions, polish, replaced_parameters
from gccompress.scores import score_windows
from gccompress.text import Windows, cut_windows
from gccompress.view import ModelView

TRAINED, HELDOUT, NEXT, TEST, SEQLEN = 28, 4, 24, 24, 512


class Bench:
    """The dense model, the protocol's windows, and the closed forms made so far."""

    def __init__(self, data: Path, cache: Path) -> None:
        """Load the model and cut the texts."""
        self.cache = cache
        self.loaded = self.open()
        self.text = data / "protocol/calibration.txt.xz"
        text = self.windows(self.text, TRAINED + HELDOUT + NEXT)
        self.next = text.slice(TRAINED + HELDOUT, len(text))
        self.test = self.windows(data / "protocol/test.txt.xz", TEST)
        self.calibration = CalibrationOptions(
            str(self.text), TRAINED * SEQLEN, SEQLEN, HELDOUT * SEQLEN, 0, Fisher(True, 1)
        )
        view = ModelView(self.loaded.model)
        self.calibrated = calibrate(self.loaded, view, self.calibration, cache)

    def open(self) -> Any:
        """Return the dense model, which compressing would change."""
        return open_model("smollm2-135m", dtype=torch.float32, cache_dir=str(self.cache))

    def windows(self, path: Path, count: int) -> Windows:
        """Return the first windows of a protocol text, tokenised whole, no special tokens."""
        text = lzma.open(path, "rt", encoding="utf-8").read()
        return cut_windows(text, self.loaded.tokenizer, SEQLEN, count, source=path.name)

    def closed_form(self, keep: float, replan: bool) -> Path:
        """Return the checkpoint of the planner's `auto` without polish, made unless it is there."""
        folder = self.cache / "polish" / f"closed-{keep}"
        if replan:
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            return folder
        dense, cache = self.open(), str(self.cache)
        plan = choose(
            dense,
            budget_of(keep, None),
            options=PlanOptions(spaces="paper"),
            calibration=self.calibration,
            cache_dir=cache,
        ).plan
        model, _ = compress(ModelView(dense.model), self.calibrated.moments, plan)
        with new_folder(folder) as made:
            save_checkpoint(model, dense.tokenizer, made, extra_files={"plan.yaml": plan.to_yaml()})
        return folder

    def scores(self, model: Any) -> dict[str, float]:
        """Return the test perplexity (fp32) and the KL on the next windows (bf16)."""
        test = float(score_windows(model, self.test).nll.mean())
        with torch.autocast("cpu", torch.bfloat16):
            after = score_windows(model, self.next, baseline=self.loaded.model).kl
        assert after is not None
        return {"test": math.exp(test), "next": float(after.mean())}


def row(bench: Bench, keep: float, options: PolishOptions, replan: bool) -> dict[str, Any]:
    """Polish one closed form and score it before and after."""
    folder = bench.closed_form(keep, replan)
    plan = Plan.load(folder / "plan.yaml")
    model = load_checkpoint(folder, dtype=torch.float32)
    before = bench.scores(model)
    done = polish(
        model,
        bench.loaded.model,
        replaced_parameters(model, bench.loaded.model),
        windows=bench.calibrated.windows,
        heldout=bench.calibrated.heldout,
        options=options,
    )
    return {
        "keep": keep,
        "kept": plan.prediction.params_kept,
        "options": asdict(options),
        "before": before,
        "after": bench.scores(model),
        "polished": asdict(done),
    }


def markdown(rows: list[dict[str, Any]], command: str) -> str:
    """Return the results as a Markdown page."""
    lines = [
        "# Polishing on the calibration text alone, SmolLM2-135M",
        "",
        f"`{command}`",
        "",
        "torch {}, transformers {}, {}, {} threads. Dense: 25.88.".format(
            version("torch"), version("transformers"), platform.machine(), torch.get_num_threads()
        ),
        "",
        "KL to the dense model in nats per token, before -> after: on as many windows of the text "
        "trained on as are held out (4), on the held-out windows that choose the state, and on 24 "
        "further windows of the calibration text. The gap between the first and the others is the "
        "over-fit: most of it is the closed form's own, whose moments are of the same tokens.",
        "",
        "| keep | closed form | polished | KL trained on | KL held out | KL further windows "
        "| best step | minutes | steps x windows, rate, noise |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(rows, key=lambda one: (-one["keep"], one["after"]["test"])):
        before, after, done = one["before"], one["after"], one["polished"]
        made = "{steps} x {windows}, {rate:g}, {noise:g}".format(**one["options"])
        lines.append(
            f"| {one['keep']} | {before['test']:.2f} | {after['test']:.2f} "
            f"| {done['train_before']:.3f} -> {done['train_after']:.3f} "
            f"| {done['before']:.3f} -> {done['after']:.3f} "
            f"| {before['next']:.3f} -> {after['next']:.3f} "
            f"| {done['best_step']} | {done['seconds'] / 60:.1f} | {made} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the rows that are missing and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/polish.md"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.8, 0.9, 0.6, 0.5, 0.7])
    parser.add_argument("--replan", action="store_true", help="do not use kept closed forms")
    for name, kind in (("steps", int), ("windows", int), ("rate", float), ("noise", float)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(PolishOptions(), name))
    asked = parser.parse_args()
    options = PolishOptions(
        steps=asked.steps, windows=asked.windows, rate=asked.rate, noise=asked.noise
    )
    kept = asked.out.with_suffix(".jsonl")
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    bench = Bench(asked.data, cache_folder(asked.cache_dir))
    for keep in asked.keep:
        if any(one["keep"] == keep and one["options"] == asdict(options) for one in rows):
            continue
        rows.append(row(bench, keep, options, asked.replan))
        print(json.dumps(rows[-1]), flush=True)
        write_text(kept, "".join(json.dumps(one) + "\n" for one in rows))
        write_text(asked.out, markdown(rows, f"python benchmarks/polish.py --data {asked.data}"))


if __name__ == "__main__":
    main()
