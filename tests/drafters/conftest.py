"""Fixtures of the drafters' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoding.models import hf_target


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """The target as a Hugging Face folder. Its heads are not those of the drafters: 4 of 16, 2 for keys and values."""
    folder = tmp_path_factory.mktemp("targets") / "small"
    hf_target("Qwen3").model.save_pretrained(folder)
    return folder
