"""Files: outputs that are whole or not there, and what killed processes leave behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gccompress.errors import GccompressError
from gccompress.files import new_folder

ROOT = Path(__file__).resolve().parent.parent
HANG = """
import sys, time
from pathlib import Path
from gccompress.files import new_folder
with new_folder(Path(sys.argv[1])) as temporary:
    (temporary / "half").write_text("written")
    print("ready", flush=True)
    time.sleep(600)
"""


def hanging(out: Path) -> subprocess.Popen[str]:
    """Start a process that is in the middle of writing `out`."""
    command = [sys.executable, "-c", HANG, str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out (1)"
    killed, running = hanging(out), hanging(out)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        left = {path.name: path for path in tmp_path.iterdir()}
        [dead] = [path for name, path in left.items() if f".{killed.pid}-" in name]
        [alive] = [path for name, path in left.items() if f".{running.pid}-" in name]
        pid, _, machine = dead.name.split(".")[2].partition("-")
        other = "0" * 8 if machine != "0" * 8 else "1" * 8
        mine = [
            tmp_path / dead.name.replace("out (1)", "out (2)"),  # of another output
            tmp_path / dead.name.replace(machine, other),  # of another machine
            tmp_path / dead.name.removesuffix(".tmp"),
            tmp_path / ".out (1).notes.tmp",
            tmp_path / f".out (1).{pid}.tmp",
        ]
        for path in mine:
            path.mkdir()
            (path / "precious").touch()
        file = tmp_path / dead.name.replace(dead.name[-12:], "abcdefgh.tmp")
        file.touch()
        link = tmp_path / dead.name.replace(dead.name[-12:], "hgfedcba.tmp")
        link.symlink_to(mine[0], target_is_directory=True)
        with new_folder(out) as temporary:
            (temporary / "whole").touch()
            assert f".{os.getpid()}-{machine}." in temporary.name
        assert not dead.exists()
        for path in (alive / "half", file, link, out / "whole", *(p / "precious" for p in mine)):
            assert path.exists(), path
    finally:
        for process in (killed, running):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_an_error_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as temporary:
        (temporary / "half").touch()
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with pytest.raises(GccompressError, match="cannot write"), new_folder(tmp_path / "out"):
        raise OSError("disk full")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(GccompressError, match="not empty"), new_folder(tmp_path / "out"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
