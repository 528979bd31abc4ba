"""Text from a model: sampled in batches and cached on disk, or continued greedily.

Own loops rather than `generate`: no global random state, no defaults from a generation config.
"""

import hashlib
import inspect
import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from gccompress.errors import NumericalError, TextError
from gccompress.files import cache_folder, new_file
from gccompress.progress import track

if TYPE_CHECKING:
    from gccompress.models import LoadedModel

logger = logging.getLogger("gccompress")

SAMPLING_VERSION = 1  # raised when the same settings would give other text
# A step reads all weights once whatever the number of rows, so rows are as many as memory takes.
MOST_ROWS = 64
MOST_CACHE_BYTES = 2 * 2**30


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Run a block in eval mode without gradients; the mode is put back afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


class _RoomyLayer(DynamicLayer):
    """Keys and values of a layer in a buffer of known length.

    `DynamicLayer` copies all of them for each new token: a third of the time of a batch.
    """

    def __init__(self, room: int) -> None:
        """Leave room for so many tokens."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add keys and values `[rows, heads, new, width]`; return all there are."""
        start = self.get_seq_length()
        if start == 0:
            super().update(key_states, value_states, *args, **kwargs)
            self.buffers = [
                states.new_empty(*states.shape[:2], self.room, states.shape[3])
                for states in (key_states, value_states)
            ]
        stop = start + key_states.shape[-2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:stop] = new
        self.keys, self.values = (buffer[:, :, :stop] for buffer in self.buffers)
        return self.keys, self.values


def new_cache(model: Any, room: int | None = None) -> Any:
    """Return an empty key-value cache that fits the model, for at most `room` tokens if given."""
    cache = DynamicCache(config=model.config)
    if room is not None:
        # Other kinds of layer, such as sliding windows, are short already.
        cache.layers = [
            _RoomyLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers
        ]
    return cache


def next_logits(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Return logits `[rows, vocab]` after ids `[rows, length]`, which are added to `cache`."""
    # transformers 5 renames the argument; asking for it by the old name warns on every call.
    new = "cache" in inspect.signature(model.forward).parameters
    cached = {"cache" if new else "past_key_values": cache}
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **cached)
    logits: Tensor = output.logits[:, -1]
    return logits


def start_token(loaded: "LoadedModel") -> int:
    """Return the token that sampled text begins with: BOS, else the end of the text before."""
    config = loaded.model.config.get_text_config()
    for owner in (loaded.tokenizer, config):
        for name in ("bos_token_id", "eos_token_id"):
            found = getattr(owner, name, None)
            found = found[0] if isinstance(found, list | tuple) and found else found
            if isinstance(found, int) and 0 <= found < config.vocab_size:
                return found
    raise TextError(
        f"text self: model {loaded.source.name} has neither a BOS nor an EOS token to start from; "
        "pass a FILE of text instead"
    )


def sample_text(
    loaded: "LoadedModel",
    *,
    count: int,
    seqlen: int,
    seed: int = 0,
    cache_dir: str | Path | None = None,
) -> Tensor:
    """Return windows sampled from the model at temperature 1, from the cache if there.

    Every window begins with `start_token`; text goes on after an end-of-text token, as in packed
    training data. Finished batches are kept, so an interrupted call goes on after the last one.

    Args:
        loaded: the model.
        count: number of windows.
        seqlen: tokens of a window, the start token included.
        seed: the same seed, model, count and length give the same text.
        cache_dir: this package's cache folder.

    Returns:
        Token ids, int64 `[count, seqlen]`.

    Raises:
        NumericalError: the model gave non-finite logits.
        TextError: the model has no token to start from.
    """
    model, start = loaded.model, start_token(loaded)
    dtype = str(model.dtype).removeprefix("torch.")
    what = [SAMPLING_VERSION, loaded.source.hash, count, seqlen, seed, dtype, start]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    folder = cache_folder(cache_dir) / "text" / key[:32]
    batches = math.ceil(count / _rows_at_once(model, seqlen))
    done = []
    for batch in range(batches):
        rows = count * (batch + 1) // batches - count * batch // batches
        file = folder / f"batch-{batch:04d}-of-{batches:04d}.safetensors"
        ids = _kept(file, (rows, seqlen))
        if ids is None:
            which = f"{batch + 1}/{batches}" if batches > 1 else f"{count} windows"
            ids = _sample(model, start, rows, seqlen, f"{key}/{batch}", which)
            with new_file(file) as temporary:
                save_file({"ids": ids.int()}, temporary)
        done.append(ids)
    return torch.cat(done)


def _rows_at_once(model: Any, seqlen: int) -> int:
    """Return how many windows to sample together, by the size of their keys and values."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    return max(1, min(MOST_ROWS, MOST_CACHE_BYTES // (per_token * seqlen)))


def _kept(file: Path, shape: tuple[int, int]) -> Tensor | None:
    """Return a finished batch, None if there is none."""
    if not file.exists():
        return None
    try:
        ids = load_file(file)["ids"].long()
    except (SafetensorError, KeyError, OSError) as error:
        logger.warning("sampled text %s cannot be read (%s); sampling it again", file, error)
        return None
    if tuple(ids.shape) != shape:
        logger.warning("sampled text %s is %s, wanted %s; sampling again", file, ids.shape, shape)
        return None
    return ids


def _sample(model: Any, start: int, rows: int, seqlen: int, key: str, which: str) -> Tensor:
    """Sample ids `[rows, seqlen]`; the random numbers depend on `key` alone."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    generator = torch.Generator(device="cpu").manual_seed(seed)
    # Drawn on the CPU, so that they are the same on every device.
    uniform = torch.rand((seqlen, rows, 1), generator=generator)
    ids = torch.full((rows, seqlen), start)
    with evaluating(model):
        cache, last = new_cache(model, seqlen), ids[:, :1].to(model.device)
        for position in track(range(1, seqlen), f"Sampling text, {which} (tokens)"):
            shares = next_logits(model, last, cache).float().softmax(-1).cumsum(-1)
            total = shares[:, -1:]
            if not bool(torch.isfinite(total).all()):
                raise NumericalError(
                    f"sampled text, token {position}: the model gives non-finite logits; "
                    "use --dtype float32 or check its weights"
                )
            drawn = uniform[position].to(total.device) * total
            last = torch.searchsorted(shares, drawn, right=True)
            last = last.clamp_(max=shares.shape[1] - 1)
            ids[:, position] = last[:, 0].cpu()
    return ids


def continue_greedily(loaded: "LoadedModel", prompt: str, new_tokens: int = 40) -> str:
    """Return the likeliest continuation of a prompt, up to `new_tokens` or the end of text.

    Raises:
        TextError: the model has no tokenizer, or the prompt no token.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    if tokenizer is None:
        raise TextError("prompt: the model has no tokenizer; pass a pair (model, tokenizer)")
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64)
    if ids.shape[1] == 0:
        raise TextError("prompt is empty; wanted some words to continue")
    found: list[int] = []
    with evaluating(model):
        cache, last = new_cache(model), ids.to(model.device)
        while len(found) < new_tokens:
            last = next_logits(model, last, cache).argmax(-1, keepdim=True)
            if int(last) == tokenizer.eos_token_id:
                break
            found.append(int(last))
    return str(tokenizer.decode(found, skip_special_tokens=True))
