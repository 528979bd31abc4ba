"""The head of a GGUF file: its sizes and where its tensors are, without the vocabulary.

The reader of package gguf makes objects of every token: 8 s and 600 MB for Llama 3's.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gccompress.errors import ModelError, UnsupportedModelError
from gccompress.weight_files import AGAIN

_VERSIONS = (2, 3)
_ALIGNMENT = 32
_KEPT = 4096  # numbers; longer lists are of tokens
_MOST = 1 << 20  # bytes of a string; tensors at once
_STRING, _ARRAY = 8, 9
# Value types of the format by number, as struct's codes:
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        kind: its ggml type, a `gguf.GGMLQuantizationType`.
        shape: as `[out, in]`.
        start: where its bytes begin in the file.
        nbytes: how many there are.
    """

    kind: Any
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHead:
    """What the head of a GGUF file says.

    Attributes:
        architecture: "llama", "gemma2", ...
        metadata: what it says under its architecture's name, that prefix taken off.
        tensors: by name.
        licence: `general.license`, if it says one.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    licence: str | None = None


def read_head(file: Path) -> GgufHead:
    """Read the head of a GGUF file; check that every tensor lies inside the file.

    Raises:
        ModelError: unreadable, truncated, or no GGUF.
        UnsupportedModelError: another version of the format, or a tensor of unknown type.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            return _Parser(stream, size, file).head()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError) as error:
        raise ModelError(f"{file} is truncated or no GGUF file ({error}); {AGAIN}") from error


class _Parser:
    """Reads the fields of a head one after the other; `ValueError` where they make no sense."""

    def __init__(self, stream: BinaryIO, size: int, file: Path) -> None:
        self._stream, self._size, self._file = stream, size, file

    def head(self) -> GgufHead:
        """Parse it all."""
        if self._bytes(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._file} is GGUF of version {version}, or of another byte order, wanted "
                f"version {' or '.join(map(str, _VERSIONS))}; convert the model again"
            )
        count, fields = self._number("Q"), self._number("Q")
        values = dict(self._field() for _ in range(fields))
        architecture = values["general.architecture"]
        if not isinstance(architecture, str):
            raise ValueError("general.architecture is no name")
        found = [self._tensor() for _ in range(count)]
        alignment = int(values.get("general.alignment", _ALIGNMENT))
        if alignment <= 0:
            raise ValueError(f"alignment {alignment}")
        data = -(-self._stream.tell() // alignment) * alignment
        prefix = f"{architecture}."
        metadata = {
            key.removeprefix(prefix): value
            for key, value in values.items()
            if key.startswith(prefix)
        }
        tensors = {}
        for name, kind, shape, offset in found:
            tensors[name] = self._placed(name, kind, shape, data + offset)
        licence = values.get("general.license")
        named = licence if isinstance(licence, str) else None
        return GgufHead(architecture, metadata, tensors, named)

    def _placed(self, name: str, kind: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            known = GGMLQuantizationType(kind)
            block, size = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(
                f"{self._file}: {name} is of ggml type {kind}, which package gguf does not know; "
                "take a version of the model in another quantisation"
            ) from error
        nbytes = math.prod(shape) // block * size
        if start + nbytes > self._size:
            raise ValueError(f"{name} ends at byte {start + nbytes}, the file at {self._size}")
        return GgufTensor(known, shape, start, nbytes)

    def _field(self) -> tuple[str, Any]:
        return self._string(), self._value(self._number("I"))

    def _value(self, kind: int) -> Any:
        """Return a value; None for a list of strings or a very long one, which is skipped."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        item, count = self._number("I"), self._number("Q")
        if item == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"))
            return None
        width = struct.calcsize(f"<{_NUMBERS[item]}")
        if count > _KEPT:
            self._skip(count * width)
            return None
        return list(struct.unpack(f"<{count}{_NUMBERS[item]}", self._bytes(count * width)))

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, axes = self._string(), self._number("I")
        if axes > 8:
            raise ValueError(f"{name} has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        return name, self._number("I"), shape, self._number("Q")

    def _string(self) -> str:
        length = self._number("Q")
        if length > _MOST:
            raise ValueError(f"a string of {length} bytes")
        return self._bytes(length).decode("utf-8")

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}")))[0]

    def _bytes(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) != count:
            raise ValueError(f"it ends at byte {self._size}, inside its head")
        return data

    def _skip(self, count: int) -> None:
        if self._stream.tell() + count > self._size:
            raise ValueError(f"it ends at byte {self._size}, inside its head")
        # Not by seeking, which throws the buffer away: most strings are a few bytes long.
        while count:
            count -= len(self._bytes(min(count, _MOST)))
