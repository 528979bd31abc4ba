"""The planner: candidates, one price for all of them, and the choice. `choose` is the main path."""

from gccompress.linalg import Damping
from gccompress.planner.candidates import Candidate, Choice
from gccompress.planner.choice import (
    STRATEGIES,
    PlanOptions,
    budget_of,
    choose,
    continuity_of,
    make_plan,
    options_of,
)
from gccompress.planner.curve import Curve, keeps_of, sweep

__all__ = [
    "STRATEGIES",
    "Candidate",
    "Choice",
    "Curve",
    "Damping",
    "PlanOptions",
    "budget_of",
    "choose",
    "continuity_of",
    "keeps_of",
    "make_plan",
    "options_of",
    "sweep",
]
