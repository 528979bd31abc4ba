"""Token windows through the model once -> moments on disk: G and A of every projection.

`G = E[x x^T]` of each projection's input, `A = E[g g^T]` of the gradient of the summed NLL at its
output, per token (empirical Fisher for the text's own labels, true Fisher for sampled ones: K-FAC).
"""

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gccompress import halves
from gccompress.errors import GccompressError, NumericalError
from gccompress.files import new_folder, write_text
from gccompress.linalg import Damping, Weighted, shrink
from gccompress.progress import track
from gccompress.roles import SAME_INPUT, Role
from gccompress.text import Windows
from gccompress.view import ModelView

logger = logging.getLogger(__name__)

MOMENTS_VERSION = 1
SAVE_EVERY_SECONDS = 120.0


@dataclass(frozen=True)
class Fisher:
    """How the output moments A are estimated.

    Attributes:
        data: use the gradient of the text's own next tokens (empirical Fisher).
        draws: how many times next tokens are sampled from the model as well (true Fisher).
    """

    data: bool = True
    draws: int = 1

    def __str__(self) -> str:
        """Return the form that a plan records, such as `data+1`."""
        return f"{'data' if self.data else 'model'}+{self.draws}"

    @classmethod
    def parse(cls, text: str) -> "Fisher":
        """Return the inverse of `str`. Raises `GccompressError`."""
        source, _, draws = text.partition("+")
        none = source == "model" and draws == "0"
        if source not in ("data", "model") or not draws.isdecimal() or none:
            raise GccompressError(f"Fisher estimate {text!r}; wanted such as data+1 or model+4")
        return cls(source == "data", int(draws))


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
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise GccompressError(
                f"{folder}: not finished moments ({error}); delete it and calibrate again"
            ) from error

    def g(self, role: Role, layer: int) -> Tensor:
        """Return the input moment `[in, in]`, float64."""
        return self._read(f"g.{_input_key(role)}", layer).div_(self.tokens)

    def a(self, role: Role, layer: int) -> Tensor:
        """Return the output gradient's moment `[out, out]`, float64."""
        return self._read(f"a.{role.value}", layer).div_(self.tokens * self.meta["labels"])

    def _read(self, key: str, layer: int) -> Tensor:
        from safetensors import safe_open

        path = self.folder / f"layer_{layer:03d}.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                packed = file.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise GccompressError(
                f"{path}: moment {key} cannot be read ({error}); delete {self.folder} "
                "and calibrate again"
            ) from error
        return halves.unpacked(packed)


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
    """Return finished moments of this hash from the cache folder, or None."""
    folder = cache / "moments" / calibration_hash.removeprefix("sha256:")[:32]
    if not (folder / "meta.json").exists():
        return None
    try:
        moments = Moments(folder)
    except GccompressError as error:
        logger.warning("%s", error)
        return None
    return moments if moments.hash == calibration_hash else None


def collect_moments(
    view: ModelView,
    windows: Windows,
    *,
    model_hash: str,
    cache: Path,
    fisher: Fisher = Fisher(),  # noqa: B008 - frozen
    seed: int = 0,
    memory: int = 6 * 2**30,
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

    Raises:
        NumericalError: a non-finite loss, naming the window.
    """
    dtype = str(view.model.dtype).removeprefix("torch.")
    calibration_hash = moments_hash(model_hash, windows, fisher, seed, dtype)
    found = find_moments(calibration_hash, cache)
    if found is not None:
        return found
    out = cache / "moments" / calibration_hash.removeprefix("sha256:")[:32]
    partial = out.with_suffix(".partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        # Two runs that want the same moments: the second waits, and finds them.
        with FileLock(out.with_suffix(".lock")):
            if find_moments(calibration_hash, cache) is None:
                _collect(view, windows, fisher, seed, memory, calibration_hash, partial, out)
    except (OSError, SafetensorError) as error:
        raise GccompressError(f"cannot write moments to {partial}: {error}") from error
    return Moments(out)


def _collect(
    view: ModelView,
    windows: Windows,
    fisher: Fisher,
    seed: int,
    memory: int,
    calibration_hash: str,
    partial: Path,
    out: Path,
) -> None:
    """Make the folder `out` of finished moments, by way of `partial`."""
    if out.exists():  # damaged, or left by something else than this function
        shutil.rmtree(out)
    partial.mkdir(parents=True, exist_ok=True)
    per_pass = max(1, memory // _layer_bytes(view))
    passes = [
        range(first, min(first + per_pass, view.num_layers))
        for first in range(0, view.num_layers, per_pass)
    ]
    for number, layers in enumerate(passes):
        _one_pass(view, windows, layers, fisher, seed, partial, f"{number + 1}/{len(passes)}")
    influence = [
        json.loads((partial / f"layer_{layer:03d}.json").read_text("utf-8"))
        for layer in range(view.num_layers)
    ]
    meta = {
        "version": MOMENTS_VERSION,
        "hash": calibration_hash,
        "tokens": windows.ids.numel(),
        "labels": fisher.draws + fisher.data,
        "layers": influence,
    }
    (partial / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    partial.rename(out)


def _one_pass(
    view: ModelView,
    windows: Windows,
    layers: Sequence[int],
    fisher: Fisher,
    seed: int,
    partial: Path,
    which: str,
) -> None:
    """Accumulate the moments of `layers`; interrupted, it goes on from the last saved window."""
    if all((partial / f"layer_{layer:03d}.json").exists() for layer in layers):
        return
    state, start = _load_state(partial, layers, view.model.device)
    saved = time.monotonic()
    indices = range(start, len(windows.ids))
    with _accumulating(view, layers, state):
        for index in track(indices, f"Calibrating, pass {which} (windows)"):
            ids = windows.ids[index : index + 1].to(view.model.device)
            _backward(view.model, ids, fisher, seed + index, index)
            if time.monotonic() - saved > SAVE_EVERY_SECONDS and index + 1 < len(windows.ids):
                _save_state(partial, state, index + 1, layers)
                saved = time.monotonic()
    for layer in layers:
        prefix, widths = f"{layer}.", _sums(view, layer)
        mine = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        drop, influence = (float(mine.pop(k)) for k in ("drop", "influence"))
        packed = {key: halves.packed(value, widths[key]) for key, value in mine.items()}
        save_file(packed, partial / f"layer_{layer:03d}.safetensors")
        tokens, labels = windows.ids.numel(), fisher.draws + fisher.data
        one = {"influence": influence / tokens, "drop_loss": 0.5 * drop / (tokens * labels)}
        text = json.dumps(one)
        write_text(partial / f"layer_{layer:03d}.json", text)  # whole: it says that both are
    for folder in partial.glob("sums-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _backward(model: Any, ids: Tensor, fisher: Fisher, seed: int, index: int) -> None:
    """Run one window `[1, seqlen]` forward once, and backward once per set of labels.

    The gradient of the summed NLL at the logits is `softmax - onehot`: the softmax is the same for
    every set of labels. Only the hooks want gradients; no parameter requires one.
    """
    logits = model(input_ids=ids, use_cache=False).logits
    seen = logits.detach()[0, :-1].float()
    normaliser = seen.logsumexp(-1)
    _refuse_non_finite(normaliser.sum(), index)
    probabilities = seen.softmax(-1)
    labels = [ids[0, 1:]] if fisher.data else []
    if fisher.draws:
        generator = torch.Generator(device="cpu").manual_seed(seed)
        drawn = torch.multinomial(probabilities.cpu(), fisher.draws, True, generator=generator)
        labels += list(drawn.T.to(ids.device))
    gradient = torch.zeros_like(logits)
    gradient[0, :-1] = probabilities
    for number, target in enumerate(labels):
        at = target[:, None]
        _refuse_non_finite((normaliser - seen.gather(1, at)[:, 0]).sum(), index)
        likely = probabilities.gather(1, at)
        gradient[0, :-1].scatter_(1, at, (likely - 1).to(gradient.dtype))
        logits.backward(gradient, retain_graph=number + 1 < len(labels))
        gradient[0, :-1].scatter_(1, at, likely.to(gradient.dtype))


def _refuse_non_finite(nll: Tensor, index: int) -> None:
    if not bool(torch.isfinite(nll)):
        raise NumericalError(
            f"calibration window {index}: loss is {float(nll)}; the model overflows on this text; "
            "try --dtype float32 or other text"
        )


@contextmanager
def _accumulating(
    view: ModelView, layers: Sequence[int], state: dict[str, Tensor]
) -> Iterator[None]:
    """Hook the model so that every forward and backward adds to `state`."""
    device = view.model.device
    required = [p for p in view.model.parameters() if p.requires_grad]
    training = view.model.training
    view.model.eval()
    with ExitStack() as stack:
        for parameter in required:
            parameter.requires_grad_(False)
            stack.callback(parameter.requires_grad_, True)
        stack.callback(view.model.train, training)
        embedding = view.model.get_input_embeddings()
        stack.callback(embedding.register_forward_hook(_start_graph).remove)
        for layer in layers:
            state.setdefault(f"{layer}.drop", torch.zeros((), device=device, dtype=torch.float64))
            state.setdefault(
                f"{layer}.influence", torch.zeros((), device=device, dtype=torch.float64)
            )
            block = view.layer(layer)
            stack.callback(block.register_forward_hook(_block_hook(state, layer)).remove)
            for name, width in _sums(view, layer).items():
                state.setdefault(f"{layer}.{name}", halves.new_sum(width, device))
            for group in SAME_INPUT:
                roles = [role for role in group if role in view.roles]
                for number, role in enumerate(roles):
                    site = view.site(role, layer)
                    hook = _role_hook(state, layer, role, site.start, site.stop, number == 0)
                    module = view.model.get_submodule(site.module)
                    stack.callback(module.register_forward_hook(hook).remove)
        yield


def _start_graph(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Make the embedding's output the leaf that gradients flow down to."""
    return output.detach().requires_grad_()


def _role_hook(
    state: dict[str, Tensor], layer: int, role: Role, start: int, stop: int, with_input: bool
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def on_gradient(grad: Tensor) -> None:
        g = grad[..., start:stop].reshape(-1, stop - start).float()
        halves.add_outer(state[f"{layer}.a.{role.value}"], g)

    def on_forward(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if with_input:
            x = args[0].detach().reshape(-1, args[0].shape[-1]).float()
            halves.add_outer(state[f"{layer}.g.{_input_key(role)}"], x)
        output.register_hook(on_gradient)

    return on_forward


def _block_hook(state: dict[str, Tensor], layer: int) -> Callable[..., None]:
    def on_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        after = output[0] if isinstance(output, tuple) else output
        before = args[0]
        change = (after - before).detach().float()
        cosine = nn.functional.cosine_similarity(before.float(), after.float(), dim=-1)
        state[f"{layer}.influence"] += (1 - cosine.detach()).double().sum()

        def on_gradient(grad: Tensor) -> None:
            state[f"{layer}.drop"] += (grad.float() * change).sum(-1).double().square().sum()

        after.register_hook(on_gradient)

    return on_forward


def _input_key(role: Role) -> str:
    """Return the name under which roles that read the same input share one moment."""
    return next(group[0].value for group in SAME_INPUT if role in group)


def _layer_bytes(view: ModelView) -> int:
    """Return the bytes of one layer's accumulators."""
    return sum(halves.sum_bytes(width) for width in _sums(view, 0).values())


def _sums(view: ModelView, layer: int) -> dict[str, int]:
    """Return the width of every moment of a layer, by its name in the layer's file."""
    inputs = {f"g.{_input_key(role)}": view.shape(role, layer)[1] for role in view.roles}
    return inputs | {f"a.{role.value}": view.shape(role, layer)[0] for role in view.roles}


def _save_state(
    partial: Path, state: dict[str, Tensor], windows_done: int, layers: Sequence[int]
) -> None:
    """Save the accumulators, then remove older ones: a kill at any moment leaves a whole set."""
    older = list(partial.glob("sums-*"))
    with new_folder(partial / f"sums-{layers[0]:04d}-{windows_done:08d}") as temporary:
        save_file(
            {key: value.cpu() for key, value in state.items()}, temporary / "sums.safetensors"
        )
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)


def _load_state(
    partial: Path, layers: Sequence[int], device: torch.device
) -> tuple[dict[str, Tensor], int]:
    """Return the newest saved accumulators of this pass and how many windows are in them."""
    folders = sorted(partial.glob(f"sums-{layers[0]:04d}-*"))
    if not folders:
        return {}, 0
    done = int(folders[-1].name.rpartition("-")[2])
    logger.info("resuming calibration after window %d", done)
    return load_file(folders[-1] / "sums.safetensors", device=str(device)), done
