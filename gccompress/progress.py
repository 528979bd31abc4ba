"""Progress on stderr: a bar on a terminal, nothing elsewhere; the log level silences it."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger("gccompress")


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield `items` behind a progress bar titled `what`, with the time left where it is known."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    if not sys.stderr.isatty() or logger.getEffectiveLevel() > logging.INFO:
        logger.info("%s", what)
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, what, total=total, console=Console(stderr=True), transient=True)


@contextmanager
def track_bytes(what: str, total: int, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function to be told of bytes done; shows a bar with what is left of `total`."""
    if not shown or not sys.stderr.isatty() or logger.getEffectiveLevel() > logging.INFO:
        if shown:
            logger.info("%s", what)
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
