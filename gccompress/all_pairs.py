"""All pairs of adjacent layers of a model: several weights at a time, within memory, resumable.

Each weight is one task on one worker, so that results do not depend on how many there are.
"""

import dataclasses
import hashlib
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gccompress.errors import GccompressError
from gccompress.krylov import Stored
from gccompress.layers import Layer, Scales, Way, refuse_non_finite, seed_of, take_apart, way_of
from gccompress.pairs import PairMetrics, compare
from gccompress.progress import track_bytes
from gccompress.roles import Role
from gccompress.shards import WeightStream
from gccompress.weight_source import WeightSource

logger = logging.getLogger("gccompress")

VERSION = 2  # of the measurement; results kept by another version are not taken up again
MEMORY = 2_500_000_000  # bytes that weights and vectors of all workers may take together

WIDEST_ITEMSIZE = 4  # bytes a number as a weight may come from its file
FULL_ITEMSIZE = 64  # what a whole decomposition in fp64 takes

Pair = tuple[PairMetrics, ...]  # raw, then folded


@dataclass(frozen=True)
class Settings:
    """What a sweep measures and where; all but the device is part of what results are kept by."""

    folded: bool = True
    full: bool = False
    device: torch.device = torch.device("cpu")
    memory: int = MEMORY


class Kept:
    """Finished pairs in a file, one a line, so that an interrupted sweep can go on."""

    def __init__(self, path: Path | None) -> None:
        """Take up what `path` holds; None keeps nothing."""
        self._path = path
        self.pairs: dict[tuple[Role, int], Pair] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                self._take(line)

    def _take(self, line: str) -> None:
        try:
            row = json.loads(line)
            variants = tuple(_metrics(variant) for variant in row["variants"])
            self.pairs[Role(row["role"]), int(row["pair"])] = variants
        except (ValueError, KeyError, TypeError):
            logger.debug("%s: a line cut short is not taken up", self._path)

    def add(self, role: Role, pair: int, variants: Pair) -> None:
        """Add a pair and write it down at once."""
        self.pairs[role, pair] = variants
        if self._path is None:
            return
        row = {"role": role, "pair": pair, "variants": [dataclasses.asdict(v) for v in variants]}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(row))
        except OSError as error:
            raise GccompressError(
                f"finished pairs cannot be kept in {self._path.parent}: {error.strerror}; name "
                "another folder with --cache-dir"
            ) from error

    def remove(self) -> None:
        """Delete the file: the report has everything now."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _metrics(row: dict[str, Any]) -> PairMetrics:
    values: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in row.items()}
    return PairMetrics(**values)


def kept_path(folder: Path, files: Sequence[Path], settings: Settings) -> Path:
    """Return where the pairs of a model made of `files` are kept while it is measured.

    Files count by place, size and time of change: hashing them would read everything once more.
    """
    state = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = json.dumps([VERSION, settings.folded, settings.full, state])
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()}.jsonl"


def sweep(
    source: WeightSource, settings: Settings, kept: Kept, *, progress: bool = True
) -> dict[Role, list[Pair]]:
    """Measure every role over all adjacent pairs of layers; pairs in `kept` are not repeated.

    At most two layers of a role per worker are in memory, and no more workers are used than
    `settings.memory` has room for.
    """
    todo = [(role, layer) for role in source.roles for layer in _layers_to_read(source, role, kept)]
    ways = {role: _way(source, role, settings.full) for role in source.roles}
    sizes = {key: _stored_bytes(source, *key) for key in todo}
    workers, threads = _split(source, settings)
    with track_bytes("continuity", sum(sizes.values()), progress) as advance, _threads(threads):
        pool = ThreadPoolExecutor(workers, thread_name_prefix="continuity")
        try:
            layers = _in_order(pool, workers, source, todo, ways, settings)
            _pair_up(pool, layers, kept, lambda key: advance(sizes[key]))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    count = source.num_layers - 1
    return {role: [kept.pairs[role, i] for i in range(count)] for role in source.roles}


def _layers_to_read(source: WeightSource, role: Role, kept: Kept) -> list[int]:
    """Return the layers of a role that belong to a pair not yet measured."""
    count = source.num_layers - 1
    missing = [i for i in range(count) if (role, i) not in kept.pairs]
    return sorted({*missing, *(i + 1 for i in missing)})


def _way(source: WeightSource, role: Role, full: bool) -> Way:
    return way_of([source.shape(role, i) for i in range(source.num_layers)], full=full)


def _in_order(
    pool: ThreadPoolExecutor,
    workers: int,
    source: WeightSource,
    todo: list[tuple[Role, int]],
    ways: dict[Role, Way],
    settings: Settings,
) -> Iterator[tuple[Role, int, Layer]]:
    """Yield layers taken apart, in order, while the pool is at work on the next ones."""
    ahead: deque[tuple[Role, int, Future[Layer]]] = deque()
    for role, layer in todo:
        task = pool.submit(_read, source, role, layer, ways[role], settings)
        ahead.append((role, layer, task))
        if len(ahead) > workers:
            role, layer, task = ahead.popleft()
            yield role, layer, task.result()
    while ahead:
        role, layer, task = ahead.popleft()
        yield role, layer, task.result()


def _pair_up(
    pool: ThreadPoolExecutor,
    layers: Iterable[tuple[Role, int, Layer]],
    kept: Kept,
    advance: Callable[[tuple[Role, int]], None],
) -> None:
    """Compare each layer with the one before it, on the pool, and keep what comes out."""
    waiting: deque[tuple[Role, int, Future[Pair]]] = deque()
    previous: tuple[Role, int, Layer] | None = None

    def collect(limit: int) -> None:
        while len(waiting) > limit:
            role, pair, task = waiting.popleft()
            kept.add(role, pair, task.result())

    for role, layer, current in layers:
        advance((role, layer))
        if previous is not None and previous[:2] == (role, layer - 1):
            if (role, layer - 1) not in kept.pairs:
                waiting.append((role, layer - 1, pool.submit(compare, previous[2], current)))
        previous = (role, layer, current)
        collect(2)
    collect(0)


def _read(source: WeightSource, role: Role, layer: int, way: Way, settings: Settings) -> Layer:
    """Read one weight and take it apart."""
    place = f"layer {layer} {role}"
    before, after = source.in_scale(role, layer), source.out_scale(role, layer)
    scales = Scales(before, after) if settings.folded else Scales(None, None)
    for scale, where in ((scales.before, "before"), (scales.after, "after")):
        if scale is not None:
            refuse_non_finite(scale, f"{place}: scale of the norm {where} it")
    return take_apart(
        source.weight(role, layer),
        scales,
        way,
        device=settings.device,
        seed=seed_of(role, layer),
        name=f"{place}: weight",
    )


def _stored_bytes(source: WeightSource, role: Role, layer: int) -> int:
    if isinstance(source, WeightStream):
        return source.stored_bytes(role, layer)
    return source.weight(role, layer).nbytes


def _split(source: WeightSource, settings: Settings) -> tuple[int, int]:
    """Return how many weights to work on at a time, and with how many threads each."""
    threads = torch.get_num_threads()
    shapes = {source.shape(role, i) for role in source.roles for i in range(source.num_layers)}
    itemsize = FULL_ITEMSIZE if settings.full else WIDEST_ITEMSIZE
    largest = max((working_bytes(shape, itemsize) for shape in shapes), default=1)
    workers = max(1, min(threads, settings.memory // largest))
    return workers, max(1, threads // workers)


def working_bytes(shape: tuple[int, int], itemsize: int) -> int:
    """Return the memory that taking apart a weight `(out, in)` needs; docs/analyzer.md.

    The weight as stored, a basis of at most 384 directions (vectors, products and images, fp32)
    and as much again while the Ritz vectors are formed, one widened block.
    """
    out, width = shape
    return math.prod(shape) * itemsize + 4 * 512 * (2 * width + out) + Stored.BLOCK_BYTES


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads per worker meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
