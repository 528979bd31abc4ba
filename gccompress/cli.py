"""The command line: thin. Tables on stdout, progress and logs on stderr, one line per error.

Exit codes: 0 done, 2 bad input, 130 interrupted, 1 a fault of gccompress (with its traceback).
"""

import io
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gccompress.cli_checkpoints import app as checkpoints_app
from gccompress.cli_options import (
    AsJson,
    CacheDir,
    Device,
    DtypeOption,
    Model,
    Revision,
    TrustRemoteCode,
    show,
)
from gccompress.cli_plan import app as plan_app
from gccompress.errors import GccompressError
from gccompress.processes import refuse_several

INTERRUPTED = 130


class _InOrder(TyperGroup):
    """Lists the commands in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return `plan` behind `analyze`; typer puts a command that has others in it first."""
        rest = [name for name in super().list_commands(ctx) if name != "plan"]
        return [*rest[:1], "plan", *rest[1:]]


app = typer.Typer(
    cls=_InOrder,
    help="""Make a language model smaller, and know beforehand what it costs.

The usual path: [bold]analyze[/bold] shows which projections point the same way in adjacent
layers, [bold]plan[/bold] compares what each way of shrinking would cost at your budget and writes
the best as plan.yaml, [bold]apply[/bold] carries it out and checks the checkpoint,
[bold]evaluate[/bold] scores it. [bold]run[/bold] does all four from one recipe; [bold]demo[/bold]
does it offline on a small model that is installed beside gccompress.

MODEL is an alias (gccompress models), a hub id, a local folder, or a .gguf file.""",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(version("gccompress"))
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress, only warnings.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Debug messages on stderr.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Set up logging for every command."""
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("gccompress").setLevel(level)
    _quiet_libraries()
    if context.invoked_subcommand not in (None, "plan"):
        refuse_several(str(context.invoked_subcommand))


@app.command()
def analyze(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Alias, hub id, local folder or .gguf file."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Folder for continuity.json and the figures."),
    ] = None,
    folded: Annotated[
        bool, typer.Option(help="Measure with the norms' scales folded in too.")
    ] = True,
    full: Annotated[
        bool, typer.Option("--full", help="Decompose every weight whole, in float64; slow.")
    ] = False,
    device: Device = "auto",
    revision: Revision = None,
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure how far adjacent layers point the same way, for each projection.

    Prints |cos| of the leading input (v1) and output (u1) directions of neighbours beside what
    random directions would give, the alignment of the whole spectra, and which space is shared.
    Weights are read from the model's files one by one; interrupted, it goes on where it stopped.
    Several models, or checkpoints of one during training, are shown side by side.

    Example: gccompress analyze smollm2-135m -o continuity
    """
    from gccompress.comparison import compare_models
    from gccompress.files import refuse_non_empty

    if out is not None:
        refuse_non_empty(out)
    measured = compare_models(
        models, folded=folded, full=full, device=device, revision=revision, cache_dir=cache_dir
    )
    report = measured.reports[0] if len(models) == 1 else measured
    if out is not None:
        report.save(out)
    if as_json:
        print(report.to_json())
        return
    show(report.table())
    if out is not None:
        print(f"Written to {out}")


app.add_typer(plan_app, name="plan")


@app.command()
def apply(
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.yaml.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the checkpoint.")],
    model: Annotated[
        str | None, typer.Option(help="Where the model is, if no longer where it was.")
    ] = None,
    allow_other_model: Annotated[
        bool, typer.Option("--allow-other-model", help="Apply to a model with another hash.")
    ] = False,
    polish: Annotated[
        int,
        typer.Option(
            min=0,
            help="Train what was replaced for at most this many steps on the calibration text, "
            "against the dense model; the best on held-out text stays. 0: none.",
        ),
    ] = 0,
    polish_rate: Annotated[float, typer.Option(help="Learning rate of --polish.")] = 1e-4,
    device: Device = "auto",
    dtype: DtypeOption = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Carry out a plan: write the checkpoint, reload it, compare it.

    Example: gccompress apply plan.yaml -o compressed
    """
    from gccompress.apply import apply_plan
    from gccompress.polish import PolishOptions

    done = apply_plan(
        plan_path,
        model,
        out,
        allow_other_model=allow_other_model,
        polish=PolishOptions(steps=polish, rate=polish_rate) if polish else None,
        device=device,
        dtype=None if dtype is None else dtype.value,
        revision=revision,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print(json.dumps(done.to_dict()))
        return
    show(done.table())
    _print_how_to_load(out)


@app.command()
def evaluate(
    model: Model,
    baseline: Annotated[str | None, typer.Option(help="The dense model to compare with.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Text file or data set.", show_default="sampled from the baseline"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of text to score.")] = 12288,
    seqlen: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval tasks, comma separated: arc_easy,piqa.")
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(help="Folder with TASK_SPLIT.jsonl files, for work offline.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task.")] = None,
    speed: Annotated[bool, typer.Option(help="Measure tokens per second.")] = True,
    prompt: Annotated[
        str | None, typer.Option(help="Continue this greedily with both models.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write JSON here.")] = None,
    device: Device = "auto",
    dtype: DtypeOption = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Score a checkpoint: perplexity, KL to the dense model, tasks, size and speed.

    Example: gccompress evaluate compressed --baseline smollm2-135m
    """
    from gccompress.evaluation import evaluate as score
    from gccompress.files import write_text

    result = score(
        model,
        baseline=baseline,
        text=text,
        tokens=tokens,
        seqlen=seqlen,
        tasks=tuple(name.strip() for name in (tasks or "").split(",") if name.strip()),
        task_data=task_data,
        limit=limit,
        speed=speed,
        prompt=prompt,
        device=device,
        dtype=None if dtype is None else dtype.value,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
    )
    if out is not None:
        write_text(out, result.to_json())
    if as_json:
        print(result.to_json())
        return
    show(result.table())


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a packaged recipe.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for everything it makes.")],
    device: Device = "auto",
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Do all stages of a recipe; started again, it goes on where it stopped.

    Example: gccompress run demo -o runs/demo
    """
    _run(recipe, out, device, cache_dir, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for everything it makes.")] = (
        Path("runs/demo")
    ),
    device: Device = "auto",
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Do the whole job on SmolLM2-135M at keep 0.8, offline, in under ten minutes on two cores.

    Example: gccompress demo
    """
    _run("demo", out, device, cache_dir, as_json)


app.add_typer(checkpoints_app)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the aliases of known models and the supported families.

    Example: gccompress models
    """
    from dataclasses import asdict

    from gccompress.models import known_aliases

    aliases = known_aliases()
    if as_json:
        print(json.dumps({"models": [asdict(alias) for alias in aliases]}))
        return
    from rich.table import Table

    table = Table(title="Known models")
    for column in ("alias", "hub id", "family", "parameters", "note"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for alias in aliases:
        table.add_row(alias.name, alias.hub_id, alias.family, f"{alias.params:.3g}", alias.note)
    show(table)


def _run(recipe: str, out: Path, device: str, cache_dir: str | None, as_json: bool) -> None:
    from gccompress.pipeline import run as run_recipe

    done = run_recipe(recipe, out, device=device, cache_dir=cache_dir)
    if as_json:
        print(json.dumps(done.to_dict()))
        return
    show(done.evaluation.table())
    for label, continuation in done.evaluation.continuations.items():
        print(f"\n{label}: {continuation}")
    _print_how_to_load(done.checkpoint)


def _print_how_to_load(checkpoint: Path) -> None:
    print(f"\nCheckpoint: {checkpoint}\nLoad it:")
    print("  import gccompress")
    print("  from transformers import AutoModelForCausalLM")
    print(f"  model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r})")


def _quiet_libraries() -> None:
    """Keep other libraries' bars and notices off stderr; their warnings still come."""
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the console script. Exits with the codes of the module docstring."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # also cleans up behind itself
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name the terminal cannot show
    try:
        code = app(args=arguments, standalone_mode=False)
        if code == INTERRUPTED:  # typer turns Ctrl-C into this return value
            raise KeyboardInterrupt
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a full disk or a reader that left can still be told
        sys.exit(code if isinstance(code, int) else 0)
    except GccompressError as error:
        print(f"gccompress: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gccompress: interrupted; finished stages are kept", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:  # disk full, no permission, a reader of our output that left
        logging.getLogger("gccompress").debug("where it came from", exc_info=True)
        sys.stdout = None  # or flushing it fails again at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)  # as typer does
        print(f"gccompress: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        code = _usage_error(error)
        if code is None:
            raise
        sys.exit(code)


def _usage_error(error: Exception) -> int | None:
    """Show a usage error the way typer does and return its exit code; None for anything else."""
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, typer.Abort):
        return INTERRUPTED
    if callable(show) and isinstance(code, int):
        show()
        return code
    return None


if __name__ == "__main__":
    main()
