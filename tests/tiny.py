"""Tiny random models of every family, in memory or as a folder with a real fast tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2")

VOCAB = 320
HIDDEN = 48
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16  # not HIDDEN / HEADS, so that Q and O are not square
WIDTH = 96
WINDOW = 8
PAD, BOS, EOS = 0, 1, 2

TEXT = (
    "The river rose in spring and the people of the valley moved their boats to the upper bank. "
    "In summer the water was low, and children walked across it on the stones. Nobody had counted "
    "how many stones there were; the old said forty, the young said more. When the engineers came "
    "with their maps and measuring rods, they wrote down forty-three, and the argument was over. "
    "A bridge was built the year after that, of oak and iron, and it stood for ninety-one winters."
)

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def _fields(family: str, layers: int) -> dict[str, Any]:
    """Return the config fields of a family's tiny model."""
    if family == "gpt2":
        return {
            "vocab_size": VOCAB,
            "n_embd": HIDDEN,
            "n_layer": layers,
            "n_head": HEADS,
            "n_positions": 256,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
        }
    special: dict[str, dict[str, Any]] = {
        "llama": {"head_dim": HEAD_DIM, "tie_word_embeddings": False},
        "mistral": {"head_dim": HEAD_DIM, "sliding_window": WINDOW},
        "qwen2": {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": layers // 2,
        },
        "qwen3": {"head_dim": HEAD_DIM, "tie_word_embeddings": True},
        "gemma2": {
            "head_dim": HEAD_DIM,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
        },
        "gemma3_text": {
            "head_dim": HEAD_DIM,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": HEAD_DIM,
            "sliding_window_pattern": 3,
        },
        "phi3": {"tie_word_embeddings": False},
    }
    return {**_BASE, "num_hidden_layers": layers, **special[family]}


def tiny_model(family: str, *, layers: int = 4, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random model in eval mode, fp32, that depends on its arguments only.

    Matrices have std 0.8 / sqrt(in), biases 0.3, norm scales 0.3 around their identity, so that
    an error in any of them moves the logits. `overrides` are config fields.
    """
    config = AutoConfig.for_model(family, **{**_fields(family, layers), **overrides})
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    identity = 0.0 if family.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_values(name, noise, parameter, model, identity))
    return model.eval()


def _values(
    name: str, noise: torch.Tensor, parameter: torch.Tensor, model: PreTrainedModel, one: float
) -> torch.Tensor:
    """Scale a parameter's noise by what the parameter is."""
    if parameter.dim() == 1:
        return 0.3 * noise + (one if name.endswith("weight") else 0.0)
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, torch.nn.Embedding):
        return 0.3 * noise
    inputs = parameter.shape[1] if isinstance(owner, torch.nn.Linear) else parameter.shape[0]
    return 0.8 * inputs**-0.5 * noise


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level BPE tokenizer of at most VOCAB tokens that puts BOS first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def tiny_folder(path: Path | str, family: str = "llama", tokenizer: bool = True, **kw: Any) -> Path:
    """Save `tiny_model(family, **kw)`, and its tokenizer unless told not to; return the folder."""
    folder = Path(path)
    tiny_model(family, **kw).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Return random token ids `[batch, length]` without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def logits_of(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return logits `[batch, length, vocab]`."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits
