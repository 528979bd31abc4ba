"""Geometric continuity of a model: what adjacent layers share, per role and in which space."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gccompress import spectra
from gccompress.errors import GccompressError
from gccompress.files import cache_folder, new_file, write_text
from gccompress.gram import mean_error
from gccompress.layers import ANGLE_COUNTS
from gccompress.pairs import PairMetrics, pair_metrics
from gccompress.roles import Role, Space

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from gccompress.all_pairs import Settings
    from gccompress.models import LoadedModel
    from gccompress.weight_source import WeightSource

__all__ = ["ContinuityReport", "PairMetrics", "analyze", "judge", "pair_metrics", "space_of"]

_MEANS = ("v1", "u1", "gram_in", "gram_out", "sigma2_in", "sigma2_out")
_PER_PAIR = (*_MEANS, "degenerate", "gram_in_error", "gram_out_error", "sigma2_share")

# A space counts as shared from this multiple of the level of random directions. Random weights
# stay below 2 when averaged over a model's pairs; on SmolLM2-135M the projections that share
# nothing reach 4 (V, folded) and those that do start at 12.
RANDOM_MULTIPLE = 7.0
# In a space so narrow that the multiple cannot be reached: this share of the way up to 1 instead.
RANDOM_TO_ONE = 2.0 / 3.0

RULE = (
    f"A space is shared from {RANDOM_MULTIPLE:g} x random (narrow spaces: two thirds of the way "
    "from random to 1); if both are, the one of larger cosine."
)


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AngleCosines(_Record):
    """Mean cosine of the principal angles between the leading k directions of adjacent layers.

    None where a layer has fewer directions, or where they could not be told from the next ones.
    """

    cos_in: list[float | None]
    cos_out: list[float | None]
    cos_in_mean: float | None
    cos_out_mean: float | None
    random_in: float | None
    random_out: float | None


class Measures(_Record):
    """The measures of one role: lists hold one value per adjacent pair, see `PairMetrics`.

    Attributes:
        degenerate: pairs whose v1 and u1 are null for that reason; means leave them out.
        gap: per layer, `(s_1 - s_2) / s_1`.
        residual: per layer, `||W^T u - s v|| / s` of the leading pair.
        gram_in_error: standard errors; 0 where the alignment is exact.
        gram_in_mean_error: that of the mean.
        sigma2_share: share of the energy in the directions that sigma2_in and sigma2_out cover.
    """

    v1: list[float | None]
    u1: list[float | None]
    degenerate: list[bool]
    gap: list[float | None]
    residual: list[float | None]
    gram_in: list[float | None]
    gram_out: list[float | None]
    gram_in_error: list[float | None]
    gram_out_error: list[float | None]
    sigma2_in: list[float | None]
    sigma2_out: list[float | None]
    sigma2_share: list[float | None]
    v1_mean: float | None
    u1_mean: float | None
    gram_in_mean: float | None
    gram_out_mean: float | None
    gram_in_mean_error: float | None
    gram_out_mean_error: float | None
    sigma2_in_mean: float | None
    sigma2_out_mean: float | None
    angles: dict[str, AngleCosines]
    verdict: Space
    rule: str


class RoleContinuity(Measures):
    """One role, raw, with the levels of random directions and the same measures folded.

    Attributes:
        shape: `(out, in)`.
        random_v1: expected `|cos|` of unrelated directions, input space; of `sigma2_in` too.
        random_u1: the same in the output space.
        folded: measures of `W diag(g_pre)` or `diag(g_post) W`, in coordinates of the residual
            stream; None when not asked for or when no norm stands next to the weight.
    """

    shape: tuple[int, int]
    random_v1: float
    random_u1: float
    folded: Measures | None

    def measures(self, *, folded: bool) -> Measures:
        """Return the folded measures, or the raw ones where folding changes nothing."""
        return self.folded if folded and self.folded is not None else self


class ContinuityReport(_Record):
    """What `analyze` measured; the JSON keys are a contract with callers.

    Attributes:
        model: the name it was loaded by.
        model_hash: `sha256:` of what was loaded; None when a view was measured.
        seconds: wall time of the measurement; reading is part of it, hashing the model is not.
        peak_rss_bytes: peak resident memory of the process so far; None where unknown.
    """

    version: Literal[2] = 2
    model: str
    model_hash: str | None
    num_layers: int
    roles: dict[Role, RoleContinuity]
    seconds: float
    peak_rss_bytes: int | None

    @property
    def num_pairs(self) -> int:
        """The number of adjacent pairs of layers."""
        return self.num_layers - 1

    @property
    def has_folded(self) -> bool:
        """Whether any role was measured folded too."""
        return any(role.folded is not None for role in self.roles.values())

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return self.model_dump_json(indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "ContinuityReport":
        """Read a report back.

        Raises:
            GccompressError: not a continuity report of this version.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "text"
            raise GccompressError(
                f"continuity report: {where}: {first['msg']}, wanted the continuity.json of a "
                "gccompress analyze of this version; run analyze again"
            ) from error

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write continuity.json and, if there are pairs, a figure per space; return the paths."""
        from gccompress.report.figures import continuity_figure

        folder = Path(folder)
        written = []
        for space in (Space.INPUT, Space.OUTPUT) if self.num_pairs > 0 else ():
            path = folder / f"continuity_{space}.png"
            figure = continuity_figure(self, space)
            with new_file(path) as temporary:
                figure.savefig(temporary, format="png", dpi=150)
            written.append(path)
        path = folder / "continuity.json"
        write_text(path, self.to_json())
        return path, *written

    def table(self) -> "Table":
        """Return the means per role, each beside its random level, and the verdict."""
        from gccompress.report.tables import continuity_table

        return continuity_table(self)


def analyze(
    source: "WeightSource | LoadedModel | PreTrainedModel | str | Path",
    *,
    folded: bool = True,
    full: bool = False,
    device: str = "auto",
    progress: bool = True,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> ContinuityReport:
    """Measure the continuity of every role over all adjacent pairs of layers.

    A model named or on disk is read weight by weight, no model class is built; interrupted, the
    next call goes on at the finished pairs. Nothing is changed.

    Args:
        source: a name or a path, as for `shards.open_stream`; a model in memory; a view.
        folded: measure in the coordinates of the residual stream too (see `RoleContinuity`).
        full: decompose every weight whole, in fp64: slow, and needs no tolerance.
        device: where to compute; weights are moved there one at a time.
        progress: show a bar on a terminal.
        revision: branch, tag or commit of a hub model.
        cache_dir: where finished pairs are kept until the report is whole.

    Raises:
        ModelError: the model cannot be had, or is of no supported kind.
        NumericalError: a weight or norm scale holds NaN or inf; says which.
    """
    from gccompress.all_pairs import Kept, Settings, sweep
    from gccompress.models import pick_device

    settings = Settings(folded=folded, full=full, device=pick_device(device))
    weights, name = _open(source, revision, cache_dir)
    kept = Kept(_kept_path(weights, settings, cache_dir))
    started = time.perf_counter()
    pairs = sweep(weights, settings, kept, progress=progress)
    seconds = time.perf_counter() - started
    report = ContinuityReport(
        model=name,
        model_hash=_hash(source, weights),
        num_layers=weights.num_layers,
        roles={role: _role_continuity(weights, role, pairs[role]) for role in weights.roles},
        seconds=seconds,
        peak_rss_bytes=_peak_rss_bytes(),
    )
    kept.remove()
    return report


def space_of(report: ContinuityReport, *, folded: bool = False) -> dict[Role, Space]:
    """Return the space that each role was found to share, in raw or in folded coordinates."""
    return {role: row.measures(folded=folded).verdict for role, row in report.roles.items()}


def judge(
    v1_mean: float | None, u1_mean: float | None, shape: tuple[int, int]
) -> tuple[Space, str]:
    """Return which space a role of shape `(out, in)` shares, and the numbers that say so.

    A space is shared when its mean reaches `RANDOM_MULTIPLE` times its random level; of two, the
    one with the larger cosine, because that is what a shared direction would keep.
    """
    out_features, in_features = shape
    sides = ((Space.INPUT, "v1", v1_mean, in_features), (Space.OUTPUT, "u1", u1_mean, out_features))
    verdict, best, texts = Space.NONE, 0.0, []
    for space, symbol, mean, width in sides:
        if mean is None:
            texts.append(f"{symbol} unknown")
            continue
        level = spectra.random_cosine(width)
        needed = min(RANDOM_MULTIPLE * level, level + RANDOM_TO_ONE * (1.0 - level))
        texts.append(
            f"{symbol} {mean:.3f} is {mean / level:.1f} x random, shared from {needed:.3f} "
            f"({needed / level:.1f} x)"
        )
        if mean >= needed and mean > best:
            verdict, best = space, mean
    return verdict, "; ".join(texts)


def _open(
    source: "WeightSource | LoadedModel | PreTrainedModel | str | Path",
    revision: str | None,
    cache_dir: str | Path | None,
) -> "tuple[WeightSource, str]":
    """Return where to read weights from, with the model's name."""
    from gccompress.models import LoadedModel
    from gccompress.shards import WeightStream, open_stream
    from gccompress.view import ModelView

    if isinstance(source, str | Path):
        source = open_stream(source, revision=revision, cache_dir=cache_dir)
    if isinstance(source, WeightStream):
        return source, source.name
    if isinstance(source, LoadedModel):
        return ModelView(source.model), source.source.name
    view = source if isinstance(source, ModelView) else ModelView(source)  # type: ignore[arg-type]
    return view, view.model.config.name_or_path or type(view.model).__name__


def _hash(source: object, weights: "WeightSource") -> str | None:
    """Return the hash of the model measured; a bare view has none."""
    from gccompress.models import LoadedModel, open_model
    from gccompress.shards import WeightStream
    from gccompress.view import ModelView

    if isinstance(weights, WeightStream):
        return weights.hash
    if isinstance(source, ModelView):
        return None
    loaded = source if isinstance(source, LoadedModel) else open_model(source)  # type: ignore[arg-type]
    return loaded.source.hash


def _kept_path(
    weights: "WeightSource", settings: "Settings", cache_dir: str | Path | None
) -> Path | None:
    """Return where the finished pairs of a model on disk are kept; None for one in memory."""
    from gccompress.all_pairs import kept_path
    from gccompress.shards import WeightStream

    if not isinstance(weights, WeightStream):
        return None
    return kept_path(cache_folder(cache_dir) / "continuity" / "pairs", weights.files, settings)


def _role_continuity(
    weights: "WeightSource", role: Role, pairs: list[tuple[PairMetrics, ...]]
) -> RoleContinuity:
    """Gather a role's pairs, raw first and folded second where there is a second."""
    shape = weights.shape(role, 0)
    has_folded = bool(pairs) and len(pairs[0]) == 2
    raw = _measures([pair[0] for pair in pairs], shape)
    return RoleContinuity(
        **{name: getattr(raw, name) for name in Measures.model_fields},
        shape=shape,
        random_v1=spectra.random_cosine(shape[1]),
        random_u1=spectra.random_cosine(shape[0]),
        folded=_measures([pair[1] for pair in pairs], shape) if has_folded else None,
    )


def _measures(pairs: list[PairMetrics], shape: tuple[int, int]) -> Measures:
    """Turn pairs into lists with their means, and judge them."""
    lists = {name: [getattr(pair, name) for pair in pairs] for name in _PER_PAIR}
    means = {f"{name}_mean": _mean(lists[name]) for name in _MEANS}
    errors = {
        f"{name}_mean_error": mean_error(lists[f"{name}_error"]) for name in ("gram_in", "gram_out")
    }
    verdict, rule = judge(means["v1_mean"], means["u1_mean"], shape)
    if not pairs:
        rule = "one layer, no adjacent pairs to compare"
    count = sum(pair.degenerate for pair in pairs)
    if count:
        rule += f"; {count} of {len(pairs)} pairs degenerate, left out"
    angles = {str(count): _angles(pairs, index, shape) for index, count in enumerate(ANGLE_COUNTS)}
    return Measures.model_validate(
        {
            **lists, **means, **errors, "angles": angles, "verdict": verdict, "rule": rule,
            "gap": [pair.gaps[0] for pair in pairs] + [pair.gaps[1] for pair in pairs[-1:]],
            "residual": [pair.residuals[0] for pair in pairs]
            + [pair.residuals[1] for pair in pairs[-1:]],
        }
    )  # fmt: skip


def _angles(pairs: list[PairMetrics], index: int, shape: tuple[int, int]) -> AngleCosines:
    count = ANGLE_COUNTS[index]
    cos_in = [pair.angles_in[index] for pair in pairs]
    cos_out = [pair.angles_out[index] for pair in pairs]
    return AngleCosines(
        cos_in=cos_in,
        cos_out=cos_out,
        cos_in_mean=_mean(cos_in),
        cos_out_mean=_mean(cos_out),
        random_in=spectra.random_angle_cosine(count, shape[1]),
        random_out=spectra.random_angle_cosine(count, shape[0]),
    )


def _mean(values: list[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process; None where it is not counted."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
