"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of text data sets: $GCCOMPRESS_DATA, else ../shared/data; skip if absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("GCCOMPRESS_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no text data at {folder}; set GCCOMPRESS_DATA")
    return folder
