"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny random Qwen3, made once per session."""
    from data_prep.targets import fetch

    return fetch("tiny", tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="session")
def smollm2_target() -> Path:
    """Folder of the converted SmolLM2; `make test` fetches it. Tests that use it carry `@pytest.mark.smollm2`."""
    folder = Path(os.environ.get("KVSHOT_SMOLLM2", "~/.cache/kvshot-ds/smollm2")).expanduser()
    if not (folder / "config.json").is_file():
        pytest.skip(f"{folder}: SmolLM2 is not there; `kvshot target smollm2 {folder}` makes it, KVSHOT_SMOLLM2 names another folder")
    return folder
