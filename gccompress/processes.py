"""Several processes at one calibration (torchrun, accelerate launch), and what they agree on."""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from gccompress.errors import GccompressError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

PATIENCE = timedelta(hours=12)  # the main process may measure and sample text alone meanwhile


@dataclass(frozen=True)
class Processes:
    """This process among those that were started together.

    Attributes:
        rank: which this is; 0 is the main one, which alone writes and prints.
        count: how many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0


def started() -> int:
    """Return how many processes torchrun or accelerate launch says that it started, else 1."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() and "RANK" in os.environ else 1


def refuse_several(what: str) -> None:
    """Raise `GccompressError` when several processes were started for what takes one."""
    if started() > 1:
        raise GccompressError(
            f"{what} runs in one process, {started()} were started; start it without torchrun or "
            "accelerate launch (only plan, with calibration, is divided)"
        )


def join(device: str = "auto") -> Processes:
    """Meet the processes that were started with this one, each on a GPU of its own or all on CPU.

    Raises:
        GccompressError: a device that the processes would have to share.
    """
    if started() > 1:
        from torch import distributed

        if not distributed.is_initialized():
            from accelerate import PartialState  # type: ignore[import-untyped]

            from gccompress.models import pick_device

            picked = pick_device(device)
            if ":" in str(picked):
                raise GccompressError(
                    f"--device {device} for {started()} processes, but each takes one of its own; "
                    "give --device cuda, or cpu"
                )
            PartialState(cpu=picked.type == "cpu", timeout=PATIENCE)
            atexit.register(distributed.destroy_process_group)
    return current()


def current() -> Processes:
    """Return this process among those that have joined; one alone where none have."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return Processes()
    return Processes(distributed.get_rank(), distributed.get_world_size())


def from_main(value: int) -> int:
    """Return the main process's value, in all of them."""
    if current().count == 1:
        return value
    import torch

    told = torch.tensor(int(value), device=_device())
    with _naming_lost_processes():
        torch.distributed.broadcast(told, 0)
    return int(told)


def largest(value: int) -> int:
    """Return the largest of all processes' values."""
    if current().count == 1:
        return value
    import torch

    told = torch.tensor(value, device=_device())
    with _naming_lost_processes():
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
    return int(told)


def sum_to_main(tensors: Mapping[str, "Tensor"]) -> None:
    """Add all processes' tensors up by name in the main one, in place; the others become zero."""
    group = current()
    if group.count == 1:
        return
    from torch import distributed

    for _, tensor in sorted(tensors.items()):  # in one order everywhere
        with _naming_lost_processes():
            distributed.reduce(tensor, 0)
        if not group.main:
            tensor.zero_()


def main_first(work: Callable[[], T]) -> T:
    """Do work in the main process, then in the others, which find in the cache what it left.

    Raises:
        GccompressError: the main one's, in all of them.
    """
    group = current()
    if group.count == 1:
        return work()
    if not group.main:
        if not from_main(0):
            raise GccompressError("the main process failed; its error is the one to read")
        return work()
    try:
        result = work()
    except GccompressError:
        from_main(0)
        raise
    from_main(1)
    return result


@contextmanager
def _naming_lost_processes() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # what torch raises when the other side of a connection ends
        raise GccompressError(
            f"another process of this calibration ended ({str(error).splitlines()[0][:80]}); "
            "its error is the one to read"
        ) from error


def _device() -> str:
    from torch import distributed

    return "cpu" if distributed.get_backend() == "gloo" else "cuda"
