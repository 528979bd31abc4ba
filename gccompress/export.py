"""`gccompress export`: a compressed checkpoint as a plain one, for tools that know no factors."""

import copy
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gccompress import modeling
from gccompress.architectures import spec_for
from gccompress.checkpoints import load_checkpoint, probe_logits, reload_difference, save_checkpoint
from gccompress.errors import CheckpointError, GccompressError, NumericalError
from gccompress.files import new_file, new_folder, refuse_non_empty
from gccompress.roles import MLP, Role
from gccompress.strict_loading import load_tokenizer

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger("gccompress")

FORMATS = ("dense", "gguf")
# Of the largest logit; products of factors are rounded once to the model's type.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        path: the folder.
        format: one of `FORMATS`.
        bytes: of its weights.
        bytes_before: of the weights of the checkpoint it was made from.
        max_abs_diff: largest logit difference to that checkpoint.
        note: what the reader should know.
    """

    path: Path
    format: str
    bytes: int
    bytes_before: int
    max_abs_diff: float
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress export --json` prints."""
        return {**asdict(self), "path": str(self.path)}

    def table(self) -> "Table":
        """Return it as a table."""
        from rich.table import Table

        table = Table(title=f"Export {self.path}", title_justify="left", show_header=False)
        table.add_row("format", self.format)
        table.add_row("bytes of the weights", f"{self.bytes:,} (before: {self.bytes_before:,})")
        table.add_row("largest logit difference", f"{self.max_abs_diff:.3g}")
        table.add_row("note", self.note)
        return table


def export(
    folder: str | Path, out: str | Path, *, format: str = "dense", outtype: str = "auto"
) -> Exported:
    """Write a checkpoint, compressed or plain, in a format that other runtimes load.

    Args:
        folder: the checkpoint.
        out: new or empty folder.
        format: "dense", the plain transformers architecture; or "gguf", for llama.cpp and others.
        outtype: of matrices in a GGUF file: auto (as stored), f32, f16, bf16 or q8_0.

    Raises:
        GccompressError: an unknown format, a full output folder, or what GGUF cannot say.
        CheckpointError: the checkpoint is damaged, or the export computes something else.
    """
    folder, out = Path(folder), Path(out)
    if format not in FORMATS:
        raise GccompressError(f"format {format!r} is not known; wanted one of {', '.join(FORMATS)}")
    refuse_non_empty(out)
    model = load_checkpoint(folder)
    before = _bytes(model)
    plain = plain_model(model)
    difference = _compare(model, plain)
    with new_folder(out) as temporary:
        if format == "dense":
            tokenizer = load_tokenizer(folder) if _has_tokenizer(folder) else None
            save_checkpoint(plain, tokenizer, temporary)
            if reload_difference(plain, temporary) != 0:
                raise CheckpointError(f"{out} does not reload as it was; nothing was written")
            written = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
        else:
            from gccompress.gguf_export import write_gguf

            file = temporary / "model.gguf"
            with new_file(file) as part:
                write_gguf(part, plain, load_tokenizer(folder), outtype=outtype)
            written = file.stat().st_size
    note = _note(model, before, _bytes(plain))
    return Exported(out, format, written, before, difference, note)


def _bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model"))


def _note(model: PreTrainedModel, before: int, after: int) -> str:
    """Say what the export costs."""
    if not hasattr(model.config, modeling.LAYOUT):
        return "the checkpoint was plain already: nothing was multiplied out"
    return (
        "factors are multiplied out and MLPs padded to the widest: it computes the same, and saves "
        f"neither bytes nor time ({before:,} bytes of parameters became {after:,})"
    )


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a plain model of the family that computes what a compressed one does.

    Products are summed in float32 and rounded to the model's type; MLPs that have fewer neurons
    than the widest get neurons of zeros. Tensors that stay are shared with `model`.

    Raises:
        CheckpointError: a product is not finite, or the family has no place for a bias.
    """
    layout = getattr(model.config, modeling.LAYOUT, None)
    if layout is None:
        return model
    family = model.config.model_type.removeprefix(modeling.PREFIX)
    config_class, model_class = modeling.base_classes(family)
    fields = model.config.to_dict()
    for ours in (modeling.LAYOUT, modeling.CODE_HASH, "auto_map", "model_type", "architectures"):
        fields.pop(ours, None)
    spec = spec_for(family)
    widths = [width for _, width in _mlp_widths(model)]
    fields[spec.mlp_width] = max(widths)
    config = config_class.from_dict(fields)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        plain: PreTrainedModel = model_class(config)
    plain.load_state_dict(_plain_state(model, plain, layout["modules"]), strict=True, assign=True)
    for name, buffer in model.named_buffers():  # rotary frequencies and the like, not stored
        owner, _, leaf = name.rpartition(".")
        if leaf in plain.get_submodule(owner)._non_persistent_buffers_set:
            plain.get_submodule(owner).register_buffer(leaf, buffer, persistent=False)
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.eval()


def _mlp_widths(model: PreTrainedModel) -> Iterator[tuple[int, int]]:
    """Yield the layer and width of each MLP."""
    spec = spec_for(model.config.model_type.removeprefix(modeling.PREFIX))
    down = spec.site_of(Role.DOWN)
    for layer in range(int(getattr(model.config, spec.layer_count))):
        module: Any = model.get_submodule(f"{spec.layers}.{layer}.{down.module}")
        yield layer, module.in_features if hasattr(module, "in_features") else module.nx


def _plain_state(
    model: PreTrainedModel, plain: PreTrainedModel, modules: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the plain model's tensors, by name."""
    spec = spec_for(plain.config.model_type)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(f"{modeling.BASES}.")
        and not any(name.startswith(f"{module}.") for module in modules)
    }
    for layer in range(int(getattr(plain.config, spec.layer_count))):
        for site in spec.sites:
            name = f"{spec.layers}.{layer}.{site.module}"
            new: Any = plain.get_submodule(name)
            weight, bias = _dense(name, model.get_submodule(name))
            wanted = tuple(new.weight.shape)
            rows, cols = wanted[::-1] if site.conv1d else wanted
            if set(site.roles) <= set(MLP):
                weight, bias = _padded(weight, bias, rows, cols, len(site.roles))
            state[f"{name}.weight"] = weight.T.contiguous() if site.conv1d else weight
            if new.bias is not None:
                zeros = torch.zeros(rows, dtype=weight.dtype, device=weight.device)
                state[f"{name}.bias"] = zeros if bias is None else bias
            elif bias is not None:
                raise CheckpointError(
                    f"{name} has a bias, for which a plain {plain.config.model_type} has no place"
                )
    return state


def _dense(name: str, module: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weight `[out, in]` and bias `[out]` that a projection applies."""
    if isinstance(module, nn.Linear):
        return module.weight.detach(), None if module.bias is None else module.bias.detach()
    if not hasattr(module, "in_features"):  # transformers' Conv1D
        return module.weight.detach().T, module.bias.detach()
    with torch.no_grad():
        weight = modeling.dense_weight(module)
        # What it maps zero to: the bias of a layer of any kind.
        bias = module(weight.new_zeros(1, module.in_features))[0]
    if not bool(torch.isfinite(weight).all()):
        raise NumericalError(f"{name}: the product of its factors is not finite in {weight.dtype}")
    return weight, bias if bool(bias.any()) else None


def _padded(
    weight: Tensor, bias: Tensor | None, rows: int, cols: int, parts: int
) -> tuple[Tensor, Tensor | None]:
    """Return a weight, and bias, with rows and columns of zeros up to a size.

    A weight of several `parts` stacked, such as gate and up in one, is padded part by part.
    """
    if tuple(weight.shape) == (rows, cols):
        return weight, bias
    grown = weight.new_zeros(parts, rows // parts, cols)
    pieces = weight.reshape(parts, -1, weight.shape[1])
    grown[:, : pieces.shape[1], : pieces.shape[2]] = pieces
    longer = None
    if bias is not None:
        longer = bias.new_zeros(parts, rows // parts)
        longer[:, : pieces.shape[1]] = bias.reshape(parts, -1)
        longer = longer.reshape(rows)
    return grown.reshape(rows, cols), longer


def _compare(model: PreTrainedModel, plain: PreTrainedModel) -> float:
    """Return the largest logit difference of two models on a fixed batch; raise when it is large.

    Raises:
        CheckpointError: beyond rounding.
    """
    ours, theirs = probe_logits(model), probe_logits(plain)
    difference = float((ours - theirs).abs().max())
    allowed = TOLERANCE.get(model.dtype, 1e-4) * float(ours.abs().max())
    if not difference <= allowed:
        raise CheckpointError(
            f"the dense model's logits are off by {difference:.3g}, allowed {allowed:.3g}; this is "
            "a fault of gccompress, nothing was written"
        )
    return difference
