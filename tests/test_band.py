"""Bands: the quantile against scipy's, coverage by simulation, and what probes teach."""

import math

import numpy as np
import pytest
from scipy import stats

from gccompress.planner import band
from gccompress.planner.band import USUAL, Known, extrapolated, probed


@pytest.mark.parametrize("freedom", [*range(1, 12), 15, 31, 255])
def test_student_quantile_is_scipys(freedom: int) -> None:
    assert band._student(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), rel=2e-3)


@pytest.mark.parametrize(("windows", "noise"), [(4, 0.05), (8, 0.4), (16, 0.1)])
def test_probed_band_holds_nine_in_ten(windows: int, noise: float) -> None:
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(2000):
        mean = 0.3
        heldout = random.normal(mean, noise, windows)
        shifted = mean * (1 + random.normal(0, band.TEXT_SHIFT))
        other = random.normal(shifted, noise, 3 * windows).mean()
        error = heldout.std(ddof=1) / windows**0.5
        found = probed(float(heldout.mean()), float(error), windows)
        inside += found.low <= other <= found.high
    assert 0.87 < inside / 2000 < 0.93


def test_probed_band_of_one_window_goes_from_nothing_to_twice() -> None:
    found = probed(0.2, math.nan, 1)
    assert (found.low, found.rise, found.high) == (0.0, 0.2, 0.4)
    better = probed(-0.2, math.nan, 1)
    assert (better.low, better.rise, better.high) == (-0.4, -0.2, 0.0)


def test_probed_band_of_no_rise_is_sampling_alone() -> None:
    found = probed(0.0, 0.01, 8)
    assert found.high == -found.low
    assert found.high == pytest.approx(stats.t.ppf(0.95, 7) * 0.01 * (4 / 3) ** 0.5, rel=2e-3)


def test_unprobed_plan_is_the_usual_scale() -> None:
    found = extrapolated({"width": 0.1}, [])
    assert found.rise == pytest.approx(USUAL["width"].scale * 0.1)
    assert found.high / found.rise == pytest.approx(found.rise / found.low)
    mixed = extrapolated({"width": 0.1, "rank": 0.2}, [])
    assert mixed.rise == pytest.approx(0.1 * USUAL["width"].scale + 0.2 * USUAL["rank"].scale)


def test_probe_teaches_its_kind_and_no_other() -> None:
    alone = extrapolated({"rank": 0.1}, [])
    probe = Known({"rank": 0.2}, 2 * USUAL["rank"].scale * 0.2)
    taught = extrapolated({"rank": 0.1}, [probe])
    assert alone.rise < taught.rise < 2 * alone.rise
    assert taught.high / taught.low < alone.high / alone.low
    assert extrapolated({"width": 0.1}, [probe]) == extrapolated({"width": 0.1}, [])


def test_many_probes_decide() -> None:
    probes = [Known({"width": 0.1 * (1 + i)}, 0.4 * (1 + i)) for i in range(400)]
    found = extrapolated({"width": 0.05}, probes)
    assert found.rise == pytest.approx(0.2, rel=0.01)
    least = math.hypot(band.PROBED_SPREAD, band.TEXT_SHIFT)
    assert math.log(found.high / found.rise) == pytest.approx(band.NORMAL * least, rel=0.01)


def test_probe_of_two_kinds_teaches_both() -> None:
    losses = {"rank": 0.1, "width": 0.1}
    probe = Known(losses, 1.5 * extrapolated(losses, []).rise)
    for kind in losses:
        alone, taught = extrapolated({kind: 0.1}, []), extrapolated({kind: 0.1}, [probe])
        assert alone.rise < taught.rise


def test_extrapolated_band_holds_nine_in_ten_of_its_own_model() -> None:
    random = np.random.default_rng(1)
    inside, count = 0, 2000
    for _ in range(count):
        scales = {
            kind: one.scale * math.exp(random.normal(0, one.spread)) for kind, one in USUAL.items()
        }

        def rise(losses: dict[str, float], scales: dict[str, float] = scales) -> float:
            noise = math.exp(random.normal(0, band.PROBED_SPREAD))
            return noise * sum(scales[kind] * loss for kind, loss in losses.items())

        probes = [{"rank": 0.1}, {"drop": 0.3}, {"rank": 0.05, "width": 0.1}]
        known = [Known(losses, rise(losses)) for losses in probes]
        plan = {"rank": 0.02, "width": 0.2}
        found = extrapolated(plan, known)
        shift = math.exp(random.normal(0, band.TEXT_SHIFT))
        inside += found.low <= shift * rise(plan) <= found.high
    assert 0.86 < inside / count < 0.94


def test_plan_without_loss_rises_nothing_and_useless_probes_teach_nothing() -> None:
    assert extrapolated({}, [Known({"rank": 0.1}, 0.2)]) == band.Band(0.0, 0.0, 0.0)
    useless = [Known({"rank": 0.1}, -0.01), Known({}, 0.1), Known({"rank": 0.0}, 0.1)]
    assert extrapolated({"rank": 0.1}, useless) == extrapolated({"rank": 0.1}, [])
