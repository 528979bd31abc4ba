"""Plans carried out on tiny models of every family: sizes, equivalence, reload, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from gccompress.apply import apply_plan, compress, write_checkpoint
from gccompress.calibration import CalibrationOptions, calibrate
from gccompress.errors import CheckpointError, GccompressError, PlanError
from gccompress.linalg import Damping
from gccompress.models import LoadedModel, open_model
from gccompress.moments import Fisher, Moments, collect_moments
from gccompress.moves import applied
from gccompress.plan import (
    AnyMove,
    Budget,
    DropLayers,
    LowRank,
    Plan,
    PlannedModel,
    Prediction,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    plan_params,
)
from gccompress.polish import PolishOptions
from gccompress.roles import Role
from gccompress.view import ModelView, model_shape
from tests.test_moments import windows
from tests.tiny import FAMILIES, tiny_folder, tiny_model, tokens

DAMPING = Damping(a=0.03, g=1e-4)


def mixed_moves(view: ModelView) -> tuple[AnyMove, ...]:
    """Return one move of every kind, for a model of five layers."""
    half = {role: min(view.shape(role, 0)) // 3 for role in view.roles}
    return (
        DropLayers(layers=(2,)),
        LowRank(role=Role.Q, layer=0, rank=half[Role.Q]),
        LowRank(role=Role.DOWN, layer=4, rank=half[Role.DOWN]),
        ShareInput(roles=(Role.K,), layers=(0, 1), rank=half[Role.K]),
        ShareInput(roles=(Role.Q, Role.V), layers=(3, 4), rank=half[Role.Q]),
        ShareOutput(roles=(Role.DOWN,), layers=(0, 1), rank=half[Role.DOWN]),
        ShareOutput(roles=(Role.O,), layers=(3, 4), rank=half[Role.O]),
        LowRank(role=Role.UP, layer=1, rank=half[Role.UP]),
        ResizeMlp(layer=3, width=2 * view.shape(Role.DOWN, 3)[1] // 3),
    )


def plan_for(loaded: LoadedModel, moves: tuple[AnyMove, ...], calibration: Any = None) -> Plan:
    """Return a plan of these moves for this model."""
    view = ModelView(loaded.model)
    shape = model_shape(view)
    decoder, total = plan_params(moves, shape)
    return Plan(
        strategy="auto",
        budget=Budget(keep=decoder / shape.decoder_params()),
        model=PlannedModel(
            name=loaded.source.name,
            hash=loaded.source.hash,
            model_type=loaded.model.config.model_type,
            layers=shape.layers,
            decoder_params=shape.decoder_params(),
            total_params=shape.total_params,
        ),
        calibration=calibration,
        prediction=Prediction(
            params_kept=decoder / shape.decoder_params(), params=total, bytes=4 * total
        ),
        options={"damping_a": DAMPING.a, "damping_g": DAMPING.g},
        moves=moves,
    )


def moments_of(view: ModelView, cache: Path) -> Moments:
    """Return moments of random windows."""
    return collect_moments(
        view, windows(), model_hash="sha256:x", cache=cache, fisher=Fisher(True, 1)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_move_in_every_family(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, layers=5)
    loaded = open_model(model)
    view = ModelView(model)
    shape = model_shape(view)
    moments = moments_of(view, tmp_path)
    plan = plan_for(loaded, mixed_moves(view))
    ids = tokens()
    dense = model(ids).logits.detach().clone()
    with applied(view, moments, plan.moves, DAMPING), torch.no_grad():
        as_planned = model(ids).logits.clone()
    torch.testing.assert_close(model(ids).logits, dense, rtol=0, atol=0)  # put back to the bit
    assert float((as_planned - dense).abs().max()) > 1e-3  # the plan does something

    compressed, jitter = compress(view, moments, plan)
    assert 0 <= jitter <= 1e-2
    assert compressed.config.num_hidden_layers == 4
    assert sum(p.numel() for p in compressed.parameters()) == plan_params(plan.moves, shape)[1]
    with torch.no_grad():
        logits = compressed(ids).logits
        cached = compressed.generate(ids, max_new_tokens=6, do_sample=False, use_cache=True)
        plain = compressed.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    torch.testing.assert_close(logits, as_planned, rtol=1e-4, atol=1e-4)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_of_low_rank_are_reproduced(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, layers=2)
    view = ModelView(model)
    generator = torch.manual_seed(0)
    moves = []
    for role in view.roles:
        for layer in range(2):
            rows, cols = view.shape(role, layer)
            rank = min(rows, cols) // 4
            w = torch.randn(rows, rank, generator=generator) @ torch.randn(
                rank, cols, generator=generator
            )
            view.set_weight(role, layer, 0.02 * w)
            moves.append(LowRank(role=role, layer=layer, rank=rank))
    loaded = open_model(model)
    before = model(tokens()).logits.detach()
    compressed, _ = compress(view, moments_of(view, tmp_path), plan_for(loaded, tuple(moves)))
    after = compressed(tokens()).logits.detach()
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())


def test_from_folder_to_folder_sizes_reload_and_provenance(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=5)
    cache = tmp_path / "cache"
    loaded = open_model(folder, cache_dir=cache)
    view = ModelView(loaded.model)
    options = CalibrationOptions("self", 256, 32, 0, 0, Fisher(True, 0))
    calibrated = calibrate(loaded, view, options, cache)
    moves = mixed_moves(view)
    plan = plan_for(loaded, moves, calibrated.record)
    plan.save(tmp_path / "plan.yaml")

    done = apply_plan(tmp_path / "plan.yaml", None, tmp_path / "out", cache_dir=str(cache))
    assert done.reload_max_abs_diff is not None and done.reload_max_abs_diff < 1e-5
    assert done.params_after == plan.prediction.params
    stored = _stored_elements(tmp_path / "out")
    sentinels = sum(1 for name, n in stored.items() if n == 1)
    assert sum(stored.values()) - sentinels == done.params_after
    assert done.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert Plan.load(tmp_path / "out" / "plan.yaml") == Plan.load(tmp_path / "plan.yaml")
    record = json.loads((tmp_path / "out" / "gccompress.json").read_text())
    assert record["base_model_hash"] == loaded.source.hash
    assert record["reload_max_abs_diff"] == done.reload_max_abs_diff
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(reloaded(tokens()).logits, done.model(tokens()).logits)

    # Same plan, same bytes; also when the moments must be made again.
    again = apply_plan(tmp_path / "plan.yaml", None, tmp_path / "again", cache_dir=str(cache))
    fresh = apply_plan(
        tmp_path / "plan.yaml", None, tmp_path / "fresh", cache_dir=str(tmp_path / "other")
    )
    assert again.bytes_after == fresh.bytes_after == done.bytes_after
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again")]
    assert weights[0] == weights[1]


def _stored_elements(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                found[name] = file.get_tensor(name).numel()
    return found


def test_weights_are_stored_in_the_type_they_came_in(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=5)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    loaded = open_model(folder, cache_dir=tmp_path)
    assert loaded.model.dtype == torch.float32
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    done = apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert done.bytes_after < 2 * done.params_after + 10_000


def test_only_dropped_layers_leave_a_plain_checkpoint(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "qwen3", layers=4)
    loaded = open_model(folder, cache_dir=tmp_path)
    plan = plan_for(loaded, (DropLayers(layers=(1, 2)),))
    apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["num_hidden_layers"] == 2
    assert "gccompress" not in json.dumps(config)
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_width_for_all_layers_is_a_plain_model_of_its_family(
    family: str, tmp_path: Path
) -> None:
    model = tiny_model(family, layers=4)
    loaded = open_model(model)
    view = ModelView(model)
    moments = moments_of(view, tmp_path)
    width = view.shape(Role.DOWN, 0)[1] // 2
    moves = (DropLayers(layers=(1,)), *(ResizeMlp(layer=i, width=width) for i in (0, 2, 3)))
    plan = plan_for(loaded, moves)
    with applied(view, moments, plan.moves, DAMPING), torch.no_grad():
        as_planned = model(tokens()).logits.clone()
    compressed, _ = compress(view, moments, plan)
    write_checkpoint(compressed, None, tmp_path / "out", {}, {})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == family and "gccompress" not in config
    assert config[view.spec.mlp_width] == width
    assert not list((tmp_path / "out").glob("*.py"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(reloaded(tokens()).logits, as_planned, rtol=1e-4, atol=1e-4)


def test_another_model_is_refused_unless_allowed(tmp_path: Path) -> None:
    mine = tiny_folder(tmp_path / "mine", "llama", layers=3)
    other = tiny_folder(tmp_path / "other", "llama", layers=3, seed=1)
    plan = plan_for(open_model(mine, cache_dir=tmp_path), (DropLayers(layers=(1,)),))
    with pytest.raises(PlanError, match="--allow-other-model"):
        apply_plan(plan, other, tmp_path / "out", cache_dir=str(tmp_path))
    assert not (tmp_path / "out").exists()
    apply_plan(plan, other, tmp_path / "out", allow_other_model=True, cache_dir=str(tmp_path))
    record = json.loads((tmp_path / "out" / "gccompress.json").read_text())
    assert record["allowed_other_model"] is True
    assert record["plan_model_hash"] != record["base_model_hash"]


def test_a_full_output_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    model = open_model(tiny_model("llama", layers=3))
    plan = plan_for(model, (DropLayers(layers=(1,)),))
    with pytest.raises(GccompressError, match="not empty"):
        apply_plan(plan, "no-such-model", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_checkpoint_that_reloads_otherwise_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = open_model(tiny_model("llama", layers=3))
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    monkeypatch.setattr("gccompress.apply.reload_difference", lambda model, folder: 0.5)
    with pytest.raises(CheckpointError, match="off by 0.5.*nothing was written"):
        apply_plan(plan, loaded, tmp_path / "out", cache_dir=str(tmp_path / "cache"))
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_moments_that_cannot_be_made_again_are_named(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=3)
    text = tmp_path / "text.txt"
    text.write_text("The river rose in spring. " * 200)
    loaded = open_model(folder, cache_dir=tmp_path / "a")
    view = ModelView(loaded.model)
    options = CalibrationOptions(str(text), 256, 32, 0, 0, Fisher(True, 0))
    record = calibrate(loaded, view, options, tmp_path / "a").record
    plan = plan_for(loaded, (LowRank(role=Role.Q, layer=0, rank=8),), record)
    text.write_text("Nobody had counted how many stones there were. " * 200)
    with pytest.raises(PlanError, match="make the plan again"):
        apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "b"))
    text.unlink()
    with pytest.raises(GccompressError, match="text.txt"):
        apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "b"))
    without = plan.model_copy(update={"calibration": None})
    with pytest.raises(PlanError, match="names no calibration"):
        apply_plan(without, folder, tmp_path / "out", cache_dir=str(tmp_path / "a"))
    assert not (tmp_path / "out").exists()
    # With the moments in the cache the text is not needed.
    apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "a"))


def test_layers_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    loaded = open_model(tiny_model("llama", layers=3))
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    five = plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"layers": 5}),
            "moves": (DropLayers(layers=(4,)),),
        }
    )
    with pytest.raises(PlanError, match="5 layers"):
        apply_plan(five, replace(loaded), tmp_path / "out", allow_other_model=True)


def test_polishing_is_part_of_applying_and_recorded(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=5)
    loaded = open_model(folder, cache_dir=tmp_path)
    view = ModelView(loaded.model)
    options = CalibrationOptions("self", 256, 32, 64, 0, Fisher(True, 0))
    record = calibrate(loaded, view, options, tmp_path).record
    plan = plan_for(loaded, mixed_moves(view), record)
    wanted = PolishOptions(steps=4, rate=1e-3, every=2)
    done = apply_plan(plan, folder, tmp_path / "out", polish=wanted, cache_dir=str(tmp_path))
    assert done.polished is not None and done.polished.after <= done.polished.before
    written = json.loads((tmp_path / "out" / "gccompress.json").read_text())
    assert written["polished"]["after"] == done.polished.after
    assert done.params_after == plan.prediction.params
    none = plan.model_copy(update={"calibration": record.model_copy(update={"heldout_tokens": 0})})
    with pytest.raises(GccompressError, match="held-out"):
        apply_plan(none, folder, tmp_path / "no", polish=wanted, cache_dir=str(tmp_path))
    assert not (tmp_path / "no").exists()


def test_another_model_is_factored_on_its_own_moments(tmp_path: Path) -> None:
    """Even one of other widths, for which the plan's own moments would be of no use."""
    mine = open_model(tiny_folder(tmp_path / "mine", "llama", layers=3), cache_dir=tmp_path)
    other = tiny_folder(tmp_path / "other", "llama", layers=3, intermediate_size=112)
    options = CalibrationOptions("self", 256, 32, 0, 0, Fisher(True, 0))
    record = calibrate(mine, ModelView(mine.model), options, tmp_path).record
    plan = plan_for(mine, (LowRank(role=Role.DOWN, layer=0, rank=8),), record)
    folder = {"allow_other_model": True, "cache_dir": str(tmp_path)}
    apply_plan(plan, other, tmp_path / "out", **folder)
    theirs = open_model(other, cache_dir=tmp_path)
    own = calibrate(theirs, ModelView(theirs.model), options, tmp_path).record
    apply_plan(plan_for(theirs, plan.moves, own), other, tmp_path / "own", cache_dir=str(tmp_path))
    first, second = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "own"))
    assert first == second


def test_moments_are_made_again_in_the_type_they_were_made_in(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=3)
    loaded = open_model(folder, dtype="bfloat16", cache_dir=tmp_path)
    options = CalibrationOptions("self", 256, 32, 0, 0, Fisher(True, 0))
    record = calibrate(loaded, ModelView(loaded.model), options, tmp_path).record
    plan = plan_for(loaded, (LowRank(role=Role.Q, layer=0, rank=8),), record)
    assert record.dtype == "bfloat16"
    done = apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path / "empty"))
    assert done.reload_max_abs_diff == 0.0


def test_a_model_that_is_not_where_the_plan_says(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama", layers=3)
    plan = plan_for(open_model(folder, cache_dir=tmp_path), (DropLayers(layers=(1,)),))
    folder.rename(tmp_path / "moved")
    with pytest.raises(GccompressError, match="dense.*say so with --model"):
        apply_plan(plan, out=tmp_path / "out", cache_dir=str(tmp_path))
    done = apply_plan(plan, tmp_path / "moved", tmp_path / "out", cache_dir=str(tmp_path))
    assert done.path == tmp_path / "out"


@pytest.mark.parametrize("share", ["lots", 1.0, -0.1, float("nan")])
def test_a_damping_that_is_no_share_is_refused(share: Any, tmp_path: Path) -> None:
    loaded = open_model(tiny_model("llama", layers=3))
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    plan = plan.model_copy(update={"options": {"damping_a": share}})
    with pytest.raises(PlanError, match="options.damping_a"):
        apply_plan(plan, loaded, tmp_path / "out", cache_dir=str(tmp_path))
