"""The package as a whole: what it installs, what it imports, and what no module of it may do."""

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gccompress"
MODULES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Seconds each to import, so never by `import gccompress` or by asking for help.
HEAVY = {"torch", "datasets", "matplotlib", "lm_eval", "scipy", "sklearn", "pandas", "peft"}
PICKLES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
# Where the name to import is not the name to install.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "lm_eval": "lm-eval",
    "huggingface_hub": "huggingface-hub",
}
COMMANDS = ("analyze", "plan", "apply", "evaluate", "run", "models", "demo")


def module_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(node: ast.AST) -> Iterator[str]:
    """Every dotted name imported under a node, inside functions too."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield child.module or ""


def roots(node: ast.AST) -> set[str]:
    return {name.partition(".")[0] for name in imports(node)}


def loaded_by(code: str) -> set[str]:
    """The root modules that a fresh interpreter holds after `code`."""
    ending = (
        "\nimport json, sys\nprint(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code + ending], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.splitlines()[-1]))


def alone(module: str) -> str:
    """Code that imports one module of the package without running `gccompress/__init__.py`."""
    return (
        "import importlib, sys, types\n"
        "package = types.ModuleType('gccompress')\n"
        f"package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['gccompress'] = package\n"
        f"importlib.import_module('gccompress.{module}')"
    )


def distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


def test_the_console_script_answers_help_with_every_command() -> None:
    module, _, function = PROJECT["scripts"]["gccompress"].partition(":")
    code = f"import sys; from {module} import {function}; sys.argv[0] = 'gccompress'; {function}()"
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    for command in COMMANDS:
        assert re.search(rf"\b{command}\b", result.stdout), f"{command} is not in --help"


@pytest.mark.parametrize("code", ["import gccompress", "import gccompress.cli"])
def test_importing_is_light(code: str) -> None:
    assert not loaded_by(code) & HEAVY


@pytest.mark.parametrize("module", ["plan", "sizes"])
def test_plans_and_sizes_need_no_torch(module: str) -> None:
    assert not roots(tree(PACKAGE / f"{module}.py")) & {"torch", "transformers"}
    assert not loaded_by(alone(module)) & {"torch", "transformers"}


@pytest.mark.parametrize("module", ["linalg", "spectra"])
def test_linear_algebra_needs_no_transformers(module: str) -> None:
    assert "transformers" not in roots(tree(PACKAGE / f"{module}.py"))
    assert "transformers" not in loaded_by(alone(module))


def test_the_modeling_file_stands_alone() -> None:
    """It is copied into checkpoints, where gccompress need not be installed."""
    outside = roots(tree(PACKAGE / "modeling.py")) - set(sys.stdlib_module_names)
    assert outside <= {"torch", "transformers"}


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_nothing_runs_what_a_file_says(path: Path) -> None:
    """No pickles, no `torch.load`, no code from the hub unless the user asks for it."""
    module = tree(path)
    assert not roots(module) & PICKLES
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                pytest.fail(f"{module_id(path)}:{node.lineno} torch.load; use safetensors")
            case ast.ImportFrom(module="torch", names=names):
                assert "load" not in {alias.name for alias in names}
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
                pytest.fail(f"{module_id(path)}:{node.value.lineno} trusts remote code")
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    named = isinstance(key, ast.Constant) and key.value == "trust_remote_code"
                    assert not (named and isinstance(value, ast.Constant) and value.value is True)


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.name.startswith("cli"):
        pytest.skip("the command line prints")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{module_id(path)}:{node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=module_id)
def test_no_error_is_swallowed_whole(path: Path) -> None:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            broad = caught in {"everything", "Exception", "BaseException"}
            raises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
            is_cli = path.name == "cli.py"  # where a bug becomes exit 1
            assert not broad or raises or is_cli, f"{module_id(path)}:{node.lineno} {caught}"


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & {"utils", "util", "common", "helpers", "misc"}


def test_what_is_imported_is_what_is_required() -> None:
    """Core requirements cover every import but those of an extra, which functions make."""
    core = {distribution(text) for text in PROJECT["dependencies"]}
    extras = {
        distribution(text)
        for name in ("eval", "quant")
        for text in PROJECT["optional-dependencies"][name]
    }
    used: set[str] = set()
    for path in MODULES:
        module = tree(path)
        outside = roots(module) - set(sys.stdlib_module_names) - {"gccompress"}
        names = {DISTRIBUTIONS.get(name, name) for name in outside}
        assert names <= core | extras, module_id(path)
        at_the_top = {
            DISTRIBUTIONS.get(name, name)
            for node in module.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in roots(node)
        }
        assert not at_the_top & extras, f"{module_id(path)} imports an extra at its top"
        used |= names
    # Imported by transformers when it loads weights (accelerate) or reads GGUF (gguf).
    assert core - used <= {"accelerate", "gguf"}, "a requirement that nothing uses"


def test_the_version_is_one_number() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert newest, "CHANGELOG.md has no version"
    assert newest[1] == PROJECT["version"]
    assert importlib.import_module("gccompress").__version__ == PROJECT["version"]


def test_every_data_file_is_packaged() -> None:
    """A file that a module reads must be in the wheel, not only in a checkout."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["*"]
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix not in {".py", ".pyc"}:
            assert any(path.match(pattern) for pattern in patterns), module_id(path)
    assert (PACKAGE / "py.typed").is_file()
