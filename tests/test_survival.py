"""What users do to a compressed model of any family, and what must still be so afterwards."""

import copy
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gccompress import verify
from gccompress.modeling import SharedBasis
from tests.survivors import load, write_survivor
from tests.tiny import FAMILIES, PAD, logits_of, tiny_model, tokens

IDS = tokens()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survivors")


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, root: Path) -> Path:
    return write_survivor(request.param, root)[0]


def one_parameter_each(model: nn.Module) -> None:
    """Every basis of the config is one Parameter, at the root, that its users reach."""
    every = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    bases = {n: m for n, m in model.named_modules() if isinstance(m, SharedBasis)}
    assert sorted(bases) == sorted(
        f"gccompress_bases.{key}" for key in model.config.gccompress["bases"]
    )
    assert len(bases) >= 4
    assert all(every[id(basis.weight)] == 1 for basis in bases.values())
    users = [module for module in model.modules() if hasattr(module, "basis_key")]
    reached = Counter(id(user.basis) for user in users)
    assert set(reached) == {id(basis) for basis in bases.values()}
    assert all(count >= 2 for count in reached.values())


def from_meta(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Without memory first, as accelerate's documentation has it."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model.config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.tie_weights()
    filled = load_checkpoint_and_dispatch(empty, str(folder), device_map={"": "cpu"})
    return filled.eval()


def round_trip(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    again = AutoModelForCausalLM.from_config(model.config)
    again.load_state_dict(copy.deepcopy(model.state_dict()), strict=True)
    return again.eval()


def saved_again(model: PreTrainedModel, folder: Path, **options: Any) -> PreTrainedModel:
    out = folder.parent / f"{folder.name}-again"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out, **options)
    assert verify(out).params == sum(p.numel() for p in model.parameters())
    return load(out)


SAME: dict[str, Callable[[PreTrainedModel, Path], PreTrainedModel]] = {
    "loaded": lambda model, folder: model,
    "to": lambda model, folder: model.to("cpu", torch.float64).to(torch.float32),
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "saved again": saved_again,
    "in shards": lambda model, folder: saved_again(model, folder, max_shard_size="50KB"),
    "device_map cpu": lambda model, folder: load(folder, device_map="cpu"),
    "device_map auto": lambda model, folder: load(folder, device_map="auto"),
    "state_dict": round_trip,
    "meta": from_meta,
}


@pytest.mark.parametrize("what", SAME)
def test_it_computes_the_same_and_shares_its_bases(folder: Path, what: str) -> None:
    model = load(folder)
    expected = logits_of(model, IDS)
    after = SAME[what](model, folder)
    one_parameter_each(after)
    # .to(float64) widens the rotary frequencies' buffers and back, which is exact.
    assert torch.equal(logits_of(after, IDS), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrower_types(folder: Path, dtype: torch.dtype) -> None:
    wide = load(folder)
    loaded = load(folder, dtype=dtype)
    cast = copy.deepcopy(wide).half() if dtype == torch.float16 else copy.deepcopy(wide).bfloat16()
    for model in (loaded, cast):
        one_parameter_each(model)
        assert {p.dtype for p in model.parameters()} == {dtype}
        error = logits_of(model, IDS).float() - logits_of(wide, IDS)
        assert float(error.norm() / logits_of(wide, IDS).norm()) < 0.1


def test_bytes_on_disk_are_the_plans_and_a_header(root: Path, folder: Path) -> None:
    plan = write_survivor(folder.name, root)[1]
    model = load(folder)
    kinds = [spec["kind"] for spec in model.config.gccompress["modules"].values()]
    sentinels = 4 * sum(kind != "dense" for kind in kinds)
    [file] = folder.glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == plan.prediction.bytes + sentinels + header
    assert verify(folder).notes == ()


# ------------------------------------------------------------------ generation


def test_a_batch_with_left_padding_continues_as_each_alone(folder: Path) -> None:
    model = load(folder)
    short, long = IDS[:1, :5], IDS[1:, :9]
    padded = torch.cat([torch.full((1, 4), PAD), short], dim=1)
    batch = torch.cat([padded, long])
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    together = model.generate(batch, attention_mask=mask, **options)
    for row, alone in enumerate((short, long)):
        expected = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
        assert torch.equal(together[row, -8:], expected[0, -8:])


def test_beam_search_with_a_cache_is_beam_search_without(folder: Path) -> None:
    model = load(folder)
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    cached, uncached = (model.generate(IDS, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, uncached)


def test_as_a_draft_it_leaves_the_dense_models_text(folder: Path) -> None:
    dense, draft = tiny_model(folder.name, layers=5), load(folder)
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    dense.register_forward_hook(count)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    expected = dense.generate(IDS[:1], **options)
    assert calls == [24]
    assisted = dense.generate(IDS[:1], assistant_model=draft, **options)
    assert torch.equal(assisted, expected)
    assert 24 < calls[0] <= 24 + 24


def test_a_draft_that_agrees_is_accepted(root: Path) -> None:
    """Of itself as draft every token is accepted: fewer passes than tokens."""
    folder = write_survivor("llama", root)[0]
    model, draft = load(folder), load(folder)
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    model.register_forward_hook(count)
    options = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    expected = model.generate(IDS[:1], **options)
    assisted = model.generate(IDS[:1], assistant_model=draft, **options)
    assert torch.equal(assisted, expected)
    assert calls[0] - 24 <= 12


# ------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("family", FAMILIES)
def test_compiling_does_not_break_the_graph(family: str, root: Path) -> None:
    model = load(write_survivor(family, root)[0])
    expected = logits_of(model, IDS)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_to_machine_code_it_computes_the_same(root: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler: install g++")
    model = load(write_survivor("llama", root)[0])
    expected = logits_of(model, IDS)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(IDS, use_cache=False).logits, expected, atol=1e-4, rtol=1e-4
        )


def test_a_config_alone_makes_the_model(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config)
    one_parameter_each(model)
    assert torch.isfinite(logits_of(model.eval(), IDS)).all()
