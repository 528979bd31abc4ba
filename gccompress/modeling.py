"""Layers of a compressed model and, per family, the classes that build them from the config.

Self-contained (torch and transformers only): a checkpoint carries it as modeling_gccompress.py.
"""

import functools
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# transformers is imported inside functions only: registration may run in the midst of its import.

FORMAT_VERSION = 1
FILE_NAME = "modeling_gccompress.py"
PREFIX = "gccompress_"
BASES = "gccompress_bases"
LAYOUT = "gccompress"  # the config's field
CODE_HASH = "gccompress_code_sha256"  # in the config: of the copy of this file beside it
INDEX = "model.safetensors.index.json"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2")

Spec = Mapping[str, Any]


class SharedBasis(nn.Module):
    """A matrix `[out, in]` that several layers use, stored once.

    Not an `nn.Linear`, so that tools which rewrite every Linear (LoRA, bitsandbytes) leave it be.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        """Initialise at random: the families' own initialisation knows only `nn.Linear`."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return functional.linear(x, self.weight)

    def extra_repr(self) -> str:
        """Say why it is no target: tools that refuse a module show its representation."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}; shared by several "
            "layers, all of which an adapter here would change: adapt their coef instead"
        )


class SharedBases(nn.ModuleDict):
    """The bases of a model, by key; during a forward without gradients the last product is kept.

    Q and K, or GATE and UP, then read one product `B x` instead of computing it twice.
    """

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._in_forward = False
        self._last: tuple[str, Tensor, Tensor] | None = None

    def project(self, key: str, x: Tensor) -> Tensor:
        """Return `B x` of the basis `key`: `[..., in]` to `[..., rank]`."""
        if not self._in_forward or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self[key](x)
        last = self._last
        if last is not None and last[0] == key and last[1] is x:
            return last[2]
        product: Tensor = self[key](x)
        self._last = (key, x, product)
        return product

    def set_in_forward(self, in_forward: bool) -> None:
        """Note that the model's forward begins or ends, and forget the last product."""
        self._in_forward = in_forward
        self._last = None


class LowRankLinear(nn.Module):
    """`y = up(down(x))`: a weight `[out, in]` as `[out, rank] @ [rank, in]`."""

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        """Make the two factors; the bias belongs to `up`."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.down = nn.Linear(in_features, rank, bias=False)
        self.up = nn.Linear(rank, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return self.up(self.down(x))

    def dense_weight(self) -> Tensor:
        """Return the product `[out, in]`."""
        return _product(self.up.weight, self.down.weight)


class _BasisUser(nn.Module):
    """Refers to the container by an unregistered reference, and to the basis by key.

    So the basis is nobody's child but the container's, and a loader may replace it there.
    """

    def __init__(self, bases: SharedBases, key: str) -> None:
        super().__init__()
        self._container = (bases,)
        self.basis_key = key

    @property
    def basis(self) -> SharedBasis:
        """The shared basis now in the container."""
        return self._container[0][self.basis_key]  # type: ignore[return-value]


class SharedInLinear(_BasisUser):
    """`y = coef(B x)`: the basis `[rank, in]` spans the inputs of several layers."""

    def __init__(self, bases: SharedBases, key: str, out_features: int, bias: bool) -> None:
        """Make the coefficients `[out, rank]` of this layer."""
        super().__init__(bases, key)
        self.in_features, self.out_features = self.basis.in_features, out_features
        self.coef = nn.Linear(self.basis.out_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        return self.coef(self._container[0].project(self.basis_key, x))

    def dense_weight(self) -> Tensor:
        """Return the product `[out, in]`."""
        return _product(self.coef.weight, self.basis.weight)


class SharedOutLinear(_BasisUser):
    """`y = B coef(x) + bias`: the basis `[out, rank]` spans the outputs of several layers."""

    def __init__(self, bases: SharedBases, key: str, in_features: int, bias: bool) -> None:
        """Make the coefficients `[rank, in]` and the bias `[out]` of this layer."""
        super().__init__(bases, key)
        self.in_features, self.out_features = in_features, self.basis.out_features
        self.coef = nn.Linear(in_features, self.basis.in_features, bias=False)
        self.bias = nn.Parameter(torch.zeros(self.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        y: Tensor = self.basis(self.coef(x))
        return y if self.bias is None else y + self.bias

    def dense_weight(self) -> Tensor:
        """Return the product `[out, in]`."""
        return _product(self.basis.weight, self.coef.weight)


class ConcatLinear(nn.Module):
    """`y = cat(part(x) for part in parts) + bias`: a fused weight whose parts differ in kind."""

    def __init__(self, parts: list[nn.Module], bias: bool) -> None:
        """Own the parts, in the order of the fused weight's rows."""
        super().__init__()
        self.parts = nn.ModuleList(parts)
        inputs = sorted({int(part.in_features) for part in parts})  # type: ignore[arg-type]
        if len(inputs) != 1:
            raise RuntimeError(f"parts of a concat read inputs of {inputs} numbers, wanted one")
        self.in_features = inputs[0]
        self.out_features = sum(int(part.out_features) for part in parts)  # type: ignore[arg-type, misc]
        self.bias = nn.Parameter(torch.zeros(self.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        y = torch.cat([part(x) for part in self.parts], dim=-1)
        return y if self.bias is None else y + self.bias

    def dense_weight(self) -> Tensor:
        """Return the stacked products `[out, in]`."""
        return torch.cat([dense_weight(part) for part in self.parts])


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` in their dtype, summed in float32 at least and rounded once."""
    wide = torch.promote_types(left.dtype, torch.float32)
    return (left.to(wide) @ right.to(wide)).to(left.dtype)


def dense_weight(module: nn.Module) -> Tensor:
    """Return the `[out, in]` matrix that a module of this file, or an `nn.Linear`, applies."""
    if isinstance(module, nn.Linear):
        return module.weight
    weight: Tensor = module.dense_weight()  # type: ignore[operator]
    return weight


def _make_module(spec: Spec, bases: SharedBases) -> nn.Module:
    """Return the module a spec describes; KeyError for a missing field or an unknown basis."""
    bias = spec.get("bias", False)
    match spec["kind"]:
        case "low_rank":
            return LowRankLinear(spec["in"], spec["out"], spec["rank"], bias)
        case "shared_in":
            return SharedInLinear(bases, spec["basis"], spec["out"], bias)
        case "shared_out":
            return SharedOutLinear(bases, spec["basis"], spec["in"], bias)
        case "dense":
            return nn.Linear(spec["in"], spec["out"], bias=bias)
        case "concat":
            return ConcatLinear([_make_module(part, bases) for part in spec["parts"]], bias)
        case kind:
            raise RuntimeError(f"kind {kind!r} is not known; update gccompress")


def make_modules(layout: Spec | None) -> tuple[SharedBases, dict[str, nn.Module]]:
    """Return the bases and the modules, by full name, that `config.gccompress` describes.

    Raises:
        RuntimeError: the layout is absent, of another version, or names what does not exist.
    """
    if layout is None:
        raise RuntimeError("config.gccompress is absent, wanted the layout of a compressed model")
    if not isinstance(layout, Mapping):
        raise RuntimeError(f"config.gccompress is a {type(layout).__name__}, wanted a mapping")
    version = layout.get("version")
    if version != FORMAT_VERSION:
        raise RuntimeError(
            f"config.gccompress is of version {version!r}, wanted {FORMAT_VERSION}; "
            "update gccompress, or use the one that wrote the checkpoint"
        )
    bases, modules, name = SharedBases(), {}, "bases"
    try:
        for key, basis in layout.get("bases", {}).items():
            bases[key] = SharedBasis(basis["in"], basis["out"])
        for name, spec in layout.get("modules", {}).items():
            modules[name] = _make_module(spec, bases)
    except KeyError as error:
        raise RuntimeError(f"config.gccompress, {name}: no usable entry {error}") from error
    except (AttributeError, RuntimeError, TypeError) as error:
        raise RuntimeError(f"config.gccompress, {name}: {error}") from error
    return bases, modules


def check_sites(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raise RuntimeError when a module's place in the model is absent or cannot be told from it."""
    for name, new in modules.items():
        try:
            old = model.get_submodule(name)
        except AttributeError as error:
            raise RuntimeError(f"config.gccompress: the model has no module {name}") from error
        # A Conv1D stores [in, out]: a square dense weight would be read transposed, unnoticed, by
        # the family's plain class. As the one part of a concat it is under another name.
        if isinstance(new, nn.Linear) and not isinstance(old, nn.Linear):
            if new.in_features == new.out_features:
                raise RuntimeError(
                    f"config.gccompress, {name}: a square dense weight in place of a "
                    f"{type(old).__name__}, wanted a concat with this one part"
                )


def install_(model: nn.Module, bases: SharedBases, modules: Mapping[str, nn.Module]) -> None:
    """Put the bases at the root and each module in its place."""
    for name, new in modules.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if not isinstance(new, nn.Linear):
            # A weight of the wrong shape under the old name: the family's plain class, asked to
            # load this checkpoint, raises an error instead of starting from random weights.
            new.register_buffer("weight", getattr(owner, leaf).weight.detach().new_zeros(1))
        setattr(owner, leaf, new.train(model.training))
    if len(bases):
        setattr(model, BASES, bases.train(model.training))
        model.register_forward_pre_hook(_begin_forward)
        model.register_forward_hook(_end_forward)


def _begin_forward(model: nn.Module, args: object) -> None:
    getattr(model, BASES).set_in_forward(True)


def _end_forward(model: nn.Module, args: object, output: object) -> None:
    getattr(model, BASES).set_in_forward(False)


def build_(model: nn.Module, layout: Spec | None) -> None:
    """Replace modules of a plain model, in place, by those of `config.gccompress`, not yet loaded.

    Raises:
        RuntimeError: the layout is malformed or does not fit the model.
    """
    bases, modules = make_modules(layout)
    check_sites(model, modules)
    install_(model, bases, modules)


class CompressedModel:
    """What a compressed model adds to its family's class: the layers, and a strict load."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build the family's model, then put the compressed layers in place."""
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        build_(self, config.gccompress)  # type: ignore[arg-type]
        self.post_init()  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as the family's class does, but refuse a checkpoint that does not fit exactly.

        Raises:
            RuntimeError: a tensor is missing, unexpected or of another shape, or a file of the
                weights is not in the folder.
        """
        _refuse_outside(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        refuse_misfit(info)
        return (model, info) if output_loading_info else model

    def _adjust_missing_and_unexpected_keys(self, *args: Any) -> Any:
        # Reached also where `from_pretrained` reports on an adapter instead of this model. It is
        # private to transformers: where it takes other arguments or is gone, as in 5.0, the check
        # in `from_pretrained` remains.
        result = super()._adjust_missing_and_unexpected_keys(*args)  # type: ignore[misc]
        if len(args) == 1 and all(hasattr(args[0], kind) for kind in _MISFITS):
            misfit = {kind: set(getattr(args[0], kind)) for kind in _MISFITS}
            for kind in _MISFITS:  # reported by name: spare the reader the loader's own account
                setattr(args[0], kind, set())
            refuse_misfit(misfit)
        return result


def _refuse_outside(folder: Any) -> None:
    """Raise RuntimeError when the index of a local folder names a file that is not in it."""
    if not isinstance(folder, (str, Path)) or not (Path(folder) / INDEX).is_file():
        return
    try:
        names = set(json.loads((Path(folder) / INDEX).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuntimeError(f"{INDEX} of {folder} has no usable weight_map ({error})") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise RuntimeError(
                f"{INDEX} of {folder} names {name!r}, wanted files in the folder; correct it"
            )


_MISFITS = {
    "missing_keys": "missing",
    "unexpected_keys": "unexpected",
    "mismatched_keys": "of another shape",
}


def refuse_misfit(info: Mapping[str, Any]) -> None:
    """Raise RuntimeError naming the tensors that do not fit, from a load's `loading_info`."""
    found = []
    for kind, what in _MISFITS.items():
        names = sorted(key if isinstance(key, str) else key[0] for key in info[kind])
        if names:
            more = ", ..." if len(names) > 3 else ""
            found.append(f"{len(names)} {what} ({', '.join(names[:3])}{more})")
    if found:
        raise RuntimeError(
            f"checkpoint: tensors {'; '.join(found)}, wanted exactly those of its config; "
            "it is damaged or incomplete, write or fetch it again"
        )


class CompressedConfig:
    """What a compressed model's config adds: saved with the code that loads it."""

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save the config, and this file beside it for `trust_remote_code=True`."""
        self.auto_map = auto_map(self.model_type.removeprefix(PREFIX))  # type: ignore[attr-defined]
        setattr(self, CODE_HASH, hashlib.sha256(Path(__file__).read_bytes()).hexdigest())
        copy = Path(save_directory) / FILE_NAME
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not (copy.exists() and copy.samefile(__file__)):
            shutil.copyfile(__file__, copy)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


def class_names(model_type: str) -> tuple[str, str]:
    """Return the names of a family's compressed config and model classes."""
    family = "".join(word.capitalize() for word in model_type.split("_"))
    return f"Gcc{family}Config", f"Gcc{family}ForCausalLM"


def auto_map(model_type: str) -> dict[str, str]:
    """Return where the loader of remote code finds a family's classes: in the file beside them."""
    stem = FILE_NAME.removesuffix(".py")
    autos = ("AutoConfig", "AutoModelForCausalLM")
    return {
        auto: f"{stem}.{name}" for auto, name in zip(autos, class_names(model_type), strict=True)
    }


def base_classes(model_type: str) -> tuple[Any, Any]:
    """Return a family's plain config and causal language model classes."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type not in MODEL_TYPES:
        raise RuntimeError(
            f"model type {model_type!r} has no compressed class; known: {', '.join(MODEL_TYPES)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    found = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return config_class, found[0] if isinstance(found, (list, tuple)) else found


@functools.cache
def compressed_classes(model_type: str) -> tuple[Any, Any]:
    """Return the compressed config and model classes of a family, e.g. `"llama"`.

    Raises:
        RuntimeError: the family is not known.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationMixin

    base_config, base_model = base_classes(model_type)
    config_name, model_name = class_names(model_type)
    fields = {
        "__module__": __name__,
        "__annotations__": {"gccompress": dict | None},
        "gccompress": None,
        "model_type": PREFIX + model_type,
        # The family's plans split weights that are no longer there.
        "base_model_tp_plan": None,
        "base_model_pp_plan": None,
    }
    config_class: Any = type(config_name, (CompressedConfig, base_config), fields)
    # GenerationMixin is named again because the loader of remote code looks for it by name here.
    bases = (CompressedModel, base_model, GenerationMixin)
    model_class: Any = type(
        model_name, bases, {"__module__": __name__, "config_class": config_class}
    )
    stub = CONFIG_MAPPING[PREFIX + model_type] if PREFIX + model_type in CONFIG_MAPPING else None
    if stub is not None and stub.__module__ == __name__:  # never by a checkpoint's own copy
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    return config_class, model_class


def register_all() -> None:
    """Make AutoConfig and AutoModelForCausalLM know the compressed classes of every family.

    A family's own modules take a second to import, so what is registered is a stand-in for its
    config class, which makes the real classes, and registers them, when it is first used.
    """
    from transformers.models.auto.configuration_auto import AutoConfig

    for model_type in MODEL_TYPES:
        AutoConfig.register(PREFIX + model_type, _stand_in(model_type), exist_ok=True)


def _stand_in(model_type: str) -> Any:
    """Return a config class whose instances are those of the family's compressed config class."""
    from transformers.configuration_utils import PreTrainedConfig

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return compressed_classes(model_type)[0](*args, **kwargs)

    def from_dict(cls: Any, config_dict: dict[str, Any], /, **kwargs: Any) -> Any:
        return compressed_classes(model_type)[0].from_dict(config_dict, **kwargs)

    fields = {
        "__module__": __name__,
        "__new__": new,
        "from_dict": classmethod(from_dict),
        "model_type": PREFIX + model_type,
    }
    return type(class_names(model_type)[0], (PreTrainedConfig,), fields)


def __getattr__(name: str) -> Any:
    """Find the classes by name, e.g. `GccLlamaForCausalLM`: for pickle and for `auto_map`."""
    for model_type in MODEL_TYPES:
        names = class_names(model_type)
        if name in names:
            return compressed_classes(model_type)[names.index(name)]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
