"""What a model is worth: perplexity, KL to a baseline, tasks, size and speed, side by side."""

import math
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

import gccompress
from gccompress.errors import GccompressError
from gccompress.sampling import continue_greedily
from gccompress.scores import (
    Perplexity,
    Speed,
    compare_speed,
    kl_to_baseline,
    measure_speed,
    perplexity,
    perplexity_of,
    score_windows,
)
from gccompress.tasks import TaskResults, compare_on_tasks
from gccompress.text import Windows, load_windows

if TYPE_CHECKING:
    from rich.table import Table

    from gccompress.models import LoadedModel

__all__ = [
    "Evaluation",
    "Perplexity",
    "Speed",
    "evaluate",
    "kl_to_baseline",
    "measure_speed",
    "perplexity",
]

# Seed of the text that scores are made on; calibration counts its seeds from 0, so no window that
# a plan was fitted to is scored.
HELDOUT_SEED = 1 << 40


class PerplexityRecord(BaseModel):
    """`scores.Perplexity` as it is written; see there."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)

    dataset: str
    seqlen: int
    tokens: int
    value: float
    nll: float
    stderr: float | None


class Score(BaseModel):
    """What one model scores.

    Attributes:
        model: name as given.
        model_hash: "sha256:..." of its content.
        perplexity: on the text.
        tasks: per lm-eval task its metrics, with `<metric>_stderr` and `samples`.
        params: number of parameters, a tied one counted once.
        bytes: of its safetensors files; of a model given in memory, of its tensors.
        prefill_tokens_per_s: batch 1; None if not measured.
        decode_tokens_per_s: batch 1; None if not measured.
        continuation: of the prompt, greedy; None without a prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str
    model_hash: str
    perplexity: PerplexityRecord
    tasks: dict[str, dict[str, float]] = {}
    params: int
    bytes: int
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    continuation: str | None = None


class Evaluation(Score):
    """A model's scores, a baseline's beside them, and how both were measured.

    Attributes:
        version: of this format.
        kl_to_baseline: mean KL(baseline || model), nats per token.
        kl_stderr: its standard error from the spread over windows.
        baseline: the same measurements of the baseline.
        text_hash: "sha256:..." of the windows.
        text_note: how the windows were made.
        task_files: per task the local files it was scored on, with their SHA-256.
        task_limit: items per task, None for all.
        speed_tokens: length of prompt and of continuation that the speeds are of.
        prompt: what the continuations continue.
        device: where it ran.
        dtype: that it ran in.
        versions: of the packages, and of each task.
    """

    version: Literal[1] = 1
    kl_to_baseline: float | None = None
    kl_stderr: float | None = None
    baseline: Score | None = None
    text_hash: str
    text_note: str = ""
    task_files: dict[str, dict[str, str]] = {}
    task_limit: int | None = None
    speed_tokens: tuple[int, int] | None = None
    prompt: str | None = None
    device: str
    dtype: str
    versions: dict[str, str]

    @property
    def continuations(self) -> dict[str, str]:
        """Continuations of the prompt by label: `baseline` if there is one, then `model`."""
        both = {"baseline": self.baseline, "model": self}
        return {
            label: score.continuation
            for label, score in both.items()
            if score is not None and score.continuation is not None
        }

    def to_json(self) -> str:
        """Return one JSON object."""
        return self.model_dump_json(indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Evaluation":
        """Read what `to_json` wrote.

        Raises:
            GccompressError: not an evaluation, unknown keys, or another version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise GccompressError(
                f"not an evaluation of this version ({where}: {first['msg']}); evaluate again"
            ) from error

    def table(self) -> "Table":
        """Return a table: what was measured, before, after and the change."""
        from rich.table import Table

        text = self.perplexity
        title = f"{text.tokens} tokens of {text.dataset}, windows of {text.seqlen}"
        table = Table(title=f"{self.model}: {title}", title_justify="left")
        table.add_column("")
        if self.baseline is not None:
            table.add_column(f"baseline ({self.baseline.model})", justify="right")
        table.add_column("model", justify="right")
        if self.baseline is not None:
            table.add_column("change", justify="right")
        for label, *cells in _table_rows(self):
            table.add_row(label, *(cells if self.baseline is not None else cells[1:2]))
        return table


def evaluate(
    model: Any,
    *,
    baseline: Any = None,
    text: str | Path | None = None,
    tokens: int = 12288,
    seqlen: int = 512,
    tasks: Sequence[str] = (),
    task_data: str | Path | None = None,
    limit: int | None = None,
    speed: bool = True,
    prompt: str | None = None,
    seed: int = HELDOUT_SEED,
    device: str = "auto",
    dtype: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Score a model, and beside it the model it was made from.

    Args:
        model: path, alias, hub id, or a model in memory; see `models.open_model`.
        baseline: the dense model to compare with, named likewise.
        text: as for `text.load_windows`, of the test split where the hub has it. Default: sampled
            from the baseline, else from the model, with another seed than calibration's.
        tokens: of text to score.
        seqlen: tokens of a window.
        tasks: names of lm-eval tasks.
        task_data: folder of local task data, see `tasks.compare_on_tasks`.
        limit: items per task.
        speed: time prefill and decoding.
        prompt: to be continued greedily.
        seed: of sampled text.
        device: "auto", "cpu", "cuda", "cuda:1".
        dtype: to load in.
        cache_dir: this package's cache folder.
        trust_remote_code: run code that a model's folder brings.

    Raises:
        ModelError: a model cannot be had.
        TextError: the text or a task's data cannot be had, or is too short.
        NumericalError: a non-finite loss, naming the window.
        GccompressError: unknown task, lm-eval missing, or vocabularies that differ.
    """
    from gccompress.models import open_model

    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "cache_dir": cache_dir,
        "trust_remote_code": trust_remote_code,
    }
    ours = open_model(model, **options)
    theirs = None if baseline is None else open_model(baseline, **options)
    windows = load_windows(
        "self" if text is None else text,
        theirs or ours,
        seqlen=seqlen,
        tokens=tokens,
        seed=seed,
        split="test",
        cache_dir=cache_dir,
    )
    both = [one for one in (ours, theirs) if one is not None]
    scored = score_windows(ours.model, windows, baseline=theirs and theirs.model)
    ran: Sequence[TaskResults | None] = [None] * len(both)
    if tasks:
        ran = compare_on_tasks(both, tasks, task_data=task_data, limit=limit)
    speeds: Sequence[Speed | None] = [None] * len(both)
    if speed:
        speeds = compare_speed([one.model for one in both])
    scores = [
        _score(one, nll, windows, task, pace, prompt)
        for one, nll, task, pace in zip(
            both, (scored.nll, scored.baseline_nll), ran, speeds, strict=False
        )
    ]
    measured, pace = ran[0], speeds[0]
    return Evaluation(
        **scores[0].model_dump(),
        kl_to_baseline=None if scored.kl is None else float(scored.kl.mean()),
        kl_stderr=_stderr(scored.kl),
        baseline=scores[1] if theirs is not None else None,
        text_hash=windows.hash,
        text_note=windows.note,
        task_files={} if measured is None else measured.files,
        task_limit=limit,
        speed_tokens=pace and (pace.prompt_tokens, pace.new_tokens),
        prompt=prompt,
        device=_device_name(ours.model.device),
        dtype=str(ours.model.dtype).removeprefix("torch."),
        versions=_versions() | ({} if measured is None else measured.versions),
    )


def _score(
    loaded: "LoadedModel",
    nll: torch.Tensor | None,
    windows: Windows,
    task: TaskResults | None,
    speed: Speed | None,
    prompt: str | None,
) -> Score:
    """Gather one model's measurements."""
    assert nll is not None
    return Score(
        model=loaded.source.name,
        model_hash=loaded.source.hash,
        perplexity=PerplexityRecord.model_validate(perplexity_of(nll, windows)),
        tasks={} if task is None else task.scores,
        params=sum(one.numel() for one in loaded.model.parameters()),  # a tied one comes once
        bytes=_model_bytes(loaded),
        prefill_tokens_per_s=speed and speed.prefill_tokens_per_s,
        decode_tokens_per_s=speed and speed.decode_tokens_per_s,
        continuation=None if prompt is None else continue_greedily(loaded, prompt),
    )


def _model_bytes(loaded: "LoadedModel") -> int:
    """Return the bytes of a model's weight files, or of its tensors if it has none."""
    from gccompress.checkpoints import checkpoint_bytes

    if loaded.source.path is not None:
        return checkpoint_bytes(loaded.source.path)
    return sum(one.numel() * one.element_size() for one in loaded.model.parameters())


def _stderr(values: torch.Tensor | None) -> float | None:
    if values is None or len(values) < 2:
        return None
    return float(values.std()) / math.sqrt(len(values))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads, {platform.machine()})"


def _versions() -> dict[str, str]:
    packages = ("torch", "transformers")
    return {
        "gccompress": gccompress.__version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
    }


def _table_rows(found: Evaluation) -> list[tuple[str, str, str, str]]:
    """Return label, baseline, model and change of everything measured."""
    base = found.baseline

    def row(
        label: str, form: str, value: Callable[[Score], float | None]
    ) -> tuple[str, str, str, str]:
        ours, theirs = value(found), None if base is None else value(base)
        change = f"{100 * (ours / theirs - 1):+.1f}%" if ours is not None and theirs else ""
        cells = ["" if one is None else format(one, form) for one in (theirs, ours)]
        return label, cells[0], cells[1], change

    rows = [
        row("parameters", ",", lambda score: score.params),
        row("megabytes on disk", ",.1f", lambda score: score.bytes / 1e6),
        row("perplexity", ".3f", lambda score: score.perplexity.value),
    ]
    if found.kl_to_baseline is not None:
        rows.append(("KL to baseline, nats/token", "", f"{found.kl_to_baseline:.4f}", ""))
    for task, metrics in found.tasks.items():
        for metric in metrics:
            if metric == "samples" or "_stderr" in metric:
                continue
            value = partial(_metric, task=task, metric=metric)
            rows.append(row(f"{task} {metric}", ".4f", value))
    if found.prefill_tokens_per_s is not None:
        rows.append(row("prefill, tokens/s", ",.1f", lambda score: score.prefill_tokens_per_s))
        rows.append(row("decode, tokens/s", ",.1f", lambda score: score.decode_tokens_per_s))
    return rows


def _metric(score: Score, task: str, metric: str) -> float | None:
    return score.tasks.get(task, {}).get(metric)
