"""One contract for the view of every family: weights as `[out, in]`, write back, drop layers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from gccompress.errors import ModelError, NumericalError, PlanError, UnsupportedModelError
from gccompress.roles import READS_RESIDUAL, Role
from gccompress.view import ModelView
from tests.tiny import (
    FAMILIES,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    WIDTH,
    logits_of,
    tiny_model,
    tokens,
)

LAYERS = 6
IDS = tokens()
CASES = [
    (family, role) for family in FAMILIES for role in Role if (family, role) != ("gpt2", Role.GATE)
]
DROPS = [[0], [LAYERS - 1], [1, 2], [0, 2, 4], [1, 3, 5], [0, 1, 2, 3, 4], []]


def _view(family: str, layers: int = 2, **overrides: Any) -> ModelView:
    return ModelView(tiny_model(family, layers=layers, **overrides))


def _seen(model: PreTrainedModel, module: str) -> tuple[Tensor, Tensor]:
    """Run the model and return the input and output of one module."""
    seen: list[tuple[Tensor, Tensor]] = []
    hook = model.get_submodule(module).register_forward_hook(
        lambda _, inputs, output: seen.append((inputs[0], output))
    )
    logits_of(model, IDS)
    hook.remove()
    return seen[0]


def _state(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


# Reading


def test_shapes_are_out_in() -> None:
    view = _view("llama")
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    assert [view.shape(role, 1) for role in view.roles] == [
        (q, HIDDEN),
        (kv, HIDDEN),
        (kv, HIDDEN),
        (HIDDEN, q),
        (WIDTH, HIDDEN),
        (WIDTH, HIDDEN),
        (HIDDEN, WIDTH),
    ]
    assert view.hidden_size == HIDDEN and view.num_layers == 2


@pytest.mark.parametrize(("family", "role"), CASES)
def test_weight_and_bias_are_what_the_module_computes(family: str, role: Role) -> None:
    view = _view(family)
    site = view.site(role, 1)
    x, y = _seen(view.model, site.module)
    weight, bias = view.weight(role, 1), view.bias(role, 1)
    assert weight.shape == view.shape(role, 1) and not weight.requires_grad
    ours = x @ weight.T + (0 if bias is None else bias)
    torch.testing.assert_close(ours, y[..., site.start : site.stop], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_cover_each_module_once(family: str) -> None:
    view = _view(family)
    for role in view.roles:
        site = view.site(role, 0)
        assert site.fused == (len(site.parts) > 1)
        assert (role, site.start, site.stop) in site.parts
        edges = [edge for _, start, stop in site.parts for edge in (start, stop)]
        assert edges[0] == 0 and edges[1:-1:2] == edges[2::2]
        assert edges[-1] == _seen(view.model, site.module)[1].shape[-1]


def test_fused_rows_follow_the_heads() -> None:
    view = _view("phi3")
    size = HIDDEN // HEADS
    q, kv = HEADS * size, KV_HEADS * size
    assert view.site(Role.V, 1).parts == (
        (Role.Q, 0, q),
        (Role.K, q, q + kv),
        (Role.V, q + kv, q + 2 * kv),
    )
    assert view.site(Role.UP, 0).start == WIDTH


@pytest.mark.parametrize(("family", "biased"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_bias_is_there_when_the_family_has_one(family: str, biased: bool) -> None:
    view = _view(family)
    assert (view.bias(Role.K, 0) is not None) == biased
    assert (_view("llama", attention_bias=True).bias(Role.O, 0) is None) is False


@pytest.mark.parametrize(("family", "role"), CASES)
def test_in_scale_is_the_norm_before(family: str, role: Role) -> None:
    view = _view(family)
    scale = view.in_scale(role, 1)
    if role not in READS_RESIDUAL:
        assert scale is None
        return
    assert scale is not None and scale.shape == (HIDDEN,)
    spec = view.spec.site_of(role)
    norm = f"{view.spec.layers}.1.{spec.pre_norm}"
    x, y = _seen(view.model, norm)
    assert torch.equal(_seen(view.model, view.site(role, 1).module)[0], y)
    torch.testing.assert_close(
        _normal(view.model.get_submodule(norm), x) * scale, _bare(y, norm, view)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_out_scale_is_the_norm_after(family: str) -> None:
    view = _view(family)
    for role in view.roles:
        scale = view.out_scale(role, 1)
        if not family.startswith("gemma") or role in READS_RESIDUAL:
            assert scale is None
            continue
        assert scale is not None and scale.shape == (view.shape(role, 1)[0],)
        norm = f"{view.spec.layers}.1.{view.spec.site_of(role).post_norm}"
        x, y = _seen(view.model, norm)
        assert torch.equal(_seen(view.model, view.site(role, 1).module)[1], x)
        torch.testing.assert_close(_normal(view.model.get_submodule(norm), x) * scale, y)


def _normal(norm: nn.Module, x: Tensor) -> Tensor:
    """Normalise as a norm does, without its scale and shift."""
    if isinstance(norm, nn.LayerNorm):
        return nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _bare(y: Tensor, norm: str, view: ModelView) -> Tensor:
    """Take a norm's shift, where it has one, off its output."""
    shift = getattr(view.model.get_submodule(norm), "bias", None)
    return y if shift is None else y - shift


def test_scales_are_fp32_in_a_half_precision_model() -> None:
    view = ModelView(tiny_model("gemma2", layers=1).to(torch.bfloat16))
    scale = view.in_scale(Role.Q, 0)
    assert scale is not None and scale.dtype is torch.float32
    assert view.weight(Role.Q, 0).dtype is torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_params_are_the_matrices_of_the_blocks(family: str) -> None:
    view = _view(family, layers=3)
    blocks = view.model.get_submodule(view.spec.layers)
    assert view.decoder_params() == sum(p.numel() for p in blocks.parameters() if p.dim() == 2)


def test_shapes_need_no_data() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_model("phi3").config)
    assert ModelView(model).decoder_params() == _view("phi3", layers=4).decoder_params()


# Whether a role is the right one: what it does, not where it lies


def _double(view: ModelView, role: Role) -> None:
    """Double a role's weight and bias in layer 1."""
    view.set_weight(role, 1, 2 * view.weight(role, 1))
    bias = view.bias(role, 1)
    if bias is not None:
        bias.mul_(2)


@pytest.mark.parametrize(
    ("doubled", "read_by", "linear"),
    [
        (Role.V, Role.O, True),
        (Role.Q, Role.O, False),
        (Role.K, Role.O, False),
        (Role.UP, Role.DOWN, True),
        (Role.GATE, Role.DOWN, False),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_only_v_and_up_act_linearly(
    family: str, doubled: Role, read_by: Role, linear: bool
) -> None:
    view = _view(family)
    if doubled not in view.roles:
        pytest.skip(f"{family} has no {doubled}")
    module = view.site(read_by, 1).module
    before = _seen(view.model, module)[0]
    _double(view, doubled)
    after = _seen(view.model, module)[0]
    gated = Role.GATE in view.roles or doubled is Role.V
    assert torch.equal(after, 2 * before) == (linear and gated)


def test_a_shift_of_all_keys_changes_nothing_and_of_all_queries_does() -> None:
    view = _view("gpt2")  # no rotation between k and the product with q
    before = logits_of(view.model, IDS)
    shifted = {}
    for role in (Role.K, Role.Q):
        bias = view.bias(role, 1)
        assert bias is not None
        bias.add_(1)
        shifted[role] = logits_of(view.model, IDS)
        bias.sub_(1)
    torch.testing.assert_close(shifted[Role.K], before, rtol=1e-4, atol=1e-4)
    assert (shifted[Role.Q] - before).abs().max() > 0.01


# Writing


@pytest.mark.parametrize("family", FAMILIES)
def test_writing_back_what_was_read_leaves_the_logits_bit_equal(family: str) -> None:
    view = _view(family)
    before = logits_of(view.model, IDS)
    read = {(r, i): view.weight(r, i).clone() for r in view.roles for i in range(2)}
    for (role, layer), weight in read.items():
        view.set_weight(role, layer, torch.zeros_like(weight))
    assert not torch.equal(logits_of(view.model, IDS), before)
    for (role, layer), weight in read.items():
        view.set_weight(role, layer, weight)
    assert torch.equal(logits_of(view.model, IDS), before)


@pytest.mark.parametrize(("family", "role"), CASES)
def test_writing_changes_that_role_alone(family: str, role: Role) -> None:
    view = _view(family)
    before, logits = _state(view.model), logits_of(view.model, IDS)
    others = {
        (r, i): view.weight(r, i).clone()
        for r in view.roles
        for i in range(2)
        if (r, i) != (role, 1)
    }
    new = torch.randn(view.shape(role, 1), generator=torch.Generator().manual_seed(1))
    view.set_weight(role, 1, new)
    assert torch.equal(view.weight(role, 1), new)
    assert all(torch.equal(view.weight(*key), weight) for key, weight in others.items())
    after = view.model.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [f"{view.site(role, 1).module}.weight"]
    assert not torch.equal(logits_of(view.model, IDS), logits)


def test_writing_casts_to_the_model() -> None:
    view = ModelView(tiny_model("gpt2", layers=1).to(torch.bfloat16))
    new = torch.randn(view.shape(Role.K, 0), dtype=torch.float64)
    view.set_weight(Role.K, 0, new)
    assert torch.equal(view.weight(Role.K, 0), new.to(torch.bfloat16))


def test_writing_another_shape_is_refused() -> None:
    view = _view("llama")
    with pytest.raises(PlanError, match=r"layer 1 k: .*\(48, 32\), wanted \(32, 48\)"):
        view.set_weight(Role.K, 1, view.weight(Role.K, 1).T)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_writing_what_is_not_finite_in_the_models_dtype_is_refused(bad: float) -> None:
    view = ModelView(tiny_model("llama", layers=1).to(torch.float16))
    before = view.weight(Role.O, 0).clone()
    new = before.float()
    new[3, 4] = bad
    with pytest.raises(NumericalError, match="layer 0 o"):
        view.set_weight(Role.O, 0, new)
    assert torch.equal(view.weight(Role.O, 0), before)


# Dropping layers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drop", DROPS, ids=str)
def test_dropping_equals_passing_the_layers_by(family: str, drop: list[int]) -> None:
    model = tiny_model(family, layers=LAYERS)
    passed_by = copy.deepcopy(model)
    wanted = ModelView(passed_by)
    for i in drop:
        wanted.layer(i).register_forward_hook(lambda _, inputs, output: inputs[0])
    view = ModelView(model)
    view.drop_layers(drop)
    assert view.num_layers == LAYERS - len(drop)
    assert torch.equal(logits_of(model, IDS), logits_of(passed_by, IDS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drop", [[0], [1, 2], [0, 2, 4], [1, 3, 5]], ids=str)
def test_dropped_model_generates_and_reloads(family: str, drop: list[int], tmp_path: Path) -> None:
    model = tiny_model(family, layers=LAYERS)
    view = ModelView(model)
    kinds = _kinds(view)
    view.drop_layers(drop)
    kept = [i for i in range(LAYERS) if i not in drop]
    assert _kinds(view) == [kinds[i] for i in kept]
    _generates_the_same_without_cache(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert _kinds(ModelView(again)) == _kinds(view)
    assert torch.equal(logits_of(again, IDS), logits_of(model, IDS))
    _generates_the_same_without_cache(again)


def _kinds(view: ModelView) -> list[tuple[Any, Any]]:
    """Return each layer's kind of attention, as its modules have it and as the config says."""
    said = getattr(view.model.config, "layer_types", None) or [None] * view.num_layers
    assert len(said) == view.num_layers
    kinds = []
    for i in range(view.num_layers):
        modules = view.layer(i).modules()
        windows = [m.sliding_window for m in modules if hasattr(m, "sliding_window")]
        kinds.append((windows, said[i]))
    return kinds


def _generates_the_same_without_cache(model: PreTrainedModel) -> None:
    """Check greedy tokens past the sliding window, and the scores they were chosen by."""
    options = {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    ids = IDS[:1, :14]
    cached = model.generate(ids, **options)
    plain = model.generate(ids, use_cache=False, **options)
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(
        torch.stack(cached.scores), torch.stack(plain.scores), rtol=1e-4, atol=1e-4
    )


def test_sliding_and_full_attention_stay_with_their_layers() -> None:
    view = _view("gemma3_text", layers=LAYERS)
    assert view.model.config.layer_types == 2 * (2 * ["sliding_attention"] + ["full_attention"])
    view.drop_layers([0, 1, 4])
    assert view.model.config.layer_types == [
        "full_attention",
        "sliding_attention",
        "full_attention",
    ]


def test_the_count_of_the_first_kind_is_lowered() -> None:
    view = _view("qwen2", layers=LAYERS)  # full attention in layers 0, 1, 2
    view.drop_layers([1, 2, 5])
    assert view.model.config.max_window_layers == 1
    assert view.model.config.layer_types == ["full_attention"] + 2 * ["sliding_attention"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_renumbered(family: str) -> None:
    view = _view(family, layers=LAYERS)
    view.drop_layers([0, 3])
    for i in range(view.num_layers):
        numbers = {m.layer_idx for m in view.layer(i).modules() if hasattr(m, "layer_idx")}
        assert numbers == {i}


def test_lists_that_only_happen_to_be_as_long_as_the_model_stay() -> None:
    view = _view("llama", layers=2, eos_token_id=[2, 5])
    view.drop_layers([0])
    assert view.model.config.eos_token_id == [2, 5]


def test_dropping_twice_is_dropping_at_once() -> None:
    once, twice = _view("gemma2", layers=LAYERS), _view("gemma2", layers=LAYERS)
    once.drop_layers({1, 2, 5})
    twice.drop_layers([2])
    twice.drop_layers((1, 4))
    assert torch.equal(logits_of(once.model, IDS), logits_of(twice.model, IDS))
    assert once.model.config.to_dict() == twice.model.config.to_dict()


@pytest.mark.parametrize(
    ("drop", "fault"),
    [
        ([2], r"\[2\] out of range, wanted distinct numbers in 0..1"),
        ([-1], r"\[-1\] out of range"),
        ([1, 1], r"\[1\] given twice"),
        ([0, 1], "all 2, wanted at least one left"),
    ],
)
def test_impossible_drops_are_refused_and_change_nothing(drop: list[int], fault: str) -> None:
    view = _view("gemma2")
    before = view.model.config.to_dict()
    with pytest.raises(PlanError, match=fault):
        view.drop_layers(drop)
    assert view.num_layers == 2 and view.model.config.to_dict() == before


def test_gpt2_with_inverse_layer_scaling_keeps_its_layers() -> None:
    view = _view("gpt2", scale_attn_by_inverse_layer_idx=True)
    view.drop_layers([])
    with pytest.raises(UnsupportedModelError, match="scale_attn_by_inverse_layer_idx"):
        view.drop_layers([0])
    assert view.num_layers == 2


# What is refused


class Linear4bit(nn.Linear):
    """Stands for bitsandbytes' class of that name, which is an nn.Linear too."""


def test_unknown_family_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(
        _config("opt", hidden_size=16, ffn_dim=16, num_attention_heads=2, word_embed_proj_dim=16)
    )
    with pytest.raises(UnsupportedModelError, match="'opt' is not known; known: .*opt.toml"):
        ModelView(model)


def test_mixture_of_experts_is_refused() -> None:
    model = tiny_model("llama", layers=1)
    model.config = _config("mixtral", num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match="mixture of experts .*num_"):
        ModelView(model)


def test_image_and_text_wrapper_is_refused() -> None:
    model = tiny_model("gemma3_text", layers=1)
    model.config = _config("gemma3")
    with pytest.raises(UnsupportedModelError, match="'gemma3': the image-and-text wrapper"):
        ModelView(model)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_config_is_refused(method: str) -> None:
    model = tiny_model("llama", layers=1)
    model.config.quantization_config = {"quant_method": method}
    with pytest.raises(UnsupportedModelError, match=rf"quantised \({method}\)"):
        ModelView(model)


def test_model_marked_quantised_is_refused() -> None:
    model = tiny_model("llama", layers=1)
    model.is_quantized = True
    with pytest.raises(UnsupportedModelError, match="quantised"):
        ModelView(model)


def test_quantised_or_wrapped_module_is_refused() -> None:
    model = tiny_model("llama", layers=2)
    site = ModelView(model).site(Role.UP, 1)
    model.set_submodule(site.module, Linear4bit(HIDDEN, WIDTH, bias=False))
    with pytest.raises(UnsupportedModelError, match=rf"{site.module} is a Linear4bit, wanted"):
        ModelView(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers deprecates
def test_adapter_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", layers=1)
    target = ModelView(model).site(Role.Q, 0).module
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))
    with pytest.raises(UnsupportedModelError, match="without wrappers"):
        ModelView(wrapped)
    with pytest.raises(UnsupportedModelError, match="adapters merged"):
        ModelView(model)


def test_compressed_model_is_refused() -> None:
    model = tiny_model("llama", layers=1)
    model.config.gccompress = {"version": 1}
    with pytest.raises(UnsupportedModelError, match="already compressed"):
        ModelView(model)


def test_layers_of_different_configs_are_refused() -> None:
    model = tiny_model("llama", layers=2)
    model.config.per_layer_config = {1: {"intermediate_size": 32}}
    with pytest.raises(UnsupportedModelError, match="per_layer_config"):
        ModelView(model)


def test_model_without_head_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaModel has no list of layers"):
        ModelView(AutoModel.from_config(tiny_model("llama", layers=1).config))


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Linear has no config with a model_type"):
        ModelView(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_config_with_another_number_of_layers_is_refused() -> None:
    model = tiny_model("llama", layers=2)
    model.config.num_hidden_layers = 3
    with pytest.raises(ModelError, match="has 2 layers, its config's .* says 3"):
        ModelView(model)


def test_heads_that_do_not_fit_a_fused_weight_are_refused() -> None:
    model = tiny_model("phi3", layers=1)
    model.config.num_key_value_heads = 5
    with pytest.raises(UnsupportedModelError, match="does not fit the weights"):
        ModelView(model)


def _config(model_type: str, **fields: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **fields)
