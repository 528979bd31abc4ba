"""What a model scores on windows of text, and how fast it is: perplexity, KL to a baseline, speed.

Every window counts: a non-finite loss is an error that names the window.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gccompress.errors import GccompressError, NumericalError, TextError
from gccompress.progress import track
from gccompress.sampling import evaluating, new_cache, next_logits
from gccompress.text import Windows

# Logits are made and scored this many numbers at a time: 256 MiB in fp32.
LOGITS_AT_ONCE = 1 << 26
# Tokens per forward pass on a GPU; the CPU gains nothing from more than one window.
TOKENS_AT_ONCE = 1 << 13


@dataclass(frozen=True)
class Perplexity:
    """Perplexity on windows of text.

    Attributes:
        dataset: what the text is.
        seqlen: tokens of a window; only perplexities of equal seqlen compare.
        tokens: predicted tokens, all but the first of each window.
        value: exp(nll).
        nll: mean negative log-likelihood, nats per predicted token.
        stderr: standard error of `value` from the spread over windows; None for one window.
    """

    dataset: str
    seqlen: int
    tokens: int
    value: float
    nll: float
    stderr: float | None


@dataclass(frozen=True)
class Speed:
    """Throughput at batch size 1, medians.

    Attributes:
        prefill_tokens_per_s: reading a prompt of `prompt_tokens`, the next token's logits included.
        decode_tokens_per_s: one token after another behind that prompt, with a cache.
        prompt_tokens: length of the prompt.
        new_tokens: tokens decoded per repeat.
        repeats: how often each was timed, after one round of warm-up.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prompt_tokens: int
    new_tokens: int
    repeats: int


@dataclass(frozen=True)
class WindowScores:
    """Means over the predicted tokens of each window, float64 `[n]`, nats per token.

    Attributes:
        nll: of the model.
        baseline_nll: of the baseline, None without one.
        kl: KL(baseline || model), None without one.
    """

    nll: Tensor
    baseline_nll: Tensor | None = None
    kl: Tensor | None = None


def perplexity(model: Any, windows: Windows) -> Perplexity:
    """Return exp(mean NLL) over all predicted tokens, log-softmax in fp32.

    Raises:
        NumericalError: a non-finite loss, naming the window.
    """
    return perplexity_of(score_windows(model, windows).nll, windows)


def kl_to_baseline(model: Any, baseline: Any, windows: Windows) -> float:
    """Return the mean of KL(baseline || model) over the predicted tokens, nats per token.

    Zero when the two give the same probabilities; infinite for none. Log-softmax in fp32.

    Raises:
        GccompressError: the vocabularies differ in size.
        NumericalError: non-finite logits, naming the window.
    """
    kl = score_windows(model, windows, baseline=baseline).kl
    assert kl is not None
    return float(kl.mean())


def perplexity_of(nll: Tensor, windows: Windows) -> Perplexity:
    """Turn the losses `[n]` of windows into a perplexity."""
    mean, count = float(nll.mean()), len(nll)
    if mean > 700:
        raise NumericalError(
            f"text {windows.source}: mean loss {mean:.0f} nats per token, perplexity beyond any "
            "float; the model is damaged"
        )
    error = math.exp(mean) * float(nll.std()) / math.sqrt(count) if count > 1 else None
    tokens = count * (windows.seqlen - 1)
    return Perplexity(windows.source, windows.seqlen, tokens, math.exp(mean), mean, error)


def score_windows(model: Any, windows: Windows, *, baseline: Any = None) -> WindowScores:
    """Score a model, and a baseline beside it, in one pass over the windows.

    Raises:
        GccompressError: the vocabularies differ in size.
        NumericalError: a non-finite loss or KL, naming the window and the model.
    """
    vocabulary = model.config.get_text_config().vocab_size
    if baseline is not None:
        other = baseline.config.get_text_config().vocab_size
        if other != vocabulary:
            raise GccompressError(
                f"baseline has {other} tokens in its vocabulary, the model {vocabulary}; "
                "a KL needs the same; name the model it was made from"
            )
    rows = 1 if model.device.type == "cpu" else max(1, TOKENS_AT_ONCE // windows.seqlen)
    found: dict[str, list[Tensor]] = {"model": [], "baseline": [], "kl": []}
    starts = range(0, len(windows), rows)
    with evaluating(model), evaluating(baseline) if baseline is not None else nullcontext():
        for start in track(starts, f"Scoring text {windows.source} (windows)"):
            ids = windows.ids[start : start + rows]
            for name, values in _score(model, baseline, ids).items():
                _check_finite(values, name, start)
                found[name].append(values)
    nll, baseline_nll, kl = (torch.cat(parts) if parts else None for parts in found.values())
    assert nll is not None
    return WindowScores(nll, baseline_nll, kl)


def _check_finite(values: Tensor, name: str, start: int) -> None:
    for offset, value in enumerate(values.tolist()):
        if not math.isfinite(value):
            what = "KL to the baseline" if name == "kl" else f"loss of the {name}"
            raise NumericalError(
                f"window {start + offset}: {what} is {value}; use --dtype float32, or check "
                "the weights"
            )


def _score(model: Any, baseline: Any, ids: Tensor) -> dict[str, Tensor]:
    """Score one batch `[rows, seqlen]`: means over predicted tokens, float64 `[rows]` each."""
    rows, predicted = ids.shape[0], ids.shape[1] - 1
    device = model.device
    labels = ids[:, 1:].reshape(-1).to(device)
    ours = _log_shares(model, ids)
    sums = {"model": torch.zeros(rows * predicted, dtype=torch.float64)}
    theirs: Iterator[tuple[slice, Tensor]] | None = None
    if baseline is not None:
        theirs = _log_shares(baseline, ids)
        sums["baseline"], sums["kl"] = (torch.zeros_like(sums["model"]) for _ in range(2))
    for part, log_q in ours:
        sums["model"][part] = functional.nll_loss(log_q, labels[part], reduction="none").cpu()
        if theirs is not None:
            _, log_p = next(theirs)
            log_p = log_p.to(device)
            nll = functional.nll_loss(log_p, labels[part], reduction="none")
            # log_target: sum of p (log p - log q), and 0 where p is 0.
            kl = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
            sums["baseline"][part], sums["kl"][part] = nll.cpu(), kl.cpu()
    return {name: values.view(rows, predicted).mean(1) for name, values in sums.items()}


def _log_shares(model: Any, ids: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield log-probabilities fp32 `[some, vocab]` of all predicted tokens, a slice at a time.

    The whole logits of a long window over a large vocabulary would take more room than the model.
    """
    decoder, head = model.base_model, model.get_output_embeddings()
    hidden = decoder(input_ids=ids.to(model.device), use_cache=False)[0]
    hidden = hidden[:, :-1].reshape(-1, hidden.shape[-1])
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    size = max(1, LOGITS_AT_ONCE // config.vocab_size)
    for start in range(0, len(hidden), size):
        part = slice(start, min(start + size, len(hidden)))
        logits = head(hidden[part])
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        yield part, logits.float().log_softmax(-1)


def measure_speed(
    model: Any, *, prompt_tokens: int = 512, new_tokens: int = 32, repeats: int = 5
) -> Speed:
    """Time a model's prefill and decoding at batch size 1; medians, after a warm-up."""
    [speed] = compare_speed(
        [model], prompt_tokens=prompt_tokens, new_tokens=new_tokens, repeats=repeats
    )
    return speed


def compare_speed(
    models: Sequence[Any], *, prompt_tokens: int = 512, new_tokens: int = 32, repeats: int = 5
) -> tuple[Speed, ...]:
    """Time several models in turns, so that a busy machine disturbs all of them alike.

    The prompt is shortened where a model has fewer positions than prompt and new tokens take.

    Raises:
        TextError: a model has no room for a prompt.
    """
    for model in models:
        config = model.config.get_text_config()
        room = getattr(config, "max_position_embeddings", None)
        if room is not None:
            prompt_tokens = min(prompt_tokens, room - new_tokens)
    if prompt_tokens < 1:
        raise TextError(f"no room for a prompt before {new_tokens} new tokens; ask for fewer")
    prefill: list[list[float]] = [[] for _ in models]
    decode: list[list[float]] = [[] for _ in models]
    for turn in track(range(repeats + 1), "Timing"):
        for index, model in enumerate(models):
            one, steps = _time_once(model, prompt_tokens, new_tokens)
            if turn > 0:
                prefill[index].append(one)
                decode[index].append(statistics.median(steps))
    return tuple(
        Speed(
            prompt_tokens / statistics.median(prefill[index]),
            1 / statistics.median(decode[index]),
            prompt_tokens,
            new_tokens,
            repeats,
        )
        for index in range(len(models))
    )


def _time_once(model: Any, prompt_tokens: int, new_tokens: int) -> tuple[float, list[float]]:
    """Return seconds of one prefill and of each decoded token after it."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (1, prompt_tokens), generator=generator).to(model.device)
    with evaluating(model):
        cache = new_cache(model)

        def step() -> None:
            nonlocal ids
            ids = next_logits(model, ids, cache).argmax(-1, keepdim=True)

        first = _seconds(step, model.device)
        return first, [_seconds(step, model.device) for _ in range(new_tokens)]


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
