"""Compressed checkpoints of every family: there and back, alone, damaged, and plain ones."""

import copy
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from gccompress.checkpoints import (
    checkpoint_bytes,
    compress_in_place,
    load_checkpoint,
    reload_difference,
    save_checkpoint,
)
from gccompress.errors import CheckpointError, NumericalError
from gccompress.modeling import base_classes, compressed_classes
from gccompress.view import ModelView
from tests.mixed import mixed_layout, random_tensors, resized_layout
from tests.tiny import FAMILIES, logits_of, tiny_folder, tiny_model, tiny_tokenizer, tokens

IDS = tokens()
ROOT = Path(__file__).resolve().parent.parent


def compressed(family: str, **kw: Any) -> PreTrainedModel:
    model = tiny_model(family, **kw)
    layout = mixed_layout(model)
    return compress_in_place(model, layout, random_tensors(layout))


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every weight file; a name in two files is an error."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(file)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of compressed checkpoints, one per family, named after it."""
    root = tmp_path_factory.mktemp("compressed")
    for family in FAMILIES:
        (root / family).mkdir()
        save_checkpoint(compressed(family), tiny_tokenizer(), root / family)
    return root


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------ there and back


def test_a_checkpoint_loads_by_the_auto_class_bit_equal(root: Path, family: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / family)
    assert type(model) is compressed_classes(family)[1]
    original = compressed(family)
    assert torch.equal(logits_of(model, IDS), logits_of(original, IDS))
    assert model.config.to_dict().keys() >= {"gccompress", "auto_map"}
    assert model.config.gccompress == original.config.gccompress
    assert reload_difference(original, root / family) == 0.0
    assert not model.training


def test_generation_after_a_reload_is_the_same_with_and_without_cache(
    root: Path, family: str
) -> None:
    texts = [
        model.generate(IDS, max_new_tokens=16, do_sample=False, use_cache=cached)
        for model in (compressed(family), load_checkpoint(root / family))
        for cached in (True, False)
    ]
    assert all(torch.equal(texts[0], other) for other in texts[1:])


def test_every_parameter_is_stored_once_and_is_one_object(root: Path, family: str) -> None:
    tensors = stored(root / family)
    model = load_checkpoint(root / family)
    parameters = dict(model.named_parameters())  # tied ones once
    sentinels = {name for name, buffer in model.named_buffers() if buffer.shape == (1,)}
    assert set(tensors) - sentinels == set(parameters)
    bases = [name for name in tensors if "bases" in name]
    assert bases == [f"gccompress_bases.{k}.weight" for k in sorted(model.gccompress_bases)]
    every = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    tied = 1 if model.config.tie_word_embeddings else 0
    assert sum(count - 1 for count in every.values()) == tied


def test_ties_of_embedding_and_head_are_kept(root: Path, family: str) -> None:
    model = load_checkpoint(root / family)
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == model.config.tie_word_embeddings
    assert same == tiny_model(family).config.tie_word_embeddings


def test_the_suite_covers_tied_and_untied_heads() -> None:
    assert {tiny_model(f, layers=1).config.tie_word_embeddings for f in FAMILIES} == {True, False}


def test_shards_copies_and_half_precision_reload_exactly(
    root: Path, family: str, tmp_path: Path
) -> None:
    model = copy.deepcopy(load_checkpoint(root / family, dtype=torch.float16))
    save_checkpoint(model, None, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tensors = stored(tmp_path)
    assert set(tensors) == set(stored(root / family))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    again = load_checkpoint(tmp_path)
    assert again.dtype == torch.float16
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))
    wide = load_checkpoint(tmp_path, dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    halved = load_checkpoint(root / family).half()  # its rotary frequencies too, unlike on load
    assert all(
        torch.equal(value, tensors[name])
        for name, value in halved.state_dict().items()
        if name in tensors
    )


def test_mlps_of_another_width_in_every_layer(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    layout = resized_layout(model)
    model = compress_in_place(model, layout, random_tensors(layout))
    assert not hasattr(model, "gccompress_bases")
    save_checkpoint(model, None, tmp_path)
    assert torch.equal(logits_of(load_checkpoint(tmp_path), IDS), logits_of(model, IDS))
    with pytest.raises(RuntimeError, match="mismatched"):
        base_classes(family)[1].from_pretrained(tmp_path)


def test_layers_dropped_and_the_rest_compressed(family: str, tmp_path: Path) -> None:
    view = ModelView(tiny_model(family, layers=6))
    view.drop_layers([1, 3])
    layout = mixed_layout(view.model)
    model = compress_in_place(view.model, layout, random_tensors(layout))
    save_checkpoint(model, None, tmp_path)
    reloaded = load_checkpoint(tmp_path)
    assert torch.equal(logits_of(reloaded, IDS), logits_of(model, IDS))
    texts = [
        reloaded.generate(IDS, max_new_tokens=12, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*texts)


def test_the_tokenizer_comes_along(root: Path, family: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / family)
    text = "The river rose in spring."
    assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


# ------------------------------------------------------------------ without this package

REMOTE = """
import sys
sys.modules["gccompress"] = None  # an import of it fails
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

root, out = Path(sys.argv[1]), Path(sys.argv[2])
ids = load_file(root / "ids.safetensors")["ids"]
logits = {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    for refused in (False, None):
        try:
            AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=refused)
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
        else:
            raise AssertionError("loaded without leave")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        logits[folder.name] = model(ids).logits
        cached, uncached = (
            model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=use)
            for use in (True, False)
        )
    assert torch.equal(cached, uncached)
    model.save_pretrained(out / folder.name)
    again = AutoModelForCausalLM.from_pretrained(out / folder.name, trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits[folder.name])
assert not any(name.startswith("gccompress.") for name in sys.modules)
save_file(logits, out / "logits.safetensors")
"""


def test_a_checkpoint_loads_where_this_package_is_not_installed(root: Path, tmp_path: Path) -> None:
    """By its own code, with leave; the logits are bit-equal, and what it saves again is whole."""
    save_file({"ids": IDS}, root / "ids.safetensors")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, str(root), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=300,
        env={**environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = load_file(tmp_path / "logits.safetensors")
    assert set(theirs) == set(FAMILIES)
    for family in FAMILIES:
        ours = logits_of(load_checkpoint(root / family), IDS)
        assert torch.equal(theirs[family], ours), family
        again = tmp_path / family
        assert torch.equal(logits_of(load_checkpoint(again), IDS), ours)
        copied = (again / "modeling_gccompress.py").read_bytes()
        assert copied == (ROOT / "gccompress" / "modeling.py").read_bytes()


def test_trust_makes_no_difference_where_this_package_is_imported(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "llama", trust_remote_code=True)
    assert type(model) is compressed_classes("llama")[1]


# ------------------------------------------------------------------ what must not load


def test_the_plain_class_of_the_family_refuses_it(root: Path, family: str) -> None:
    """It would start from random weights, with a warning."""
    with pytest.raises(RuntimeError, match="mismatched"):
        base_classes(family)[1].from_pretrained(root / family)


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(root / "llama", tmp_path / "copy"))


def rewrite(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) delete tensors."""
    tensors = {**stored(folder), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


K2 = "model.layers.2.self_attn.k_proj"
DAMAGE: dict[str, tuple[dict[str, Tensor | None], str]] = {
    "basis gone": ({"gccompress_bases.mlp_up_proj.weight": None}, "missing.*mlp_up_proj"),
    "factor gone": ({f"{K2}.down.weight": None}, f"missing.*{K2}.down"),
    "plain weight gone": ({"model.embed_tokens.weight": None}, "missing.*embed_tokens"),
    "sentinel gone": ({f"{K2}.weight": None}, f"missing.*{K2}.weight"),
    "extra": ({"model.layers.9.extra": torch.zeros(3)}, "unexpected.*9.extra"),
    "basis shape": (
        {"gccompress_bases.mlp_up_proj.weight": torch.zeros(7, 47)},
        "another shape.*mlp_up_proj",
    ),
    "factor shape": ({f"{K2}.down.weight": torch.zeros(8, 48)}, f"another shape.*{K2}.down"),
    "both": ({f"{K2}.down.weight": None, "more": torch.zeros(3)}, "missing.*; 1 unexpected"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_tensors_that_do_not_fit_are_refused_by_name(folder: Path, case: str) -> None:
    change, message = DAMAGE[case]
    assert "gccompress_bases.mlp_up_proj.weight" in stored(folder)
    rewrite(folder, change)
    for lenient in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(RuntimeError, match=message):
            AutoModelForCausalLM.from_pretrained(folder, **lenient)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("hook", [True, False])
def test_a_misfit_is_refused_without_the_private_hook_too(
    folder: Path, hook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(folder, {f"{K2}.down.weight": None})
    if not hook:
        from gccompress.modeling import CompressedModel

        monkeypatch.delattr(CompressedModel, "_adjust_missing_and_unexpected_keys")
    with pytest.raises(RuntimeError, match=f"missing.*{K2}.down"):
        AutoModelForCausalLM.from_pretrained(folder)


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in {**config, **fields}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no layout": ({"gccompress": None}, "absent"),
    "newer": ({"gccompress": {"version": 99}}, "version 99, wanted 1"),
    "empty layout": ({"gccompress": {"version": 1}}, "unexpected"),
    "layers": ({"num_hidden_layers": 2}, "no module model.layers.2"),
    "unknown family": ({"model_type": "gccompress_bert"}, "gccompress_bert.*known.*llama"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_does_not_fit_is_refused(folder: Path, case: str) -> None:
    fields, message = CONFIGS[case]
    edit_config(folder, **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "case", ["absent", "empty", "no weights", "truncated", "config", "list", "plain"]
)
def test_what_is_no_checkpoint_is_refused_in_one_line(folder: Path, case: str) -> None:
    weights = folder / "model.safetensors"
    match case:
        case "absent":
            folder = folder / "nowhere"
        case "empty":
            folder = folder / "new"
            folder.mkdir()
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "config":
            (folder / "config.json").write_text("{")
        case "list":
            (folder / "config.json").write_text("[]")
        case _:  # a plain checkpoint is held to the same rule
            shutil.rmtree(folder)
            tiny_folder(folder, tokenizer=False)
            rewrite(folder, {"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=str(folder)) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ compress_in_place


def test_it_is_the_same_object_and_config_with_other_classes(family: str) -> None:
    model = tiny_model(family)
    layout = mixed_layout(model)
    config = model.config
    result = compress_in_place(model, layout, random_tensors(layout))
    assert result is model and model.config is config
    assert (type(config), type(model)) == compressed_classes(family)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    assert len(parts) == 2 and all(part.config is config for part in parts)
    assert isinstance(model, base_classes(family)[1])
    layout["modules"].clear()
    assert config.gccompress["modules"], "the model has its own copy of the layout"
    assert not any(module.training for module in model.modules())


def test_tensors_are_copied_to_the_dtype_of_the_weight_they_stand_for() -> None:
    model = tiny_model("llama").bfloat16()
    layout = mixed_layout(model)
    tensors = {name: t.double() for name, t in random_tensors(layout).items()}
    compress_in_place(model, layout, tensors)
    assert {t.dtype for t in model.state_dict().values()} == {torch.bfloat16}
    model = tiny_model("llama")
    tensors = random_tensors(layout)
    compress_in_place(model, layout, tensors)
    before = logits_of(model, IDS)
    for tensor in tensors.values():
        tensor.zero_()
    assert torch.equal(logits_of(model, IDS), before)


def test_tensors_may_be_views_of_one_another(tmp_path: Path) -> None:
    model = tiny_model("llama")
    layout = mixed_layout(model)
    pool = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) / 10
    tensors = {
        name: pool[: t.numel()].view(*t.shape[::-1]).t() if t.dim() == 2 else pool[: t.numel()]
        for name, t in random_tensors(layout).items()
    }
    compress_in_place(model, layout, tensors)
    save_checkpoint(model, None, tmp_path)
    assert reload_difference(model, tmp_path) == 0.0
    assert checkpoint_bytes(tmp_path) < 4 * pool.numel() * 2


Q0 = "model.layers.0.self_attn.q_proj.coef.weight"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({Q0: None}, CheckpointError, f"1 missing, first {Q0}"),
        ({"model.norm.weight": torch.ones(48)}, CheckpointError, "not of the layout.*norm"),
        ({Q0: torch.zeros(64, 8)}, CheckpointError, rf"{Q0}: shape \(64, 8\), wanted \(64, 7\)"),
        ({Q0: torch.full((64, 7), float("nan"))}, NumericalError, f"{Q0}: not finite"),
        ({Q0: torch.full((64, 7), 1e6)}, NumericalError, f"{Q0}: not finite in torch.float16"),
    ],
    ids=["missing", "extra", "shape", "nan", "overflow"],
)
def test_tensors_that_do_not_fit_leave_the_model_as_it_was(
    change: dict[str, Tensor | None], error: type[Exception], message: str
) -> None:
    model = tiny_model("llama").half()
    layout = mixed_layout(model)
    tensors = {**random_tensors(layout), **change}
    before, state = type(model), list(model.state_dict())
    with pytest.raises(error, match=message):
        compress_in_place(model, layout, {n: t for n, t in tensors.items() if t is not None})
    assert type(model) is before and list(model.state_dict()) == state
    assert not hasattr(model.config, "gccompress")


def test_only_a_plain_model_of_a_known_family_is_compressed() -> None:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    model = compressed("llama")
    layout = model.config.gccompress
    with pytest.raises(CheckpointError, match="gccompress_llama"):
        compress_in_place(model, layout, random_tensors(layout))
    config = GPTNeoXConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    with pytest.raises(CheckpointError, match="gpt_neox.*known: llama"):
        compress_in_place(AutoModelForCausalLM.from_config(config), layout, {})
    with pytest.raises(CheckpointError, match="LlamaModel, wanted a plain LlamaForCausalLM"):
        decoder = tiny_model("llama").model
        inner = {
            "version": 1,
            "modules": {"layers.0.mlp.up_proj": {"kind": "dense", "in": 48, "out": 9}},
        }
        compress_in_place(decoder, inner, random_tensors(inner))


def test_a_basis_without_users_is_refused() -> None:
    model = tiny_model("llama")
    layout = mixed_layout(model)
    layout["bases"]["spare"] = {"in": 48, "out": 3}
    with pytest.raises(CheckpointError, match="basis spare"):
        compress_in_place(model, layout, random_tensors(layout))


# ------------------------------------------------------------------ plain models, files, checks


@pytest.mark.parametrize("layout", [{}, {"version": 1, "bases": {}, "modules": {}}])
def test_a_model_that_only_lost_layers_is_a_plain_checkpoint(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    view = ModelView(tiny_model(family, layers=6))
    view.drop_layers([1, 4])
    model = compress_in_place(view.model, layout, {})
    save_checkpoint(model, tiny_tokenizer(), tmp_path, extra_files={"plan.yaml": "moves: []\n"})
    for file in tmp_path.iterdir():
        assert b"gccompress" not in file.read_bytes() and "gccompress" not in file.name, file
        assert b"auto_map" not in file.read_bytes()
    reloaded = load_checkpoint(tmp_path)
    assert type(reloaded) is base_classes(family)[1]
    assert torch.equal(logits_of(reloaded, IDS), logits_of(model, IDS))


def test_a_plain_checkpoint_needs_nothing_of_this_package(tmp_path: Path) -> None:
    view = ModelView(tiny_model("qwen2", layers=6))
    view.drop_layers([1, 4])
    save_checkpoint(view.model, None, tmp_path)
    code = (
        "import sys; sys.modules['gccompress'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "m, i = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)\n"
        "assert len(m.model.layers) == 4 and not any(i.values()), i"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=tmp_path)


def test_tensors_without_a_layout_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no modules, yet 1"):
        compress_in_place(tiny_model("llama"), {}, {"x": torch.zeros(1)})


def test_extra_files_are_written_and_hide_nothing(tmp_path: Path) -> None:
    model = compressed("llama")
    save_checkpoint(model, None, tmp_path, extra_files={"plan.yaml": "naïve: ja\n"})
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == "naïve: ja\n"
    with pytest.raises(CheckpointError, match="config.json"):
        save_checkpoint(model, None, tmp_path, extra_files={"config.json": "{}"})


def test_a_checkpoint_names_no_place_on_this_machine(root: Path, tmp_path: Path) -> None:
    model = load_checkpoint(root / "qwen2")
    save_checkpoint(model, tiny_tokenizer(), tmp_path)
    for file in tmp_path.glob("*.json"):
        assert str(root) not in file.read_text(encoding="utf-8"), file


def test_bytes_are_those_of_the_parameters_and_a_header(root: Path, family: str) -> None:
    model = load_checkpoint(root / family)
    sizes = [t.numel() * t.element_size() for t in model.parameters()]
    sentinels = 4 * sum(s["kind"] != "dense" for s in model.config.gccompress["modules"].values())
    (file,) = (root / family).glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert checkpoint_bytes(root / family) == sum(sizes) + sentinels + header
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_the_reload_check_sees_a_difference_and_refuses_nan(root: Path) -> None:
    model = load_checkpoint(root / "llama")
    model.train()
    assert reload_difference(model, root / "llama") == 0.0
    assert model.training, "the mode is as it was"
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    assert 1e-4 < reload_difference(model, root / "llama") < 1.0
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericalError, match="model in memory"):
        reload_difference(model, root / "llama")


def test_the_reload_check_uses_the_attention_of_the_model(root: Path) -> None:
    model = load_checkpoint(root / "gemma2")
    model.set_attn_implementation("eager")
    assert reload_difference(model, root / "gemma2") == 0.0
