"""Recipes: the shipped ones parse, and a typo is named with the key that was meant."""

from importlib import resources
from pathlib import Path

import pytest

from gccompress.errors import GccompressError
from gccompress.recipe import Recipe

FOLDER = Path(__file__).resolve().parents[1] / "recipes"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_parse_and_are_short(path: Path) -> None:
    recipe = Recipe.load(path)
    assert Recipe.parse(recipe.to_yaml()) == recipe
    assert len(path.read_text().splitlines()) <= 25


def test_the_packaged_demo_is_the_recipe_in_the_folder() -> None:
    packaged = resources.files("gccompress") / "recipes" / "demo.yaml"
    shown = FOLDER / "smollm2-135m-demo.yaml"
    assert packaged.read_text(encoding="utf-8") == shown.read_text(encoding="utf-8")
    assert Recipe.load("demo") == Recipe.load(shown)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: x\nbudget: {keep: 0.8}\nplan: {stratgy: auto}",
            "line 3: .*did you mean 'strategy'",
        ),
        ("model: x\nbudget: {keep: 0.8, kepp: 1}", "line 2: .*did you mean 'keep'"),
        ("model: x\nbudget: {keep: 2}", "budget.keep"),
        ("model: x", "budget"),
        ("model: x\nbudget: {keep: 0.8}\nplan: {strategy: magic}", "plan.strategy"),
        ("model: x\nbudget: {keep: 0.8}\nzzz: 1", "line 3: .*known: model"),
        ("model: x\nbudget: {keep: 0.8", "line 2: not YAML"),
        ("model: x\nbudget: {keep: 0.8}\nmodel: y", "line 3: .*'model' is given twice"),
    ],
)
def test_faults_are_one_line(text: str, message: str) -> None:
    with pytest.raises(GccompressError, match=message) as caught:
        Recipe.parse(text, "my.yaml")
    assert str(caught.value).startswith("my.yaml: ") and "\n" not in str(caught.value)
