"""Weight files: content hashes, and every kind of damage as one error that names it."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gccompress import weight_files
from gccompress.errors import (
    ModelError,
    NumericalError,
    UnsupportedModelError,
)
from gccompress.models import open_model, resolve
from gccompress.weight_files import check_finite, read_header, require_finite
from tests.damage import INDEX, WEIGHTS, edit_json, edit_weights, refusal, sharded
from tests.tiny import tiny_folder

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a small saved model with its tokenizer."""
    return tiny_folder(tmp_path / "model", layers=2)


def test_hash_is_of_config_and_weights_only(folder: Path, tmp_path: Path) -> None:
    """A copy elsewhere has the same hash; a config field, a value, a file's name change it."""
    first = resolve(folder).hash
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    (copy / "notes.txt").write_text("not part of it")
    assert resolve(copy).hash == first
    edit_json(copy / "config.json", lambda config: config.update(rms_norm_eps=1e-3))
    assert resolve(copy).hash != first
    shutil.copy(folder / "config.json", copy)
    assert resolve(copy).hash == first
    edit_weights(copy / WEIGHTS, lambda t: t["model.norm.weight"].add_(1e-3))
    assert resolve(copy).hash != first


def test_hash_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    """Shards written in reverse hash the same."""
    one, two = sharded(tmp_path / "one"), tmp_path / "two"
    two.mkdir()
    for file in sorted(one.iterdir(), reverse=True):
        shutil.copy(file, two)
    assert resolve(one).hash == resolve(two).hash


def test_hash_is_remembered_until_the_file_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The second time nothing is read; a changed file, or a damaged memory of it, is read again."""
    read: list[Path] = []

    def spy(file: Path) -> None:
        read.append(file)
        check_finite(file)

    spy.__name__ = "check_finite"
    monkeypatch.setattr(weight_files, "check_finite", spy)
    first = resolve(folder).hash
    assert resolve(folder).hash == first
    assert len(read) == 1
    edit_weights(folder / WEIGHTS, lambda t: t["model.norm.weight"].add_(1))
    second = resolve(folder).hash
    assert second != first and len(read) == 2
    for memo in (Path(os.environ["GCCOMPRESS_CACHE"]) / "hashes").iterdir():
        memo.write_text("{")
    assert resolve(folder).hash == second
    assert len(read) == 3 and "damaged" in caplog.text


def test_no_such_and_empty_and_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    """Each says which it is."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is empty" in refusal(ModelError, lambda: resolve(empty))
    assert "no such" in refusal(ModelError, lambda: resolve(tmp_path / "none"))
    assert "wanted a .gguf file or the folder" in refusal(
        ModelError, lambda: resolve(folder / WEIGHTS)
    )
    (folder / WEIGHTS).rename(tmp_path / WEIGHTS)
    message = refusal(ModelError, lambda: resolve(folder))
    assert "has no weights" in message and "config.json" in message
    (tmp_path / WEIGHTS).rename(folder / "other.safetensors")
    assert "other.safetensors" in refusal(ModelError, lambda: resolve(folder))
    (folder / "other.safetensors").rename(folder / WEIGHTS)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(ModelError, lambda: resolve(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(ModelError, lambda: resolve(folder))


def test_revision_of_a_local_folder_is_refused(folder: Path) -> None:
    """It would be ignored otherwise."""
    assert "no revision" in refusal(ModelError, lambda: resolve(folder, revision="main"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    """Never read, with the way to convert them."""
    (folder / WEIGHTS).rename(folder / name)
    message = refusal(ModelError, lambda: open_model(folder))
    assert name in message and "refused" in message and "save_pretrained" in message


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1, -100])
def test_truncated_safetensors(folder: Path, keep: int) -> None:
    """Wherever the file ends."""
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep] if keep else b"")
    message = refusal(ModelError, lambda: resolve(folder))
    assert "truncated" in message and WEIGHTS in message


def test_other_damage_to_safetensors(folder: Path) -> None:
    """Too long, no header, a header that does not add up."""
    file = folder / WEIGHTS
    data = file.read_bytes()
    file.write_bytes(data + b"more")
    assert "longer" in refusal(ModelError, lambda: resolve(folder))
    file.write_bytes(b"\xff" * 4000)
    assert "safetensors" in refusal(ModelError, lambda: resolve(folder))
    length = int.from_bytes(data[:8], "little")
    file.write_bytes(data[:8] + b"x" * length + data[8 + length :])
    assert "damaged safetensors header" in refusal(ModelError, lambda: resolve(folder))
    file.write_bytes(data[: 8 + length].replace(b'"F32"', b'"F64"') + data[8 + length :])
    assert "damaged safetensors header" in refusal(ModelError, lambda: resolve(folder))


def test_header_matches_the_library(folder: Path) -> None:
    """Oracle: names and shapes as safetensors itself reads them."""
    want = {name: tuple(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}
    assert {name: e.shape for name, e in read_header(folder / WEIGHTS).items()} == want


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_value_that_is_not_finite_is_named(
    folder: Path, value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, tensor and place, also when the tensor is read in pieces."""
    monkeypatch.setattr(weight_files, "_CHUNK", 100)
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name][17, 5] = value

    edit_weights(folder / WEIGHTS, spoil)
    for _ in range(2):  # a failed check is not remembered as passed
        message = refusal(NumericalError, lambda: open_model(folder, device="cpu"))
        assert WEIGHTS in message and name in message and "[17, 5]" in message


def test_require_finite_degenerate_shapes() -> None:
    """Scalars, empty tensors, integers and 8-bit floats."""
    require_finite(torch.tensor(1.0), "t", "here")
    require_finite(torch.empty(0, 3), "t", "here")
    require_finite(torch.tensor([1, 2]), "t", "here")
    require_finite(torch.ones(3).to(torch.float8_e4m3fn), "t", "here")
    for most in (torch.float32, torch.bfloat16, torch.float16):  # finite, though their sum is not
        require_finite(torch.full((3, 2), torch.finfo(most).max, dtype=most), "t", "here")
    for bad in (torch.tensor(torch.nan), torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)):
        refusal(NumericalError, lambda bad=bad: require_finite(bad, "t", "here"))


def test_damaged_index(tmp_path: Path) -> None:
    """A missing shard, a tensor that is not in its file, no JSON, no map."""
    path = sharded(tmp_path / "s")
    shard = weight_files.weight_files(path)[1]
    away = shard.rename(tmp_path / "away")
    assert shard.name in refusal(ModelError, lambda: resolve(path))
    away.rename(shard)
    index = (path / INDEX).read_text()
    edit_json(path / INDEX, lambda c: c["weight_map"].update(ghost=shard.name))
    assert "ghost" in refusal(ModelError, lambda: resolve(path))
    for text in ("{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
        (path / INDEX).write_text(text)
        assert INDEX in refusal(ModelError, lambda: resolve(path))
    (path / INDEX).write_text(index)
    resolve(path)
    data = shard.read_bytes()
    shard.write_bytes(data[:-3])
    assert "truncated" in refusal(ModelError, lambda: resolve(path))


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "a/b.safetensors", "..", "..\\x"]
)
def test_index_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Only plain names beside the index are followed, even when the file exists."""
    path = sharded(tmp_path / "s")
    shutil.copy(weight_files.weight_files(path)[0], tmp_path / "outside.safetensors")
    tensor = next(iter(read_header(tmp_path / "outside.safetensors")))
    edit_json(path / INDEX, lambda c: c["weight_map"].update({tensor: name}))
    assert "only files beside the index" in refusal(ModelError, lambda: resolve(path))


def test_config_of_no_or_unknown_type(folder: Path) -> None:
    """Refused before any weight is read, with the known types and the file to add."""
    edit_json(folder / "config.json", lambda c: c.update(model_type="mamba9"))
    message = refusal(UnsupportedModelError, lambda: resolve(folder))
    assert "mamba9" in message and "llama" in message and "mamba9.toml" in message
    edit_json(folder / "config.json", lambda c: c.pop("model_type"))
    assert "model_type" in refusal(ModelError, lambda: resolve(folder))
    for text in ("", "{", "[]", "\x00"):
        (folder / "config.json").write_text(text)
        refusal(ModelError, lambda: resolve(folder))
