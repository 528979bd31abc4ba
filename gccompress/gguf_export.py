"""A plain model written as a GGUF file, as llama.cpp's converter would.

Names and keys come from package gguf; see https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gccompress.errors import GccompressError, UnsupportedModelError
from gccompress.gguf_tokenizer import Vocabulary, vocabulary

# Model type -> architecture in GGUF.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")
_AUTO = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_ADVICE = "export --format dense and give that folder to llama.cpp's convert_hf_to_gguf.py"


def write_gguf(
    file: Path, model: PreTrainedModel, tokenizer: Any, *, outtype: str = "auto"
) -> None:
    """Write a plain model with its tokenizer; norms and biases are always float32.

    Args:
        file: where to.
        model: of a family in `ARCHITECTURES`.
        tokenizer: a fast one.
        outtype: of matrices, one of `OUTTYPES`; auto is the model's own type.

    Raises:
        UnsupportedModelError: a family, rotary scaling, window or tokenizer that is not supported.
        GccompressError: an unknown outtype, or a matrix that does not fit q8_0's blocks.
    """
    from gguf import GGUFWriter, LlamaFileType

    if outtype not in OUTTYPES:
        raise GccompressError(f"outtype {outtype!r} is unknown; wanted {', '.join(OUTTYPES)}")
    kind = _AUTO.get(model.dtype, "f32") if outtype == "auto" else outtype
    config = model.config
    _refuse(config)
    words = vocabulary(tokenizer, int(config.vocab_size))
    writer = GGUFWriter(str(file), ARCHITECTURES[config.model_type])
    _add_sizes(writer, config)
    names = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    writer.add_file_type(LlamaFileType[names[kind]])
    writer.add_quantization_version(2)
    _add_vocabulary(writer, words)
    for name, tensor in _tensors(model):
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse(config: Any) -> None:
    """Raise `UnsupportedModelError` for what the file could not say, or readers would not read."""
    model_type = config.model_type
    if model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"GGUF of {model_type} is not supported, wanted {', '.join(ARCHITECTURES)}; {_ADVICE}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedModelError(
            f"GGUF of rotary embeddings of type {rope['rope_type']!r} is not supported; {_ADVICE}"
        )
    types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types or (window is not None and model_type == "mistral"):
        raise UnsupportedModelError(
            f"GGUF of {model_type} cannot say which layers have a sliding window ({window}); "
            f"{_ADVICE}"
        )
    for field in ("attention_bias", "mlp_bias"):
        if getattr(config, field, False):
            raise UnsupportedModelError(f"GGUF of {model_type} with {field} is not supported")


def _add_sizes(writer: Any, config: Any) -> None:
    """Add what the config says."""
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    writer.add_type("model")
    writer.add_name(Path(str(config._name_or_path or config.model_type)).name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.num_key_value_heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_vocab_size(config.vocab_size)


def _add_vocabulary(writer: Any, words: Vocabulary) -> None:
    """Add the tokenizer."""
    writer.add_tokenizer_model(words.model)
    if words.pre:
        writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores:
        writer.add_token_scores(words.scores)
    if words.merges:
        writer.add_token_merges(words.merges)
    writer.add_add_bos_token(words.add_bos)
    writer.add_add_space_prefix(words.add_space_prefix)
    setters = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, number in words.special.items():
        setters[name](number)
    if words.chat_template is not None:
        writer.add_chat_template(words.chat_template)


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors under GGUF's names, in GGUF's order of rows."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    [arch] = [key for key, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UnsupportedModelError(f"GGUF has no name for {name}; {_ADVICE}")
        if found == "output.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and found.endswith(("attn_q.weight", "attn_k.weight")):
            query = found.endswith("attn_q.weight")
            tensor = _interleaved(
                tensor, config.num_attention_heads if query else config.num_key_value_heads
            )
        yield found, tensor.detach()


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of interleaved rotary embeddings, as llama's GGUF has them.

    transformers rotates the two halves of a head against each other, llama.cpp adjacent rows.
    """
    rows, columns = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(weight.shape)
    )


def _add_tensor(writer: Any, name: str, tensor: Tensor, kind: str) -> None:
    """Add a tensor, a matrix in the type `kind`, a vector in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if kind == "f16" and tensor.dim() > 1 and float(tensor.abs().max()) > 65504:
        raise GccompressError(f"{name} does not fit into f16; use --outtype f32 or bf16")
    values: np.ndarray[Any, Any] = tensor.float().cpu().contiguous().numpy()
    if tensor.dim() == 1 or kind == "f32":
        writer.add_tensor(name, values)
        return
    wanted = GGMLQuantizationType[kind.upper()]
    if kind == "q8_0" and values.shape[1] % 32:
        raise GccompressError(
            f"{name} has rows of {values.shape[1]} numbers, wanted a multiple of 32 for q8_0; use "
            "--outtype f16"
        )
    writer.add_tensor(name, quantize(values, wanted), raw_dtype=wanted)
