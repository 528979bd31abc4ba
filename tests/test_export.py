"""Exports: plain models of every family that compute the same; GGUF read back by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from gccompress.checkpoints import compress_in_place, load_checkpoint, save_checkpoint
from gccompress.errors import CheckpointError, GccompressError, UnsupportedModelError
from gccompress.export import export, plain_model
from gccompress.gguf_tokenizer import vocabulary
from gccompress.modeling import base_classes
from gccompress.view import ModelView
from tests.mixed import mixed_layout, random_tensors, resized_layout
from tests.test_checkpoints import compressed
from tests.tiny import FAMILIES, TEXT, VOCAB, logits_of, tiny_model, tiny_tokenizer, tokens

IDS = tokens()
TEXTS = (TEXT, "It's 12345 o'clock,  isn't it?\n\n Été, 东京 🙂", " leading", "x")
GGUF: dict[str, dict[str, Any]] = {  # families, without what GGUF cannot say
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128},  # the only one that transformers' reader knows
}


def saved(model: PreTrainedModel, folder: Path, tokenizer: Any = None) -> Path:
    folder.mkdir()
    save_checkpoint(model, tokenizer or tiny_tokenizer(), folder)
    return folder


def resized(family: str, **kw: Any) -> PreTrainedModel:
    model = tiny_model(family, **kw)
    layout = resized_layout(model)
    return compress_in_place(model, layout, random_tensors(layout))


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float(theirs.std()) > 0.1
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------ dense


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["mixed", "resized"])
def test_a_dense_export_computes_the_same_without_this_package(
    family: str, kind: str, tmp_path: Path
) -> None:
    model = compressed(family) if kind == "mixed" else resized(family)
    folder = saved(model, tmp_path / "small")
    done = export(folder, tmp_path / "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert type(plain) is base_classes(family)[1]
    close(logits_of(plain, IDS), logits_of(model, IDS))
    for file in (tmp_path / "dense").iterdir():
        assert b"gccompress" not in file.read_bytes() and "gccompress" not in file.name, file
    assert "saves neither bytes" in done.note
    assert done.bytes == (tmp_path / "dense" / "model.safetensors").stat().st_size
    texts = [
        which.generate(IDS, max_new_tokens=8, do_sample=False, use_cache=cached)
        for which in (model, plain)
        for cached in (True, False)
    ]
    assert all(torch.equal(texts[0], text) for text in texts[1:])
    assert AutoTokenizer.from_pretrained(tmp_path / "dense")(TEXT) == tiny_tokenizer()(TEXT)


def test_mlps_are_padded_with_zeros_to_the_widest() -> None:
    plain = plain_model(resized("llama"))
    assert plain.config.intermediate_size == 44
    for layer, block in enumerate(plain.model.layers):
        width = 20 + 8 * layer
        for weight in (block.mlp.gate_proj.weight, block.mlp.up_proj.weight):
            assert weight.shape == (44, 48)
            assert not weight[width:].any() and weight[:width].any(dim=1).all()
        assert not block.mlp.down_proj.weight[:, width:].any()


def test_a_product_is_rounded_once() -> None:
    model = compressed("llama").bfloat16()
    layer = model.model.layers[0].self_attn.q_proj
    exact = layer.coef.weight.detach().double() @ layer.basis.weight.detach().double()
    weight = plain_model(model).model.layers[0].self_attn.q_proj.weight.detach()
    assert weight.dtype == torch.bfloat16
    assert float((weight.double() - exact).abs().max() / exact.abs().max()) < 2**-8


def test_a_plain_checkpoint_stays_what_it_is(tmp_path: Path) -> None:
    view = ModelView(tiny_model("qwen2", layers=6))
    view.drop_layers([1, 4])
    done = export(saved(view.model, tmp_path / "small"), tmp_path / "dense")
    assert done.max_abs_diff == 0 and "plain already" in done.note
    assert torch.equal(logits_of(load_checkpoint(done.path), IDS), logits_of(view.model, IDS))


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    folder = saved(compressed("llama"), tmp_path / "small")
    with pytest.raises(GccompressError, match="'onnx'.*dense, gguf"):
        export(folder, tmp_path / "out", format="onnx")
    with pytest.raises(GccompressError, match="not empty"):
        export(folder, folder)
    with pytest.raises(GccompressError, match="'q2'.*q8_0"):
        export(folder, tmp_path / "out", format="gguf", outtype="q2")
    (folder / "modeling_gccompress.py").unlink()  # not needed here
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json"):
        export(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


# ------------------------------------------------------------------ GGUF


def read_back(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file="model.gguf",
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()


@pytest.mark.parametrize("family", GGUF)
@pytest.mark.parametrize("kind", ["mixed", "resized", "dropped"])
def test_a_gguf_file_is_read_back_with_equal_logits(family: str, kind: str, tmp_path: Path) -> None:
    match kind:
        case "mixed":
            model = tiny_model(family, **GGUF[family])
            layout = mixed_layout(model)
            model = compress_in_place(model, layout, random_tensors(layout))
        case "resized":
            model = resized(family, **GGUF[family])
        case _:
            view = ModelView(tiny_model(family, layers=6, **GGUF[family]))
            view.drop_layers([1, 4])
            model = view.model
    done = export(saved(model, tmp_path / "small"), tmp_path / "gguf", format="gguf")
    assert done.bytes == (tmp_path / "gguf" / "model.gguf").stat().st_size
    assert [path.name for path in done.path.iterdir()] == ["model.gguf"]
    again = read_back(done.path)
    close(logits_of(again, IDS), logits_of(model, IDS))
    tokenizer = AutoTokenizer.from_pretrained(done.path, gguf_file="model.gguf")
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"], text
    assert tokenizer.eos_token_id == tiny_tokenizer().eos_token_id


@pytest.mark.parametrize(("outtype", "error"), [("f16", 1e-3), ("bf16", 1e-2), ("q8_0", 2e-2)])
def test_narrower_types_of_a_gguf_file(outtype: str, error: float, tmp_path: Path) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=96)
    folder = saved(model, tmp_path / "small")
    wide = export(folder, tmp_path / "f32", format="gguf")
    done = export(folder, tmp_path / "narrow", format="gguf", outtype=outtype)
    assert done.bytes < 0.7 * wide.bytes
    off = logits_of(read_back(done.path), IDS) - logits_of(model, IDS)
    assert float(off.norm() / logits_of(model, IDS).norm()) < 5 * error


REFUSED = {
    "family": ("gpt2", {}, "GGUF of gpt2 is not supported, wanted llama"),
    "window": ("mistral", {}, "mistral.*sliding window"),
    "layers with a window": ("qwen2", {}, "qwen2.*sliding window"),
    "rotary": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "'linear'",
    ),
    "bias": ("llama", {"attention_bias": True}, "attention_bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_say_is_refused(case: str, tmp_path: Path) -> None:
    family, fields, message = REFUSED[case]
    folder = saved(tiny_model(family, **fields), tmp_path / "small")
    with pytest.raises(UnsupportedModelError, match=message):
        export(folder, tmp_path / "out", format="gguf")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------ tokenizers


def test_the_vocabulary_has_a_token_for_every_row() -> None:
    words = vocabulary(tiny_tokenizer(), VOCAB + 5)
    assert (words.model, words.pre, words.add_bos) == ("gpt2", "gpt-2", True)
    assert words.tokens[:3] == ["<pad>", "<s>", "</s>"] and words.types[:4] == [3, 3, 3, 1]
    assert len(words.tokens) == len(words.types) == VOCAB + 5
    assert words.types[-1] == 5 and words.tokens[-1] == f"[PAD{VOCAB + 4}]"
    assert words.special == {"bos": 1, "eos": 2, "pad": 0}
    with pytest.raises(UnsupportedModelError, match="embeddings for 100"):
        vocabulary(tiny_tokenizer(), 100)


def cut_by(*steps: Any, prefix: bool = False) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with other pre-tokenizers."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return tokenizer


def test_how_text_is_cut_is_named_or_refused() -> None:
    level, no_regex = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use) for use in (True, False)
    )
    from tokenizers import Regex

    from gccompress.gguf_tokenizer import _PATTERNS

    assert vocabulary(cut_by(pre_tokenizers.Digits(True), level), VOCAB).pre == "smollm"
    for pattern, name in _PATTERNS.items():
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        assert vocabulary(cut_by(split, no_regex), VOCAB).pre == name
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True)
    for steps in ((pre_tokenizers.Whitespace(), level), (prefixed,), (no_regex,)):
        with pytest.raises(UnsupportedModelError, match="no name in GGUF.*--format dense"):
            vocabulary(cut_by(*steps), VOCAB)


def llama_like() -> PreTrainedTokenizerFast:
    """A small tokenizer built as Llama 2's: byte fallback, spaces as a letter, a leading space."""
    letters = sorted(set(TEXT) - {" "}) + ["▁"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + letters:
        vocab[token] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "s"), ("n", "e"), ("r", "e")]
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_a_tokenizer_like_llama_2s_survives(tmp_path: Path) -> None:
    tokenizer = llama_like()
    words = vocabulary(tokenizer, VOCAB)
    assert (words.model, words.pre, words.add_space_prefix) == ("llama", "", True)
    assert words.types[:4] == [2, 3, 3, 6]
    best = max(range(len(words.tokens)), key=lambda i: words.scores[i] or -1e9)
    assert words.tokens[best] == "th"
    folder = saved(tiny_model("llama"), tmp_path / "small", tokenizer)
    done = export(folder, tmp_path / "gguf", format="gguf")
    again = AutoTokenizer.from_pretrained(done.path, gguf_file="model.gguf")
    for text in (TEXT, "the there 东京"):
        assert again(text)["input_ids"] == tokenizer(text)["input_ids"], text


def test_a_tokenizer_of_another_kind_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(UnsupportedModelError, match="WordLevel, wanted BPE"):
        vocabulary(PreTrainedTokenizerFast(tokenizer_object=words), VOCAB)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*GGUF, "sentencepiece"])
def test_llama_cpp_reads_the_file_and_agrees(family: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("xllamacpp", reason="needs pip install xllamacpp")
    tokenizer = llama_like() if family == "sentencepiece" else tiny_tokenizer()
    family = "llama" if family == "sentencepiece" else family
    model = tiny_model(family, **GGUF[family])
    layout = mixed_layout(model)
    compress_in_place(model, layout, random_tensors(layout))
    done = export(saved(model, tmp_path / "small", tokenizer), tmp_path / "gguf", format="gguf")
    options = llama_cpp.CommonParams()
    options.model.path = str(done.path / "model.gguf")
    options.n_ctx, options.cpuparams.n_threads, options.warmup = 128, 1, False
    server = llama_cpp.Server(options)
    compared = 0
    for prompt in ("a", "the", "The river rose in spring and the people"):
        request = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": 4}
        answer = server.handle_completions(request)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        assert answer["usage"]["prompt_tokens"] == ids.shape[1]
        found = answer["choices"][0]["logprobs"]
        if found is None:  # the most likely token is half a letter
            continue
        shares = logits_of(model, ids)[0, -1].log_softmax(-1)
        for token in found["content"][0]["top_logprobs"]:
            assert abs(token["logprob"] - float(shares[token["id"]])) < 0.02  # its cache is f16
            compared += 1
    assert compared
