"""What is known of a drafter beside its weights: how it was trained, on what, how it measured, and the licence of its target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvshot_ds.errors import KvshotError
from kvshot_ds.export.source import Source, recipe_of, run_of
from kvshot_ds.files import read_object
from kvshot_ds.target import weights_digest

UNKNOWN = "unknown: see the target"
_MEASURED = ("name", "data", "confidence", "alpha", "mat", "mat_joint", "retention")


def facts_of(source: Source, target: Path | None) -> dict[str, Any]:
    """JSON that goes into the config of an own-format folder and makes its card. A part that is not known is not there.

    command, git_commit, versions: of the training; recipe: its name; data: what it was trained on; evaluation: the held-out metrics of eval.json;
    target_license. What the run does not say is taken from the folder itself, which may be an export. Raises KvshotError if a file is damaged, or
    eval.json is of other weights.
    """
    before: dict[str, Any] = dict(source.info.extra.get("exported") or {})
    run, recipe = run_of(source.folder), recipe_of(source.folder)
    found: dict[str, Any] = {}
    if run is not None and (run / "provenance.json").is_file():
        origin = read_object(run / "provenance.json")
        found |= {name: origin[name] for name in ("command", "git_commit", "versions") if origin.get(name)}
    if recipe:
        found |= {"recipe": recipe.get("name"), "data": _data(recipe)}
    place = source.folder.parent if source.folder.name == "drafter" else source.folder
    if (place / "eval.json").is_file():
        measured = read_object(place / "eval.json")
        if measured.get("weights") not in (None, weights_digest(source.folder)):  # None: measured before it was noted
            raise KvshotError(f"{place / 'eval.json'} was measured with other weights than those in {source.folder}; run kvshot eval again, or delete the file")
        found["evaluation"] = {name: measured[name] for name in _MEASURED if name in measured}
    if target is not None:
        found["target_license"] = license_of(target)
    return {**before, **found}


def _data(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Sources of the conversations, and who wrote the answers. Folders above the last two are left out: they are the machine's own."""
    prep = recipe.get("prep") or {}
    named = [str(source.get("dataset") or _short(source.get("path"))) for source in prep.get("sources") or ()]
    return {
        "sources": named,
        "synthetic_prompts": (prep.get("synthesis") or {}).get("count", 0),
        "answers": "the target's own" if (prep.get("regenerate") or {}).get("enabled", True) else "as given in the sources",
    }


def _short(path: Any) -> str:
    return "/".join(Path(str(path)).parts[-2:])


def license_of(target: Path) -> str:
    """The licence that the target's folder names: in the front matter of README.md, or by the first line of its licence file; else UNKNOWN."""
    readme = target / "README.md"
    if readme.is_file() and (front := re.match(r"---\s*\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.S)):
        try:
            card = yaml.safe_load(front[1])
        except yaml.YAMLError:
            card = None
        named = [card.get(name) for name in ("license_name", "license")] if isinstance(card, dict) else []
        if text := next((str(name) for name in named if isinstance(name, str) and name), None):
            return text
    for file in sorted(path for path in target.glob("LICEN[CS]E*") if path.is_file()):
        lines = (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
        if first := next((line for line in lines if line), None):
            return f"{first} ({file.name})"
    return UNKNOWN
