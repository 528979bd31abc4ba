"""`gccompress verify`: does a folder hold what its config, plan and recorded hashes say?

The structure is told from file names, JSON and headers alone, before any weight is read.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn

from gccompress import modeling
from gccompress.architectures import ArchSpec, role_shapes, spec_for
from gccompress.card import CARD
from gccompress.errors import CheckpointError, GccompressError, ModelError
from gccompress.files import file_sha256
from gccompress.plan import DropLayers, Plan
from gccompress.roles import MLP, Role
from gccompress.weight_files import TensorEntry, check_finite, read_header, weight_files

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

RECORD = "gccompress.json"
PLAN = "plan.yaml"
_REFUSALS = (RuntimeError, ValueError, TypeError, KeyError, AttributeError)
_CODE_AND_WEIGHTS = (".py", ".safetensors")


@dataclass(frozen=True)
class Structure:
    """What the names, the config and the headers of a checkpoint say, found to agree.

    Attributes:
        folder: where it is.
        model_type: of its family, without our prefix.
        compressed: whether it needs this package's layers.
        layers: decoder layers.
        params: parameters, tied ones once.
        tensors: stored tensors.
        bytes: of the weight files.
        files: the weight files.
    """

    folder: Path
    model_type: str
    compressed: bool
    layers: int
    params: int
    tensors: int
    bytes: int
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Verified:
    """A checkpoint in which nothing was found wrong.

    Attributes:
        path: its folder.
        model_type: of its family.
        compressed: whether it needs this package's layers; False for a plain checkpoint.
        layers: decoder layers.
        params: parameters, tied ones once.
        bytes: of the weight files.
        hashed: number of files whose hash is the recorded one; 0 where none were recorded.
        notes: what could not be checked, and why.
    """

    path: Path
    model_type: str
    compressed: bool
    layers: int
    params: int
    bytes: int
    hashed: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what `gccompress verify --json` prints."""
        return {**asdict(self), "path": str(self.path)}

    def table(self) -> "Table":
        """Return the findings as a table."""
        from rich.table import Table

        table = Table(title=f"Checkpoint {self.path}", title_justify="left", show_header=False)
        kind = "compressed" if self.compressed else "plain"
        table.add_row("model", f"{self.model_type}, {kind}, {self.layers} layers")
        table.add_row("parameters", f"{self.params:,}")
        table.add_row("bytes of the weights", f"{self.bytes:,}")
        table.add_row("files with the recorded hash", f"{self.hashed}")
        for note in self.notes:
            table.add_row("not checked", note)
        return table


def verify(folder: str | Path) -> Verified:
    """Check a checkpoint folder: names, structure, code, plan, hashes, finite weights.

    Args:
        folder: compressed or plain, as written by `gccompress apply` or `save_pretrained`.

    Raises:
        CheckpointError: the first thing that is wrong, in one line.
        NumericalError: a weight is NaN or infinite.
    """
    folder = Path(folder)
    found = check_structure(folder)
    notes = [] if not found.compressed else _check_code(folder)
    record = _read_record(folder)
    hashed = _check_hashes(folder, record.get("files", {}))
    if not hashed:
        notes.append(f"file hashes: none recorded in {RECORD}")
    notes += _check_plan(found, record)
    for file in found.files:
        check_finite(file)
    return Verified(
        folder,
        *(found.model_type, found.compressed, found.layers, found.params, found.bytes),
        hashed=hashed,
        notes=tuple(notes),
    )


def check_structure(folder: Path) -> Structure:
    """Check that the names stay in the folder and the weights are those of the config.

    Cheap: no weight is read, and the model is built without memory for its weights.

    Raises:
        CheckpointError: the first thing that is wrong, in one line.
    """
    config = _read_config(folder)
    _check_names(folder, config)
    try:
        files = weight_files(folder)
        stored: dict[str, TensorEntry] = {}
        for file in files:
            stored |= read_header(file)
    except ModelError as error:
        raise CheckpointError(str(error)) from error
    try:
        model = _skeleton(config)
        modeling.refuse_misfit(_misfit(model, stored))
    except (*_REFUSALS, StrictDataclassError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{folder}: {reason}") from error
    family = str(config["model_type"]).removeprefix(modeling.PREFIX)
    spec = spec_for(family)
    layers = int(getattr(model.config, spec.layer_count))
    for layer in range(layers):
        _check_layer(folder, model, spec, layer)
    return Structure(
        folder=folder,
        model_type=family,
        compressed=family != config["model_type"],
        layers=layers,
        params=sum(parameter.numel() for parameter in model.parameters()),
        tensors=len(stored),
        bytes=sum(file.stat().st_size for file in files),
        files=files,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return config.json; raise unless it is of a family this version knows."""
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json, wanted a folder with a checkpoint")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        model_type = str(config["model_type"])
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{path}: unreadable, or names no model_type: {error}") from error
    if model_type.removeprefix(modeling.PREFIX) not in modeling.MODEL_TYPES:
        raise CheckpointError(
            f"{folder}: model type {model_type!r} is not known to this version; known families: "
            f"{', '.join(modeling.MODEL_TYPES)}; update gccompress"
        )
    return dict(config)


def _check_names(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise when loading the folder could read a file, or run code, that is not in it."""
    # A cache of the hub is links to ../../blobs; those are content-addressed and its own.
    real = folder.resolve()
    allowed = [real, *([real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [])]
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and not any(path.resolve().is_relative_to(a) for a in allowed):
            raise CheckpointError(
                f"{path} is a link out of the folder, to {path.readlink()}; only files in it are "
                "read: put the file itself there"
            )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder} has an adapter_config.json, so that loading it loads another model; merge "
            "the adapter, or remove the file"
        )
    if config.get("transformers_weights") is not None:
        raise CheckpointError(
            f"{folder}: config.json names other weight files "
            f"({config['transformers_weights']!r}); remove transformers_weights from it"
        )
    if not str(config["model_type"]).startswith(modeling.PREFIX):
        return  # whatever remote code a plain model of somebody's has is not needed for it
    wanted = modeling.auto_map(config["model_type"].removeprefix(modeling.PREFIX))
    if config.get("auto_map") != wanted:
        raise CheckpointError(
            f"{folder}: config.json has auto_map {config.get('auto_map')!r}, wanted {wanted!r}; "
            "with trust_remote_code it would run other code: restore it"
        )


def _skeleton(config: Mapping[str, Any]) -> "PreTrainedModel":
    """Return the model that a config describes, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        made = AutoConfig.for_model(config["model_type"], **fields)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(made)
    return model


def _misfit(model: nn.Module, stored: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Return how stored tensors differ from a model's, as transformers' `loading_info` would."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(prefix=name, recurse=False):
            if key.rpartition(".")[2] not in module._non_persistent_buffers_set:
                wanted[key] = tuple(buffer.shape)
    compressed = str(model.config.model_type).startswith(modeling.PREFIX)  # type: ignore[union-attr]
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(wanted)
    extra = stored.keys() - wanted.keys()
    return {
        "missing_keys": wanted.keys() - stored.keys(),
        # A plain checkpoint of somebody else's may store a tied head twice; ours never does.
        "unexpected_keys": extra if compressed else extra - tied,
        "mismatched_keys": {
            name for name in wanted.keys() & stored.keys() if stored[name].shape != wanted[name]
        },
    }


def _check_layer(folder: Path, model: nn.Module, spec: ArchSpec, layer: int) -> None:
    """Raise unless a layer's modules fit each other: only the MLP's width may be another."""
    width: int | None = None
    shapes = role_shapes(model.config, spec)
    for name, roles, cols, rows in _sites(model, spec, layer):
        wanted_rows, wanted_cols = sum(shapes[role][0] for role in roles), shapes[roles[0]][1]
        if Role.DOWN in roles:
            wanted_cols = width = cols if width is None else width
        elif roles[0] in MLP:
            width = rows // len(roles) if width is None else width
            wanted_rows = width * len(roles)
        if (rows, cols) != (wanted_rows, wanted_cols):
            raise CheckpointError(
                f"{folder}: config.gccompress makes {name} [{rows}, {cols}], the model needs "
                f"[{wanted_rows}, {wanted_cols}]; restore config.json"
            )


def _sites(
    model: nn.Module, spec: ArchSpec, layer: int
) -> Iterator[tuple[str, tuple[Role, ...], int, int]]:
    """Yield the name, roles, inputs and outputs of each projection of a layer."""
    for site in spec.sites:
        name = f"{spec.layers}.{layer}.{site.module}"
        module: Any = model.get_submodule(name)
        if hasattr(module, "in_features"):
            yield name, site.roles, module.in_features, module.out_features
        else:  # transformers' Conv1D
            yield name, site.roles, module.nx, module.nf


def _check_code(folder: Path) -> list[str]:
    """Check the modelling file against the hash in the config; return notes."""
    path = folder / modeling.FILE_NAME
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    recorded = config.get(modeling.CODE_HASH)
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {modeling.FILE_NAME}, without which it loads only where gccompress is "
            "installed; load it there and save it again"
        )
    found = file_sha256(path)
    if recorded != found:
        raise CheckpointError(
            f"{path} was altered: its SHA-256 is {found[:16]}..., config.json records "
            f"{str(recorded)[:16]}...; do not run it, save the model again"
        )
    if found == file_sha256(Path(modeling.__file__)):
        return []
    return [
        f"{modeling.FILE_NAME}: as its config says, but not of this version of gccompress; read "
        "it before trust_remote_code=True"
    ]


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the record that apply writes beside the weights; empty where there is none."""
    path = folder / RECORD
    if not path.exists():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        files = record.get("files", {})
        names = all(isinstance(k, str) and isinstance(v, str) for k, v in files.items())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); apply the plan again") from error
    if not names or any(Path(name).name != name or "\\" in name for name in files):
        raise CheckpointError(
            f"{path}: files is no map of names in the folder to hashes; apply the plan again"
        )
    return dict(record)


def hash_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in a folder by its name.

    Left out are the record itself and the card, which is for people to complete.
    """
    return {
        path.name: file_sha256(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in (RECORD, CARD)
    }


def _check_hashes(folder: Path, recorded: Mapping[str, str]) -> int:
    """Raise when a recorded file is gone or altered, or code or weights are new; return how many.

    Other files a user adds beside them, such as notes, are his own.
    """
    if not recorded:
        return 0
    for name, wanted in recorded.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder}: {name} is gone, {RECORD} records it; restore it")
        found = file_sha256(path)
        if found != wanted:
            raise CheckpointError(
                f"{path} was altered: its SHA-256 is {found[:16]}..., {RECORD} records "
                f"{wanted[:16]}...; restore it, or apply the plan again"
            )
    for path in sorted(folder.iterdir()):
        if path.suffix in _CODE_AND_WEIGHTS and path.name not in recorded:
            raise CheckpointError(
                f"{path} was added: {RECORD} does not record it; remove it, or apply the plan again"
            )
    return len(recorded)


def _check_plan(found: Structure, record: Mapping[str, Any]) -> list[str]:
    """Raise when the weights are not of the size the plan beside them says; return notes."""
    path = found.folder / PLAN
    if not path.exists():
        return [f"plan: no {PLAN} in the folder"]
    try:
        plan = Plan.load(path)
    except GccompressError as error:
        raise CheckpointError(str(error)) from error
    if record.get("allowed_other_model"):
        return ["plan: it was made for another model than this is of (--allow-other-model)"]
    dropped = sum(len(move.layers) for move in plan.moves if isinstance(move, DropLayers))
    for what, wanted, have in (
        ("layers", plan.model.layers - dropped, found.layers),
        ("parameters", plan.prediction.params, found.params),
    ):
        if wanted != have:
            raise CheckpointError(
                f"{found.folder}: {PLAN} says {wanted} {what}, the weights have {have}; they are "
                "not of one another: apply the plan again"
            )
    return []
