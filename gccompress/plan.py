"""A plan: what is to be done to which model, under which budget, at which predicted cost.

One YAML file, short enough to review. Layers count from 0 in the model as it was before the plan.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, assert_never

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from gccompress.errors import MoveError, PlanError
from gccompress.files import write_text
from gccompress.roles import MLP, SAME_INPUT, WRITES_RESIDUAL, Role
from gccompress.sizes import (
    ModelShape,
    bytes_of,
    low_rank_params,
    shared_input_params,
    shared_output_params,
)
from gccompress.yaml_files import line_of, load_yaml, read_yaml_text

PLAN_VERSION = 1
LARGEST_SEED = 2**32 - 1  # of calibration; text that is scored has a larger one
LARGEST_PLAN_FILE = 16_000_000  # bytes; a 200-layer plan has well under one megabyte


class Strict(BaseModel):
    """A frozen schema in which an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Move(Strict):
    """What every move says of itself: its predicted cost and what it saves.

    Attributes:
        loss: predicted nats per token, uncalibrated second order (None: not predicted).
        saves: decoder-projection parameters that disappear.
    """

    loss: float | None = None
    saves: int = 0


class DropLayers(Move):
    """Remove whole decoder layers."""

    do: Literal["drop_layers"] = "drop_layers"
    layers: tuple[int, ...]


class LowRank(Move):
    """Factor one matrix: `W ~ up [out, rank] @ down [rank, in]`."""

    do: Literal["low_rank"] = "low_rank"
    role: Role
    layer: int
    rank: int = Field(ge=1)


class ShareInput(Move):
    """One basis `[rank, in]` for several matrices: `W_l ~ C_l B`.

    Attributes:
        gain: predicted nats per token that sharing saves over factoring each matrix by itself at no
            more parameters; negative where it loses (None: not compared, or private cannot be so
            small).
    """

    do: Literal["share_input"] = "share_input"
    roles: tuple[Role, ...] = Field(min_length=1)
    layers: tuple[int, ...] = Field(min_length=1)
    rank: int = Field(ge=1)
    gain: float | None = None


class ShareOutput(Move):
    """One basis `[out, rank]` for several matrices: `W_l ~ U C_l`.

    Attributes:
        gain: as that of `ShareInput`.
    """

    do: Literal["share_output"] = "share_output"
    roles: tuple[Role, ...] = Field(min_length=1)
    layers: tuple[int, ...] = Field(min_length=1)
    rank: int = Field(ge=1)
    gain: float | None = None


class ResizeMlp(Move):
    """Remove MLP neurons: rows of gate and up, columns of down, which is refitted."""

    do: Literal["resize_mlp"] = "resize_mlp"
    layer: int
    width: int = Field(ge=1)


AnyMove = Annotated[
    DropLayers | LowRank | ShareInput | ShareOutput | ResizeMlp, Field(discriminator="do")
]
Factoring = LowRank | ShareInput | ShareOutput


class PlannedModel(Strict):
    """The model a plan was made for, by name, content hash and sizes.

    `matrices` is `[out, in]` of each role's weight, so that a plan can be read without its model.
    """

    name: str
    hash: str
    revision: str | None = None
    model_type: str
    layers: int = Field(ge=1)
    decoder_params: int = Field(ge=1)
    total_params: int = Field(ge=1)
    matrices: dict[Role, tuple[int, int]] | None = None


class Calibration(Strict):
    """Where the moments came from: enough to find them in the cache or to make them again.

    `spread` is that of `CalibrationOptions`; plans that do not say it took the first windows.
    """

    source: str
    hash: str
    tokens: int = Field(ge=1)
    seqlen: int = Field(ge=1)
    seed: int = Field(ge=0, le=LARGEST_SEED)
    fisher: str
    heldout_tokens: int = Field(ge=0)
    dtype: str
    spread: bool = False


class Budget(Strict):
    """What was asked for; exactly one.

    Attributes:
        keep: share of the decoder projections' parameters.
        max_size: bytes of the checkpoint.
        speedup: dense over compressed prefill time, on the device where the plan was made.
        max_loss: nats per token that the perplexity's logarithm may rise, on held-out text.
    """

    keep: float | None = Field(default=None, gt=0, le=1)
    max_size: int | None = Field(default=None, ge=1)
    speedup: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    max_loss: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @field_validator("max_size", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return bytes_of(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one(self) -> "Budget":
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"a budget has exactly one of {', '.join(type(self).model_fields)}")
        return self

    def __str__(self) -> str:
        """Return the budget in words."""
        if self.keep is not None:
            return f"keep {self.keep:g} of the decoder projections"
        if self.speedup is not None:
            return f"prefill {self.speedup:g} times as fast"
        if self.max_loss is not None:
            return f"at most {self.max_loss:g} nats per token worse"
        return f"at most {self.max_size} bytes"


class Prediction(Strict):
    """What the plan is expected to give.

    Attributes:
        params_kept: share of decoder-projection parameters kept, in (0, 1].
        params: parameters of the whole model afterwards, tied ones once.
        bytes: bytes of its weights as they will be stored.
        loss: sum of the moves' predicted nats per token (second order, uncalibrated).
        ppl: perplexity on held-out calibration text; low and high bound it.
        energy_lost: share of the projections' squared weights that a plan from weights alone
            loses: an ordering, no prediction.
        measured: True when ppl was measured in memory on that text, False when extrapolated.
    """

    params_kept: float
    params: int
    bytes: int
    loss: float | None = None
    dense_ppl: float | None = None
    ppl: float | None = None
    ppl_low: float | None = None
    ppl_high: float | None = None
    energy_lost: float | None = None
    measured: bool = False


class Plan(Strict):
    """A reviewable compression plan; see the module docstring."""

    format: Literal["gccompress-plan"] = "gccompress-plan"
    version: Literal[1] = 1
    strategy: str
    budget: Budget
    model: PlannedModel
    calibration: Calibration | None = None
    prediction: Prediction
    options: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    moves: tuple[AnyMove, ...]

    def to_yaml(self) -> str:
        """Return the plan as YAML, one line per move."""
        fields = self.model_dump(mode="json", exclude={"moves"})
        head = yaml.dump(fields, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
        lines = [
            "- "
            + yaml.safe_dump(_short(move), sort_keys=False, default_flow_style=True, width=10_000)
            for move in self.moves
        ]
        return head + ("moves:\n" + "".join(lines) if lines else "moves: []\n")

    def save(self, path: str | Path) -> None:
        """Write the plan atomically."""
        write_text(Path(path), self.to_yaml())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read and check a plan file.

        Raises:
            PlanError: not there, not YAML, not a plan, an unknown key, another version, or
                moves that contradict each other.
        """
        return cls.parse(read_plan_text(path), str(path))

    @classmethod
    def parse(cls, text: str, name: str = "plan") -> "Plan":
        """Read a plan from YAML text; errors name `name`. Raises `PlanError`."""
        data = load_yaml(text, name, PlanError)
        if not isinstance(data, dict) or data.get("format") != "gccompress-plan":
            raise PlanError(
                f"{name}: not a plan; wanted YAML beginning with 'format: gccompress-plan'"
            )
        if data.get("version") != PLAN_VERSION:
            raise PlanError(
                f"{name}: plan version {data.get('version')!r}, this gccompress reads "
                f"{PLAN_VERSION}; make the plan again or install the matching gccompress"
            )
        try:
            plan = cls.model_validate(data)
        except ValidationError as error:
            place, fault = _first_error(error)
            raise PlanError(f"{name}: line {line_of(text, place)}: {fault}") from error
        try:
            plan.check_moves(name)
        except MoveError as error:
            raise error.at(line_of(text, ("moves", error.number))) from None
        return plan

    def check_moves(self, name: str = "plan") -> None:
        """Raise `MoveError` when a move names a layer that is not there, or a matrix twice."""
        taken: dict[tuple[Role, int], int] = {}
        dropped: dict[int, int] = {}

        def refuse(number: int, why: str) -> NoReturn:
            raise MoveError(name, number, self.moves[number].do, why)

        for number, move in enumerate(self.moves):
            for layer in move_layers(move):
                if not 0 <= layer < self.model.layers:
                    refuse(number, f"layer {layer} is not in 0..{self.model.layers - 1}")
            if isinstance(move, DropLayers):
                if len(set(move.layers)) != len(move.layers) or dropped.keys() & set(move.layers):
                    refuse(number, "a layer is dropped twice")
                dropped |= dict.fromkeys(move.layers, number)
            fault = _sharing_fault(move)
            if fault:
                refuse(number, fault)
            for role, layer in move_matrices(move):
                if (role, layer) in taken:
                    other = taken[role, layer]
                    refuse(number, f"layer {layer} {role} is already in moves[{other}]; leave one")
                taken[role, layer] = number
        if len(dropped) == self.model.layers:
            last = max(dropped.values())
            refuse(last, f"the plan drops all {self.model.layers} layers; leave at least one")
        for (role, layer), number in taken.items():
            if layer in dropped:
                why = f"layer {layer} is dropped, yet its {role} is replaced here"
                refuse(number, f"{why}; leave one")


def read_plan_text(path: str | Path) -> str:
    """Return the text of a plan's file. Raises `PlanError` when there is none to read."""
    return read_yaml_text(
        Path(path),
        kind="plan",
        largest=LARGEST_PLAN_FILE,
        hint="a plan.yaml",
        missing="make one: gccompress plan --model MODEL",
        error=PlanError,
    )


def move_layers(move: AnyMove) -> tuple[int, ...]:
    """Return the layers a move names."""
    return (move.layer,) if isinstance(move, LowRank | ResizeMlp) else move.layers


def move_matrices(move: AnyMove) -> tuple[tuple[Role, int], ...]:
    """Return the (role, layer) pairs whose weights a move replaces, in a fixed order.

    A family without a gate has none to resize either.
    """
    match move:
        case DropLayers():
            return ()
        case LowRank():
            return ((move.role, move.layer),)
        case ResizeMlp():
            return tuple((role, move.layer) for role in MLP)
        case ShareInput() | ShareOutput():
            return tuple((role, layer) for layer in move.layers for role in move.roles)
        case _:
            assert_never(move)


def move_params(move: AnyMove, shape: ModelShape) -> int:
    """Return the decoder-projection parameters that a move's matrices take afterwards.

    Raises:
        PlanError: a role the model has not, a rank above what the matrices allow, or a
            factorisation that would not be smaller than what it replaces.
    """
    if isinstance(move, ResizeMlp):
        inner = shape.matrices[Role.DOWN][1]
        if move.width >= inner:
            raise PlanError(
                f"layer {move.layer} mlp: width {move.width} is not below {inner}, what it has"
            )
        return move.width * shape.per_neuron
    shapes: list[tuple[int, int]] = []
    for role, layer in move_matrices(move):
        if role not in shape.matrices:
            raise PlanError(f"layer {layer} {role}: this model has no such projection")
        shapes.append(shape.matrices[role])
    match move:
        case DropLayers():
            return 0
        case LowRank():
            params, limit = low_rank_params(shapes[0], move.rank), min(shapes[0])
        case ShareInput():
            params = shared_input_params(shapes, move.rank)
            limit = min(shapes[0][1], sum(rows for rows, _ in shapes))
        case ShareOutput():
            params = shared_output_params(shapes, move.rank)
            limit = min(shapes[0][0], sum(cols for _, cols in shapes))
        case _:
            assert_never(move)
    dense = sum(rows * cols for rows, cols in shapes)
    role, layer = move_matrices(move)[0]
    if move.rank > limit:
        raise PlanError(
            f"layer {layer} {role}: rank {move.rank} exceeds {limit}, the most it can have"
        )
    if params >= dense:
        raise PlanError(
            f"layer {layer} {role}: rank {move.rank} takes {params} parameters, dense takes "
            f"{dense}; lower the rank or leave it dense"
        )
    return params


def plan_params(moves: tuple[AnyMove, ...], shape: ModelShape) -> tuple[int, int]:
    """Return (decoder-projection parameters, parameters of the whole model) after `moves`."""
    decoder, total = shape.decoder_params(), shape.total_params
    per_layer = sum(rows * cols for rows, cols in shape.matrices.values())
    for move in moves:
        if isinstance(move, DropLayers):
            decoder -= per_layer * len(move.layers)
            total -= shape.layer_params * len(move.layers)
            continue
        dense = sum(
            shape.matrices[role][0] * shape.matrices[role][1]
            for role, _ in move_matrices(move)
            if role in shape.matrices
        )
        change = move_params(move, shape) - dense
        if isinstance(move, ResizeMlp):
            total -= (shape.matrices[Role.DOWN][1] - move.width) * shape.biases_per_neuron
        decoder += change
        total += change
    return decoder, total


def _sharing_fault(move: AnyMove) -> str:
    """Return why the matrices of a shared basis have no space in common; empty when they have."""
    if isinstance(move, ShareInput) and not any(
        set(move.roles) <= set(group) for group in SAME_INPUT
    ):
        return f"roles {_names(move.roles)} do not read the same input"
    if (
        isinstance(move, ShareOutput)
        and len(move.roles) > 1
        and not set(move.roles) <= WRITES_RESIDUAL
    ):
        return f"roles {_names(move.roles)} do not write the same output"
    if isinstance(move, ShareInput | ShareOutput) and len(set(move.layers)) != len(move.layers):
        return "a layer is named twice"
    return ""


def _names(roles: tuple[Role, ...]) -> str:
    return ", ".join(role.value for role in roles)


class _Dumper(yaml.SafeDumper):
    """A safe dumper that writes the two numbers of a shape on one line."""


_Dumper.add_representer(
    list,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=all(isinstance(one, int) for one in value)
    ),
)


def _short(move: AnyMove) -> dict[str, Any]:
    """Return a move's fields in reading order, its loss to four significant digits."""
    data = move.model_dump(mode="json")
    head, tail = {"do": data.pop("do")}, {"saves": data.pop("saves")}
    for name in ("loss", "gain"):
        value = data.pop(name, None)
        if value is not None:
            tail[name] = float(f"{value:.4g}")
    return head | data | tail


def _first_error(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """Return the place of the first validation error, and one line that names the leaf."""
    # An unknown key is the likelier mistake than the known one it leaves missing.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    leaf = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return first["loc"], f"unknown key {leaf!r}; remove it"
    found = repr(first.get("input"))
    return first["loc"], f"{leaf}: {first['msg']} (found {found[:60]})"
