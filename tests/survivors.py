"""Compressed tiny models made by a plan with every kind of move, as their users get them."""

from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from gccompress.apply import compress, write_checkpoint
from gccompress.models import open_model
from gccompress.plan import Plan, plan_params
from gccompress.view import ModelView, model_shape
from tests.test_apply import DAMPING, mixed_moves, moments_of, plan_for
from tests.tiny import tiny_model, tiny_tokenizer


@cache
def write_survivor(family: str, root: Path) -> tuple[Path, Plan]:
    """Compress a model by shared bases of both sides, low rank, width and a dropped layer."""
    loaded = open_model(tiny_model(family, layers=5))
    view = ModelView(loaded.model)
    moves = mixed_moves(view)
    plan = plan_for(loaded, moves)
    assert plan.options["damping_a"] == DAMPING.a
    assert plan_params(moves, model_shape(view))[1] == plan.prediction.params
    compressed, _ = compress(view, moments_of(view, root / f"{family}-moments"), plan)
    write_checkpoint(compressed, tiny_tokenizer(), root / family, {}, {"plan.yaml": plan.to_yaml()})
    return root / family, plan


def load(folder: Path, **options: Any) -> PreTrainedModel:
    """Load as users do, by the auto class."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model
