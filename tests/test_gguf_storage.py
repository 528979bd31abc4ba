"""Weights streamed from GGUF files are those of the converted model; damaged files are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress import gguf_storage
from gccompress.errors import ModelError, NumericalError, UnsupportedModelError
from gccompress.gguf_head import read_head
from gccompress.models import known_aliases, open_model
from gccompress.roles import Role
from gccompress.shards import open_stream
from gccompress.view import ModelView
from tests.damage import refusal
from tests.streams import assert_same_source, same
from tests.tiny import FAMILIES, tiny_model
from tests.tiny_gguf import gguf_tensors, write_gguf

pytestmark = pytest.mark.usefixtures("own_caches")

SIZES: dict[str, Any] = {"layers": 2, "hidden_size": 64, "intermediate_size": 96}
# What transformers cannot read from a GGUF and takes to be as in the released models.
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "intermediate_size": None},
    "phi3": {"vocab_size": 32064},
    "qwen3": {"head_dim": 128},
}


def gguf_model(family: str) -> Any:
    """Return a tiny model of sizes that a GGUF can hold quantised and transformers can read."""
    return tiny_model(family, **{**SIZES, **SPECIAL.get(family, {})})


def as_transformers_reads(file: Path) -> ModelView:
    """Load a GGUF file with transformers."""
    from transformers import GgufConfig

    from gccompress.strict_loading import load_weights

    dequantised = GgufConfig(dequantize=True)
    return ModelView(
        load_weights(
            file.parent, gguf_file=file.name, quantization_config=dequantised, dtype="auto"
        )
    )


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_is_what_transformers_reads(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every family, plain and quantised: order of rows in heads, norms, fused weights."""
    model = gguf_model(family)
    file = write_gguf(tmp_path / "m.gguf", model, kind)
    monkeypatch.setattr(gguf_storage, "_PIECE", 700)
    stream = open_stream(file)
    for role in stream.roles if kind == "F32" else ():
        for layer in range(2):
            assert same(stream.weight(role, layer), ModelView(model).weight(role, layer))
    assert stream.spec.name == ("llama" if family == "mistral" else family)
    monkeypatch.undo()
    assert_same_source(stream, as_transformers_reads(file))
    bits = {"F32": 32, "F16": 16, "BF16": 16, "Q8_0": 8.5, "Q4_1": 5}[kind]
    assert stream.stored_bytes(Role.Q, 0) * 8 == bits * stream.weight(Role.Q, 0).numel()


def test_gguf_hash_is_that_of_resolve(tmp_path: Path) -> None:
    """Of the file itself, which need not be converted for it."""
    from gccompress.files import file_sha256

    file = write_gguf(tmp_path / "m.gguf", gguf_model("llama"))
    assert open_stream(tmp_path).hash == f"sha256:{file_sha256(file)}"


def check_head(file: Path) -> None:
    """Compare the head with what package gguf reads."""
    from gguf import GGUFReader

    head, reader = read_head(file), GGUFReader(file)
    assert head.architecture == reader.fields["general.architecture"].contents()
    for key, value in head.metadata.items():
        assert reader.fields[f"{head.architecture}.{key}"].contents() == value
    assert len(head.metadata) == sum(k.startswith(head.architecture) for k in reader.fields)
    assert {
        t.name: (t.tensor_type, tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes)
        for t in reader.tensors
    } == {n: (t.kind, t.shape, t.start, t.nbytes) for n, t in head.tensors.items()}


@pytest.mark.parametrize("alignment", [None, 64])
def test_gguf_head(alignment: int | None, tmp_path: Path) -> None:
    """Values of every type, vocabulary before and after them, an alignment of its own."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_token_list([f"t{i}" for i in range(7000)])
    writer.add_token_types([1] * 7000)
    for code, value in (
        *(("uint8", 200), ("int8", -3), ("uint16", 65000), ("int16", -300), ("uint32", 2**32 - 1)),
        *(("int32", -(2**31)), ("uint64", 2**64 - 1), ("int64", -(2**63)), ("float32", 0.5)),
        *(("float64", 1e300), ("bool", True), ("string", "\u00fcber"), ("array", [3, 4, 5])),
    ):
        getattr(writer, f"add_{code}")(f"llama.{code}", value)
    for name, shape in (("a", (3, 32)), ("b", (5,)), ("c", (2, 3, 4))):
        writer.add_tensor(name, torch.zeros(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    check_head(tmp_path / "x.gguf")


def test_gguf_cut_at_every_place(tmp_path: Path) -> None:
    """One line, whatever is missing."""
    file = write_gguf(tmp_path / "m.gguf", gguf_model("llama"))
    data = file.read_bytes()
    for length in (*range(0, 1500, 7), len(data) - 1):
        file.write_bytes(data[:length])
        assert "m.gguf is truncated" in refusal(ModelError, lambda: open_stream(file))
    file.write_bytes(data[:4] + b"\0\0\0\3" + data[8:])
    assert "byte order" in refusal(UnsupportedModelError, lambda: open_stream(file))


def test_damaged_gguf(tmp_path: Path) -> None:
    """Truncated, no GGUF, split, a tensor missing, of another shape or one too many."""
    model = gguf_model("llama")
    tensors = gguf_tensors(model)
    file = write_gguf(tmp_path / "m.gguf", model)
    data = file.read_bytes()
    for content in (data[: len(data) // 2], data[:300], b"", b"no such format" * 9):
        file.write_bytes(content)
        assert "m.gguf" in refusal(ModelError, lambda: open_stream(file))
    part = tmp_path / "x-00001-of-00002.gguf"
    part.write_bytes(data)
    assert "split" in refusal(ModelError, lambda: open_stream(part))
    name = "blk.1.attn_k.weight"
    for changed, words in (
        ({k: v for k, v in tensors.items() if k != name}, ("layer 1", name)),
        ({k: v for k, v in tensors.items() if not k.startswith("blk.0.")}, ("layer 0",)),
        ({**tensors, name: tensors[name][:-1]}, (name, "[31, 64]", "[32, 64]")),
        ({**tensors, "blk.2.attn_k.weight": tensors[name]}, ("blk.2", "block_count")),
    ):
        write_gguf(file, model, tensors=changed)
        message = refusal(ModelError, lambda: open_stream(file))
        assert all(word in message for word in words), message
    write_gguf(file, model, tensors={**tensors, name: tensors[name] * torch.nan})
    assert name in refusal(NumericalError, lambda: open_stream(file).rows(Role.K, 1, 0, 2))


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    """Unknown, or without what a language model's metadata must say."""
    from gguf import GGUFWriter

    for architecture, word in (("rwkv6", "rwkv6"), ("llama", "embedding_length")):
        writer = GGUFWriter(str(tmp_path / "x.gguf"), architecture)
        writer.add_tensor("a", torch.zeros(2, 32).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert word in refusal(
            UnsupportedModelError if word == "rwkv6" else ModelError,
            lambda: open_stream(tmp_path / "x.gguf"),
        )


@pytest.mark.real
@pytest.mark.slow
def test_real_gguf_is_the_converted_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 210 matrices and 60 norms of SmolLM2-135M, Q4_1, bit for bit."""
    monkeypatch.delenv("GCCOMPRESS_CACHE")  # converting takes a while, once
    loaded = open_model("smollm2-135m", device="cpu", dtype="float32")
    stream = open_stream("smollm2-135m")
    assert (stream.num_layers, stream.hash) == (30, loaded.source.hash)
    assert_same_source(stream, ModelView(loaded.model))
    embedded = next(alias for alias in known_aliases() if alias.name == "smollm2-135m").embedded()
    assert embedded is not None
    check_head(embedded)
