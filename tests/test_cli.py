"""The command line: help made from the models, exit statuses, nothing heavy at start."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from kvshot_ds import __version__, cli
from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.options import walk

HEAVY = ("torch", "transformers", "ray", "deepspeed", "datasets", "matplotlib", "numpy")


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\nwork: w\ntarget: {path: t}\n")
    return path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """Recipes that reach the library function behind `train`."""
    recipes: list[Recipe] = []
    fake = ModuleType("fake")
    fake.run = recipes.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvshot_ds.training.launch", fake)
    return recipes


def kvshot(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["kvshot", *map(str, args)])
    return cli.main()


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_starting_imports_nothing_heavy(recipe_file: Path) -> None:
    code = f"""
import json, sys
from kvshot_ds import cli
sys.argv = ["kvshot", "config", "show", {str(recipe_file)!r}]
assert cli.main() == 0
for words in (["train"], ["drafter"], ["drafter", "describe"], ["drafter", "import"]):
    sys.argv = ["kvshot", *words, "--help"]
    assert cli.main() == 0
print(json.dumps(sorted(sys.modules)))
"""
    assert set(json.loads(python(code).splitlines()[-1])).isdisjoint(HEAVY)


def test_help_is_quick() -> None:
    def seconds() -> float:
        begin = time.perf_counter()
        python("import sys; from kvshot_ds import cli; sys.argv = ['kvshot', '--help']; cli.main()")
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(3)) < 1


@pytest.mark.parametrize("stage", cli.STAGES)
def test_each_command_stands_on_a_library_function(stage: str) -> None:
    assert callable(importlib.import_module(cli.STAGES[stage][0]).run)
    assert stage in Recipe.model_fields


@pytest.mark.parametrize("stage", cli.STAGES)
def test_help_lists_every_option_of_the_section(stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(cli.cli, "context_settings", {**cli.cli.context_settings, "max_content_width": 1000})
    assert kvshot(monkeypatch, stage, "--help") == 0
    text = capsys.readouterr().out
    options = [o for o in walk(Recipe) if o.name.startswith(f"{stage}.")]
    assert options
    for option in options:
        assert option.name in text.split() and f"{option.description}  ({option.type}; " in text
    assert all(f"Options with {when}:" in text for when in {o.when for o in options} - {""})


def test_config_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvshot(monkeypatch, "config", "options") == 0
    words = capsys.readouterr().out.split()
    assert {o.name for o in walk(Recipe)} <= set(words)
    assert kvshot(monkeypatch, "config", "options", "train.optim") == 0
    words = capsys.readouterr().out.split()
    assert "train.optim.lr" in words and "train.seed" not in words
    assert kvshot(monkeypatch, "config", "options", "trian") == 2
    assert "no section 'trian'; sections: target, prep, capture, train" in capsys.readouterr().err


def test_config_show_prints_what_load_recipe_reads(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvshot(monkeypatch, "config", "show", recipe_file, "train.seed=3", "--train.optim.lr=2e-4", "--work", "elsewhere") == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    recipe = load_recipe(shown)
    assert (recipe.train.seed, recipe.train.optim.lr, recipe.work) == (3, 2e-4, Path("elsewhere"))


def test_drafter_describe(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[object, ...]] = []

    def describe(recipe: Recipe | None, *rest: object) -> list[str]:
        asked.append((recipe and (recipe.train.drafter.family, recipe.train.draft_vocab_size), *rest))
        return ["first", "second"]

    fake = ModuleType("fake")
    fake.describe = describe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvshot_ds.describe", fake)
    assert kvshot(monkeypatch, "drafter", "describe", recipe_file, "train.drafter.family=dflash", "--train.draft_vocab_size", 9, "--context", 5) == 0
    assert kvshot(monkeypatch, "drafter", "describe", "--all", "--target-shape", "qwen3-8b") == 0
    assert asked == [(("dflash", 9), None, False, 5), (None, "qwen3-8b", True, 2048)]
    assert capsys.readouterr().out == "first\nsecond\n" * 2


def test_drafter_describe_names_the_known_shapes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvshot_ds.describe import SHAPES

    assert kvshot(monkeypatch, "drafter", "describe", "--help") == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert set(SHAPES) <= set(words)
    assert kvshot(monkeypatch, "drafter", "describe", "--all", "--target-shape", "smollm2-135m", "--context", 1) == 0
    assert "target smollm2-135m: 30 layers" in capsys.readouterr().out
    assert kvshot(monkeypatch, "drafter", "describe") == 2
    assert "nothing to describe" in capsys.readouterr().err


def test_drafter_import(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[Path, Path, Path]] = []

    class Report:
        def lines(self) -> list[str]:
            return ["imported", "note"]

    def import_drafter(source: Path, target_folder: Path, out: Path) -> Report:
        asked.append((source, target_folder, out))
        return Report()

    fake = ModuleType("fake")
    fake.import_drafter = import_drafter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvshot_ds.drafters.public", fake)
    assert kvshot(monkeypatch, "drafter", "import", "theirs", "ours", "--target", "t") == 0
    assert asked == [(Path("theirs"), Path("t"), Path("ours"))] and capsys.readouterr().out == "imported\nnote\n"
    assert kvshot(monkeypatch, "drafter", "import", "theirs", "ours") == 2 and "--target" in capsys.readouterr().err


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvshot(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == f"kvshot, version {__version__}"


@pytest.mark.parametrize(
    ("args", "overrides"),
    [
        (("a.b=1", "c=x=y"), ("a.b=1", "c=x=y")),
        (("--a.b=1", "--c", "-5", "d=2"), ("a.b=1", "c=-5", "d=2")),
        (("--a.b", "x=y"), ("a.b=x=y",)),
        ((), ()),
    ],
)
def test_split_overrides(args: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    assert cli.split_overrides(args) == overrides


def test_split_overrides_without_a_value() -> None:
    with pytest.raises(ConfigError, match=r"--train\.seed: expected a value"):
        cli.split_overrides(("--train.seed",))


def test_train_as_the_deepspeed_launcher_starts_it(recipe_file: Path, seen: list[Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kvshot(monkeypatch, "--local_rank=1", "train", recipe_file, "train.seed=4", "--train.optim.lr", "1e-5") == 0
    [recipe] = seen
    assert (recipe.train.seed, recipe.train.optim.lr) == (4, 1e-5)


def test_what_a_user_can_mend_exits_2_without_a_traceback(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvshot(monkeypatch, "train", recipe_file, "train.sed=1") == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvshot: ") and "did you mean train.seed?" in captured.err
    assert kvshot(monkeypatch, "train", recipe_file.with_name("absent.yaml")) == 2
    assert "absent.yaml: no such recipe" in capsys.readouterr().err
    for wrong in (["fly"], ["train"], ["target", "gpt9", "x"], ["config", "show"]):
        assert kvshot(monkeypatch, *wrong) == 2
        assert "Usage: kvshot" in capsys.readouterr().err


def raising(error: BaseException) -> Any:
    def call() -> None:
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KvshotError("mend this"), 2, "kvshot: mend this\n"),
        (PermissionError(13, "Permission denied", "/x"), 2, "kvshot: [Errno 13] Permission denied: '/x' (KVSHOT_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, "kvshot: interrupted; the same command continues where it stopped\n"),
        (Preempted("stopped after step 3"), 75, "kvshot: stopped after step 3\n"),
        (click.Abort(), 130, "kvshot: interrupted; the same command continues where it stopped\n"),
    ],
)
def test_guarded(error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.guarded(raising(error)) == status
    assert capsys.readouterr().err == said
    monkeypatch.setenv("KVSHOT_DEBUG", "1")
    assert cli.guarded(raising(error)) == status  # which schedulers and launchers go by
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith(said)


@pytest.mark.parametrize("stage", ["capture", "train"])
@pytest.mark.parametrize(
    "option",
    [
        ("--supervised", "nan"), ("--conversations", "1000000000"), ("--tokens-per-conversation", "1000000000"),
    ],
)  # fmt: skip
def test_a_plan_of_absurd_numbers_is_refused(stage: str, option: tuple[str, str]) -> None:
    arguments = ["plan", stage, "recipes/qwen3_8b/hybrid.yaml", "--target-shape", "qwen3-8b", *option]
    with pytest.raises(click.BadParameter, match=option[1]):
        cli.cli.main(arguments, standalone_mode=False)


@pytest.mark.parametrize("option", [("--mfu", "nan"), ("--peak-tflops", "nan"), ("--peak-tflops", "inf")])
def test_a_plan_at_a_speed_that_is_no_number_is_refused(option: tuple[str, str]) -> None:
    with pytest.raises(click.BadParameter, match="finite"):
        cli.cli.main(["plan", "train", "recipes/qwen3_8b/hybrid.yaml", *option], standalone_mode=False)


def test_faults_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.guarded(raising(ZeroDivisionError()))


def test_messages_of_ranks_say_which(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.guarded(raising(KvshotError("x"))) == 2
    assert capsys.readouterr().err == "kvshot [rank 1 of 2]: x\n"


def test_as_a_module_it_exits_with_the_status(recipe_file: Path) -> None:
    run = [sys.executable, "-m", "kvshot_ds.cli", "config", "show", str(recipe_file), "x=1"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "x: no such option" in done.stderr and "Traceback" not in done.stderr
