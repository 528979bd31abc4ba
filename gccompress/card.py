"""The model card of a checkpoint: README.md with the front matter that hubs read."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gccompress.errors import CheckpointError
from gccompress.files import write_text
from gccompress.plan import (
    AnyMove,
    DropLayers,
    LowRank,
    Plan,
    ResizeMlp,
    ShareInput,
    ShareOutput,
)

if TYPE_CHECKING:
    from gccompress.evaluation import Evaluation
    from gccompress.sources import ModelSource

CARD = "README.md"
_BEGIN, _END = "<!-- results -->", "<!-- end of results -->"
_NOT_MEASURED = "Not measured yet: `gccompress evaluate DIR --baseline {base}`."


@dataclass(frozen=True)
class Sizes:
    """Parameters and weight bytes of a model before and after.

    Attributes:
        params_before: parameters of the dense model, tied ones once.
        params_after: of the compressed one.
        bytes_after: of its weight files.
    """

    params_before: int
    params_after: int
    bytes_after: int


def model_card(plan: Plan, base: "ModelSource", sizes: Sizes, *, compressed: bool) -> str:
    """Return the card of a checkpoint that `plan` was applied for.

    Args:
        plan: what was done.
        base: the model it was done to.
        sizes: before and after.
        compressed: whether loading needs gccompress or remote code; else it is a plain model.
    """
    base_id, licence = base_model(base), licence_of(base)
    tags = ["gccompress", "compressed", *sorted({_tag(move) for move in plan.moves})]
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base_id is not None:
        front["base_model"] = base_id
    if licence is not None:
        front["license"] = licence
    front["tags"] = tags
    name = base_id or Path(base.name).name
    share = sizes.params_after / sizes.params_before
    kind = (
        "Some of its layers are factored or resized, so that it is loaded by a class of its own."
        if compressed
        else "It is a plain model of its family: nothing of gccompress is needed to load it."
    )
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        "",
        f"# {name.rpartition('/')[2]}, compressed to {share:.1%} of its parameters",
        "",
        f"Made from `{name}` by [gccompress](https://pypi.org/project/gccompress/). {kind}",
        *("", f"- base model: `{name}`, content hash `{base.hash}`"),
        *([] if base.revision is None else [f"- revision: `{base.revision}`"]),
        f"- license: {licence or 'that of the base model, not recorded in its files'}",
        f"- parameters: {sizes.params_before:,} before, {sizes.params_after:,} after",
        f"- bytes of the weights: {sizes.bytes_after:,}",
        *("", "## What was done", ""),
        f"Strategy `{plan.strategy}`, budget: {plan.budget}. The whole plan is in `plan.yaml`.",
        "",
        *(f"- {line}" for line in _summary(plan)),
        *("", "## Results", "", _BEGIN, _NOT_MEASURED.format(base=shlex.quote(name)), _END),
        *("", "## Use it", "", *(_use_compressed() if compressed else _use_plain())),
    ]
    return "\n".join(lines) + "\n"


def base_model(base: "ModelSource") -> str | None:
    """Return the hub id of a base model; None for one that is not known to be on the hub."""
    from gccompress.sources import known_aliases

    for alias in known_aliases():
        if alias.name == base.name.lower():
            return alias.hub_id
    return base.name if base.revision is not None else None


def licence_of(base: "ModelSource") -> str | None:
    """Return the licence that the base model's own card or GGUF file names; None if neither does.

    The card's front matter goes first: https://huggingface.co/docs/hub/model-cards.
    """
    if base.path is None:
        return None
    card = base.path / CARD
    if card.is_file():
        found = _front_matter(card.read_text(encoding="utf-8", errors="replace")).get("license")
        if isinstance(found, str):
            return found
    return _gguf_licence(base)


def _gguf_licence(base: "ModelSource") -> str | None:
    """Return `general.license` of the GGUF file a model was converted from, if it was."""
    from gccompress.gguf_head import read_head
    from gccompress.sources import known_aliases

    embedded = [a.embedded() for a in known_aliases() if a.name == base.name.lower()]
    file = next((path for path in embedded if path is not None), Path(base.name))
    return read_head(file).licence if file.suffix == ".gguf" and file.is_file() else None


def _front_matter(text: str) -> Mapping[str, Any]:
    """Return the YAML between the first two lines `---`; empty where there is none that reads."""
    head, dashes, rest = text.partition("---\n")
    if head.strip() or not dashes:
        return {}
    try:
        found = yaml.safe_load(rest.partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _tag(move: AnyMove) -> str:
    """Return the tag of a kind of move."""
    match move:
        case DropLayers():
            return "layer-pruning"
        case LowRank():
            return "low-rank"
        case ResizeMlp():
            return "width-pruning"
        case ShareInput() | ShareOutput():
            return "shared-bases"


def _summary(plan: Plan) -> Iterator[str]:
    """Yield what the plan's moves do, a line a kind, and what was predicted."""
    dropped = sorted(n for move in plan.moves if isinstance(move, DropLayers) for n in move.layers)
    if dropped:
        yield f"layers dropped, of {plan.model.layers}: {', '.join(map(str, dropped))}"
    widths = [move.width for move in plan.moves if isinstance(move, ResizeMlp)]
    if widths:
        span = str(min(widths)) if min(widths) == max(widths) else f"{min(widths)}-{max(widths)}"
        yield f"MLPs narrowed: {len(widths)}, to {span} neurons"
    for kind, what in (
        (LowRank, "matrices factored alone"),
        (ShareInput, "shared input bases"),
        (ShareOutput, "shared output bases"),
    ):
        moves = [move for move in plan.moves if isinstance(move, kind)]
        if moves:
            roles = Counter(
                role.value
                for move in moves
                for role in ((move.role,) if isinstance(move, LowRank) else move.roles)
            )
            listed = ", ".join(f"{role} {count}" for role, count in roles.items())
            yield f"{what}: {len(moves)} ({listed})"
    predicted = plan.prediction
    yield f"decoder projections kept: {predicted.params_kept:.1%}"
    if predicted.ppl is not None and predicted.dense_ppl is not None:
        how = "measured" if predicted.measured else "extrapolated"
        yield (
            f"predicted perplexity on calibration text held out ({how}): {predicted.ppl:.3f}, "
            f"dense {predicted.dense_ppl:.3f}"
        )


def _use_compressed() -> list[str]:
    return [
        "With gccompress installed (`pip install gccompress`):",
        *("", "```python", "import gccompress"),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *("", 'model = AutoModelForCausalLM.from_pretrained("DIR")'),
        *('tokenizer = AutoTokenizer.from_pretrained("DIR")', "```", ""),
        "Without it, by the code in this folder (`gccompress verify DIR` checks that it is "
        "unaltered):",
        *("", "```python"),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *("", 'model = AutoModelForCausalLM.from_pretrained("DIR", trust_remote_code=True)'),
        *('tokenizer = AutoTokenizer.from_pretrained("DIR")', "```", ""),
        "As a plain model of its family, for tools that know neither: "
        "`gccompress export DIR -o OUT --format dense`.",
    ]


def _use_plain() -> list[str]:
    return [
        *("```python", "from transformers import AutoModelForCausalLM, AutoTokenizer"),
        *("", 'model = AutoModelForCausalLM.from_pretrained("DIR")'),
        *('tokenizer = AutoTokenizer.from_pretrained("DIR")', "```"),
    ]


def add_results(folder: str | Path, evaluation: "Evaluation") -> None:
    """Write what was measured into the card of a checkpoint, in place of what it says so far.

    Raises:
        CheckpointError: the folder has no card with a place for it.
    """
    card = Path(folder) / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    head, begin, rest = text.partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise CheckpointError(f"{card} has no place for results ({_BEGIN} ... {_END})")
    body = "\n".join(_results(evaluation))
    write_text(card, f"{head}{_BEGIN}\n{body}\n{_END}{tail}")


def _results(found: "Evaluation") -> Iterator[str]:
    """Yield a Markdown table of the scores, the baseline's beside them, and the protocol."""
    base = found.baseline
    rows: list[tuple[str, float | None, float | None]] = [
        ("perplexity", found.perplexity.value, None if base is None else base.perplexity.value)
    ]
    for task, metrics in found.tasks.items():
        for metric, value in metrics.items():
            if metric != "samples" and not metric.endswith("_stderr"):
                other = None if base is None else base.tasks.get(task, {}).get(metric)
                rows.append((f"{task}, {metric}", value, other))
    for what in ("prefill", "decode"):
        field = f"{what}_tokens_per_s"
        rows.append((f"{what}, tokens/s", getattr(found, field), getattr(base, field, None)))
    yield "| | this model | base model |"
    yield "|---|---:|---:|"
    for name, mine, theirs in rows:
        if mine is not None:
            yield f"| {name} | {mine:.4g} | {'' if theirs is None else f'{theirs:.4g}'} |"
    text = found.perplexity
    yield ""
    yield (
        f"Perplexity on {Path(text.dataset).name}, {text.tokens} tokens in windows of "
        f"{text.seqlen} ({found.text_hash[:19]}); {found.dtype} on {found.device}."
        + (
            ""
            if found.kl_to_baseline is None
            else f" KL to the base model: {found.kl_to_baseline:.4f} nats per token."
        )
    )
