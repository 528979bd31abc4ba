"""What each kind of move does to weights: in memory for a probe, or as modules for a checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from gccompress import linalg
from gccompress.errors import PlanError
from gccompress.linalg import Damping, Factors, alone_space
from gccompress.moments import Moments, weighted
from gccompress.plan import (
    AnyMove,
    DropLayers,
    Factoring,
    LowRank,
    Plan,
    ResizeMlp,
    ShareInput,
    ShareOutput,
    move_matrices,
)
from gccompress.progress import track
from gccompress.roles import Role, Space
from gccompress.view import ModelView
from gccompress.width import order_neurons, refit


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


def factor_move(view: ModelView, moments: Moments, move: Factoring, damping: Damping) -> Factors:
    """Return the factors of a move, matrices in the order of `move_matrices`.

    Raises:
        NumericalError: a factorisation that fails, naming layer and role.
    """
    matrices = move_matrices(move)
    group = [weighted(view, moments, role, layer, damping) for role, layer in matrices]
    what = f"layer {matrices[0][1]} {matrices[0][0]}"
    return linalg.factor(group, move_space(view, move), move.rank, what)


def move_space(view: ModelView, move: Factoring) -> Space:
    """Return the side of its matrices on which a move has its basis."""
    match move:
        case LowRank():
            return alone_space(view.shape(move.role, move.layer))
        case ShareInput():
            return Space.INPUT
        case ShareOutput():
            return Space.OUTPUT
        case _:
            assert_never(move)


def narrow(
    view: ModelView, moments: Moments, move: ResizeMlp, damping: Damping
) -> tuple[Tensor, Tensor, float]:
    """Return the neurons that stay `[width]`, down's refitted weight `[hidden, width]`, jitter."""
    down = weighted(view, moments, Role.DOWN, move.layer, damping)
    what = f"layer {move.layer} {Role.DOWN}"
    order = order_neurons(down, what)
    kept = order.kept(move.width)
    return kept, refit(down, kept, what), order.jitter


def _steps(moves: tuple[AnyMove, ...], moments: Moments | None) -> Iterator[Factoring | ResizeMlp]:
    """Yield every move that needs moments, behind a progress bar."""
    needing = [move for move in moves if not isinstance(move, DropLayers)]
    if needing and moments is None:
        raise PlanError("the plan changes matrices, which needs calibration moments; none given")
    if needing:
        yield from track(needing, "Factoring (moves)")


@contextmanager
def applied(
    view: ModelView, moments: Moments | None, moves: tuple[AnyMove, ...], damping: Damping
) -> Iterator[None]:
    """Make the model compute as the plan would, in memory, and put it back afterwards.

    Weights become the products of their factors, a removed neuron's column of down zero; a dropped
    layer passes its input on. Takes the memory of the replaced weights once more, and changes no
    module.
    """
    originals: list[tuple[Role, int, Tensor]] = []

    def replace(role: Role, layer: int, weight: Tensor) -> None:
        originals.append((role, layer, view.weight(role, layer).clone()))
        view.set_weight(role, layer, weight)

    with ExitStack() as stack:
        try:
            for move in _steps(moves, moments):
                assert moments is not None  # noqa: S101 - checked by _steps
                if isinstance(move, ResizeMlp):
                    kept, weight, _ = narrow(view, moments, move, damping)
                    full = torch.zeros(view.shape(Role.DOWN, move.layer)).to(weight)
                    full[:, kept] = weight
                    replace(Role.DOWN, move.layer, full)
                    continue
                factors = factor_move(view, moments, move, damping)
                for index, (role, layer) in enumerate(move_matrices(move)):
                    replace(role, layer, factors.product(index))
            for drop in moves:
                for layer in drop.layers if isinstance(drop, DropLayers) else ():
                    hook = view.layer(layer).register_forward_hook(_pass_input_on)
                    stack.callback(hook.remove)
            yield
        finally:
            for role, layer, weight in originals:
                view.set_weight(role, layer, weight)


Piece = tuple[dict[str, Any], dict[str, Tensor]]  # a module's spec and its parameters


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
    pieces: dict[tuple[Role, int], Piece] = {}
    tensors: dict[str, Tensor] = {}
    jitter = 0.0
    for move in _steps(plan.moves, moments):
        assert moments is not None  # noqa: S101 - checked by _steps
        if isinstance(move, ResizeMlp):
            kept, weight, added = narrow(view, moments, move, damping)
            pieces |= _narrowed(view, move.layer, kept, weight)
            jitter = max(jitter, added)
            continue
        factors = factor_move(view, moments, move, damping)
        jitter = max(jitter, factors.jitter)
        key = ""
        if not isinstance(move, LowRank):
            key = f"{'_'.join(move.roles)}_{move.layers[0]}_{move.layers[-1]}"
            rows, cols = factors.basis.shape
            bases[key] = {"in": cols, "out": rows}
            tensors[f"gccompress_bases.{key}.weight"] = factors.basis
        for index, (role, layer) in enumerate(move_matrices(move)):
            bias = view.bias(role, layer)
            pieces[role, layer] = (
                _shared(factors, index, key, bias) if key else _low_rank(factors, bias)
            )
    modules: dict[str, Any] = {}
    for name, spec, parts in _modules(view, pieces, renumbered):
        modules[name] = spec
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
    dtype = view.model.dtype
    return Built(
        {"version": 1, "bases": bases, "modules": modules} if modules else {},
        {key: value.to(dtype).contiguous() for key, value in tensors.items()},
        jitter,
    )


def _low_rank(factors: Factors, bias: Tensor | None) -> Piece:
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


def _shared(factors: Factors, index: int, key: str, bias: Tensor | None) -> Piece:
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
    pieces: Mapping[tuple[Role, int], Piece],
    renumbered: Mapping[int, int],
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Yield the full name after dropping, spec and parameters of every module to replace.

    A fused weight of which any role is replaced becomes its roles side by side.
    """
    done: set[str] = set()
    for role, layer in pieces:
        site = view.site(role, layer)
        if site.module in done:
            continue
        done.add(site.module)
        name = site.module.replace(f".{layer}.", f".{renumbered[layer]}.", 1)
        if not site.fused and not (site.conv1d and pieces[role, layer][0]["kind"] == "dense"):
            yield name, *pieces[role, layer]
            continue
        parts: list[dict[str, Any]] = []
        tensors: dict[str, Tensor] = {}
        for number, (part, _, _) in enumerate(site.parts):
            spec, mine = pieces.get((part, layer)) or _dense(view, part, layer)
            parts.append(spec)
            tensors |= {f"parts.{number}.{key}": value for key, value in mine.items()}
        yield name, {"kind": "concat", "parts": parts}, tensors


def _dense(view: ModelView, role: Role, layer: int) -> Piece:
    """Return a role that stays as it is beside factored ones in a fused weight."""
    return _linear(view.weight(role, layer), view.bias(role, layer))


def _linear(weight: Tensor, bias: Tensor | None) -> Piece:
    """Return an ordinary linear map of any shape."""
    rows, cols = weight.shape
    spec = {"kind": "dense", "in": cols, "out": rows, "bias": bias is not None}
    tensors = {"weight": weight.clone()}
    return spec, tensors | ({} if bias is None else {"bias": bias.clone()})


def _narrowed(
    view: ModelView, layer: int, kept: Tensor, down: Tensor
) -> dict[tuple[Role, int], Piece]:
    """Return an MLP's roles with the kept neurons only."""
    pieces = {(Role.DOWN, layer): _linear(down, view.bias(Role.DOWN, layer))}
    for role in (Role.GATE, Role.UP):
        if role in view.roles:
            bias = view.bias(role, layer)
            pieces[role, layer] = _linear(
                view.weight(role, layer)[kept], None if bias is None else bias[kept]
            )
    return pieces


def set_mlp_width(
    view: ModelView, width: int, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Give every MLP of a plain model the same new width, in place: it stays of its family.

    `modules` and `tensors` are those of `Built`, of resized MLPs in all layers and nothing else.
    """
    for name, spec in modules.items():
        module = view.model.get_submodule(name)
        prefixes = [f"{name}."]
        if spec["kind"] == "concat":
            prefixes = [f"{name}.parts.{number}." for number in range(len(spec["parts"]))]
        weight = torch.cat([tensors[f"{prefix}weight"] for prefix in prefixes])
        rows, cols = weight.shape
        if isinstance(module, torch.nn.Linear):
            module.in_features, module.out_features = cols, rows
        else:  # transformers' Conv1D stores [in, out]
            module.nx, module.nf = cols, rows  # type: ignore[assignment]
            weight = weight.T.contiguous()
        module.weight = torch.nn.Parameter(weight)
        if module.bias is not None:
            bias = torch.cat([tensors[f"{prefix}bias"] for prefix in prefixes])
            module.bias = torch.nn.Parameter(bias)
        mlp = view.model.get_submodule(name.rpartition(".")[0])
        if "intermediate_size" in vars(mlp):
            mlp.intermediate_size = width  # type: ignore[assignment]
    setattr(view.model.config, view.spec.mlp_width, width)


def _pass_input_on(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return (args[0], *output[1:]) if isinstance(output, tuple) else args[0]
