"""Calibration divided between two real processes: moments, resuming, errors, the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gccompress import moments as module
from gccompress import processes
from gccompress.cli import main
from gccompress.errors import GccompressError
from gccompress.moments import Moments
from gccompress.plan import Plan
from gccompress.roles import Role
from tests import two_processes
from tests.tiny import tiny_folder

ROUNDING = 2e-6  # of a moment's largest element: float32 sums in another order


def torchrun(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a module in two processes on the CPU."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*launcher, "--standalone", "-m", *arguments],
        env=environment,
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )


def assert_equal(found: Moments, wanted: Moments) -> None:
    """Check that two calibrations gave the same, but for rounding."""
    assert found.hash == wanted.hash and found.tokens == wanted.tokens
    for layer in range(3):
        for role in Role:
            for got, want in (
                (found.g(role, layer), wanted.g(role, layer)),
                (found.a(role, layer), wanted.a(role, layer)),
            ):
                assert float((got - want).abs().max()) <= ROUNDING * float(want.abs().max())
        got, want = found.influence[layer], wanted.influence[layer]
        assert got.influence == pytest.approx(want.influence, rel=1e-5)
        assert got.drop_loss == pytest.approx(want.drop_loss, rel=1e-5)


def test_two_processes_give_the_moments_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # a run of one process that dies in its second window
        patched.setattr(module, "add_gradients", module.add_gradients)
        patched.setattr(module, "SAVE_EVERY_SECONDS", 1.0)
        two_processes.interrupt_after(1)
        with pytest.raises(KeyboardInterrupt):
            two_processes.collect(tmp_path / "begun by one")
    done = torchrun(["tests.two_processes", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [(one["count"], one["rank"]) for one in ranks] == [(2, 0), (2, 1)]
    assert [one["whole"] for one in ranks] == [[0, 2, 4], [1, 3]]
    assert [one["passes"] for one in ranks] == [
        [0, 0, 0, 2, 2, 2, 4, 4, 4],
        [1, 1, 1, 3, 3, 3],
    ]
    assert [one["begun by one"] for one in ranks] == [[1, 3], [2, 4]]  # the first is not repeated
    assert all(one["not finite"].startswith("calibration window 1: loss is n") for one in ranks)
    assert all(one["interrupted"] for one in ranks)
    wanted = two_processes.collect(tmp_path / "one")
    for name in ("whole", "passes", "begun by one"):
        assert_equal(Moments(tmp_path / name / "moments" / wanted.folder.name), wanted)
    # A run of two that died is finished by one, from the windows that both had done.
    (partial,) = (tmp_path / "begun by two" / "moments").glob("*.partial")
    assert [folder.name.rpartition("-")[2] for folder in partial.iterdir()] == ["00000002"]
    assert_equal(two_processes.collect(tmp_path / "begun by two"), wanted)


def test_only_the_main_process_plans_and_prints(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model", "llama")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and then some more. " * 100)
    options = ["--model", str(model), "--keep", "0.8", "--multiple", "8", "--device", "cpu"]
    options += ["--calibration", str(text), "--seqlen", "64", "--calibration-tokens", "320"]
    options += ["--heldout-tokens", "128", "--strategy", "width", "--json"]

    def arguments(name: str) -> list[str]:
        mine = ["--cache-dir", str(tmp_path / f"{name}-cache"), "-o", str(tmp_path / name)]
        return ["gccompress", "plan", *options, *mine]

    two = torchrun(arguments("two.yaml"))
    assert two.returncode == 0, two.stderr
    assert len(two.stdout.splitlines()) == 1 and json.loads(two.stdout)
    with pytest.raises(SystemExit) as ended:
        main(arguments("one.yaml")[1:])
    assert ended.value.code == 0
    plans = [Plan.load(tmp_path / name) for name in ("one.yaml", "two.yaml")]
    assert plans[0].calibration == plans[1].calibration
    assert [move.layer for move in plans[0].moves] == [move.layer for move in plans[1].moves]
    assert plans[1].prediction.loss == pytest.approx(plans[0].prediction.loss, rel=1e-4)


@pytest.mark.parametrize("command", ["apply", "evaluate", "plan check"])
def test_what_takes_one_process_says_so(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert processes.started() == 1  # a variable that others set too; no rank, no launcher
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(GccompressError, match=f"{command} runs in one process, 2 were started"):
        processes.refuse_several(command)


def test_a_device_that_all_would_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("gccompress.models.pick_device", torch.device)
    with pytest.raises(GccompressError, match="cuda:1 for 2 processes"):
        processes.join("cuda:1")


def test_one_process_alone_agrees_with_itself() -> None:
    assert processes.join() == processes.Processes(0, 1)
    assert processes.from_main(3) == 3 and processes.largest(-1) == -1
    total = torch.ones(3)
    processes.sum_to_main({"a": total})
    assert torch.equal(total, torch.ones(3))
    assert processes.main_first(lambda: "done") == "done"
