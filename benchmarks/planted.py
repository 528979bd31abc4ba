"""Models of random weights with known continuity, written as safetensors in bf16.

Every weight is noise, plus one strong direction that neighbours share in part, plus weaker ones of
its own; what the noise does to a planted direction is known (Benaych-Georges, Nadakuditi 2012).
"""

import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gccompress.roles import READS_RESIDUAL, Role

SHARED = 0.8  # cosine of the planted directions of adjacent layers
STRENGTH = 3.0  # of the shared direction, as multiples of the edge of the noise
OWN = (1.8, 1.15)  # strongest and weakest of a layer's own directions, likewise
OWN_COUNT = 40

MODULES = {
    Role.Q: "self_attn.q_proj", Role.K: "self_attn.k_proj", Role.V: "self_attn.v_proj",
    Role.O: "self_attn.o_proj", Role.GATE: "mlp.gate_proj", Role.UP: "mlp.up_proj",
    Role.DOWN: "mlp.down_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Shapes:
    """The widths of a Llama: of the stream, of the MLP, of keys and values."""

    hidden: int
    inner: int
    keys: int

    def of(self, role: Role) -> tuple[int, int]:
        """Return `(out, in)`."""
        if role in (Role.K, Role.V):
            return self.keys, self.hidden
        if role in (Role.GATE, Role.UP):
            return self.inner, self.hidden
        return (self.hidden, self.inner) if role is Role.DOWN else (self.hidden, self.hidden)

    @property
    def layer_params(self) -> int:
        """Weights of one layer."""
        return sum(math.prod(self.of(role)) for role in MODULES)


def expected_cosine(shapes: Shapes, role: Role) -> float:
    """Return |cos| of the measured leading directions on the side that is shared.

    For a weight `[n, m]` with noise of variance `1 / m`, `c = n / m` and a planted value t, the
    squared cosine with the planted direction is `1 - (c + t^2) / (t^2 (t^2 + 1))` on the right
    and `1 - c (1 + t^2) / (t^2 (t^2 + c))` on the left; neighbours lose it twice.
    """
    out, width = shapes.of(role)
    c = out / width
    t2 = (STRENGTH * (1 + math.sqrt(c))) ** 2
    right = 1 - (c + t2) / (t2 * (t2 + 1))
    left = 1 - c * (1 + t2) / (t2 * (t2 + c))
    return SHARED * (right if role in READS_RESIDUAL else left)


def write_model(folder: Path, shapes: Shapes, layers: int) -> Path:
    """Write a Llama of `layers` layers, one file each, without embeddings."""
    folder.mkdir(parents=True)
    directions: dict[Role, Tensor] = {}
    for layer in range(layers):
        tensors = {}
        for role, module in MODULES.items():
            generator = torch.Generator().manual_seed(zlib.crc32(f"{role} {layer}".encode()))
            out, width = shapes.of(role)
            side = width if role in READS_RESIDUAL else out
            directions[role] = _next(directions.get(role), side, generator)
            weight = _planted(out, width, directions[role], role in READS_RESIDUAL, generator)
            tensors[f"model.layers.{layer}.{module}.weight"] = weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            scale = 0.5 + torch.rand(shapes.hidden, generator=generator)
            tensors[f"model.layers.{layer}.{norm}.weight"] = scale.bfloat16()
        save_file(tensors, folder / f"layer-{layer:02}.safetensors")
    return describe(folder, shapes, layers)


def describe(folder: Path, shapes: Shapes, layers: int) -> Path:
    """Write the config and the index of a model whose first `layers` files are in `folder`."""
    names = [f"{m}.weight" for m in (*MODULES.values(), "input_layernorm",
                                     "post_attention_layernorm")]  # fmt: skip
    index = {
        f"model.layers.{i}.{name}": f"layer-{i:02}.safetensors"
        for i in range(layers)
        for name in names
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024,
        "hidden_size": shapes.hidden, "intermediate_size": shapes.inner,
        "num_attention_heads": shapes.hidden // 128, "num_hidden_layers": layers,
        "num_key_value_heads": shapes.keys // 128, "head_dim": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _next(before: Tensor | None, width: int, generator: torch.Generator) -> Tensor:
    """Return a unit vector at cosine `SHARED` to the one before."""
    fresh = torch.randn(width, generator=generator)
    if before is None:
        return fresh / fresh.norm()
    fresh = fresh - before * (before @ fresh)
    return SHARED * before + math.sqrt(1 - SHARED**2) * fresh / fresh.norm()


def _planted(
    out: int, width: int, shared: Tensor, on_the_right: bool, generator: torch.Generator
) -> Tensor:
    weight = torch.randn(out, width, generator=generator).div_(math.sqrt(width))
    steps = torch.arange(OWN_COUNT) / (OWN_COUNT - 1)
    own = OWN[0] * (OWN[1] / OWN[0]) ** steps
    values = torch.cat([torch.tensor([STRENGTH]), own]) * (1 + math.sqrt(out / width))
    left, right = (torch.randn(n, OWN_COUNT + 1, generator=generator) for n in (out, width))
    (right if on_the_right else left)[:, 0] = shared
    left, right = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
    return weight.addmm_(left * values, right.T).bfloat16()
