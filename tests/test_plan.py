"""The plan file: round trips, and one clear line for everything that is not a plan."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccompress.errors import PlanError
from gccompress.plan import (
    AnyMove,
    Budget,
    Calibration,
    DropLayers,
    LowRank,
    Plan,
    PlannedModel,
    Prediction,
    ShareInput,
    ShareOutput,
    move_params,
    plan_params,
)
from gccompress.roles import Role
from gccompress.sizes import ModelShape

SHAPE = ModelShape(
    layers=6,
    matrices={
        Role.Q: (64, 48),
        Role.K: (32, 48),
        Role.V: (32, 48),
        Role.O: (48, 64),
        Role.GATE: (96, 48),
        Role.UP: (96, 48),
        Role.DOWN: (48, 96),
    },
    layer_params=23136,
    total_params=170000,
    head_params=15360,
    biases_per_neuron=0,
    bytes_per_param=4,
)


def plan(*moves: AnyMove) -> Plan:
    """Return a plan with the given moves for a model of six layers."""
    return Plan(
        strategy="auto",
        budget=Budget(keep=0.8),
        model=PlannedModel(
            name="tiny",
            hash="sha256:0",
            model_type="llama",
            layers=6,
            decoder_params=1,
            total_params=1,
        ),
        calibration=Calibration(
            source="self",
            hash="sha256:1",
            tokens=64,
            seqlen=16,
            seed=0,
            fisher="data+1",
            heldout_tokens=0,
            dtype="float32",
        ),
        prediction=Prediction(params_kept=0.8, params=1, bytes=4),
        options={"multiple": 8, "damping_a": 0.03, "spaces": "measured"},
        moves=moves,
    )


layer = st.integers(0, 5)
moves = st.one_of(
    st.builds(DropLayers, layers=st.lists(layer, min_size=1, max_size=2, unique=True).map(tuple)),
    st.builds(
        LowRank,
        role=st.sampled_from(Role),
        layer=layer,
        rank=st.integers(1, 20),
        loss=st.none() | st.floats(0, 1).map(lambda x: float(f"{x:.4g}")),
        saves=st.integers(0, 10**9),
    ),
    st.builds(
        ShareInput, roles=st.just((Role.K,)), layers=st.just((0, 1)), rank=st.integers(1, 20)
    ),
    st.builds(
        ShareOutput, roles=st.just((Role.DOWN,)), layers=st.just((2, 3, 4)), rank=st.integers(1, 20)
    ),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(moves, max_size=8))
def test_yaml_round_trip(chosen: list[AnyMove]) -> None:
    before = plan(*chosen)
    try:
        after = Plan.parse(before.to_yaml())
    except PlanError:
        with pytest.raises(PlanError):
            before.check_moves()
        return
    assert after == before
    assert after.to_yaml() == before.to_yaml()


def test_file_round_trip_and_one_line_a_move(tmp_path: Path) -> None:
    before = plan(LowRank(role=Role.Q, layer=0, rank=8, loss=0.1, saves=5), DropLayers(layers=(2,)))
    before.save(tmp_path / "deep" / "plan.yaml")
    assert Plan.load(tmp_path / "deep" / "plan.yaml") == before
    lines = before.to_yaml().splitlines()
    assert "- {do: low_rank, role: q, layer: 0, rank: 8, saves: 5, loss: 0.1}" in lines
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rank: 8", "rnk: 8", "line LINE: unknown key 'moves.0.low_rank.rnk'"),
        ("rank: 8", "rank: 0", "line LINE: moves.0.low_rank.rank"),
        ("rank: 8", "rank: many", "moves.0.low_rank.rank"),
        ("layer: 0", "layer: 6", r"line LINE: moves\[0\] \(low_rank\): layer 6 is not in 0..5"),
        ("layer: 0", "layer: -1", "layer -1 is not in"),
        ("layer: 0", "layer: 2", "line LINE: .*layer 2 is dropped, yet its q is replaced"),
        ("role: q", "role: x", "moves.0.low_rank.role"),
        ("do: low_rank", "do: magic", "moves.0"),
        ("version: 1\n", "version: 2\n", "plan version 2"),
        ("version: 1\n", "", "plan version None"),
        ("keep: 0.8", "keep: 1.5", "budget.keep"),
        ("keep: 0.8", "keep: .nan", "budget.keep"),
        ("keep: 0.8", "keep: null", "exactly one of keep, max_size"),
        ("strategy: auto", "strategy: auto\nextra: 1", "line LINE: unknown key 'extra'"),
        (
            "strategy: auto",
            "strategy: auto\nstrategy: no",
            "line LINE: .*given twice",
        ),
        ("format: gccompress-plan", "format: other", "not a plan"),
        ("layers: [2]", "layers: [2, 2]", "line LINE: .*dropped twice"),
        ("layers: [2]", "layers: [0, 1, 2, 3, 4, 5]", "drops all 6 layers"),
        ("strategy: auto", "strategy: &a auto\nx: *a", "line LINE: not YAML: aliases"),
        ("moves:", "moves: !!python/object/apply:os.system [ls]\nx:", "not YAML"),
        ("moves:", "moves: [", "not YAML"),
    ],
)
def test_every_fault_is_one_clear_line(old: str, new: str, message: str) -> None:
    text = plan(LowRank(role=Role.Q, layer=0, rank=8), DropLayers(layers=(2,))).to_yaml()
    assert old in text
    text = text.replace(old, new, 1)
    line = len(text[: text.index(new) + len(new)].rstrip().splitlines())
    with pytest.raises(PlanError, match=message.replace("LINE", str(line))) as caught:
        Plan.parse(text, "my.yaml")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("my.yaml: ")


@pytest.mark.parametrize("value", ["!!bool x", "!!int ''", "!!timestamp x", "!!float x", "*a"])
def test_values_that_are_not_what_their_tag_says(value: str) -> None:
    text = plan().to_yaml().replace("strategy: auto", f"strategy: {value}")
    with pytest.raises(PlanError, match="not YAML"):
        Plan.parse(text)


@pytest.mark.parametrize("text", ["", "[]", "hello", "null", "\0", "a: b: c", "- 1"])
def test_not_a_plan(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.parse(text)


def test_missing_binary_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan at"):
        Plan.load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(PlanError, match="not readable"):
        Plan.load(tmp_path / "binary.yaml")
    with pytest.raises(PlanError, match="not readable"):
        Plan.load(tmp_path)
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(17_000_000)
    with pytest.raises(PlanError, match="larger than any plan"):
        Plan.load(tmp_path / "huge.yaml")


def test_a_matrix_twice_and_wrong_spaces() -> None:
    twice = plan(
        LowRank(role=Role.K, layer=1, rank=8), ShareInput(roles=(Role.K,), layers=(0, 1), rank=8)
    )
    with pytest.raises(PlanError, match=r"layer 1 k is already in moves\[0\]"):
        twice.check_moves()
    with pytest.raises(PlanError, match="do not read the same input"):
        plan(ShareInput(roles=(Role.Q, Role.DOWN), layers=(0,), rank=8)).check_moves()
    with pytest.raises(PlanError, match="do not write the same output"):
        plan(ShareOutput(roles=(Role.Q, Role.K), layers=(0,), rank=8)).check_moves()
    with pytest.raises(PlanError, match="named twice"):
        plan(ShareInput(roles=(Role.Q,), layers=(1, 1), rank=8)).check_moves()


def test_sizes_by_hand() -> None:
    assert move_params(LowRank(role=Role.Q, layer=0, rank=8), SHAPE) == 8 * (64 + 48)
    pair = ShareInput(roles=(Role.K,), layers=(0, 1), rank=8)
    assert move_params(pair, SHAPE) == 8 * (48 + 32 + 32)
    down = ShareOutput(roles=(Role.DOWN,), layers=(0, 1, 2), rank=8)
    assert move_params(down, SHAPE) == 8 * (48 + 3 * 96)
    decoder, total = plan_params((pair, DropLayers(layers=(4, 5))), SHAPE)
    per_layer = 2 * 64 * 48 + 2 * 32 * 48 + 3 * 96 * 48
    assert decoder == 4 * per_layer - 2 * 32 * 48 + 8 * 112
    assert total == 170000 - 2 * 23136 - 2 * 32 * 48 + 8 * 112


def test_a_move_that_grows_or_exceeds_is_refused() -> None:
    with pytest.raises(PlanError, match="layer 3 q: rank 49 exceeds 48"):
        move_params(LowRank(role=Role.Q, layer=3, rank=49), SHAPE)
    with pytest.raises(PlanError, match="takes 3136 parameters, dense takes 3072"):
        move_params(LowRank(role=Role.Q, layer=3, rank=28), SHAPE)
    without_gate = ModelShape(6, {Role.UP: (4, 4)}, 1, 1, 1, 0, 4)
    with pytest.raises(PlanError, match="no such projection"):
        move_params(LowRank(role=Role.GATE, layer=0, rank=1), without_gate)
