"""Plan + model + moments -> compressed model, one function per kind of move; then to disk, checked.

The model is reloaded from what was written and compared before the output folder appears.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gccompress
from gccompress.calibration import calibrate, options_of_record, recall
from gccompress.card import CARD, Sizes, model_card
from gccompress.checkpoints import (
    checkpoint_bytes,
    compress_in_place,
    reload_difference,
    save_checkpoint,
)
from gccompress.errors import CheckpointError, PlanError
from gccompress.files import cache_folder, new_folder, refuse_non_empty
from gccompress.linalg import Damping
from gccompress.modeling import LAYOUT
from gccompress.models import LoadedModel, stored_dtype
from gccompress.moments import Moments
from gccompress.moves import build, set_mlp_width
from gccompress.plan import DropLayers, Plan, ResizeMlp, plan_params
from gccompress.plan_file import PlanFile
from gccompress.planned import open_planned
from gccompress.polish import Polished, PolishOptions, replaced_parameters
from gccompress.polish import polish as train_polish
from gccompress.text import Windows
from gccompress.verification import PLAN, RECORD, hash_files
from gccompress.view import ModelView, model_shape

if TYPE_CHECKING:
    from rich.table import Table


def compress(view: ModelView, moments: Moments | None, plan: Plan) -> tuple[Any, float]:
    """Return the compressed model (the view's own model, changed in place) and the jitter used.

    Raises:
        PlanError: the plan does not fit the model, or its sizes are not what the result has.
    """
    _, params = plan_params(plan.moves, model_shape(view))
    built = build(view, moments, plan, damping_of(plan))
    for move in plan.moves:
        if isinstance(move, DropLayers):
            view.drop_layers(move.layers)
    width = _common_width(plan)
    if width is None:
        model = compress_in_place(view.model, built.layout, built.tensors)
    else:
        model = view.model
        set_mlp_width(view, width, built.layout["modules"], built.tensors)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != params:
        raise CheckpointError(
            f"compressed model has {found} parameters, the plan's arithmetic says {params}; "
            "this is a fault of gccompress, nothing was written"
        )
    return model, built.jitter


def _common_width(plan: Plan) -> int | None:
    """Return the width of every MLP left, when that is all the plan changes; None otherwise.

    Such a model is of its own family, with another number in its config.
    """
    dropped = {
        layer for move in plan.moves if isinstance(move, DropLayers) for layer in move.layers
    }
    widths: dict[int, int] = {}
    for move in plan.moves:
        if isinstance(move, ResizeMlp):
            widths[move.layer] = move.width
        elif not isinstance(move, DropLayers):
            return None
    everywhere = len(widths) + len(dropped) == plan.model.layers
    return widths.popitem()[1] if everywhere and len(set(widths.values())) == 1 else None


def damping_of(plan: Plan) -> Damping:
    """Return the damping that a plan records. Raises `PlanError` when it is no share."""
    shares: list[float] = []
    for name in ("damping_a", "damping_g"):
        share = plan.options.get(name) or 0.0
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise PlanError(f"plan: options.{name} is {share!r}; wanted a share in [0, 1)")
        shares.append(float(share))
    return Damping(*shares)


@dataclass(frozen=True)
class Applied:
    """A compressed model and, when it was written, its checkpoint.

    Attributes:
        model: the compressed model, in memory.
        path: the checkpoint's folder, or None.
        params_before: parameters of the dense model, tied ones once.
        params_after: of the compressed one.
        bytes_after: bytes of the weight files, or None.
        reload_max_abs_diff: largest logit difference between memory and the reloaded checkpoint.
        jitter: largest share of a moment's mean diagonal added to factor it (0: none).
        polished: what polishing did, when it was asked for.
    """

    model: Any
    path: Path | None
    params_before: int
    params_after: int
    bytes_after: int | None
    reload_max_abs_diff: float | None
    jitter: float
    polished: Polished | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress apply --json` prints."""
        return {
            "path": None if self.path is None else str(self.path),
            "params_before": self.params_before,
            "params_after": self.params_after,
            "bytes_after": self.bytes_after,
            "reload_max_abs_diff": self.reload_max_abs_diff,
            "jitter": self.jitter,
            "polished": None if self.polished is None else asdict(self.polished),
        }

    def table(self) -> "Table":
        """Return the sizes and the check as a table."""
        from rich.table import Table

        table = Table(title=f"Checkpoint {self.path}", title_justify="left", show_header=False)
        table.add_row("parameters before", f"{self.params_before:,}")
        table.add_row("parameters after", f"{self.params_after:,}")
        table.add_row("bytes of the weights", f"{self.bytes_after:,}")
        table.add_row("largest logit difference after reloading", f"{self.reload_max_abs_diff:.3g}")
        if self.polished is not None:
            one = self.polished
            change = f"{one.before:.4f} -> {one.after:.4f} nats/token, best at step {one.best_step}"
            table.add_row("polish: held-out KL to the dense model", change)
        if self.jitter:
            table.add_row("largest damping added to a moment", f"{self.jitter:.0e} of its diagonal")
        return table


def apply_plan(
    plan: Plan | str | Path,
    model: Any = None,
    out: str | Path | None = None,
    *,
    allow_other_model: bool = False,
    polish: PolishOptions | None = None,
    device: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    cache_dir: str | None = None,
    trust_remote_code: bool = False,
) -> Applied:
    """Carry out a plan on its model; with `out`, write the checkpoint, reload it and compare.

    Args:
        plan: a plan or the path of one.
        model: where the model is (path, alias, hub id, in memory); None: where the plan found it.
            A model in memory is turned into the compressed one, in place.
        out: folder for the checkpoint, new or empty.
        allow_other_model: accept a model whose hash is not the plan's (recorded in the checkpoint).
        polish: train what the plan replaces for a few steps on the calibration text, against the
            dense model, which is then in memory too; None leaves the closed form.
        device: where to compute.
        dtype: number type to compute in; weights are stored in the type the model was stored in.
        revision: of a hub model; None: the plan's own, where `model` is None too.
        cache_dir: where the moments are looked for.
        trust_remote_code: run code that the model's folder brings.

    Raises:
        PlanError: another model, or moves that do not fit it.
        GccompressError: the output folder is not empty, moments cannot be made again, ...
        CheckpointError: the checkpoint does not reload as it was; nothing is left behind.
    """
    file = PlanFile.open(plan)
    plan = file.plan
    path = None if out is None else Path(out)
    if path is not None:
        refuse_non_empty(path)
    cache = cache_folder(cache_dir)
    opened = open_planned(
        plan,
        model,
        allow_other_model=allow_other_model,
        device=device,
        dtype=dtype,
        revision=revision,
        cache=cache,
        trust_remote_code=trust_remote_code,
    )
    loaded, view, other = opened.loaded, opened.view, opened.other
    shape = model_shape(view)
    damping_of(plan)  # what does not fit is found before calibrating
    file.check_sizes(shape)
    before = shape.total_params
    factoring = any(not isinstance(move, DropLayers) for move in plan.moves)
    moments = None
    if factoring:
        record = plan.calibration
        if record is None:
            raise PlanError(
                "the plan factors matrices but names no calibration: it orders moves by weights "
                "alone; make it again without --no-calibration"
            )
        if other:  # another model has moments of its own
            moments = calibrate(loaded, view, options_of_record(record), cache).moments
        else:
            moments = recall(loaded, view, record, cache)
    dense = None if polish is None else copy.deepcopy(view.model)
    text = None if polish is None else _polish_text(plan, loaded, view, cache)
    compressed, jitter = compress(view, moments, plan)
    polished = None
    if polish is not None and text is not None:
        trained = replaced_parameters(compressed, dense)
        windows, heldout = text
        polished = train_polish(
            compressed, dense, trained, windows=windows, heldout=heldout, options=polish
        )
    compressed.to(stored_dtype(loaded))
    after = sum(parameter.numel() for parameter in compressed.parameters())
    written = difference = None
    if path is not None:
        provenance = _provenance(plan, loaded, other)
        provenance["polished"] = None if polished is None else asdict(polished)
        stored = sum(p.numel() * p.element_size() for p in compressed.parameters())
        card = model_card(
            plan,
            loaded.source,
            Sizes(before, after, stored),
            compressed=hasattr(compressed.config, LAYOUT),
        )
        files = {PLAN: plan.to_yaml(), CARD: card}
        difference = write_checkpoint(compressed, loaded.tokenizer, path, provenance, files)
        written = checkpoint_bytes(path)
    return Applied(compressed, path, before, after, written, difference, jitter, polished)


def _polish_text(
    plan: Plan, loaded: LoadedModel, view: ModelView, cache: Path
) -> tuple[Windows, Windows]:
    """Return the plan's calibration windows and those held out from them."""
    if plan.calibration is None:
        raise PlanError("the plan names no calibration, whose text polishing needs; plan again")
    again = calibrate(loaded, view, options_of_record(plan.calibration), cache)
    return again.windows, again.heldout


def _provenance(plan: Plan, loaded: LoadedModel, other: bool) -> dict[str, Any]:
    """Return what is recorded beside the weights: base model, plan, versions."""
    return {
        "base_model": loaded.source.name,
        "base_model_hash": loaded.source.hash,
        "plan_model_hash": plan.model.hash,
        "allowed_other_model": other,
        "plan_sha256": hashlib.sha256(plan.to_yaml().encode()).hexdigest(),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"gccompress": gccompress.__version__},
    }


def write_checkpoint(
    model: Any,
    tokenizer: Any,
    out: Path,
    record: Mapping[str, Any],
    extra_files: Mapping[str, str],
) -> float:
    """Write a model atomically, reload it, and return the largest logit difference to memory.

    `record`, with that difference and the files' hashes, becomes `gccompress.json` in the folder.

    Raises:
        GccompressError: `out` is not empty, or the disk refuses.
        CheckpointError: the reloaded model differs by more than rounding; nothing is left behind.
    """
    with new_folder(out) as temporary:
        save_checkpoint(model, tokenizer, temporary, extra_files=extra_files)
        difference = reload_difference(model, temporary)
        tolerance = 1e-4 if model.dtype == torch.float32 else 1e-1
        if difference > tolerance:
            raise CheckpointError(
                f"the checkpoint for {out} reloads with logits off by {difference:.3g}, allowed "
                f"{tolerance:g}; nothing was written"
            )
        checked = {
            **record,
            "reload_max_abs_diff": difference,
            "files": hash_files(temporary),
        }
        (temporary / RECORD).write_text(json.dumps(checked, indent=1), "utf-8")
    return difference
