"""What several commands share: arguments and options with their words, and how tables print."""

import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(help="Alias, hub id, local folder or .gguf file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a hub model.", show_default="main")
]
CacheDir = Annotated[
    str | None,
    typer.Option(
        help="Where converted models, moments and sampled text are kept.",
        show_default="$GCCOMPRESS_CACHE or the user's cache folder",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the model's folder brings.")
]


class Dtype(StrEnum):
    """Number types that weights can be computed in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


DtypeOption = Annotated[
    Dtype | None,
    typer.Option(help="Compute in this type.", show_default="float32 on CPU, as stored on CUDA"),
]


class Strategy(StrEnum):
    """How a plan is made."""

    auto = "auto"
    ranks = "ranks"
    width = "width"
    plain = "plain"
    share = "share"
    lowrank = "lowrank"
    prune = "prune"


class Spaces(StrEnum):
    """Which spaces may be shared."""

    measured = "measured"
    paper = "paper"
    any = "any"


class ProbeChoice(StrEnum):
    """Which candidates are measured in memory."""

    chosen = "chosen"
    all = "all"
    none = "none"


def show(table: Any) -> None:
    """Print a rich table on stdout."""
    from rich.console import Console

    # Off a terminal rich would cut at 80 columns, in the middle of numbers.
    Console(width=None if sys.stdout.isatty() else 140).print(table)
