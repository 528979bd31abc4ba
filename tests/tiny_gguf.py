"""GGUF files of tiny models, written tensor by tensor as llama.cpp's converter would."""

from pathlib import Path
from typing import Any

import torch

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
}


def gguf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's tensors under GGUF's names, in GGUF's order of rows."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    [arch] = [key for key, name in MODEL_ARCH_NAMES.items() if name == architecture]
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    result = {}
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            rows, columns = tensor.shape
            heads = rows // config.head_dim
            tensor = tensor.reshape(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)
        if architecture.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if type(model.get_submodule(stem)).__name__ == "Conv1D" and leaf == "weight":
            tensor = tensor.T
        result[f"{names.get_name(stem)}.{leaf}"] = tensor
    return result


def write_gguf(
    file: Path, model: Any, kind: str = "F32", tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write a model without its tokenizer; matrices as ggml type `kind`, the rest as F32.

    `tensors` replaces those of the model, under GGUF's names.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config, wanted = model.config, GGMLQuantizationType[kind]
    writer = GGUFWriter(str(file), ARCHITECTURES[config.model_type])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    writer.add_feed_forward_length(width)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads:
        writer.add_head_count_kv(kv_heads)
    head_dim = getattr(config, "head_dim", None)
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    for name, tensor in (gguf_tensors(model) if tensors is None else tensors).items():
        values = tensor.contiguous().numpy()
        if tensor.dim() == 2:
            writer.add_tensor(name, quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
