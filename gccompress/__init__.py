"""Make language models smaller by the structure their layers share, and check what it cost.

The public API, each name imported when it is first used; importing the package registers the
checkpoint classes with transformers once that is imported, and costs neither it nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gccompress.errors import GccompressError
from gccompress.registration import register_when_needed

if TYPE_CHECKING:
    from gccompress.apply import Applied, apply_plan
    from gccompress.calibration import CalibrationOptions
    from gccompress.continuity import ContinuityReport, analyze
    from gccompress.evaluation import Evaluation, evaluate
    from gccompress.models import load_model, open_model
    from gccompress.pipeline import Run, run
    from gccompress.plan import Plan
    from gccompress.planner import Choice, Curve, PlanOptions, choose, make_plan, sweep
    from gccompress.planner.review import Review, check_plan
    from gccompress.recipe import Recipe
    from gccompress.report.plan_figure import plan_figure
    from gccompress.report.plan_overview import PlanDiff, PlanOverview, diff_plans, show_plan
    from gccompress.verification import verify

__version__ = "0.1.0"

_HOMES = {
    "Applied": "apply",
    "CalibrationOptions": "calibration",
    "Choice": "planner",
    "ContinuityReport": "continuity",
    "Curve": "planner",
    "Evaluation": "evaluation",
    "Plan": "plan",
    "PlanDiff": "report.plan_overview",
    "PlanOptions": "planner",
    "PlanOverview": "report.plan_overview",
    "Recipe": "recipe",
    "Review": "planner.review",
    "Run": "pipeline",
    "analyze": "continuity",
    "apply_plan": "apply",
    "check_plan": "planner.review",
    "choose": "planner",
    "diff_plans": "report.plan_overview",
    "evaluate": "evaluation",
    "load_model": "models",
    "make_plan": "planner",
    "open_model": "models",
    "plan_figure": "report.plan_figure",
    "run": "pipeline",
    "show_plan": "report.plan_overview",
    "sweep": "planner",
    "verify": "verification",
}

__all__ = [
    "Applied",
    "CalibrationOptions",
    "Choice",
    "ContinuityReport",
    "Curve",
    "Evaluation",
    "GccompressError",
    "Plan",
    "PlanDiff",
    "PlanOptions",
    "PlanOverview",
    "Recipe",
    "Review",
    "Run",
    "analyze",
    "apply_plan",
    "check_plan",
    "choose",
    "diff_plans",
    "evaluate",
    "load_model",
    "make_plan",
    "open_model",
    "plan_figure",
    "run",
    "show_plan",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


register_when_needed()
