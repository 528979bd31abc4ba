"""A model's weights by role and layer, straight from its files: safetensors shards or GGUF.

No model class is built, and nothing is in memory but what was asked for.
"""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from gccompress.architectures import ArchSpec, SiteSpec, refuse_config, spec_for, split_rows
from gccompress.errors import ModelError
from gccompress.gguf_storage import open_gguf
from gccompress.roles import Role
from gccompress.sources import Located, check_family, hub_remedy, locate, read_config
from gccompress.storage import SafetensorsStorage, Storage
from gccompress.weight_files import content_hash, require_finite, weight_files
from gccompress.weight_source import norm_scale


class WeightStream:
    """The decoder of one causal language model on disk; a `weight_source.WeightSource`.

    Weights come in the float dtype they are stored in, each its own where a checkpoint mixes them;
    fp8 as fp32 (see `quantised.widen`), GGUF as fp32. Opened with `open_stream`.

    Attributes:
        name: as the user gave it.
        spec: the model's family.
        config: its transformers config, as a dictionary.
    """

    def __init__(
        self, found: Located, config: Any, spec: ArchSpec, storage: Storage, cache_dir: Any = None
    ) -> None:
        """Take what `open_stream` has found and checked."""
        self.name: str = found.name
        self.spec: ArchSpec = spec
        self.config: dict[str, Any] = config.to_dict()
        self._found = found
        self._config = config
        self._storage = storage
        self._cache_dir: str | Path | None = cache_dir

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles its family has."""
        return self.spec.roles

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return int(getattr(self._config, self.spec.layer_count))

    @cached_property
    def hash(self) -> str:
        """The hash that `sources.resolve` gives the model: "sha256:...".

        Computed when first asked for, since it reads every byte of the model once (twice for
        safetensors, whose values are checked too), and remembered by path, size and modification
        time.
        """
        if self._found.is_gguf:
            from gccompress.weight_files import remembered_sha256

            return f"sha256:{remembered_sha256(self._found.path, self._cache_dir)}"
        folder = self._found.path
        return content_hash(folder, weight_files(folder), self._cache_dir)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the weights and the config come from."""
        if self._found.is_gguf:
            return (self._found.path,)
        return self._found.path / "config.json", *weight_files(self._found.path)

    def shape(self, role: Role, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of (role, layer), known from headers alone."""
        site, start, stop = self._place(role, layer)
        return stop - start, self._storage.shape(site, layer)[1]

    def stored_bytes(self, role: Role, layer: int) -> int:
        """Return how many bytes of its file the weight of (role, layer) takes."""
        site, start, stop = self._place(role, layer)
        whole = self._storage.shape(site, layer)[0]
        return self._storage.stored_bytes(site, layer) * (stop - start) // whole

    def weight(self, role: Role, layer: int) -> Tensor:
        """Return the weight `[out, in]`, on the CPU.

        Raises:
            NumericalError: it holds NaN or infinity; names the tensor in its file.
            ModelError: its file cannot be read any more.
        """
        return self.rows(role, layer, 0, self.shape(role, layer)[0])

    def rows(self, role: Role, layer: int, start: int, stop: int) -> Tensor:
        """Return rows `start:stop` of the weight, `[stop - start, in]`; reads no others.

        Except where rows are not stored one after the other: of a Conv1D every byte is read, a
        piece at a time, and of q and k in a GGUF of family llama whole heads.

        Raises:
            IndexError: rows out of range.
            NumericalError, ModelError: as `weight`.
        """
        site, first, last = self._place(role, layer)
        if not 0 <= start <= stop <= last - first:
            raise IndexError(f"layer {layer} {role}: rows {start}:{stop} of {last - first}")
        values = self._storage.rows(site, layer, first + start, first + stop)
        file, name = self._storage.tensor(site.module, layer)
        require_finite(values, f"{name} ({role} of layer {layer})", file, start)
        return values

    def in_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[in]` multiplier of the norm before the role, as `ModelView.in_scale`."""
        return self._scale(self.spec.site_of(role).pre_norm, layer)

    def out_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[out]` multiplier of the norm after the role, as `ModelView.out_scale`."""
        return self._scale(self.spec.site_of(role).post_norm, layer)

    def _scale(self, module: str | None, layer: int) -> Tensor | None:
        self._check_layer(layer)
        if module is None:
            return None
        weight = self._storage.norm(module, layer)
        file, name = self._storage.tensor(module, layer)
        require_finite(weight, name, file)
        return norm_scale(weight, self.spec)

    def _place(self, role: Role, layer: int) -> tuple[SiteSpec, int, int]:
        """Return the site of a role, and which rows of it are the role's."""
        self._check_layer(layer)
        site = self.spec.site_of(role)
        rows = self._storage.shape(site, layer)[0]
        for part, start, stop in split_rows(self._config, site, rows):
            if part == role:
                return site, start, stop
        raise AssertionError(f"{role} is not in its own site")

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")


def open_stream(
    model: str | Path, *, revision: str | None = None, cache_dir: str | Path | None = None
) -> WeightStream:
    """Open a model's files for reading weight by weight.

    Headers, index and config are checked in full, values where they are read.

    Args:
        model: An alias, a local folder or `.gguf` file, or a hub id, as for `sources.resolve`.
        revision: Branch, tag or commit on the hub.
        cache_dir: This package's cache, where hashes are remembered.

    Raises:
        ModelError: not found, not to be had, damaged, incomplete, or not as its config says.
        UnsupportedModelError: an unknown family, a mixture of experts, an already compressed
            model, packed quantised weights.
    """
    found = locate(model, revision=revision)
    with hub_remedy(found):
        if found.is_gguf:
            return WeightStream(found, *open_gguf(found.path), cache_dir)
        return _open_folder(found, cache_dir)


def _open_folder(found: Located, cache_dir: str | Path | None) -> WeightStream:
    raw = read_config(found.path)
    refuse_config(SimpleNamespace(**raw), found.name)
    check_family(raw, found.name)
    text = raw.get("text_config")
    language = text if isinstance(text, dict) and "model_type" in text else raw
    config = _parse_config(language, found)
    refuse_config(config, found.name)
    spec = spec_for(config.model_type)
    quantization = raw.get("quantization_config") or language.get("quantization_config")
    storage = SafetensorsStorage(found.path, config, spec, quantization)
    return WeightStream(found, config, spec, storage, cache_dir)


def _parse_config(raw: dict[str, Any], found: Located) -> Any:
    """Return the transformers config of a config.json; what that leaves out has its default."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(
            f"{found.path / 'config.json'}: {reason}; wanted a config of transformers, copy the "
            "original's"
        ) from error
