"""What a run logs, read back from its event files and compared with values computed from what the steps really did."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvshot_ds import evaluation
from kvshot_ds.drafters import cost
from kvshot_ds.errors import ConfigError, KvshotError, Preempted
from kvshot_ds.features.shard import ShardReader
from kvshot_ds.files import read_json
from kvshot_ds.training import gradients, timing, trackers, trainer, watch
from kvshot_ds.training.control import Control
from kvshot_ds.training.launch import run
from kvshot_ds.training.plan import step_flops
from tests.training import forked
from tests.training.runs import assert_same, before_each_step, board, run_and_stop, weights, zero3

STEPS = 3


def events(recipe):
    """The event files' own reader, over everything it keeps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(recipe.run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "histograms": 0})
    found.Reload()
    return found


class Record:
    """What the micro-batches of each step gave, as plain numbers: step -> list of (batch, plan, output)."""

    def __init__(self, patch):
        self.steps: dict[int, list] = {}
        plain = watch.Meter.add

        def add(meter, out, plan, normaliser, counted, step):
            batch = self.micro.pop(0)
            self.steps.setdefault(step, [])
            if counted:
                self.steps[step].append((batch, plan, out))
            plain(meter, out, plan, normaliser, counted, step)

        self.micro: list = []
        before_each_step(patch, lambda _s, micro, _n: self.micro.extend(m.batch for m in micro))
        patch.setattr(watch.Meter, "add", add)

    def between(self, first, last):
        return [item for step in range(first, last + 1) for item in self.steps[step]]


def per_step(items, name):
    return np.sum([getattr(out, name).double().numpy().sum(1) for _, _, out in items], axis=0)


def test_every_point_is_what_the_steps_since_the_last_one_gave(recipe, monkeypatch):
    record = Record(monkeypatch)
    r = recipe(drafter="hybrid-scalar", max_steps=11, epochs=2, log_every=4, checkpoint_every=6, peak_tflops=1e-3, optim={"lr": 1e-3}, tokens_per_micro_batch=0)
    run(r)
    found = events(r)
    logged = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    points = [4, 6, 8, 11]  # every fourth, the checkpoint, the last
    price = cost.cost(r.train.drafter, trainer.load_geometry(r.target.path), r.train.draft_vocab_size)
    before = 0
    for step in points:
        items = record.between(before + 1, step)
        den = np.sum([plan.valid.numpy().sum(1) for _, plan, _ in items], axis=0)
        top1, joint, prob, loss = (per_step(items, name) / den for name in ("correct", "joint", "prob", "row_loss"))
        want = {"train/loss": per_step(items, "weighted").sum() / den[0], "train/epoch": step / 11}
        for k in range(STEPS):
            want |= {f"train/accept_top1/{k}": top1[k], f"train/accept_joint/{k}": joint[k], f"train/accept_prob/{k}": prob[k], f"train/loss_step/{k}": loss[k]}
        want |= {"train/mat": 1 + sum(np.prod(top1[: k + 1]) for k in range(STEPS)), "train/mat_joint": 1 + joint.sum()}
        want |= {"train/retention": top1[-1] / top1[0]} if top1[0] else {}
        warmup = 1  # round(11 * .05)
        done = (step - 1 - warmup) / (11 - warmup)
        want |= {"train/lr": 1e-3 * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))}
        for tag, value in want.items():
            assert logged[tag][step] == pytest.approx(value, rel=2e-5, abs=1e-7), (tag, step)
        # Rates depend on the clock; their ratios do not.
        tokens, conversations = sum(sum(b.lengths) for b, _, _ in items), sum(len(b.keys) for b, _, _ in items)
        per_token = logged["train/samples_per_s"][step] / logged["train/tokens_per_s"][step]
        assert per_token == pytest.approx(conversations / tokens, rel=1e-5)
        flops = sum(step_flops(price, STEPS, b.lengths, np.bincount(p.conversation.numpy(), minlength=len(b.lengths)).tolist()) for b, p, _ in items)
        assert logged["train/mfu"][step] / logged["train/tokens_per_s"][step] == pytest.approx(flops / tokens / 1e9, rel=1e-5)
        assert logged["time/step"][step] * (step - before) * logged["train/tokens_per_s"][step] == pytest.approx(tokens, rel=1e-5)
        parts = {part: logged[f"time/{part}"][step] for part in timing.PARTS}
        assert all(value > 0 for value in parts.values()) and sum(parts.values()) < logged["time/step"][step]
        assert logged["train/data_stall_share"][step] == pytest.approx(parts["data"] / logged["time/step"][step], rel=1e-5)
        before = step
    assert set(logged["train/loss"]) == set(points)
    assert logged["data/skipped"][4] == 0 and logged["comm/gigabytes_per_step"][4] == 0 and logged["memory/host_gib"][4] > 0.1
    assert "memory/cuda_peak_gib" not in logged or torch.cuda.is_available()


def test_steps_of_which_nothing_can_be_read_have_no_loss_and_no_acceptance(recipe, tiny_features, tmp_path):
    """A zero there would be taken for one that was measured."""
    folder = tmp_path / "features"
    shutil.copytree(tiny_features, folder)
    (folder / "train-000001.tar").unlink()
    r = recipe(shuffle_shards=1, log_every=1, on_bad_data="skip").model_copy(update={"shards": folder})
    run(r)
    found = events(r)
    logged = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    empty = {step for step, tokens in logged["train/tokens_per_s"].items() if not tokens}
    assert 1 <= len(empty) < 11 and len(logged["data/skipped"]) == 11
    for tag in ("train/loss", "train/loss_step/0", "train/accept_top1/0", "train/accept_prob/0", "train/accept_joint/0", "train/mat", "train/mat_joint"):
        assert not empty & logged[tag].keys(), tag
    assert logged["train/loss"].keys() == logged["train/lr"].keys() - empty


def test_what_no_row_reached_is_left_out():
    den, some = [4.0, 2.0, 0.0], [2.0, 1.0, 0.0]
    found = watch.training_scalars(torch.tensor([den, some, some, some, some, some]), torch.tensor([0.0, 1.0]))
    assert {tag.rsplit("/", 1)[1] for tag in found if tag.startswith(("train/loss_step", "train/accept"))} == {"0", "1"}
    assert (found["train/loss"], found["train/accept_top1/1"], found["train/loss_query"]) == (0.75, 0.5, 0.25)
    assert not {"train/mat", "train/mat_joint", "train/retention", "train/loss_kv_branch"} & found.keys()


def test_what_comes_before_the_first_step_is_in_no_rate(recipe, monkeypatch):
    """The held-out shards are read through, trackers connect: for minutes, perhaps."""
    made = []
    for name in ("Heldout", "Board", "Clock"):
        plain = getattr(trainer, name)
        monkeypatch.setattr(trainer, name, lambda *args, name=name, plain=plain: made.append(name) or plain(*args))
    run(recipe(max_steps=1, eval_every=1))
    assert made == ["Heldout", "Board", "Clock"]


def test_gate_statistics_are_those_of_the_last_forward(recipe, monkeypatch):
    seen = {}
    plain = trainer.log_point

    def log_point(s, *rest):
        seen[rest[4]] = [g.double().flatten().numpy() for g in watch.gates(s.drafter)]
        plain(s, *rest)

    monkeypatch.setattr(trainer, "log_point", log_point)
    r = recipe(drafter={"family": "hybrid", "depth": 2, "gate": {"init": "bias:-2.9444"}}, max_steps=4, optim={"lr": 1e-2})
    run(r)
    found = events(r)
    logged = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"] if tag.startswith("gate/")}
    shown = {e.step: e.histogram_value for e in found.Histograms("gate")}
    assert set(seen) == set(shown) == {2, 3, 4}
    for step, layers in seen.items():
        for name, values in (("gate", np.concatenate(layers)), ("gate/layer_0", layers[0]), ("gate/layer_1", layers[1])):
            assert logged[f"{name}/mean"][step] == pytest.approx(values.mean(), rel=1e-5)
            assert logged[f"{name}/share_below_0.05"][step] == pytest.approx((values < 0.05).mean(), rel=1e-6)
            assert logged[f"{name}/share_above_0.95"][step] == pytest.approx((values > 0.95).mean(), rel=1e-6)
        values, h = np.concatenate(layers), shown[step]
        assert (h.min, h.max, h.num, h.sum) == pytest.approx((values.min(), values.max(), len(values), values.sum()))
        assert h.sum_squares == pytest.approx((values**2).sum())
        counts, _ = np.histogram(values, 50, (0, 1))
        kept = {round(limit, 6): count for limit, count in zip(h.bucket_limit, h.bucket, strict=True)}
        assert all(kept.get(round((i + 1) / 50, 6), 0) == pytest.approx(count, abs=2) for i, count in enumerate(counts))
    assert any(0 < logged["gate/share_below_0.05"][step] < 1 for step in seen)


def _by_group(grads):
    """Root of the sum of squares by group of {name: gradient}, by the names alone."""
    out = dict.fromkeys(gradients.GROUPS, 0.0)
    parts = {"fc": "fusion", "self_attn": "self", "cross_attn": "cross", "projector": "projector", "mix": "gate", "mlp": "mlp", "lm_head": "head"}
    for name, grad in grads.items():
        group = next((parts[p] for p in name.split(".") if p in parts), "other")
        group = "norms" if "norm" in name.split(".")[-2] else group
        square = grad.double().square().sum().item()
        out[group] += square
        if "cross_attn.k_proj" in name or "cross_attn.v_proj" in name:
            out["cross_kv"] += square
    return {group: math.sqrt(value) for group, value in out.items()}


@pytest.fixture
def gradients_of_step_2(monkeypatch):
    """Gradients of the second optimizer step by parameter name, taken by hooks of autograd, which see nothing of DeepSpeed. For one rank."""
    grads: dict[str, torch.Tensor] = {}

    def hook(s, _micro, n):
        for name, p in s.drafter.named_parameters() if n == 1 else ():
            p.register_hook(lambda g, name=name: grads.__setitem__(name, grads.get(name, 0) + g.detach().double()))

    before_each_step(monkeypatch, hook)
    return grads


@pytest.mark.parametrize(
    "ds_config",
    ["zero0_fp32", "zero1_fp32", "zero2_fp32", "zero3", "zero2_offload_fp32", "zero3_offload_fp32", "zero0_bf16", "zero1_bf16", "zero2_bf16", "zero3_bf16"],
)
def test_gradient_norms_by_group_are_those_of_the_whole_gradient(recipe, tmp_path, gradients_of_step_2, ds_config):
    r = recipe(drafter="hybrid", max_steps=2, optim={"clip": 0.01}, ds_config=zero3(tmp_path) if ds_config == "zero3" else ds_config)
    run(r)
    logged, want = board(r), _by_group(gradients_of_step_2)
    close = 1e-2 if "bf16" in ds_config else 2e-5  # gradients themselves are bf16 then, and are summed in it
    found = {group: logged[f"grad_norm/{group}"][-1] for group in gradients.GROUPS if want[group]}
    assert {"fusion", "self", "cross", "cross_kv", "projector", "gate", "mlp", "head", "norms"} <= set(found)
    assert found == pytest.approx({group: want[group] for group in found}, rel=close)
    whole = math.sqrt(sum(value**2 for group, value in found.items() if group != "cross_kv"))
    assert whole == pytest.approx(logged["train/grad_norm"][-1], rel=1e-3 if "bf16" in ds_config else 1e-5)
    assert whole > 0.01  # before clipping


@pytest.mark.parametrize("ds_config", [pytest.param("zero0_fp32", marks=pytest.mark.slow), "zero2_fp32", pytest.param("zero3", marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_two_ranks_log_what_one_does(recipe, tmp_path, ds_config):
    """Also on a last step of 2 conversations for 2 ranks x 2 micro-steps, where half of the forwards are stand-ins; and the held-out split, in 3 groups."""
    options = {"drafter": "hybrid", "eval_every": 4, "ds_config": zero3(tmp_path) if ds_config == "zero3" else ds_config}
    alone, pair = recipe("alone", **options), recipe("pair", **options)
    run(alone)
    forked.train(pair, 2)
    one, two = board(alone), board(pair)
    same = [tag for tag in one if tag.startswith(("train/", "grad_norm/", "heldout/")) and not tag.endswith(("_per_s", "stall_share"))]
    assert len(same) > 30 and {tag for tag in two if tag.startswith(("train/", "grad_norm/", "heldout/"))} >= set(same)
    for tag in same:
        assert two[tag] == pytest.approx(one[tag], rel=2e-3, abs=2e-4), tag
    for i, norm in enumerate(two["train/grad_norm"]):
        squares = [two[f"grad_norm/{group}"][i] ** 2 for group in gradients.GROUPS if group != "cross_kv" and f"grad_norm/{group}" in two]
        assert math.sqrt(sum(squares)) == pytest.approx(norm, rel=1e-5)
    assert all(value > 0 for value in two["comm/gigabytes_per_step"]) and not any(one["comm/gigabytes_per_step"])
    points = read_json(pair.run_dir / "heldout.json")
    assert points.keys() == {"4", "8", "11"}
    (measured,) = evaluation.run(pair)  # on one rank
    assert [points["11"][f"heldout/accept_prob/{k}"] for k in range(STEPS)] == [step["value"] for step in measured["accept_prob"]]
    assert points["11"]["heldout/mat_joint"] == measured["mat_joint"]["value"]


@pytest.mark.parametrize(
    "drafter",
    ["hidden_only", "dflash", {"family": "hybrid", "gate": {"floor": 0.5, "floor_steps": 8}}, {"family": "hybrid", "depth": 2, "gate": {"open_steps": 7}}],
)
def test_the_look_at_the_held_out_split_is_kvshot_eval_and_leaves_no_trace(recipe, drafter):
    name = drafter if isinstance(drafter, str) else "hybrid"
    options = {"optim": {"lr": 1e-2}, "objective": {"steps": 3, "row_fraction": 0.5, "loss": "hard_ce"}}
    looked, plain = recipe("looked", drafter, eval_every=5, eval_conversations=7, **options), recipe("plain", drafter, **options)
    run(looked)
    run(plain)
    assert_same(weights(looked), weights(plain))
    (measured,) = evaluation.run(looked.model_copy(update={"eval": looked.eval.model_copy(update={"max_conversations": 7})}))
    points = read_json(looked.run_dir / "heldout.json")
    assert list(points) == ["5", "10", "11"], name
    last = points["11"]
    for key, tag in (("alpha", "accept_top1"), ("joint", "accept_joint"), ("accept_prob", "accept_prob")):
        assert [last[f"heldout/{tag}/{k}"] for k in range(STEPS)] == [step["value"] for step in measured[key]]
    assert {k: last.get(f"heldout/{k}") for k in ("mat", "mat_joint", "retention")} == {k: measured[k]["value"] for k in ("mat", "mat_joint", "retention")}
    assert last["heldout/loss"] > 0
    found = events(looked)
    assert {str(e.step): e.value for e in found.Scalars("heldout/mat")} == pytest.approx({n: v["heldout/mat"] for n, v in points.items()})


@pytest.mark.parametrize("ds_config", ["zero2_fp32", "zero3"])
def test_a_look_that_is_left_early_is_taken_up_by_the_next_start(recipe, tmp_path, monkeypatch, capsys, ds_config):
    """Before any step of training: ZeRO-3 then learns the order of parameters from forwards without a backward pass."""
    from kvshot_ds.training import heldout

    options = {"eval_every": 4, "checkpoint_every": 100, "ds_config": zero3(tmp_path) if ds_config == "zero3" else ds_config}
    undisturbed = recipe("undisturbed", **options)
    run(undisturbed)
    plain, r, calls = heldout.conversation_sums, recipe("left", **options), []

    def counted(*args):
        calls.append(1)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return plain(*args)

    monkeypatch.setattr(heldout, "conversation_sums", counted)
    with pytest.raises(Preempted, match=r"after step 4 of 11 .*SIGUSR1"):
        run(r)
    assert len(calls) == 2 and not (r.run_dir / "heldout.json").exists()
    assert "after step 4 was left (SIGUSR1" in "".join(capsys.readouterr())
    run(r)
    assert len(calls) == 2 + 3 * 3  # 9 conversations in 3 groups, after steps 4, 8 and 11
    assert read_json(r.run_dir / "heldout.json") == read_json(undisturbed.run_dir / "heldout.json")
    assert_same(weights(r), weights(undisturbed))


@pytest.mark.parametrize("keep_best", ["none", "loss"])
def test_a_look_after_the_last_step_that_is_left_is_taken_up_before_the_run_is_complete(recipe, monkeypatch, keep_best):
    from kvshot_ds.training import heldout

    options = {"eval_every": 4, "checkpoint_every": 100, "keep_best": keep_best}
    undisturbed, r = recipe("undisturbed", **options), recipe("left", **options)
    run(undisturbed)
    plain, looks = heldout.Heldout.look, []

    def look(self, step, control):
        looks.append(step)
        if looks == [4, 8, 11]:
            os.kill(os.getpid(), signal.SIGUSR1)
        return plain(self, step, control)

    monkeypatch.setattr(heldout.Heldout, "look", look)
    with pytest.raises(Preempted, match=r"after step 11 of 11 .*SIGUSR1"):
        run(r)
    assert not (r.run_dir / "train.json").exists()
    run(r)
    assert looks == [4, 8, 11, 11]
    assert read_json(r.run_dir / "heldout.json") == read_json(undisturbed.run_dir / "heldout.json")
    assert_same(weights(r), weights(undisturbed))
    if keep_best != "none":
        assert read_json(r.run_dir / "checkpoints" / "best.json") == read_json(undisturbed.run_dir / "checkpoints" / "best.json")


def test_a_run_that_was_killed_looks_neither_twice_nor_too_little(recipe, monkeypatch):
    from kvshot_ds.training import heldout

    looks, plain = [], heldout.Heldout.look
    monkeypatch.setattr(heldout.Heldout, "look", lambda self, step, control: looks.append(step) or plain(self, step, control))
    r = recipe(eval_every=3, checkpoint_every=3)
    run_and_stop(r, 7)  # dies after its look at step 6 and the checkpoint there
    run(r)
    assert looks == [3, 6, 9, 11]


def test_nothing_held_out_is_said_before_the_first_step(recipe, tiny_features, tmp_path):
    folder = tmp_path / "features"
    shutil.copytree(tiny_features, folder)
    manifest = read_json(folder / "manifest.json")
    manifest["splits"]["heldout"] |= {"shards": [], "samples": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    r = recipe(eval_every=2).model_copy(update={"shards": folder})
    with pytest.raises(ConfigError, match=r"train\.eval_every=2, but .* holds out no supervised rows"):
        run(r)


def test_a_damaged_held_out_shard_is_named_before_the_first_step(recipe, tiny_features, tmp_path):
    folder = tmp_path / "features"
    shutil.copytree(tiny_features, folder)
    tar = next(folder.glob("heldout-*.tar"))
    raw = bytearray(tar.read_bytes())
    raw[len(raw) // 2] ^= 1
    tar.write_bytes(raw)
    with pytest.raises(KvshotError, match=rf"{tar.name}: sha256 .* damaged"):
        run(recipe(eval_every=2).model_copy(update={"shards": folder}))


def test_points_after_the_checkpoint_are_replaced_also_where_the_clock_went_back(recipe, monkeypatch):
    r, whole = recipe("back", log_every=1), recipe("whole", log_every=1)
    run(whole)
    run_and_stop(r, 5)
    before = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(trackers.time, "time", lambda: before - 3600)
        run(r)
    assert board(r)["train/loss"] == board(whole)["train/loss"]


def test_looking_through_the_held_out_shards_is_progress(recipe, monkeypatch):
    done, plain, beat = [], ShardReader.check_bytes, Control.beat
    monkeypatch.setattr(ShardReader, "check_bytes", lambda reader: plain(reader) or done.append(reader.index.shard))
    monkeypatch.setattr(Control, "beat", lambda control, step=None: done.append(step or "beat") or beat(control, step))
    run(recipe(max_steps=2, eval_every=2))
    last = max(i for i, what in enumerate(done) if "heldout" in str(what))
    assert done[last + 1] == "beat"  # and not the first step


def test_a_full_disk_ends_the_points_and_not_the_training(recipe, monkeypatch, capsys):
    plain = trackers.TensorBoard.scalars

    def full(self, values, step):
        if step == 4:
            disk = open("/dev/full", "wb", buffering=0)  # noqa: SIM115  every write to it fails as a full disk does
            self._records = type(self._records)(disk)
        plain(self, values, step)

    monkeypatch.setattr(trackers.TensorBoard, "scalars", full)
    r = recipe(max_steps=8, checkpoint_every=100)
    assert run(r)["steps"] == 8
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "No space left" in line]
    assert len(lines) == 1 and "TensorBoard takes no more points" in lines[0] and "training goes on" in lines[0] and "Traceback" not in said.err
    assert [e.step for e in events(r).Scalars("train/loss")] == [2]  # what was written stays readable


def test_a_disk_that_is_full_from_the_start_is_one_message_too(recipe, monkeypatch, capsys):
    def refused(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trackers.TensorBoard, "__init__", refused)
    assert run(recipe(max_steps=2))["steps"] == 2
    assert "TensorBoard takes no more points" in "".join(capsys.readouterr())


def test_the_options_stand_in_text_and_hparams_of_the_same_run(recipe):
    r = recipe(drafter="kv_only", max_steps=2, eval_every=2, optim={"lr": 2e-3})
    run(r)
    assert [p for p in (r.run_dir / "tensorboard").rglob("*") if p.is_dir()] == []  # no second run in the list
    from tensorboard.plugins.hparams import metadata

    plugin = events(r).summary_metadata
    content = {tag: plugin[tag].plugin_data.content for tag in plugin if tag.startswith("_hparams_/")}
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["optim.lr"].number_value == 2e-3 and start.hparams["drafter.family"].string_value == "kv_only"
    experiment = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    tags = {m.name.tag for m in experiment.metric_infos}
    assert {"train/mat", "heldout/mat"} <= tags <= set(board(r))  # the columns are scalars that are there
    assert metadata.SESSION_END_INFO_TAG in content
    text = events(r).Tensors("recipe/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "family: kv_only" in text and "lr: 0.002" in text


FAKES = {
    "wandb": """
import json, pathlib
class Error(Exception): pass
class Histogram:
    def __init__(self, np_histogram): self.bins = len(np_histogram[0])
class Run:
    def __init__(self, **options): self.seen = {"init": options, "log": []}
    def log(self, values, step): self.seen["log"].append((step, sorted(values)))
    def finish(self, exit_code):
        self.seen["exit"] = exit_code
        path = pathlib.Path(self.seen["init"]["dir"]) / f"seen-{self.seen['init']['id']}-{exit_code}.json"
        path.write_text(json.dumps(self.seen))
def init(**options): return Run(**options)
""",
    "mlflow": """
import types
seen = []
class exceptions:
    class MlflowException(Exception): pass
def set_experiment(name): seen.append(("experiment", name))
def start_run(run_id=None, run_name=None):
    seen.append(("start", run_id, run_name))
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "abc"))
def log_params(values): seen.append(("params", values))
def log_text(text, name): seen.append(("text", name))
def log_metrics(values, step):
    if step == 6: raise exceptions.MlflowException("server gone")
    seen.append(("metrics", step, sorted(values)))
def end_run(status): seen.append(("end", status))
""",
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Stand-ins for wandb and mlflow, which are no dependencies: what is called, with what."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name, source in FAKES.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in FAKES:
        sys.modules.pop(name, None)


def test_other_trackers_get_the_same_points_and_are_continued_under_their_id(recipe, fakes, capsys):
    r = recipe(drafter="hybrid", trackers=("wandb", "mlflow"), max_steps=8, checkpoint_every=4)
    run_and_stop(r, 5)
    run(r)
    import mlflow

    known = read_json(r.run_dir / "trackers.json")
    assert known["mlflow"] == "abc"
    first, second = (read_json(r.run_dir / f"seen-{known['wandb']}-{code}.json") for code in (1, 0))
    assert [step for step, tags in first["log"] if "train/loss" in tags] == [2, 4] and [step for step, tags in second["log"] if "train/loss" in tags] == [6, 8]
    assert sorted(step for step, tags in second["log"] if tags == ["gate"]) == [6, 8]
    assert second["init"]["config"]["drafter.family"] == "hybrid" and second["init"]["resume"] == "allow"
    tags = next(tags for step, tags in second["log"] if step == 8 and "train/loss" in tags)
    assert set(tags) == {t for t in board(r) if not t.startswith("_")}
    starts = [call for call in mlflow.seen if call[0] == "start"]
    assert starts == [("start", None, "run"), ("start", "abc", None)]
    assert [call[1] for call in mlflow.seen if call[0] == "metrics"] == [2, 4]  # it failed at step 6 and was left alone
    assert "mlflow takes no more points of this start (MlflowException: server gone)" in "".join(capsys.readouterr())


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_trained(recipe):
    r = recipe(trackers=("mlflow",))
    with pytest.raises(ConfigError, match=r"mlflow, which is not installed: pip install mlflow"):
        run(r)
    assert not (Path(r.run_dir) / "tensorboard").exists()


def test_learning_rates_of_groups_that_differ_are_logged_one_by_one(recipe):
    r = recipe(drafter="hybrid", max_steps=2, optim={"lr": 1e-3, "groups": [{"tensors": ["*.cross_attn.*"], "lr_scale": 10.0}]})
    run(r)
    logged = board(r)
    rates = [logged[tag][0] for tag in sorted(logged) if tag.startswith("train/lr/")]
    assert max(rates) == pytest.approx(10 * logged["train/lr"][0]) and min(rates) == pytest.approx(logged["train/lr"][0])


def test_the_peak_is_the_named_one_or_the_accelerators_own(monkeypatch):
    assert timing.peak_flops(2.5, torch.device("cpu")) == 2.5e12 and timing.peak_flops(0, torch.device("cpu")) is None
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA RTX A1000", None),
        ("GTX", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _d, name=name: name)
        assert timing.peak_flops(0, torch.device("cuda")) == peak


def test_a_part_loses_what_communication_took_and_collectives_work_as_before(one_rank):
    from kvshot_ds.training.engine import connect

    world = connect(1, 1)
    import torch.distributed as dist

    plain = vars(dist.ProcessGroup)["allreduce"]
    with timing.Stopwatch(world.device) as clock:
        with clock.part("backward"):
            for _ in range(3):
                dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(10))  # outside of a part: nobody's
        seconds = clock.read()
    assert seconds["communication"] > 0 and seconds["backward"] > 0 and seconds["forward"] == 0
    assert vars(dist.ProcessGroup)["allreduce"] is plain and not any(clock.read().values())


def test_on_cuda_parts_are_the_computing_streams_own(monkeypatch):
    """With stand-ins for events and streams: nothing waits before it is read, what is nested is taken away, other streams do not count."""
    now, here, done = [0.0], ["compute"], [False]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def query(self):
            return done[0]

        def elapsed_time(self, end):
            assert done[0]  # asked earlier, the driver would refuse
            return 1e3 * (end.at - self.at)

    class Stream(str):
        def synchronize(self):
            done[0] = True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: Stream(here[0]))

    class Work:
        def wait(self):
            now[0] += 4.0

    monkeypatch.setattr(timing.dist, "Work", Work)
    with timing.Stopwatch(torch.device("cuda")) as clock:
        with clock.part("backward"):
            now[0] += 10.0
            Work().wait()
            here[0] = "side"
            Work().wait()  # on a stream of DeepSpeed's own
            here[0] = "compute"
        clock.collect()
        assert not any(clock.seconds.values())  # the device is not through with it
        seconds = clock.read()
    assert seconds == {"data": 0, "forward": 0, "backward": 14.0, "optimizer": 0, "communication": 4.0}
