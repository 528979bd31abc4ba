"""lm-eval's three ways to a compressed checkpoint give the same numbers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gccompress.checkpoints import load_checkpoint, save_checkpoint
from gccompress.cli import main
from tests.test_checkpoints import compressed
from tests.test_tasks import QUESTIONS
from tests.tiny import tiny_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'gccompress[eval]'")

ROOT = Path(__file__).resolve().parent.parent
BRIDGE = {
    "task": "bridge",
    "dataset_path": "json",
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
    "doc_to_choice": "{{choices.text}}",
    "metric_list": [{"metric": m, "aggregation": "mean"} for m in ("acc", "acc_norm")],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A compressed checkpoint, and a folder with a task on local data."""
    root = tmp_path_factory.mktemp("lm_eval")
    for name in ("model", "tasks"):
        (root / name).mkdir()
    save_checkpoint(compressed("llama"), tiny_tokenizer(), root / "model")
    data = root / "bridge.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in QUESTIONS))
    kwargs = {"data_files": {"test": str(data)}, "cache_dir": str(root / "cache")}
    task = {**BRIDGE, "dataset_kwargs": kwargs}
    (root / "tasks" / "bridge.yaml").write_text(yaml.safe_dump(task))
    return root / "model", root / "tasks"


def shell(
    arguments: list[str], folders: tuple[Path, Path], out: Path, *, trust: bool, here: bool
) -> dict[str, Any]:
    """Run lm-eval's command line in a process of its own; return the scores of the task."""
    model_args = f"pretrained={folders[0]}" + (",trust_remote_code=True" if trust else "")
    options = ["--model", "hf", "--model_args", model_args, "--tasks", "bridge", "--device", "cpu"]
    options += ["--include_path", str(folders[1]), "--batch_size", "4", "--output_path", str(out)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "hf")}
    if here:
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, *arguments, *options],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folders[1],
        env=environment,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = out.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())["results"]["bridge"]
    return {key: value for key, value in found.items() if key.startswith("acc")}


@pytest.mark.slow
@pytest.mark.filterwarnings("default:::lm_eval", "default:::datasets")
def test_three_ways_to_the_same_numbers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # The first where gccompress cannot be imported, by the checkpoint's own code.
    blocked = "import sys; sys.modules['gccompress'] = None\n"
    stock = ["-c", blocked + "from lm_eval.__main__ import cli_evaluate; cli_evaluate()", "run"]
    ours = ["-m", "gccompress.cli", "lm-eval", "run"]
    first = shell(stock, folders, tmp_path / "stock", trust=True, here=False)
    second = shell(ours, folders, tmp_path / "ours", trust=False, here=True)
    model = load_checkpoint(folders[0])
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=4),
        tasks=["bridge"],
        task_manager=TaskManager(include_path=str(folders[1])),
    )
    third = results["results"]["bridge"]
    assert first["acc,none"] == pytest.approx(third["acc,none"])
    assert 0 < first["acc,none"] < 1, "the test could not tell"
    assert first == second == {key: pytest.approx(third[key]) for key in first}


def test_its_own_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    with pytest.raises(SystemExit) as caught:
        main(["lm-eval", "--help"])
    assert caught.value.code == 0
    assert "Language Model Evaluation Harness" in capsys.readouterr().out
    assert sys.argv == before


def test_without_lm_eval_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as caught:
        main(["lm-eval", "run"])
    assert caught.value.code == 2
    assert "pip install 'gccompress[eval]'" in capsys.readouterr().err
