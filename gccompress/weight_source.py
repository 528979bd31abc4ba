"""What weight-only analyses need of a model, in memory (`view`) or on disk (`shards`)."""

from typing import Protocol

import torch
from torch import Tensor

from gccompress.architectures import ArchSpec
from gccompress.roles import Role


class WeightSource(Protocol):
    """The decoder of one model, by role and layer; nothing here changes it."""

    @property
    def spec(self) -> ArchSpec:
        """The model's family."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles its family has."""

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""

    def shape(self, role: Role, layer: int) -> tuple[int, int]:
        """Return `(out, in)` of (role, layer); touches no data."""

    def weight(self, role: Role, layer: int) -> Tensor:
        """Return the weight `[out, in]` in a float dtype; not to be written into."""

    def in_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[in]` multiplier of the norm before a role that reads the residual, fp32."""

    def out_scale(self, role: Role, layer: int) -> Tensor | None:
        """Return the `[out]` multiplier of the norm after a role that writes it, fp32."""


def norm_scale(weight: Tensor, spec: ArchSpec) -> Tensor:
    """Return what a norm of stored `weight [d]` multiplies by, in fp32 or wider."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + spec.norm_offset
