"""Layouts for any tiny model that use every kind of replacement, and random tensors for them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gccompress import modeling

FUSED = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96), "c_attn": (48, 48, 48)}
RANK = 7


def sites(model: nn.Module) -> Iterator[tuple[str, int, str, int, int, bool]]:
    """Yield name, layer, name in the layer, in, out and bias of every matrix of the decoder."""
    for name, module in model.named_modules():
        parts = name.split(".")
        numbers = [part for part in parts if part.isdigit()]
        if not numbers or not isinstance(module, nn.Linear | Conv1D):
            continue
        rows, cols = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
        leaf = ".".join(parts[parts.index(numbers[0]) + 1 :])
        yield name, int(numbers[0]), leaf, cols, rows, module.bias is not None


def mixed_layout(model: PreTrainedModel) -> dict[str, Any]:
    """Return a layout with every kind: layers 0 and 1 share, the rest are alone or untouched."""
    bases: dict[str, dict[str, int]] = {}
    modules: dict[str, dict[str, Any]] = {}
    order: dict[str, int] = {}
    for name, layer, leaf, cols, rows, bias in sites(model):
        turn = order.setdefault(leaf, len(order))
        key = leaf.replace(".", "_")
        fused = FUSED.get(leaf.rpartition(".")[2])
        if fused is not None and layer < 3:
            if sum(fused) != rows:  # phi3's heads: q, k and v of another size
                fused = (rows // 2, rows // 4, rows // 4)
            bases[key] = {"in": cols, "out": RANK}
            modules[name] = _concat(key, cols, fused, bias, layer)
        elif turn % 2 == 0 and layer < 2:
            bases[key] = {"in": cols, "out": RANK}
            modules[name] = {"kind": "shared_in", "basis": key, "out": rows, "bias": bias}
        elif turn % 2 == 1 and layer < 2:
            bases[key] = {"in": RANK, "out": rows}
            modules[name] = {"kind": "shared_out", "basis": key, "in": cols, "bias": bias}
        elif layer == 2 and (turn % 3 or cols == rows):
            modules[name] = {
                "kind": "low_rank",
                "in": cols,
                "out": rows,
                "rank": RANK,
                "bias": bias,
            }
        elif layer == 2:
            modules[name] = {"kind": "dense", "in": cols, "out": rows, "bias": bias}
    return {"version": 1, "bases": bases, "modules": modules}


def _concat(key: str, cols: int, fused: tuple[int, ...], bias: bool, layer: int) -> dict[str, Any]:
    """Return a fused spec; the biases are the parts' in even layers, the whole's in odd ones."""
    own = bias and layer % 2 == 0
    parts: list[dict[str, Any]] = [
        {"kind": "shared_in", "basis": key, "out": fused[0], "bias": own},
        {"kind": "low_rank", "in": cols, "out": fused[1], "rank": RANK, "bias": own},
    ]
    parts += [{"kind": "dense", "in": cols, "out": rows, "bias": own} for rows in fused[2:]]
    return {"kind": "concat", "parts": parts, "bias": bias and not own}


def resized_layout(model: PreTrainedModel) -> dict[str, Any]:
    """Return a layout of dense MLPs, each layer of another width."""
    modules: dict[str, dict[str, Any]] = {}
    hidden = model.config.hidden_size
    for name, layer, leaf, cols, rows, bias in sites(model):
        if "mlp" not in leaf:
            continue
        width = 20 + 8 * layer
        wide_in, wide_out = cols != hidden, rows != hidden
        spec = {"kind": "dense", "bias": bias, "in": width if wide_in else cols}
        if leaf.endswith("gate_up_proj"):
            part = {"kind": "dense", "in": cols, "out": width, "bias": bias}
            modules[name] = {"kind": "concat", "parts": [part, part]}
        else:
            modules[name] = {**spec, "out": width if wide_out else rows}
    return {"version": 1, "bases": {}, "modules": modules}


def random_tensors(layout: Mapping[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Return a tensor for every parameter of a layout: matrices of std in ** -0.5, biases of 1."""
    with torch.device("meta"):
        bases, modules = modeling.make_modules(layout)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for root, module in {modeling.BASES: bases, **modules}.items():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 1.0
            tensors[f"{root}.{name}"] = scale * values
    return tensors
