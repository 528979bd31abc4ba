"""The main path on one page: analyse, plan, apply, evaluate; each stage's output is a file.

A stage whose file is there, and was made from the same inputs, is not done again.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.errors import CheckpointError, GccompressError
from gccompress.files import write_text
from gccompress.recipe import Recipe

if TYPE_CHECKING:
    from gccompress.evaluation import Evaluation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """One stage of a run: its name, its output, and whether it was found done."""

    name: str
    output: Path
    reused: bool


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its stages, and what the result scores."""

    folder: Path
    stages: tuple[Stage, ...]
    evaluation: "Evaluation"

    @property
    def checkpoint(self) -> Path:
        """The compressed model's folder."""
        return self.folder / "checkpoint"

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress run --json` prints."""
        return {
            "run": str(self.folder),
            "stages": [
                {"name": one.name, "output": str(one.output), "reused": one.reused}
                for one in self.stages
            ],
            "evaluation": json.loads(self.evaluation.to_json()),
        }


def run(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    device: str = "auto",
    cache_dir: str | None = None,
) -> Run:
    """Run a recipe into the folder `out`, going on where an earlier run of it stopped.

    Leaves `recipe.yaml`, `continuity/`, `plan.yaml`, `checkpoint/` and `evaluation.json` there.

    Raises:
        GccompressError: from any stage; finished stages stay.
    """
    from gccompress.apply import apply_plan
    from gccompress.card import add_results
    from gccompress.evaluation import Evaluation, evaluate
    from gccompress.models import open_model
    from gccompress.plan import Plan
    from gccompress.planner import choose, continuity_of, options_of
    from gccompress.polish import PolishOptions

    recipe = recipe if isinstance(recipe, Recipe) else Recipe.load(recipe)
    folder = Path(out)
    options, calibration = options_of(recipe)
    record = _Record(folder, recipe)
    dense = open_model(
        recipe.model,
        device=device,
        dtype=recipe.dtype,
        revision=recipe.revision,
        cache_dir=cache_dir,
    )
    record.begin()
    sources: list[Any] = [dense.source.hash, recipe.dtype]

    continuity = folder / "continuity"
    record.stage(
        "analyze", continuity, sources, lambda: continuity_of(dense, cache_dir).save(continuity)
    )

    plan_path = folder / "plan.yaml"
    sources += [recipe.budget, recipe.calibration, recipe.plan]
    record.stage(
        "plan",
        plan_path,
        sources,
        lambda: choose(
            dense, recipe.budget, options=options, calibration=calibration, cache_dir=cache_dir
        ).plan.save(plan_path),
    )
    plan = Plan.load(plan_path)

    checkpoint = folder / "checkpoint"
    sources = [plan.to_yaml(), recipe.apply]
    polish = None
    if recipe.apply.polish:
        polish = PolishOptions(steps=recipe.apply.polish, rate=recipe.apply.polish_rate)
    record.stage(
        "apply",
        checkpoint,
        sources,
        lambda: apply_plan(
            plan,
            None,  # by the name and the revision that the plan records
            checkpoint,
            polish=polish,
            device=device,
            dtype=recipe.dtype,
            cache_dir=cache_dir,
        ),
    )

    score = folder / "evaluation.json"
    wanted = recipe.evaluate
    sources += [wanted]
    record.stage(
        "evaluate",
        score,
        sources,
        lambda: write_text(
            score,
            evaluate(
                checkpoint,
                baseline=dense if wanted.baseline else None,
                text=wanted.text,
                tokens=wanted.tokens,
                seqlen=wanted.seqlen,
                tasks=wanted.tasks,
                task_data=wanted.task_data,
                limit=wanted.limit,
                speed=wanted.speed,
                prompt=wanted.prompt,
                device=device,
                cache_dir=cache_dir,
            ).to_json(),
        ),
    )
    evaluation = Evaluation.from_json(score.read_text("utf-8"))
    try:
        add_results(checkpoint, evaluation)
    except CheckpointError as error:  # a card of the user's own
        logger.warning("%s; the results are in %s only", error, score)
    return Run(folder, tuple(record.stages), evaluation)


class _Record:
    """What the stages of a run folder were made from, in `stages.json`."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        """Open a run folder; refuse one that holds anything else."""
        self.path = folder / "stages.json"
        self.stages: list[Stage] = []
        self.done: dict[str, str] = {}
        if self.path.exists():
            try:
                self.done = dict(json.loads(self.path.read_text("utf-8")))
            except (OSError, TypeError, ValueError) as error:
                raise GccompressError(
                    f"{self.path}: damaged ({error}); delete it to run every stage again"
                ) from error
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise GccompressError(
                f"{folder} exists and is not a run of a recipe; name a new or empty folder"
            )
        self.recipe = recipe

    def begin(self) -> None:
        """Write what the folder is a run of; until then nothing is there."""
        write_text(self.path.with_name("recipe.yaml"), self.recipe.to_yaml())
        self._save()

    def stage(
        self, name: str, output: Path, sources: list[Any], make: Callable[[], object]
    ) -> None:
        """Make a stage's output unless it is there and was made from the same sources."""
        text = repr([source if isinstance(source, str) else repr(source) for source in sources])
        key = hashlib.sha256(text.encode()).hexdigest()
        reused = output.exists() and self.done.get(name) == key
        if not reused:
            logger.info("stage %s", name)
            _remove(output)
            make()
            self.done[name] = key
            self._save()
        self.stages.append(Stage(name, output, reused))

    def _save(self) -> None:
        write_text(self.path, json.dumps(self.done, indent=1))


def _remove(output: Path) -> None:
    """Remove what an older recipe, or an interrupted stage, left in the place of an output."""
    import shutil

    if output.is_dir():
        shutil.rmtree(output)
    else:
        output.unlink(missing_ok=True)
