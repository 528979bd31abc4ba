"""A recipe: everything one run does, from one YAML file of a few lines. Unknown keys are errors."""

import difflib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gccompress.errors import GccompressError
from gccompress.plan import LARGEST_SEED, Budget
from gccompress.yaml_files import line_of, load_yaml, read_yaml_text

LARGEST_RECIPE_FILE = 1_000_000  # bytes


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CalibrationSection(_Section):
    """What text the moments come from; see `calibration.CalibrationOptions`."""

    source: str = "self"
    tokens: int = Field(default=16384, ge=1)
    seqlen: int = Field(default=512, ge=2)
    heldout_tokens: int = Field(default=4096, ge=0)
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    fisher: str = "data+1"
    spread: bool = True


class PlanSection(_Section):
    """How plans are searched; see `planner.PlanOptions`."""

    strategy: Literal["auto", "ranks", "width", "plain", "share", "lowrank", "prune"] = "auto"
    spaces: Literal["measured", "paper", "any"] = "measured"
    longest: int = Field(default=3, ge=1)
    group: int = Field(default=2, ge=2)
    multiple: int = Field(default=32, ge=1)
    damping_a: float = Field(default=0.03, ge=0, lt=1)
    damping_g: float = Field(default=0.003, ge=0, lt=1)
    probe: Literal["chosen", "all", "none"] = "chosen"


class ApplySection(_Section):
    """How the plan is carried out; see `polish.PolishOptions`."""

    polish: int = Field(default=0, ge=0)
    polish_rate: float = Field(default=1e-4, gt=0)


class EvaluateSection(_Section):
    """What is measured afterwards; see `evaluate.evaluate`."""

    text: str | None = None
    tokens: int = Field(default=8192, ge=1)
    seqlen: int = Field(default=512, ge=2)
    baseline: bool = True
    speed: bool = True
    tasks: tuple[str, ...] = ()
    task_data: str | None = None
    limit: int | None = Field(default=None, ge=1)
    prompt: str | None = None


class Recipe(_Section):
    """One run: model, budget, calibration, plan, how it is applied, evaluation."""

    model: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    budget: Budget
    calibration: CalibrationSection = CalibrationSection()
    plan: PlanSection = PlanSection()
    apply: ApplySection = ApplySection()
    evaluate: EvaluateSection = EvaluateSection()

    def to_yaml(self) -> str:
        """Return the recipe with every default written out."""
        text: str = yaml.safe_dump(
            self.model_dump(mode="json"), sort_keys=False, allow_unicode=True
        )
        return text

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        """Read a recipe file, or a packaged one by name (such as `demo`).

        Raises:
            GccompressError: not there, not YAML, an unknown key (the nearest known one is named),
                or a value out of range.
        """
        path = Path(path)
        packaged = resources.files("gccompress") / "recipes" / f"{path}.yaml"
        if not path.exists() and path.parent == Path() and packaged.is_file():
            return cls.parse(packaged.read_text(encoding="utf-8"), str(path))
        names = sorted(
            file.name.removesuffix(".yaml")
            for file in (resources.files("gccompress") / "recipes").iterdir()
        )
        text = read_yaml_text(
            path,
            kind="recipe",
            largest=LARGEST_RECIPE_FILE,
            hint="a few lines of YAML",
            missing=f"name a YAML file or one of {', '.join(names)}",
        )
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, name: str = "recipe") -> "Recipe":
        """Read a recipe from YAML text; errors name `name`. Raises `GccompressError`."""
        data = load_yaml(text, name)
        if not isinstance(data, dict):
            raise GccompressError(f"{name}: not a recipe; wanted at least 'model:' and 'budget:'")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            place, fault = _first_error(error)
            raise GccompressError(f"{name}: line {line_of(text, place)}: {fault}") from error


def _first_error(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """Return the place and words of the first fault, an unknown key before any other."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        fault = f"{where}: {first['msg']} (found {str(first.get('input'))[:60]!r})"
        return first["loc"], fault
    section: Any = Recipe
    for part in first["loc"][:-1]:
        section = section.model_fields[str(part)].annotation
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return first["loc"], f"unknown key {where!r}; {hint}"
