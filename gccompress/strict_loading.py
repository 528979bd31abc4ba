"""Loading through transformers so that nothing is made up: every key as expected, or one error."""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccompress.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("gccompress")

# Masks and rotary frequencies that old exports stored; every model computes its own.
_COMPUTED = re.compile(r"(\.attn\.(masked_)?bias|\.rotary_emb\.inv_freq)$")

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back transformers' load report, which our one-line error replaces, and its bars."""
    from transformers.utils import logging as transformers_logging

    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def load_weights(path: Path, **options: Any) -> "PreTrainedModel":
    """Return the causal language model in `path`; options are those of `from_pretrained`.

    Raises:
        ModelError: a key is missing, unexpected or of another shape, or transformers refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    refusals = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
    try:
        with quiet_transformers():
            # A tuple with this option, whatever the annotation says.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                local_files_only=True,
                output_loading_info=True,
                # So that a mismatch is reported with its name below, not hidden in a report.
                ignore_mismatched_sizes=True,
                **options,
            )
    except (*refusals, SafetensorError, StrictDataclassError) as error:
        raise ModelError(f"model {path} cannot be loaded: {one_line(error)}") from error
    model, info = loaded
    _require_strict(path, info)
    _settle_tie(path, model)
    return model.eval()


def _require_strict(path: Path, info: Mapping[str, Any]) -> None:
    """Raise `ModelError` unless the weights are exactly those of the config's model."""
    unexpected = {key for key in info["unexpected_keys"] if not _COMPUTED.search(key)}
    wrong = [
        f"{key}: {tuple(got)}, wanted {tuple(want)}"
        for key, got, want in sorted(info["mismatched_keys"])
    ]
    for what, found in (
        ("lack", sorted(info["missing_keys"])),
        ("have, besides those of the config,", sorted(unexpected)),
        ("have, in another shape,", wrong),
        ("could not be read:", sorted(str(message) for message in info.get("error_msgs", ()))),
    ):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ModelError(
                f"model {path}: its weights {what} {', '.join(found[:3])}{more}; wanted exactly "
                "the tensors its config.json describes: config and weights are not of one model"
            )


def _settle_tie(path: Path, model: "PreTrainedModel") -> None:
    """Make the config tell whether the head is the embedding, where the file says otherwise."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return
    if head.weight is not embeddings.weight:
        logger.warning("%s: a head of its own though its config ties it; taken as untied", path)
        model.config.get_text_config().tie_word_embeddings = False
        model.config.tie_word_embeddings = False


def load_tokenizer(path: Path, **options: Any) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in `path`; options are those of `AutoTokenizer.from_pretrained`.

    Raises:
        ModelError: there is none, or it is damaged.
    """
    from transformers import AutoTokenizer

    if "gguf_file" not in options:
        _require_vocabulary(path)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, **options)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise ModelError(
            f"tokenizer in {path} cannot be loaded: {one_line(error)}; copy the original model's "
            "tokenizer files there"
        ) from error
    return tokenizer


def _require_vocabulary(path: Path) -> None:
    """Raise `ModelError` when a folder has no vocabulary, for which transformers makes one up."""
    present = [name for name in _VOCABULARIES if (path / name).is_file()]
    if not present:
        raise ModelError(
            f"model {path} has no tokenizer; wanted one of {', '.join(_VOCABULARIES)}: copy the "
            "original model's tokenizer files there"
        )
    if "tokenizer.json" in present:
        try:
            json.loads((path / "tokenizer.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path / 'tokenizer.json'} cannot be read as JSON ({error}); copy the original "
                "model's tokenizer files there"
            ) from error


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
