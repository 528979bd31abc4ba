"""Geometric continuity of a model: what adjacent layers share, per role and in which space."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from gccompress import spectra
from gccompress.errors import GccompressError, NumericalError
from gccompress.files import new_file, write_text
from gccompress.progress import track
from gccompress.roles import Role, Space
from gccompress.spectra import Spectrum
from gccompress.view import ModelView

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

    from gccompress.models import LoadedModel

ANGLE_COUNTS = (8, 32)

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


@dataclass(frozen=True)
class PairMetrics:
    """One role in two adjacent layers; None where it cannot be measured (zero weight, low rank).

    Attributes:
        v1: `|cos|` of the leading right singular vectors (input space).
        u1: `|cos|` of the leading left singular vectors (output space).
        gram_in: sigma^2-weighted alignment of all right vectors, a multiple of random (`1 / in`).
        gram_out: the same of all left vectors, a multiple of random (`1 / out`).
        sigma2_in: `sum_i w_i |<v_i, v'_i>|`, `w_i = s_i^2 / sum s^2`.
        sigma2_out: the same of the left vectors.
        angles_in: mean cosine of the principal angles, one per `ANGLE_COUNTS`, input space.
        angles_out: the same in the output space.
    """

    v1: float | None
    u1: float | None
    gram_in: float | None
    gram_out: float | None
    sigma2_in: float | None
    sigma2_out: float | None
    angles_in: tuple[float | None, ...]
    angles_out: tuple[float | None, ...]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AngleCosines(_Record):
    """Mean cosine of the principal angles between the leading k directions of adjacent layers."""

    cos_in: list[float | None]
    cos_out: list[float | None]
    cos_in_mean: float | None
    cos_out_mean: float | None
    random_in: float | None
    random_out: float | None


class Measures(_Record):
    """The measures of one role: lists hold one value per adjacent pair, see `PairMetrics`."""

    v1: list[float | None]
    u1: list[float | None]
    gram_in: list[float | None]
    gram_out: list[float | None]
    sigma2_in: list[float | None]
    sigma2_out: list[float | None]
    v1_mean: float | None
    u1_mean: float | None
    gram_in_mean: float | None
    gram_out_mean: float | None
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
        seconds: wall time of the measurement, loading excluded.
        peak_rss_bytes: peak resident memory of the process so far; None where unknown.
    """

    version: Literal[1] = 1
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


@dataclass(frozen=True)
class _Layer:
    """A weight `[out, in]` with its spectrum."""

    weight: Tensor
    spectrum: Spectrum


def pair_metrics(first: Tensor, second: Tensor) -> PairMetrics:
    """Measure two weights `[out, in]` of one role in adjacent layers.

    A side on which the shapes differ is not measured. Formulas: METHOD section 1 (`spectra`).
    """
    return _compare(
        _Layer(first, spectra.decompose(first)), _Layer(second, spectra.decompose(second))
    )


def analyze(
    source: "ModelView | LoadedModel | PreTrainedModel | str | Path",
    *,
    folded: bool = True,
    device: str = "auto",
    progress: bool = True,
    cache_dir: str | Path | None = None,
) -> ContinuityReport:
    """Measure the continuity of every role over all adjacent pairs of layers.

    Works on two layers of one role at a time, in fp64; the model is not changed.

    Args:
        source: a view, or anything `models.open_model` takes: a name, a path, a loaded model.
        folded: measure in the coordinates of the residual stream too (see `RoleContinuity`).
        device: where to compute; the model stays where it is.
        progress: show a bar on a terminal.
        cache_dir: where models are kept once fetched or converted.

    Raises:
        ModelError: the model cannot be had, or is of no supported kind.
        NumericalError: a weight or norm scale holds NaN or inf; says which.
    """
    from gccompress.models import pick_device

    view, name, model_hash = _open(source, cache_dir)
    compute = pick_device(device)
    started = time.perf_counter()
    steps: Iterable[tuple[Role, int]]
    steps = [(role, layer) for role in view.roles for layer in range(view.num_layers)]
    pairs: dict[Role, list[tuple[PairMetrics, ...]]] = {role: [] for role in view.roles}
    previous: tuple[_Layer, ...] = ()
    for role, layer in track(steps, "continuity") if progress else steps:
        current = _read(view, role, layer, folded, compute)
        if layer > 0:
            compared = (_compare(a, b) for a, b in zip(previous, current, strict=True))
            pairs[role].append(tuple(compared))
        previous = current
    roles = {role: _role_continuity(view, role, pairs[role], folded) for role in view.roles}
    return ContinuityReport(
        model=name,
        model_hash=model_hash,
        num_layers=view.num_layers,
        roles=roles,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=_peak_rss_bytes(),
    )


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
    source: "ModelView | LoadedModel | PreTrainedModel | str | Path", cache_dir: str | Path | None
) -> tuple[ModelView, str, str | None]:
    """Return a view with the model's name and hash; a bare view has no hash."""
    if isinstance(source, ModelView):
        config = source.model.config
        return source, config.name_or_path or type(source.model).__name__, None
    from gccompress.models import open_model

    # On the CPU: only two matrices at a time are needed on the device that computes.
    loaded = open_model(source, device="cpu", cache_dir=cache_dir)
    return ModelView(loaded.model), loaded.source.name, loaded.source.hash


def _read(
    view: ModelView, role: Role, layer: int, folded: bool, device: torch.device
) -> tuple[_Layer, ...]:
    """Return a layer's weight raw and, if asked and if a norm stands beside it, folded."""
    weight = view.weight(role, layer).to(device, torch.float64)
    _refuse_non_finite(weight, f"layer {layer} {role}: weight")
    layers = [_Layer(weight, spectra.decompose(weight))]
    before, after = view.in_scale(role, layer), view.out_scale(role, layer)
    if folded and not (before is None and after is None):
        if before is not None:
            _refuse_non_finite(before, f"layer {layer} {role}: scale of the norm before it")
            weight = weight * before.to(weight)
        if after is not None:
            _refuse_non_finite(after, f"layer {layer} {role}: scale of the norm after it")
            weight = after.to(weight)[:, None] * weight
        layers.append(_Layer(weight, spectra.decompose(weight)))
    return tuple(layers)


def _refuse_non_finite(tensor: Tensor, what: str) -> None:
    bad = tensor.numel() - int(tensor.isfinite().sum())
    if bad:
        raise NumericalError(
            f"{what} has {bad} of {tensor.numel()} values NaN or inf, wanted finite numbers; "
            "the model's files are damaged, fetch them again"
        )


def _compare(first: _Layer, second: _Layer) -> PairMetrics:
    """Measure two decomposed layers; a side on which their shapes differ gives None."""
    a, b = first.spectrum, second.spectrum
    out_side, in_side = (
        x == y for x, y in zip(first.weight.shape, second.weight.shape, strict=True)
    )
    v1, gram_in, sigma2_in, angles_in = (
        _side(a.values, a.right, b.right, first.weight, second.weight) if in_side else _UNKNOWN
    )
    u1, gram_out, sigma2_out, angles_out = (
        _side(a.values, a.left, b.left, first.weight.T, second.weight.T) if out_side else _UNKNOWN
    )
    return PairMetrics(
        v1=v1,
        u1=u1,
        gram_in=gram_in,
        gram_out=gram_out,
        sigma2_in=sigma2_in,
        sigma2_out=sigma2_out,
        angles_in=angles_in,
        angles_out=angles_out,
    )


_Side = tuple[float | None, float | None, float | None, tuple[float | None, ...]]
_UNKNOWN: _Side = (None, None, None, (None,) * len(ANGLE_COUNTS))


def _side(
    values: Tensor, basis: Tensor, next_basis: Tensor, rows: Tensor, next_rows: Tensor
) -> _Side:
    """Measure one space: bases `[d, rank]` of the singular vectors, weights as rows `[n, d]`."""
    alignment = spectra.gram_alignment(rows, next_rows)
    return (
        spectra.leading_cosine(basis, next_basis),
        None if alignment is None else alignment * rows.shape[1],
        spectra.matched_alignment(values, basis, next_basis),
        tuple(spectra.mean_angle_cosine(basis, next_basis, count) for count in ANGLE_COUNTS),
    )


def _role_continuity(
    view: ModelView, role: Role, pairs: list[tuple[PairMetrics, ...]], folded: bool
) -> RoleContinuity:
    """Gather a role's pairs, raw first and folded second where there is a second."""
    shape = view.shape(role, 0)
    has_folded = folded and bool(pairs) and len(pairs[0]) == 2
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
    names = ("v1", "u1", "gram_in", "gram_out", "sigma2_in", "sigma2_out")
    lists = {name: [getattr(pair, name) for pair in pairs] for name in names}
    means = {f"{name}_mean": _mean(values) for name, values in lists.items()}
    verdict, rule = judge(means["v1_mean"], means["u1_mean"], shape)
    if not pairs:
        rule = "one layer, no adjacent pairs to compare"
    angles = {}
    for index, count in enumerate(ANGLE_COUNTS):
        cos_in = [pair.angles_in[index] for pair in pairs]
        cos_out = [pair.angles_out[index] for pair in pairs]
        angles[str(count)] = AngleCosines(
            cos_in=cos_in,
            cos_out=cos_out,
            cos_in_mean=_mean(cos_in),
            cos_out_mean=_mean(cos_out),
            random_in=spectra.random_angle_cosine(count, shape[1]),
            random_out=spectra.random_angle_cosine(count, shape[0]),
        )
    return Measures.model_validate(
        {**lists, **means, "angles": angles, "verdict": verdict, "rule": rule}
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
