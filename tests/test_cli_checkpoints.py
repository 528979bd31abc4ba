"""The commands on checkpoints: JSON keys, exit codes, one line per mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from gccompress.checkpoints import save_checkpoint
from gccompress.cli import main
from tests.test_checkpoints import compressed, edit_config
from tests.tiny import tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "small").mkdir()
    save_checkpoint(compressed("llama"), tiny_tokenizer(), tmp_path / "small")
    return tmp_path / "small"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_verify_and_export_print_one_json_object(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "verify", folder, "--json")
    found: dict[str, Any] = json.loads(out)
    assert code == 0 and found["path"] == str(folder) and found["compressed"] is True
    for format in ("dense", "gguf"):
        code, out, _ = run(
            capsys, "export", folder, "-o", tmp_path / format, "--format", format, "--json"
        )
        found = json.loads(out)
        assert code == 0 and found["format"] == format and found["path"] == str(tmp_path / format)
        [weights] = [
            f for f in Path(found["path"]).iterdir() if f.suffix in (".gguf", ".safetensors")
        ]
        assert found["bytes"] == weights.stat().st_size


def test_tables_say_what_matters(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, "verify", folder)
    assert "llama, compressed, 4 layers" in out and "none recorded" in out
    _, out, _ = run(capsys, "export", folder, "-o", tmp_path / "out")
    assert "saves neither bytes" in " ".join(out.split())


def test_what_is_wrong_is_one_line_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_config(folder, num_hidden_layers=3)
    for arguments in (("verify", folder), ("export", folder, "-o", tmp_path / "out")):
        code, out, err = run(capsys, *arguments)
        last = err.strip().splitlines()[-1]
        assert (code, out) == (2, "") and last.startswith("gccompress: ")
        assert "no module model.layers.3" in last or "unexpected" in last
    assert not (tmp_path / "out").exists()
