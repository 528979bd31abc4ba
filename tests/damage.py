"""Saved models to damage, ways to damage them, and what the refusal must look like."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model, tiny_tokenizer

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def sharded(path: Path) -> Path:
    """Save a tiny model in several files with an index."""
    tiny_model("llama", layers=2).save_pretrained(path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(path)
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def edit_weights(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a safetensors file in place."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(error: type[Exception], action: Callable[[], object]) -> str:
    """Return the message of the error an action must raise; it is one line."""
    with pytest.raises(error) as caught:
        action()
    assert type(caught.value) is error
    message = str(caught.value)
    assert message and "\n" not in message
    return message
