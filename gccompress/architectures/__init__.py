"""What differs between model families, as data: one TOML file per family, named after it.

Adding a family means adding a file; `ArchSpec` and `SiteSpec` say what the fields mean.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from gccompress.errors import UnsupportedModelError
from gccompress.roles import Role

_EXPERT_FIELDS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)


@dataclass(frozen=True, kw_only=True)
class SiteSpec:
    """One weight of a decoder block and the roles stacked in its output rows, in order.

    Attributes:
        module: dotted name inside the block.
        roles: the roles its output is split into; more than one is a fused weight.
        units: per role, the config field its share of the rows is proportional to; empty for
            equal shares.
        conv1d: the weight is stored `[in, out]` (transformers' Conv1D).
        pre_norm: the norm inside the block whose output this module reads, if any.
        post_norm: the norm inside the block that reads this module's output, if any.
    """

    module: str
    roles: tuple[Role, ...]
    units: tuple[str, ...] = ()
    conv1d: bool = False
    pre_norm: str | None = None
    post_norm: str | None = None

    def __post_init__(self) -> None:
        """Raise `ValueError` when the number of units is not that of the roles."""
        if self.units and len(self.units) != len(self.roles):
            raise ValueError(
                f"site {self.module}: {len(self.units)} units, wanted {len(self.roles)}, one a role"
            )


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """One family of models.

    Attributes:
        name: the family, and its file without `.toml`.
        model_types: values of `config.model_type` it covers.
        layers: dotted name, from the model's root, of the list of decoder blocks.
        embeddings: dotted name of the token embedding.
        final_norm: dotted name of the last norm.
        head: dotted name of the output projection.
        layer_count: config field with the number of layers.
        mlp_width: config field with the MLP's inner width (may be null there, as GPT-2's).
        norm_offset: a norm multiplies by `norm_offset + weight` (1 for Gemma).
        needs_bos: text without a leading BOS token is out of this family's range.
        sites: the weights of one block.
        layer_lists: config lists of one entry per layer besides those found by their name.
        counts_below: config fields that count the first layers of some kind.
        no_drop_when: config flags that make a layer's output depend on its number.
        refused: related model types that are not supported, and why.
    """

    name: str
    model_types: tuple[str, ...]
    layers: str
    embeddings: str
    final_norm: str
    head: str
    layer_count: str
    mlp_width: str
    norm_offset: int
    needs_bos: bool
    sites: tuple[SiteSpec, ...]
    layer_lists: tuple[str, ...] = ()
    counts_below: tuple[str, ...] = ()
    no_drop_when: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` when a role has two sites."""
        roles = [role for site in self.sites for role in site.roles]
        if len(roles) != len(set(roles)):
            raise ValueError(f"architecture {self.name}: a role has more than one site")

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles this family has, in the order of `Role`."""
        present = {role for site in self.sites for role in site.roles}
        return tuple(role for role in Role if role in present)

    def site_of(self, role: Role) -> SiteSpec:
        """Return the site that holds `role`; `UnsupportedModelError` when the family has none."""
        for site in self.sites:
            if role in site.roles:
                return site
        raise UnsupportedModelError(
            f"role {role}: {self.name} has none; it has {', '.join(self.roles)}"
        )


def parse_spec(data: Mapping[str, Any]) -> ArchSpec:
    """Build an `ArchSpec` from a parsed TOML file; unknown or missing keys raise `TypeError`."""
    sites = tuple(
        SiteSpec(**{**_frozen(site), "roles": tuple(Role(role) for role in site["roles"])})
        for site in data["sites"]
    )
    return ArchSpec(**{**_frozen(data), "sites": sites})


def _frozen(table: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a table's lists into tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


@cache
def known() -> tuple[ArchSpec, ...]:
    """Return every family, in the order of their names."""
    files = [f for f in resources.files(__name__).iterdir() if f.name.endswith(".toml")]
    specs = [parse_spec(tomllib.loads(file.read_text(encoding="utf-8"))) for file in files]
    return tuple(sorted(specs, key=lambda spec: spec.name))


def spec_for(model_type: str) -> ArchSpec:
    """Return the family of a `config.model_type`.

    Raises:
        UnsupportedModelError: unknown; names the known ones and the file to add.
    """
    for spec in known():
        if model_type in spec.model_types:
            return spec
    for spec in known():
        if model_type in spec.refused:
            raise UnsupportedModelError(f"model type {model_type!r}: {spec.refused[model_type]}")
    types = ", ".join(t for spec in known() for t in spec.model_types)
    raise UnsupportedModelError(
        f"model type {model_type!r} is not known; known: {types}; "
        f"to add it, write gccompress/architectures/{model_type}.toml after llama.toml"
    )


def split_rows(config: Any, site: SiteSpec, rows: int) -> tuple[tuple[Role, int, int], ...]:
    """Split a module's `rows` outputs over its roles in proportion to their units.

    Returns:
        Each role with its first row and one past its last, in the order they are stacked.

    Raises:
        UnsupportedModelError: the rows cannot be split so.
    """
    units = [int(getattr(config, name)) for name in site.units] or [1] * len(site.roles)
    size, rest = divmod(rows, sum(units))
    if rest:
        raise UnsupportedModelError(
            f"{site.module} has {rows} outputs, wanted a multiple of {sum(units)} to split over "
            f"{', '.join(site.roles)}; the config does not fit the weights"
        )
    parts, start = [], 0
    for role, unit in zip(site.roles, units, strict=True):
        parts.append((role, start, start + unit * size))
        start += unit * size
    return tuple(parts)


def role_shapes(config: Any, spec: ArchSpec) -> dict[Role, tuple[int, int]]:
    """Return the shape `(out, in)` that a config gives each role of its family."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    queries = heads * head_dim
    keys = int(getattr(config, "num_key_value_heads", None) or heads) * head_dim
    width = int(getattr(config, spec.mlp_width) or 4 * hidden)
    shapes = {
        Role.Q: (queries, hidden),
        Role.K: (keys, hidden),
        Role.V: (keys, hidden),
        Role.O: (hidden, queries),
        Role.GATE: (width, hidden),
        Role.UP: (width, hidden),
        Role.DOWN: (hidden, width),
    }
    return {role: shapes[role] for role in spec.roles}


def refuse_config(config: Any, name: str) -> None:
    """Raise `UnsupportedModelError` for a config that no family's data can describe.

    Args:
        config: a transformers config, or anything with its fields as attributes.
        name: what to call the model.
    """
    if hasattr(config, "gccompress"):
        raise UnsupportedModelError(
            f"{name} is already compressed, wanted a plain model; start from the original"
        )
    experts = [field for field in _EXPERT_FIELDS if getattr(config, field, None)]
    if experts:
        raise UnsupportedModelError(
            f"{name} is a mixture of experts (config has {experts[0]}), wanted one MLP per layer; "
            "no such family is supported yet"
        )
    if getattr(config, "is_heterogeneous", False):
        raise UnsupportedModelError(
            f"{name} has per_layer_config, wanted the same config for every layer; such models "
            "are not supported yet"
        )
