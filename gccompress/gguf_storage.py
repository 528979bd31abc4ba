"""Weights of a GGUF file, dequantised tensor by tensor as transformers converts them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gccompress.architectures import ArchSpec, SiteSpec, known, refuse_config, role_shapes
from gccompress.errors import ModelError, UnsupportedModelError
from gccompress.gguf_files import refuse_split
from gccompress.gguf_head import GgufHead, GgufTensor, read_head
from gccompress.roles import Role
from gccompress.storage import read_into
from gccompress.weight_files import AGAIN

_PIECE = 1 << 22  # elements dequantised at once; takes about three times that in fp32
# Metadata under the architecture's name, and the field of a transformers config that says it.
_HEADS = "attention.head_count"
_FIELDS = {
    "embedding_length": "hidden_size",
    _HEADS: "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
# Architectures whose q and k rows are stored in the order of interleaved rotary embeddings.
_INTERLEAVED = ("llama",)


def open_gguf(file: Path) -> tuple[Any, ArchSpec, "GgufStorage"]:
    """Return the transformers config that a GGUF file's metadata gives, the family, the weights.

    Raises:
        ModelError: damaged, split, incomplete, or weights not as the metadata say.
        UnsupportedModelError: an unknown family, a mixture of experts, an unknown quantisation.
    """
    from transformers import AutoConfig

    refuse_split(file)
    contents = read_head(file)
    spec, model_type = _family(file, contents.architecture)
    experts = contents.metadata.get("expert_count")
    refuse_config(SimpleNamespace(num_experts=experts), f"model {file}")
    config = AutoConfig.for_model(model_type)
    keys = {**_FIELDS, "block_count": spec.layer_count, "feed_forward_length": spec.mlp_width}
    given = {
        config.attribute_map.get(field, field): value
        for key, field in keys.items()
        if (value := _size(file, contents, key)) is not None
    }
    config = AutoConfig.for_model(model_type, **given)
    return config, spec, GgufStorage(file, config, spec, contents)


def _size(file: Path, contents: GgufHead, key: str) -> int | None:
    """Return a size from the metadata; of one entry a layer, the entry if they all agree."""
    value = contents.metadata.get(key)
    if value is None and key == "attention.key_length":
        # Unlike the config classes' own default, which is one model's.
        width, heads = (_size(file, contents, k) for k in ("embedding_length", _HEADS))
        return None if width is None or heads is None else width // heads
    if value is None and key == "attention.head_count_kv":
        return _size(file, contents, _HEADS)
    if value is None and key in ("block_count", "embedding_length", _HEADS):
        raise ModelError(
            f"{file} has no {contents.architecture}.{key} in its metadata, wanted a whole "
            f"language model; {AGAIN}"
        )
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{file}: {contents.architecture}.{key} differs from layer to layer, wanted the "
                "same for all; such models are not supported"
            )
        value = value[0]
    return None if value is None else int(value)


def _family(file: Path, architecture: str) -> tuple[ArchSpec, str]:
    """Return the family of a GGUF architecture, and its model type in transformers."""
    for spec in known():
        for model_type in (architecture, f"{architecture}_text"):
            if model_type in spec.model_types:
                return spec, model_type
    raise UnsupportedModelError(
        f"{file} is of GGUF architecture {architecture!r}, which is not known; known: "
        f"{', '.join(spec.name for spec in known())}; use another model"
    )


class GgufStorage:
    """The decoder in a GGUF file; a `storage.Storage`. Everything comes as fp32."""

    def __init__(self, file: Path, config: Any, spec: ArchSpec, contents: GgufHead) -> None:
        """Check that each layer's tensors are there, in the shape they must have.

        Args:
            file: The GGUF file.
            config: The transformers config its metadata give.
            spec: Its family.
            contents: What the file's head says.

        Raises:
            ModelError: a missing tensor or a wrong shape.
            UnsupportedModelError: a quantisation that package gguf cannot undo.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self._file, self._config, self._spec = file, config, spec
        self._tensors = contents.tensors
        self._layers = int(getattr(config, spec.layer_count))
        self._interleaved = contents.architecture in _INTERLEAVED
        [arch] = [a for a, name in MODEL_ARCH_NAMES.items() if name == contents.architecture]
        self._names = get_tensor_name_map(arch, self._layers)
        shapes = role_shapes(config, spec)
        for site in spec.sites:
            rows, columns = sum(shapes[role][0] for role in site.roles), shapes[site.roles[0]][1]
            norms = ((site.pre_norm, columns), (site.post_norm, rows))
            for layer in range(self._layers):
                self._check(site.module, layer, (rows, columns), "[out, in]")
                for module, width in norms:
                    if module is not None:
                        self._check(module, layer, (width,), "")
        surplus = [name for name in self._tensors if name.startswith(f"blk.{self._layers}.")]
        if surplus:
            raise ModelError(
                f"{file}: {surplus[0]} is there, while its block_count is {self._layers}; {AGAIN}"
            )

    def _check(self, module: str, layer: int, wanted: tuple[int, ...], order: str) -> None:
        stored = self._find(module, layer)
        name = self._name(module, layer)
        if stored.shape != wanted:
            raise ModelError(
                f"{self._file}: {name} ({module} of layer {layer}) has shape {list(stored.shape)}, "
                f"wanted {list(wanted)} {order} by its metadata; {AGAIN}"
            )
        _refuse_unknown(stored.kind, self._file, name)

    def shape(self, site: SiteSpec, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of a module."""
        rows, columns = self._find(site.module, layer).shape
        return rows, columns

    def stored_bytes(self, site: SiteSpec, layer: int) -> int:
        """Return the bytes of a module's weight as it is quantised."""
        return self._find(site.module, layer).nbytes

    def rows(self, site: SiteSpec, layer: int, start: int, stop: int) -> Tensor:
        """Return rows `start:stop` of a module's weight `[out, in]`, fp32."""
        stored = self._find(site.module, layer)
        head = self._head_rows(site, stored)
        result = torch.empty(stop - start, stored.shape[1])
        step = max(1, _PIECE // (head * stored.shape[1])) * head
        end = -(-stop // head) * head
        for first in range(start - start % head, end if stop > start else 0, step):
            last = min(first + step, end)
            values = self._dequantised(stored, first, last)
            if head > 1:
                # Stored are pairs (i, i + half head) side by side; wanted, first halves first.
                pairs = values.reshape(-1, head // 2, 2, stored.shape[1])
                values = pairs.transpose(1, 2).reshape(values.shape)
            low, high = max(first, start), min(last, stop)
            result[low - start : high - start] = values[low - first : high - first]
        return result

    def norm(self, module: str, layer: int) -> Tensor:
        """Return the weight `[d]` of a norm; the offset, included in the file, is taken off."""
        stored = self._find(module, layer)
        return self._dequantised(stored, 0, stored.shape[0]) - self._spec.norm_offset

    def tensor(self, module: str, layer: int) -> tuple[Path, str]:
        """Return the file and the name in it of a module's weight."""
        return self._file, self._name(module, layer)

    def _head_rows(self, site: SiteSpec, stored: GgufTensor) -> int:
        """Return the rows of a head whose rows are to be put in order, 1 if they are in order."""
        if not self._interleaved or not set(site.roles) <= {Role.Q, Role.K}:
            return 1
        name = "num_attention_heads" if Role.Q in site.roles else "num_key_value_heads"
        return stored.shape[0] // int(getattr(self._config, name))

    def _dequantised(self, stored: GgufTensor, start: int, stop: int) -> Tensor:
        """Return entries `start:stop` along the first axis, fp32."""
        from gguf.quants import dequantize

        rows = stored.shape[0] if len(stored.shape) > 1 else 1
        raw = torch.empty(
            (stop - start if len(stored.shape) > 1 else 1, stored.nbytes // rows), dtype=torch.uint8
        )
        read_into(raw, self._file, stored.start + (start if rows > 1 else 0) * raw.shape[1])
        values = torch.from_numpy(dequantize(raw.numpy(), stored.kind))
        return values.reshape(-1, *stored.shape[1:])

    def _name(self, module: str, layer: int) -> str:
        return f"{self._names.get_name(f'{self._spec.layers}.{layer}.{module}')}.weight"

    def _find(self, module: str, layer: int) -> GgufTensor:
        name = self._name(module, layer)
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(
                f"{self._file}: layer {layer} has no {module} ({name} is not in it), wanted all of "
                f"its {self._layers} blocks; {AGAIN}"
            )
        return stored


def _refuse_unknown(kind: Any, file: Path, name: str) -> None:
    """Raise `UnsupportedModelError` for a ggml type that cannot be dequantised."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{file}: {name} is stored as {kind.name}, which package gguf cannot read; take a "
            "version of the model in another quantisation"
        ) from error
