"""Files of a sweep that are damaged: named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.sweep.folder import Progress, SweepFolder, Trial


def test_a_recipe_that_is_gone_is_named_with_what_to_do(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.write_trials((Trial("a", {}, 0, {}),))
    with pytest.raises(ConfigError, match=r"recipe\.yaml: not there; delete trials\.json beside it and run"):
        folder.recipe()


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "{}", '{"trials": 3}', '{"trials": {"a": {"state": "lost"}}}', '{"trials": []}', "\xff"])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    folder = SweepFolder(tmp_path)
    folder.write_trials((Trial("a", {}, 0, {}),))
    folder.write_progress(Progress({}))
    for name, read in (("trials.json", folder.trials), ("state.json", folder.progress)):
        (tmp_path / name).write_text(text, encoding="latin-1")
        with pytest.raises(KvshotError, match=rf"^{tmp_path / name}: .*delete it and run") as found:
            read()
        assert str(found.value).count(name) == 1
