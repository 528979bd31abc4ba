"""Moments against gradients taken another way, several passes, interruptions, bad losses."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gccompress import moments as module
from gccompress.apply import apply_plan
from gccompress.calibration import CalibrationOptions
from gccompress.errors import GccompressError, NumericalError
from gccompress.moments import Fisher, Moments, collect_moments, find_moments
from gccompress.planner import PlanOptions, make_plan
from gccompress.roles import Role
from gccompress.text import Windows
from gccompress.view import ModelView
from tests.tiny import VOCAB, tiny_folder, tiny_model

LAYERS = 3


def windows(count: int = 3, length: int = 12) -> Windows:
    """Return windows of random tokens."""
    ids = torch.randint(3, VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    return Windows.of(ids, "random")


def collect(view: ModelView, cache: Path, **options: Any) -> Moments:
    """Return moments of the standard windows."""
    options = {"fisher": Fisher(True, 0), **options}
    return collect_moments(view, windows(), model_hash="sha256:x", cache=cache, **options)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
def test_moments_equal_those_from_explicit_gradients(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, layers=LAYERS)
    view = ModelView(model)
    moments = collect(view, tmp_path)
    tokens = windows().ids.numel()
    for role in view.roles:
        site = view.site(role, 1)
        xs, gs = [], []
        for ids in windows().ids:
            x, g = _input_and_gradient(model, site.module, ids[None])
            xs.append(x)
            gs.append(g[:, site.start : site.stop])
        x, g = torch.cat(xs).double(), torch.cat(gs).double()
        torch.testing.assert_close(moments.g(role, 1), x.T @ x / tokens, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(moments.a(role, 1), g.T @ g / tokens, rtol=1e-3, atol=1e-7)


def _input_and_gradient(
    model: Any, name: str, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a module's inputs and the NLL's gradient at its output, through an added zero."""
    seen = {}

    def add_zero(_: nn.Module, args: tuple[torch.Tensor, ...], y: torch.Tensor) -> torch.Tensor:
        seen["x"] = args[0].detach()
        seen["zero"] = torch.zeros_like(y, requires_grad=True)
        return y + seen["zero"]

    handle = model.get_submodule(name).register_forward_hook(add_zero)
    logits = model(input_ids=ids).logits[0, :-1]
    handle.remove()
    nll = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    (gradient,) = torch.autograd.grad(nll, seen["zero"])
    return seen["x"][0], gradient[0]


def test_influence_is_from_the_true_layer_output(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=LAYERS)
    view = ModelView(model)
    moments = collect(view, tmp_path)
    states: list[torch.Tensor] = []
    hooks = [
        view.layer(i).register_forward_hook(lambda _, args, out: states.extend((args[0], out)))
        for i in range(LAYERS)
    ]
    cosines = torch.zeros(LAYERS, dtype=torch.float64)
    with torch.no_grad():
        for ids in windows().ids:
            states.clear()
            model(input_ids=ids[None])
            for layer in range(LAYERS):
                before, after = states[2 * layer], states[2 * layer + 1]
                cosines[layer] += nn.functional.cosine_similarity(before, after, dim=-1).sum()
    for hook in hooks:
        hook.remove()
    tokens = windows().ids.numel()
    for layer in range(LAYERS):
        one = moments.influence[layer]
        assert one.influence == pytest.approx(float(1 - cosines[layer] / tokens), rel=1e-4)
        assert one.drop_loss > 0


def test_several_passes_give_the_same(tmp_path: Path) -> None:
    view = ModelView(tiny_model("llama", layers=LAYERS))
    once = collect(view, tmp_path / "a", fisher=Fisher(True, 2))
    thrice = collect(view, tmp_path / "b", fisher=Fisher(True, 2), memory=1)
    for role in view.roles:
        for layer in range(LAYERS):
            torch.testing.assert_close(once.g(role, layer), thrice.g(role, layer))
            torch.testing.assert_close(once.a(role, layer), thrice.a(role, layer))
    assert once.influence == thrice.influence


@pytest.mark.parametrize("memory", [1, 2**30])
def test_interrupted_calibration_goes_on_and_ends_in_the_same_sums(
    memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAVE_EVERY_SECONDS", -1.0)
    view = ModelView(tiny_model("llama", layers=LAYERS))
    whole = collect(view, tmp_path / "whole", fisher=Fisher(True, 1), memory=memory)
    backward, calls = module.add_gradients, 0

    def dies(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise KeyboardInterrupt
        backward(*args)

    monkeypatch.setattr(module, "add_gradients", dies)
    attempts = 0
    while True:
        attempts += 1
        try:
            again = collect(view, tmp_path / "cut", fisher=Fisher(True, 1), memory=memory)
            break
        except KeyboardInterrupt:
            assert find_moments(whole.hash, tmp_path / "cut") is None
    assert attempts > 2
    for file in whole.folder.glob("*.safetensors"):
        sums, others = load_file(file), load_file(again.folder / file.name)
        assert sums.keys() == others.keys()
        for key, values in sums.items():  # equal but for the last bit, which buffers' places decide
            close = 1e-5 * float(values.abs().max())
            torch.testing.assert_close(others[key], values, rtol=0, atol=close)
    assert {f.name for f in again.folder.iterdir()} == {f.name for f in whole.folder.iterdir()}


def test_finished_moments_are_found_and_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=LAYERS)
    grads = [parameter.requires_grad for parameter in model.parameters()]
    view = ModelView(model)
    first = collect(view, tmp_path)
    assert [parameter.requires_grad for parameter in model.parameters()] == grads
    assert not any(m._forward_hooks for m in model.modules())
    assert find_moments(first.hash, tmp_path) is not None
    (first.folder / "mark").touch()
    assert collect(view, tmp_path).folder == first.folder
    assert (first.folder / "mark").exists()  # not made again
    assert find_moments("sha256:" + "0" * 64, tmp_path) is None


def test_another_seed_or_fisher_is_another_calibration(tmp_path: Path) -> None:
    view = ModelView(tiny_model("llama", layers=1))
    runs = [
        collect(view, tmp_path, fisher=fisher, seed=seed)
        for fisher, seed in [
            (Fisher(True, 0), 0),
            (Fisher(True, 1), 0),
            (Fisher(False, 1), 0),
            (Fisher(False, 1), 1),
        ]
    ]
    assert len({run.hash for run in runs}) == 4
    a = [run.a(Role.Q, 0) for run in runs]
    # data+1 is the mean of the data's and the sampled gradient's moment.
    torch.testing.assert_close(a[1], (a[0] + a[2]) / 2, rtol=1e-4, atol=1e-9)
    assert not torch.allclose(a[2], a[3])


@pytest.mark.parametrize("fisher", [Fisher(True, 0), Fisher(False, 1)])
def test_a_loss_that_is_not_finite_names_its_window(fisher: Fisher, tmp_path: Path) -> None:
    model = tiny_model("llama", layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[int(windows().ids[1, 3])] = float("inf")
    with pytest.raises(NumericalError, match="window"):
        collect(ModelView(model), tmp_path, fisher=fisher)
    assert not list(tmp_path.glob("moments/*/meta.json"))


def test_damaged_moments_are_one_clear_error(tmp_path: Path) -> None:
    view = ModelView(tiny_model("llama", layers=1))
    moments = collect(view, tmp_path)
    (moments.folder / "layer_000.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(GccompressError, match="cannot be read.*calibrate again"):
        moments.g(Role.Q, 0)


@pytest.mark.parametrize("text", ["", "data", "data+x", "other+1", "data+-1", "model+0"])
def test_fisher_is_parsed_or_refused(text: str) -> None:
    with pytest.raises(GccompressError, match="Fisher"):
        Fisher.parse(text)
    for good in ("data+0", "data+3", "model+2"):
        assert str(Fisher.parse(good)) == good


def test_two_at_once_do_the_work_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward, calls = module.add_gradients, []

    def count(*args: Any) -> None:
        calls.append(args)
        backward(*args)

    monkeypatch.setattr(module, "add_gradients", count)
    views = [ModelView(tiny_model("llama", layers=LAYERS)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda view: collect(view, tmp_path), views))
    assert found[0].folder == found[1].folder and len(calls) == len(windows())
    assert not list(tmp_path.rglob("*.partial"))


def cut_off(file: Path) -> None:
    """Lose the end of a file, as a full disk does."""
    file.write_bytes(file.read_bytes()[:-8])


def scrambled(file: Path) -> None:
    """Lose the header."""
    file.write_bytes(b"x" * 20)


def of_another(file: Path) -> None:
    """Hold other tensors."""
    save_file({"g.q": torch.zeros(3)}, file)


@pytest.mark.parametrize("damage", [cut_off, scrambled, of_another, Path.unlink])
def test_a_damaged_layer_is_made_again_with_one_warning(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = ModelView(tiny_model("llama", layers=LAYERS))
    first = collect(view, tmp_path)
    wanted = first.g(Role.Q, 1)
    damage(first.folder / "layer_001.safetensors")
    again = collect(view, tmp_path)
    torch.testing.assert_close(again.g(Role.Q, 1), wanted, rtol=0, atol=0)
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1 and "layer_001.safetensors" in warnings[0].message
    assert "to be made again" in warnings[0].message


def test_a_plan_whose_moments_are_damaged_is_applied_after_making_them_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", layers=LAYERS)
    options = PlanOptions(strategy="width", spaces="paper", multiple=4, probe="none")
    calibration = CalibrationOptions("self", 64, 16, 0)
    made = make_plan(
        folder, keep=0.8, options=options, calibration=calibration, cache_dir=str(tmp_path)
    )
    (files,) = [file.parent for file in tmp_path.glob("moments/*/meta.json")]
    wanted = apply_plan(made, folder, None, cache_dir=str(tmp_path)).model.state_dict()
    cut_off(files / "layer_002.safetensors")
    found = apply_plan(made, folder, None, cache_dir=str(tmp_path)).model.state_dict()
    assert len([one for one in caplog.records if "to be made again" in one.message]) == 1
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_saved_sums_that_are_damaged_or_of_other_layers_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view = ModelView(tiny_model("llama", layers=LAYERS))
    whole = collect(view, tmp_path / "whole")
    monkeypatch.setattr(module, "SAVE_EVERY_SECONDS", -1.0)
    backward, calls = module.add_gradients, 0

    def dies(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        backward(*args)

    monkeypatch.setattr(module, "add_gradients", dies)
    with pytest.raises(KeyboardInterrupt):  # in the first of three passes
        collect(view, tmp_path, memory=1)
    found = collect(view, tmp_path)  # in one
    assert "resuming" not in caplog.text
    assert (found.folder / "layer_002.safetensors").read_bytes() == (
        whole.folder / "layer_002.safetensors"
    ).read_bytes()
    shutil.rmtree(found.folder)
    calls = 0
    with pytest.raises(KeyboardInterrupt):
        collect(view, tmp_path)
    (saved,) = tmp_path.glob("moments/*.partial/sums-*/*")
    cut_off(saved)
    again = collect(view, tmp_path)
    assert "starts over" in caplog.text
    torch.testing.assert_close(again.a(Role.Q, 1), whole.a(Role.Q, 1), rtol=0, atol=0)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"hash": 1, "tokens": 2, "layers": [3]}'])
def test_damaged_moments_are_made_again(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    view = ModelView(tiny_model("llama", layers=LAYERS))
    first = collect(view, tmp_path)
    wanted = first.g(Role.Q, 1)
    (first.folder / "meta.json").write_text(text)
    torch.testing.assert_close(collect(view, tmp_path).g(Role.Q, 1), wanted, rtol=0, atol=0)
    assert "not finished moments" in caplog.text
