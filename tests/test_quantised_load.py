"""Compressed and quantised: int8 by torchao on any device, 8 and 4 bits by bitsandbytes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from gccompress.checkpoints import compress_in_place, save_checkpoint
from gccompress.modeling import SharedBasis
from tests.mixed import random_tensors, sites
from tests.survivors import load, write_survivor
from tests.tiny import FAMILIES, logits_of, tiny_model, tokens

IDS = tokens()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survivors")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return write_survivor(request.param, root)[0]


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install 'gccompress[quant]'")


def relative(model: PreTrainedModel, folder: Path) -> float:
    dense = logits_of(load(folder), IDS)
    return float((logits_of(model, IDS).float() - dense).norm() / dense.norm())


def bases_are_kept(model: PreTrainedModel, folder: Path) -> None:
    """The shared bases stay as they were stored: an error there would be in every user."""
    wide = load(folder)
    for key, basis in model.gccompress_bases.items():
        assert type(basis) is SharedBasis
        assert torch.equal(basis.weight.float(), wide.gccompress_bases[key].weight)


@pytest.mark.filterwarnings("ignore")
def test_int8_weights_by_torchao(folder: Path, tmp_path: Path) -> None:
    needs("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model = load(folder, quantization_config=config, device_map="cpu")
    linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and "lm_head" not in n}
    assert linear and all(
        type(m.weight.data).__name__.startswith("Int8")
        or type(m.weight).__name__.startswith("Int8")
        for m in linear.values()
    )
    bases_are_kept(model, folder)
    assert 0 < relative(model, folder) < 0.05
    text = model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert text.shape[1] > IDS.shape[1]
    model.save_pretrained(tmp_path / "int8")
    again = load(tmp_path / "int8")
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))


@pytest.mark.filterwarnings("ignore")
def test_8_bits_by_bitsandbytes(folder: Path) -> None:
    needs("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    assert any(type(module).__name__ == "Linear8bitLt" for module in model.modules())
    bases_are_kept(model, folder)
    assert 0 < relative(model, folder) < 0.1


def of_multiples_of_64(folder: Path) -> Path:
    """A checkpoint whose sizes and ranks 4-bit kernels on the CPU accept."""
    model = tiny_model("llama", hidden_size=128, intermediate_size=192, head_dim=32)
    modules: dict[str, Any] = {}
    for name, layer, leaf, cols, rows, _ in sites(model):
        if leaf.endswith("q_proj") and layer < 2:
            modules[name] = {"kind": "shared_in", "basis": "q", "out": rows}
        elif leaf.endswith("o_proj") and layer < 2:
            modules[name] = {"kind": "shared_out", "basis": "o", "in": cols}
        elif leaf.endswith("down_proj"):
            modules[name] = {"kind": "low_rank", "in": cols, "out": rows, "rank": 64}
    layout = {
        "version": 1,
        "bases": {"q": {"in": 128, "out": 64}, "o": {"in": 64, "out": 128}},
        "modules": modules,
    }
    compress_in_place(model, layout, random_tensors(layout))
    folder.mkdir()
    save_checkpoint(model, None, folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_4_bits_by_bitsandbytes(tmp_path: Path) -> None:
    needs("bitsandbytes")
    from transformers import BitsAndBytesConfig

    folder = of_multiples_of_64(tmp_path / "model")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = load(folder, quantization_config=config)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules())
    bases_are_kept(model, folder)
    assert 0 < relative(model, folder) < 0.6


@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_where_the_library_is_absent_it_is_named(root: Path, kind: str) -> None:
    if importlib.util.find_spec(kind) is not None:
        pytest.skip(f"{kind} is installed")
    from transformers import BitsAndBytesConfig

    folder = write_survivor("llama", root)[0]
    if kind == "bitsandbytes":
        with pytest.raises(ImportError, match=kind):
            load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
        return
    from transformers import TorchAoConfig

    with pytest.raises((ImportError, ValueError), match=kind):
        load(folder, quantization_config=TorchAoConfig("int8_weight_only"))
