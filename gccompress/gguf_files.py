"""GGUF files, dequantised once into the cache as plain fp32 safetensors with their tokenizer."""

import json
import logging
import re
import shutil
from pathlib import Path

from gccompress.errors import GccompressError, ModelError, UnsupportedModelError
from gccompress.files import cache_folder, file_sha256, new_folder
from gccompress.weight_files import AGAIN, remembered_sha256

logger = logging.getLogger("gccompress")

MANIFEST = "gccompress_gguf.json"
VERSION = 1

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def convert(file: Path, cache_dir: str | Path | None = None) -> tuple[Path, str]:
    """Return the cache folder of a GGUF file's plain fp32 model, and the file's hex SHA-256.

    The folder is made on first use, as a whole or not at all, by one process at a time. A damaged
    one is said so in the log and made again.

    Raises:
        ModelError: damaged, split or unreadable file, or no room in the cache.
        UnsupportedModelError: an architecture or tokenizer transformers cannot read from GGUF.
    """
    from filelock import FileLock

    refuse_split(file)
    try:
        digest = remembered_sha256(file, cache_dir)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    parent = cache_folder(cache_dir) / "gguf"
    folder = parent / digest
    try:
        parent.mkdir(exist_ok=True)
        with FileLock(parent / f"{digest}.lock"):
            damage = _damage(folder, digest, cache_dir)
            if damage is not None and folder.exists():
                logger.warning("cache entry %s is damaged (%s); making it again", folder, damage)
                shutil.rmtree(folder)
            if damage is not None:
                _make(file, folder, digest)
    except OSError as error:
        raise GccompressError(
            f"cache folder {parent}: {error.strerror or error}; name another with --cache-dir"
        ) from error
    return folder, digest


def refuse_split(file: Path) -> None:
    """Raise `ModelError` for one part of a GGUF file that was split, told by its name."""
    if _SPLIT.search(file.name):
        raise ModelError(f"{file} is one part of a split GGUF; merge it: llama-gguf-split --merge")


def _damage(folder: Path, digest: str, cache_dir: str | Path | None) -> str | None:
    """Say what is wrong with a cache entry; None if it is as its manifest says."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if (manifest["version"], manifest["gguf_sha256"]) != (VERSION, digest):
            return f"{MANIFEST} is of another version or file"
        for name, wanted in manifest["files"].items():
            if remembered_sha256(folder / name, cache_dir) != wanted:
                return f"{name} has other content than was written"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def _make(file: Path, folder: Path, digest: str) -> None:
    """Dequantise `file` into `folder`."""
    import transformers

    elements = _count_elements(file)
    needed, free = 4 * elements, shutil.disk_usage(folder.parent).free
    if needed > free:
        raise ModelError(
            f"{file} needs {needed / 1e9:.1f} GB in {folder.parent} once dequantised, "
            f"{free / 1e9:.1f} GB are free; make room or name another folder with --cache-dir"
        )
    logger.info("dequantising %s into %s (once, %.1f GB)", file.name, folder, needed / 1e9)
    with new_folder(folder) as temporary:
        _dequantise(file, temporary)
        files = sorted(path for path in temporary.iterdir() if path.is_file())
        manifest = {
            "version": VERSION,
            "gguf_sha256": digest,
            "gguf_name": file.name,
            "transformers": transformers.__version__,
            "files": {path.name: file_sha256(path) for path in files},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _count_elements(file: Path) -> int:
    """Return the number of weights in a GGUF file, all of whose tensors are there."""
    from gguf import GGUFReader

    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{file} is truncated or no GGUF file ({error}); {AGAIN}") from error


def _dequantise(file: Path, folder: Path) -> None:
    """Save the fp32 model and the tokenizer of a GGUF file."""
    import torch
    from transformers import GgufConfig

    from gccompress.strict_loading import load_tokenizer, load_weights, quiet_transformers

    try:
        tokenizer = load_tokenizer(file.parent, gguf_file=file.name)
        model = load_weights(
            file.parent,
            gguf_file=file.name,
            # Without this the model is marked as quantized and refuses to be saved.
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
    except ModelError as error:
        raise UnsupportedModelError(
            f"{file}: transformers cannot read this GGUF ({error}); use the model's safetensors"
        ) from error
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
