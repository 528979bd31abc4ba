"""How sure a prediction is: a band around a rise of the loss, probed or extrapolated.

Constants are fitted by benchmarks/prediction.py; its page says how often bands hold.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NORMAL = 1.6449  # 95% quantile: bands hold nine in ten
# 95% quantiles of Student's t for 1, 2, ... degrees of freedom; the expansion below goes on.
STUDENT = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432)

# Spread of log(rise on another text / rise on the held-out text) beyond sampling.
TEXT_SHIFT = 0.06
# Other text has about three times the tokens: its own sampling adds a third of the variance.
OTHER_SAMPLING = 1 / 3


@dataclass(frozen=True)
class Kind:
    """What is usual of a kind of move.

    Attributes:
        scale: rise over its second-order prediction, where no probe says better.
        spread: standard deviation of the logarithm of that over models and budgets.
    """

    scale: float
    spread: float


USUAL = {"rank": Kind(2.3, 0.35), "width": Kind(2.4, 0.35), "drop": Kind(1.2, 0.35)}
PROBED_SPREAD = 0.2  # the same between two plans of one kind and model


@dataclass(frozen=True)
class Band:
    """A predicted rise of the loss over the dense model, nats per token, and its 90% band."""

    low: float
    rise: float
    high: float


@dataclass(frozen=True)
class Known:
    """A plan of the same model that was probed.

    Attributes:
        losses: second-order prediction by kind of move, nats per token.
        rise: measured, nats per token.
    """

    losses: Mapping[str, float]
    rise: float


def probed(rise: float, error: float, windows: int) -> Band:
    """Return the band of a probe on held-out text for the rise on other text of its kind.

    `error` is the standard error over `windows`. Half width: Student's quantile times the error
    (widened for the sampling of the other text) and the text shift, in quadrature. One window has
    no error: the band then goes from no rise to twice the rise.
    """
    if windows < 2 or not math.isfinite(error):
        return Band(min(0.0, 2 * rise), rise, max(0.0, 2 * rise))
    sampling = _student(windows - 1) * error * math.sqrt(1 + OTHER_SAMPLING)
    half = math.hypot(sampling, NORMAL * TEXT_SHIFT * rise)
    return Band(rise - half, rise, rise + half)


def extrapolated(losses: Mapping[str, float], known: Sequence[Known]) -> Band:
    """Return the band of a plan that was not probed, from its second-order prediction.

    Rise = sum over kinds of scale * loss; the logarithm of each scale is normal around what is
    usual, and `known` probes of the model condition it (Bayesian linear regression, linearised at
    the usual scales). Half width in log(rise): `NORMAL` standard deviations.

    Raises:
        KeyError: a kind that `USUAL` does not know.
    """
    kinds = sorted(USUAL)
    prior = np.diag([USUAL[kind].spread ** 2 for kind in kinds])
    useful = [one for one in known if one.rise > 0 and sum(one.losses.values()) > 0]
    shift, covariance = np.zeros(len(kinds)), prior
    if useful:
        shares = np.stack([_shares(one.losses, kinds) for one in useful])
        surprise = np.array([math.log(one.rise / _usual(one.losses)) for one in useful])
        noise = PROBED_SPREAD**2 * np.eye(len(useful))
        gain = np.linalg.solve(shares @ prior @ shares.T + noise, shares @ prior).T
        shift, covariance = gain @ surprise, prior - gain @ shares @ prior
    usual = _usual(losses)
    if usual <= 0:
        return Band(0.0, 0.0, 0.0)
    share = _shares(losses, kinds)
    rise = usual * math.exp(float(share @ shift))
    variance = float(share @ covariance @ share) + PROBED_SPREAD**2 + TEXT_SHIFT**2
    factor = math.exp(NORMAL * math.sqrt(variance))
    return Band(rise / factor, rise, rise * factor)


def _usual(losses: Mapping[str, float]) -> float:
    return sum(USUAL[kind].scale * loss for kind, loss in losses.items())


def _shares(losses: Mapping[str, float], kinds: Sequence[str]) -> NDArray[np.float64]:
    """Return the share `[kinds]` that each kind has in a plan's usual rise."""
    parts = np.array([USUAL[kind].scale * losses.get(kind, 0.0) for kind in kinds])
    return parts / parts.sum()


def _student(freedom: int) -> float:
    """Return the 95% quantile of Student's t (Cornish and Fisher's expansion from 7 on)."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z = NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
