"""Benchmark tasks through lm-eval's Python API, on the hub's data or on local JSONL files.

What lm-eval changes in the process (random states, environment, logging) is put back.
"""

import copy
import difflib
import logging
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml

from gccompress.architectures import spec_for
from gccompress.errors import GccompressError, TextError
from gccompress.files import file_sha256
from gccompress.sampling import evaluating
from gccompress.sources import COMPRESSED

if TYPE_CHECKING:
    from gccompress.models import LoadedModel

logger = logging.getLogger("gccompress")

# Config field of an lm-eval task -> how a local file may name that split.
SPLITS = {
    "test_split": ("test",),
    "validation_split": ("validation", "valid", "dev"),
    "training_split": ("train",),
}
SCORED = ("test_split", "validation_split")  # the first that a task has is what it is scored on
# Resamplings for the standard error of metrics that have no formula; lm-eval's 100000 take longer
# than the task.
BOOTSTRAP = 1000
INSTALL = "install it: pip install 'gccompress[eval]'"


@dataclass(frozen=True)
class TaskResults:
    """What lm-eval measured.

    Attributes:
        scores: per task its metrics by name, with `<metric>_stderr`, and `samples` scored.
        versions: of lm-eval, and of each task.
        files: per task the local files it was scored on, with their SHA-256.
    """

    scores: dict[str, dict[str, float]]
    versions: dict[str, str]
    files: dict[str, dict[str, str]]


def run_tasks(
    loaded: "LoadedModel",
    tasks: Sequence[str],
    *,
    task_data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> TaskResults:
    """Score one model on tasks; see `compare_on_tasks`."""
    [result] = compare_on_tasks(
        [loaded], tasks, task_data=task_data, limit=limit, batch_size=batch_size
    )
    return result


def compare_on_tasks(
    models: "Sequence[LoadedModel]",
    tasks: Sequence[str],
    *,
    task_data: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
) -> list[TaskResults]:
    """Score models on lm-eval tasks, zero-shot unless a task says otherwise.

    Args:
        models: models with their tokenizers.
        tasks: names that lm-eval knows.
        task_data: folder with a file `<task>_<split>.jsonl` per task, such as
            arc_easy_test.jsonl, or one so named with more between; the hub's data sets otherwise.
        limit: items per task, the first ones.
        batch_size: items per forward pass.

    Raises:
        GccompressError: lm-eval is not installed, or a task is unknown.
        TextError: a task's data cannot be had.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise GccompressError(f"--tasks needs lm-eval ({error}); {INSTALL}") from error
    for loaded in models:
        if loaded.tokenizer is None:
            raise TextError(
                f"tasks: model {loaded.source.name} has no tokenizer; pass (model, tokenizer)"
            )
    names = list(dict.fromkeys(tasks))
    with _process_state_kept(), tempfile.TemporaryDirectory() as scratch:
        manager = TaskManager()
        _check_known(names, manager)
        specs: list[str] = list(names)
        files: dict[str, dict[str, Path]] = {}
        if task_data is not None:
            files = {name: _local_files(name, manager, Path(task_data)) for name in names}
            specs = [
                _local_task(name, manager.task_index[name], files[name], Path(scratch))
                for name in names
            ]
        ready = _load(manager, specs, names)
        found = []
        for loaded in models:
            with evaluating(loaded.model):
                results = lm_eval.simple_evaluate(
                    model=_language_model(loaded, batch_size),
                    tasks=ready,
                    task_manager=manager,
                    limit=limit,
                    bootstrap_iters=BOOTSTRAP,
                    log_samples=False,
                )
            found.append(_collect(results, files))
    return found


def _language_model(loaded: "LoadedModel", batch_size: int) -> Any:
    """Wrap a model as lm-eval wants it."""
    from lm_eval.models.huggingface import HFLM

    model_type = loaded.model.config.get_text_config().model_type.removeprefix(COMPRESSED)
    return HFLM(
        pretrained=loaded.model,
        tokenizer=copy.deepcopy(loaded.tokenizer),  # HFLM sets its padding token
        batch_size=batch_size,
        add_bos_token=spec_for(model_type).needs_bos or None,  # None: as the tokenizer does
    )


def _check_known(names: Sequence[str], manager: Any) -> None:
    """Raise unless lm-eval knows every name."""
    if not names:
        raise GccompressError("no task named; lm-eval has arc_easy, piqa, lambada_openai, ...")
    unknown = [name for name in names if name not in manager.task_index]
    if unknown:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise GccompressError(
            f"task {', '.join(unknown)}: lm-eval {metadata.version('lm-eval')} has no such task; "
            f"{hint}`lm-eval ls tasks` lists them"
        )


def _local_files(name: str, manager: Any, folder: Path) -> dict[str, Path]:
    """Return, per split field of a task, its local file; raise if none can be scored on."""
    if not folder.is_dir():
        raise TextError(f"task data {folder} is no folder; name the one with the JSONL files")
    entry = manager.task_index[name]
    if entry.yaml_path is None or "dataset_path" not in (entry.cfg or {}):
        raise GccompressError(
            f"task {name} is a group or has no data set of its own; name single tasks "
            "to use local data"
        )
    found: dict[str, Path] = {}
    sought: list[str] = []
    for field, words in SPLITS.items():
        if not entry.cfg.get(field):
            continue
        file = _local_file(name, words, folder)
        if file is not None:
            found[field] = file
        elif field in SCORED:
            sought += [f"{name}_{word}.jsonl" for word in words]
    if not any(field in found for field in SCORED):
        there = ", ".join(sorted(path.name for path in folder.glob("*.jsonl"))) or "no .jsonl"
        raise TextError(
            f"task {name}: {folder} has none of {', '.join(sought)} (found {there}); "
            "add or rename a file"
        )
    return found


def _local_file(name: str, words: Sequence[str], folder: Path) -> Path | None:
    """Return a split's file: `<task>_<split>.jsonl`, else the only one so named with more between.

    The second is for tasks whose data set has a longer name: wikitext2_document_level_test.jsonl.
    """
    for between in ("", "*"):
        for word in words:
            matching = sorted(folder.glob(f"{name}{between}_{word}.jsonl"))
            if len(matching) == 1:
                return matching[0]
            if matching:
                raise TextError(
                    f"task {name}: {', '.join(path.name for path in matching)} could all be its "
                    f"data in {folder}; name one {name}_{word}.jsonl"
                )
    return None


def _local_task(name: str, entry: Any, files: Mapping[str, Path], scratch: Path) -> str:
    """Write a YAML file that is the task on local files; return its path.

    It includes lm-eval's own file, so that prompts and metrics stay the same.
    """
    config: dict[str, Any] = {
        "include": str(entry.yaml_path),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {
                str(entry.cfg[field]): str(path.resolve()) for field, path in files.items()
            },
            "cache_dir": str(scratch / "data"),
        },
    }
    config |= {field: None for field in SPLITS if field not in files}
    if entry.cfg.get("fewshot_split") not in (None, *config["dataset_kwargs"]["data_files"]):
        config["fewshot_split"] = None
    path = scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(path)


def _load(manager: Any, specs: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Load the tasks with their data."""
    import datasets
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    try:
        loaded = manager.load(list(specs))
    except (OSError, ValueError, HTTPError, datasets.exceptions.DatasetsError) as error:
        why = str(error.__cause__ or error).strip().splitlines()
        raise TextError(
            f"tasks {', '.join(names)}: their data cannot be had "
            f"({type(error).__name__}: {why[0] if why else ''}); with --task-data DIR they are "
            "read from local JSONL files"
        ) from error
    groups = list(loaded["groups"].values())
    inside = {task.task_name for group in groups for task in group.get_all_tasks()}
    return [*groups, *(task for name, task in loaded["tasks"].items() if name not in inside)]


def _collect(results: Mapping[str, Any], files: Mapping[str, Mapping[str, Path]]) -> TaskResults:
    """Keep the numbers of lm-eval's results: its keys are `metric,filter`."""
    scores: dict[str, dict[str, float]] = {}
    versions = {"lm_eval": metadata.version("lm-eval")}
    for name, row in results["results"].items():
        metrics: dict[str, float] = {}
        filters = {key.partition(",")[2] for key in row if "," in key}
        for key, value in row.items():
            metric, comma, chosen = key.partition(",")
            if comma and isinstance(value, int | float):  # stderr may be "N/A"
                metrics[metric if len(filters) == 1 else f"{metric}_{chosen}"] = float(value)
        counted = results.get("n-samples", {}).get(name)
        if counted is not None:
            metrics["samples"] = float(counted["effective"])
        scores[name] = metrics
        version = results.get("versions", {}).get(name)
        if version is not None:
            versions[name] = str(version)
    hashed = {
        name: {path.name: file_sha256(path) for path in paths.values()}
        for name, paths in files.items()
    }
    return TaskResults(scores, versions, hashed)


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Put back random states, environment variables and lm-eval's log level after a block."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - lm-eval seeds this one
    environment = dict(os.environ)
    noisy = logging.getLogger("lm_eval")
    level, disabled = noisy.level, logging.root.manager.disable
    noisy.setLevel(max(logging.ERROR, noisy.level))
    try:
        with torch.random.fork_rng():
            yield
    finally:
        noisy.setLevel(level)
        logging.disable(disabled)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
