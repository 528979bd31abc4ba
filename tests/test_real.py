"""The whole path on real weights and real text: SmolLM2-135M, WikiText-2."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gccompress
from gccompress.plan import Plan

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.timeout(1500)
def test_a_recipe_on_smollm2_gives_a_checked_smaller_model_that_still_speaks(
    data_folder: Path, tmp_path: Path
) -> None:
    text = data_folder / "protocol" / "calibration.txt.xz"
    recipe = gccompress.Recipe.parse(
        f"model: smollm2-135m\n"
        f"budget: {{keep: 0.9}}\n"
        f"calibration: {{source: {text}, tokens: 3072, heldout_tokens: 1024, fisher: data+0}}\n"
        f"plan: {{strategy: ranks, spaces: paper, longest: 2}}\n"
        f"evaluate:\n"
        f"  text: {data_folder / 'protocol' / 'test.txt.xz'}\n"
        f"  tokens: 2048\n"
        f"  speed: false\n"
        f"  prompt: The capital of France is\n"
    )
    done = gccompress.run(recipe, tmp_path / "run")
    score = done.evaluation
    assert score.baseline is not None and score.kl_to_baseline is not None
    plan = Plan.load(tmp_path / "run" / "plan.yaml")
    assert 0.89 < plan.prediction.params_kept <= 0.9
    assert score.params == plan.prediction.params
    assert score.bytes < 0.93 * score.baseline.bytes
    # Held-out: a wrong moment, space or transpose multiplies these; see benchmarks/results.
    assert score.perplexity.value < 1.35 * score.baseline.perplexity.value
    assert score.kl_to_baseline < 0.25
    assert plan.prediction.ppl is not None and plan.prediction.dense_ppl is not None
    assert plan.prediction.ppl / plan.prediction.dense_ppl < 1.35
    assert "Paris" in score.continuations["model"]

    record = json.loads((done.checkpoint / "gccompress.json").read_text())
    assert record["reload_max_abs_diff"] < 1e-3
    model = AutoModelForCausalLM.from_pretrained(done.checkpoint)
    ids = torch.arange(100, 140)[None]
    cached = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(
        cached, model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
    )
