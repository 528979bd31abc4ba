"""Weights read from files are those of the loaded model, bit for bit; what is damaged is named."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gccompress import shards, storage
from gccompress.architectures import spec_for
from gccompress.errors import ModelError, NumericalError, UnsupportedModelError
from gccompress.models import resolve
from gccompress.roles import Role
from gccompress.shards import open_stream
from gccompress.view import ModelView
from tests.damage import INDEX, WEIGHTS, edit_json, edit_weights, refusal, sharded
from tests.streams import assert_same_source, same
from tests.tiny import FAMILIES, tiny_folder, tiny_model

pytestmark = pytest.mark.usefixtures("own_caches")

STORED = (("bf16", torch.bfloat16, "1GB"), ("fp16", torch.float16, "60KB"), ("fp32", None, "1GB"))
DOWN = "model.layers.1.mlp.down_proj.weight"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Save a tiny llama of three layers, fp32, in one file."""
    return tiny_folder(tmp_path / "llama", layers=3, tokenizer=False)


# --- the same as the model in memory ---------------------------------------------------------


@pytest.mark.parametrize("name, dtype, shard", STORED, ids=[row[0] for row in STORED])
@pytest.mark.parametrize("family", FAMILIES)
def test_stream_is_the_view(
    family: str, name: str, dtype: torch.dtype | None, shard: str, tmp_path: Path
) -> None:
    """Every family, in one file and in several, in each dtype."""
    model = tiny_model(family).to(dtype or torch.float32)
    model.save_pretrained(tmp_path / "m", max_shard_size=shard)
    assert (len(list((tmp_path / "m").glob("*.safetensors"))) > 2) == (shard != "1GB")
    stream, view = open_stream(tmp_path / "m"), ModelView(model)
    assert_same_source(stream, view)
    sizes = [stream.stored_bytes(r, i) for r in stream.roles for i in range(stream.num_layers)]
    assert sum(sizes) == view.decoder_params() * model.dtype.itemsize
    assert stream.config["model_type"] == family
    assert stream.name == str(tmp_path / "m")


def test_pieces_make_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads shorter than asked for, and columns gathered from several pieces."""
    monkeypatch.setattr(storage, "_MOST", 1000)
    monkeypatch.setattr(storage, "PIECE", 500)
    for family in ("gpt2", "phi3"):
        model = tiny_model(family, layers=2)
        model.save_pretrained(tmp_path / family)
        assert_same_source(open_stream(tmp_path / family), ModelView(model))


def test_one_layer(tmp_path: Path) -> None:
    """A model without pairs is a model."""
    folder = tiny_folder(tmp_path / "m", layers=1, tokenizer=False)
    assert open_stream(folder).num_layers == 1


def test_hash_is_that_of_resolve_and_lazy(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte but headers is read until it is asked for."""
    with monkeypatch.context() as patch:
        patch.setattr(shards, "content_hash", lambda *a: pytest.fail("hashed"))
        stream = open_stream(llama)
        stream.weight(Role.Q, 0)
    assert stream.hash == resolve(llama).hash


def test_bad_requests(llama: Path, tmp_path: Path) -> None:
    """Layers, rows and roles that are not there."""
    stream = open_stream(llama)
    for action in (
        lambda: stream.weight(Role.Q, 3),
        lambda: stream.weight(Role.Q, -1),
        lambda: stream.in_scale(Role.O, 3),
        lambda: stream.rows(Role.Q, 0, 0, stream.shape(Role.Q, 0)[0] + 1),
        lambda: stream.rows(Role.Q, 0, -1, 3),
    ):
        with pytest.raises(IndexError):
            action()
    gpt2 = open_stream(tiny_folder(tmp_path / "gpt2", "gpt2", layers=1, tokenizer=False))
    assert "gate" in refusal(UnsupportedModelError, lambda: gpt2.shape(Role.GATE, 0))


MEASURE = """
import sys
from gccompress.shards import open_stream
from gccompress.roles import Role
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
stream = open_stream(sys.argv[1])
stream.in_scale(Role.Q, 0)
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from what is resident now
before = peak()
block = stream.rows(Role.UP, 1, 100, 164)
print(block.numel() * 2, peak() - before)
del block
whole = 0
for role in stream.roles:
    for layer in range(stream.num_layers):
        whole = max(whole, stream.weight(role, layer).numel() * 2)
print(whole, peak() - before)
assert "transformers.modeling_utils" not in sys.modules
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_that_of_what_was_asked_for(tmp_path: Path) -> None:
    """Of a file of 300 MB: one block, then one weight after the other; no model class."""
    config = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    sites = {site.module: site for site in spec_for("llama").sites}
    shapes = {name: (2048, 2048) for name in sites} | {"mlp.down_proj": (2048, 8192)}
    shapes |= {"mlp.gate_proj": (8192, 2048), "mlp.up_proj": (8192, 2048)}
    shapes |= {"input_layernorm": (2048,), "post_attention_layernorm": (2048,)}
    save_file(
        {
            f"model.layers.{layer}.{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
            for layer in range(2)
            for name, shape in shapes.items()
        },
        tmp_path / WEIGHTS,
    )
    assert (tmp_path / WEIGHTS).stat().st_size > 260e6
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        asked, used = (int(word) for word in line.split())
        assert used < 2 * asked + 16e6, result.stdout


# --- names -----------------------------------------------------------------------------------


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    """Rename the tensors of a checkpoint in one file."""
    tensors = {change(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    "prefix", ["language_model.model.", "model.language_model.", "language_model.", "", "a.b.c."]
)
def test_any_prefix_of_the_layers(llama: Path, prefix: str) -> None:
    """As language models inside others are saved, beside a vision tower with layers of its own."""
    view = ModelView(tiny_model("llama", layers=3))
    renamed(llama, lambda name: name.replace("model.", prefix, 1))
    tower = "vision_tower.vision_model.encoder.layers"
    edit_weights(
        llama / WEIGHTS,
        lambda t: t.update({f"{tower}.{i}.self_attn.q_proj.weight": torch.ones(2) for i in (0, 9)}),
    )
    assert_same_source(open_stream(llama), view)


def test_language_model_of_an_image_model(tmp_path: Path) -> None:
    """The text part of the config, with its defaults, and its weights below a prefix."""
    folder = tiny_folder(tmp_path / "m", "gemma3_text", tokenizer=False)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    renamed(folder, lambda name: name.replace("model.", "model.language_model.", 1))
    assert_same_source(open_stream(folder), ModelView(tiny_model("gemma3_text")))


@pytest.mark.parametrize("prefixed", [True, False])
def test_gpt2_with_and_without_its_prefix(prefixed: bool, tmp_path: Path) -> None:
    """The hub's files have none."""
    folder = tiny_folder(tmp_path / "m", "gpt2", tokenizer=False)
    plain = "transformer." if prefixed else ""
    renamed(folder, lambda name: plain + name.removeprefix("transformer."))
    assert_same_source(open_stream(folder), ModelView(tiny_model("gpt2")))


def test_two_language_models_in_one_checkpoint(llama: Path) -> None:
    """Neither is taken for the other; the family's own name goes first."""
    tensors = load_file(llama / WEIGHTS)
    other = {name.replace("model.", "other.", 1): t.clone() for name, t in tensors.items()}
    save_file(other | tensors, llama / WEIGHTS)
    assert_same_source(open_stream(llama), ModelView(tiny_model("llama", layers=3)))
    renamed(llama, lambda name: f"text_{name}" if name.startswith("model.") else name)
    message = refusal(UnsupportedModelError, lambda: open_stream(llama))
    assert "other.layers" in message and "text_model.layers" in message


def test_weights_of_another_family(llama: Path) -> None:
    """No tensor has the names that the config's family gives them."""
    edit_json(llama / "config.json", lambda c: c.update(model_type="phi3", pad_token_id=0))
    refusal(ModelError, lambda: open_stream(llama))
    edit_json(llama / "config.json", lambda c: c.update(model_type="gpt2"))
    assert "transformer.h.0.attn.c_attn" in refusal(ModelError, lambda: open_stream(llama))


# --- fp8 -------------------------------------------------------------------------------------


def quantised(
    folder: Path,
    dtype: torch.dtype,
    block: tuple[int, int] | None,
    scales: torch.dtype,
    ending: str,
) -> dict[str, torch.Tensor]:
    """Make a checkpoint's projections fp8 and return what they stand for, in fp64.

    `block` of None: one scale for all; with one column: one per row.
    """
    truth = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in [name for name in tensors if "_proj" in name]:
            rows, columns = tensors[name].shape
            high, wide = block or (rows, columns)
            shape = (-(-rows // high), -(-columns // min(wide, columns)))
            scale = (0.01 + torch.rand(shape, generator=generator)).to(scales)
            tensors[name] = (tensors[name] * 20).to(dtype)
            full = scale.double().repeat_interleave(high, 0)[:rows]
            full = full.repeat_interleave(min(wide, columns), 1)[:, :columns]
            truth[name] = tensors[name].double() * full
            tensors[name.removesuffix("weight") + ending] = (
                scale.reshape(()) if block is None else scale
            )
            tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)

    edit_weights(folder / WEIGHTS, change)
    return truth


LAYOUTS = {
    "tensor": (None, "weight_scale"),
    "row": ((1, 10**6), "weight_scale"),
    "block": ((128, 128), "weight_scale_inv"),
    "small block": ((32, 20), "weight_scale_inv"),
}


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8(
    layout: str, dtype: torch.dtype, scales: torch.dtype, tmp_path: Path, monkeypatch: Any
) -> None:
    """The product of value and scale: exact for bf16 scales, correctly rounded for fp32 ones."""
    sizes: dict[str, Any] = {"hidden_size": 144, "intermediate_size": 304, "num_attention_heads": 9}
    folder = tiny_folder(tmp_path / "m", layers=2, tokenizer=False, num_key_value_heads=9, **sizes)
    block, ending = LAYOUTS[layout]
    truth = quantised(folder, dtype, block, scales, ending)
    settings: dict[str, Any] = {"quant_method": "fp8"}
    if layout == "small block":
        settings["weight_block_size"] = list(block or ())
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=settings))
    monkeypatch.setattr(storage, "PIECE", 1000)
    stream = open_stream(folder)
    for site in stream.spec.sites:
        [role], wanted = site.roles, truth[f"model.layers.1.{site.module}.weight"]
        weight = stream.weight(role, 1)
        assert weight.dtype == torch.float32 and torch.equal(weight, wanted.float())
        assert scales != torch.bfloat16 or torch.equal(weight.double(), wanted)
        assert torch.equal(stream.rows(role, 1, 125, 131), weight[125:131])
    assert stream.stored_bytes(Role.UP, 0) == 304 * 144


def test_fp8_block_of_compressed_tensors(tmp_path: Path) -> None:
    """The block is in the config's groups."""
    folder = tiny_folder(tmp_path / "m", layers=2, tokenizer=False)
    truth = quantised(folder, torch.float8_e4m3fn, (16, 24), torch.float32, "weight_scale")
    group = {"weights": {"num_bits": 8, "strategy": "block", "block_structure": [16, 24]}}
    settings = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=settings))
    assert torch.equal(open_stream(folder).weight(Role.Q, 1), truth[Q].float())


def test_fp8_block_wider_than_the_weight(llama: Path) -> None:
    """Cut off at both edges."""
    truth = quantised(llama, torch.float8_e4m3fn, (128, 128), torch.float32, "weight_scale_inv")
    assert open_stream(llama).shape(Role.Q, 1) == (64, 48)
    assert torch.equal(open_stream(llama).weight(Role.Q, 1), truth[Q].float())


def test_fp8_of_which_scales_are_wrong(llama: Path) -> None:
    """Missing, of another shape, in a dtype that is no float."""
    quantised(llama, torch.float8_e4m3fn, None, torch.float32, "weight_scale")
    scale = Q.replace("weight", "weight_scale")
    edit_weights(llama / WEIGHTS, lambda t: t.update({scale: torch.ones(3)}))
    message = refusal(ModelError, lambda: open_stream(llama))
    assert scale in message and "[3]" in message
    edit_weights(llama / WEIGHTS, lambda t: t.update({scale: torch.ones(1, dtype=torch.uint8)}))
    assert "U8" in refusal(UnsupportedModelError, lambda: open_stream(llama))
    edit_weights(llama / WEIGHTS, lambda t: t.pop(scale))
    message = refusal(ModelError, lambda: open_stream(llama))
    assert Q in message and "without scales" in message


def test_fp8_value_that_is_not_finite(llama: Path) -> None:
    """NaN in the weight or in its scale."""
    quantised(llama, torch.float8_e4m3fn, None, torch.float32, "weight_scale")
    edit_weights(llama / WEIGHTS, lambda t: t[Q.replace("weight", "weight_scale")].fill_(torch.nan))
    assert Q in refusal(NumericalError, lambda: open_stream(llama).weight(Role.Q, 1))


# --- packed ----------------------------------------------------------------------------------

PACKED_KEYS = {
    "weight.absmax": "bitsandbytes",
    "weight.quant_state.bitsandbytes__nf4": "bitsandbytes",
    "SCB": "bitsandbytes",
    "qweight": "GPTQ",
    "qzeros": "AWQ",
    "g_idx": "GPTQ",
    "weight_packed": "compressed-tensors",
    "weight_zero_point": "compressed-tensors",
    "weight_scale_2": "NVFP4",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "weight._data": "quanto",
    "_weight_qdata": "torchao",
}


@pytest.mark.parametrize("key, method", PACKED_KEYS.items())
def test_packed_weights_by_key(llama: Path, key: str, method: str) -> None:
    """The names that each method leaves in its files."""
    name = f"model.layers.0.mlp.up_proj.{key}"
    edit_weights(llama / WEIGHTS, lambda t: t.update({name: torch.ones(4)}))
    message = refusal(UnsupportedModelError, lambda: open_stream(llama))
    assert name in message and method in message and "dequantize()" in message


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "hqq", "mxfp4"])
def test_packed_weights_by_config(llama: Path, method: str) -> None:
    """The method that a config names."""
    settings = {"quant_method": method}
    edit_json(llama / "config.json", lambda c: c.update(quantization_config=settings))
    message = refusal(UnsupportedModelError, lambda: open_stream(llama))
    assert method in message and "dequantize()" in message


@pytest.mark.parametrize("dtype, name", [(torch.int8, "I8"), (torch.uint8, "U8")])
def test_integer_weights(llama: Path, dtype: torch.dtype, name: str) -> None:
    """Told by the dtype when by nothing else."""
    edit_weights(llama / WEIGHTS, lambda t: t.update({Q: t[Q].to(dtype)}))
    message = refusal(UnsupportedModelError, lambda: open_stream(llama))
    assert Q in message and name in message


def test_models_of_other_kinds(llama: Path) -> None:
    """Compressed already, a mixture of experts, an unknown family, a config that is none."""
    for change, word in (
        ({"gccompress": {"version": 1}, "model_type": "gccompress_llama"}, "already compressed"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "mamba"}, "mamba"),
    ):
        text = (llama / "config.json").read_text()
        edit_json(llama / "config.json", lambda c, change=change: c.update(change))
        assert word in refusal(UnsupportedModelError, lambda: open_stream(llama))
        (llama / "config.json").write_text(text)
    edit_json(llama / "config.json", lambda c: c.update(num_hidden_layers="three"))
    assert "config.json" in refusal(ModelError, lambda: open_stream(llama))
    assert "no-such-model" in refusal(ModelError, lambda: open_stream("no-such-model"))


# --- damage, all of it found before a weight is read -----------------------------------------


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test when any tensor is read."""
    monkeypatch.setattr(storage, "read_into", lambda *a: pytest.fail("read"))


@pytest.mark.usefixtures("unread")
def test_damaged_shards(tmp_path: Path) -> None:
    """Truncated, missing, not holding what the index says."""
    folder = sharded(tmp_path / "s")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    message = refusal(ModelError, lambda: open_stream(folder))
    assert shard.name in message and "truncated" in message
    shard.unlink()
    assert shard.name in refusal(ModelError, lambda: open_stream(folder))
    shard.write_bytes(data)
    index = (folder / INDEX).read_text()
    edit_json(folder / INDEX, lambda c: c["weight_map"].update(ghost=shard.name))
    assert "ghost" in refusal(ModelError, lambda: open_stream(folder))
    (folder / INDEX).write_text(index)
    name, other = next(
        pair for pair in json.loads(index)["weight_map"].items() if pair[1] != shard.name
    )
    save_file({**load_file(shard), name: torch.ones(2)}, shard)
    message = refusal(ModelError, lambda: open_stream(folder))
    assert name in message and other in message and shard.name in message


@pytest.mark.usefixtures("unread")
def test_layer_missing_in_the_middle(llama: Path) -> None:
    """Or one of its weights or norms; or one more than the config says."""
    whole = (llama / WEIGHTS).read_bytes()
    for gone in ("model.layers.1.", Q, "model.layers.1.input_layernorm.weight"):
        tensors = load_file(llama / WEIGHTS)
        save_file({n: t for n, t in tensors.items() if not n.startswith(gone)}, llama / WEIGHTS)
        message = refusal(ModelError, lambda: open_stream(llama))
        assert "layer 1" in message and "3 layers" in message
        (llama / WEIGHTS).write_bytes(whole)
    edit_json(llama / "config.json", lambda c: c.update(num_hidden_layers=2))
    assert "layer 2" in refusal(ModelError, lambda: open_stream(llama))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("name", [Q, DOWN, "model.layers.2.post_attention_layernorm.weight"])
def test_wrong_shape(llama: Path, name: str) -> None:
    """Transposed, cut, or flat."""
    for change in (lambda t: t[:-1], lambda t: t.reshape(-1, 2), lambda t: t.reshape(1, 1, -1)):
        whole = (llama / WEIGHTS).read_bytes()
        edit_weights(llama / WEIGHTS, lambda t, c=change: t.update({name: c(t[name]).contiguous()}))
        message = refusal(ModelError, lambda: open_stream(llama))
        assert name in message and "wanted" in message
        (llama / WEIGHTS).write_bytes(whole)


@pytest.mark.usefixtures("unread")
def test_config_of_another_size(llama: Path) -> None:
    """The first weight that does not fit it is named."""
    edit_json(llama / "config.json", lambda c: c.update(intermediate_size=100))
    message = refusal(ModelError, lambda: open_stream(llama))
    assert "[96, 48]" in message and "[100, 48]" in message


def test_mixed_dtypes_come_each_in_its_own(llama: Path) -> None:
    """Readable: nothing is converted to a common one."""
    view = ModelView(tiny_model("llama", layers=3))
    edit_weights(
        llama / WEIGHTS, lambda t: t.update({Q: t[Q].bfloat16(), DOWN: t[DOWN].to(torch.float16)})
    )
    stream = open_stream(llama)
    assert same(stream.weight(Role.Q, 1), view.weight(Role.Q, 1).bfloat16())
    assert same(stream.weight(Role.DOWN, 1), view.weight(Role.DOWN, 1).half())
    assert same(stream.weight(Role.Q, 0), view.weight(Role.Q, 0))
    assert stream.stored_bytes(Role.Q, 1) * 2 == stream.stored_bytes(Role.Q, 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_value_that_is_not_finite_is_named(llama: Path, value: float) -> None:
    """Where it is read, with its place; other weights stay readable."""
    norm = "model.layers.1.input_layernorm.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN][17, 5] = value
        tensors[norm][3] = value

    edit_weights(llama / WEIGHTS, spoil)
    stream = open_stream(llama)
    for action in (
        lambda: stream.weight(Role.DOWN, 1),
        lambda: stream.rows(Role.DOWN, 1, 10, 20),
    ):
        message = refusal(NumericalError, action)
        assert DOWN in message and "[17, 5]" in message and WEIGHTS in message
    stream.rows(Role.DOWN, 1, 0, 17)
    stream.weight(Role.DOWN, 0)
    assert norm in refusal(NumericalError, lambda: stream.in_scale(Role.Q, 1))


def test_file_that_shrinks_or_goes_while_it_is_read(llama: Path) -> None:
    """After it was opened."""
    stream = open_stream(llama)
    data = (llama / WEIGHTS).read_bytes()
    (llama / WEIGHTS).write_bytes(data[:2000])
    message = refusal(ModelError, lambda: stream.weight(Role.DOWN, 2))
    assert WEIGHTS in message and "ended" in message
    (llama / WEIGHTS).unlink()
    assert WEIGHTS in refusal(ModelError, lambda: stream.weight(Role.DOWN, 2))
