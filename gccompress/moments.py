"""Token windows through the model once -> moments on disk: G and A of every projection.

`G = E[x x^T]` of each projection's input, `A = E[g g^T]` of the gradient of the summed NLL at its
output, per token (empirical Fisher for the text's own labels, true Fisher for sampled ones: K-FAC).
"""

import hashlib
import json
import logging
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gccompress import halves, processes
from gccompress.errors import GccompressError, NumericalError
from gccompress.files import new_folder, write_text
from gccompress.gradients import (
    Fisher,
    accumulating,
    add_gradients,
    input_key,
    moment_widths,
)
from gccompress.linalg import Damping, Weighted, shrink
from gccompress.progress import track
from gccompress.roles import Role
from gccompress.text import Windows
from gccompress.view import ModelView

__all__ = ["Fisher", "Moments", "collect_moments", "find_moments", "moments_hash", "weighted"]

logger = logging.getLogger(__name__)

MOMENTS_VERSION = 1
SAVE_EVERY_SECONDS = 120.0
CPU_MEMORY = 6 * 2**30  # bytes of accumulators: three layers of an 8B model at a time


@dataclass(frozen=True)
class LayerInfluence:
    """What a decoder layer does to the residual stream, averaged over tokens.

    Attributes:
        influence: `1 - cos(h_in, h_out)`, from the layer's true output (ShortGPT).
        drop_loss: `1/2 E[(g . (h_out - h_in))^2]`, nats per token: dropping it, second order.
    """

    influence: float
    drop_loss: float


class Moments:
    """Moments of one calibration, read from disk one matrix at a time."""

    def __init__(self, folder: Path) -> None:
        """Open a finished folder. Raises `GccompressError` when it is not one."""
        self.folder = folder
        try:
            self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
            self.hash: str = self.meta["hash"]
            self.tokens: int = self.meta["tokens"]
            self.influence = tuple(LayerInfluence(**one) for one in self.meta["layers"])
            # Older ones do not say; then nothing is known to be silent.
            self._silent: list[dict[str, int]] = self.meta.get("silent", [])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GccompressError(
                f"{folder}: not finished moments ({error}); delete it and calibrate again"
            ) from error

    def g(self, role: Role, layer: int) -> Tensor:
        """Return the input moment `[in, in]`, float64."""
        return self._read(f"g.{input_key(role)}", layer).div_(self.tokens)

    def a(self, role: Role, layer: int) -> Tensor:
        """Return the output gradient's moment `[out, out]`, float64."""
        return self._read(f"a.{role.value}", layer).div_(self.tokens * self.meta["labels"])

    def silent(self, role: Role) -> tuple[int, int]:
        """Return how many inputs of a role were zero on all tokens, and in how many layers."""
        counts = [layer.get(f"g.{input_key(role)}", 0) for layer in self._silent]
        return sum(counts), sum(count > 0 for count in counts)

    def _read(self, key: str, layer: int) -> Tensor:
        path = self.folder / _layer_file(layer)
        try:
            with safe_open(path, framework="pt") as file:
                packed = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise GccompressError(
                f"{path}: moment {key} cannot be read ({error}); delete {self.folder} "
                "and calibrate again"
            ) from error
        return halves.unpacked(packed)

    def check(self) -> None:
        """Raise `GccompressError` for a layer's file that is missing, cut off or not one."""
        names: set[str] = set()
        for layer in range(len(self.influence)):
            path = self.folder / _layer_file(layer)
            try:
                with safe_open(path, framework="pt") as file:  # compares lengths, reads no moment
                    found = set(file.keys())
            except (OSError, SafetensorError) as error:
                raise GccompressError(f"{path}: damaged ({error})") from error
            names = names or found
            if found != names or not found:
                raise GccompressError(f"{path}: other moments than in {_layer_file(0)}")


def _layer_file(layer: int) -> str:
    return f"layer_{layer:03d}.safetensors"


def weighted(
    view: ModelView, moments: Moments, role: Role, layer: int, damping: Damping
) -> Weighted:
    """Return one matrix with its damped moments, float64, on the model's device."""
    weight = view.weight(role, layer)
    return Weighted(
        weight.double(),
        shrink(moments.g(role, layer).to(weight.device), damping.g),
        shrink(moments.a(role, layer).to(weight.device), damping.a),
    )


def moments_hash(model_hash: str, windows: Windows, fisher: Fisher, seed: int, dtype: str) -> str:
    """Return the identity of a calibration: model, tokens and how moments are estimated."""
    what = [MOMENTS_VERSION, model_hash, windows.hash, str(fisher), seed, dtype]
    return "sha256:" + hashlib.sha256(json.dumps(what).encode()).hexdigest()


def find_moments(calibration_hash: str, cache: Path) -> Moments | None:
    """Return finished moments of this hash from the cache folder, or None.

    Damaged ones are removed, which a warning says, so that they are made again.
    """
    folder = _folder(calibration_hash, cache)
    if not (folder / "meta.json").exists():
        return None
    try:
        moments = Moments(folder)
        moments.check()
    except GccompressError as error:
        logger.warning("cached moments are removed, to be made again: %s", error)
        try:
            shutil.rmtree(folder)
        except OSError as refused:
            raise GccompressError(
                f"{folder}: damaged moments that cannot be removed ({refused.strerror}); delete "
                "them, or name another --cache-dir"
            ) from refused
        return None
    return moments if moments.hash == calibration_hash else None


def _folder(calibration_hash: str, cache: Path) -> Path:
    return cache / "moments" / calibration_hash.removeprefix("sha256:")[:32]


def collect_moments(
    view: ModelView,
    windows: Windows,
    *,
    model_hash: str,
    cache: Path,
    fisher: Fisher = Fisher(),  # noqa: B008 - frozen
    seed: int = 0,
    memory: int | None = None,
) -> Moments:
    """Run the windows through the model and return their moments, from the cache if there.

    Args:
        view: the dense model, on the device that shall do the work.
        windows: `ids [n, seqlen]`.
        model_hash: content hash of the model; part of the cache key.
        cache: cache folder; the moments take about `sum(in^2 + out^2) * 2` bytes per layer there.
        fisher: how A is estimated.
        seed: of the labels sampled from the model.
        memory: bytes that accumulators may take; more layers than fit are done in several passes.
            None is `CPU_MEMORY`, or half of what a GPU has free.

    Processes that have joined (`processes`) divide the windows; the main one alone writes. Sums
    then differ by the rounding of another order, labels are the same. The folder must be one that
    all of them see.

    Raises:
        NumericalError: a non-finite loss, naming the window.
    """
    dtype = str(view.model.dtype).removeprefix("torch.")
    calibration_hash = moments_hash(model_hash, windows, fisher, seed, dtype)
    out = _folder(calibration_hash, cache)
    main = processes.current().main
    try:
        if not processes.from_main(main and find_moments(calibration_hash, cache) is not None):
            out.parent.mkdir(parents=True, exist_ok=True)
            # Two runs that want the same moments: the second waits, and finds them.
            with FileLock(out.with_suffix(".lock")) if main else nullcontext():
                there = main and find_moments(calibration_hash, cache) is not None
                if not processes.from_main(there):
                    run = _Run(view, windows, fisher, seed, out.with_suffix(".partial"))
                    run.all_passes(_room(view.model.device) if memory is None else memory)
                    if main:
                        run.finish(calibration_hash, out)
            processes.from_main(True)  # the others wait until the folder is there
    except (OSError, SafetensorError) as error:
        raise GccompressError(f"cannot write moments to {out}: {error}") from error
    return Moments(out)


@dataclass(frozen=True)
class _Run:
    """One calibration on its way into the folder `partial`."""

    view: ModelView
    windows: Windows
    fisher: Fisher
    seed: int
    partial: Path

    def all_passes(self, memory: int) -> None:
        """Leave a finished file of every layer in `partial`, as many at a time as fit."""
        layers = self.view.num_layers
        per_pass = max(1, memory // _layer_bytes(self.view))
        firsts = range(0, layers, per_pass)
        for number, first in enumerate(firsts):
            which = f"{number + 1}/{len(firsts)}"
            self.one_pass(range(first, min(first + per_pass, layers)), which)

    def one_pass(self, layers: range, which: str) -> None:
        """Sum up the moments of `layers`; interrupted, it goes on from the last saved window."""
        group = processes.current()
        state: dict[str, Tensor] = {}
        start = 0
        if group.main:
            self.partial.mkdir(parents=True, exist_ok=True)
            if all((self.partial / f"layer_{layer:03d}.json").exists() for layer in layers):
                start = len(self.windows)
            else:
                state, start = _load_state(self.partial, layers, self.view.model.device)
        start = processes.from_main(start)
        if start == len(self.windows):
            return
        saved = time.monotonic()
        rounds = range(start, len(self.windows), group.count)  # a window for every process
        shown = track(rounds, f"Calibrating, pass {which} (windows)") if group.main else rounds
        with accumulating(self.view, layers, state):
            for first in shown:
                self._add_window(first + group.rank)
                done = first + group.count
                late = time.monotonic() - saved > SAVE_EVERY_SECONDS
                if done < len(self.windows) and processes.from_main(late):
                    processes.sum_to_main(state)
                    if group.main:
                        _save_state(self.partial, state, done, layers)
                    saved = time.monotonic()
        processes.sum_to_main(state)
        if group.main:
            self._write_layers(layers, state)

    def _add_window(self, index: int) -> None:
        """Add one window's moments, if there is such a window; all processes fail together."""
        failure: NumericalError | None = None
        if index < len(self.windows):
            ids = self.windows.ids[index : index + 1].to(self.view.model.device)
            try:
                add_gradients(self.view.model, ids, self.fisher, self.seed + index, index)
            except NumericalError as error:
                failure = error
        failed = processes.largest(-1 if failure is None else index)
        if failed >= 0:
            raise failure or NumericalError(
                f"calibration window {failed}: loss is not finite, in another process; try --dtype "
                "float32 or other text"
            )

    def _write_layers(self, layers: range, state: dict[str, Tensor]) -> None:
        tokens, labels = self.windows.ids.numel(), self.fisher.draws + self.fisher.data
        for layer in layers:
            widths = moment_widths(self.view, layer)
            half = {key: halves.packed(state[f"{layer}.{key}"], n) for key, n in widths.items()}
            save_file(half, self.partial / _layer_file(layer))
            drop, influence = (float(state[f"{layer}.{key}"]) for key in ("drop", "influence"))
            one = {"influence": influence / tokens, "drop_loss": 0.5 * drop / (tokens * labels)}
            silent = {key: int((halves.diagonal(h) == 0).sum()) for key, h in half.items()}
            text = json.dumps({"influence": one, "silent": silent})
            write_text(self.partial / f"layer_{layer:03d}.json", text)  # it says that both are
        for folder in self.partial.glob("sums-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def finish(self, calibration_hash: str, out: Path) -> None:
        """Make `partial` the folder `out` of finished moments."""
        layers = [
            json.loads((self.partial / f"layer_{layer:03d}.json").read_text("utf-8"))
            for layer in range(self.view.num_layers)
        ]
        meta = {
            "version": MOMENTS_VERSION,
            "hash": calibration_hash,
            "tokens": self.windows.ids.numel(),
            "labels": self.fisher.draws + self.fisher.data,
            "layers": [layer["influence"] for layer in layers],
            "silent": [layer["silent"] for layer in layers],
        }
        (self.partial / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
        if out.exists():  # left by something else than this class
            shutil.rmtree(out)
        self.partial.rename(out)


def _room(device: torch.device) -> int:
    """Return the bytes that accumulators may take on a device; all processes get the same."""
    if device.type == "cpu":
        return CPU_MEMORY
    free, _ = torch.cuda.mem_get_info(device)
    return processes.from_main(free // 2)


def _layer_bytes(view: ModelView) -> int:
    """Return the bytes of one layer's accumulators."""
    return sum(halves.sum_bytes(width) for width in moment_widths(view, 0).values())


def _save_state(partial: Path, state: dict[str, Tensor], done: int, layers: range) -> None:
    """Save the sums, then remove older ones: a kill at any moment leaves a whole set."""
    older = list(partial.glob("sums-*"))
    with new_folder(partial / f"{_sums(layers)}-{done:08d}") as temporary:
        save_file(
            {key: value.cpu() for key, value in state.items()}, temporary / "sums.safetensors"
        )
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)


def _load_state(
    partial: Path, layers: range, device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """Return the newest saved sums of this pass and how many windows are in them."""
    folders = sorted(partial.glob(f"{_sums(layers)}-*"))
    if not folders:
        return {}, 0
    path = folders[-1] / "sums.safetensors"
    try:
        state = load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        logger.warning("%s: damaged (%s); this pass starts over", path, error)
        shutil.rmtree(folders[-1])
        return {}, 0
    done = int(folders[-1].name.rpartition("-")[2])
    logger.info("resuming calibration after window %d", done)
    return state, done


def _sums(layers: range) -> str:
    """Return how names of saved sums begin; a pass of other layers does not go on from them."""
    return f"sums-{layers[0]:04d}-{layers[-1]:04d}"
