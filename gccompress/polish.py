"""Polish: a few steps of what compression replaced, against the dense logits, on calibration text.

Only the new parameters are trained, by the forward KL to the dense model; the best state on windows
that no step has seen is kept, so the result is never worse there than the closed form.
"""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gccompress.errors import GccompressError, NumericalError
from gccompress.progress import track
from gccompress.text import Windows

logger = logging.getLogger(__name__)

LOGITS_AT_ONCE = 1 << 22  # numbers; on a CPU larger pieces leave the cache and take longer


@dataclass(frozen=True)
class PolishOptions:
    """How long and how fast.

    Attributes:
        steps: at most; fewer when the held-out loss has stopped falling.
        rate: AdamW's peak learning rate; no weight decay.
        windows: per step.
        noise: share of the tokens trained on that are replaced by random ones of the vocabulary.
            The dense model says what follows those too, and the few thousand different tokens of a
            calibration text, which the closed form already fits closely, are not fitted further.
        every: steps between looks at the held-out windows.
        patience: looks without improvement after which it stops.
        seed: of the order of windows and of the noise.
    """

    steps: int = 32
    rate: float = 1e-4
    windows: int = 2
    noise: float = 0.3
    every: int = 8
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `GccompressError` for numbers that cannot train."""
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise GccompressError(f"--polish-rate {self.rate}; wanted above 0, such as 1e-4")
        if min(self.steps, self.windows, self.every, self.patience) < 1:
            raise GccompressError("polish: steps, windows, every and patience are at least 1")
        if not 0 <= self.noise < 1:
            raise GccompressError(f"polish: noise {self.noise}; wanted a share in [0, 1)")


@dataclass(frozen=True)
class Polished:
    """What polishing did, KL to the dense model in nats per token.

    Attributes:
        before: of the closed form on held-out windows.
        after: of the best state there, which was kept.
        train_before: of the closed form on as many windows of the text trained on.
        train_after: of the state kept; below `after` by how much it fits that text alone.
        best_step: when; 0 means that nothing improved and the closed form stays.
        steps: taken.
        seconds: all of it took.
        curve: (step, held-out KL, training KL since the last look: None before the first step).
    """

    before: float
    after: float
    train_before: float
    train_after: float
    best_step: int
    steps: int
    seconds: float
    curve: tuple[tuple[int, float, float | None], ...]


def polish(
    model: Any,
    dense: Any,
    trained: list[nn.Parameter],
    *,
    windows: Windows,
    heldout: Windows,
    options: PolishOptions | None = None,
) -> Polished:
    """Train some parameters of a compressed model in place; the best held-out state stays.

    Where the device multiplies bf16 fast, or the model is not fp32, products are in bf16; what is
    trained is fp32 meanwhile, else small steps would round away.

    Args:
        model: the compressed model.
        dense: the model it came from, same vocabulary; may be on another device.
        trained: parameters of `model` to train.
        windows: text to train on, `[n, seqlen]`.
        heldout: text to judge on, at least one window that is not trained on.
        options: how long and how fast.

    Raises:
        GccompressError: nothing to train, or no held-out window to judge by.
        NumericalError: a loss that is not finite, naming the step; the model is as before.
    """
    options = options or PolishOptions()
    if not trained:
        raise GccompressError("polish: the plan replaces no weights, so there is nothing to train")
    if not len(heldout):
        raise GccompressError("polish: no held-out windows to judge by; plan with --heldout-tokens")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    types = [parameter.dtype for parameter in trained]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
        parameter.data = parameter.data.float()
    training = model.training
    model.eval()  # no dropout: a few steps on little text want no more noise
    try:
        return _train(model, dense, trained, windows, heldout, options)
    finally:
        model.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for parameter, dtype in zip(trained, types, strict=True):
            parameter.data = parameter.data.to(dtype)


def _train(
    model: Any,
    dense: Any,
    trained: list[nn.Parameter],
    windows: Windows,
    heldout: Windows,
    options: PolishOptions,
) -> Polished:
    start = time.monotonic()
    optimiser = torch.optim.AdamW(trained, lr=options.rate, weight_decay=0.0, betas=(0.9, 0.95))
    seen = windows.slice(0, len(heldout))
    before = best = _mean_kl(model, dense, heldout)
    train_before = _mean_kl(model, dense, seen)
    kept = _copies(trained)
    best_step, idle, since = 0, 0, list[float]()
    curve: list[tuple[int, float, float | None]] = [(0, before, None)]
    step = 0
    try:
        for step, batch in enumerate(_batches(windows, model, options), start=1):
            for group in optimiser.param_groups:
                group["lr"] = options.rate * _schedule(step, options.steps)
            since.append(_step(model, dense, optimiser, batch, step))
            if step % options.every and step != options.steps:
                continue
            now = _mean_kl(model, dense, heldout)
            curve.append((step, now, sum(since) / len(since)))
            since = []
            logger.info("polish step %d: held-out KL %.4f (%.4f before)", step, now, before)
            if now < best:
                best, best_step, kept, idle = now, step, _copies(trained), 0
                continue
            idle += 1
            if idle >= options.patience:
                break
    finally:
        with torch.no_grad():
            for parameter, value in zip(trained, kept, strict=True):
                parameter.copy_(value)
    train_after = _mean_kl(model, dense, seen)
    seconds = time.monotonic() - start
    return Polished(before, best, train_before, train_after, best_step, step, seconds, tuple(curve))


def _copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def _schedule(step: int, steps: int) -> float:
    """Return the share of the peak rate: a short warm-up, then a cosine to a twentieth."""
    warm = max(1, steps // 10)
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _batches(windows: Windows, model: Any, options: PolishOptions) -> Iterator[Tensor]:
    """Yield ids `[windows, seqlen]` for every step, each pass over the text in another order."""
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = model.config.get_text_config().vocab_size
    order: list[int] = []
    for _ in track(range(options.steps), "Polishing (steps)"):
        while len(order) < options.windows:
            order += torch.randperm(len(windows), generator=generator).tolist()
        chosen, order = order[: options.windows], order[options.windows :]
        ids = windows.ids[chosen]
        noisy = torch.rand(ids.shape, generator=generator) < options.noise
        noise = torch.randint(vocabulary, ids.shape, generator=generator)
        yield torch.where(noisy, noise, ids)


def _step(
    model: Any, dense: Any, optimiser: torch.optim.Optimizer, batch: Tensor, step: int
) -> float:
    optimiser.zero_grad(set_to_none=True)
    total = 0.0
    for ids in batch:  # one window at a time bounds the memory of the activations
        total += _kl(model, dense, ids[None], len(batch))
        if not math.isfinite(total):
            raise NumericalError(
                f"polish step {step}: loss is {total}; lower the learning rate or use "
                "--dtype float32"
            )
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()
    return total


def _mean_kl(model: Any, dense: Any, windows: Windows) -> float:
    with torch.no_grad():
        mean = sum(_kl(model, dense, ids[None], len(windows)) for ids in windows.ids)
    if not math.isfinite(mean):
        raise NumericalError("polish: the held-out KL is not finite; use --dtype float32")
    return mean


def _kl(model: Any, dense: Any, ids: Tensor, share: int) -> float:
    """Return the mean KL(dense || model) of one window `[1, seqlen]` over `share`, nats per token.

    Where gradients are on, its gradient is added to the parameters. Logits are made, and gone
    through, a piece at a time: those of a whole window take more room than a small model.
    """
    with torch.no_grad():
        wanted = _hidden(dense, ids)
    hidden = _hidden(model, ids)
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    size = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    total = 0.0
    for part in range(0, len(leaf), size):
        with torch.no_grad():
            target = _logits(dense, wanted[part : part + size]).log_softmax(-1)
        log_q = _logits(model, leaf[part : part + size]).log_softmax(-1)
        kl = nn.functional.kl_div(log_q, target.to(log_q.device), reduction="sum", log_target=True)
        kl = kl / (len(leaf) * share)
        if leaf.requires_grad:
            kl.backward()
        total += float(kl.detach())
    if leaf.requires_grad:
        hidden.backward(leaf.grad)
    return total


def _hidden(model: Any, ids: Tensor) -> Tensor:
    """Return the last hidden states `[seqlen, hidden]` of one window."""
    with _fast_products(model):
        hidden: Tensor = model.base_model(input_ids=ids.to(model.device), use_cache=False)[0]
    return hidden.flatten(0, 1)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """Return logits `[some, vocab]` in fp32."""
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    with _fast_products(model):
        logits: Tensor = model.get_output_embeddings()(hidden).float()
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _fast_products(model: Any) -> AbstractContextManager[Any]:
    """Return bf16 autocast where it is fast, or the model is not in fp32 anyway."""
    kind = model.device.type
    wanted = model.get_input_embeddings().weight.dtype != torch.float32
    if kind == "cpu":
        wanted = wanted or bool(torch.cpu._is_avx512_bf16_supported())
    if kind == "cuda":
        wanted = wanted or torch.cuda.is_bf16_supported()
    return torch.autocast(kind, torch.bfloat16) if wanted else nullcontext()


def replaced_parameters(model: Any, dense: Any) -> list[nn.Parameter]:
    """Return the parameters of a compressed model that its dense origin has not as they are.

    Those of new modules, and those whose shape changed. Layers must not have been renumbered: with
    dropped layers, the parameters that kept their values are compared by value.
    """
    known: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in dense.parameters():
        known.setdefault(tuple(parameter.shape), []).append(parameter.detach())

    def is_known(parameter: nn.Parameter) -> bool:
        same = known.get(tuple(parameter.shape), [])
        return any(torch.equal(parameter.detach().to(one), one) for one in same)

    return [parameter for parameter in model.parameters() if not is_known(parameter)]
