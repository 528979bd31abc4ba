"""A model as (role, layer) weights `[out, in]`, whatever its family calls and stores them.

Reads and writes weights, bias and norm scales in place, and drops whole layers.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gccompress.architectures import ArchSpec, SiteSpec, refuse_config, spec_for, split_rows
from gccompress.errors import ModelError, NumericalError, PlanError, UnsupportedModelError
from gccompress.roles import Role
from gccompress.sizes import ModelShape
from gccompress.weight_source import norm_scale


@dataclass(frozen=True)
class Site:
    """Where a role's weight lives: rows `start:stop` of the output of a named module.

    Attributes:
        module: full dotted name from the model's root.
        start: first output row this role owns.
        stop: one past the last.
        fused: the module holds other roles too.
        conv1d: stored `[in, out]`.
        parts: every role of the module with its rows, in order.
    """

    module: str
    start: int
    stop: int
    fused: bool
    conv1d: bool
    parts: tuple[tuple[Role, int, int], ...]


class ModelView:
    """The decoder of one causal language model, by role and layer.

    Attributes:
        model: the model itself; all changes are made in it.
        spec: its family.
        roles: the roles its family has.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Check that the model is of a known family, stored plainly and whole.

        Raises:
            UnsupportedModelError: unknown family, mixture of experts, quantised, already
                compressed, layers of different configs, or a module that is not what the family
                has there (an adapter, say).
            ModelError: another number of layers than the config says.
        """
        _refuse_unsupported(model)
        self.model = model
        self.spec: ArchSpec = spec_for(model.config.model_type)
        self.roles: tuple[Role, ...] = self.spec.roles
        self._check_layers()

    def _check_layers(self) -> None:
        wanted = getattr(self.model.config, self.spec.layer_count)
        if self.num_layers != wanted:
            raise ModelError(
                f"{type(self.model).__name__} has {self.num_layers} layers, its config's "
                f"{self.spec.layer_count} says {wanted}; load it afresh"
            )
        for index in range(self.num_layers):
            for site in self.spec.sites:
                self._module(site, index)
                split_rows(self.model.config, site, self._out_features(site, index))

    @property
    def num_layers(self) -> int:
        """The number of decoder layers now in the model."""
        return len(self._blocks())

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.shape(Role.Q, 0)[1]

    def layer(self, i: int) -> nn.Module:
        """Return decoder block `i`."""
        return self._blocks()[i]

    def site(self, role: Role, layer: int) -> Site:
        """Return where the weight of (role, layer) is stored."""
        spec = self.spec.site_of(role)
        parts = split_rows(self.model.config, spec, self._out_features(spec, layer))
        start, stop = next((start, stop) for name, start, stop in parts if name is role)
        return Site(
            module=f"{self.spec.layers}.{layer}.{spec.module}",
            start=start,
            stop=stop,
            fused=len(parts) > 1,
            conv1d=spec.conv1d,
            parts=parts,
        )

    def shape(self, role: Role, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of (role, layer); touches no data, so meta tensors will do."""
        site = self.site(role, layer)
        weight = self._tensor(site.module, "weight")
        return site.stop - site.start, weight.shape[0 if site.conv1d else 1]

    def weight(self, role: Role, layer: int) -> Tensor:
        """Return the weight `[out, in]`, detached, in its own dtype and on its own device.

        It shares the model's memory: write with `set_weight`, never into it.
        """
        site = self.site(role, layer)
        weight = self._tensor(site.module, "weight").detach()
        return (weight.T if site.conv1d else weight)[site.start : site.stop]

    def bias(self, role: Role, layer: int) -> Tensor | None:
        """Return the bias `[out]`, sharing memory as `weight` does, or None."""
        site = self.site(role, layer)
        bias: Tensor | None = self.model.get_submodule(site.module).bias  # type: ignore[assignment]
        return None if bias is None else bias.detach()[site.start : site.stop]

    def set_weight(self, role: Role, layer: int, weight: Tensor) -> None:
        """Write a weight `[out, in]` in place, cast to the model's dtype and device.

        Raises:
            PlanError: another shape than the role has.
            NumericalError: a value that is not finite, before or after the cast.
        """
        target = self.weight(role, layer)
        if weight.shape != target.shape:
            raise PlanError(
                f"layer {layer} {role}: weight of shape {tuple(weight.shape)}, wanted "
                f"{tuple(target.shape)} [out, in]; make the plan again for this model"
            )
        cast = weight.detach().to(device=target.device, dtype=target.dtype)
        if not cast.isfinite().all():
            raise NumericalError(
                f"layer {layer} {role}: the weight to write is not finite in {target.dtype}, "
                "wanted finite numbers; load the model with a wider --dtype or check its weights"
            )
        target.copy_(cast)

    def in_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[in]` multiplier of the norm before a role that reads the residual.

        fp32 or wider, Gemma's offset of 1 included; None for a role that reads something else.
        """
        return self._scale(self.spec.site_of(role).pre_norm, layer)

    def out_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[out]` multiplier of the norm after a role that writes the residual.

        fp32 or wider, Gemma's offset of 1 included; None where the family has no such norm.
        """
        return self._scale(self.spec.site_of(role).post_norm, layer)

    def decoder_params(self) -> int:
        """Return the number of weights of all roles and layers, biases not counted."""
        shapes = (self.shape(role, i) for i in range(self.num_layers) for role in self.roles)
        return sum(rows * columns for rows, columns in shapes)

    def drop_layers(self, layers: Collection[int]) -> None:
        """Remove decoder blocks in place, with what the config and the blocks say of them.

        Slices every per-layer config list, lowers the counts and renumbers `layer_idx`, so that
        caches and saved files are right afterwards. Views of this model made before stay valid.

        Raises:
            PlanError: a layer out of range or given twice, or none would be left.
            UnsupportedModelError: the layers' outputs depend on their number.
        """
        self._check_drop(layers)
        if not layers:
            return
        kept = [i for i in range(self.num_layers) if i not in set(layers)]
        blocks = [self.layer(i) for i in kept]
        _slice_config(self.model.config, self.spec, kept, self.num_layers)
        self.model.set_submodule(self.spec.layers, nn.ModuleList(blocks))
        for index, block in enumerate(blocks):
            for module in block.modules():
                if "layer_idx" in vars(module):
                    module.layer_idx = index  # type: ignore[assignment]

    def _check_drop(self, layers: Collection[int]) -> None:
        count = self.num_layers
        outside = sorted(i for i in layers if not 0 <= i < count)
        twice = sorted(i for i, times in Counter(layers).items() if times > 1)
        if outside or twice:
            fault = f"{outside} out of range" if outside else f"{twice} given twice"
            raise PlanError(f"layers to drop: {fault}, wanted distinct numbers in 0..{count - 1}")
        if len(layers) >= count:
            raise PlanError(f"layers to drop: all {count}, wanted at least one left; drop fewer")
        for flag in self.spec.no_drop_when:
            if layers and getattr(self.model.config, flag, False):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__}: config sets {flag}, so renumbered layers would "
                    "compute something else; drop no layers of this model"
                )

    def _blocks(self) -> nn.ModuleList:
        try:
            blocks = self.model.get_submodule(self.spec.layers)
        except AttributeError:
            blocks = None
        if not isinstance(blocks, nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no list of layers {self.spec.layers}, wanted a "
                f"causal language model of family {self.spec.name}; load it with "
                "AutoModelForCausalLM, without wrappers"
            )
        return blocks

    def _module(self, site: SiteSpec, layer: int) -> nn.Module:
        """Return a site's module, checked to be the plain one of its family."""
        name = f"{self.spec.layers}.{layer}.{site.module}"
        wanted = Conv1D if site.conv1d else nn.Linear
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no module {name}, wanted a {wanted.__name__} as "
                f"in family {self.spec.name}; only plain models are supported"
            ) from None
        if type(module) is not wanted:
            raise UnsupportedModelError(
                f"{name} is a {type(module).__name__}, wanted a plain {wanted.__name__}; "
                "load the model unquantised, with adapters merged"
            )
        return module

    def _out_features(self, site: SiteSpec, layer: int) -> int:
        weight = self._tensor(f"{self.spec.layers}.{layer}.{site.module}", "weight")
        return weight.shape[1 if site.conv1d else 0]

    def _tensor(self, module: str, name: str) -> Tensor:
        return self.model.get_parameter(f"{module}.{name}")

    def _scale(self, norm: str | None, layer: int) -> Tensor | None:
        if norm is None:
            return None
        weight = self._tensor(f"{self.spec.layers}.{layer}.{norm}", "weight").detach()
        return norm_scale(weight, self.spec)


def _refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for what no family's data can describe."""
    kind = type(model).__name__
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) is None:
        raise UnsupportedModelError(
            f"{kind} has no config with a model_type, wanted a transformers causal language model"
        )
    refuse_config(config, kind)
    method = _quantisation(model)
    if method:
        raise UnsupportedModelError(
            f"{kind} is quantised ({method}), wanted plain weights; load it unquantised or call "
            "model.dequantize() first"
        )


def _quantisation(model: PreTrainedModel) -> str | None:
    """Return the name of the method a model says it is quantised by, or None."""
    settings: Any = getattr(model.config, "quantization_config", None)
    if settings is None and not getattr(model, "is_quantized", False):
        return None
    if isinstance(settings, dict):
        method = settings.get("quant_method")
    else:
        method = getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown method")


def _slice_config(config: Any, spec: ArchSpec, kept: list[int], count: int) -> None:
    """Make a config of `count` layers one of the `kept` layers only."""
    for name in spec.counts_below:
        value = getattr(config, name, None)
        if value is not None:
            setattr(config, name, sum(i < value for i in kept))
    for name, value in list(vars(config).items()):
        # By name too: two EOS tokens in a model of two layers are no per-layer list.
        per_layer = "layer" in name or name in spec.layer_lists
        if per_layer and isinstance(value, list | tuple) and len(value) == count:
            setattr(config, name, type(value)(value[i] for i in kept))
    setattr(config, spec.layer_count, len(kept))


def model_shape(view: ModelView, stored: torch.dtype | None = None) -> ModelShape:
    """Return the sizes that plans are made of, from the model's own tensors.

    `stored` is the type that weights will be stored in; None takes the model's own.
    """
    model = view.model
    layer = sum(parameter.numel() for parameter in view.layer(0).parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    return ModelShape(
        layers=view.num_layers,
        matrices={role: view.shape(role, 0) for role in view.roles},
        layer_params=layer,
        total_params=total,
        biases_per_neuron=sum(
            view.bias(role, 0) is not None for role in view.roles if role in (Role.GATE, Role.UP)
        ),
        head_params=model.get_output_embeddings().weight.numel(),
        bytes_per_param=(stored or model.dtype).itemsize,
    )
