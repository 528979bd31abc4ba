"""Models opened by name: alias, local folder, hub id, GGUF file, or one already in memory.

What is loaded is checked in full and carries the hash of its content.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.errors import CheckpointError, GccompressError, ModelError
from gccompress.sources import (
    COMPRESSED,
    Alias,
    ModelSource,
    known_aliases,
    read_config,
    resolve,
)
from gccompress.weight_files import read_header, weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Alias",
    "LoadedModel",
    "ModelSource",
    "known_aliases",
    "load_model",
    "memory_hash",
    "open_model",
    "pick_device",
    "pick_dtype",
    "resolve",
    "stored_dtype",
]

logger = logging.getLogger("gccompress")

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Of a config: where and by what it was saved, and the number type, which each tensor has.
VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory, in eval mode, and where it came from.

    Attributes:
        model: the causal language model.
        tokenizer: None only for a model that was given in memory without one.
        source: name and content hash, for every artefact made from it.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    source: ModelSource


def open_model(
    model: "str | Path | LoadedModel | PreTrainedModel | tuple[PreTrainedModel, Any]",
    *,
    device: "str | torch.device" = "auto",
    dtype: "str | torch.dtype | None" = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer, strictly.

    Args:
        model: An alias, a local folder, a `.gguf` file or a hub id; or, taken as it is whatever
            the other arguments say, a `LoadedModel`, a model, or a pair (model, tokenizer).
        device: "auto" (CUDA where there is one), "cpu", "cuda", "cuda:1".
        dtype: One of `DTYPES`. None: float32 on the CPU, the checkpoint's own on CUDA.
        revision: Branch, tag or commit on the hub.
        cache_dir: This package's cache folder.
        trust_remote_code: Run Python code that the checkpoint brings along.

    Raises:
        ModelError: not found, damaged, without tokenizer, or config and weights do not match.
        UnsupportedModelError: a family this package does not know.
        NumericalError: a weight is not finite.
    """
    if isinstance(model, LoadedModel):
        return model
    if not isinstance(model, str | Path):
        pair = model if isinstance(model, tuple) else (model, None)
        return _in_memory(*pair)
    target = pick_device(device)
    wanted = pick_dtype(dtype, target)
    source = resolve(model, revision=revision, cache_dir=cache_dir, with_code=trust_remote_code)
    assert source.path is not None
    from gccompress.strict_loading import load_tokenizer, load_weights

    config = read_config(source.path)
    if config["model_type"].startswith(COMPRESSED):
        from gccompress.verification import check_structure

        try:
            check_structure(source.path)
        except CheckpointError as error:
            raise ModelError(str(error)) from error
    tokenizer = load_tokenizer(source.path, trust_remote_code=trust_remote_code)
    placed = {} if target.type == "cpu" else {"device_map": {"": target}}
    loaded = load_weights(
        source.path,
        dtype=wanted,
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        **placed,
    )
    if isinstance(config.get("text_config"), dict):
        loaded = _text_part(loaded)
    _compare_vocabulary(source, loaded, tokenizer)
    return LoadedModel(loaded, tokenizer, source)


def load_model(
    model: "str | Path | LoadedModel | PreTrainedModel | tuple[PreTrainedModel, Any]",
    **options: Any,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """Return `(model, tokenizer)`; arguments as for `open_model`."""
    opened = open_model(model, **options)
    return opened.model, opened.tokenizer


def stored_dtype(loaded: LoadedModel) -> "torch.dtype":
    """Return the dtype that most of a model's weights are stored in: what a checkpoint should use.

    For a model that was given in memory, its own.
    """
    import math
    from collections import Counter

    if loaded.source.path is None:
        return loaded.model.dtype
    sizes: Counter[str] = Counter()
    for file in weight_files(loaded.source.path):
        for entry in read_header(file).values():
            sizes[entry.dtype] += math.prod(entry.shape)
    [(name, _)] = sizes.most_common(1)
    names = {"F64": "float64", "F16": "float16", "BF16": "bfloat16"}
    return pick_dtype(names.get(name, "float32"), loaded.model.device)  # type: ignore[return-value]


def pick_device(device: "str | torch.device" = "auto") -> "torch.device":
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU.

    Raises:
        GccompressError: no such device here.
    """
    import torch

    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise GccompressError(
            f"device {device!r} is no device; use auto, cpu, cuda or cuda:0"
        ) from error
    if picked.type not in ("cpu", "cuda"):
        raise GccompressError(f"device {device!r} is not supported; use auto, cpu, cuda or cuda:0")
    count = torch.cuda.device_count()
    if picked.type == "cuda" and (picked.index or 0) >= count:
        raise GccompressError(
            f"device {str(device)!r}: {count} CUDA devices here; use --device cpu"
        )
    return picked


def pick_dtype(dtype: "str | torch.dtype | None", device: "torch.device") -> "str | torch.dtype":
    """Return the dtype to load in; "auto", the checkpoint's own, for None on CUDA.

    Raises:
        GccompressError: not one of `DTYPES`.
    """
    import torch

    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise GccompressError(f"dtype {name!r} is not supported; use one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def _text_part(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return the language model inside an image-and-text model, sharing its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    config = model.config.get_text_config()
    if config is model.config:
        return model
    logger.warning("%s: only its language model is used, images are not", type(model).__name__)
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(config)
    setattr(text, text.base_model_prefix, model.get_decoder())
    text.set_output_embeddings(model.get_output_embeddings())
    text.generation_config = model.generation_config
    return text.eval()


def _compare_vocabulary(source: ModelSource, model: "PreTrainedModel", tokenizer: Any) -> None:
    """Log when the tokenizer has tokens the model has no embedding for."""
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    if len(tokenizer) > rows:  # not an error: Gemma 3's has an image token more than its text model
        logger.warning(
            "%s: the tokenizer has %d tokens, the model embeddings for %d; text that needs the "
            "others cannot be used",
            *(source.name, len(tokenizer), rows),
        )


def _in_memory(model: Any, tokenizer: Any = None) -> LoadedModel:
    """Wrap a model that is already loaded."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"model is a {type(model).__name__}; wanted a name, a path, a transformers model or a "
            "pair (model, tokenizer)"
        )
    name = str(model.config._name_or_path or type(model).__name__)
    return LoadedModel(model, tokenizer, ModelSource(name, None, memory_hash(model)))


def memory_hash(model: "PreTrainedModel", dtype: str | None = None) -> str:
    """Return "sha256:..." over a model's config and its tensors, by name, dtype, shape and bytes.

    The same before a model is saved and after it is loaded again. With `dtype`, one of `DTYPES`,
    floating tensors are taken in that type.

    Raises:
        ModelError: a tensor is on the meta device (not loaded, or offloaded).
        NumericalError: a tensor is not finite.
    """
    import torch

    from gccompress.weight_files import require_finite

    config = model.config.to_dict()
    for volatile in VOLATILE:
        config.pop(volatile, None)
    wanted: Any = None if dtype is None else pick_dtype(dtype, model.device)
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_meta:
            raise ModelError(f"model in memory: {name} has no data; load it onto a device first")
        require_finite(tensor, name, "model in memory")
        if wanted is not None and tensor.is_floating_point():
            tensor = tensor.to(wanted)
        total.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\n".encode())
        data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        total.update(memoryview(data.numpy()))
    return f"sha256:{total.hexdigest()}"
