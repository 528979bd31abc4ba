"""Compressed checkpoints: from tensors to a model, to a folder, and back, exactly or not at all."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from gccompress import modeling
from gccompress.errors import CheckpointError, NumericalError
from gccompress.verification import check_structure


def compress_in_place(
    model: PreTrainedModel, layout: dict[str, Any], tensors: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Turn a plain model into the compressed one that `layout` describes; the same object.

    Each tensor is copied to the device and dtype of the weight it stands in for (a basis: of its
    first user). The model is untouched when anything is refused.

    Args:
        model: A causal language model of a known family, layers already dropped.
        layout: `config.gccompress`; one without modules leaves the model plain.
        tensors: Every parameter of the new modules, biases included, by its name in the model.

    Raises:
        CheckpointError: the model is not plain, the layout does not fit it, or a tensor is missing,
            unexpected, or of another shape.
        NumericalError: a tensor is not finite in the model's dtype.
    """
    if not layout.get("modules"):
        if tensors:
            raise CheckpointError(f"layout has no modules, yet {len(tensors)} tensors were given")
        return model
    model_type = model.config.model_type
    try:
        base_config, base_model = modeling.base_classes(model_type)
        config_class, model_class = modeling.compressed_classes(model_type)
        with torch.device("meta"):
            bases, modules = modeling.make_modules(layout)
        modeling.check_sites(model, modules)
    except RuntimeError as error:
        raise CheckpointError(str(error)) from error
    if type(model) is not base_model or type(model.config) is not base_config:
        raise CheckpointError(
            f"model is a {type(model).__name__}, wanted a plain {base_model.__name__}"
        )
    _check_names(_parameters(bases, modules), tensors)
    _load(model, bases, modules, tensors)
    modeling.install_(model, bases, modules)
    for part in model.modules():  # the decoder inside holds the config too
        if isinstance(part, PreTrainedModel) and type(part.config) is base_config:
            part.config.__class__ = config_class
    model.config.gccompress = copy.deepcopy(layout)
    model.__class__ = model_class
    return model


def _parameters(
    bases: modeling.SharedBases, modules: Mapping[str, nn.Module]
) -> dict[str, nn.Parameter]:
    """Return the parameters of the new modules by their names in the model."""
    roots = {modeling.BASES: bases, **modules}
    return {
        f"{root}.{name}": parameter
        for root, module in roots.items()
        for name, parameter in module.named_parameters()
    }


def _check_names(wanted: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors are exactly those wanted, in name and shape."""
    for what, names in (
        ("missing", wanted.keys() - tensors.keys()),
        ("not of the layout", tensors.keys() - wanted.keys()),
    ):
        if names:
            raise CheckpointError(
                f"layout and tensors differ: {len(names)} {what}, first {min(names)}"
            )
    for name, parameter in wanted.items():
        if tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"tensor {name}: shape {tuple(tensors[name].shape)}, "
                f"wanted {tuple(parameter.shape)} by the layout"
            )


def _load(
    model: PreTrainedModel,
    bases: modeling.SharedBases,
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, Tensor],
) -> None:
    """Give the new modules, made on the meta device, their own copies of the tensors."""
    like: dict[str, Tensor] = {}
    for name, module in modules.items():
        weight = model.get_submodule(name).weight
        like[name] = weight  # type: ignore[assignment]
        for part in module.modules():
            if isinstance(part, modeling.SharedInLinear | modeling.SharedOutLinear):
                like.setdefault(f"{modeling.BASES}.{part.basis_key}", weight)  # type: ignore[arg-type]
    unused = {key for key in bases if f"{modeling.BASES}.{key}" not in like}
    if unused:
        raise CheckpointError(f"layout: no module uses the basis {min(unused)}; leave it out")
    roots = {**{f"{modeling.BASES}.{key}": basis for key, basis in bases.items()}, **modules}
    for root, module in roots.items():
        state = {
            name: _copy_like(f"{root}.{name}", tensors[f"{root}.{name}"], like[root])
            for name, _ in module.named_parameters()
        }
        module.load_state_dict(state, strict=True, assign=True)


def _copy_like(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Return a compact copy in the dtype and on the device of `like`; refuse what is not finite."""
    own = torch.empty(tensor.shape, dtype=like.dtype, device=like.device)
    own.copy_(tensor.detach())
    if not bool(torch.isfinite(own).all()):
        raise NumericalError(
            f"tensor {name}: not finite in {own.dtype}, wanted finite numbers; "
            "load the model in a wider dtype, or look for the fault in its weights"
        )
    return own


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    *,
    extra_files: Mapping[str, str] | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a model, its tokenizer and text files into a folder that exists.

    A compressed model comes with the code that loads it (`trust_remote_code=True` where this
    package is not installed). A plain model is an ordinary transformers checkpoint.

    Raises:
        CheckpointError: a text file would overwrite a file of the model.
        OSError: the disk is full or unwritable; use `files.new_folder` to leave nothing behind.
    """
    try:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # how a full disk comes back from the writer
        raise OSError(f"weights: {error}") from error
    for name, text in (extra_files or {}).items():
        path = folder / name
        if path.exists():
            raise CheckpointError(f"extra file {name}: the model has a file of this name")
        path.write_text(text, encoding="utf-8")


def load_checkpoint(
    folder: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Load a checkpoint folder, compressed or plain, in eval mode, running none of its code.

    Args:
        folder: What `save_checkpoint` wrote.
        device: Where the model goes.
        dtype: Of the weights; None takes the stored one.

    Raises:
        CheckpointError: the folder is no checkpoint, or its tensors do not fit its config exactly.
    """
    folder = Path(folder)
    check_structure(folder)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
        modeling.refuse_misfit(info)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder}: cannot be loaded: {reason}") from error
    placed: PreTrainedModel = model.to(device)
    return placed


def reload_difference(model: PreTrainedModel, folder: str | Path) -> float:
    """Return the largest absolute logit difference between a model and its saved checkpoint.

    Both run in the model's dtype, device and attention implementation, in eval mode, on two rows
    of up to 32 random tokens (seed 0).

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        NumericalError: a logit of either model is not finite.
    """
    reloaded = load_checkpoint(folder, device=model.device, dtype=model.dtype)
    reloaded.set_attn_implementation(model.config._attn_implementation)
    logits = [probe_logits(which) for which in (model, reloaded)]
    for name, values in zip(("model in memory", f"checkpoint {folder}"), logits, strict=True):
        if not bool(torch.isfinite(values).all()):
            raise NumericalError(
                f"{name}: logits are not finite, wanted finite numbers; "
                f"{model.dtype} may be too narrow, or a weight is damaged"
            )
    return float((logits[0] - logits[1]).abs().max())


def probe_logits(model: PreTrainedModel) -> Tensor:
    """Return fp64 logits `[2, length, vocab]` on two rows of up to 32 random tokens (seed 0).

    In eval mode; the model's mode is as it was afterwards.
    """
    length = min(32, int(getattr(model.config, "max_position_embeddings", 32)))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(ids.to(model.device), use_cache=False).logits.double()
    finally:
        model.train(training)
    return logits


def checkpoint_bytes(folder: str | Path) -> int:
    """Return the bytes of all weight files (`*.safetensors`) of a checkpoint folder."""
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
