"""Safetensors files of a model folder: which they are, whether they are whole, what they hash to.

Structure is read from the headers alone; values are streamed once and the outcome remembered.
"""

import hashlib
import json
import logging
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gccompress.errors import GccompressError, ModelError, NumericalError
from gccompress.files import cache_folder, file_sha256, write_text
from gccompress.progress import track

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("gccompress")

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "fetch or save the model again"

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER = 100_000_000  # bytes, the limit of the format's own reader
_CHUNK = 1 << 24  # elements looked at together when values are checked
_BITS = {"BOOL": 8, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8} | {
    f"{kind}{bits}": bits for kind in "FIU" for bits in (8, 16, 32, 64)
}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as its file's header describes it.

    Attributes:
        dtype: by the format's name, as "BF16".
        shape: as stored.
        start: where its bytes begin in the file.
        nbytes: how many there are.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files a model folder is loaded from, sorted by name, all whole.

    Raises:
        ModelError: no weights, pickled weights only, a missing or truncated file, an index that
            is damaged, points out of the folder, or names a tensor its file does not hold.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        read_header(single)
        return (single,)
    if not index.exists():
        raise ModelError(_no_weights(folder))
    held: dict[str, set[str]] = {}
    for tensor, shard in sorted(_weight_map(index).items()):
        if shard not in held:
            held[shard] = set(read_header(_shard(folder, index, shard)))
        if tensor not in held[shard]:
            raise ModelError(f"{index} says {tensor} is in {shard}, where it is not; {AGAIN}")
    return tuple(folder / shard for shard in sorted(held))


def _no_weights(folder: Path) -> str:
    """Say why a folder without `SINGLE` and `INDEX` has no weights to load."""
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    loose = sorted(file.name for file in folder.glob("*.safetensors"))
    if loose:
        return f"{folder} holds {loose[0]} but neither {SINGLE} nor {INDEX}; {AGAIN}"
    if pickled:
        return (
            f"{folder} holds only pickled weights ({pickled[0]}), which can run any code when "
            "read and are refused; save the model as safetensors where you trust the file: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
        )
    return f"{folder} has no weights, only {_names(folder)}; wanted {SINGLE} or {INDEX}"


def _names(folder: Path) -> str:
    """List a few names in a folder for an error message."""
    names = sorted(file.name for file in folder.iterdir() if not file.name.startswith("."))
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _weight_map(index: Path) -> dict[str, str]:
    """Read an index's map of tensor name to file name."""
    try:
        content = json.loads(index.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{index} cannot be read as JSON ({error}); {AGAIN}") from error
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index} has no weight_map of tensor names to files; {AGAIN}")
    if not all(isinstance(shard, str) for shard in found.values()):
        raise ModelError(f"{index}: a value of weight_map is not a file name; {AGAIN}")
    return found


def _shard(folder: Path, index: Path, shard: str) -> Path:
    """Return a shard's path; only a plain name inside the folder is followed."""
    if Path(shard).name != shard or "\\" in shard or "\0" in shard or shard in (".", ".."):
        raise ModelError(
            f"{index} names {shard!r}; only files beside the index are read, correct its weight_map"
        )
    if not (folder / shard).is_file():
        raise ModelError(f"{index} names {shard}, which is not in {folder}; {AGAIN}")
    return folder / shard


def read_header(file: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file, its length checked against them.

    Format: 8 bytes little-endian length, that many bytes of JSON, the tensors' bytes without
    gaps (https://huggingface.co/docs/safetensors, section "Format").

    Raises:
        ModelError: unreadable, not safetensors, or shorter or longer than the header says.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            raw = stream.read(length) if length <= min(size, _MAX_HEADER) else b""
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    if length == 0 or len(raw) != length:
        raise ModelError(
            f"{file} is truncated or no safetensors file: {size} bytes, a header of {length} bytes "
            f"announced; {AGAIN}"
        )
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = {name: _entry(entry, 8 + length) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file}: damaged safetensors header ({error}); {AGAIN}") from error
    ends = (entry.start + entry.nbytes for entry in entries.values())
    wanted = max(ends, default=8 + length)
    if size != wanted:
        state = "truncated" if size < wanted else "longer than its header says"
        raise ModelError(f"{file} is {state}: {size} bytes, wanted {wanted}; {AGAIN}")
    return entries


def _entry(entry: dict[str, list[int] | str], data: int) -> TensorEntry:
    """Check one header entry of a file whose tensors begin at byte `data`."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or isinstance(shape, str) or isinstance(offsets, str):
        raise TypeError("an entry is not dtype, shape, data_offsets")
    start, end = offsets
    if not 0 <= start <= end:
        raise ValueError(f"data_offsets {offsets}")
    bits = _BITS.get(dtype)
    if bits is not None and (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{end - start} bytes for {dtype} {shape}")
    return TensorEntry(dtype, tuple(shape), data + start, end - start)


def content_hash(folder: Path, files: tuple[Path, ...], cache_dir: str | Path | None = None) -> str:
    """Return "sha256:..." over config.json and the weight files, by name and bytes.

    Files are taken in order of their names. Weights are checked to be finite on the way; both
    outcomes are remembered in the cache by path, size and modification time.

    Raises:
        NumericalError: a weight holds NaN or infinity; names file, tensor and place.
    """
    total = hashlib.sha256()
    total.update(f"config.json\0{file_sha256(folder / 'config.json')}\n".encode())
    for file in track(files, "checking and hashing weights"):
        digest = remembered_sha256(file, cache_dir, check=check_finite)
        total.update(f"{file.name}\0{digest}\n".encode())
    return f"sha256:{total.hexdigest()}"


def remembered_sha256(
    file: Path, cache_dir: str | Path | None = None, *, check: Callable[[Path], None] | None = None
) -> str:
    """Return a file's SHA-256 after `check` passed; both are done once per path, size and mtime."""
    path = file.resolve()
    before = os.stat(path)
    state = {"path": str(path), "size": before.st_size, "mtime_ns": before.st_mtime_ns}
    key = f"{check.__name__ if check else ''}:{path}"
    memo = cache_folder(cache_dir) / "hashes" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    try:
        remembered = json.loads(memo.read_bytes())
        if {name: remembered[name] for name in state} == state:
            return str(remembered["sha256"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged (%s); hashing %s again", memo, error, file)
    if check is not None:
        check(path)
    digest = file_sha256(path)
    after = os.stat(path)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise ModelError(f"{file} changed while it was read; wait until it is written and retry")
    try:
        write_text(memo, json.dumps({**state, "sha256": digest}))
    except GccompressError as error:
        logger.warning("hash of %s not remembered: %s", file, error)
    return digest


def check_finite(file: Path) -> None:
    """Raise `NumericalError` naming the first tensor that holds NaN or infinity.

    Reads one piece of one tensor at a time.
    """
    from safetensors import safe_open

    header = read_header(file)
    with safe_open(file, framework="pt") as tensors:
        for name, entry in sorted(header.items()):
            if entry.dtype not in _FLOATS or math.prod(entry.shape) == 0:
                continue
            if not entry.shape:
                require_finite(tensors.get_tensor(name), name, file)
                continue
            rows = max(1, _CHUNK // max(1, math.prod(entry.shape[1:])))
            view = tensors.get_slice(name)
            for start in range(0, entry.shape[0], rows):
                require_finite(view[start : start + rows], name, file, start)


def require_finite(values: "Tensor", name: str, where: object, first_row: int = 0) -> None:
    """Raise `NumericalError` when the tensor `name` holds NaN or infinity.

    Args:
        values: Its rows from `first_row` on, any shape and dtype.
        name: What to call the tensor.
        where: The file or model it is in.
        first_row: Number of the first row of `values`.
    """
    import torch

    if values.numel() == 0 or not (values.is_floating_point() or values.is_complex()):
        return
    if values.dtype.itemsize == 1:
        values = values.to(torch.float32)  # 8-bit floats have no reductions
    # A sum costs a tenth of a mask; it is NaN or infinite when anything is, else by overflow only.
    if bool(values.sum().isfinite()):
        return
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad) == 0:
        return
    place = [int(index) for index in bad[0]]
    value = float(values[tuple(place)])
    if place:
        place[0] += first_row
    raise NumericalError(
        f"{where}: tensor {name} is {value} at {place}; every weight must be finite, {AGAIN}"
    )
