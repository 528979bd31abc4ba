"""`gccompress plan` and its sub-commands: thin."""

import json
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gccompress.cli_options import (
    AsJson,
    CacheDir,
    Device,
    Dtype,
    DtypeOption,
    ProbeChoice,
    Revision,
    Spaces,
    Strategy,
    TrustRemoteCode,
    show,
)
from gccompress.errors import GccompressError
from gccompress.processes import join, main_first, refuse_several

if TYPE_CHECKING:
    from gccompress.planner import Choice

app = typer.Typer(rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Alias, hub id, local folder or .gguf file; always needed.")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(help="Share of decoder-projection parameters to keep, in (0, 1]."),
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Bytes of the whole checkpoint, such as 200MB or 1.5GiB.")
    ] = None,
    speedup: Annotated[
        float | None,
        typer.Option(help="Prefill so many times as fast, by latencies measured on this device."),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(help="The smallest model at most so many nats per token worse, as measured."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="HIGH:LOW[:STEP]",
            help="A plan for every share to keep, such as 0.95:0.5:0.05; --out is then a folder.",
        ),
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            help="auto: every move at one price; ranks: only factored matrices, ranks and bases at "
            "one price; width: only fewer MLP neurons; plain: layers dropped, one width for all, "
            "a stock model that loads everywhere; share: one basis per group of layers; "
            "lowrank: every matrix alone, alike; prune: drop layers."
        ),
    ] = Strategy.auto,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="The plan's file, or with --sweep a folder.",
            show_default="plan.yaml or plans",
        ),
    ] = None,
    calibration: Annotated[
        str,
        typer.Option(
            help="self (sampled from the model: no download), wikitext2, a text or JSONL file "
            "(.gz and .xz too), or a hub data set."
        ),
    ] = "self",
    no_calibration: Annotated[
        bool,
        typer.Option(
            "--no-calibration",
            help="Stream the weights only: an ordering by lost weight energy, no perplexity, in "
            "the memory of two matrices.",
        ),
    ] = False,
    calibration_tokens: Annotated[
        int, typer.Option(help="Tokens that go into the moments.")
    ] = 16384,
    heldout_tokens: Annotated[
        int, typer.Option(help="Further tokens, on which the plan is tried in memory.")
    ] = 4096,
    seqlen: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    fisher: Annotated[
        str,
        typer.Option(help="Gradients of the text's own labels and of N sampled ones: data+N."),
    ] = "data+1",
    spread: Annotated[
        bool,
        typer.Option(help="Take windows from all over the text; --no-spread takes its first ones."),
    ] = True,
    spaces: Annotated[
        Spaces,
        typer.Option(
            help="Share the spaces measured on this model, the paper's, or any that pays."
        ),
    ] = Spaces.measured,
    longest: Annotated[
        int, typer.Option(min=1, help="auto: most adjacent layers on one basis.")
    ] = 3,
    group: Annotated[int, typer.Option(min=2, help="share: layers on one basis.")] = 2,
    multiple: Annotated[int, typer.Option(min=1, help="Ranks are multiples of this.")] = 32,
    probe: Annotated[
        ProbeChoice,
        typer.Option(help="Measure the chosen plan, all of them, or none on held-out text."),
    ] = ProbeChoice.chosen,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of sampled text and labels.")
    ] = 0,
    device: Device = "auto",
    dtype: DtypeOption = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Compare every way to meet a budget and write the chosen one as a plan to review.

    Nothing is written but the plan. Moments and spectra are cached: another budget takes seconds.

    One budget: --keep, --max-size, --speedup or --max-loss; --sweep draws the whole curve.

    Example: gccompress plan --model smollm2-135m --keep 0.8 -o plan.yaml
    """
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        refuse_several(f"plan {context.invoked_subcommand}")
        return
    if model is None:
        context.fail("Missing option '--model'.")
    from gccompress.calibration import CalibrationOptions, assist
    from gccompress.files import refuse_non_empty
    from gccompress.moments import Fisher
    from gccompress.planner import PlanOptions, budget_of, choose, keeps_of
    from gccompress.planner import sweep as sweep_budgets
    from gccompress.planner.weights_only import choose_from_weights

    budgets = (keep, max_size, speedup, max_loss)
    if sweep is not None and any(value is not None for value in (*budgets, no_calibration or None)):
        raise GccompressError("--sweep is a budget by itself, and needs calibration; give no other")
    keeps = None if sweep is None else keeps_of(sweep)
    budget = budget_of(*budgets) if sweep is None else None
    out = out or Path("plan.yaml" if sweep is None else "plans")
    if sweep is not None:
        refuse_non_empty(out)
    elif out.is_dir():
        raise GccompressError(f"--out {out} is a folder; wanted the plan's file, such as plan.yaml")
    plan_options = PlanOptions(
        strategy=strategy.value,
        spaces=spaces.value,
        longest=longest,
        group=group,
        multiple=multiple,
        probe=probe.value,
    )
    if no_calibration:
        assert budget is not None  # noqa: S101 - no sweep
        refuse_several("plan --no-calibration")
        choice = choose_from_weights(
            model,
            budget,
            options=plan_options,
            device=device,
            revision=revision,
            cache_dir=cache_dir,
        )
        _finish_plan(choice, out, as_json)
        return
    calibration_options = CalibrationOptions(
        calibration, calibration_tokens, seqlen, heldout_tokens, seed, Fisher.parse(fisher), spread
    )
    process = join(device)
    if not process.main:
        logging.getLogger("gccompress").setLevel(logging.ERROR)
    loaded = main_first(lambda: _open(model, device, dtype, revision, cache_dir, trust_remote_code))
    if not process.main:
        assist(loaded, calibration_options, cache_dir)
        return
    settings: dict[str, Any] = {
        "options": plan_options,
        "calibration": calibration_options,
        "cache_dir": cache_dir,
    }
    if budget is not None:
        _finish_plan(choose(loaded, budget, **settings), out, as_json)
        return
    curve = sweep_budgets(loaded, keeps or (), **settings)
    curve.save(out)
    if as_json:
        print(json.dumps(curve.to_dict()))
        return
    show(curve.table())
    print(f"\nPlans, curve.json and curve.png written to {out}.")


PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.yaml.")]


@app.command()
def check(
    plan_path: PlanPath,
    probe: Annotated[
        bool, typer.Option(help="Measure the perplexity in memory, on the held-out text.")
    ] = True,
    write: Annotated[
        bool, typer.Option("--write", help="Write the numbers found into PLAN; its moves stay.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Or write the plan with them here.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Where the model is, if no longer where it was.")
    ] = None,
    allow_other_model: Annotated[
        bool,
        typer.Option(
            "--allow-other-model", help="Try the moves on a model with another hash; calibrates it."
        ),
    ] = False,
    device: Device = "auto",
    dtype: DtypeOption = None,
    revision: Revision = None,
    cache_dir: CacheDir = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Say what is true of a plan's moves now, as after editing them by hand.

    Sizes, the second-order loss of every move and, measured in memory, the perplexity, beside
    what the file says. An invalid move is refused, with its line. Comments in the file do not
    survive --write.

    Example: gccompress plan check plan.yaml --write
    """
    from gccompress.planner.review import check_plan

    if write and out is not None:
        raise GccompressError("--write and --out: give one; --write puts the numbers into PLAN")
    review = check_plan(
        plan_path,
        model,
        probe=probe,
        allow_other_model=allow_other_model,
        device=device,
        dtype=None if dtype is None else dtype.value,
        revision=revision,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
    )
    target = plan_path if write else out
    if target is not None:
        review.plan.save(target)
    if as_json:
        print(json.dumps(review.to_dict()))
        return
    for table in review.tables():
        show(table)
    print()
    for line in review.sentences():
        print(line)
    if target is not None:
        print(f"Written to {target}.")
    elif review.differs:
        print(f"Write what was found: gccompress plan check {shlex.quote(str(plan_path))} --write")


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="A plan.yaml.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Show which matrices two plans treat differently, and what each is predicted to cost.

    Example: gccompress plan diff plan.yaml edited.yaml
    """
    from gccompress.report.plan_overview import diff_plans

    found = diff_plans(before, after)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    for table in found.tables():
        show(table)
    if not found.changes:
        print("\nThe moves are the same.")


@app.command(name="show")
def lay_out(
    plan_path: PlanPath,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw it: an image file, such as plan.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Lay a plan out by layer and projection; the model is not needed.

    Example: gccompress plan show plan.yaml --figure plan.png
    """
    from gccompress.report.plan_overview import show_plan

    overview = show_plan(plan_path)
    if figure is not None:
        overview.save_figure(figure)
    if as_json:
        print(json.dumps(overview.to_dict()))
        return
    show(overview.table())
    print()
    for line in overview.sentences():
        print(line)
    if figure is not None:
        print(f"Figure written to {figure}.")


def _refuse_options(context: typer.Context) -> None:
    """Refuse options of `plan` itself in front of a sub-command, which would not see them."""
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if source is not None and source.name == "COMMANDLINE":
            name = context.invoked_subcommand
            context.fail(f"{option.opts[0]} before '{name}' is an option of 'plan' itself.")


def _open(
    model: str,
    device: str,
    dtype: Dtype | None,
    revision: str | None,
    cache_dir: str | None,
    trust_remote_code: bool,
) -> Any:
    from gccompress.models import open_model

    return open_model(
        model,
        device=device,
        dtype=None if dtype is None else dtype.value,
        revision=revision,
        cache_dir=cache_dir,
        trust_remote_code=trust_remote_code,
    )


def _finish_plan(choice: "Choice", out: Path, as_json: bool) -> None:
    """Write the plan; print the comparison, what the plan does and what it is expected to cost."""
    choice.plan.save(out)
    if as_json:
        print(json.dumps(choice.to_dict(out)))
        return
    show(choice.table())
    print()
    for line in choice.sentences():
        print(line)
    print(f"\nPlan written to {out}.")
    if choice.plan.calibration is not None:
        print(f"Carry it out: gccompress apply {shlex.quote(str(out))} -o compressed")
