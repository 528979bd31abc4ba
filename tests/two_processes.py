"""What tests/test_processes.py runs in two processes: scenarios of one calibration, in turn."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from gccompress import moments as module
from gccompress import processes
from gccompress.errors import GccompressError
from gccompress.moments import Fisher, Moments, collect_moments
from gccompress.text import Windows
from gccompress.view import ModelView
from tests.tiny import VOCAB, tiny_model

FISHER = Fisher(True, 2)


def windows() -> Windows:
    """Return five windows: an odd number, so that one process has one less."""
    ids = torch.randint(3, VOCAB, (5, 12), generator=torch.Generator().manual_seed(1))
    return Windows.of(ids, "random")


def collect(cache: Path, **options: Any) -> Moments:
    """Return moments of a tiny model, divided between the processes that have joined."""
    view = ModelView(tiny_model("llama", layers=3))
    return collect_moments(
        view, windows(), model_hash="sha256:x", cache=cache, fisher=FISHER, **options
    )


def interrupt_after(calls: int) -> None:
    """Let a calibration die in its `calls + 1`th window of this process, saving all the way."""
    add_gradients, made = module.add_gradients, 0

    def dies(*args: Any) -> None:
        nonlocal made
        made += 1
        if made > calls:
            raise KeyboardInterrupt
        add_gradients(*args)

    module.add_gradients = dies  # type: ignore[assignment]
    module.SAVE_EVERY_SECONDS = -1.0


def main(folder: Path) -> None:
    """Leave what each process found in `rank-N.json`."""
    process = processes.join("cpu")
    calls: list[int] = []
    add_gradients = module.add_gradients

    def counted(*args: Any) -> None:
        calls.append(args[-1])
        add_gradients(*args)

    module.add_gradients = counted  # type: ignore[assignment]
    found: dict[str, Any] = {"count": process.count, "rank": process.rank}
    collect(folder / "whole")
    found["whole"] = sorted(calls)
    calls.clear()
    collect(folder / "passes", memory=1)
    found["passes"] = sorted(calls)
    calls.clear()
    collect(folder / "begun by one")
    found["begun by one"] = sorted(calls)
    model = tiny_model("llama", layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[int(windows().ids[1, 3])] = float("inf")
    try:
        collect_moments(
            ModelView(model), windows(), model_hash="sha256:y", cache=folder, fisher=FISHER
        )
    except GccompressError as error:
        found["not finite"] = str(error)
    interrupt_after(1)
    try:
        collect(folder / "begun by two")
    except KeyboardInterrupt:
        found["interrupted"] = True
    (folder / f"rank-{process.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
