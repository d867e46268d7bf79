"""What lies in a checkpoint, which one a start continues from, and what a kill, a full disk or another run's files do to it."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvshot_ds.config import Recipe
from kvshot_ds.errors import KvshotError
from kvshot_ds.files import aside, read_json, write_json
from kvshot_ds.training import checkpoint, export, rng, trainer, universal
from kvshot_ds.training.launch import run
from kvshot_ds.training.writer import Writer
from tests.conftest import rank_forgotten
from tests.training import forked
from tests.training.runs import Stopped, assert_close, assert_same, board, run_and_stop, weights, zero3


def tags(r: Recipe) -> list[str]:
    """What lies in the folder, but for the scripts that DeepSpeed puts there."""
    return sorted(path.name for path in (r.run_dir / "checkpoints").iterdir() if path.suffix != ".py")


def test_a_checkpoint_describes_itself_and_only_the_newest_are_kept(recipe):
    r = recipe(max_steps=10, checkpoint_every=2, optim={"ema_decay": 0.9})
    run(r)
    assert tags(r) == ["latest", "step-00000006", "step-00000008"]
    folder = r.run_dir / "checkpoints" / "step-00000008"
    assert (r.run_dir / "checkpoints" / "latest").read_text() == folder.name
    assert {"state.json", "recipe.yaml", "rng-00000.safetensors", "ema-00000.safetensors", "mp_rank_00_model_states.pt"} <= {p.name for p in folder.iterdir()}
    state = checkpoint.read_state(folder)
    assert (state.progress.step, state.world_size, state.zero_stage, state.precision) == (8, 1, 2, "float32")
    assert state.train_digest == read_json(r.run_dir / "provenance.json")["train_digest"]
    assert {"seed", "epoch", "step_in_epoch", "order", "data"} <= state.loader.keys() and state.loader["step_in_epoch"] == 8
    assert (folder / "recipe.yaml").read_text() == (r.run_dir / "recipe.yaml").read_text()


def test_the_targets_frozen_parts_are_not_in_a_checkpoint(recipe, tmp_path):
    options = {"ds_config": zero3(tmp_path), "max_steps": 5, "checkpoint_every": 2}
    shared, whole = recipe("shared", "kv_block", shard_frozen=True, **options), recipe("whole", "kv_block", **options)
    run_and_stop(shared, 3)
    run(whole)
    saved = {}
    for r in (shared, whole):
        (file,) = (r.run_dir / "checkpoints" / "step-00000002").glob("*model_states.pt")
        saved[r.name] = torch.load(file, weights_only=False)
    assert saved["shared"]["module"].keys() == saved["whole"]["module"].keys() and not saved["shared"]["frozen_param_fragments"]
    assert run(shared)["resumed_from"] == [{"step": 2, "world_size": 1}]
    assert_close(weights(shared), weights(whole))


def spoil(folder: Path, how: str) -> None:
    if how == "no state":
        (folder / "state.json").unlink()
    elif how == "broken state":
        (folder / "state.json").write_text('{"format": "kvshot-check')
    elif how == "other format":
        write_json(folder / "state.json", {**read_json(folder / "state.json"), "format": "kvshot-checkpoint/0"})
    elif how == "other kind":
        (folder / "state.json").write_text("[1]")
    elif how == "other types":
        write_json(folder / "state.json", {**read_json(folder / "state.json"), "loader": None})
    elif how == "a text for a number":
        found = read_json(folder / "state.json")
        write_json(folder / "state.json", {**found, "progress": {**found["progress"], "step": "6"}})
    elif how == "missing file":
        (folder / "mp_rank_00_model_states.pt").unlink()
    elif how == "short file":
        os.truncate(folder / "mp_rank_00_model_states.pt", 100)
    else:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stopped_once(recipe_in: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """stopped_once(name, train options): the run folder of a run that was cut short after step 7 of 8, made once for the file; to be copied."""
    work, done = tmp_path_factory.mktemp("stopped"), dict[str, Path]()

    def make(name: str, **options: object) -> Path:
        if name not in done:
            r = recipe_in(work, name, checkpoint_every=2, max_steps=8, **options)
            with rank_forgotten():
                run_and_stop(r, 7)
            done[name] = r.run_dir
        return done[name]

    return make


@pytest.fixture
def trained(recipe: Callable[..., Recipe], stopped_once: Callable[..., Path]) -> Recipe:
    """Stopped after step 7, with checkpoints of steps 4 and 6."""
    r = recipe("trained", checkpoint_every=2, max_steps=8)
    shutil.copytree(stopped_once("trained"), r.run_dir)
    return r


@pytest.mark.parametrize(
    "how", ["no state", "broken state", "other format", "other kind", "other types", "a text for a number", "missing file", "short file", "gone"]
)
def test_a_broken_checkpoint_is_named_and_the_one_before_it_taken(trained, how):
    folder = trained.run_dir / "checkpoints"
    spoil(folder / "step-00000006", how)
    found, notes = checkpoint.find(folder)
    assert found.tag == "step-00000004" and len(notes) == 1
    assert "step-00000006" in notes[0] and notes[0].endswith("continuing from step-00000004 instead")
    spoil(folder / "step-00000004", how)
    with pytest.raises(KvshotError, match=rf"no checkpoint in {folder} is whole: .*delete"):
        checkpoint.find(folder)


def test_what_latest_names_counts_and_what_killed_starts_left_goes(trained, recipe, capsys):
    whole = recipe("whole", checkpoint_every=2, max_steps=8)
    run(whole)
    folder = trained.run_dir / "checkpoints"
    shutil.copytree(folder / "step-00000004", folder / ".step-00000008.partial")
    (folder / ".universal" / "step-00000006").mkdir(parents=True)
    (folder / "latest").write_text("step-00000004")  # killed between the two renames
    export = aside(trained.run_dir / "drafter_best" / "model.safetensors")
    export = export.with_name(export.name.replace(f".{os.getpid()}.", ".999999999."))
    export.parent.mkdir()
    export.write_bytes(b"half")
    capsys.readouterr()
    assert run(trained)["resumed_from"] == [{"step": 4, "world_size": 1}]
    said = capsys.readouterr().out
    assert "dropped the half-written checkpoint .step-00000008.partial" in said and "beyond the one continued from: step-00000006" in said
    assert_same(weights(trained), weights(whole))
    assert tags(trained) == tags(whole) and not export.exists()


@pytest.mark.parametrize("content", [None, b"{", b"../step-00000004", b"\xff\xfe"])
def test_without_a_readable_latest_the_newest_whole_one_is_taken(trained, content):
    latest = trained.run_dir / "checkpoints" / "latest"
    latest.unlink()
    if content:
        latest.write_bytes(content)
    assert run(trained)["resumed_from"] == [{"step": 6, "world_size": 1}]


@pytest.mark.parametrize("content", ["[]", "{", '{"x": {}}', '{"tag": 1}'])
@pytest.mark.parametrize("name", ["heldout.json", "checkpoints/best.json", "provenance.json"])
def test_another_file_of_the_run_that_is_something_else_is_named(recipe, stopped_once, name, content):
    looks = {"eval_every": 100, "keep_best": "mat"}
    r = recipe("looked", max_steps=8, checkpoint_every=2, **looks)
    shutil.copytree(stopped_once("looked", **looks), r.run_dir)
    (r.run_dir / name).write_text(content)
    with pytest.raises(KvshotError, match=name.rpartition("/")[2] if content[0] == "[" or name != "provenance.json" else "json|another configuration"):
        run(r)


def test_fewer_are_kept_from_the_start_on_as_the_disk_may_be_full(recipe):
    r = recipe("kept", checkpoint_every=2, max_steps=9, keep_checkpoints=9)
    run_and_stop(r, 7)
    fewer = r.model_copy(update={"train": r.train.model_copy(update={"keep_checkpoints": 1})})
    run_and_stop(fewer, 0)
    assert tags(r) == ["latest", "step-00000006"]


def test_the_checkpoint_of_another_run_is_refused_by_name(trained, recipe):
    other = recipe("other", checkpoint_every=2, max_steps=8, seed=3)
    run_and_stop(other, 7)
    mine = trained.run_dir / "checkpoints" / "step-00000006"
    shutil.rmtree(mine)
    shutil.copytree(other.run_dir / "checkpoints" / mine.name, mine)
    with pytest.raises(KvshotError, match=r"step-00000006 belongs to another drafter or run \(its digest is"):
        run(trained)
    assert mine.is_dir()


def test_a_checkpoint_that_deepspeed_cannot_read_is_named(trained):
    model = trained.run_dir / "checkpoints" / "step-00000006" / "mp_rank_00_model_states.pt"
    model.write_bytes(bytes(model.stat().st_size))
    with pytest.raises(KvshotError, match=r"step-00000006: DeepSpeed cannot read this checkpoint .*delete it"):
        run(trained)


def test_random_states_come_back(tmp_path):
    file = tmp_path / "rng.safetensors"
    np.random.standard_normal(3)  # leaves half of a pair behind
    file.write_bytes(rng.state())

    def drawn() -> list[float]:
        return [random.random(), random.gauss(0, 1), *np.random.standard_normal(3), *np.random.rand(2), *torch.rand(3).tolist()]

    before = drawn()
    rng.restore(file)
    assert drawn() == before
    file.write_bytes(b"nothing")
    with pytest.raises(KvshotError, match="not the states of random number generators"):
        rng.restore(file)


def _fails_once(recipe: Recipe, failing: str, step: str) -> None:
    """Rank `failing` cannot write its part of the checkpoint of `step`."""
    plain = Writer._keep

    def keep(self: Writer, call: Callable[[], object]) -> None:
        def full() -> None:
            raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

        hit = os.environ["RANK"] == failing and (recipe.run_dir / "checkpoints" / f".{step}.partial").is_dir()
        plain(self, full if hit else call)

    Writer._keep = keep
    run(recipe)


@pytest.mark.parametrize("writer", ["plain", "async"])
def test_ranks_agree_that_a_checkpoint_failed_and_the_one_before_it_stays(recipe, writer):
    options = {"checkpoint_every": 2, "max_steps": 9, "checkpoint_writer": writer}
    r, whole = recipe("failed", **options), recipe("whole", **options)
    said = forked.Run(2, _fails_once, r, "1", "step-00000006").wait()
    assert all("KvshotError" in text and "step-00000006: the checkpoint cannot be written (rank 1: RuntimeError" in text for text in said), said
    assert tags(r) == ["latest", "step-00000002", "step-00000004"]
    forked.train(r, 2)
    forked.train(whole, 2)
    assert_same(weights(r), weights(whole))


def test_a_full_disk_leaves_the_old_checkpoint_on_every_rank(recipe, small_disk):
    r = recipe("full", checkpoint_every=2, max_steps=5, keep_checkpoints=3)
    r = r.model_copy(update={"work": small_disk("2200k")})
    said = forked.Run(2, run, r).wait()
    assert all("the checkpoint cannot be written" in text and " MB were free there)" in text and "make room" in text for text in said), said
    assert tags(r) == ["latest", "step-00000002"]
    small_disk("60m")
    assert forked.train(r, 2)[0]["resumed_from"] == [{"step": 2, "world_size": 2}]


def _dies_in(recipe: Recipe, where: str) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "conversion":
        from deepspeed.checkpoint import ds_to_universal

        ds_to_universal._save_optimizer_state = die
    elif where == "write":
        plain, seen = Writer._keep, []

        def keep(self: Writer, call: Callable[[], object]) -> None:
            seen.append(call)
            die() if len(seen) == 9 else plain(self, call)

        Writer._keep = keep
    elif where == "before the name":
        checkpoint._sync = die
    else:
        plain_write = checkpoint.write_atomic
        checkpoint.write_atomic = lambda path, data: die() if path.name == "latest" and path.exists() else plain_write(path, data)
    run(recipe)


@pytest.fixture(scope="module")
def undisturbed(recipe_in: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after 7 steps without a checkpoint."""
    whole = recipe_in(tmp_path_factory.mktemp("undisturbed"), "whole", checkpoint_every=100, max_steps=7)
    forked.train(whole)
    return weights(whole)


@pytest.mark.parametrize("where", ["write", "before the name", "before latest"])
@pytest.mark.parametrize("writer", ["plain", "async"])
def test_a_kill_while_a_checkpoint_is_written_costs_no_more_than_that_one(recipe, undisturbed, writer, where):
    r = recipe("killed", checkpoint_every=2, max_steps=7, checkpoint_writer=writer)
    assert forked.Run(1, _dies_in, r, where).wait() == [None]
    forked.train(r)
    assert_same(weights(r), undisturbed)
    assert not [name for name in tags(r) if name.startswith(".")]


def _dies_exporting(recipe: Recipe, where: str) -> None:
    def dying(plain: Callable[..., None]) -> Callable[..., None]:
        def call(path: Path, *rest: object) -> None:
            if path.name == where and os.environ["RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            plain(path, *rest)

        return call

    export.save_drafter, export.write_json = dying(export.save_drafter), dying(export.write_json)
    run(recipe)


def test_kills_in_the_export_of_a_run_whose_last_step_is_the_best_one_and_has_a_checkpoint(recipe):
    options = {"checkpoint_every": 3, "max_steps": 6, "checkpoint_writer": "async", "keep_checkpoints": 1, "optim": {"ema_decay": 0.9}}
    options |= {"eval_every": 3, "keep_best": "loss", "eval_conversations": 3}
    r, whole = recipe("killed", **options), recipe("whole", **options)
    trained = forked.train(whole, 2)[0]
    for where in ("drafter_ema", "drafter", "train.json"):
        assert None in forked.Run(2, _dies_exporting, r, where).wait()
        assert not (r.run_dir / "train.json").exists()
    done = forked.train(r, 2)[0]
    assert done["resumed_from"][0] == {"step": 6, "world_size": 2} and done["tokens"] == trained["tokens"]
    for name in ("drafter", "drafter_ema", "drafter_best"):
        assert_same(*(load_file(one.run_dir / name / "model.safetensors") for one in (r, whole)))
    assert tags(r) == tags(whole) == ["best.json", "latest", "step-00000006"]


def test_a_kill_during_the_conversion_to_another_number_of_ranks_leaves_all_as_it_was(recipe):
    r = recipe("moved", checkpoint_every=2, max_steps=6)
    said = forked.Run(2, _fails_once, r, "1", "step-00000004").wait()
    assert all("cannot be written" in text for text in said), said
    assert forked.Run(1, _dies_in, r, "conversion").wait() == [None]
    assert (r.run_dir / "checkpoints" / ".universal").is_dir()
    assert forked.train(r)[0]["resumed_from"] == [{"step": 2, "world_size": 1}]
    assert not (r.run_dir / "checkpoints" / ".universal").exists()


def test_a_conversion_that_fails_says_what_to_do(trained, tmp_path):
    source = trained.run_dir / "checkpoints" / "step-00000006"
    next(source.glob("*optim_states.pt")).write_bytes(b"nothing")
    with pytest.raises(KvshotError, match="cannot be converted for another number of ranks"):
        universal.convert(source, tmp_path / "there" / "step-00000006")
    assert not (tmp_path / "there").exists()


def test_a_conversion_tells_that_it_gets_on(trained, tmp_path):
    beats: list[None] = []
    target = tmp_path / "there" / "step-00000006"
    universal.convert(trained.run_dir / "checkpoints" / target.name, target, lambda: beats.append(None))
    assert (target / "zero").is_dir() and len(beats) > 3


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(recipe, monkeypatch):
    r, plain = recipe(checkpoint_every=2, max_steps=7, keep_checkpoints=1), os.rmdir

    def busy(path: object, *arguments: object, **options: object) -> None:
        if "step-00000002" in str(path):
            raise OSError(39, "Directory not empty", str(path))
        plain(path, *arguments, **options)

    monkeypatch.setattr(os, "rmdir", busy)
    assert run(r)["steps"] == 7
    assert "step-00000006" in tags(r)


def test_the_async_writer_copies_what_it_writes_and_names_it_when_it_is_on_the_disk(recipe):
    options = {"max_steps": 9, "checkpoint_every": 2, "keep_checkpoints": 9, "log_every": 1}
    plain, beside = recipe("plain", **options), recipe("beside", checkpoint_writer="async", **options)
    run(plain)
    run(beside)
    assert board(beside)["train/loss"] == board(plain)["train/loss"]
    assert tags(beside) == tags(plain)
    for tag in ("step-00000002", "step-00000008"):
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            one, other = (torch.load(r.run_dir / "checkpoints" / tag / name, weights_only=False) for r in (plain, beside))
            assert _same(one, other), (tag, name)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one if k not in ("ds_config", "loss_scaler"))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return True


def measured(monkeypatch: pytest.MonkeyPatch, values: dict[int, float]) -> None:
    """Held-out figures as they are written here."""
    plain = trainer.Heldout.look

    def look(self, step, control):
        found = plain(self, step, control)
        path = self.recipe.run_dir / "heldout.json"
        kept = read_json(path)
        kept[str(step)] |= {"heldout/mat": values[step], "heldout/loss": values[step]}
        write_json(path, kept)
        return found

    monkeypatch.setattr(trainer.Heldout, "look", look)


@pytest.mark.parametrize(("metric", "values", "best"), [("mat", [1.0, 1.5, 1.2, 1.5, 1.1], 2), ("loss", [3.0, 2.0, 1.0, 2.0, 4.0], 3)])
def test_the_best_checkpoint_stays_and_is_exported(recipe, monkeypatch, metric, values, best):
    measured(monkeypatch, dict(enumerate(values, 1)))
    r = recipe(f"best-{metric}", max_steps=5, checkpoint_every=1, keep_checkpoints=1, eval_every=1, keep_best=metric, eval_conversations=3)
    run(r)
    tag = f"step-{best:08d}"
    assert tags(r) == ["best.json", "latest", tag, "step-00000004"]
    assert read_json(r.run_dir / "checkpoints" / "best.json") == {"tag": tag, "metric": metric, "value": values[best - 1], "step": best, "conversations": 3}
    assert checkpoint.read_state(r.run_dir / "checkpoints" / tag).heldout["heldout/mat"] == values[best - 1]
    stopped = recipe("stopped", max_steps=5, checkpoint_every=1)
    run_and_stop(stopped, best)
    kept = torch.load(stopped.run_dir / "checkpoints" / tag / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    exported = load_file(r.run_dir / "drafter_best" / "model.safetensors")
    assert_same({name: kept[f"drafter.{name}"] for name in exported}, exported)


def test_a_kill_between_the_best_checkpoint_and_the_note_of_it_loses_no_best(recipe, monkeypatch):
    measured(monkeypatch, {1: 1.0, 2: 3.0, 3: 2.0, 4: 2.0})
    r = recipe("noted", max_steps=4, checkpoint_every=1, keep_checkpoints=1, eval_every=1, keep_best="mat", eval_conversations=3)
    with pytest.MonkeyPatch.context() as patch:
        write = checkpoint.write_json

        def dies(path: Path, value: object) -> None:
            if path.name == "best.json" and "step-00000002" in str(value):
                raise Stopped
            write(path, value)

        patch.setattr(checkpoint, "write_json", dies)
        with pytest.raises(Stopped):
            run(r)
    assert run(r)["resumed_from"] == [{"step": 2, "world_size": 1}]
    assert read_json(r.run_dir / "checkpoints" / "best.json")["step"] == read_json(r.run_dir / "drafter_best" / "config.json")["training"]["steps"] == 2
    assert tags(r) == ["best.json", "latest", "step-00000002", "step-00000003"]


def test_a_best_value_of_other_conversations_does_not_compare(recipe, monkeypatch):
    measured(monkeypatch, {1: 3.0, 2: 4.0, 3: 1.0, 4: 2.0})
    options = {"max_steps": 4, "checkpoint_every": 1, "eval_every": 1, "keep_best": "mat"}
    run_and_stop(recipe("fewer", **options, eval_conversations=3), 2)
    r = recipe("fewer", **options, eval_conversations=2)
    run(r)
    assert read_json(r.run_dir / "checkpoints" / "best.json") == {"tag": "step-00000004", "metric": "mat", "value": 2.0, "step": 4, "conversations": 2}


def test_a_measurement_between_two_checkpoints_that_is_the_best_makes_one(recipe, monkeypatch):
    measured(monkeypatch, {2: 1.0, 4: 2.0, 5: 3.0})
    r = recipe("between", max_steps=5, checkpoint_every=100, eval_every=2, keep_best="mat", keep_checkpoints=1, eval_conversations=3)
    run(r)
    assert tags(r) == ["best.json", "latest", "step-00000005"]  # measured at the end
