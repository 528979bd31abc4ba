"""lm-eval on local data: results against its own, refusals, and a process left as it was."""

import builtins
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gccompress.errors import GccompressError, TextError
from gccompress.models import LoadedModel, open_model
from gccompress.tasks import compare_on_tasks, run_tasks
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'gccompress[eval]'")

# lm-eval and its data sets library are not free of warnings, which here are errors.
pytestmark = [
    pytest.mark.filterwarnings("default:::lm_eval"),
    pytest.mark.filterwarnings("default:::datasets"),
]

QUESTIONS = [
    {
        "id": str(number),
        "question": f"How many winters stood the bridge in case {number}?",
        "choices": {"text": ["ninety-one", "forty", "three", "none"], "label": list("ABCD")},
        "answerKey": "ABCD"[number % 4],
    }
    for number in range(12)
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return open_model((tiny_model("llama", layers=2), tiny_tokenizer()))


@pytest.fixture(scope="module")
def index() -> Any:
    """lm-eval's index of its tasks, which takes some ten seconds to build."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@pytest.fixture(autouse=True)
def _one_index(monkeypatch: pytest.MonkeyPatch, index: Any) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda: index)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    lines = "\n".join(json.dumps(row) for row in QUESTIONS)
    (tmp_path / "arc_easy_test.jsonl").write_text(lines)
    return tmp_path


def answered(model: Any, tokenizer: Any, row: dict[str, Any]) -> bool:
    """The plain way: the choice with the largest summed log-probability after the question."""
    prompt = f"Question: {row['question']}\nAnswer:"
    scores = []
    for choice in row["choices"]["text"]:
        start = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(f"{prompt} {choice}")["input_ids"]])
        with torch.no_grad():
            shares = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        scores.append(float(shares.gather(-1, ids[0, 1:, None])[start - 1 :].sum()))
    return scores.index(max(scores)) == row["choices"]["label"].index(row["answerKey"])


def test_accuracy_is_the_naive_one(
    loaded: LoadedModel, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with an index of its own, as everybody has it
    found = run_tasks(loaded, ["arc_easy"], task_data=questions, limit=10)
    right = [answered(loaded.model, loaded.tokenizer, row) for row in QUESTIONS[:10]]
    assert 0 < sum(right) < 10, "the test could not tell"
    scores = found.scores["arc_easy"]
    assert scores["acc"] == pytest.approx(sum(right) / 10)
    assert scores["acc_stderr"] == pytest.approx(np.std(right, ddof=1) / 10**0.5)
    assert scores["samples"] == 10
    assert {"acc_norm", "acc_norm_stderr"} < set(scores)
    assert found.versions["arc_easy"] == "1.0" and found.versions["lm_eval"]
    assert set(found.files["arc_easy"]) == {"arc_easy_test.jsonl"}
    assert sorted(questions.iterdir()) == [questions / "arc_easy_test.jsonl"]


def test_models_compared_score_as_each_alone(loaded: LoadedModel, questions: Path) -> None:
    other = open_model((tiny_model("gemma2", layers=2), tiny_tokenizer()))
    together = compare_on_tasks([loaded, other, loaded], ["arc_easy"], task_data=questions)
    assert together[0] == together[2]
    assert together[1] == run_tasks(other, ["arc_easy"], task_data=questions)


def test_the_process_is_left_as_it_was(loaded: LoadedModel, questions: Path) -> None:
    environment, padding = dict(os.environ), loaded.tokenizer.padding_side
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    loaded.model.train()
    run_tasks(loaded, ["arc_easy"], task_data=questions, limit=2)
    assert loaded.model.training
    loaded.model.eval()
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before
    assert dict(os.environ) == environment
    assert loaded.tokenizer.padding_side == padding


def test_a_validation_file_will_do_and_a_longer_name_too(
    loaded: LoadedModel, questions: Path
) -> None:
    file = (questions / "arc_easy_test.jsonl").rename(questions / "arc_easy_2018_validation.jsonl")
    found = run_tasks(loaded, ["arc_easy"], task_data=questions, limit=3)
    assert set(found.files["arc_easy"]) == {file.name}
    assert found.scores["arc_easy"]["samples"] == 3
    file.with_name("arc_easy_2019_validation.jsonl").write_text("{}")
    with pytest.raises(TextError, match="could all be its data"):
        run_tasks(loaded, ["arc_easy"], task_data=questions, limit=3)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["arc_easy", "arc_eazy"], "arc_eazy: lm-eval .* has no such task; did you mean arc_easy"),
        (["piqa"], r"piqa: .* none of piqa_validation.jsonl, .*found arc_easy_test.jsonl"),
        (["ai2_arc"], "is a group"),
        ([], "no task named"),
    ],
)
def test_bad_names_and_missing_files(
    loaded: LoadedModel, questions: Path, names: list[str], said: str
) -> None:
    with pytest.raises(GccompressError, match=said) as raised:
        run_tasks(loaded, names, task_data=questions)
    assert "\n" not in str(raised.value)


def test_data_that_is_no_data(loaded: LoadedModel, questions: Path) -> None:
    with pytest.raises(TextError, match="is no folder"):
        run_tasks(loaded, ["arc_easy"], task_data=questions / "none")
    (questions / "arc_easy_test.jsonl").write_text("not JSON\n")
    with pytest.raises(TextError, match="arc_easy.*cannot be had") as raised:
        run_tasks(loaded, ["arc_easy"], task_data=questions)
    assert "\n" not in str(raised.value)


def test_a_model_without_tokenizer_is_refused(questions: Path) -> None:
    bare = open_model(tiny_model("llama", layers=1))
    with pytest.raises(TextError, match="no tokenizer"):
        run_tasks(bare, ["arc_easy"], task_data=questions)


def test_without_lm_eval_the_error_says_what_to_install(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def no_lm_eval(name: str, *args: Any, **kw: Any) -> Any:
        if name.partition(".")[0] == "lm_eval":
            raise ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval")
        return real(name, *args, **kw)

    monkeypatch.setattr(builtins, "__import__", no_lm_eval)
    with pytest.raises(GccompressError, match=r"pip install 'gccompress\[eval\]'"):
        run_tasks(loaded, ["arc_easy"])


def test_the_tasks_whose_data_is_at_hand(loaded: LoadedModel, data_folder: Path) -> None:
    metrics = {
        "arc_easy": ("acc", "arc_easy_test.jsonl"),
        "piqa": ("acc_norm", "piqa_validation.jsonl"),
        "lambada_openai": ("perplexity", "lambada_openai_test.jsonl"),
        "wikitext": ("word_perplexity", "wikitext2_document_level_test.jsonl"),
    }
    found = run_tasks(loaded, list(metrics), task_data=data_folder / "lm_eval", limit=2)
    for task, (metric, file) in metrics.items():
        assert found.scores[task][metric] >= 0
        assert found.scores[task]["samples"] == 2
        assert file in found.files[task]
    assert found.scores["lambada_openai"]["perplexity_stderr"] >= 0


@pytest.mark.real
@pytest.mark.slow
def test_arc_easy_is_better_than_chance_on_real_weights(data_folder: Path) -> None:
    loaded = open_model("smollm2-135m", device="cpu")
    found = run_tasks(loaded, ["arc_easy"], task_data=data_folder / "lm_eval", limit=40)
    assert found.scores["arc_easy"]["acc"] > 0.4
