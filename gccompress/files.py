"""Files on disk: the cache folder, content hashes, and writes that are whole or not there."""

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gccompress.errors import GccompressError

logger = logging.getLogger(__name__)


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """Return the cache folder, made if absent: given, $GCCOMPRESS_CACHE or the user's cache."""
    if cache_dir is None:
        cache_dir = os.environ.get("GCCOMPRESS_CACHE")
    if cache_dir is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_dir = Path(base) / "gccompress"
    folder = Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GccompressError(
            f"cache folder {folder}: {error.strerror}; name another with --cache-dir"
        ) from error
    return folder


def file_sha256(path: Path) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refuse_non_empty(folder: Path) -> None:
    """Raise `GccompressError` when an output folder exists and holds anything, or is a file."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise GccompressError(
            f"output folder {folder} exists and is not empty; name a new folder or empty it first"
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out` that becomes `out` when the block ends without error.

    Raises `GccompressError` when `out` is not empty or the disk refuses (full, read-only).
    On any error the temporary folder is removed and `out` is as it was. Those that killed
    processes of this machine left behind for the same `out` are removed first.
    """
    refuse_non_empty(out)
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        prefix = f".{out.name}.{os.getpid()}-{_machine()}."
        temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=".tmp", dir=out.parent))
        temporary.chmod(0o755)
        yield temporary
        if out.is_dir():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise GccompressError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_stale(out: Path) -> None:
    """Remove the temporary folders for `out` whose process is gone from this machine."""
    ours = re.compile(re.escape(f".{out.name}.") + rf"(\d+)-{_machine()}\.[a-z0-9_]{{8}}\.tmp")
    for entry in os.scandir(out.parent):
        found = ours.fullmatch(entry.name)
        if found and entry.is_dir(follow_symlinks=False) and not _runs(int(found[1])):
            logger.warning("%s: removed, left behind by a process that was killed", entry.path)
            shutil.rmtree(entry.path, ignore_errors=True)


def _machine() -> str:
    """Return a name for where process ids mean the same: this host and, on Linux, container."""
    namespace = Path("/proc/self/ns/pid")
    where = [socket.gethostname(), os.readlink(namespace) if namespace.is_symlink() else ""]
    return hashlib.sha256(json.dumps(where).encode()).hexdigest()[:8]


def _runs(pid: int) -> bool:
    """Return False only where a process is known to be gone."""
    if os.name != "posix":  # elsewhere signal 0 is none
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yield a temporary path beside `out` that replaces `out` when the block ends without error."""
    temporary: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent)
        os.close(handle)
        temporary = Path(name)
        temporary.chmod(0o644)
        yield temporary
        temporary.replace(out)
    except OSError as error:
        raise GccompressError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(out: Path, text: str) -> None:
    """Write a text file atomically (UTF-8)."""
    with new_file(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
