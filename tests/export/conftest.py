"""Targets as Hugging Face folders: with and without norms of queries and keys, with biases of q, k and v."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.made import saved_target


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("targets")
    return {family: saved_target(place / family.lower(), family) for family in ("Llama", "Qwen3", "Qwen2")}
