"""Polish: a few steps of what compression replaced, against the dense logits, on calibration text.

Only the new parameters are trained, by the forward KL to the dense model; the best state on windows
that no step has seen is kept, so the result is never worse there than the closed form.
"""

import copy
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gccompress.errors import GccompressError, NumericalError
from gccompress.progress import track
from gccompress.text import Windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PolishOptions:
    """How long and how fast.

    Attributes:
        steps: at most; fewer when the held-out loss has stopped falling.
        rate: AdamW's peak learning rate; no weight decay.
        windows: per step.
        every: steps between looks at the held-out windows.
        patience: looks without improvement after which it stops.
        seed: of the order of windows.
    """

    steps: int = 32
    rate: float = 1e-4
    windows: int = 2
    every: int = 4
    patience: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `GccompressError` for numbers that cannot train."""
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise GccompressError(f"--polish-rate {self.rate}; wanted above 0, such as 1e-4")
        if min(self.steps, self.windows, self.every, self.patience) < 1:
            raise GccompressError("polish: steps, windows, every and patience are at least 1")


@dataclass(frozen=True)
class Polished:
    """What polishing did, KL to the dense model in nats per token on held-out windows.

    Attributes:
        before: of the closed form.
        after: of the best state, which was kept.
        best_step: when; 0 means that nothing improved and the closed form stays.
        steps: taken.
        curve: (step, held-out KL, training KL since the last look: None before the first step).
    """

    before: float
    after: float
    best_step: int
    steps: int
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

    Args:
        model: the compressed model.
        dense: the model it came from, same vocabulary; may be on another device.
        trained: parameters of `model` to train.
        windows: text to train on, `[n, seqlen]`.
        heldout: text to judge on, at least one window that is not trained on.
        options: how long and how fast.

    Raises:
        GccompressError: nothing to train, or no held-out window to judge by.
        NumericalError: a loss that is not finite, naming step and window; the model is as before.
    """
    options = options or PolishOptions()
    if not trained:
        raise GccompressError("polish: the plan replaces no weights, so there is nothing to train")
    if not len(heldout):
        raise GccompressError("polish: no held-out windows to judge by; plan with --heldout-tokens")
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    training = model.training
    model.eval()  # no dropout: a few steps on little text want no more noise
    try:
        return _train(model, dense, trained, windows, heldout, options)
    finally:
        model.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _train(
    model: Any,
    dense: Any,
    trained: list[nn.Parameter],
    windows: Windows,
    heldout: Windows,
    options: PolishOptions,
) -> Polished:
    optimiser = torch.optim.AdamW(trained, lr=options.rate, weight_decay=0.0, betas=(0.9, 0.95))
    before = best = _heldout_kl(model, dense, heldout)
    kept = _copies(trained)
    best_step, seen, since = 0, 0, list[float]()
    curve: list[tuple[int, float, float | None]] = [(0, before, None)]
    step = 0
    try:
        for step, batch in enumerate(_batches(windows, options), start=1):
            for group in optimiser.param_groups:
                group["lr"] = options.rate * _schedule(step, options.steps)
            since.append(_step(model, dense, optimiser, batch, step))
            if step % options.every and step != options.steps:
                continue
            now = _heldout_kl(model, dense, heldout)
            curve.append((step, now, sum(since) / len(since)))
            since = []
            logger.info("polish step %d: held-out KL %.4f (%.4f before)", step, now, before)
            if now < best:
                best, best_step, kept, seen = now, step, _copies(trained), 0
                continue
            seen += 1
            if seen >= options.patience:
                break
    finally:
        with torch.no_grad():
            for parameter, value in zip(trained, kept, strict=True):
                parameter.copy_(value)
    return Polished(before, best, best_step, step, tuple(curve))


def _copies(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [copy.deepcopy(parameter.detach()) for parameter in parameters]


def _schedule(step: int, steps: int) -> float:
    """Return the share of the peak rate: a short warm-up, then a cosine to a tenth."""
    warm = max(1, steps // 8)
    if step <= warm:
        return step / warm
    done = (step - warm) / max(1, steps - warm)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def _batches(windows: Windows, options: PolishOptions) -> Iterator[Tensor]:
    """Yield a batch of ids for every step, each pass over the windows in another order."""
    generator = torch.Generator().manual_seed(options.seed)
    order: list[int] = []
    for _ in track(range(options.steps), "Polishing (steps)"):
        while len(order) < options.windows:
            order += torch.randperm(len(windows), generator=generator).tolist()
        chosen, order = order[: options.windows], order[options.windows :]
        yield windows.ids[chosen]


def _step(
    model: Any, dense: Any, optimiser: torch.optim.Optimizer, batch: Tensor, step: int
) -> float:
    optimiser.zero_grad(set_to_none=True)
    total = 0.0
    for ids in batch:  # one window at a time bounds the memory of the logits
        loss = _kl(model, dense, ids[None]) / len(batch)
        if not bool(torch.isfinite(loss)):
            raise NumericalError(
                f"polish step {step}: loss is {float(loss.detach())}; lower the learning rate or "
                "use --dtype float32"
            )
        loss.backward()
        total += float(loss.detach())
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step()
    return total


def _kl(model: Any, dense: Any, ids: Tensor) -> Tensor:
    """Return the mean KL(dense || model) of one window `[1, seqlen]`, nats per token."""
    with torch.no_grad():
        wanted = dense(input_ids=ids.to(dense.device), use_cache=False).logits[0].float()
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits[0].float()
    target = wanted.log_softmax(-1).to(logits.device)
    return nn.functional.kl_div(
        logits.log_softmax(-1), target, reduction="batchmean", log_target=True
    )


def _heldout_kl(model: Any, dense: Any, heldout: Windows) -> float:
    with torch.no_grad():
        losses = [float(_kl(model, dense, ids[None])) for ids in heldout.ids]
    mean = sum(losses) / len(losses)
    if not math.isfinite(mean):
        raise NumericalError("polish: the held-out KL is not finite; use --dtype float32")
    return mean


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
