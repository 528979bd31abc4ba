"""Sweeps over a model: from files, in threads, interrupted; several models side by side."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress import all_pairs
from gccompress.comparison import compare_models
from gccompress.continuity import ContinuityReport, analyze
from gccompress.errors import GccompressError
from gccompress.pairs import compare
from gccompress.roles import Role, Space
from gccompress.shards import open_stream
from gccompress.view import ModelView
from tests.test_continuity import shown
from tests.tiny import FAMILIES, tiny_folder, tiny_model

LARGE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 320, "layers": 4}


def measured(source: Any, tmp_path: Path, **options: Any) -> ContinuityReport:
    return analyze(source, device="cpu", progress=False, cache_dir=tmp_path / "cache", **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_give_what_the_model_in_memory_gives(family: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", family, layers=3)
    stream = measured(folder, tmp_path)
    assert stream.roles == measured(ModelView(tiny_model(family, layers=3)), tmp_path).roles
    assert stream.model_hash == open_stream(folder, cache_dir=tmp_path / "cache").hash


def test_the_numbers_do_not_depend_on_threads(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", **LARGE)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = measured(folder, tmp_path)
        torch.set_num_threads(2)
        two = measured(folder, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    for role, row in one.roles.items():
        for name in ("v1", "u1", "gram_in", "gram_out", "sigma2_in"):
            assert getattr(two.roles[role], name) == pytest.approx(getattr(row, name), abs=1e-5)


def test_workers_fit_into_the_memory_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream(tiny_folder(tmp_path / "model", "llama", layers=2))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    largest = all_pairs.working_bytes((48, 96), 4)
    for memory, wanted in ((1, (1, 8)), (largest * 3, (3, 2)), (largest * 99, (8, 1))):
        settings = all_pairs.Settings(memory=memory)
        assert all_pairs._split(stream, settings) == wanted
    assert 2 * all_pairs.working_bytes((8192, 28672), 4) < all_pairs.MEMORY


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let `compare` of a sweep be interrupted at its call `count`; return the list of calls."""
    calls: list[int] = []

    def interrupted(*layers: Any) -> Any:
        calls.append(len(calls))
        if len(calls) > count:
            raise KeyboardInterrupt
        return compare(*layers)

    monkeypatch.setattr(all_pairs, "compare", interrupted)
    return calls


@pytest.mark.parametrize("done", [0, 1, 6, 20])
def test_an_interrupted_sweep_goes_on_and_ends_in_the_same_numbers(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", **LARGE)
    whole = analyze(folder, device="cpu", progress=False, cache_dir=tmp_path / "other")
    pairs = 7 * 3
    interrupt_after(done, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measured(folder, tmp_path)
    kept = list((tmp_path / "cache" / "continuity" / "pairs").glob("*.jsonl"))
    assert len(kept) == (1 if done else 0)
    calls = interrupt_after(10_000, monkeypatch)
    again = measured(folder, tmp_path)
    assert again.roles == whole.roles
    assert again.model_copy(update={"seconds": 0, "peak_rss_bytes": 0}).to_json() == (
        whole.model_copy(update={"seconds": 0, "peak_rss_bytes": 0}).to_json()
    )
    assert len(calls) <= pairs - max(0, done - 3)  # those handed over but not yet written are lost
    assert not list((tmp_path / "cache" / "continuity" / "pairs").glob("*.jsonl"))


def test_a_line_cut_short_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", layers=4)
    whole = measured(folder, tmp_path)
    interrupt_after(9, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        measured(folder, tmp_path)
    [kept] = (tmp_path / "cache" / "continuity" / "pairs").glob("*.jsonl")
    text = kept.read_text()
    kept.write_text(text[: len(text) - 25])
    interrupt_after(10_000, monkeypatch)
    assert measured(folder, tmp_path).roles == whole.roles


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", layers=2)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "continuity").write_text("a file where a folder is wanted")
    with pytest.raises(
        GccompressError, match="finished pairs cannot be kept in .*--cache-dir"
    ) as e:
        measured(folder, tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_one_clear_line(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", layers=2)
    (tmp_path / "cache").mkdir(mode=0o555)
    with pytest.raises(GccompressError, match="Permission denied.*--cache-dir"):
        measured(folder, tmp_path)


def test_pairs_of_other_settings_or_files_are_not_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    paths = {
        all_pairs.kept_path(tmp_path, [file], all_pairs.Settings(folded=folded, full=full))
        for folded in (True, False)
        for full in (True, False)
    }
    file.write_bytes(b"12")
    paths.add(all_pairs.kept_path(tmp_path, [file], all_pairs.Settings()))
    assert len(paths) == 5


def test_a_weight_of_two_equal_values_is_degenerate_in_json_and_table(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=4)
    view = ModelView(model)
    left, values, right = torch.linalg.svd(view.weight(Role.Q, 2), full_matrices=False)
    values[1] = values[0]
    view.set_weight(Role.Q, 2, left * values @ right)
    report = measured(view, tmp_path, folded=False)
    row = json.loads(report.to_json())["roles"]["q"]
    assert row["degenerate"] == [False, True, True]
    assert row["v1"][1:] == row["u1"][1:] == [None, None]
    assert row["v1_mean"] == row["v1"][0]
    assert abs(row["gap"][2]) < 1e-5 and len(row["gap"]) == len(row["residual"]) == 4
    assert "2 of 3 pairs degenerate" in row["rule"]
    text = " ".join(shown(report).split())
    assert "q 2 of 3 pairs" in text and f"{row['v1_mean']:.3f}*" in text
    assert len(report.save(tmp_path / "out")) == 3


def test_layers_of_mixed_dtypes(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=3)
    plain = measured(ModelView(model), tmp_path)
    for index, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
        ModelView(model).layer(index).to(dtype)
    mixed = measured(ModelView(model), tmp_path)
    for role, row in mixed.roles.items():
        assert row.v1_mean == pytest.approx(plain.roles[role].v1_mean, abs=0.03)
        assert row.gram_in_mean == pytest.approx(plain.roles[role].gram_in_mean, abs=0.03)


def test_full_and_fast_agree(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "gemma2", **LARGE)
    fast, full = measured(folder, tmp_path), measured(folder, tmp_path, full=True)
    for role, row in full.roles.items():
        for folded in (False, True):
            found, wanted = fast.roles[role].measures(folded=folded), row.measures(folded=folded)
            assert found.v1 == pytest.approx(wanted.v1, abs=1e-3)
            assert found.u1 == pytest.approx(wanted.u1, abs=1e-3)
            assert found.gram_in == pytest.approx(wanted.gram_in, rel=1e-4)
            assert found.gram_out == pytest.approx(wanted.gram_out, rel=1e-4)
            assert found.angles["8"].cos_in == pytest.approx(wanted.angles["8"].cos_in, abs=1e-2)


# --- several models ----------------------------------------------------------------------------


def test_models_side_by_side(tmp_path: Path) -> None:
    folders = [
        tiny_folder(tmp_path / "a $x$", "llama", layers=4),
        tiny_folder(tmp_path / "[b]", "gpt2", layers=3),
        tiny_folder(tmp_path / "c", "gemma2", layers=1),
    ]
    options = {"device": "cpu", "progress": False, "cache_dir": tmp_path / "cache"}
    found = compare_models(folders, **options)
    data = json.loads(found.to_json())
    assert set(data) == {"models"}
    for folder, one in zip(folders, data["models"], strict=True):
        alone = json.loads(analyze(folder, **options).to_json())  # type: ignore[arg-type]
        assert one["roles"] == alone["roles"] and one["model"] == str(folder)
    written = found.save(tmp_path / "out")
    assert [path.name for path in written] == [
        "continuity.json", *(f"continuity_{role}.png" for role in Role)
    ]  # fmt: skip
    text = shown(found, width=140)  # type: ignore[arg-type]
    assert all(str(folder) in text for folder in folders)
    assert sum("none" in line or "shares" in line for line in text.splitlines()) >= 7 + 6 + 7


def test_the_figure_of_a_role_draws_every_model_and_the_random_level(tmp_path: Path) -> None:
    from gccompress.report.figures import drift_figure

    reports = [
        measured(ModelView(tiny_model("llama", layers=layers, seed=layers)), tmp_path)
        for layers in (3, 5)
    ]
    figure = drift_figure(reports, Role.DOWN)
    for axes, name in zip(figure.axes, ("v1", "u1"), strict=True):
        lines = axes.get_lines()
        assert list(lines[0].get_ydata()) == getattr(reports[0].roles[Role.DOWN], name)
        assert list(lines[1].get_ydata()) == getattr(reports[1].roles[Role.DOWN], name)
        assert list(lines[1].get_xdata()) == [0.0, 1 / 3, 2 / 3, 1.0]
        level = getattr(reports[0].roles[Role.DOWN], f"random_{name}")
        assert set(lines[2].get_ydata()) == {level}


def test_the_command_takes_several_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gccompress.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GCCOMPRESS_CACHE", str(tmp_path / "cache"))
    for name in ("early", "late"):
        tiny_folder(tmp_path / name, "llama", layers=3, seed=len(name))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["-q", "analyze", "early", "late", "--json", "--no-folded", "-o", "out"])
    assert stop.value.code == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [one["model"] for one in models] == ["early", "late"]
    assert all(row["folded"] is None for one in models for row in one["roles"].values())
    assert (tmp_path / "out" / "continuity_q.png").exists()
    with pytest.raises(SystemExit):
        main(["-q", "analyze", "early", "--json", "--full"])
    alone = json.loads(capsys.readouterr().out)
    assert alone["model"] == "early" and alone["roles"]["q"]["sigma2_share"] == [1.0, 1.0]
    assert Space(alone["roles"]["q"]["verdict"]) is Space.NONE
