"""The compressed layers against matrices multiplied out, the build, and what is refused."""

import ast
import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gccompress import modeling
from gccompress.architectures import known
from gccompress.checkpoints import compress_in_place
from tests.mixed import mixed_layout, random_tensors, sites
from tests.tiny import FAMILIES, logits_of, tiny_model, tokens

IN, OUT, RANK = 6, 10, 3
IDS = tokens()
ROOT = Path(__file__).resolve().parent.parent


def spec_of(kind: str, bias: bool) -> dict[str, Any]:
    """A spec of each kind, all `[OUT, IN]`."""
    specs: dict[str, dict[str, Any]] = {
        "low_rank": {"kind": "low_rank", "in": IN, "out": OUT, "rank": RANK, "bias": bias},
        "shared_in": {"kind": "shared_in", "basis": "a", "out": OUT, "bias": bias},
        "shared_out": {"kind": "shared_out", "basis": "b", "in": IN, "bias": bias},
        "dense": {"kind": "dense", "in": IN, "out": OUT, "bias": bias},
    }
    if kind != "concat":
        return specs[kind]
    parts = [{**specs["shared_in"], "out": 6}, {**specs["dense"], "out": 4}]
    return {"kind": "concat", "parts": parts}


def layout_of(**modules: dict[str, Any]) -> dict[str, Any]:
    bases = {"a": {"in": IN, "out": RANK}, "b": {"in": RANK, "out": OUT}}
    return {"version": 1, "bases": bases, "modules": modules}


def built(spec: dict[str, Any]) -> nn.Module:
    """A model of one Linear, replaced, with random parameters and biases."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"lin": nn.Linear(IN, OUT)})
    modeling.build_(model, layout_of(lin=spec))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


# ------------------------------------------------------------------ layers

EXPECTED = {  # names and shapes are the file format
    "low_rank": {"lin.down.weight": (RANK, IN), "lin.up.weight": (OUT, RANK), "lin.up.bias": OUT},
    "shared_in": {"lin.coef.weight": (OUT, RANK), "lin.coef.bias": OUT},
    "shared_out": {"lin.coef.weight": (RANK, IN), "lin.bias": OUT},
    "dense": {"lin.weight": (OUT, IN), "lin.bias": OUT},
    "concat": {
        "lin.parts.0.coef.weight": (6, RANK),
        "lin.parts.0.coef.bias": 6,
        "lin.parts.1.weight": (4, IN),
        "lin.parts.1.bias": 4,
    },
}
BASES = {"gccompress_bases.a.weight": (RANK, IN), "gccompress_bases.b.weight": (OUT, RANK)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", EXPECTED)
def test_parameters_have_the_names_and_shapes_of_the_format(kind: str, bias: bool) -> None:
    state = built(spec_of(kind, bias)).state_dict()
    expected = {
        name: shape if isinstance(shape, tuple) else (shape,)
        for name, shape in {**EXPECTED[kind], **BASES}.items()
        if bias or not name.endswith("bias")
    }
    if kind != "dense":
        expected["lin.weight"] = (1,)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_layer_computes_its_matrices_multiplied_out(kind: str) -> None:
    model = built(spec_of(kind, True))
    p = {name.removeprefix("lin."): tensor for name, tensor in model.state_dict().items()}
    a, b = p["gccompress_bases.a.weight"], p["gccompress_bases.b.weight"]
    match kind:
        case "low_rank":
            weight, bias = p["up.weight"] @ p["down.weight"], p["up.bias"]
        case "shared_in":
            weight, bias = p["coef.weight"] @ a, p["coef.bias"]
        case "shared_out":
            weight, bias = b @ p["coef.weight"], p["bias"]
        case "dense":
            weight, bias = p["weight"], p["bias"]
        case _:
            weight = torch.cat([p["parts.0.coef.weight"] @ a, p["parts.1.weight"]])
            bias = torch.cat([p["parts.0.coef.bias"], p["parts.1.bias"]])
    x = torch.randn(2, 5, IN)
    layer = model.get_submodule("lin")
    torch.testing.assert_close(layer(x), x @ weight.T + bias)
    torch.testing.assert_close(modeling.dense_weight(layer), weight)
    assert (layer.in_features, layer.out_features) == (IN, OUT)


def test_a_concat_may_own_one_bias() -> None:
    spec = {**spec_of("concat", False), "bias": True}
    model = built(spec)
    x = torch.randn(2, IN)
    layer = model.get_submodule("lin")
    weight = modeling.dense_weight(layer)
    torch.testing.assert_close(layer(x), x @ weight.T + model.state_dict()["lin.bias"])


# ------------------------------------------------------------------ what is refused

BAD_LAYOUTS: dict[str, tuple[Any, str]] = {
    "absent": (None, "absent"),
    "no version": ({"modules": {}}, "version None, wanted 1"),
    "newer": ({**layout_of(), "version": 2}, "version 2, wanted 1"),
    "kind": (layout_of(lin={"kind": "sparse"}), "lin.*'sparse'"),
    "field": (layout_of(lin={"kind": "low_rank", "in": IN, "out": OUT}), "lin.*'rank'"),
    "no kind": (layout_of(lin={"in": IN}), "lin.*'kind'"),
    "type": (layout_of(lin={**spec_of("dense", True), "in": "six"}), "lin"),
    "basis": (layout_of(lin={**spec_of("shared_in", True), "basis": "z"}), "lin.*'z'"),
    "site": (layout_of(other=spec_of("dense", True)), "no module other"),
    "parts": (
        layout_of(
            lin={
                "kind": "concat",
                "parts": [spec_of("dense", True), {"kind": "dense", "in": IN + 1, "out": 2}],
            }
        ),
        r"lin.*\[6, 7\]",
    ),
}


@pytest.mark.parametrize("case", BAD_LAYOUTS)
def test_a_malformed_layout_is_refused_by_name(case: str) -> None:
    layout, message = BAD_LAYOUTS[case]
    model = nn.ModuleDict({"lin": nn.Linear(IN, OUT)})
    with pytest.raises(RuntimeError, match=message) as caught:
        modeling.build_(model, layout)
    assert "\n" not in str(caught.value)
    assert type(model["lin"]) is nn.Linear, "the model is untouched"


def test_a_square_dense_weight_in_place_of_a_conv1d_is_refused() -> None:
    """Plain GPT-2 would read it transposed without noticing; as part of a concat it cannot."""
    model = tiny_model("gpt2", layers=1)
    name = "transformer.h.0.attn.c_proj"
    dense = {"kind": "dense", "in": 48, "out": 48, "bias": True}
    with pytest.raises(RuntimeError, match="c_proj.*square"):
        modeling.build_(model, layout_of(**{name: dense}))
    modeling.build_(model, layout_of(**{name: {"kind": "concat", "parts": [dense]}}))


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RuntimeError, match="'bert'.*llama"):
        modeling.compressed_classes("bert")


# ------------------------------------------------------------------ whole models


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A plain model that holds the multiplied-out weights, and the compressed model."""
    plain = tiny_model(request.param)
    layout = mixed_layout(plain)
    tensors = random_tensors(layout)
    compressed = compress_in_place(copy.deepcopy(plain), layout, tensors)
    with torch.no_grad():
        for name, *_, bias in sites(plain):
            old, new = plain.get_submodule(name), compressed.get_submodule(name)
            if name in layout["modules"]:
                weight = modeling.dense_weight(new)
                old.weight.copy_(weight if isinstance(old, nn.Linear) else weight.T)
                if bias:
                    old.bias.copy_(_bias(new))
    return plain, compressed


def _bias(module: nn.Module) -> Tensor:
    """The bias of a layer of any kind: what it maps zero to."""
    return module(torch.zeros(1, int(module.in_features)))[0]


def test_the_layout_under_test_has_every_kind() -> None:
    kinds = set()
    for family in FAMILIES:
        specs = list(mixed_layout(tiny_model(family))["modules"].values())
        kinds |= {spec["kind"] for spec in specs}
        assert {"shared_in", "shared_out", "low_rank"} <= kinds
    assert kinds == set(EXPECTED)


def test_a_compressed_model_computes_what_the_plain_one_does(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    plain, compressed = pair
    assert compressed.gccompress_bases
    torch.testing.assert_close(
        logits_of(compressed, IDS), logits_of(plain, IDS), atol=1e-4, rtol=1e-4
    )


def test_hidden_states_are_still_returned(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    # Copies, because transformers leaves hooks behind that cannot be pickled.
    outputs = [copy.deepcopy(model)(IDS, output_hidden_states=True) for model in pair]
    for mine, theirs in zip(outputs[1].hidden_states, outputs[0].hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


def test_generation_with_a_cache_equals_generation_without(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    texts = [
        pair[1].generate(IDS, max_new_tokens=16, do_sample=False, use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(*texts)
    assert texts[0].shape[1] > IDS.shape[1]


def test_gradients_reach_a_basis_from_every_user(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    """The gradient of a basis is the sum of those of the multiplied-out weights, projected."""
    plain, compressed = pair
    layout = compressed.config.gccompress
    for model in pair:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
    checked = 0
    for key, basis in compressed.gccompress_bases.items():
        users = {n: s for n, s in layout["modules"].items() if s.get("basis") == key}
        if len(users) < 2:
            continue
        expected = torch.zeros_like(basis.weight)
        for name, spec in users.items():
            old = plain.get_submodule(name)
            gradient = old.weight.grad if isinstance(old, nn.Linear) else old.weight.grad.T
            coef = compressed.get_submodule(name).coef.weight
            inner = spec["kind"] == "shared_in"
            expected += coef.T @ gradient if inner else gradient @ coef.T
        torch.testing.assert_close(basis.weight.grad, expected, atol=1e-4, rtol=1e-3)
        checked += 1
    assert checked


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_leaves_the_gradients(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    model = copy.deepcopy(pair[1])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4)


def test_each_basis_is_one_parameter_after_copies_and_pickles(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    before = logits_of(pair[1], IDS)
    for model in (copy.deepcopy(pair[1]), pickle.loads(pickle.dumps(pair[1]))):
        assert type(model) is type(pair[1])
        assert torch.equal(logits_of(model, IDS), before)
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        keys = set(model.config.gccompress["bases"])
        assert sum("bases" in name for name in names) == len(keys)
        with torch.no_grad():
            for basis in model.gccompress_bases.values():
                basis.weight.zero_()
        assert not torch.equal(logits_of(model, IDS), before), "users see their own container"
        assert torch.equal(logits_of(pair[1], IDS), before), "and only their own"


def test_a_model_from_a_config_starts_with_bases_of_unit_gain(
    pair: tuple[PreTrainedModel, PreTrainedModel],
) -> None:
    model = AutoModelForCausalLM.from_config(pair[1].config).eval()
    assert type(model) is type(pair[1])
    for basis in model.gccompress_bases.values():
        assert 0.7 < float(basis.weight.detach().std()) * basis.in_features**0.5 < 1.3
    assert torch.isfinite(logits_of(model, IDS)).all()
    model.load_state_dict(pair[1].state_dict(), strict=True)
    assert torch.equal(logits_of(model, IDS), logits_of(pair[1], IDS))


# ------------------------------------------------------------------ one product for several users


def _query_key_model() -> tuple[PreTrainedModel, list[int]]:
    """A llama of 4 layers whose q and k share one basis, and a count of its products."""
    model = tiny_model("llama")
    modules = {
        name: {"kind": "shared_in", "basis": "qk", "out": rows}
        for name, _, leaf, _, rows, _ in sites(model)
        if leaf.endswith(("q_proj", "k_proj"))
    }
    layout = {"version": 1, "bases": {"qk": {"in": 48, "out": RANK}}, "modules": modules}
    model = compress_in_place(model, layout, random_tensors(layout))
    count = [0]

    def add_one(*_: object) -> None:
        count[0] += 1

    model.gccompress_bases["qk"].register_forward_hook(add_one)
    return model, count


def test_a_product_is_computed_once_for_users_of_one_input_when_nothing_is_trained() -> None:
    model, count = _query_key_model()
    trained = model(IDS).logits
    assert count == [8], "with gradients, once per user"
    assert torch.equal(logits_of(model, IDS), trained)
    assert count == [8 + 4], "without, once per layer"
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, trained)
    assert count == [8 + 4 + 4]


def test_no_product_outlives_the_forward() -> None:
    model, _ = _query_key_model()
    logits_of(model, IDS)
    assert model.gccompress_bases._last is None
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(1, 48)
    with torch.no_grad():
        first = layer(x)
        model.gccompress_bases["qk"].weight.data.mul_(2)
        assert torch.equal(layer(x), 2 * first)


def test_a_forward_that_fails_leaves_nothing_for_the_next() -> None:
    model, _ = _query_key_model()
    expected = logits_of(model, IDS)
    stop = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, IDS)
    stop.remove()
    assert torch.equal(logits_of(model, IDS), expected)


# ------------------------------------------------------------------ registration


def test_the_families_are_those_of_the_architectures() -> None:
    wanted = sorted(model_type for spec in known() for model_type in spec.model_types)
    assert sorted(modeling.MODEL_TYPES) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_classes_give_the_compressed_classes(family: str) -> None:
    config_class, model_class = modeling.compressed_classes(family)
    config = AutoConfig.for_model(f"gccompress_{family}", gccompress=layout_of())
    assert type(config) is config_class
    assert CONFIG_MAPPING[f"gccompress_{family}"] is config_class
    assert model_class.config_class is config_class
    for made in (config_class, model_class):
        assert getattr(modeling, made.__name__) is made
        assert made.__module__ == "gccompress.modeling"
    assert type(pickle.loads(pickle.dumps(config))) is config_class


def test_other_names_are_not_made_up() -> None:
    with pytest.raises(AttributeError, match="GccBertConfig"):
        modeling.GccBertConfig  # noqa: B018


IMPORTS = {
    "before": "import gccompress\nassert not {'torch', 'transformers'} & set(sys.modules)\n"
    "import transformers.models.auto.configuration_auto",
    "after": "import transformers.models.auto.configuration_auto\nimport gccompress",
    "inside": "import gccompress.checkpoints",
    "modeling": "import gccompress.modeling\nimport transformers.models.auto.configuration_auto",
}


@pytest.mark.parametrize("order", IMPORTS)
def test_registration_works_in_any_order_and_imports_no_family(order: str) -> None:
    code = (
        f"import json, sys\n{IMPORTS[order]}\n"
        "families = [m for m in sys.modules if m.startswith('transformers.models.')]\n"
        "from transformers import CONFIG_MAPPING\n"
        "finders = [f for f in sys.meta_path if type(f).__module__.startswith('gccompress')]\n"
        "known = [k for k in CONFIG_MAPPING if k.startswith('gccompress_')]\n"
        "print(json.dumps([families, len(finders), known]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    families, finders, found = json.loads(done.stdout.splitlines()[-1])
    assert {name.split(".")[2] for name in families} <= {"auto"}
    assert finders == 0, "the import hook is gone once it has done its work"
    assert sorted(found) == sorted(f"gccompress_{family}" for family in FAMILIES)


def test_transformers_finds_the_imports_of_the_modeling_file() -> None:
    """Its loader of remote code checks them before it runs the file."""
    from transformers.dynamic_module_utils import get_imports, get_relative_imports

    path = ROOT / "gccompress" / "modeling.py"
    assert set(get_imports(path)) - set(sys.stdlib_module_names) == {"torch", "transformers"}
    assert get_relative_imports(path) == []
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 11))
