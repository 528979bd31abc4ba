"""What became of sharing in a plan, in words: where it won and by how much, where it lost."""

from collections.abc import Iterator, Sequence

from gccompress.plan import AnyMove, ShareInput, ShareOutput
from gccompress.planner.allocate import Allocation
from gccompress.planner.cuts import price_at
from gccompress.planner.survey import Segment
from gccompress.roles import Role


def sharing_findings(
    moves: Sequence[AnyMove], allocation: Allocation | None, spaces: str
) -> tuple[str, ...]:
    """Return a sentence for every shared basis of a plan, and for every role that shares none.

    Args:
        moves: of the plan.
        allocation: of `auto`, for what was considered and not taken; None leaves those out.
        spaces: the rule by which shared spaces were considered.
    """
    found: list[str] = []
    sharing: set[tuple[Role, ...]] = set()
    for move in moves:
        if isinstance(move, ShareInput | ShareOutput):
            sharing.add(move.roles)
            found.append(_of_move(move))
    if allocation is not None:
        found += _not_taken(allocation, sharing, spaces)
    return tuple(found)


def _of_move(move: ShareInput | ShareOutput) -> str:
    space = "input" if isinstance(move, ShareInput) else "output"
    where = f"{'+'.join(move.roles)} in {_layers(move.layers)} shares its {space} basis"
    if move.gain is None:
        return f"{where}: private factors cannot be so small"
    word = "better" if move.gain >= 0 else "worse"
    return f"{where}: {abs(move.gain):.4f} nats {word} than private factors of the same size"


def _not_taken(
    allocation: Allocation, sharing: set[tuple[Role, ...]], spaces: str
) -> Iterator[str]:
    """Yield by how much sharing lost, for each set of roles that shares nothing in the plan."""
    private: dict[tuple[Role, int], float] = {}
    considered: dict[tuple[Role, ...], float] = {}
    candidates = [
        (option, option.candidate)
        for option in allocation.options
        if isinstance(option.candidate, Segment)
    ]
    for option, segment in candidates:
        if len(segment.matrices) == 1:
            private[segment.matrices[0]] = price_at(option, allocation.tau)
    for option, segment in candidates:
        if len(segment.matrices) > 1:
            alone = sum(private[matrix] for matrix in segment.matrices)
            lost = price_at(option, allocation.tau) - alone
            least = considered.get(segment.roles, float("inf"))
            considered[segment.roles] = min(least, lost)
    for roles, lost in considered.items():
        if roles not in sharing:
            reason = f"lost by {lost:.4f} nats at least, at the plan's price of size"
            if lost <= 0:
                reason = "lost to another move for the same matrices"
            yield f"{'+'.join(roles)}: sharing was considered and {reason}"
    for role in dict.fromkeys(role for role, _ in private):
        if not any(role in roles for roles in considered):
            yield f"{role}: no sharing was considered ({spaces})"


def _layers(layers: tuple[int, ...]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
