"""The card of a checkpoint: what hubs read in it, what people do, and results put in later."""

from pathlib import Path

import pytest
import yaml

from gccompress import verify
from gccompress.apply import apply_plan
from gccompress.card import Sizes, add_results, base_model, licence_of, model_card
from gccompress.errors import CheckpointError
from gccompress.evaluation import evaluate
from gccompress.models import ModelSource, open_model
from gccompress.plan import DropLayers
from gccompress.view import ModelView
from tests.test_apply import mixed_moves, plan_for
from tests.tiny import tiny_folder, tiny_model

TEXT = "The river rose in spring and the people of the valley moved their boats. " * 200


def front(card: str) -> dict[str, object]:
    """The front matter, as a hub reads it."""
    start, matter, _ = card.split("---\n", 2)
    assert start == ""
    found = yaml.safe_load(matter)
    assert isinstance(found, dict)
    return found


def test_apply_writes_a_card_with_licence_hash_and_sizes(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "secret place" / "dense", "llama")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Dense\n")
    loaded = open_model(folder, cache_dir=tmp_path)
    plan = plan_for(loaded, (DropLayers(layers=(1,)),))
    done = apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path))
    card = (tmp_path / "out" / "README.md").read_text()
    found = front(card)
    assert found["license"] == "apache-2.0" and found["library_name"] == "transformers"
    assert found["tags"] == ["gccompress", "compressed", "layer-pruning"]
    assert "base_model" not in found and "secret place" not in card
    assert loaded.source.hash in card and "layers dropped, of 4: 1" in card
    assert f"{done.params_before:,} before, {done.params_after:,} after" in card
    assert "trust_remote_code" not in card and "plain model of its family" in card
    (tmp_path / "out" / "README.md").write_text(f"{card}\nMy own words.\n")
    verify(tmp_path / "out")


def test_a_compressed_models_card_says_both_ways_in() -> None:
    loaded = open_model(tiny_model("llama", layers=5))
    plan = plan_for(loaded, mixed_moves(ModelView(loaded.model)))
    source = ModelSource("HuggingFaceTB/SmolLM2-135M", None, "sha256:0123", "abcdef")
    card = model_card(plan, source, Sizes(1000, 800, 3200), compressed=True)
    found = front(card)
    assert found["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    assert found["tags"][2:] == ["layer-pruning", "low-rank", "shared-bases", "width-pruning"]
    assert "license" not in found
    assert "# SmolLM2-135M, compressed to 80.0% of its parameters" in card
    assert "import gccompress" in card and "trust_remote_code=True" in card
    assert "shared input bases: 2 (k 1, q 1, v 1)" in card
    assert "matrices factored alone: 3 (q 1, down 1, up 1)" in card
    assert "MLPs narrowed: 1, to 64 neurons" in card


def test_an_alias_is_named_by_its_hub_id() -> None:
    for name in ("smollm2-135m", "SmolLM2-135M"):
        found = base_model(ModelSource(name, Path("/cache"), "sha256:0"))
        assert found is not None and found.startswith("HuggingFaceTB/SmolLM2-135M")
    assert base_model(ModelSource("my/folder", Path("my/folder"), "sha256:0")) is None


@pytest.mark.real
def test_the_licence_of_the_embedded_model_is_carried_over(tmp_path: Path) -> None:
    assert licence_of(ModelSource("smollm2-135m", tmp_path, "sha256:0")) == "apache-2.0"


@pytest.mark.parametrize(
    "text", ["", "# no front matter", "---\n: [\n---\n", "---\n- list\n---\n", "---\nlicense: 3\n"]
)
def test_a_base_card_that_names_no_licence(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert licence_of(ModelSource(str(tmp_path), tmp_path, "sha256:0")) is None


def test_results_are_put_in_and_replaced(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "dense", "llama")
    plan = plan_for(open_model(folder, cache_dir=tmp_path), (DropLayers(layers=(1,)),))
    apply_plan(plan, folder, tmp_path / "out", cache_dir=str(tmp_path))
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate(
        tmp_path / "out",
        baseline=folder,
        text=str(tmp_path / "text.txt"),
        tokens=256,
        seqlen=32,
        speed=False,
        cache_dir=str(tmp_path),
    )
    before = (tmp_path / "out" / "README.md").read_text()
    assert "Not measured yet" in before
    for _ in range(2):
        add_results(tmp_path / "out", found)
        card = (tmp_path / "out" / "README.md").read_text()
        assert card.count(f"| perplexity | {found.perplexity.value:.4g} |") == 1
        assert (
            "Not measured yet" not in card
            and f"{found.perplexity.tokens} tokens in windows of 32" in card
        )
        assert str(tmp_path) not in card
        for mark, side in (("<!-- results -->", 0), ("<!-- end of results -->", 1)):
            assert card.split(mark)[side] == before.split(mark)[side]
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match="no place for results"):
        add_results(tmp_path / "out", found)
