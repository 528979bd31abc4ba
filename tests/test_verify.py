"""What a checkpoint folder can be wrong in: each one line, before any weight is used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gccompress import verify
from gccompress.apply import apply_plan
from gccompress.checkpoints import load_checkpoint, save_checkpoint
from gccompress.errors import CheckpointError, ModelError, NumericalError
from gccompress.models import open_model
from gccompress.plan import DropLayers
from tests.test_apply import DAMPING, plan_for
from tests.test_checkpoints import compressed, edit_config, rewrite
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with plan, record and hashes, made by apply from a plan of every move."""
    from gccompress.calibration import CalibrationOptions, calibrate
    from gccompress.moments import Fisher
    from gccompress.view import ModelView
    from tests.test_apply import mixed_moves

    root = tmp_path_factory.mktemp("applied")
    loaded = open_model(tiny_folder(root / "dense", "llama", layers=5), cache_dir=root)
    view = ModelView(loaded.model)
    options = CalibrationOptions("self", 256, 32, 0, 0, Fisher(True, 0))
    record = calibrate(loaded, view, options, root).record
    plan = plan_for(loaded, mixed_moves(view), record)
    assert DAMPING.a == plan.options["damping_a"]
    apply_plan(plan, root / "dense", root / "out", cache_dir=str(root))
    return root / "out"


@pytest.fixture
def folder(applied: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(applied, tmp_path / "copy"))


def resharded(folder: Path) -> None:
    """Save the model again in several files, which leaves plan and record."""
    model = load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    (folder / "gccompress.json").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")


# ------------------------------------------------------------------ what is right


def test_what_apply_writes_is_verified(applied: Path) -> None:
    found = verify(applied)
    files = {path.name for path in applied.iterdir()} - {"gccompress.json", "README.md"}
    assert found.hashed == len(files)
    assert found.notes == ()
    model = load_checkpoint(applied)
    assert found.params == sum(p.numel() for p in model.parameters())
    assert (found.layers, found.compressed, found.model_type) == (4, True, "llama")
    assert found.bytes == (applied / "model.safetensors").stat().st_size
    assert json.loads(json.dumps(found.to_dict()))["path"] == str(applied)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_compressed_and_plain(family: str, tmp_path: Path) -> None:
    for name, model in (("small", compressed(family)), ("plain", tiny_model(family))):
        folder = tmp_path / name
        folder.mkdir()
        save_checkpoint(model, tiny_tokenizer(), folder, max_shard_size="50KB")
        found = verify(folder)
        assert found.compressed == (name == "small")
        assert found.params == sum(p.numel() for p in model.parameters())
        assert (found.layers, found.hashed) == (4, 0)
        assert len(found.notes) == 2  # no hashes, no plan


def test_a_dropped_layer_leaves_a_plain_checkpoint_that_is_verified(tmp_path: Path) -> None:
    loaded = open_model(tiny_folder(tmp_path / "dense", "qwen2"), cache_dir=tmp_path)
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    apply_plan(plan, loaded, tmp_path / "out", cache_dir=str(tmp_path))
    found = verify(tmp_path / "out")
    assert (found.compressed, found.layers, found.notes) == (False, 3, ())
    edit_config(tmp_path / "out", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(CheckpointError, match="unexpected.*layers.2"):
        verify(tmp_path / "out")


def test_what_is_saved_again_is_verified_without_hashes(folder: Path) -> None:
    resharded(folder)
    found = verify(folder)
    assert found.hashed == 0 and "none recorded" in found.notes[0]


def test_a_users_own_notes_beside_it_do_no_harm(folder: Path) -> None:
    (folder / "notes.txt").write_text("works well")
    verify(folder)


def test_the_links_of_a_hub_cache_are_its_own(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    verify(snapshot)


# ------------------------------------------------------------------ what is wrong


def change_layout(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["gccompress"])
    (folder / "config.json").write_text(json.dumps(config))


def change_index(folder: Path, name: str) -> None:
    resharded(folder)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))


def link_out(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


def narrower_query(folder: Path) -> None:
    """Rank, weights and config agree, yet the layer is not as wide as the attention wants."""
    name = "model.layers.0.self_attn.q_proj"
    up = load_file(folder / "model.safetensors")[f"{name}.up.weight"]
    rewrite(folder, {f"{name}.up.weight": up[:-16].clone()})
    change_layout(folder, lambda layout: layout["modules"][name].update(out=up.shape[0] - 16))


def replan(folder: Path, old: str, new: str) -> None:
    text = (folder / "plan.yaml").read_text()
    assert old in text
    (folder / "plan.yaml").write_text(text.replace(old, new, 1))


def edit_record(folder: Path, files: Any) -> None:
    record = json.loads((folder / "gccompress.json").read_text())
    (folder / "gccompress.json").write_text(json.dumps({**record, "files": files}))


def set_rank(layout: dict[str, Any]) -> None:
    next(s for s in layout["modules"].values() if s["kind"] == "low_rank")["rank"] += 1


BASIS = "gccompress_bases.k_0_1.weight"
STRUCTURE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing basis": (lambda f: rewrite(f, {BASIS: None}), f"1 missing .{BASIS}"),
    "extra tensor": (lambda f: rewrite(f, {"spy": torch.zeros(2)}), "1 unexpected .spy"),
    "wrong shape": (lambda f: rewrite(f, {BASIS: torch.zeros(3, 3)}), f"another shape .{BASIS}"),
    "config: rank": (lambda f: change_layout(f, set_rank), "2 of another shape"),
    "config: kind": (
        lambda f: change_layout(
            f, lambda lay: next(iter(lay["modules"].values())).update(kind="x")
        ),
        "kind 'x'",
    ),
    "config: a module left out": (
        lambda f: change_layout(f, lambda lay: lay["modules"].popitem()),
        "unexpected",
    ),
    "config: a negative size": (
        lambda f: change_layout(f, lambda lay: lay["bases"]["k_0_1"].update(out=-3)),
        "config.gccompress, bases",
    ),
    "config: no mapping": (lambda f: edit_config(f, gccompress=[1]), "list, wanted a mapping"),
    "config: bases no mapping": (
        lambda f: edit_config(f, gccompress={"version": 1, "bases": [1]}),
        "config.gccompress",
    ),
    "config: not fitting": (narrower_query, "q_proj .48, 48., the model needs .64, 48."),
    "config: no number": (lambda f: edit_config(f, num_hidden_layers="four"), "num_hidden_layers"),
    "newer version": (lambda f: change_layout(f, lambda lay: lay.update(version=2)), "version 2"),
    "other weights": (
        lambda f: edit_config(f, transformers_weights="../x.safetensors"),
        "transformers_weights",
    ),
    "other code": (
        lambda f: edit_config(f, auto_map={"AutoConfig": "someone/else--x.Y"}),
        "someone/else--x.Y",
    ),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "adapter_config"),
    "traversal": (lambda f: change_index(f, "../model.safetensors"), "names '../model.safe"),
    "absolute path": (lambda f: change_index(f, "/tmp/m.safetensors"), "names '/tmp/m.safe"),
    "gone shard": (lambda f: change_index(f, "gone.safetensors"), "gone.safetensors, which is not"),
    "weights linked": (lambda f: link_out(f, "model.safetensors"), "a link out of the folder"),
    "config linked": (lambda f: link_out(f, "config.json"), "a link out of the folder"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-5]
        ),
        "truncated",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
}
CONTENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "altered code": (
        lambda f: (f / "modeling_gccompress.py").write_text("import os\n"),
        "modeling_gccompress.py was altered",
    ),
    "no code": (lambda f: (f / "modeling_gccompress.py").unlink(), "no modeling_gccompress.py"),
    "plan: parameters": (
        lambda f: replan(f, "\n  params: ", "\n  params: 1"),
        "plan.yaml says .* param",
    ),
    "plan: broken": (lambda f: (f / "plan.yaml").write_text("moves: ["), "plan.yaml: .*not YAML"),
    "record: broken": (lambda f: (f / "gccompress.json").write_text("["), "cannot be read"),
    "record: traversal": (lambda f: edit_record(f, {"../x": "0"}), "no map of names"),
    "record: list": (lambda f: edit_record(f, ["x"]), "cannot be read"),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_a_wrong_structure_is_refused_by_verify_and_at_load(folder: Path, case: str) -> None:
    damage, message = STRUCTURE[case]
    damage(folder)
    for check in (verify, load_checkpoint):
        with pytest.raises(CheckpointError, match=message) as caught:
            check(folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize("case", CONTENT)
def test_wrong_content_is_refused(folder: Path, case: str) -> None:
    damage, message = CONTENT[case]
    if case.startswith("plan"):
        edit_record(folder, {})  # else the hash tells first
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        verify(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "plan.yaml", "tokenizer.json"])
def test_one_altered_byte_or_a_lost_file_is_noticed(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name} was altered"):
        verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name if name[0] != "m" else "no weights"):
        verify(folder)


@pytest.mark.parametrize("name", ["configuration.py", "extra.safetensors"])
def test_code_or_weights_that_were_added_are_noticed(folder: Path, name: str) -> None:
    save_file({"x": torch.zeros(1)}, folder / name)
    with pytest.raises(CheckpointError, match=f"{name} was added"):
        verify(folder)


def test_a_weight_that_is_not_finite_is_named(folder: Path) -> None:
    edit_record(folder, {})
    basis = load_file(folder / "model.safetensors")[BASIS]
    basis[2, 5] = float("nan")
    rewrite(folder, {BASIS: basis})
    with pytest.raises(NumericalError, match=rf"{BASIS} is nan at \[2, 5\]"):
        verify(folder)


def test_code_of_another_version_is_told_from_altered_code(folder: Path) -> None:
    import hashlib

    edit_record(folder, {})
    code = folder / "modeling_gccompress.py"
    code.write_text(code.read_text() + "# another version\n")
    edit_config(folder, gccompress_code_sha256=hashlib.sha256(code.read_bytes()).hexdigest())
    assert any("not of this version" in note for note in verify(folder).notes)


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/x.safetensors"])
def test_the_loader_itself_reads_no_file_outside_the_folder(folder: Path, name: str) -> None:
    change_index(folder, name)
    with pytest.raises(RuntimeError, match="wanted files in the folder"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("case", ["weights linked", "adapter", "config: not fitting"])
def test_every_command_that_opens_it_checks_its_structure(
    folder: Path, case: str, tmp_path: Path
) -> None:
    damage, message = STRUCTURE[case]
    damage(folder)
    with pytest.raises(ModelError, match=message):
        open_model(folder, cache_dir=tmp_path)
