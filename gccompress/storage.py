"""Weights of a safetensors checkpoint, read piece by piece: no memory map, no model class.

Everything that headers and config can tell is checked before the first weight is read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gccompress.architectures import ArchSpec, SiteSpec, role_shapes
from gccompress.errors import ModelError, UnsupportedModelError
from gccompress.quantised import (
    Scaling,
    find_scaling,
    refuse_integers,
    refuse_packed,
    widen,
)
from gccompress.weight_files import AGAIN, TensorEntry, read_header, weight_files

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_DTYPES = {**_FLOATS, **_FP8}
PIECE = 1 << 22  # elements in memory besides the result while that is put together
_MOST = 1 << 30  # bytes asked for at once; systems give no more than 2 GiB


class Storage(Protocol):
    """How one file format keeps a decoder's weights; rows are outputs of a whole module."""

    def shape(self, site: SiteSpec, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of a module."""

    def stored_bytes(self, site: SiteSpec, layer: int) -> int:
        """Return how many bytes a module's weight takes in the file, its scales not counted."""

    def rows(self, site: SiteSpec, layer: int, start: int, stop: int) -> Tensor:
        """Return rows `start:stop` of a module's weight `[out, in]`."""

    def norm(self, module: str, layer: int) -> Tensor:
        """Return the weight `[d]` of a norm, as the family's transformers class would hold it."""

    def tensor(self, module: str, layer: int) -> tuple[Path, str]:
        """Return the file and the name in it of a module's weight, for messages."""


@dataclass(frozen=True)
class _Stored:
    """A tensor and the file it is in."""

    file: Path
    entry: TensorEntry


class SafetensorsStorage:
    """The decoder in one or several safetensors files."""

    def __init__(
        self, folder: Path, config: Any, spec: ArchSpec, quantization: Mapping[str, Any] | None
    ) -> None:
        """Read all headers; check that each layer's tensors are there, in the shape they must have.

        Args:
            folder: With `model.safetensors`, or an index and its files.
            config: The transformers config of the language model.
            spec: Its family.
            quantization: `quantization_config` of the checkpoint.

        Raises:
            ModelError: damaged or missing files or tensors, a wrong shape.
            UnsupportedModelError: packed weights.
        """
        self._where = folder
        self._spec = spec
        self._tensors = _all_tensors(folder)
        self._shapes = {name: stored.entry.shape for name, stored in self._tensors.items()}
        refuse_packed(self._tensors, quantization, folder)
        self._layers = getattr(config, spec.layer_count)
        self._root = self._find_root()
        self._scalings: dict[str, Scaling] = {}
        shapes = role_shapes(config, spec)
        for site in spec.sites:
            rows = sum(shapes[role][0] for role in site.roles)
            wanted = (rows, shapes[site.roles[0]][1])
            for layer in range(self._layers):
                self._check_weight(site, layer, wanted, quantization)
                self._check_norms(site, layer, wanted)

    def _find_root(self) -> str:
        """Return where the decoder's list of layers is, whatever the checkpoint prefixes it with.

        GPT-2 is saved without "transformer."; language models inside others are saved below
        "language_model." or "model.language_model.". A vision tower has layers of the same names
        but not all of a decoder's modules.
        """
        leaf = self._spec.layers.rpartition(".")[2]
        modules = "|".join(re.escape(site.module) for site in self._spec.sites)
        pattern = re.compile(rf"(?:(.*)\.)?{re.escape(leaf)}\.(\d+)\.({modules})\.weight")
        found: dict[str, set[tuple[int, str]]] = {}
        for name in self._tensors:
            match = pattern.fullmatch(name)
            if match:
                root = f"{match[1]}.{leaf}" if match[1] else leaf
                found.setdefault(root, set()).add((int(match[2]), match[3]))
        roots = _decoders(found, {site.module for site in self._spec.sites})
        if self._spec.layers in roots:
            roots = [self._spec.layers]
        if len(roots) == 1:
            self._check_count({layer for layer, _ in found[roots[0]]})
            return roots[0]
        if roots:
            raise UnsupportedModelError(
                f"{self._where}: {' and '.join(sorted(roots))} are both layers of family "
                f"{self._spec.name}, wanted one language model; save the one you mean alone"
            )
        raise ModelError(
            f"{self._where}: no tensor is named as those of family {self._spec.name} "
            f"({self._spec.layers}.0.{self._spec.sites[0].module}.weight, with any prefix); "
            "config and weights are not of one model"
        )

    def _check_count(self, layers: set[int]) -> None:
        surplus = sorted(layer for layer in layers if layer >= self._layers)
        if surplus:
            raise ModelError(
                f"{self._where}: layer {surplus[0]} is in the weights, while the config's "
                f"{self._spec.layer_count} is {self._layers}; config and weights are not of one "
                "model"
            )

    def _check_weight(
        self,
        site: SiteSpec,
        layer: int,
        wanted: tuple[int, int],
        quantization: Mapping[str, Any] | None,
    ) -> None:
        name = self._name(site.module, layer)
        stored = self._find(site.module, layer)
        expected = wanted[::-1] if site.conv1d else wanted
        if stored.entry.shape != expected:
            order = "[in, out]" if site.conv1d else "[out, in]"
            raise ModelError(
                f"{stored.file}: {name} ({' + '.join(site.roles)} of layer {layer}) has shape "
                f"{list(stored.entry.shape)}, wanted {list(expected)} {order} by the config; "
                "config and weights are not of one model"
            )
        if stored.entry.dtype in _FLOATS:
            return
        if stored.entry.dtype not in _FP8 or site.conv1d:
            refuse_integers(name, stored.entry.dtype, stored.file)
        scaling = find_scaling(name, wanted, self._shapes, quantization, stored.file)
        scales = self._tensors[scaling.name]
        if scales.entry.dtype not in _FLOATS:
            raise UnsupportedModelError(
                f"{scales.file}: {scaling.name} is stored as {scales.entry.dtype}, wanted one of "
                f"{', '.join(_FLOATS)}; take another version of the model"
            )
        self._scalings[name] = scaling

    def _check_norms(self, site: SiteSpec, layer: int, wanted: tuple[int, int]) -> None:
        rows, columns = wanted
        for module, width in ((site.pre_norm, columns), (site.post_norm, rows)):
            if module is None:
                continue
            stored = self._find(module, layer)
            if stored.entry.shape != (width,) or stored.entry.dtype not in _FLOATS:
                raise ModelError(
                    f"{stored.file}: {self._name(module, layer)} is {stored.entry.dtype} "
                    f"{list(stored.entry.shape)}, wanted floats [{width}]; {AGAIN}"
                )

    def shape(self, site: SiteSpec, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of a module."""
        rows, columns = self._find(site.module, layer).entry.shape
        return (columns, rows) if site.conv1d else (rows, columns)

    def stored_bytes(self, site: SiteSpec, layer: int) -> int:
        """Return the bytes of a module's weight, scales not counted."""
        return self._find(site.module, layer).entry.nbytes

    def rows(self, site: SiteSpec, layer: int, start: int, stop: int) -> Tensor:
        """Return rows `start:stop` of a module's weight `[out, in]`; fp8 as fp32."""
        stored = self._find(site.module, layer)
        name = self._name(site.module, layer)
        if site.conv1d:
            return _columns(stored, start, stop).T
        if name in self._scalings:
            return self._widened(stored, self._scalings[name], start, stop)
        return _stored_rows(stored, start, stop)

    def norm(self, module: str, layer: int) -> Tensor:
        """Return the weight `[d]` of a norm, as stored."""
        stored = self._find(module, layer)
        return _stored_rows(stored, 0, stored.entry.shape[0])

    def tensor(self, module: str, layer: int) -> tuple[Path, str]:
        """Return the file and the name in it of a module's weight."""
        return self._find(module, layer).file, self._name(module, layer)

    def _widened(self, stored: _Stored, scaling: Scaling, start: int, stop: int) -> Tensor:
        columns = stored.entry.shape[1]
        scales = self._tensors[scaling.name]
        scale = _whole(scales)
        result = torch.empty(stop - start, columns, dtype=torch.float32)
        step = max(1, PIECE // columns)
        for first in range(start, stop, step):
            last = min(first + step, stop)
            piece = result[first - start : last - start]
            widen(_stored_rows(stored, first, last), scale, scaling, first, piece)
        return result

    def _name(self, module: str, layer: int) -> str:
        return f"{self._root}.{layer}.{module}.weight"

    def _find(self, module: str, layer: int) -> _Stored:
        name = self._name(module, layer)
        stored = self._tensors.get(name)
        if stored is None:
            raise ModelError(
                f"{self._where}: layer {layer} has no {module} ({name} is in none of its files), "
                f"wanted all of the config's {self._layers} layers; {AGAIN}"
            )
        return stored


def _all_tensors(folder: Path) -> dict[str, _Stored]:
    """Return every tensor of a checkpoint by name."""
    tensors: dict[str, _Stored] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file).items():
            if name in tensors:
                raise ModelError(
                    f"{folder}: {name} is in {tensors[name].file.name} and in {file.name}; {AGAIN}"
                )
            tensors[name] = _Stored(file, entry)
    return tensors


def _decoders(found: Mapping[str, set[tuple[int, str]]], modules: set[str]) -> list[str]:
    """Return the roots whose layers have every module; if none has, that with the most weights."""
    whole = [root for root, weights in found.items() if modules == {m for _, m in weights}]
    return whole or sorted(found, key=lambda root: len(found[root]))[-1:]


def _stored_rows(stored: _Stored, start: int, stop: int) -> Tensor:
    """Read entries `start:stop` along the first axis, as stored."""
    shape = stored.entry.shape
    result = torch.empty(stop - start, *shape[1:], dtype=_DTYPES[stored.entry.dtype])
    row = stored.entry.nbytes // shape[0]
    read_into(result, stored.file, stored.entry.start + start * row)
    return result


def _whole(stored: _Stored) -> Tensor:
    """Read a whole tensor, of whatever number of axes."""
    result = torch.empty(stored.entry.shape, dtype=_DTYPES[stored.entry.dtype])
    read_into(result, stored.file, stored.entry.start)
    return result


def _columns(stored: _Stored, start: int, stop: int) -> Tensor:
    """Read columns `start:stop`; the bytes between them are read too, piece by piece."""
    rows, columns = stored.entry.shape
    if (start, stop) == (0, columns):
        return _stored_rows(stored, 0, rows)
    result = torch.empty(rows, stop - start, dtype=_DTYPES[stored.entry.dtype])
    step = max(1, PIECE // columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        result[first:last] = _stored_rows(stored, first, last)[:, start:stop]
    return result


def read_into(target: Tensor, file: Path, start: int) -> None:
    """Fill a contiguous CPU tensor with the bytes of a file from `start` on.

    Plain reads, because pages of a memory map count as the process's own memory.

    Raises:
        ModelError: the file cannot be read, or ends before.
    """
    view = memoryview(target.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            while view:
                count = stream.readinto(view[:_MOST])
                if not count:
                    raise ModelError(f"{file} ended while it was read; {AGAIN}")
                view = view[count:]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
