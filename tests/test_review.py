"""Plans edited by hand: numbers made again, faults named by line, plans shown and compared."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import gccompress
from gccompress.apply import apply_plan
from gccompress.calibration import calibrate, options_of_record
from gccompress.cli import main
from gccompress.errors import PlanError
from gccompress.linalg import Damping, Weighted
from gccompress.models import open_model
from gccompress.moments import Moments, weighted
from gccompress.plan import (
    AnyMove,
    Budget,
    DropLayers,
    LowRank,
    Plan,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_matrices,
    move_params,
    plan_params,
)
from gccompress.plan_file import cells, decoder_shape
from gccompress.roles import Role
from gccompress.view import ModelView, model_shape
from tests.tiny import tiny_folder

TOKENS = ("--calibration-tokens", "256", "--seqlen", "32", "--heldout-tokens", "128")
EVERY_KIND: tuple[AnyMove, ...] = (
    LowRank(role=Role.Q, layer=0, rank=8),
    ShareInput(roles=(Role.K,), layers=(0, 1), rank=12),
    ShareInput(roles=(Role.Q, Role.V), layers=(3,), rank=8),
    ShareOutput(roles=(Role.O,), layers=(0, 1, 3), rank=16),
    ResizeMlp(layer=1, width=40),
    DropLayers(layers=(2,)),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of four layers in a folder."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", "llama", layers=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the module's tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GCCOMPRESS_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def planned(model: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for keep 0.8, as the command line writes it."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    arguments = ["plan", "--model", model, "--keep", 0.8, "--multiple", 4, *TOKENS, "-o", path]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setenv("GCCOMPRESS_CACHE", str(cache))
        main([str(one) for one in arguments])
    assert not stop.value.code
    return path


@pytest.fixture
def plan(planned: Path) -> Plan:
    """The plan, also as plan.yaml in the test's own folder."""
    Path("plan.yaml").write_text(planned.read_text("utf-8"), "utf-8")
    return Plan.load("plan.yaml")


def succeed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must work and return what it printed on stdout."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    return captured.out


def succeed_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with --json; stdout must be exactly one object."""
    found = json.loads(succeed(capsys, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must be refused with exit 2 and one line; return the line."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2, captured.err
    assert captured.out == "" and "Traceback" not in captured.err
    [line] = [line for line in captured.err.splitlines() if line.startswith("gccompress: ")]
    return line


def with_moves(plan: Plan, moves: tuple[AnyMove, ...], path: str = "edited.yaml") -> Plan:
    """Write a plan with other moves and the old predictions, as an editor would leave it."""
    edited = plan.model_copy(update={"moves": moves})
    edited.save(path)
    return edited


def least_private(view: ModelView, moments: Moments, move: ShareInput, budget: int) -> float:
    """Return the least loss of two matrices factored alone, or left dense, in `budget`."""
    choices = []
    for role, layer in move_matrices(move):
        one = weighted(view, moments, role, layer, Damping())
        left, right = torch.linalg.cholesky(one.a), torch.linalg.cholesky(one.g)
        values = torch.linalg.svdvals(left.T @ one.weight @ right).square() / 2
        rows, cols = one.weight.shape
        ranks = [
            rank for rank in range(4, min(rows, cols), 4) if rank * (rows + cols) < rows * cols
        ]
        sizes = [(rank * (rows + cols), float(values[rank:].sum())) for rank in ranks]
        choices.append([*sizes, (rows * cols, 0.0)])
    pairs = [(a[0] + b[0], a[1] + b[1]) for a in choices[0] for b in choices[1]]
    return min(loss for size, loss in pairs if size <= budget)


def test_an_untouched_plan_holds(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("plan.yaml").read_bytes()
    found = succeed_json(capsys, "plan", "check", "plan.yaml")
    assert found["differs"] is False and found["probed"] is True and found["missed_budget"] is None
    assert not any(one["differs"] for one in found["moves"])
    assert found["found"]["ppl"] == pytest.approx(plan.prediction.ppl, rel=1e-4)
    lines = Path("plan.yaml").read_text().splitlines()
    for number, one in enumerate(found["moves"]):
        text = lines[one["line"] - 1]
        assert text.startswith("- {do: ") and f"saves: {plan.moves[number].saves}" in text
    shown = succeed(capsys, "plan", "check", "plan.yaml", "--no-probe")
    assert "numbers hold" in shown and "not measured" in shown and "differs" not in shown
    assert Path("plan.yaml").read_bytes() == before


def test_every_number_of_an_edited_plan_is_made_again(
    plan: Plan, model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = with_moves(plan, EVERY_KIND)
    found = succeed_json(capsys, "plan", "check", "edited.yaml", "-o", "true.yaml")
    assert found["differs"] and found["probed"] and all(one["differs"] for one in found["moves"])
    true = Plan.load("true.yaml")
    assert [type(one) for one in true.moves] == [type(one) for one in EVERY_KIND]
    numbers = {"loss", "saves", "gain"}
    bare = [one.model_dump(exclude=numbers) for one in true.moves]
    assert bare == [one.model_dump(exclude=numbers) for one in EVERY_KIND]

    # Sizes: those of the model that the plan gives.
    done = apply_plan("true.yaml", out="small", cache_dir=str(cache))
    assert true.prediction.params == done.params_after
    loaded = open_model(model)
    view = ModelView(loaded.model)
    shape = model_shape(view)
    decoder = plan_params(EVERY_KIND, shape)[0]
    assert true.prediction.params_kept == pytest.approx(decoder / shape.decoder_params())
    assert sum(one.saves for one in true.moves) == shape.decoder_params() - decoder

    # The second order: by singular values of the whitened weights, one above another.
    assert plan.calibration is not None
    calibrated = calibrate(loaded, view, options_of_record(plan.calibration), cache)
    for move in true.moves:
        assert move.loss is not None and move.loss > 0
        if isinstance(move, LowRank | ShareInput | ShareOutput):
            group = [
                weighted(view, calibrated.moments, role, layer, Damping())
                for role, layer in move_matrices(move)
            ]
            if isinstance(move, ShareOutput):
                group = [Weighted(one.weight.T, g=one.a, a=one.g) for one in group]
            shared = torch.linalg.cholesky(torch.stack([one.g for one in group]).mean(0))
            own = [torch.linalg.cholesky(one.a).T @ one.weight for one in group]
            values = torch.linalg.svdvals(torch.cat(own) @ shared)
            loss = float(values[move.rank :].square().sum() / 2)
            assert move.loss == pytest.approx(loss, rel=1e-3)
    shared = true.moves[1]
    assert isinstance(shared, ShareInput) and shared.gain is not None and shared.loss is not None
    private = least_private(view, calibrated.moments, shared, 12 * (48 + 32 + 32))
    assert shared.gain == pytest.approx(private - shared.loss, abs=1e-3 * private)
    influence = calibrated.moments.influence[2].drop_loss
    assert true.moves[-1].loss == pytest.approx(influence, rel=1e-3)
    total = sum(one.loss or 0.0 for one in true.moves)
    assert true.prediction.loss == pytest.approx(total, rel=1e-3)

    # The perplexity: that of the checkpoint, on the held-out windows.
    small, ids = open_model("small").model, calibrated.heldout.ids
    with torch.no_grad():
        nll = [small(input_ids=one[None], labels=one[None]).loss for one in ids]
    assert true.prediction.ppl == pytest.approx(math.exp(torch.stack(nll).mean()), rel=1e-4)
    assert true.prediction.measured
    assert any("made again by plan check" in note for note in true.notes)

    # Written, the numbers hold; the edited file is as it was.
    assert Plan.load("edited.yaml") == edited
    assert succeed_json(capsys, "plan", "check", "true.yaml")["differs"] is False


def test_write_puts_the_numbers_into_the_plan_and_nothing_else(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("plan.yaml").read_text()
    first = next(line for line in text.splitlines() if line.startswith("- {do"))
    Path("plan.yaml").write_text(text.replace(first + "\n", "", 1))
    shown = succeed(capsys, "plan", "check", "plan.yaml")
    assert "the plan says" in shown and "--write" in shown and "differs" in shown
    shown = succeed(capsys, "plan", "check", "plan.yaml", "--write")
    assert "Written to plan.yaml." in shown
    written = Plan.load("plan.yaml")
    assert [one.saves for one in written.moves] == [one.saves for one in plan.moves[1:]]
    left = plan.prediction.params + plan.moves[0].saves
    assert written.prediction.params == left and written.model == plan.model
    assert [path.name for path in Path().iterdir()] == ["plan.yaml"]
    assert "numbers hold" in succeed(capsys, "plan", "check", "plan.yaml")
    assert "--write and --out" in fail(capsys, "plan", "check", "plan.yaml", "--write", "-o", "x")


def test_without_a_probe_what_differs_is_extrapolated(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    with_moves(plan, plan.moves[1:])
    found = succeed_json(capsys, "plan", "check", "edited.yaml", "--no-probe")
    assert not found["probed"] and not found["found"]["measured"]
    assert found["found"]["dense_ppl"] == plan.prediction.dense_ppl
    assert found["found"]["dense_ppl"] < found["found"]["ppl"] < found["found"]["ppl_high"]
    untouched = succeed_json(capsys, "plan", "check", "plan.yaml", "--no-probe")
    assert untouched["found"]["ppl"] == plan.prediction.ppl and untouched["found"]["measured"]


def test_a_missed_budget_is_said(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "check", "edited.yaml", "--no-probe")
    for budget, message in (
        (Budget(keep=0.8), "over the budget of 0.8"),
        (Budget(max_size=100_000), "over the budget of 100000"),
        (Budget(max_loss=1e-5), "over the budget of 1e-05"),
        (Budget(speedup=50.0), "short of the budget of 50"),
    ):
        with_moves(plan.model_copy(update={"budget": budget}), plan.moves[:1])
        assert message in succeed(capsys, *arguments)
    with_moves(plan.model_copy(update={"budget": Budget(max_loss=9.0)}), plan.moves[:1])
    assert "budget of" not in succeed(capsys, *arguments)


def test_lost_moments_are_made_again(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    found = succeed_json(capsys, "plan", "check", "plan.yaml", "--cache-dir", empty)
    assert found["differs"] is False and list(empty.rglob("*.safetensors"))


def test_text_that_has_changed_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text("The river rose in spring and the people moved their boats. " * 99)
    text = ("--calibration", "text.txt", *TOKENS)
    succeed(capsys, "plan", "--model", model, "--keep", 0.9, "--multiple", 4, *text)
    Path("text.txt").write_text("Nobody had counted how many stones there were in the water. " * 99)
    assert "text.txt' now gives" in fail(capsys, "plan", "check", "plan.yaml")
    succeed(capsys, "plan", "check", "plan.yaml", "--no-probe")  # its moments are in the cache
    empty = ("--cache-dir", tmp_path / "empty")
    assert "now gives" in fail(capsys, "plan", "check", "plan.yaml", "--no-probe", *empty)


def test_another_model(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny_folder(tmp_path / "other", "llama", layers=4, seed=1)
    arguments = ("plan", "check", "plan.yaml", "--model", other)
    assert "--allow-other-model" in fail(capsys, *arguments)
    found = succeed_json(capsys, *arguments, "--allow-other-model", "-o", "other.yaml")
    assert found["differs"]
    unknown = succeed_json(capsys, *arguments, "--allow-other-model", "--no-probe")["found"]
    assert unknown["ppl"] is None and unknown["dense_ppl"] is None and not unknown["measured"]
    succeed(capsys, "apply", "other.yaml", "-o", "out")
    moved = Plan.load("other.yaml")
    assert moved.model.name == str(other) and moved.model.hash != plan.model.hash
    assert succeed_json(capsys, "plan", "check", "other.yaml")["differs"] is False


LAST = "- {do: low_rank, role: q, layer: 0, rank: 8}\n"


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("- {do: low_rank, role: x, layer: 1, rank: 8}", "role"),
        ("- {do: low_rank, role: q, layer: 1, rank: 8, rnk: 8}", "unknown key"),
        ("- {do: low_rank, role: q, layer: 1}", "rank: Field required"),
        ("- {do: low_rank, role: q, layer: 1, rank: many}", "rank"),
        ("- {do: magic}", "moves.1"),
        ("- {do: low_rank, role: q, layer: 4, rank: 8}", "layer 4 is not in 0..3"),
        ("- {do: low_rank, role: q, layer: 0, rank: 8}", "already in moves[0]"),
        ("- {do: low_rank, role: q, layer: 1, rank: 49}", "rank 49 exceeds 48"),
        ("- {do: low_rank, role: q, layer: 1, rank: 28}", "dense takes 3072"),
        ("- do: low_rank\n  role: q\n  layer: 1\n  rank: 28", "dense takes 3072"),
        ("- {do: share_input, roles: [k], layers: [1, 1], rank: 8}", "a layer is named twice"),
        ("- {do: share_input, roles: [q, o], layers: [1], rank: 8}", "same input"),
        ("- {do: share_output, roles: [q, k], layers: [1], rank: 8}", "same output"),
        ("- {do: share_output, roles: [down], layers: [1, 2], rank: 48}", "dense takes"),
        ("- {do: resize_mlp, layer: 1, width: 96}", "width 96 is not below 96"),
        ("- {do: drop_layers, layers: [1, 1]}", "a layer is dropped twice"),
        ("- {do: drop_layers, layers: [0, 1, 2, 3]}", "drops all 4 layers"),
        ("- {do: drop_layers, layers: [0, 1", "not YAML"),
        ("- {do: low_rank, role: q, layer: 1, rank: 8, rank: 12}", "'rank' is given twice"),
    ],
)
@pytest.mark.parametrize("command", ["check", "show", "diff", "apply"])
def test_an_invalid_move_is_named_by_its_line(
    command: str, added: str, message: str, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan.model_copy(update={"moves": ()}).to_yaml().replace("moves: []\n", "moves:\n")
    Path("bad.yaml").write_text(f"{text}# mine\n{LAST}\n{added}\n")
    wanted = len(text.splitlines()) + 4
    if message == "not YAML":
        wanted += 1  # where it ends without the bracket
    arguments = {
        "apply": ("apply", "bad.yaml", "-o", "out"),
        "diff": ("plan", "diff", "bad.yaml", "plan.yaml"),
    }.get(command, ("plan", command, "bad.yaml"))
    before = {path: path.read_bytes() for path in Path().iterdir()}
    line = fail(capsys, *arguments)
    assert line.startswith(f"gccompress: bad.yaml: line {wanted}: ") and message in line
    assert {path: path.read_bytes() for path in Path().iterdir()} == before


def test_sizes_that_the_file_lies_about_are_still_refused(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.model.matrices is not None
    lies = {**plan.model.matrices, Role.Q: (640, 480)}
    lying = plan.model_copy(update={"model": plan.model.model_copy(update={"matrices": lies})})
    with_moves(lying, (LowRank(role=Role.Q, layer=1, rank=64),))
    assert "rank 64 exceeds 48" in fail(capsys, "plan", "check", "edited.yaml")


def test_a_plan_from_weights_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--model", model, "--keep", 0.7, "--multiple", 4, "--no-calibration")
    succeed(capsys, *arguments)
    found = succeed_json(capsys, "plan", "check", "plan.yaml")
    assert not found["differs"] and not found["probed"] and found["found"]["energy_lost"] > 0
    plan = Plan.load("plan.yaml")
    with_moves(plan, plan.moves[1:])
    less = succeed_json(capsys, "plan", "check", "edited.yaml", "--write")
    assert less["differs"] and less["found"]["energy_lost"] < found["found"]["energy_lost"]
    assert succeed_json(capsys, "plan", "check", "edited.yaml")["differs"] is False
    with_moves(plan, (DropLayers(layers=(1,)),))
    line = fail(capsys, "plan", "check", "edited.yaml")
    assert "edited.yaml: line " in line and "not seen in weights" in line


def test_cells_hold_what_the_moves_make_of_each_matrix(plan: Plan) -> None:
    edited = with_moves(plan, EVERY_KIND)
    found, shape = cells(edited), decoder_shape(edited)
    assert shape is not None and len(found) == 4 * 7
    for number, move in enumerate(EVERY_KIND):
        if isinstance(move, DropLayers):
            continue
        sizes = [shape.matrices[role] for role, _ in move_matrices(move)]
        share = move_params(move, shape) / sum(rows * cols for rows, cols in sizes)
        for matrix in move_matrices(move):
            assert found[matrix].move == number and found[matrix].do == move.do
            assert found[matrix].share == pytest.approx(share)
    assert {found[role, 2].text for role in Role} == {"dropped"}
    assert found[Role.V, 0].text == "dense" and found[Role.V, 0].share == 1.0
    assert found[Role.K, 0].group == ((Role.K, 0), (Role.K, 1)) == found[Role.K, 1].group
    assert found[Role.Q, 0].group == ()
    # What a layer keeps, summed over its matrices, is what the plan's arithmetic says.
    whole = {role: rows * cols for role, (rows, cols) in shape.matrices.items()}
    total = sum((cell.share or 0.0) * whole[role] for (role, _), cell in found.items())
    assert total == pytest.approx(plan_params(EVERY_KIND, shape)[0])


def test_show(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with_moves(plan, EVERY_KIND)
    lines = succeed(capsys, "plan", "show", "edited.yaml").splitlines()
    rows = [line.split("  ") for line in lines if line.strip()[:1].isdigit()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[0] == ["0", "rank 8", "in 12 a", ".", "out 16 c", ".", ".", "."]
    assert rows[1] == ["1", ".", "in 12 a", ".", "out 16 c", *["width 40"] * 3]
    assert rows[2] == ["2", *["dropped"] * 7]
    assert rows[3] == ["3", "in 8 b", ".", "in 8 b", "out 16 c", ".", ".", "."]
    for line in plan.findings:
        assert f"{line}." in lines
    found = succeed_json(capsys, "plan", "show", "edited.yaml")
    assert found["findings"] == list(plan.findings)
    assert found["model"] == plan.model.name and len(found["matrices"]) == 28
    assert [one["role"] for one in found["matrices"][:7]] == [role.value for role in Role]
    assert found["matrices"][1] == {
        "layer": 0, "role": "k", "do": "share_input", "size": 12, "move": 1, "group": "a",
        "share": 12 * (48 + 32 + 32) / (2 * 32 * 48),
    }  # fmt: skip


def test_the_figure(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with_moves(plan, EVERY_KIND)
    shown = succeed(capsys, "plan", "show", "edited.yaml", "--figure", "deep/plan.png")
    assert "Figure written to deep/plan.png" in shown
    assert Path("deep/plan.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path("deep").iterdir()] == ["plan.png"]
    succeed(capsys, "plan", "show", "edited.yaml", "--figure", "plan.SVG")
    assert "<svg" in Path("plan.SVG").read_text()
    assert ".png" in fail(capsys, "plan", "show", "edited.yaml", "--figure", "plan.doc")

    figure = gccompress.plan_figure(Plan.load("edited.yaml"))
    axes = figure.axes[0]
    frames = [one for one in axes.patches if one.get_linewidth() == 2.0]
    # K of 0 and 1; Q and V of 3, apart; O of 0 and 1, and of 3.
    assert len(frames) == 1 + 2 + 2
    assert {round(one.get_width()) for one in frames} == {1, 2}
    hatched = [one for one in axes.patches if one.get_hatch()]
    assert len(hatched) == 7 + 3
    sizes = [text.get_text() for text in axes.texts]
    assert sorted(sizes) == sorted(["8", *["12"] * 2, *["8"] * 2, *["16"] * 3, *["40"] * 3])


def test_a_plan_without_shapes_is_shown_and_repaired(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = plan.model_copy(update={"model": plan.model.model_copy(update={"matrices": None})})
    with_moves(bare, plan.moves)
    assert "width" in succeed(capsys, "plan", "show", "edited.yaml")
    line = fail(capsys, "plan", "show", "edited.yaml", "--figure", "plan.png")
    assert "plan check" in line and not Path("plan.png").exists()
    assert not succeed_json(capsys, "plan", "check", "edited.yaml", "--no-probe", "--write")[
        "differs"
    ]
    succeed(capsys, "plan", "show", "edited.yaml", "--figure", "plan.png")


def test_diff(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    with_moves(plan, EVERY_KIND, "a.yaml")
    other = (
        LowRank(role=Role.Q, layer=0, rank=12, loss=0.5),
        LowRank(role=Role.K, layer=0, rank=12, saves=7),
        *EVERY_KIND[2:5],
    )
    with_moves(plan, other, "b.yaml")
    found = succeed_json(capsys, "plan", "diff", "a.yaml", "b.yaml")
    assert found["same_model"] and not found["same_moves"]
    changed = [(one["layer"], one["role"]) for one in found["matrices"]]
    assert changed == [(0, "q"), (0, "k"), (1, "k"), *[(2, role.value) for role in Role]]
    assert found["matrices"][0]["before"] == {"do": "low_rank", "size": 8, "layers": None,
                                              "loss": None}  # fmt: skip
    assert found["matrices"][0]["after"]["loss"] == 0.5
    assert found["matrices"][1]["before"]["layers"] == [0, 1]
    shown = succeed(capsys, "plan", "diff", "a.yaml", "b.yaml")
    assert "in 12, k of 0 to 1" in shown and "q, k, v, o, gate, up, down" in shown

    # Other losses of the same moves are no other moves.
    with_moves(plan, tuple(one.model_copy(update={"loss": 1.0}) for one in EVERY_KIND), "c.yaml")
    assert succeed_json(capsys, "plan", "diff", "a.yaml", "c.yaml")["matrices"] == []
    assert "The moves are the same." in succeed(capsys, "plan", "diff", "a.yaml", "c.yaml")
    same = gccompress.diff_plans("a.yaml", plan.model_copy(update={"moves": EVERY_KIND}))
    assert not same.changes


def test_plans_of_other_models_are_compared_where_both_have_a_matrix(
    plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tiny_folder(tmp_path / "gpt2", "gpt2", layers=3)
    arguments = ("plan", "--model", other, "--keep", 0.8, "--multiple", 4, *TOKENS)
    succeed(capsys, *arguments, "-o", "gpt2.yaml")
    assert succeed_json(capsys, "plan", "check", "gpt2.yaml")["differs"] is False
    assert "gate" not in succeed(capsys, "plan", "show", "gpt2.yaml", "--figure", "gpt2.png")
    found = succeed_json(capsys, "plan", "diff", "plan.yaml", "gpt2.yaml")
    assert not found["same_model"]
    missing = [one for one in found["matrices"] if one["after"]["do"] == "absent"]
    assert {(one["layer"], one["role"]) for one in missing} == {
        *((layer, "gate") for layer in range(3)), *((3, role.value) for role in Role)
    }  # fmt: skip


def test_the_same_from_python(plan: Plan) -> None:
    review = gccompress.check_plan(plan, probe=False)
    assert not review.differs and review.file.lines == ()
    with pytest.raises(PlanError, match=r"moves\[0\] \(low_rank\): layer 1 q: rank 49 exceeds 48"):
        gccompress.check_plan(
            plan.model_copy(update={"moves": (LowRank(role=Role.Q, layer=1, rank=49),)})
        )
    assert gccompress.show_plan(plan).cells == gccompress.show_plan("plan.yaml").cells


@pytest.mark.parametrize("command", ["check", "diff", "show"])
def test_help_teaches_with_an_example_that_parses(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from gccompress.cli_plan import app

    assert "Example:" in succeed(capsys, "plan", command, "--help")
    assert command in succeed(capsys, "plan", "--help")
    group = typer.main.get_command(app)
    with group.make_context("plan", [command]) as context:
        sub = group.get_command(context, command)  # type: ignore[attr-defined]
        example = shlex.split(sub.help.rpartition("Example: ")[2].strip())
        assert example[:3] == ["gccompress", "plan", command]
        sub.make_context(command, example[3:]).close()


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--keep", "0.8", "check", "plan.yaml"),
        ("plan", "--model", "tiny", "show", "plan.yaml"),
        ("plan", "--json", "show", "plan.yaml"),
        ("plan", "magic"),
        ("plan", "diff", "plan.yaml"),
        ("plan", "check"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == "" and "Traceback" not in captured.err
    if arguments[1].startswith("-"):
        assert f"{arguments[1]} before '" in captured.err
