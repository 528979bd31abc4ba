"""`gccompress verify`, `export` and `lm-eval`: what one does with a checkpoint; thin."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gccompress.cli_options import AsJson, show

app = typer.Typer(rich_markup_mode="rich")

Checkpoint = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a checkpoint.")]


class Format(StrEnum):
    """What a checkpoint can be exported to."""

    dense = "dense"
    gguf = "gguf"


class Outtype(StrEnum):
    """Number types of matrices in a GGUF file."""

    auto = "auto"
    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"


@app.command()
def verify(folder: Checkpoint, as_json: AsJson = False) -> None:
    """Check a checkpoint: file names, config against weights, code, plan, hashes, finite numbers.

    Exit code 0 when nothing is wrong, 2 with one line about the first thing that is.

    Example: gccompress verify compressed
    """
    from gccompress.verification import verify as check

    found = check(folder)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    show(found.table())


@app.command()
def export(
    folder: Checkpoint,
    out: Annotated[Path, typer.Option("-o", "--out", help="New or empty folder.")],
    format: Annotated[
        Format,
        typer.Option(
            help="dense: the plain transformers architecture, factors multiplied out (saves no "
            "bytes); gguf: a file for llama.cpp and others, of llama, mistral, qwen2 and qwen3."
        ),
    ] = Format.dense,
    outtype: Annotated[
        Outtype, typer.Option(help="Of matrices in a GGUF file; auto: as they are stored.")
    ] = Outtype.auto,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in a format that tools load which know nothing of gccompress.

    Example: gccompress export compressed -o plain --format dense
    """
    from gccompress.export import export as write

    done = write(folder, out, format=format.value, outtype=outtype.value)
    if as_json:
        print(json.dumps(done.to_dict()))
        return
    show(done.table())


@app.command(
    "lm-eval",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command line, all of it, with compressed checkpoints known to it.

    Example: gccompress lm-eval run --model hf --model_args pretrained=compressed --tasks piqa
    """
    from gccompress.lm_eval_command import lm_eval_main

    lm_eval_main(context.args)
