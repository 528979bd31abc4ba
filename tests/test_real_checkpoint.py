"""A compressed SmolLM2-135M used as its users do: both ways in, drafts, lm-eval, exports."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig

from gccompress import open_model, verify
from gccompress.checkpoints import compress_in_place, load_checkpoint, save_checkpoint
from gccompress.export import export
from gccompress.models import LoadedModel
from tests.test_lm_eval_command import BRIDGE, shell
from tests.tiny import logits_of

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1500)]

PROMPTS = ("The capital of France is", "Water boils at", "My favourite animal is the")


def split(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best factors `[out, rank]`, `[rank, in]` of a weight, of equal size."""
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    root = s[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * v[:rank]


def factored(model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Share and factor some matrices of three pairs of layers, at ranks that lose little."""
    bases: dict[str, Any] = {}
    modules: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for layer in (4, 12, 20):
        pair = [f"model.layers.{number}" for number in (layer, layer + 1)]
        names = [f"{p}.mlp.{leaf}" for p in pair for leaf in ("gate_proj", "up_proj")]
        stacked = torch.cat([model.get_submodule(name).weight for name in names])
        coefs, basis = split(stacked.detach(), 512)
        bases[f"in_{layer}"] = {"in": 576, "out": 512}
        tensors[f"gccompress_bases.in_{layer}.weight"] = basis
        for name, coef in zip(names, coefs.chunk(4), strict=True):
            modules[name] = {"kind": "shared_in", "basis": f"in_{layer}", "out": 1536}
            tensors[f"{name}.coef.weight"] = coef
        names = [f"{p}.mlp.down_proj" for p in pair]
        stacked = torch.cat([model.get_submodule(name).weight for name in names], dim=1)
        basis, coefs = split(stacked.detach(), 512)
        bases[f"out_{layer}"] = {"in": 512, "out": 576}
        tensors[f"gccompress_bases.out_{layer}.weight"] = basis
        for name, coef in zip(names, coefs.chunk(2, dim=1), strict=True):
            modules[name] = {"kind": "shared_out", "basis": f"out_{layer}", "in": 1536}
            tensors[f"{name}.coef.weight"] = coef
        name = f"{pair[0]}.self_attn.q_proj"
        up, down = split(model.get_submodule(name).weight.detach(), 256)
        modules[name] = {"kind": "low_rank", "in": 576, "out": 576, "rank": 256}
        tensors |= {f"{name}.up.weight": up, f"{name}.down.weight": down}
    return {"version": 1, "bases": bases, "modules": modules}, tensors


@pytest.fixture(scope="module")
def dense() -> LoadedModel:
    return open_model("smollm2-135m", device="cpu")


@pytest.fixture(scope="module")
def folder(dense: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = copy.deepcopy(dense.model)
    layout, tensors = factored(model)
    compress_in_place(model, layout, tensors)
    folder = tmp_path_factory.mktemp("real") / "small"
    folder.mkdir()
    save_checkpoint(model, dense.tokenizer, folder)
    return folder


def test_both_ways_in_are_equal_to_the_bit(
    dense: LoadedModel, folder: Path, tmp_path: Path
) -> None:
    assert dense.tokenizer is not None
    ids = dense.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    code = (
        "import sys; sys.modules['gccompress'] = None\n"
        "import torch\n"
        "from safetensors.torch import load_file, save_file\n"
        "from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "ids = load_file(sys.argv[2] + '/ids.safetensors')['ids']\n"
        "with torch.no_grad(): logits = m(ids, use_cache=False).logits\n"
        "save_file({'logits': logits}, sys.argv[2] + '/logits.safetensors')\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-c", code, str(folder), str(tmp_path)],
        check=True,
        cwd=tmp_path,
        env={**environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    ours = logits_of(load_checkpoint(folder), ids)
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], ours)
    assert verify(folder).params < sum(p.numel() for p in dense.model.parameters())


def test_it_is_a_good_draft_for_the_dense_model(
    dense: LoadedModel, folder: Path, record_property: Any
) -> None:
    draft, tokenizer = load_checkpoint(folder), dense.tokenizer
    assert tokenizer is not None
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    hook = dense.model.register_forward_hook(count)
    made = 0
    options = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
    try:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt")
            before = calls[0]
            expected = dense.model.generate(**ids, **options)
            calls[0] = before
            assisted = dense.model.generate(**ids, assistant_model=draft, **options)
            assert torch.equal(assisted, expected)
            made += 48
    finally:
        hook.remove()
    record_property("tokens_per_dense_pass", made / calls[0])
    assert made / calls[0] > 1.5


def test_generation_with_padding_beams_and_cache(dense: LoadedModel, folder: Path) -> None:
    model, tokenizer = load_checkpoint(folder), copy.deepcopy(dense.tokenizer)
    assert tokenizer is not None
    tokenizer.padding_side = "left"
    batch = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = model.generate(**batch, **options)[:, -12:]
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), **options)
        assert torch.equal(row, alone[0, -12:])
    beams = [
        model.generate(**batch, num_beams=3, use_cache=use, **options) for use in (True, False)
    ]
    assert torch.equal(*beams)


def test_exports_compute_the_same(dense: LoadedModel, folder: Path, tmp_path: Path) -> None:
    assert dense.tokenizer is not None
    ids = dense.tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    ours = logits_of(load_checkpoint(folder), ids)
    plain = export(folder, tmp_path / "dense")
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(plain.path), ids)
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-3)
    export(folder, tmp_path / "gguf", format="gguf")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gguf",
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    torch.testing.assert_close(logits_of(again, ids), ours, atol=1e-3, rtol=1e-3)


@pytest.mark.filterwarnings("default:::lm_eval", "default:::datasets")
def test_three_ways_through_lm_eval(
    dense: LoadedModel, folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    [data, *_] = sorted(data_folder.rglob("arc_easy*_test.jsonl"))
    rows = [json.loads(line) for line in data.read_text().splitlines()[:12]]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "bridge.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kwargs = {
        "data_files": {"test": str(tmp_path / "bridge.jsonl")},
        "cache_dir": str(tmp_path / "cache"),
    }
    task = yaml.safe_dump({**BRIDGE, "dataset_kwargs": kwargs})
    (tmp_path / "tasks" / "bridge.yaml").write_text(task)
    folders = folder, tmp_path / "tasks"
    blocked = "import sys; sys.modules['gccompress'] = None\n"
    stock = ["-c", blocked + "from lm_eval.__main__ import cli_evaluate; cli_evaluate()", "run"]
    ours = ["-m", "gccompress.cli", "lm-eval", "run"]
    first = shell(stock, folders, tmp_path / "stock", trust=True, here=False)
    second = shell(ours, folders, tmp_path / "ours", trust=False, here=True)
    model = HFLM(pretrained=load_checkpoint(folder), tokenizer=dense.tokenizer, batch_size=4)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["bridge"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
    )
    third = results["results"]["bridge"]
    assert first == second == {key: pytest.approx(third[key]) for key in first}
    assert first["acc,none"] > 0.3
