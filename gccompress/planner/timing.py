"""Measures a latency table: the parts of a prefill inside the model, and products of all sizes.

A noisy machine disturbs both sides of a ratio: a product is timed in turns with a reference
product, and the least disturbed of several times counts.
"""

import copy
import hashlib
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gccompress.errors import GccompressError
from gccompress.files import write_text
from gccompress.modeling import ConcatLinear
from gccompress.planner.latency import Curve, LatencyTable, Measured
from gccompress.progress import track
from gccompress.roles import MLP, Role
from gccompress.sampling import evaluating, new_cache, next_logits
from gccompress.view import ModelView

logger = logging.getLogger(__name__)

SWEEPS = 3  # over all that is timed, so that one disturbance spoils one of them
PASSES = 2  # of the whole model in a sweep
REPEATS = 3  # of a product in a sweep, in turns with the reference
SLOW_PASS = 10.0  # seconds; a model that takes longer is timed once a sweep
RANKS, WIDTHS = 12, 10  # points of a curve
STEP = 32  # points are multiples of this, halved until so many of them fit
MULTIPLES_AT_LEAST = 6
SAMPLE_SECONDS = 2e-4  # a shorter product is timed several times over


def latency_table(view: ModelView, cache: Path, *, tokens: int = 512) -> LatencyTable:
    """Return the table of a model on its device, measured once and then read from the cache.

    Args:
        view: the dense model, on the device and in the dtype that the table is wanted for.
        cache: the cache folder.
        tokens: length of the prompt; shortened to what the model has positions for.
    """
    measured = describe(view, tokens)
    key = hashlib.sha256(measured.model_dump_json().encode()).hexdigest()[:32]
    path = cache / "latency" / f"{key}.json"
    if path.exists():
        try:
            return LatencyTable.from_json(path.read_text(encoding="utf-8"))
        except (GccompressError, OSError, UnicodeDecodeError) as error:
            logger.warning("%s: %s; measuring again", path, error)
    table = measure_latency(view, measured)
    write_text(path, table.to_json())
    return table


def describe(view: ModelView, tokens: int) -> Measured:
    """Return what a table of this model, here and now, is measured on."""
    model, config = view.model, view.model.config
    room = getattr(config, "max_position_embeddings", None)
    heads = int(config.num_attention_heads)
    return Measured(
        device=device_name(model.device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        dtype=str(model.dtype).removeprefix("torch."),
        tokens=tokens if room is None else min(tokens, int(room)),
        model_type=config.model_type,
        attention=str(config._attn_implementation),
        layers=view.num_layers,
        heads=(heads, int(getattr(config, "num_key_value_heads", None) or heads)),
        vocabulary=int(config.get_text_config().vocab_size),
        matrices={role: view.shape(role, 0) for role in view.roles},
    )


def device_name(device: torch.device) -> str:
    """Return the name of the processor behind a torch device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()


@dataclass(frozen=True)
class _Job:
    """A module to time: how it is made, and the columns it reads."""

    make: Callable[[], nn.Module]
    columns: int


def measure_latency(view: ModelView, measured: Measured) -> LatencyTable:
    """Time the model's parts and modules of other sizes; changes nothing in the model."""
    passes, products = _Passes(view, measured.tokens), Products(view, measured.tokens)
    jobs = _jobs(view, measured, products)
    with evaluating(view.model):
        passes.seconds_of_one()
        repeats = REPEATS if passes.seconds_of_one() < SLOW_PASS else 1

        def one(key: str) -> None:
            products.time(key, jobs[key].make(), jobs[key].columns, repeats)

        sweep: list[Callable[[], None]] = [passes.run] * PASSES
        sweep += [partial(one, key) for key in jobs]
        for step in track(sweep * SWEEPS, "Timing this device (parts)"):
            step()
    return _table(view, measured, passes, products)


def _jobs(view: ModelView, measured: Measured, products: "Products") -> dict[str, _Job]:
    """Return what is to be timed besides whole passes."""
    jobs: dict[str, _Job] = {}

    def linear(columns: int, rows: int) -> None:
        jobs[_linear(columns, rows)] = _Job(partial(products.linear, columns, rows), columns)

    for rows, columns in set(measured.matrices.values()):
        linear(columns, rows)
        for rank in points(max(rows, columns), RANKS, geometric=True):
            linear(columns, rank)
            linear(rank, rows)
    hidden, inner = measured.matrices[Role.DOWN]
    for width in points(inner, WIDTHS, geometric=False):
        jobs[f"mlp {width}"] = _Job(partial(products.mlp, width), hidden)
    for roles in _fused(view):
        columns = measured.matrices[roles[0]][1]
        linear(columns, sum(measured.matrices[role][0] for role in roles))
        jobs[_joined(roles)] = _Job(partial(products.joined, roles), columns)
    return jobs


def _linear(columns: int, rows: int) -> str:
    return f"linear {columns} {rows}"


def _joined(roles: Sequence[Role]) -> str:
    return "+".join(roles)


def _fused(view: ModelView) -> tuple[tuple[Role, ...], ...]:
    """Return the roles of every fused weight."""
    sites = [view.site(role, 0) for role in view.roles]
    return tuple(
        dict.fromkeys(tuple(role for role, _, _ in one.parts) for one in sites if one.fused)
    )


def _table(
    view: ModelView, measured: Measured, passes: "_Passes", products: "Products"
) -> LatencyTable:
    """Scale what was timed alone to what the model's own parts took inside it."""
    layers = range(view.num_layers)
    hidden, inner = measured.matrices[Role.DOWN]
    roles: dict[Role, float] = {}
    joins: dict[str, float] = {}
    for role in view.roles:
        module = passes.seconds([view.site(role, layer).module for layer in layers])
        parts = view.site(role, 0).parts
        whole = parts[-1][2]
        roles[role] = module * measured.matrices[role][0] / whole
        if len(parts) > 1:
            names = tuple(name for name, _, _ in parts)
            fused = products.ratio(_linear(measured.matrices[role][1], whole))
            added = products.ratio(_joined(names)) / fused - 1
            joins[_joined(names)] = max(0.0, added) * module
    mlp = passes.seconds([mlp_name(view, layer) for layer in layers])
    layer_seconds = passes.seconds([f"{view.spec.layers}.{layer}" for layer in layers])
    attention = sum(seconds for role, seconds in roles.items() if role not in MLP)

    def curves(read: bool) -> dict[Role, Curve]:
        found: dict[Role, Curve] = {}
        for role, (rows, columns) in measured.matrices.items():
            unit = roles[role] / products.ratio(_linear(columns, rows))
            ranks = points(max(rows, columns), RANKS, geometric=True)
            keys = [_linear(columns, one) if read else _linear(one, rows) for one in ranks]
            seconds = tuple(unit * products.ratio(key) for key in keys)
            found[role] = Curve(sizes=ranks, seconds=seconds)
        return found

    widths = points(inner, WIDTHS, geometric=False)
    unit = mlp / products.ratio(f"mlp {inner}")
    return LatencyTable(
        measured=measured,
        rest=passes.seconds([""]),
        layer_rest=layer_seconds - mlp - attention,
        activation=mlp - sum(seconds for role, seconds in roles.items() if role in MLP),
        roles=roles,
        reads=curves(True),
        writes=curves(False),
        widths=Curve(
            sizes=widths, seconds=tuple(unit * products.ratio(f"mlp {one}") for one in widths)
        ),
        joins=joins,
    )


class Clock:
    """Moments on the time line of what computes, be it a GPU that nothing waits for meanwhile.

    A single CPU thread has a clock that stands still while other programs have its core.
    """

    def __init__(self, device: torch.device) -> None:
        """Choose the clock of a device."""
        self._cuda = device.type == "cuda"
        self._read = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def now(self) -> Any:
        """Return this moment; on a GPU, when it gets here."""
        if not self._cuda:
            return self._read()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the time between two moments; waits for them."""
        if not self._cuda:
            return float(stop - start)
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


class _Passes:
    """The parts of whole passes: every layer, its MLP and its products."""

    def __init__(self, view: ModelView, tokens: int) -> None:
        self._view, self._clock = view, Clock(view.model.device)
        generator = torch.Generator().manual_seed(0)
        vocabulary = view.model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (1, tokens), generator=generator)
        self._ids = ids.to(view.model.device)
        self._names = dict(self._watched())
        self._least = dict.fromkeys([*self._names, ""], math.inf)

    def _watched(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules to time by full name: layers, MLPs, products."""
        view = self._view
        for layer in range(view.num_layers):
            yield f"{view.spec.layers}.{layer}", view.layer(layer)
            names = {view.site(role, layer).module for role in view.roles}
            for name in sorted(names | {mlp_name(view, layer)}):
                yield name, view.model.get_submodule(name)

    def seconds_of_one(self) -> float:
        """Return the seconds of a pass, which is not kept."""
        start = self._clock.now()
        next_logits(self._view.model, self._ids, new_cache(self._view.model))
        return self._clock.seconds(start, self._clock.now())

    def run(self) -> None:
        """Time one pass; the time outside all layers goes under the empty name."""
        starts: dict[str, Any] = {}
        stops: dict[str, Any] = {}
        with ExitStack() as stack:
            for name, module in self._names.items():
                for register, moments in (
                    (module.register_forward_pre_hook, starts),
                    (module.register_forward_hook, stops),
                ):
                    stack.callback(register(self._note(moments, name)).remove)
            start = self._clock.now()
            next_logits(self._view.model, self._ids, new_cache(self._view.model))
            stop = self._clock.now()
        found = {name: self._clock.seconds(starts[name], stops[name]) for name in self._names}
        layers = [f"{self._view.spec.layers}.{i}" for i in range(self._view.num_layers)]
        total = self._clock.seconds(start, stop)
        found[""] = total - sum(found[name] for name in layers)
        for name, seconds in found.items():
            self._least[name] = min(self._least[name], seconds)

    def _note(self, moments: dict[str, Any], name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            moments[name] = self._clock.now()

        return hook

    def seconds(self, names: Sequence[str]) -> float:
        """Return the least seconds of one pass in a module, the mean over modules."""
        return statistics.mean(self._least[name] for name in names)


def mlp_name(view: ModelView, layer: int) -> str:
    """Return the full name of the module of a layer that holds its MLP's products."""
    return view.site(Role.DOWN, layer).module.rpartition(".")[0]


class Products:
    """Modules of any size, timed in turns with a reference product of this model."""

    def __init__(self, view: ModelView, tokens: int) -> None:
        """Make the reference: a product of the shape of Q."""
        self._view, self._tokens = view, tokens
        self._clock = Clock(view.model.device)
        self._generator = torch.Generator(view.model.device).manual_seed(0)
        rows, columns = view.shape(Role.Q, 0)
        self._reference = self._work(self.linear(columns, rows), columns)
        self._ratios: dict[str, list[float]] = {}

    def linear(self, columns: int, rows: int, bias: bool = False) -> nn.Module:
        """Return a random `[.., columns] -> [.., rows]`."""
        model = self._view.model
        made: nn.Module = nn.utils.skip_init(
            nn.Linear, columns, rows, bias=bias, device=model.device, dtype=model.dtype
        )
        for parameter in made.parameters():
            parameter.data.normal_(std=columns**-0.5, generator=self._generator)
        return made

    def mlp(self, width: int) -> nn.Module:
        """Return the first layer's MLP with so many random neurons."""
        view, name = self._view, mlp_name(self._view, 0)
        old = view.model.get_submodule(name)
        made = copy.deepcopy(old, {id(parameter): parameter for parameter in old.parameters()})
        hidden = view.shape(Role.DOWN, 0)[0]
        for role in (role for role in view.roles if role in MLP):
            site, bias = view.site(role, 0), view.bias(role, 0) is not None
            if role is Role.DOWN:
                product = self.linear(width, hidden, bias)
            else:
                product = self.linear(hidden, width * len(site.parts), bias)
            made.set_submodule(site.module.removeprefix(f"{name}."), product)
        return made

    def joined(self, roles: Sequence[Role]) -> nn.Module:
        """Return the roles of a fused weight one by one, as a compressed checkpoint has them."""
        shapes = [self._view.shape(role, 0) for role in roles]
        return ConcatLinear([self.linear(columns, rows) for rows, columns in shapes], False)

    def time(self, key: str, module: nn.Module, columns: int, repeats: int) -> None:
        """Time a module that reads `[1, tokens, columns]`, in turns with the reference."""
        work = self._work(module, columns)
        self._seconds(work, 1)
        calls = max(1, math.ceil(SAMPLE_SECONDS / max(self._seconds(work, 1), 1e-9)))
        ours, reference = [], [self._seconds(self._reference, calls)]
        for _ in range(repeats):
            ours.append(self._seconds(work, calls))
            reference.append(self._seconds(self._reference, calls))
        self._ratios.setdefault(key, []).append(min(ours) / min(reference))

    def ratio(self, key: str) -> float:
        """Return the time of what was timed under `key`, in those of the reference."""
        return statistics.median(self._ratios[key])

    def _work(self, module: nn.Module, columns: int) -> Callable[[], Any]:
        model = self._view.model
        x = torch.empty(1, self._tokens, columns, device=model.device, dtype=model.dtype)
        x.normal_(generator=self._generator)
        module.eval()
        return lambda: module(x)

    def _seconds(self, work: Callable[[], Any], calls: int) -> float:
        start = self._clock.now()
        for _ in range(calls):
            work()
        return self._clock.seconds(start, self._clock.now()) / calls


def points(largest: int, count: int, *, geometric: bool) -> tuple[int, ...]:
    """Return up to `count` sizes from small to `largest`, multiples of a step where there is room.

    Geometric ones are denser where ranks that save lie.
    """
    step = STEP
    while step > 1 and step * MULTIPLES_AT_LEAST > largest:
        step //= 2
    spaced = np.geomspace(step, largest, count) if geometric else np.linspace(0, largest, count + 1)
    rounded = {max(step, round(float(one) / step) * step) for one in spaced}
    return tuple(sorted({min(one, largest) for one in rounded} | {largest}))
