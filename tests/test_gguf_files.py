"""GGUF files: equal to the model they were written from, converted once, or refused."""

import json
import logging
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress import gguf_files
from gccompress.errors import (
    ModelError,
    UnsupportedModelError,
)
from gccompress.files import file_sha256
from gccompress.models import open_model, resolve
from tests.damage import WEIGHTS, refusal
from tests.tiny import logits_of, tiny_model, tiny_tokenizer, tokens

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the tiny llama and its tokenizer as an F32 GGUF file."""
    from gguf import GGUFWriter

    model = tiny_model("llama", layers=2, head_dim=12)
    config, file = model.config, tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(str(file), "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    tokenizer = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    vocabulary += [f"<unused{i}>" for i in range(config.vocab_size - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a llama's tensors under GGUF's names, rows of q and k in GGUF's rotary order."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    result = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith(("q_proj", "k_proj")):
            rows, columns = tensor.shape
            heads = rows // model.config.head_dim
            tensor = tensor.reshape(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)
        result[f"{names.get_name(stem)}.{leaf}"] = tensor
    return result


def test_gguf_equals_the_model_it_was_written_from(
    gguf_file: Path, tmp_path: Path, own_caches: Path
) -> None:
    """Logits, tokenizer; the hash is the file's own, wherever it lies."""
    loaded = open_model(gguf_file, device="cpu")
    ids = tokens()
    want = logits_of(tiny_model("llama", layers=2, head_dim=12), ids)
    assert torch.equal(logits_of(loaded.model, ids), want)
    text = "the river rose"
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer(text)["input_ids"], True).strip() == text
    assert not getattr(loaded.model, "is_quantized", False)
    assert loaded.source.hash == f"sha256:{file_sha256(gguf_file)}"
    assert loaded.source.path is not None and own_caches in loaded.source.path.parents
    (tmp_path / "only").mkdir()
    shutil.copy(gguf_file, tmp_path / "only" / "other.gguf")
    assert resolve(tmp_path / "only").hash == loaded.source.hash
    shutil.copy(gguf_file, tmp_path / "only" / "second.gguf")
    assert "second.gguf" in refusal(ModelError, lambda: resolve(tmp_path / "only"))


def test_gguf_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the cache serves."""
    first = resolve(gguf_file)
    monkeypatch.setattr(gguf_files, "_make", lambda *a: pytest.fail("converted again"))
    assert resolve(gguf_file) == first


@pytest.mark.parametrize("damage", ["truncate", "delete", "change", "manifest"])
def test_damaged_cache_entry_is_made_again(gguf_file: Path, damage: str, caplog: Any) -> None:
    """Whatever is wrong with it, and said so."""
    path = resolve(gguf_file).path
    assert path is not None
    weights = path / WEIGHTS
    data = weights.read_bytes()
    match damage:
        case "truncate":
            weights.write_bytes(data[:-10])
        case "delete":
            (path / "tokenizer.json").unlink()
        case "change":
            weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "manifest":
            (path / "gccompress_gguf.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert resolve(gguf_file).path == path
    assert "damaged" in caplog.text
    assert weights.read_bytes() == data
    caplog.clear()
    resolve(gguf_file)
    assert "damaged" not in caplog.text


def test_damaged_gguf_leaves_nothing_behind(
    gguf_file: Path, tmp_path: Path, own_caches: Path
) -> None:
    """Truncated, empty, not GGUF, one part of several: refused, no cache entry."""
    data = gguf_file.read_bytes()
    for content in (data[: len(data) // 2], data[:500], b"", b"no such format" * 9):
        (tmp_path / "bad.gguf").write_bytes(content)
        assert "bad.gguf" in refusal(ModelError, lambda: resolve(tmp_path / "bad.gguf"))
    part = tmp_path / "x-00001-of-00002.gguf"
    part.write_bytes(data)
    assert "split" in refusal(ModelError, lambda: resolve(part))
    assert not [entry for entry in (own_caches / "gguf").iterdir() if entry.suffix != ".lock"]


def test_gguf_without_room(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked before the work."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 9))
    assert "free" in refusal(ModelError, lambda: resolve(gguf_file))


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    """Names the file and what transformers says."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "x.gguf"), "rwkv6")
    writer.add_tensor("a", torch.zeros(2, 32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refusal(UnsupportedModelError, lambda: resolve(tmp_path / "x.gguf"))
    assert "x.gguf" in message and "safetensors" in message
