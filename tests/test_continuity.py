"""Continuity: oracles (dense SVD, brute-force sums), invariances, edge cases, a real model."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

from gccompress import spectra
from gccompress.continuity import (
    RANDOM_MULTIPLE,
    ContinuityReport,
    analyze,
    judge,
    pair_metrics,
    space_of,
)
from gccompress.errors import GccompressError, NumericalError
from gccompress.roles import PAPER_SPACE, Role, Space
from gccompress.view import ModelView
from tests.tiny import FAMILIES, tiny_folder, tiny_model

# Mean over the 29 pairs of SmolLM2-135M-Instruct (4-bit GGUF, dequantised), measured by another
# program than this one: v1, u1, Gram alignment in and out as multiples of random.
SMOLLM2 = {
    Role.Q: (0.419, 0.051, 2.25, 1.17),
    Role.K: (0.567, 0.088, 2.73, 1.15),
    Role.V: (0.078, 0.052, 1.30, 1.01),
    Role.O: (0.025, 0.393, 1.05, 1.42),
    Role.GATE: (0.670, 0.336, 1.31, 1.13),
    Role.UP: (0.392, 0.025, 1.14, 1.00),
    Role.DOWN: (0.015, 0.764, 1.00, 1.35),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def rotation(width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(width, width, seed=seed)).Q


def shown(report: ContinuityReport, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(report.table())
    return capture.get()


def measured(model: Any, **options: Any) -> ContinuityReport:
    return analyze(ModelView(model), device="cpu", progress=False, **options)


# --- oracles -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32), (1, 40), (40, 1)])
def test_decomposition_equals_the_dense_svd(shape: tuple[int, int]) -> None:
    weight = randn(*shape)
    found = spectra.decompose(weight)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(found.values * weight.abs().max(), values)
    torch.testing.assert_close((found.left * left).sum(0).abs(), torch.ones_like(values))
    torch.testing.assert_close((found.right * right.T).sum(0).abs(), torch.ones_like(values))
    rebuilt = found.left @ found.values.diag() @ found.right.T * weight.abs().max()
    torch.testing.assert_close(rebuilt, weight)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_every_metric_equals_its_definition(shape: tuple[int, int]) -> None:
    """Brute force: full SVDs, double sums over all directions, `scipy` for the angles."""
    from scipy.linalg import subspace_angles

    first, second = randn(*shape, seed=1), randn(*shape, seed=2)
    found = pair_metrics(first, second)
    u, s, v = torch.linalg.svd(first, full_matrices=False)
    u2, s2, v2 = torch.linalg.svd(second, full_matrices=False)
    p, q = s**2 / (s**2).sum(), s2**2 / (s2**2).sum()
    sides = (
        (v.T, v2.T, shape[1], found.v1, found.gram_in, found.sigma2_in, found.angles_in),
        (u, u2, shape[0], found.u1, found.gram_out, found.sigma2_out, found.angles_out),
    )
    for basis, basis2, width, leading, gram, matched, angles in sides:
        cosines = basis.T @ basis2
        assert leading == pytest.approx(abs(float(cosines[0, 0])))
        total = sum(
            float(p[i] * q[j] * cosines[i, j] ** 2) for i in range(len(p)) for j in range(len(q))
        )
        assert gram == pytest.approx(total * width)
        assert matched == pytest.approx(float((p * cosines.diag().abs()).sum()))
        expected = math.fsum(
            math.cos(angle)
            for angle in subspace_angles(basis[:, :8].numpy(), basis2[:, :8].numpy())
        )
        assert angles[0] == pytest.approx(expected / 8)
        assert (angles[1] is None) == (min(shape) < 32)


def test_gram_alignment_is_the_same_by_either_product() -> None:
    """Tall and wide rows take different ways to one number."""
    first, second = randn(30, 20, seed=1), randn(25, 20, seed=2)
    direct = (first @ second.T).square().sum() / (first.square().sum() * second.square().sum())
    assert spectra.gram_alignment(first, second) == pytest.approx(float(direct))
    assert spectra.gram_alignment(first[:5], second[:7]) == pytest.approx(
        float(
            (first[:5] @ second[:7].T).square().sum()
            / (first[:5].square().sum() * second[:7].square().sum())
        )
    )


@pytest.mark.parametrize(("count", "width"), [(8, 576), (8, 48), (24, 48), (32, 48), (47, 48)])
def test_random_levels_are_what_random_directions_give(count: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(200, 2, width, count, generator=generator, dtype=torch.float64)
    bases = torch.linalg.qr(draws).Q
    cosines = torch.linalg.svdvals(bases[:, 0].mT @ bases[:, 1])
    assert spectra.random_angle_cosine(count, width) == pytest.approx(
        float(cosines.mean()), abs=0.01
    )
    leading = (bases[:, 0, :, 0] * bases[:, 1, :, 0]).sum(-1).abs().mean()
    assert spectra.random_cosine(width) == pytest.approx(float(leading), rel=0.2)


def test_random_levels_at_the_edges() -> None:
    assert spectra.random_cosine(576) == pytest.approx(0.0332, abs=1e-4)
    assert spectra.random_cosine(1) <= 1.0
    assert spectra.random_angle_cosine(48, 48) == 1.0
    assert spectra.random_angle_cosine(49, 48) is None


# --- invariances -------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    seed=st.integers(0, 99),
    power=st.integers(-150, 150),
)
def test_a_weight_is_one_with_itself_at_any_scale(
    rows: int, columns: int, seed: int, power: int
) -> None:
    weight = randn(rows, columns, seed=seed)
    found = pair_metrics(weight, weight * 10.0**power)
    assert found.v1 == pytest.approx(1.0)
    assert found.u1 == pytest.approx(1.0)
    assert found.sigma2_in == pytest.approx(1.0)
    assert found.sigma2_out == pytest.approx(1.0)
    assert found.gram_in is not None and found.gram_in >= 1.0 - 1e-9


def test_rotating_the_space_of_all_layers_changes_nothing() -> None:
    """Continuity is about layers relative to each other, not about coordinates."""
    first, second = randn(40, 48, seed=1), randn(40, 48, seed=2)
    first, second = first + 2.0, second + 2.0
    turn_in, turn_out = rotation(48, seed=3), rotation(40, seed=4)
    before = pair_metrics(first, second)
    after = pair_metrics(turn_out @ first @ turn_in, turn_out @ second @ turn_in)
    assert vars(after) == {name: pytest.approx(value) for name, value in vars(before).items()}


def test_rotating_one_layer_alone_loses_its_space_and_no_other() -> None:
    base = randn(40, 48, seed=1) + 2.0
    before = pair_metrics(base, base)
    after = pair_metrics(base, base @ rotation(48, seed=3))
    assert before.v1 == pytest.approx(1.0)
    assert after.v1 is not None and after.v1 < 0.5
    assert after.u1 == pytest.approx(1.0)


def test_transposing_swaps_the_spaces() -> None:
    first, second = randn(12, 40, seed=1), randn(12, 40, seed=2)
    one, other = pair_metrics(first, second), pair_metrics(first.T, second.T)
    assert (one.v1, one.gram_in) == (pytest.approx(other.u1), pytest.approx(other.gram_out))
    assert one.sigma2_out == pytest.approx(other.sigma2_in)
    assert one.angles_in == pytest.approx(other.angles_out, nan_ok=True)


# --- planted structure and random weights ------------------------------------------------------


def plant(view: ModelView, role: Role, space: Space, strength: float = 10.0) -> None:
    """Give all layers of a role one strong direction in one space, random ones in the other."""
    out_features, in_features = view.shape(role, 0)
    shared = randn(in_features if space is Space.INPUT else out_features, seed=11)
    shared /= shared.norm()
    for layer in range(view.num_layers):
        own = randn(out_features if space is Space.INPUT else in_features, seed=20 + layer)
        own /= own.norm()
        rank_one = own.outer(shared) if space is Space.INPUT else shared.outer(own)
        weight = view.weight(role, layer)
        view.set_weight(role, layer, weight + strength * rank_one.to(weight))


def test_a_planted_direction_is_found_in_its_space() -> None:
    model = tiny_model("llama", layers=5)
    view = ModelView(model)
    plant(view, Role.UP, Space.INPUT)
    plant(view, Role.O, Space.OUTPUT)
    report = measured(model, folded=False)
    assert space_of(report) == {
        role: {Role.UP: Space.INPUT, Role.O: Space.OUTPUT}.get(role, Space.NONE)
        for role in view.roles
    }
    up, o = report.roles[Role.UP], report.roles[Role.O]
    assert up.v1_mean is not None and up.v1_mean > 0.9
    assert o.u1_mean is not None and o.u1_mean > 0.9
    assert up.gram_in_mean is not None and up.gram_in_mean > 5.0
    assert "x random" in up.rule
    text = shown(report)
    assert "shares input" in text and "shares output" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_share_nothing(family: str) -> None:
    """Every family: all numbers near the level of random directions, raw; no role left out."""
    model = tiny_model(family, layers=6)
    report = measured(model, folded=False)
    roles = ModelView(model).roles
    assert tuple(report.roles) == roles
    assert (Role.GATE in roles) == (family != "gpt2")
    for row in report.roles.values():
        assert row.verdict is Space.NONE
        assert len(row.v1) == len(row.gram_out) == 5
        assert row.v1_mean == pytest.approx(row.random_v1, abs=3 * row.random_v1 / math.sqrt(5))
        assert row.u1_mean == pytest.approx(row.random_u1, abs=3 * row.random_u1 / math.sqrt(5))
        assert row.gram_in_mean == pytest.approx(1.0, abs=0.15)
        assert row.gram_out_mean == pytest.approx(1.0, abs=0.15)


def test_spaces_too_narrow_for_the_multiple_can_still_be_shared() -> None:
    """At width 16 random directions have |cos| 0.2: no cosine reaches 7 times that."""
    assert RANDOM_MULTIPLE * spectra.random_cosine(16) > 1.0
    assert judge(0.95, 0.2, (16, 16))[0] is Space.INPUT
    assert judge(0.2, 0.95, (16, 16))[0] is Space.OUTPUT
    assert judge(0.5, 0.5, (16, 16))[0] is Space.NONE


def test_the_larger_cosine_wins_where_both_spaces_are_shared() -> None:
    """Not the larger multiple: that would favour the wider space whatever is in it."""
    verdict, rule = judge(0.67, 0.5, (14336, 1024))
    assert verdict is Space.INPUT
    assert "v1 0.670" in rule and "u1 0.500" in rule
    assert judge(None, 0.5, (1024, 1024))[0] is Space.OUTPUT
    assert judge(None, None, (8, 8))[0] is Space.NONE


# --- folding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_folded_measures_are_those_of_the_scaled_weights(family: str) -> None:
    """Oracle: write the scaled weight into the model and measure it raw."""
    model = tiny_model(family, layers=3)
    report = measured(model)
    view = ModelView(model)
    for role in view.roles:
        scaled = False
        for layer in range(view.num_layers):
            weight = view.weight(role, layer).clone()
            before, after = view.in_scale(role, layer), view.out_scale(role, layer)
            weight = weight if before is None else weight * before
            weight = weight if after is None else after[:, None] * weight
            view.set_weight(role, layer, weight)
            scaled = scaled or before is not None or after is not None
        folded = report.roles[role].folded
        assert (folded is not None) == scaled
    again = measured(model, folded=False)
    for role, row in report.roles.items():
        assert row.measures(folded=True).v1 == pytest.approx(again.roles[role].v1, abs=1e-4)
        assert row.measures(folded=True).u1 == pytest.approx(again.roles[role].u1, abs=1e-4)
        assert again.roles[role].folded is None


def test_a_direction_hidden_by_the_norm_scales_shows_when_folded() -> None:
    """The verdicts may differ; each is kept, and the table says both."""
    model = tiny_model("llama", layers=4)
    view = ModelView(model)
    plant(view, Role.Q, Space.INPUT)
    for layer in range(4):
        scale = 0.05 + 4.0 * torch.rand(48, generator=torch.Generator().manual_seed(layer)) ** 6
        scale[torch.randperm(48, generator=torch.Generator().manual_seed(layer))[:24]] *= -1.0
        view.layer(layer).input_layernorm.weight.data.copy_(scale)  # type: ignore[union-attr, operator]
        view.set_weight(Role.Q, layer, view.weight(Role.Q, layer) / scale)
    report = measured(model)
    assert space_of(report)[Role.Q] is Space.NONE
    assert space_of(report, folded=True)[Role.Q] is Space.INPUT
    assert "folded" in shown(report)


# --- degenerate weights ------------------------------------------------------------------------


def test_one_layer_has_no_pairs_and_says_so(tmp_path: Path) -> None:
    report = measured(tiny_model("llama", layers=1))
    for row in report.roles.values():
        assert row.v1 == [] and row.v1_mean is None
        assert row.verdict is Space.NONE and "no adjacent pairs" in row.rule
    assert "no adjacent pairs" in " ".join(shown(report).split())
    assert report.save(tmp_path / "out") == (tmp_path / "out" / "continuity.json",)


def test_a_zero_weight_is_null_in_json_and_a_dash_in_the_table(tmp_path: Path) -> None:
    model = tiny_model("llama", layers=2)
    view = ModelView(model)
    view.set_weight(Role.V, 1, torch.zeros(view.shape(Role.V, 1)))
    report = measured(model)
    row = json.loads(report.to_json())["roles"]["v"]
    for name in ("v1", "u1", "gram_in", "gram_out", "sigma2_in", "sigma2_out"):
        assert row[name] == [None]
        assert row[f"{name}_mean"] is None
    assert row["verdict"] == "none"
    line = next(line for line in shown(report).splitlines() if line.startswith("v "))
    assert line.split()[1] == "-"
    assert len(report.save(tmp_path)) == 3


def test_a_mean_is_over_the_pairs_that_are_known() -> None:
    model = tiny_model("llama", layers=4)
    view = ModelView(model)
    view.set_weight(Role.K, 0, torch.zeros(view.shape(Role.K, 0)))
    row = measured(model).roles[Role.K]
    assert row.v1[0] is None and None not in row.v1[1:]
    assert row.v1_mean == pytest.approx(sum(v for v in row.v1 if v is not None) / 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    model = tiny_model("phi3", layers=3)
    with torch.no_grad():
        ModelView(model).weight(Role.UP, 2)[3, 5] = value
    with pytest.raises(NumericalError, match="layer 2 up: weight has 1 of "):
        measured(model)


def test_a_norm_scale_that_is_not_finite_is_named() -> None:
    model = tiny_model("llama", layers=2)
    model.model.layers[1].post_attention_layernorm.weight.data[0] = math.nan
    with pytest.raises(NumericalError, match="layer 1 gate: scale of the norm before it"):
        measured(model)
    measured(model, folded=False)


def test_angles_of_more_directions_than_there_are_is_null() -> None:
    """K and V of a grouped-query model have fewer rows; the input space is as wide as ever."""
    report = measured(tiny_model("llama", layers=3, num_key_value_heads=1))
    k, q = report.roles[Role.K], report.roles[Role.Q]
    assert k.shape == (16, 48)
    assert k.random_v1 == q.random_v1 < k.random_u1
    assert k.angles["8"].cos_in_mean is not None
    assert k.angles["32"].cos_in == [None, None]
    assert k.angles["32"].cos_out_mean is None and k.angles["32"].random_out is None
    assert q.angles["32"].cos_in_mean is not None


@pytest.mark.parametrize("rank", [1, 5])
def test_low_rank_weights(rank: int) -> None:
    first = randn(30, rank, seed=1) @ randn(rank, 40, seed=2)
    second = randn(30, rank, seed=3) @ randn(rank, 40, seed=4)
    assert spectra.decompose(first).rank == rank
    found = pair_metrics(first, second)
    assert found.angles_in == (None, None)
    assert all(0.0 <= x <= 1.0 for x in (found.v1, found.u1, found.sigma2_in) if x is not None)
    assert found.v1 is not None and found.gram_in is not None


def test_layers_of_different_widths_are_compared_where_they_meet() -> None:
    found = pair_metrics(randn(64, 24, seed=1), randn(56, 24, seed=2))
    assert found.v1 is not None and found.gram_in is not None
    assert found.u1 is None and found.gram_out is None and found.angles_out == (None, None)


# --- the report --------------------------------------------------------------------------------


def test_report_round_trip_and_the_keys_callers_rely_on() -> None:
    report = measured(tiny_model("qwen3", layers=3))
    assert ContinuityReport.from_json(report.to_json()) == report
    data = json.loads(report.to_json())
    assert {"model", "num_layers", "roles", "seconds", "peak_rss_bytes"} <= set(data)
    assert set(data["roles"]) == {"q", "k", "v", "o", "gate", "up", "down"}
    keys = {"v1_mean", "u1_mean", "v1", "u1", "gram_in", "gram_out", "random_v1", "random_u1"}
    for row in data["roles"].values():
        assert keys <= set(row)
        assert set(row["angles"]) == {"8", "32"}
    assert data["num_layers"] == 3
    assert data["seconds"] > 0
    assert 2**20 < data["peak_rss_bytes"] < 2**40


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', "{"])
def test_what_is_no_report_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(GccompressError, match="continuity report: ") as error:
        ContinuityReport.from_json(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("folded", [True, False])
def test_saving_writes_the_json_and_a_figure_per_space(tmp_path: Path, folded: bool) -> None:
    from matplotlib.image import imread

    model = tiny_model("gemma2", layers=4)
    model.config.name_or_path = "a $name$ [with] markup"
    report = measured(model, folded=folded)
    written = report.save(tmp_path / "new" / "folder")
    assert sorted(path.name for path in written) == sorted(
        path.name for path in (tmp_path / "new" / "folder").iterdir()
    )
    assert written[0].read_text("utf-8") == report.to_json()
    assert [path.name for path in written[1:]] == ["continuity_input.png", "continuity_output.png"]
    for path in written[1:]:
        pixels = imread(path)
        assert pixels.shape[0] > 500 and pixels.std() > 0.05
    assert "a $name$ [with] markup" in shown(report)


def test_the_heat_map_shows_the_numbers_of_the_report() -> None:
    from gccompress.report.figures import continuity_figure

    report = measured(tiny_model("llama", layers=4))
    for space, raw in ((Space.INPUT, "v1"), (Space.OUTPUT, "u1")):
        figure = continuity_figure(report, space)
        drawn = [axes.images[0].get_array().tolist() for axes in figure.axes if axes.images]
        wanted = [getattr(row, raw) for row in report.roles.values()]
        folded = [getattr(row.measures(folded=True), raw) for row in report.roles.values()]
        assert drawn == [wanted, folded]


def test_the_table_fits_eighty_columns() -> None:
    lines = shown(measured(tiny_model("gemma2", layers=3)), width=80).splitlines()
    rows = [line for line in lines if line.split()[:1] and line.split()[0] in set(Role)]
    assert len(rows) == 7
    assert all("…" not in line for line in lines)


def test_analysing_changes_nothing_and_takes_a_model_or_a_folder(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "llama", layers=3)
    model = tiny_model("llama", layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    in_memory = analyze(model, device="cpu")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    from_disk = analyze(folder, device="cpu", cache_dir=tmp_path / "cache")
    assert from_disk.roles == in_memory.roles
    for report in (from_disk, in_memory):
        assert report.model_hash is not None and report.model_hash.startswith("sha256:")
    assert measured(model).model_hash is None


# --- a pretrained model ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> ContinuityReport:
    return analyze("smollm2-135m", device="cpu", progress=False)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_gives_the_numbers_measured_before(smollm2: ContinuityReport) -> None:
    assert smollm2.num_layers == 30
    for role, wanted in SMOLLM2.items():
        row = smollm2.roles[role]
        found = (row.v1_mean, row.u1_mean, row.gram_in_mean, row.gram_out_mean)
        assert found == pytest.approx(wanted, abs=0.01), role
    assert smollm2.roles[Role.Q].measures(folded=True).v1_mean == pytest.approx(0.50, abs=0.01)
    assert smollm2.roles[Role.GATE].measures(folded=True).v1_mean == pytest.approx(0.54, abs=0.01)
    assert smollm2.roles[Role.V].measures(folded=True).v1_mean == pytest.approx(0.14, abs=0.01)


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_shares_the_spaces_the_paper_says(smollm2: ContinuityReport) -> None:
    assert space_of(smollm2) == PAPER_SPACE
    assert space_of(smollm2, folded=True) == PAPER_SPACE
