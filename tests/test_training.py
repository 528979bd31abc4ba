"""Compressed models trained as users train: Trainer, two processes, LoRA."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from gccompress import verify
from gccompress.modeling import SharedBasis
from tests.survivors import load, write_survivor
from tests.test_survival import one_parameter_each
from tests.tiny import FAMILIES, logits_of, tokens

ROOT = Path(__file__).resolve().parent.parent
IDS = tokens(batch=4)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survivors")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return write_survivor(request.param, root)[0]


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


# ------------------------------------------------------------------ Trainer


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_the_trainer_trains_saves_and_reloads(folder: Path, tmp_path: Path) -> None:
    model = without_dropout(load(folder))
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    one_parameter_each(model)
    for key in model.config.gccompress["bases"]:
        name = f"gccompress_bases.{key}.weight"
        assert not torch.equal(model.state_dict()[name], before[name])
    saved = tmp_path / "run" / "checkpoint-6"
    verify(saved)
    assert torch.equal(logits_of(load(saved), IDS), logits_of(model.eval(), IDS))


# ------------------------------------------------------------------ two processes

WORKER = """
import sys
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
import gccompress

folder, ids_file, out = sys.argv[1:]
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2 == torch.distributed.get_world_size()
ids = load_file(ids_file)["ids"].chunk(2)[accelerator.process_index]
model = accelerator.prepare(AutoModelForCausalLM.from_pretrained(folder))
model.eval()
accelerator.backward(model(ids, labels=ids, use_cache=False).loss)
inner = accelerator.unwrap_model(model)
gradients = {name: p.grad.clone() for name, p in inner.named_parameters()}
mine = torch.cat([gradient.flatten() for gradient in gradients.values()])
everyone = accelerator.gather(mine[None])
assert torch.equal(everyone[0], everyone[1])
if accelerator.is_main_process:
    save_file(gradients, out)
accelerator.end_training()
"""


def test_two_processes_give_a_basis_the_sum_of_its_users_gradients_once(
    root: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder = write_survivor("llama", root)[0]
    (tmp_path / "worker.py").write_text(WORKER)
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    command += [str(tmp_path / "worker.py"), str(folder), str(tmp_path / "ids.safetensors")]
    done = subprocess.run(
        [*command, str(tmp_path / "gradients.safetensors")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = load_file(tmp_path / "gradients.safetensors")
    model = load(folder)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-6, rtol=1e-4)
    # The same, a user at a time: with its own copy of the basis.
    for key, basis in model.gccompress_bases.items():
        total = torch.zeros_like(basis.weight)
        users = [m for m in model.modules() if getattr(m, "basis_key", None) == key]
        for user in users:
            total += gradient_through(load(folder), model, user, key)
        name = f"gccompress_bases.{key}.weight"
        torch.testing.assert_close(found[name], total, atol=1e-6, rtol=1e-4)


def gradient_through(
    fresh: PreTrainedModel, model: PreTrainedModel, user: nn.Module, key: str
) -> torch.Tensor:
    """The gradient of a basis by one of its users: the others' copies are constants."""
    [name] = [name for name, module in model.named_modules() if module is user]
    own = copy.deepcopy(fresh.gccompress_bases)
    fresh.get_submodule(name)._container = (own,)
    fresh(IDS, labels=IDS, use_cache=False).loss.backward()
    return own[key].weight.grad


# ------------------------------------------------------------------ LoRA

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")


def lora(model: PreTrainedModel, target: Any) -> Any:
    config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("target", ["all-linear", ["coef"]], ids=["all", "coef"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # GPT-2's dense layers
def test_lora_merges_into_what_it_was(folder: Path, tmp_path: Path, target: Any) -> None:
    """On coefficients, factors and dense layers; the bases stay as they are."""
    model = load(folder)
    before = logits_of(model, IDS)
    basis = {n: m.weight.clone() for n, m in model.gccompress_bases.items()}
    tuned = lora(model, target)
    assert not any(
        p.requires_grad
        for m in tuned.modules()
        if isinstance(m, SharedBasis)
        for p in m.parameters()
    )
    adapted = [name for name, module in tuned.named_modules() if hasattr(module, "lora_A")]
    assert any(name.endswith(".coef") for name in adapted)
    assert not any("gccompress_bases" in name for name in adapted)
    tuned.eval()
    with_lora = logits_of(tuned, IDS)
    assert float((with_lora - before).abs().max()) > 1e-2
    tuned.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    assert torch.equal(logits_of(again, IDS), with_lora)
    merged = again.merge_and_unload()
    torch.testing.assert_close(logits_of(merged, IDS), with_lora, atol=1e-3, rtol=1e-3)
    one_parameter_each(merged)
    assert all(torch.equal(m.weight, basis[n]) for n, m in merged.gccompress_bases.items())
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(load(tmp_path / "merged"), IDS), logits_of(merged, IDS))


@pytest.mark.parametrize("target", [r".*gccompress_bases\..*", "basis key"])
def test_lora_on_a_shared_basis_is_refused_with_the_reason(folder: Path, target: str) -> None:
    model = load(folder)
    if target == "basis key":
        target = [next(iter(model.config.gccompress["bases"]))]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="shared by several layers.*coef"):
        lora(model, target)


def test_lora_on_a_factored_projection_names_its_factors(folder: Path) -> None:
    model = load(folder)
    names = [n for n, m in model.named_modules() if hasattr(m, "basis_key")]
    with pytest.raises(ValueError, match="coef"):
        lora(model, [names[0]])
