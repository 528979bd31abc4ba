"""Three small models trained on the protocol's text, so that nothing is tuned to one model.

    python benchmarks/tiny_models.py --cache-dir FOLDER [--data ../shared/data] [--only tiny-llama]

Llama-, Qwen3- and Gemma-3-style, each with the same byte-level BPE tokenizer, saved as ordinary
transformers checkpoints in FOLDER/tiny; a finished one is skipped. Minutes each on one core.
"""

import argparse
import json
import lzma
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from gccompress.files import cache_folder, new_folder
from gccompress.models import LoadedModel, open_model
from gccompress.planner.probe import window_losses
from gccompress.text import Windows, load_windows
from gccompress.view import ModelView

SEQLEN, TEST_TOKENS = 256, 24 * 512
VOCABULARY = 2048
MULTIPLE = 8  # of ranks and widths in plans: a quarter of the smallest matrix at 32
SPECIAL = PAD, BOS, EOS = "<pad>", "<s>", "</s>"
BATCH, STEPS, WARMUP, LEAST_SHARE = 8, 600, 40, 0.02
BETAS, LARGEST_NORM = (0.9, 0.95), 1.0

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tiny:
    """One of the models: what differs from `SHAPE`, and how it is trained.

    Attributes:
        family: transformers' model type.
        fields: of its config.
        rate: largest learning rate of AdamW.
        muon_rate: and of Muon.
        seed: of its weights and of the order of its windows.
    """

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    rate: float = 4e-3
    muon_rate: float = 0.02
    seed: int = 0


TINY = {
    "tiny-llama": Tiny("llama", {"tie_word_embeddings": False}),
    "tiny-qwen3": Tiny("qwen3", {"tie_word_embeddings": True}),
    "tiny-gemma3": Tiny(
        "gemma3_text",
        {"sliding_window": 128, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
}


def tiny_folder(cache: Path, name: str) -> Path:
    """Return where a finished model is."""
    return cache / "tiny" / name


def open_tiny(cache: Path, name: str) -> LoadedModel:
    """Load a finished model in float32. Raises `ModelError` when it was not trained yet."""
    return open_model(tiny_folder(cache, name), dtype=torch.float32, cache_dir=str(cache))


def test_windows(loaded: LoadedModel, data: Path) -> Windows:
    """Return as much of the protocol's test text as it takes, in windows of `SEQLEN` tokens."""
    path = data / "protocol/test.txt.xz"
    return load_windows(path, loaded, seqlen=SEQLEN, tokens=TEST_TOKENS)


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `VOCABULARY` tokens trained on a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD
    )


def batches(ids: Tensor, tiny: Tiny) -> Tensor:
    """Return training windows `[steps, batch, SEQLEN]` in a fixed random order, none twice.

    Gemma-style models have BOS in front of each, as they are used.
    """
    with_bos = tiny.family.startswith("gemma")
    width = SEQLEN - with_bos
    count = len(ids) // width
    windows = ids[: count * width].view(count, width)
    if with_bos:
        windows = torch.cat([torch.full((count, 1), SHAPE["bos_token_id"]), windows], 1)
    wanted = STEPS * BATCH
    if wanted > count:
        raise SystemExit(f"the train text gives {count} windows of {SEQLEN}; wanted {wanted}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(tiny.seed))
    return windows[order[:wanted]].view(STEPS, BATCH, SEQLEN)


def rate_share(step: int) -> float:
    """Return the share of the largest rate: linear warm-up, then a cosine to `LEAST_SHARE`."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LEAST_SHARE + (1 - LEAST_SHARE) * (1 + math.cos(math.pi * done)) / 2


def make_optimizers(model: PreTrainedModel, tiny: Tiny) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the decoder's matrices and AdamW for all else.

    Muon because it uses all directions of a matrix within minutes: after as many steps of AdamW
    these models lose nothing when half of their parameters are gone, and show no trade-off.
    """
    matrices = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    taken = {id(one) for one in matrices}
    rest = [one for one in model.parameters() if id(one) not in taken]
    muon = [{"params": matrices, "largest": tiny.muon_rate}]
    adam = [{"params": rest, "largest": tiny.rate}]
    return (
        torch.optim.Muon(muon, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(adam, betas=BETAS, weight_decay=0.0, fused=True),
    )


def train(tiny: Tiny, ids: Tensor, half: bool) -> PreTrainedModel:
    """Return a model trained from scratch; `half`: matrix products in bfloat16."""
    torch.manual_seed(tiny.seed)
    config = AutoConfig.for_model(tiny.family, **{**SHAPE, **tiny.fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizers = make_optimizers(model, tiny)
    start, recent = time.perf_counter(), 0.0
    model.train()
    for step, batch in enumerate(batches(ids, tiny)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["largest"] * rate_share(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(batch, use_cache=False).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = loss.item() if not step else 0.95 * recent + 0.05 * loss.item()
        if step % 20 == 0 or step == STEPS - 1:
            spent = time.perf_counter() - start
            print(f"  step {step + 1}/{STEPS}  nll {recent:.3f}  {spent:.0f} s", flush=True)
    return model.eval()


def unigram_perplexity(ids: Tensor, windows: Windows) -> float:
    """Return the perplexity of token frequencies of the train text (add one) on windows."""
    counts = torch.bincount(ids, minlength=VOCABULARY).double() + 1
    return math.exp(-(counts / counts.sum()).log()[windows.ids[:, 1:]].mean().item())


def make(name: str, cache: Path, data: Path, half: bool) -> None:
    """Train a model unless it is there, and print its perplexity on the test text."""
    folder = tiny_folder(cache, name)
    if not folder.exists():
        text = lzma.open(data / "protocol/train.txt.xz", "rt", encoding="utf-8").read()
        tokenizer = train_tokenizer(text)
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = torch.tensor(encoded)
        print(f"{name}: {len(ids)} tokens of text, {STEPS * BATCH * SEQLEN} are seen", flush=True)
        start = time.perf_counter()
        model = train(TINY[name], ids, half)
        seconds = time.perf_counter() - start
        with new_folder(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            record = {"seconds": seconds, "bfloat16": half, "steps": STEPS, "batch": BATCH}
            windows = test_windows(LoadedModel(model, tokenizer, None), data)  # type: ignore[arg-type]
            record["unigram"] = unigram_perplexity(ids, windows)
            (temporary / "training.json").write_text(json.dumps(record))
    loaded = open_tiny(cache, name)
    loss = window_losses(ModelView(loaded.model), test_windows(loaded, data)).mean().item()
    record = json.loads((folder / "training.json").read_text())
    print(
        f"{name}: {loaded.model.num_parameters() / 1e6:.1f} M parameters, test perplexity "
        f"{math.exp(loss):.2f} (unigrams {record['unigram']:.0f}), {record['seconds']:.0f} s"
    )


def main() -> None:
    """Make the models that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--only", choices=TINY)
    parser.add_argument("--float32", action="store_true", help="no matrix products in bfloat16")
    options = parser.parse_args()
    for name in [options.only] if options.only else TINY:
        make(name, cache_folder(options.cache_dir), options.data, not options.float32)


if __name__ == "__main__":
    main()
