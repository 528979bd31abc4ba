"""The families' data files, and that no other module knows what they say."""

import re
from importlib import resources
from pathlib import Path

import pytest

import gccompress
from gccompress.architectures import ArchSpec, SiteSpec, known, parse_spec, spec_for
from gccompress.errors import UnsupportedModelError
from gccompress.roles import READS_RESIDUAL, WRITES_RESIDUAL, Role
from tests.tiny import FAMILIES, tiny_model

MINIMAL = {
    "name": "x",
    "model_types": ["x"],
    "layers": "l",
    "embeddings": "e",
    "final_norm": "n",
    "head": "h",
    "layer_count": "c",
    "mlp_width": "w",
    "norm_offset": 0,
    "needs_bos": False,
    "sites": [{"module": "m", "roles": ["q", "k"]}],
}

# Words of a family's own language: modules, fused weights, Conv1D names, per-layer config fields.
FAMILY_WORDS = re.compile(
    r"\b(?:[qkvo]_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj|c_attn|c_proj|c_fc"
    r"|self_attn|input_layernorm|post_attention_layernorm|pre_feedforward_layernorm"
    r"|post_feedforward_layernorm|ln_1|ln_2|embed_tokens|lm_head|max_window_layers)\b"
)


def test_every_family_is_known_and_has_a_tiny_model() -> None:
    assert sorted(spec.name for spec in known()) == sorted(FAMILIES)


@pytest.mark.parametrize("spec", known(), ids=lambda spec: spec.name)
def test_a_family_lies_in_the_file_of_its_name(spec: ArchSpec) -> None:
    assert resources.files("gccompress.architectures").joinpath(f"{spec.name}.toml").is_file()
    assert all(spec_for(model_type) is spec for model_type in spec.model_types)


def test_no_model_type_belongs_to_two_families() -> None:
    types = [t for spec in known() for t in (*spec.model_types, *spec.refused)]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("spec", known(), ids=lambda spec: spec.name)
def test_norms_stand_where_the_residual_is_read_or_written(spec: ArchSpec) -> None:
    for site in spec.sites:
        for role in site.roles:
            assert (site.pre_norm is not None) == (role in READS_RESIDUAL)
            assert site.post_norm is None or role in WRITES_RESIDUAL


@pytest.mark.parametrize("family", FAMILIES)
def test_paths_and_config_fields_exist(family: str) -> None:
    model, spec = tiny_model(family, layers=2), spec_for(family)
    for path in (spec.embeddings, spec.final_norm, spec.head, spec.layers):
        model.get_submodule(path)
    assert model.get_submodule(spec.embeddings) is model.get_input_embeddings()
    assert model.get_submodule(spec.head) is model.get_output_embeddings()
    fields = model.config.to_dict()
    assert fields[spec.layer_count] == 2
    units = {unit for site in spec.sites for unit in site.units}
    for field in {spec.mlp_width, *spec.counts_below, *spec.no_drop_when, *units}:
        assert field in fields


def test_gpt2_has_no_gate() -> None:
    spec = spec_for("gpt2")
    assert spec.roles == (Role.Q, Role.K, Role.V, Role.O, Role.UP, Role.DOWN)
    with pytest.raises(UnsupportedModelError, match="role gate: gpt2 has none; it has q, k"):
        spec.site_of(Role.GATE)


def test_unknown_family_is_refused_with_the_known_ones_and_the_file_to_add() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_for("falcon")
    message = str(caught.value)
    assert "'falcon'" in message and "gccompress/architectures/falcon.toml" in message
    assert all(family in message for family in FAMILIES)
    assert "\n" not in message


@pytest.mark.parametrize("model_type", ["gemma3", "gemma3n"])
def test_related_but_unsupported_type_is_refused_with_its_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"'{model_type}': (?!.*is not known)"):
        spec_for(model_type)


def test_minimal_data_is_a_spec() -> None:
    spec = parse_spec(MINIMAL)
    assert spec.roles == (Role.Q, Role.K)
    assert hash(spec) == hash(parse_spec(MINIMAL))


def test_unknown_and_missing_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="layer_list"):
        parse_spec({**MINIMAL, "layer_list": ["a"]})
    with pytest.raises(TypeError, match="final_norm"):
        parse_spec({k: v for k, v in MINIMAL.items() if k != "final_norm"})
    with pytest.raises(TypeError, match="conv"):
        parse_spec({**MINIMAL, "sites": [{"module": "m", "roles": ["q"], "conv": True}]})
    with pytest.raises(ValueError, match="'z' is not a valid Role"):
        parse_spec({**MINIMAL, "sites": [{"module": "m", "roles": ["z"]}]})


def test_contradictory_sites_are_refused() -> None:
    twice = [{"module": "a", "roles": ["q"]}, {"module": "b", "roles": ["q"]}]
    with pytest.raises(ValueError, match="more than one site"):
        parse_spec({**MINIMAL, "sites": twice})
    with pytest.raises(ValueError, match="1 units, wanted 2"):
        SiteSpec(module="m", roles=(Role.Q, Role.K), units=("heads",))


def _family_words(folder: Path) -> list[str]:
    """Return `file:line` of family words in a package outside its architectures."""
    return [
        f"{path.relative_to(folder)}:{number}: {line.strip()}"
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] != "architectures"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FAMILY_WORDS.search(line)
    ]


def test_only_the_architectures_know_what_a_family_calls_its_parts() -> None:
    assert gccompress.__file__ or gccompress.__path__
    assert _family_words(Path(next(iter(gccompress.__path__)))) == []


def test_the_search_for_family_words_finds_them(tmp_path: Path) -> None:
    (tmp_path / "architectures").mkdir()
    (tmp_path / "architectures" / "a.py").write_text('"q_proj"')
    (tmp_path / "b.py").write_text('ok\nx = "model.layers.0.mlp.gate_up_proj"\n')
    assert _family_words(tmp_path) == ['b.py:2: x = "model.layers.0.mlp.gate_up_proj"']
