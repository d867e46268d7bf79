"""What README.md and docs/ name exists: options, recipes, files, commands, links; what they quote of a command is what it prints."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvshot_ds.cli import STAGES, cli
from kvshot_ds.config import AnyDrafterConfig, Recipe, load_recipe
from kvshot_ds.options import Option, walk
from kvshot_ds.report.curves import END, _command
from kvshot_ds.report.families import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
OPTIONS = list(walk(Recipe))
NAMES = {o.name for o in OPTIONS}
SECTIONS = {".".join(name.split(".")[:n]) for name in NAMES for n in range(1, name.count(".") + 1)}
# A page may leave out what stands before these: `kv.injection` is `train.drafter.kv.injection`.
SHORT = {"kv": "train.drafter.kv", "gate": "train.drafter.gate", "drafter": "train.drafter", "objective": "train.objective", "init": "train.init"}
STARTS = {name.split(".")[0] for name in NAMES if "." in name} | SHORT.keys()
OPTION = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)\.([a-z_]+|\*)(?:=(.*))?")
FILE = re.compile(r".*\.(py|yaml|sh|md|json|jsonl|txt|toml|svg|tar)")


def prose_and_code(path: Path) -> tuple[str, list[str]]:
    """The text outside of code blocks, and the code blocks."""
    parts = re.split(r"^```[^\n]*\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "\n".join(parts[::2]), parts[1::2]


def words(path: Path) -> list[str]:
    """Everything between backticks."""
    return re.findall(r"`([^`\n]+)`", prose_and_code(path)[0])


def full_name(name: str) -> str:
    """The option's dotted name in a recipe."""
    first, _, rest = name.partition(".")
    return f"{SHORT[first]}.{rest}" if first in SHORT else name


def problem(word: str) -> str:
    """What is wrong with an option, with or without `=value`, or a section followed by `.*`; '' if nothing is, or if `word` is no option."""
    match = OPTION.fullmatch(word)
    if not match or match[1].split(".")[0] not in STARTS or FILE.fullmatch(word):
        return ""
    section, leaf, value = match[1], match[2], match[3]
    name = full_name(f"{section}.{leaf}")
    if leaf == "*":
        return "" if name.removesuffix(".*") in SECTIONS else f"no section {name}"
    if name not in NAMES:
        return "" if name in SECTIONS and value is None else f"no option {name}"
    return "" if value is None or fits(value, [o for o in OPTIONS if o.name == name]) else f"{name} takes no {value}"


def fits(value: str, options: list[Option]) -> bool:
    """Whether `value` is one of the choices, where the option (of any variant) has nothing but choices."""
    choices = [set(re.sub(r"^list of .* or ", "", o.type).split("|")) for o in options if re.fullmatch(r"(list of .* or )?\w+(\|\w+)+", o.type)]
    return value.startswith("[") or not value.isidentifier() or len(choices) < len(options) or any(value in c for c in choices)


def commands(path: Path) -> list[list[str]]:
    """Every command line of the code blocks and between backticks that begins with a program of this project, split into words."""
    lines = [line.removeprefix("$ ").split("  #")[0].strip() for block in prose_and_code(path)[1] for line in block.replace("\\\n", " ").splitlines()] + words(
        path
    )
    found = []
    for line in lines:
        part = line.split(" | ")[0].split(" && ")[0]
        if re.match(r"(kvshot|make|deepspeed|python -m|recipes/\S+\.sh)\b", part):
            try:
                found.append(shlex.split(part, comments=True))
            except ValueError as error:
                pytest.fail(f"{path}: {line}: {error}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_options_exist(path):
    found = [p for word in words(path) if (p := problem(word))]
    assert not found


def test_the_check_of_options_can_fail():
    assert problem("train.nothing") and problem("kv.injections") and problem("nothing.at_all") == problem("eval.json") == problem("gates.*") == ""
    assert problem("kv.injection=sideways") and problem("objective.*") == "" and problem("kv.nothing.*")
    assert problem("kv.injection=none") == problem("gate.init=bias:-2") == problem("drafter.hidden_layers=last") == problem("train.drafter") == ""
    assert problem("objective.steps=7") == problem("kv.layers=[1,2]") == problem("train.ds_config=zero2_bf16") == ""


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_files_exist(path):
    """Recipes and everything else that is named by a path of the repository."""
    top = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")} - {"work", "build", "dist"}
    named = [word for word in words(path) if re.fullmatch(r"[\w./-]+", word) and "/" in word and word.split("/")[0] in top]
    missing = [word for word in named if not (ROOT / word).exists()]
    assert not missing
    assert path.name != "drafters.md" or len(named) > 10


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_resolve(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_and_code(path)[0]):
        if re.match(r"https?:|mailto:", link):
            continue
        place, _, anchor = link.partition("#")
        aim = (path.parent / place).resolve() if place else path
        assert aim.exists(), f"{path.name}: {link}"
        assert not anchor or anchor in anchors(text if aim == path else aim.read_text(encoding="utf-8")), f"{path.name}: {link}"


def anchors(text: str) -> set[str]:
    """Ids of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_anchors_as_github_makes_them():
    assert anchors("# The target's KV: a `b`\n```\n# no heading\n```\n## x-y (2)") == {"the-targets-kv-a-b", "x-y-2"}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_exist(path):
    found = commands(path)
    assert found
    for command in found:
        check_command(command)


def check_command(command: list[str]) -> None:
    """Fails if a program, a subcommand, a flag, a recipe or an override does not exist."""
    program, *rest = command
    if program == "make":
        targets = re.findall(r"^([a-z_-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert next(w for w in rest if "=" not in w) in targets, command
    elif program.startswith("recipes/"):
        assert (ROOT / program).is_file(), command
    elif program == "python":
        assert importlib.util.find_spec(rest[1]) is not None, command
        if rest[1] == "kvshot_ds.report.curves":
            check_flags(_command, rest[2:])
    elif program == "deepspeed":
        assert rest[rest.index("--module") + 1] == "kvshot_ds.cli", command
        check_kvshot(rest[rest.index("--module") + 2 :])
    else:
        check_kvshot(rest)


def check_kvshot(rest: list[str]) -> None:
    found: click.Command = cli
    while isinstance(found, click.Group) and rest:
        assert rest[0] in found.commands, f"kvshot has no {rest[0]}"
        found, rest = found.commands[rest[0]], rest[1:]
    check_flags(found, rest)
    recipe, *overrides = [w for w in rest if not w.startswith("--")] or [""]
    if found.name in STAGES and (ROOT / recipe).is_file():
        load_recipe(ROOT / recipe, tuple(w for w in overrides if "=" in w))


def check_flags(command: click.Command, rest: list[str]) -> None:
    known = {name for p in command.params for name in p.opts} | {"--help"}
    assert not [w for w in rest if w.startswith("--") and w.split("=")[0] not in known], (command.name, rest)


def test_the_check_of_commands_can_fail(capsys):
    from kvshot_ds.errors import ConfigError

    for wrong in ("kvshot trian x", "kvshot drafter describe --everything", "make nothing", "python -m kvshot_ds.nothing", "recipes/nothing.sh"):
        with pytest.raises(AssertionError):
            check_command(wrong.split())
    with pytest.raises(ConfigError, match="nothing"):
        check_command(["kvshot", "train", "recipes/tiny/base.yaml", "train.nothing=1"])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_quoted_output_is_what_the_command_prints(path, monkeypatch):
    """A code block of `$ command` lines: every line below one is a line of its output, in the same order."""
    monkeypatch.chdir(ROOT)
    outputs: dict[str, list[str]] = {}
    for block in prose_and_code(path)[1]:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *quoted = part.splitlines()
            if quoted:
                if command not in outputs:
                    result = CliRunner().invoke(cli, shlex.split(command)[1:], catch_exceptions=False)
                    assert command.startswith("kvshot ") and result.exit_code == 0
                    outputs[command] = result.output.splitlines()
                printed = iter(outputs[command])
                missing = [line for line in quoted if line.rstrip() and line.rstrip() not in (p.rstrip() for p in printed)]
                assert not missing, command
    assert path.name != "drafters.md" or len(outputs) == 4


def test_every_family_and_recipe_has_its_place():
    """The page on drafters names each family and has markers for each recipe of the small target; what is between is closed."""
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    families = {variant.model_fields["family"].default for variant in AnyDrafterConfig.__args__}
    assert families == set(FAMILIES) and all(f"`{family}`" in text for family in families)
    recipes = {p.stem for p in (ROOT / "recipes" / "smollm2_135m").glob("*.yaml") if not p.stem.startswith(("base", "study", "sweep_", "fast"))}
    assert set(re.findall(r"^<!-- curves:(\S+) -->$", text, flags=re.MULTILINE)) == recipes
    assert text.count("<!-- curves -->\n") == 1 and len(re.findall(f"^{END}$", text, flags=re.MULTILINE)) == len(recipes) + 1
    for section in ("Adding a family", "Published checkpoints", "Limits", "Objectives", "Alignment: which row sees what"):
        assert f"## {section}\n" in text
