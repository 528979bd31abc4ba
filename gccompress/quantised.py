"""Quantised checkpoints: fp8 weights are widened with their scales, packed ones are refused.

Packed integers look like small matrices, and a decomposition of them is wrong without an error.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gccompress.errors import ModelError, UnsupportedModelError
from gccompress.weight_files import AGAIN

# Endings of tensor names by which methods that pack or round to integers can be told.
_PACKED = (
    (
        "bitsandbytes",
        r"\.weight\.(absmax|quant_map|nested_\w+|quant_state\..*)|\.(SCB|weight_format)",
    ),
    ("GPTQ or AWQ", r"\.(qweight|qzeros|g_idx)"),
    ("compressed-tensors, packed", r"\.weight_(packed|global_scale|zero_point)"),
    ("HQQ", r"\.W_q"),
    ("AQLM", r"\.(codes|codebooks)"),
    ("quanto", r"\.weight\._(data|scale|shift)"),
    ("torchao", r"_weight_(qdata|scale_and_zero)|\.weight:.*"),
    ("NVFP4", r"\.weight_scale_2"),
)
_FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt")
_SCALES = ("weight_scale_inv", "weight_scale")  # both are multiplied by, whatever the name says
_BLOCK = (128, 128)  # rows and columns of DeepSeek's and Qwen's releases
_REMEDY = (
    "name the unquantised original, or load it with transformers, call model.dequantize() and save "
    "that"
)


@dataclass(frozen=True)
class Scaling:
    """Which tensor scales an fp8 weight, and how large a part of the weight each entry is for.

    Attributes:
        name: the scales' tensor.
        shape: of the scales, as rows and columns of parts.
        block: rows and columns of a part; the last ones may be cut off by the weight's edge.
    """

    name: str
    shape: tuple[int, int]
    block: tuple[int, int]


def refuse_packed(names: Iterable[str], quantization: Any, where: object) -> None:
    """Raise `UnsupportedModelError` when tensor names or a config tell of packed weights.

    Args:
        names: every tensor of the checkpoint.
        quantization: `quantization_config` of its config, or None.
        where: what to call it.
    """
    endings = [(method, re.compile(f"(?:{pattern})$")) for method, pattern in _PACKED]
    for name in names:
        for method, ending in endings:
            if ending.search(name):
                raise UnsupportedModelError(
                    f"{where} is quantised ({method}: it has {name}), wanted plain or fp8 weights; "
                    f"{_REMEDY}"
                )
    said = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    if said is not None and said not in _FP8_METHODS:
        raise UnsupportedModelError(
            f"{where} is quantised (its config says {said}), wanted plain or fp8 weights; {_REMEDY}"
        )


def refuse_integers(name: str, dtype: str, where: object) -> None:
    """Raise `UnsupportedModelError` about a weight stored as `dtype`, which is no float."""
    raise UnsupportedModelError(
        f"{where}: {name} is stored as {dtype}, wanted BF16, F16, F32, F64, F8_E4M3 or F8_E5M2; "
        f"{_REMEDY}"
    )


def find_scaling(
    name: str,
    shape: tuple[int, int],
    shapes: Mapping[str, tuple[int, ...]],
    quantization: Any,
    where: object,
) -> Scaling:
    """Return how the fp8 weight `name [out, in]` is scaled.

    One scale for all (compressed-tensors, ModelOpt, Mistral), one per row (compressed-tensors,
    FBGEMM), or one per block (DeepSeek, Qwen): https://huggingface.co/docs/transformers, section
    "Fine-grained FP8"; https://github.com/vllm-project/compressed-tensors.

    Args:
        name: The weight, ending in ".weight".
        shape: Its shape.
        shapes: Those of every tensor in the checkpoint.
        quantization: `quantization_config` of the config, which may name the block.
        where: What to call the checkpoint.

    Raises:
        ModelError: no scales, or of a shape that fits none of these.
    """
    stem = name.removesuffix("weight")
    present = [stem + ending for ending in _SCALES if stem + ending in shapes]
    if not present:
        raise ModelError(
            f"{where}: {name} is fp8 without scales, wanted {stem}{_SCALES[0]} or {_SCALES[1]}; "
            f"{AGAIN}"
        )
    found, (rows, columns) = shapes[present[0]], shape
    block = _block(quantization)
    parts = (-(-rows // block[0]), -(-columns // block[1]))
    if found in ((), (1,), (1, 1)):
        return Scaling(present[0], (1, 1), shape)
    if found in ((rows,), (rows, 1)):
        return Scaling(present[0], (rows, 1), (1, columns))
    if found == parts:
        return Scaling(present[0], parts, block)
    raise ModelError(
        f"{where}: {present[0]} has shape {list(found)}, wanted 1, [{rows}] or {list(parts)} (one "
        f"per {block[0]} x {block[1]} block) for {name} {list(shape)}; {AGAIN}"
    )


def _block(quantization: Any) -> tuple[int, int]:
    """Return rows and columns of a block, as the config says, else the usual."""
    settings = quantization if isinstance(quantization, Mapping) else {}
    block = settings.get("weight_block_size")
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            block = block or weights.get("block_structure")
    if isinstance(block, list | tuple) and len(block) == 2:
        rows, columns = (int(size) for size in block)
        if rows > 0 and columns > 0:
            return rows, columns
    return _BLOCK


def widen(stored: Tensor, scale: Tensor, scaling: Scaling, start: int, out: Tensor) -> None:
    """Write rows of an fp8 weight, multiplied by their scales, into fp32 `out [n, in]`.

    fp32, because an fp8 value times a bf16 scale has up to 12 significant bits: bf16 would round.

    Args:
        stored: The fp8 values `[n, in]`.
        scale: The scales of the whole weight, in the shape they are stored in.
        scaling: What they are for.
        start: Number of the first row.
        out: Contiguous.
    """
    # By table: several times faster than a cast, and all 256 values are right by construction.
    table = torch.arange(256, dtype=torch.uint8).view(stored.dtype).to(torch.float32)
    np.take(table.numpy(), stored.view(torch.uint8).numpy(), out=out.numpy(), mode="clip")
    height, width = scaling.block
    per_row = torch.arange(start, start + len(out)).div(height, rounding_mode="floor")
    factors = scale.to(torch.float32).reshape(scaling.shape)[per_row]
    blocks = out.shape[1] // width
    whole = out[:, : blocks * width].unflatten(1, (blocks, width))
    whole.mul_(factors[:, :blocks, None])
    out[:, blocks * width :].mul_(factors[:, blocks:])
