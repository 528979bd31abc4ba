"""The latency table: its arithmetic, its cache, and that it finds the time where it is spent."""

import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gccompress.errors import GccompressError
from gccompress.plan import DropLayers, LowRank, ResizeMlp, ShareInput, ShareOutput
from gccompress.planner import timing
from gccompress.planner.latency import (
    Curve,
    LatencyTable,
    Measured,
    predicted_seconds,
    speedup,
)
from gccompress.planner.timing import describe, latency_table, measure_latency, points
from gccompress.roles import MLP, Role
from gccompress.sizes import ModelShape
from gccompress.view import ModelView, model_shape
from tests.tiny import FAMILIES, tiny_model

MATRICES = {
    Role.Q: (64, 64),
    Role.K: (32, 64),
    Role.V: (32, 64),
    Role.O: (64, 64),
    Role.GATE: (96, 64),
    Role.UP: (96, 64),
    Role.DOWN: (64, 96),
}


def made_up(**changes: object) -> LatencyTable:
    """Return a table in which a product takes a microsecond per 64 multiply-adds of a token."""
    fields = {
        "measured": Measured(
            device="none",
            torch="0",
            threads=1,
            dtype="float32",
            tokens=512,
            model_type="llama",
            attention="sdpa",
            layers=4,
            heads=(4, 2),
            vocabulary=100,
            matrices=MATRICES,
        ),
        "rest": 0.001,
        "layer_rest": 0.0003,
        "activation": 0.0001,
        "roles": {role: rows * columns / 64e6 for role, (rows, columns) in MATRICES.items()},
        "reads": {
            role: Curve(sizes=(1, 96), seconds=(columns / 64e6, 96 * columns / 64e6))
            for role, (_, columns) in MATRICES.items()
        },
        "writes": {
            role: Curve(sizes=(1, 96), seconds=(rows / 64e6, 96 * rows / 64e6))
            for role, (rows, _) in MATRICES.items()
        },
        "widths": Curve(
            sizes=(1, 96), seconds=(0.0001 + 3 * 64 / 64e6, 0.0001 + 96 * 3 * 64 / 64e6)
        ),
    }
    return LatencyTable(**(fields | changes))


SHAPE = ModelShape(
    layers=4,
    matrices=MATRICES,
    layer_params=32_000,
    total_params=140_000,
    head_params=6_400,
    biases_per_neuron=0,
    bytes_per_param=4,
)
PRODUCTS = sum(rows * columns for rows, columns in MATRICES.values()) / 64e6
DENSE = 0.001 + 4 * (0.0004 + PRODUCTS)


def test_a_dense_model_takes_the_sum_of_its_parts() -> None:
    table = made_up()
    assert predicted_seconds((), SHAPE, table) == pytest.approx(DENSE)
    assert table.mlp == pytest.approx(table.width(96))
    assert table.layer == pytest.approx(0.0004 + PRODUCTS)


@pytest.mark.parametrize(
    ("move", "saved"),
    [
        (DropLayers(layers=(1, 3)), 2 * (0.0004 + PRODUCTS)),
        (LowRank(role=Role.K, layer=0, rank=8), (32 * 64 - 8 * (32 + 64)) / 64e6),
        (ResizeMlp(layer=2, width=60), 36 * 3 * 64 / 64e6),
        # over layers a basis saves memory, not time
        (
            ShareInput(roles=(Role.K,), layers=(0, 1), rank=8),
            2 * (32 * 64 - 8 * (32 + 64)) / 64e6,
        ),
        # over roles its product is computed once
        (
            ShareInput(roles=(Role.Q, Role.K, Role.V), layers=(0, 1), rank=20),
            2 * (128 * 64 - 20 * (64 + 128)) / 64e6,
        ),
        (
            ShareOutput(roles=(Role.O, Role.DOWN), layers=(0, 1), rank=16),
            2 * (64 * 160 - 16 * (64 + 64 + 64 + 96)) / 64e6,
        ),
    ],
)
def test_every_kind_of_move_saves_its_products(move: object, saved: float) -> None:
    assert predicted_seconds((move,), SHAPE, made_up()) == pytest.approx(DENSE - saved)  # type: ignore[arg-type]
    assert speedup((move,), SHAPE, made_up()) == pytest.approx(DENSE / (DENSE - saved))  # type: ignore[arg-type]


def test_a_fused_weight_of_which_a_role_is_replaced_is_joined_once_a_layer() -> None:
    table = made_up(joins={"q+k+v": 0.01, "gate+up": 0.1})
    moves = (
        LowRank(role=Role.Q, layer=0, rank=8),
        LowRank(role=Role.K, layer=0, rank=8),
        LowRank(role=Role.K, layer=1, rank=8),
        ResizeMlp(layer=2, width=60),
    )
    more = predicted_seconds(moves, SHAPE, table) - predicted_seconds(moves, SHAPE, made_up())
    assert more == pytest.approx(2 * 0.01 + 0.1)


def test_costs_are_the_prediction_in_nanoseconds() -> None:
    table = made_up()
    ranks, widths = np.array([4, 8, 16]), np.array([16, 32])
    assert table.rank_costs(Role.K, ranks).dtype == np.int64
    assert table.rank_costs(Role.K, ranks).tolist() == [
        round(rank * 96 / 64e6 * 1e9) for rank in (4, 8, 16)
    ]
    assert table.shared_costs((Role.Q, Role.K), ranks).tolist() == [
        round(rank * 160 / 64e6 * 1e9) for rank in (4, 8, 16)
    ]
    assert table.width_costs(widths).tolist() == [round(n * 192 / 64e6 * 1e9) for n in (16, 32)]
    assert table.mlp_dense_cost() == sum(table.dense_cost(role) for role in MLP)
    moves = (LowRank(role=Role.K, layer=0, rank=8), ResizeMlp(layer=1, width=32))
    cost = 4 * sum(table.dense_cost(role) for role in MATRICES)
    cost += int(table.rank_costs(Role.K, np.array(8))) - table.dense_cost(Role.K)
    cost += int(table.width_costs(np.array(32))) - table.mlp_dense_cost()
    reached = speedup(moves, SHAPE, table)
    assert cost == pytest.approx(table.cost_budget(reached, 4), abs=20)
    assert cost < table.cost_budget(reached - 1e-4, 4)


def test_dropped_layers_leave_more_for_the_others() -> None:
    table = made_up()
    assert table.cost_budget(1.2, 3) - table.cost_budget(1.2, 4) == table.layer_cost()
    assert table.cost_budget(1e6, 4) < 0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8, unique=True), st.integers(1, 200))
def test_a_curve_meets_its_points_and_stays_between_them(sizes: list[int], size: int) -> None:
    sizes.sort()
    curve = Curve(sizes=tuple(sizes), seconds=tuple(float(one) for one in sizes))
    assert curve.at(sizes).tolist() == sizes
    assert float(curve.at(size)) == pytest.approx(min(max(size, sizes[0]), sizes[-1]))


@given(st.integers(1, 20_000), st.integers(1, 16), st.booleans())
def test_points_ascend_to_the_largest(largest: int, count: int, geometric: bool) -> None:
    found = points(largest, count, geometric=geometric)
    assert found[-1] == largest and found[0] >= 1
    assert list(found) == sorted(set(found)) and len(found) <= count + 2
    if largest >= 192:
        assert all(one % 32 == 0 for one in found[:-1])


def test_reading_back_what_was_written() -> None:
    table = made_up(joins={"q+k+v": 0.01})
    assert LatencyTable.from_json(table.to_json()) == table
    with pytest.raises(GccompressError, match="latency table: rest"):
        LatencyTable.from_json(table.to_json().replace('"rest": 0.001', '"rest": "much"'))
    with pytest.raises(GccompressError, match="measured again"):
        LatencyTable.from_json("{")
    with pytest.raises(ValueError, match="ascend"):
        Curve(sizes=(2, 1), seconds=(0.1, 0.2))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure less, and less exactly."""
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-5)
    monkeypatch.setattr(timing, "RANKS", 3)
    monkeypatch.setattr(timing, "WIDTHS", 3)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured_and_left_as_it_was(family: str) -> None:
    model = tiny_model(family).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    random = torch.random.get_rng_state()
    view = ModelView(model)
    table = measure_latency(view, describe(view, 16))
    assert torch.equal(random, torch.random.get_rng_state())
    assert model.training
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert set(table.roles) == set(view.roles)
    assert set(table.joins) == {
        "phi3": {"q+k+v", "gate+up"},
        "gpt2": {"q+k+v"},
    }.get(family, set())
    for seconds in (table.rest, table.layer_rest, *table.roles.values(), *table.widths.seconds):
        assert seconds > 0
    assert table.width(view.shape(Role.DOWN, 0)[1]) == pytest.approx(table.mlp)
    assert predicted_seconds((), model_shape(view), table) > 0


def busy(seconds: float) -> None:
    """Compute for a while: a sleeping thread takes no time of its own."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.usefixtures("quick")
def test_time_is_found_where_it_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one thread, other programs on the machine do not count.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = tiny_model("llama", layers=2)
    nap = 0.02

    def slow(name: str) -> LatencyTable:
        hook = model.get_submodule(name).register_forward_hook(lambda *_: busy(nap))
        table = measure_latency(view, describe(view, 16))
        hook.remove()
        return table

    view = ModelView(model)
    assert slow("model.norm").rest > nap
    # In the first of two layers, half of it is a layer's mean.
    table = slow("model.layers.0.input_layernorm")
    assert nap / 2 < table.layer_rest < nap
    assert table.rest < nap / 2
    table = slow("model.layers.0.mlp.act_fn")
    assert nap / 2 < table.activation < nap
    assert table.layer_rest < nap / 2
    # A product that is slow inside the model makes its factors as slow.
    table = slow("model.layers.0.self_attn.k_proj")
    assert nap / 2 < table.dense(Role.K) < nap
    assert table.low_rank(Role.K, 48) > nap / 4 > table.low_rank(Role.V, 48)


@pytest.mark.usefixtures("quick")
def test_a_table_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    view = ModelView(tiny_model("llama", layers=2))
    first = latency_table(view, tmp_path, tokens=16)
    [file] = (tmp_path / "latency").iterdir()
    calls = []
    monkeypatch.setattr(timing, "measure_latency", lambda *_: calls.append(1) or first)
    with caplog.at_level(logging.WARNING):
        assert latency_table(view, tmp_path, tokens=16) == first
        assert not calls and "measuring again" not in caplog.text
        file.write_text("{", encoding="utf-8")
        assert latency_table(view, tmp_path, tokens=16) == first
    assert len(calls) == 1 and "measuring again" in caplog.text
    latency_table(view, tmp_path, tokens=17)
    latency_table(ModelView(tiny_model("llama", layers=3)), tmp_path, tokens=16)
    assert len(calls) == 3


def test_a_prompt_longer_than_the_model_reads_is_shortened() -> None:
    assert describe(ModelView(tiny_model("llama")), 512).tokens == 256
