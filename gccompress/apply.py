"""Plan + model + moments -> compressed model, one function per kind of move; then to disk, checked.

The model is reloaded from what was written and compared before the output folder appears.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from torch import Tensor

import gccompress
from gccompress import linalg
from gccompress.calibration import recall
from gccompress.checkpoints import (
    checkpoint_bytes,
    compress_in_place,
    reload_difference,
    save_checkpoint,
)
from gccompress.errors import CheckpointError, PlanError
from gccompress.files import cache_folder, new_folder, refuse_non_empty
from gccompress.linalg import Damping, Factors, alone_space
from gccompress.models import LoadedModel, open_model, stored_dtype
from gccompress.moments import Moments, weighted
from gccompress.plan import (
    AnyMove,
    DropLayers,
    LowRank,
    Plan,
    ShareInput,
    ShareOutput,
    move_matrices,
    plan_params,
)
from gccompress.progress import track
from gccompress.roles import Role, Space
from gccompress.view import ModelView, model_shape

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """What a plan's moves give, before the model is touched.

    Attributes:
        layout: what `config.gccompress` will say, layers numbered after dropping.
        tensors: parameters of the new modules, by full name.
        jitter: largest share of a moment's mean diagonal that had to be added (0: none).
    """

    layout: dict[str, Any]
    tensors: dict[str, Tensor]
    jitter: float


def factor_move(
    view: ModelView,
    moments: Moments,
    move: LowRank | ShareInput | ShareOutput,
    damping: Damping,
) -> Factors:
    """Return the factors of a move, matrices in the order of `move_matrices`.

    Raises:
        NumericalError: a factorisation that fails, naming layer and role.
    """
    matrices = move_matrices(move)
    group = [weighted(view, moments, role, layer, damping) for role, layer in matrices]
    what = f"layer {matrices[0][1]} {matrices[0][0]}"
    match move:
        case LowRank():
            space = alone_space(view.shape(move.role, move.layer))
        case ShareInput():
            space = Space.INPUT
        case ShareOutput():
            space = Space.OUTPUT
        case _:
            assert_never(move)
    return linalg.factor(group, space, move.rank, what)


def factor_moves(
    view: ModelView, moments: Moments | None, moves: tuple[AnyMove, ...], damping: Damping
) -> Iterator[tuple[LowRank | ShareInput | ShareOutput, Factors]]:
    """Yield every factoring move with its factors, one at a time, so that memory stays bounded."""
    factoring = [move for move in moves if not isinstance(move, DropLayers)]
    if factoring and moments is None:
        raise PlanError("the plan factors matrices, which needs calibration moments; none given")
    for move in track(factoring, "Factoring (moves)") if factoring else ():
        assert moments is not None  # noqa: S101 - checked above
        yield move, factor_move(view, moments, move, damping)


@contextmanager
def applied(
    view: ModelView, moments: Moments | None, moves: tuple[AnyMove, ...], damping: Damping
) -> Iterator[None]:
    """Make the model compute as the plan would, in memory, and put it back afterwards.

    Weights become the products of their factors; a dropped layer passes its input on. Takes the
    memory of the replaced weights once more, and changes no module.
    """
    originals: list[tuple[Role, int, Tensor]] = []
    with ExitStack() as stack:
        try:
            for move, factors in factor_moves(view, moments, moves, damping):
                for index, (role, layer) in enumerate(move_matrices(move)):
                    originals.append((role, layer, view.weight(role, layer).clone()))
                    view.set_weight(role, layer, factors.product(index))
            for drop in moves:
                for layer in drop.layers if isinstance(drop, DropLayers) else ():
                    hook = view.layer(layer).register_forward_hook(_pass_input_on)
                    stack.callback(hook.remove)
            yield
        finally:
            for role, layer, weight in originals:
                view.set_weight(role, layer, weight)


def build(view: ModelView, moments: Moments | None, plan: Plan, damping: Damping) -> Built:
    """Return the modules and parameters that a plan's moves give, in the model's dtype."""
    dropped = {
        layer for move in plan.moves if isinstance(move, DropLayers) for layer in move.layers
    }
    renumbered = {
        layer: index
        for index, layer in enumerate(i for i in range(view.num_layers) if i not in dropped)
    }
    bases: dict[str, dict[str, int]] = {}
    specs: dict[tuple[Role, int], tuple[dict[str, Any], dict[str, Tensor]]] = {}
    shared: dict[str, Tensor] = {}
    jitter = 0.0
    for move, factors in factor_moves(view, moments, plan.moves, damping):
        jitter = max(jitter, factors.jitter)
        matrices = move_matrices(move)
        if not isinstance(move, LowRank):
            key = f"{'_'.join(move.roles)}_{move.layers[0]}_{move.layers[-1]}"
            rows, cols = factors.basis.shape
            bases[key] = {"in": cols, "out": rows}
            shared[f"gccompress_bases.{key}.weight"] = factors.basis
        for index, (role, layer) in enumerate(matrices):
            bias = view.bias(role, layer)
            if isinstance(move, LowRank):
                specs[role, layer] = _low_rank(factors, bias)
            else:
                specs[role, layer] = _shared(factors, index, key, bias)
    layout: dict[str, Any] = {"version": 1, "bases": bases, "modules": {}}
    tensors = dict(shared)
    for name, spec, parts in _modules(view, specs, renumbered):
        layout["modules"][name] = spec
        tensors |= {f"{name}.{key}": value for key, value in parts.items()}
    dtype = view.model.dtype
    return Built(
        layout if layout["modules"] else {},
        {key: value.to(dtype).contiguous() for key, value in tensors.items()},
        jitter,
    )


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
    model = compress_in_place(view.model, built.layout, built.tensors)
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != params:
        raise CheckpointError(
            f"compressed model has {found} parameters, the plan's arithmetic says {params}; "
            "this is a fault of gccompress, nothing was written"
        )
    return model, built.jitter


def damping_of(plan: Plan) -> Damping:
    """Return the damping that a plan records."""
    return Damping(
        a=float(plan.options.get("damping_a") or 0.0), g=float(plan.options.get("damping_g") or 0.0)
    )


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
    """

    model: Any
    path: Path | None
    params_before: int
    params_after: int
    bytes_after: int | None
    reload_max_abs_diff: float | None
    jitter: float

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress apply --json` prints."""
        return {
            "path": None if self.path is None else str(self.path),
            "params_before": self.params_before,
            "params_after": self.params_after,
            "bytes_after": self.bytes_after,
            "reload_max_abs_diff": self.reload_max_abs_diff,
            "jitter": self.jitter,
        }

    def table(self) -> "Table":
        """Return the sizes and the check as a table."""
        from rich.table import Table

        table = Table(title=f"Checkpoint {self.path}", title_justify="left", show_header=False)
        table.add_row("parameters before", f"{self.params_before:,}")
        table.add_row("parameters after", f"{self.params_after:,}")
        table.add_row("bytes of the weights", f"{self.bytes_after:,}")
        table.add_row("largest logit difference after reloading", f"{self.reload_max_abs_diff:.3g}")
        if self.jitter:
            table.add_row("largest damping added to a moment", f"{self.jitter:.0e} of its diagonal")
        return table


def apply_plan(
    plan: Plan | str | Path,
    model: Any = None,
    out: str | Path | None = None,
    *,
    allow_other_model: bool = False,
    device: str = "auto",
    dtype: str | None = None,
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
        device: where to compute.
        dtype: number type to compute in; weights are stored in the type the model was stored in.
        cache_dir: where the moments are looked for.
        trust_remote_code: run code that the model's folder brings.

    Raises:
        PlanError: another model, or moves that do not fit it.
        GccompressError: the output folder is not empty, moments cannot be made again, ...
        CheckpointError: the checkpoint does not reload as it was; nothing is left behind.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    path = None if out is None else Path(out)
    if path is not None:
        refuse_non_empty(path)
    cache = cache_folder(cache_dir)
    loaded = open_model(
        plan.model.name if model is None else model,
        device=device,
        dtype=dtype,
        revision=plan.model.revision if model is None else None,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
    )
    other = loaded.source.hash != plan.model.hash
    if other and not allow_other_model:
        raise PlanError(
            f"the plan is for {plan.model.name} ({plan.model.hash[:19]}), this is "
            f"{loaded.source.name} ({loaded.source.hash[:19]}); make a plan for it, or pass "
            "--allow-other-model"
        )
    if other:
        logger.warning("the plan was made for another model (%s)", plan.model.name)
    view = ModelView(loaded.model)
    if view.num_layers != plan.model.layers:
        raise PlanError(
            f"the plan is for {plan.model.layers} layers, {loaded.source.name} has "
            f"{view.num_layers}; make a plan for it"
        )
    before = model_shape(view).total_params
    factoring = any(not isinstance(move, DropLayers) for move in plan.moves)
    moments = None
    if factoring:
        if plan.calibration is None:
            raise PlanError("the plan factors matrices but names no calibration; make it again")
        moments = recall(loaded, view, plan.calibration, cache)
    compressed, jitter = compress(view, moments, plan)
    compressed.to(stored_dtype(loaded))
    after = sum(parameter.numel() for parameter in compressed.parameters())
    written = difference = None
    if path is not None:
        files = {"plan.yaml": plan.to_yaml(), "gccompress.json": _provenance(plan, loaded, other)}
        difference = write_checkpoint(compressed, loaded.tokenizer, path, files)
        written = checkpoint_bytes(path)
    return Applied(compressed, path, before, after, written, difference, jitter)


def _provenance(plan: Plan, loaded: LoadedModel, other: bool) -> str:
    """Return what is recorded beside the weights: base model, plan, versions."""
    record = {
        "base_model": loaded.source.name,
        "base_model_hash": loaded.source.hash,
        "plan_model_hash": plan.model.hash,
        "allowed_other_model": other,
        "plan_sha256": hashlib.sha256(plan.to_yaml().encode()).hexdigest(),
        "versions": {name: version(name) for name in ("torch", "transformers")}
        | {"gccompress": gccompress.__version__},
    }
    return json.dumps(record, indent=1)


def write_checkpoint(
    model: Any, tokenizer: Any, out: Path, extra_files: Mapping[str, str]
) -> float:
    """Write a model atomically, reload it, and return the largest logit difference to memory.

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
    return difference


def _low_rank(factors: Factors, bias: Tensor | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the spec and parameters of one matrix factored alone."""
    if factors.space is Space.INPUT:
        up, down = factors.coefs[0], factors.basis
    else:
        up, down = factors.basis, factors.coefs[0]
    spec = {
        "kind": "low_rank",
        "in": down.shape[1],
        "out": up.shape[0],
        "rank": down.shape[0],
        "bias": bias is not None,
    }
    tensors = {"down.weight": down, "up.weight": up}
    return spec, tensors | ({} if bias is None else {"up.bias": bias})


def _shared(
    factors: Factors, index: int, key: str, bias: Tensor | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the spec and parameters of one user of a shared basis."""
    coef = factors.coefs[index]
    spec: dict[str, Any] = {"basis": key, "bias": bias is not None}
    if factors.space is Space.INPUT:
        spec |= {"kind": "shared_in", "out": coef.shape[0]}
        name = "coef.bias"
    else:
        spec |= {"kind": "shared_out", "in": coef.shape[1]}
        name = "bias"
    return spec, {"coef.weight": coef} | ({} if bias is None else {name: bias})


def _modules(
    view: ModelView,
    specs: Mapping[tuple[Role, int], tuple[dict[str, Any], dict[str, Tensor]]],
    renumbered: Mapping[int, int],
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Yield the full name after dropping, spec and parameters of every module to replace.

    A fused weight of which any role is replaced becomes its roles side by side.
    """
    done: set[str] = set()
    for role, layer in specs:
        site = view.site(role, layer)
        if site.module in done:
            continue
        done.add(site.module)
        name = site.module.replace(f".{layer}.", f".{renumbered[layer]}.", 1)
        if not site.fused:
            spec, tensors = specs[role, layer]
            yield name, spec, tensors
            continue
        parts: list[dict[str, Any]] = []
        tensors = {}
        for number, (part, _, _) in enumerate(site.parts):
            spec, mine = specs.get((part, layer)) or _dense(view, part, layer)
            parts.append(spec)
            tensors |= {f"parts.{number}.{key}": value for key, value in mine.items()}
        yield name, {"kind": "concat", "parts": parts}, tensors


def _dense(view: ModelView, role: Role, layer: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the spec and parameters of a role that stays as it is beside factored ones."""
    weight, bias = view.weight(role, layer).clone(), view.bias(role, layer)
    rows, cols = weight.shape
    spec = {"kind": "dense", "in": cols, "out": rows, "bias": bias is not None}
    return spec, {"weight": weight} | ({} if bias is None else {"bias": bias.clone()})


def _pass_input_on(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
