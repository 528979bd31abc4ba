"""The command line as its users meet it: the whole path, JSON, help, and one line per mistake."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gccompress import cli
from gccompress.cli import main
from tests.tiny import tiny_folder

COMMANDS = ("analyze", "plan", "apply", "evaluate", "run", "demo", "models")
TOKENS = ("--calibration-tokens", "256", "--seqlen", "32", "--heldout-tokens", "64")
PLAN = (*TOKENS, "--multiple", "4")
TEXT = "The river rose in spring and the people of the valley moved their boats. " * 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of five layers with a tokenizer, in a folder."""
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny", "llama", layers=5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the module's tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _environment(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GCCOMPRESS_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def succeed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must work and return what it printed on stdout."""
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        assert not stop.code, capsys.readouterr().err
    return capsys.readouterr().out


def succeed_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Run a command with --json; stdout must be exactly one object."""
    found = json.loads(succeed(capsys, *arguments, "--json"))
    assert isinstance(found, dict)
    return found


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command that must be refused: exit 2, one line on stderr, nothing on stdout."""
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert stop.value.code == 2, captured.err
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("gccompress: ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def make_plan(capsys: pytest.CaptureFixture[str], model: Path, *more: object) -> str:
    """Write plan.yaml for keep 0.8."""
    return succeed(capsys, "plan", "--model", model, "--keep", 0.8, *PLAN, *more)


def test_the_whole_path_and_its_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = succeed_json(capsys, "analyze", model, "-o", "continuity")
    assert {"model", "num_layers", "roles", "seconds", "peak_rss_bytes"} <= report.keys()
    role = {"v1_mean", "u1_mean", "v1", "u1", "gram_in", "gram_out", "random_v1", "random_u1"}
    assert all(role <= one.keys() for one in report["roles"].values())
    assert set(report["roles"]) == {"q", "k", "v", "o", "gate", "up", "down"}
    assert json.loads(Path("continuity/continuity.json").read_text())["num_layers"] == 5
    assert list(Path("continuity").glob("*.png"))

    arguments = ("plan", "--model", model, "--keep", 0.7, *PLAN, "-o", "my.yaml")
    choice = succeed_json(capsys, *arguments)
    assert choice["plan_path"] == "my.yaml" and choice["chosen"] == "auto"
    wanted = {"strategy", "params_kept", "bytes", "predicted_ppl", "predicted_ppl_low",
              "predicted_ppl_high", "predicted_speedup"}  # fmt: skip
    assert all(wanted <= one.keys() for one in choice["candidates"])
    assert {one["strategy"] for one in choice["candidates"]} == {
        "auto", "ranks", "width", "plain", "share", "lowrank", "prune", "rtn4", "rtn8"
    }  # fmt: skip
    assert choice["moves"]

    applied = succeed_json(capsys, "apply", "my.yaml", "-o", "small")
    assert applied["path"] == "small"
    assert applied["params_after"] < applied["params_before"]
    assert applied["bytes_after"] == Path("small/model.safetensors").stat().st_size
    assert applied["reload_max_abs_diff"] < 1e-4

    Path("text.txt").write_text(TEXT)
    arguments = ("evaluate", "small", "--baseline", model, "--text", "text.txt", "--tokens", 256)
    score = succeed_json(capsys, *arguments, "--seqlen", 32, "--prompt", "The river")
    assert set(score["perplexity"]) >= {"dataset", "seqlen", "tokens", "value"}
    assert score["perplexity"]["value"] > 1 and score["kl_to_baseline"] > 0
    assert score["params"] == applied["params_after"]
    assert score["bytes"] == applied["bytes_after"]
    assert score["prefill_tokens_per_s"] > 0 and score["decode_tokens_per_s"] > 0

    aliases = {one["name"] for one in succeed_json(capsys, "models")["models"]}
    assert {"llama-3.1-8b", "smollm2-135m", "qwen3-32b", "gemma-3-1b"} <= aliases


def test_tables_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "v1" in succeed(capsys, "analyze", model)
    shown = make_plan(capsys, model)
    for word in ("auto", "width", "lowrank", "prune", "rtn4", "measured in memory", "plan.yaml"):
        assert word in shown
    assert "from_pretrained('small')" in succeed(capsys, "apply", "plan.yaml", "-o", "small")
    assert "llama-3.1-8b" in succeed(capsys, "models")


def test_a_plan_from_weights_alone(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--model", model, "--keep", 0.7, "--multiple", 4, "--no-calibration")
    shown = succeed(capsys, *arguments)
    assert "% energy" in shown and "no perplexity" in shown and "gccompress apply" not in shown
    choice = succeed_json(capsys, *arguments)
    assert {one["strategy"]: one["predicted_ppl"] for one in choice["candidates"]} == {
        "ranks": None, "share": None, "lowrank": None, "width": None, "plain": None,
        "prune": None,
    }  # fmt: skip
    assert "without --no-calibration" in fail(capsys, "apply", "plan.yaml", "-o", "out")


def test_a_recipe_runs_resumes_and_redoes_only_what_changed(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = (
        f"model: {model}\nbudget: {{keep: 0.8}}\n"
        "calibration: {tokens: 256, seqlen: 32, heldout_tokens: 64}\n"
        "plan: {multiple: 4}\nevaluate: {tokens: 64, seqlen: 32, prompt: The river}\n"
    )
    Path("my.yaml").write_text(recipe)
    first = succeed_json(capsys, "run", "my.yaml", "-o", "out")
    assert [one["name"] for one in first["stages"]] == ["analyze", "plan", "apply", "evaluate"]
    assert not any(one["reused"] for one in first["stages"])
    assert first["evaluation"]["params"] < first["evaluation"]["baseline"]["params"]
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    again = succeed_json(capsys, "run", "my.yaml", "-o", "out")
    assert all(one["reused"] for one in again["stages"])
    assert before == {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    Path("my.yaml").write_text(recipe.replace("tokens: 64, seqlen", "tokens: 96, seqlen"))
    changed = succeed_json(capsys, "run", "my.yaml", "-o", "out")
    assert [one["reused"] for one in changed["stages"]] == [True, True, True, False]
    Path("my.yaml").write_text(recipe.replace("keep: 0.8", "keep: 0.6"))
    changed = succeed_json(capsys, "run", "my.yaml", "-o", "out")
    assert [one["reused"] for one in changed["stages"]] == [True, False, False, False]
    assert "baseline" in succeed(capsys, "run", "my.yaml", "-o", "out")


def test_a_local_llama_3_1_of_its_exact_config_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own line, on a folder with Llama 3.1's config at tiny widths."""
    scaling = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "rope_theta": 500000.0,
    }
    for heads, width in ((4, 64), (8, 96)):
        folder = tiny_folder(
            tmp_path / f"llama-3.1-{width}",
            "llama",
            layers=4,
            hidden_size=width,
            intermediate_size=7 * width // 2,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            head_dim=width // heads,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters=scaling,
            tie_word_embeddings=False,
        )
        succeed(capsys, "plan", "--model", folder, "--keep", 0.8, *PLAN, "-o", f"{width}.yaml")
        done = succeed_json(capsys, "apply", f"{width}.yaml", "-o", f"out-{width}")
        assert done["reload_max_abs_diff"] < 1e-4
    line = fail(capsys, "plan", "--model", "llama-3.1-8b", "--keep", 0.8)
    assert "meta-llama/Llama-3.1-8B" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example_that_parses(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = succeed(capsys, command, "--help")
    assert "Example:" in text
    import typer

    group = typer.main.get_command(cli.app)
    with group.make_context("gccompress", [command]) as context:  # type: ignore[attr-defined]
        sub = group.get_command(context, command)  # type: ignore[attr-defined]
        example = shlex.split(sub.help.rpartition("Example: ")[2].strip())
        assert example[:2] == ["gccompress", command]
        sub.make_context(command, example[2:]).close()


def _truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _poisoned(value: float) -> Any:
    def poison(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.2.mlp.up_proj.weight"][3, 5] = value
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return poison


def _without(*names: str) -> Any:
    def remove(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return remove


def _other_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mamba"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncated, "truncated"),
        (_poisoned(float("nan")), "model.layers.2.mlp.up_proj.weight"),
        (_poisoned(float("inf")), "model.layers.2.mlp.up_proj.weight"),
        (_without("model.safetensors"), "weights"),
        (_without("config.json"), "config.json"),
        (_without("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
        (_other_type, "gccompress/architectures/mamba.toml"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
)
def test_damaged_models(
    damage: Any, message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, "damaged")
    damage(Path("damaged"))
    before = sorted(Path().rglob("*"))
    line = fail(capsys, "plan", "--model", "damaged", "--keep", 0.8, *PLAN)
    assert message in line
    assert sorted(Path().rglob("*")) == before


KEEP = ("plan", "--model", "MODEL", "--keep")
WINDOWS = ("--tokens", "64", "--seqlen", "32")
SOURCE = (*KEEP, "0.8", *PLAN, "--calibration")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("analyze", "no-such-model"), "no-such-model"),
        (("analyze", "empty"), "empty"),
        (("plan", "--model", "MODEL"), "--keep"),
        ((*KEEP, "1.5"), "wanted a share in (0, 1]"),
        ((*KEEP, "0"), "wanted a share in (0, 1]"),
        ((*KEEP, "nan"), "wanted a share in (0, 1]"),
        ((*KEEP, "0.5", "--max-size", "1MB"), "one budget"),
        (("plan", "--model", "MODEL", "--max-size", "much"), "200MB"),
        (("plan", "--model", "MODEL", "--max-size", "10kB", *PLAN), "embeddings, norms"),
        ((*KEEP, "0.01", *PLAN), "smallest this strategy reaches"),
        ((*KEEP, "0.8", "--fisher", "some"), "data+1"),
        ((*KEEP, "0.8", "--seqlen", "0"), "--seqlen"),
        ((*KEEP, "0.8", *PLAN, "--heldout-tokens", "-64"), "--heldout-tokens"),
        ((*KEEP, "0.8", *PLAN, "--multiple", "999", "--strategy", "width"), "--multiple"),
        ((*KEEP, "0.8", "-o", "empty"), "a folder"),
        ((*KEEP, "0.8", "--no-calibration", "--strategy", "prune"), "--no-calibration"),
        ((*KEEP, "0.8", "--device", "tpu"), "tpu"),
        ((*SOURCE, "none.txt"), "none.txt"),
        ((*SOURCE, "void.txt"), "empty"),
        ((*SOURCE, "raw.txt"), "binary"),
        ((*SOURCE, "one.txt"), "short"),
        (("apply", "none.yaml", "-o", "out"), "no plan at none.yaml"),
        (("apply", "void.txt", "-o", "out"), "not a plan"),
        (("evaluate", "empty"), "empty"),
        (("evaluate", "MODEL", "--text", "one.txt", "--seqlen", "32"), "short"),
        (
            ("evaluate", "MODEL", "--tasks", "no_such", "--tokens", "64", "--seqlen", "32"),
            "no_such",
        ),
        (("run", "none", "-o", "out"), "demo"),
        (("run", "void.txt", "-o", "out"), "not a recipe"),
        (("run", "typo.yaml", "-o", "out"), "did you mean 'calibration'?"),
        (("run", "nowhere.yaml", "-o", "out"), "no-such-model"),
        (("run", "fisher.yaml", "-o", "out"), "data+1"),
        (("apply", "none.yaml", "-o", "out", "--polish", "1", "--polish-rate", "nan"), "rate"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("void.txt").touch()
    Path("one.txt").write_text("one")
    Path("raw.txt").write_bytes(b"text\0\x01\x02")
    Path("typo.yaml").write_text("model: x\nbudget: {keep: 0.8}\ncalibratoin: {tokens: 1}\n")
    Path("nowhere.yaml").write_text("model: no-such-model\nbudget: {keep: 0.8}\n")
    fisher = f"model: {model}\nbudget: {{keep: 0.8}}\ncalibration: {{fisher: some}}\n"
    Path("fisher.yaml").write_text(fisher)
    before = sorted(Path().rglob("*"))
    line = fail(capsys, *(str(model) if a == "MODEL" else a for a in arguments))
    assert message in line
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--keep", "0.8"),
        ("plan", "--model", "m", "--keep", "much"),
        ("plan", "--model", "m", "--strategy", "magic"),
        ("apply", "plan.yaml"),
        ("no-such-command",),
        ("analyze", "m", "--no-such-option"),
    ],
)
def test_usage_errors_exit_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err and captured.err


def test_outputs_that_are_in_the_way_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    Path("full").mkdir()
    Path("full/mine").write_text("precious")
    for arguments in (
        ("analyze", model, "-o", "full"),
        ("apply", "plan.yaml", "-o", "full"),
        ("run", "demo", "-o", "full"),
    ):
        assert "full" in fail(capsys, *arguments)
    assert [path.name for path in Path("full").iterdir()] == ["mine"]
    assert "plan.yaml" in fail(capsys, "apply", "plan.yaml", "-o", "plan.yaml")


def test_a_plan_for_another_model_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    other = tiny_folder(tmp_path / "other", "llama", layers=5, seed=1)
    line = fail(capsys, "apply", "plan.yaml", "-o", "out", "--model", other)
    assert "--allow-other-model" in line
    assert not Path("out").exists()
    edited = Path("plan.yaml").read_text().replace("strategy: auto", "strategy: auto\nmagic: 1")
    Path("plan.yaml").write_text(edited)
    assert "unknown key 'magic'" in fail(capsys, "apply", "plan.yaml", "-o", "out")


def _fresh_process(
    *arguments: object,
    limit: int | None = None,
    script: str | None = None,
    stdout: Any = subprocess.PIPE,
    **variables: str,
) -> Any:
    """Run the command line, or a script, in a process; file sizes limited to `limit` bytes."""

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    command = [sys.executable, "-m", "gccompress.cli", *map(str, arguments)]
    if script is not None:
        command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **variables}
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restrict,
        env=environment,
        check=False,
    )


def test_a_name_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "mit Lücke", "llama", layers=2)
    arguments = ("plan", "--model", folder, "--keep", 0.9, *PLAN, "-o", "plän 1.yaml")
    done = _fresh_process(*arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "Lücke" in Path("plän 1.yaml").read_text("utf-8")
    assert "gccompress apply 'pl\\xe4n 1.yaml'" in done.stdout


def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = _fresh_process("models", "--json", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith("gccompress: ") and len(done.stderr.splitlines()) == 1


def test_terminating_is_like_interrupting_and_leaves_nothing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    script = (
        "import os, signal, gccompress.apply as a\n"
        "from gccompress.cli import main\n"
        "a.reload_difference = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main(['apply', 'plan.yaml', '-o', 'out'])\n"
    )
    before = sorted(Path().iterdir())
    done = _fresh_process(script=script)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1].startswith("gccompress: interrupted")
    assert sorted(Path().iterdir()) == before


def test_what_a_killed_apply_leaves_is_removed_by_the_next(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    script = (
        "import os, signal, gccompress.apply as a\n"
        "from gccompress.cli import main\n"
        "a.reload_difference = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main(['apply', 'plan.yaml', '-o', 'out'])\n"
    )
    assert _fresh_process(script=script).returncode == -9
    assert len(list(Path().glob(".out.*.tmp"))) == 1 and not Path("out").exists()
    succeed(capsys, "apply", "plan.yaml", "-o", "out")
    assert not list(Path().glob(".out.*")) and Path("out/model.safetensors").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    done = _fresh_process("apply", "plan.yaml", "-o", "out", limit=50_000)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("gccompress: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    assert not Path("out").exists() and not list(Path().glob(".out*"))
    assert _fresh_process("apply", "plan.yaml", "-o", "out").returncode == 0


def test_a_place_that_cannot_be_written_is_one_line(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_plan(capsys, model)
    Path("file").write_text("a file, not a folder")
    assert "file" in fail(capsys, "apply", "plan.yaml", "-o", "file/out")
    line = fail(capsys, "plan", "--model", model, "--keep", 0.8, *PLAN, "-o", "file/plan.yaml")
    assert "cannot write" in line
    assert Path("file").read_text() == "a file, not a folder"


def test_few_tokens_warn_and_say_what_was_damped(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--calibration-tokens", 64, "--seqlen", 32, "--heldout-tokens", 64, "--multiple", 4)
    shown = succeed(capsys, "plan", "--model", model, "--keep", 0.8, *few)
    assert "64 calibration tokens for an input of width 96" in shown
    assert succeed_json(capsys, "apply", "plan.yaml", "-o", "out")["reload_max_abs_diff"] < 1e-3


def test_interrupting_is_130_and_one_line(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gccompress.shards.open_stream", interrupt)
    with pytest.raises(SystemExit) as stop:
        main(["analyze", str(model)])
    assert stop.value.code == 130
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith(
        "gccompress: interrupted"
    )
