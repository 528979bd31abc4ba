"""Text -> moments and held-out windows, with the record by which a plan finds or repeats them."""

import logging
from dataclasses import dataclass
from pathlib import Path

from gccompress.errors import GccompressError, PlanError
from gccompress.files import cache_folder
from gccompress.models import LoadedModel
from gccompress.moments import Fisher, Moments, collect_moments, find_moments, moments_hash
from gccompress.plan import LARGEST_SEED, Calibration
from gccompress.processes import main_first
from gccompress.roles import SAME_INPUT
from gccompress.text import Windows, evenly, load_windows
from gccompress.view import ModelView

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationOptions:
    """What text the moments come from, and how they are estimated.

    Attributes:
        source: `self`, `wikitext2`, a file, or a hub data set.
        tokens: of that text that go into the moments.
        seqlen: tokens of a window.
        heldout_tokens: further tokens, seen by no moment, on which plans are probed.
        seed: of sampled text and sampled labels.
        fisher: how output moments are estimated.
        spread: take windows from all over the text, and hold out windows from all over it; else its
            first ones, and hold out the last of these.
    """

    source: str = "self"
    tokens: int = 16384
    seqlen: int = 512
    heldout_tokens: int = 4096
    seed: int = 0
    fisher: Fisher = Fisher()  # noqa: RUF009 - frozen
    spread: bool = True


@dataclass(frozen=True)
class Calibrated:
    """Moments, the windows they are of and those held out, and the record that repeats all."""

    moments: Moments
    windows: Windows
    heldout: Windows
    record: Calibration


def read_windows(
    loaded: LoadedModel, options: CalibrationOptions, cache: Path
) -> tuple[Windows, Windows]:
    """Return the windows that go into the moments, and those held out.

    Raises:
        GccompressError: fewer than one window asked for, or less than nothing held out.
        TextError: the text is missing, unreadable or too short.
    """
    if options.seqlen < 2:
        raise GccompressError(
            f"windows of {options.seqlen} calibration tokens; raise --seqlen to 2 or more"
        )
    if options.heldout_tokens < 0:
        raise GccompressError(
            f"{options.heldout_tokens} held-out tokens; give --heldout-tokens 0 for none"
        )
    if not 0 <= options.seed <= LARGEST_SEED:
        raise GccompressError(f"seed {options.seed}; wanted 0 to {LARGEST_SEED}")
    count, held = options.tokens // options.seqlen, options.heldout_tokens // options.seqlen
    if count < 1:
        raise GccompressError(
            f"{options.tokens} calibration tokens are less than one window of {options.seqlen}; "
            "raise --calibration-tokens or lower --seqlen"
        )
    if options.heldout_tokens and not held:
        logger.warning(
            "%d held-out tokens are less than one window of %d, so no plan will be measured",
            *(options.heldout_tokens, options.seqlen),
        )
    windows = main_first(
        lambda: load_windows(
            options.source,
            loaded,
            seqlen=options.seqlen,
            tokens=(count + held) * options.seqlen,
            seed=options.seed,
            spread=options.spread,
            cache_dir=cache,
        )
    )
    if not options.spread:
        return windows.slice(0, count), windows.slice(count, count + held)
    out = set(evenly(count + held, held))
    return windows.select([i for i in range(count + held) if i not in out]), windows.select(
        sorted(out)
    )


def calibrate(
    loaded: LoadedModel, view: ModelView, options: CalibrationOptions, cache: Path
) -> Calibrated:
    """Read the text, collect the moments (from the cache if there), hold out the rest.

    All processes that have joined (`processes`) must call it; each does its share.

    Raises:
        GccompressError: fewer than one window asked for, or less than nothing held out.
        TextError: the text is missing, unreadable or too short.
    """
    used, heldout = read_windows(loaded, options, cache)
    moments = collect_moments(
        view,
        used,
        model_hash=loaded.source.hash,
        cache=cache,
        fisher=options.fisher,
        seed=options.seed,
    )
    record = Calibration(
        source=options.source,
        hash=moments.hash,
        tokens=moments.tokens,
        seqlen=options.seqlen,
        seed=options.seed,
        fisher=str(options.fisher),
        heldout_tokens=heldout.ids.numel(),
        dtype=str(view.model.dtype).removeprefix("torch."),
        spread=options.spread,
    )
    return Calibrated(moments, used, heldout, record)


def assist(loaded: LoadedModel, options: CalibrationOptions, cache_dir: str | None = None) -> None:
    """Do this process's share of a calibration that the main process plans with."""
    calibrate(loaded, ModelView(loaded.model), options, cache_folder(cache_dir))


def options_of_record(record: Calibration) -> CalibrationOptions:
    """Return the options that a plan's calibration was made with."""
    return CalibrationOptions(
        record.source,
        record.tokens,
        record.seqlen,
        record.heldout_tokens,
        record.seed,
        Fisher.parse(record.fisher),
        record.spread,
    )


def recall(loaded: LoadedModel, view: ModelView, record: Calibration, cache: Path) -> Moments:
    """Return the moments a plan was made with: from the cache, else made again from its source.

    Raises:
        PlanError: the source no longer gives the tokens that the plan was made with.
    """
    found = find_moments(record.hash, cache)
    if found is not None:
        return found
    logger.info("moments of the plan are not in %s; calibrating again", cache)
    again = calibrate(loaded, view, options_of_record(record), cache)
    _require_same(record, again.record.hash)
    return again.moments


def recall_heldout(loaded: LoadedModel, record: Calibration, cache: Path) -> Windows:
    """Return the windows that were held out when a plan was made, read again from its source.

    Raises:
        PlanError: the source no longer gives the tokens that the plan was made with.
    """
    options = options_of_record(record)
    used, heldout = read_windows(loaded, options, cache)
    now = moments_hash(loaded.source.hash, used, options.fisher, options.seed, record.dtype)
    _require_same(record, now)
    return heldout


def _require_same(record: Calibration, now: str) -> None:
    if now != record.hash:
        raise PlanError(
            f"calibration source {record.source!r} now gives {now[:19]}, the plan was made with "
            f"{record.hash[:19]} (other text, model or --dtype); make the plan again"
        )


def damping_warnings(view: ModelView, moments: Moments) -> tuple[str, ...]:
    """Return one line per kind of matrix whose moments rest on damping.

    Those whose input is wider than there are calibration tokens, and those of whose input channels
    some were zero on every token: a dead neuron or head, a channel that a norm scales to nothing.
    """
    tokens = moments.tokens
    wide = {role: view.shape(role, 0)[1] for role in view.roles if view.shape(role, 0)[1] > tokens}
    lines = [
        f"{role.value}: {tokens} calibration tokens for an input of width {width}; its moment has "
        f"rank {tokens} at most and was damped; give at least {4 * width} tokens"
        for role, width in wide.items()
    ]
    for group in SAME_INPUT:
        role = next(role for role in group if role in view.roles)
        channels, layers = moments.silent(role)
        if channels:
            lines.append(
                f"{role.value}: {channels} input channels in {layers} layers were never active on "
                "the calibration text; their moments are the damping alone"
            )
    return tuple(lines)
