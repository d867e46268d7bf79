"""What is timed is what a round does; the table keeps it, interpolates between, and refuses what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvshot_ds.bench import latency
from kvshot_ds.bench.latency_table import LatencyTable, Point, Surface, Timing
from kvshot_ds.config import DraftingConfig, LatencyConfig, Recipe
from kvshot_ds.decoding.state import Sequences
from kvshot_ds.drafters.state import DraftState
from kvshot_ds.errors import ConfigError, KvshotError
from tests import toys
from tests.decoding.models import bound_drafter, hf_target

SMALL = LatencyConfig(contexts=(9, 21), widths=(1, 3, 6), positions=(1, 2, 4), rows=(1, 3), repeats=2, warm_up=1)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(latency, "OVERHEAD_TOKENS", 6)


def measured(name: str, target) -> latency.Measured:
    return latency.Measured(name, toys.FAMILIES[name], target.geometry, bound_drafter(name, target))


def plane(context: int, size: int) -> float:
    return 1.0 + 0.01 * context + 0.1 * size


def surface(contexts=(10, 30), sizes=(1, 4, 8)) -> Surface:
    return Surface(tuple(Point(plane(c, s), 0, 99, c, s) for c in contexts for s in sizes))


@pytest.mark.parametrize("name", ["hidden_only-3", "kv_only-per_layer", "hybrid-2", "hybrid_block-2"])
def test_a_table_holds_every_context_and_size_and_survives_its_file(name, tmp_path):
    target = hf_target("Qwen3")
    table = latency.measure(target, [measured(name, target)], SMALL, DraftingConfig(strategy="static_tree", branching=(3, 2)))
    assert table.fault() is None
    assert (table.forward.contexts, table.forward.sizes) == ([9, 21], [1, 3, 6])
    (drafter,) = table.drafters
    assert drafter.first.sizes == [1, 2, 4] and set(drafter.overhead) == {"chain", "tree"}
    block = getattr(toys.FAMILIES[name], "block_size", None)
    assert drafter.block_size == block and (drafter.step is None) == (block is not None)
    if drafter.step:
        assert (drafter.step.contexts, drafter.step.sizes) == ([9, 21], [1, 3])
    table.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table
    shown = latency.table_text(table)
    assert "target forward by new tokens" in shown and f"{name}, tree" in shown


def test_forwards_are_of_these_widths_at_these_contexts(monkeypatch):
    seen = []
    verify = Sequences.verify

    def spied(self, bonus, draft):
        seen.append((self.lengths[0], 1 + draft.tokens.shape[1]))
        return verify(self, bonus, draft)

    monkeypatch.setattr(Sequences, "verify", spied)
    with torch.inference_mode():
        latency.forwards(hf_target("Llama"), SMALL)
    runs = SMALL.repeats + SMALL.warm_up
    assert sorted(seen) == sorted([(c, w) for c in SMALL.contexts for w in SMALL.widths] * runs)


@pytest.mark.parametrize("name", ["hidden_only-1", "kv_only-2", "kv_only-per_layer", "hybrid-2", "dflash-2"])
@torch.inference_mode()
def test_repeats_leave_the_drafter_as_a_fresh_one_would_be(name, monkeypatch):
    """After any number of timings, what is timed proposes what a drafter does that has seen these positions once."""
    target, kept = hf_target("Llama"), []
    monkeypatch.setattr(latency, "seconds", lambda work, device: kept.append(work()) or 1.0)
    drafter = bound_drafter(name, target)
    bench = latency._Bench(target, drafter, 9, 4, 3)
    with target.watch(bench.needs.hidden_layers) as outputs:
        bench.prepare(outputs)
        for positions in (2, 4, 1, 4):
            bench.first(positions)
            if hasattr(drafter, "forward_step"):
                bench.step(1)
                bench.step(3)
        kept.clear()
        bench.first(3)
        fresh, tokens = DraftState.empty(drafter.depth), latency._tokens(target, 9)
        batch = Sequences(target, bench.needs, outputs, 1, 20)
        batch.prefill([tokens])
        drafter.draft(fresh, batch.commit([range(9)], [tokens]), 1)
        new = torch.tensor([bench.new])
        batch.verify(new[:, 0], latency.Draft.in_line(new[:, 1:]))
        wanted = drafter.draft(fresh, batch.commit([range(3)], [bench.new[:3]]), bench.proposals)
    assert torch.equal(kept[0], wanted)


@torch.inference_mode()
def test_a_step_of_a_tree_has_that_many_rows(monkeypatch):
    target, rows = hf_target("Llama"), []
    drafter = bound_drafter("hybrid-1", target)
    step = drafter.forward_step
    monkeypatch.setattr(drafter, "forward_step", lambda state, tokens, k: rows.append((k, len(tokens))) or step(state, tokens, k))
    bench = latency._Bench(target, drafter, 5, 2, 3)
    with target.watch(bench.needs.hidden_layers) as outputs:
        bench.prepare(outputs)
        bench.step(4)
        bench.step(1)
    assert rows == [(1, 4), *((k, 1) for k in range(1, latency.STEPS + 1))]


def test_a_chains_step_is_the_mean_of_its_steps(monkeypatch):
    target = hf_target("Llama")
    monkeypatch.setattr(latency, "seconds", lambda work, device: 12.0)
    table = latency.measure(target, [measured("hidden_only-1", target)], SMALL, DraftingConfig())
    assert {p.size: p.seconds for p in table.drafters[0].step.points} == {1: 12.0 / latency.STEPS, 3: 12.0}


def test_sizes_take_turns_and_warm_up_is_not_counted():
    calls = []

    def job(size: int) -> float:
        calls.append(size)
        return float(len(calls))

    found = latency.alternating({1: job, 2: job}, SMALL.model_copy(update={"warm_up": 2, "repeats": 3}))
    assert calls == [1, 1, 2, 2, 1, 2, 2, 1, 1, 2]
    assert (found[1].seconds, found[2].seconds) == (8.0, 7.0)


def test_random_weights_stand_for_a_drafter_that_is_not_trained(tiny_target, tmp_path, capsys):
    options = {
        "name": "one", "work": tmp_path, "target": {"path": tiny_target, "device": "cpu", "dtype": "fp32"},
        "train": {"drafter": {"family": "kv_block", "block_size": 4, "depth": 1}, "draft_vocab_size": 50, "objective": {"steps": 3}},
        "bench": {"latency": SMALL.model_dump(), "threads": 1},
    }  # fmt: skip
    threads = torch.get_num_threads()
    table = latency.run(Recipe.model_validate(options), tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table
    assert "random weights" in capsys.readouterr().out
    assert (table.drafters[0].name, table.drafters[0].block_size, table.threads) == ("one", 4, 1)
    assert torch.get_num_threads() == threads


def test_a_context_beyond_the_targets_is_refused():
    with pytest.raises(ConfigError, match=r"bench\.latency\.contexts=\[90\]: with 7 new tokens beyond the target's context of 96; use at most 89"):
        latency.measure(hf_target("Llama"), [], SMALL.model_copy(update={"contexts": (90,), "widths": (1, 7)}), DraftingConfig())


@pytest.mark.parametrize(("context", "size"), [(10, 1), (30, 8), (10, 6), (17, 4), (25, 5.5)])
def test_between_points_seconds_are_linear(context, size):
    (found,), outside = surface().at(context, [size])
    assert found == pytest.approx(plane(context, size)) and not outside


def test_it_is_the_neighbours_that_count():
    bent = Surface(tuple(Point(s, s, s, 10, n) for n, s in ((1, 1.0), (4, 1.0), (8, 3.0))))
    np.testing.assert_allclose(bent.at(10, [[2, 4], [6, 8]])[0], [[1.0, 1.0], [2.0, 3.0]])


@pytest.mark.parametrize(("context", "nearest"), [(3, 10), (1000, 30)])
def test_outside_the_contexts_the_nearest_answers_and_says_so(context, nearest):
    (found,), outside = surface().at(context, [4])
    assert found == pytest.approx(plane(nearest, 4)) and outside


@pytest.mark.parametrize("size", [0.5, 9])
def test_outside_the_sizes_nothing_is_said(size):
    with pytest.raises(KvshotError, match=rf"sizes 1 to 8, asked for {size:g} to {size:g}"):
        surface().at(10, [size])


def test_a_timing_is_median_and_quartiles():
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict:
    target = hf_target("Llama")
    file = tmp_path_factory.mktemp("table") / "table.json"
    latency.measure(target, [measured("hidden_only-1", target)], SMALL, DraftingConfig()).save(file)
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(format="kvshot-latency/9"), r"expected a latency table of format 'kvshot-latency/1', found 'kvshot-latency/9'"),
        (lambda t: t.pop("forward"), r"not a latency table: forward: field required"),
        (lambda t: t.update(extra=1), r"not a latency table: extra: "),
        (lambda t: t.update(threads="two"), r"not a latency table: threads: .*found 'two'"),
        (lambda t: t["forward"]["points"].pop(), r"forward: expected every context with every size; context 21, size 6 is missing"),
        (lambda t: t["forward"]["points"].append(t["forward"]["points"][0]), r"forward: expected points, no two of the same"),
        (lambda t: t["forward"].update(points=[]), r"forward: expected points"),
        (lambda t: [p.update(size=p["size"] + 1) for p in t["forward"]["points"]], r"forward: expected size 1 among the measured ones"),
        (lambda t: t["drafters"][0]["first"]["points"][0].update(seconds=-1.0), r"drafters\[0\] \(hidden_only-1\): first: context 9, size 1: .*negative"),
        (lambda t: t["drafters"][0]["step"]["points"][0].update(low=9e9), r"step: context 9, size 1: expected low <= seconds <= high"),
        (lambda t: t["drafters"][0].update(step=None), r"expected either a block_size or the latencies of a step"),
        (lambda t: t["drafters"][0].update(overhead={}), r"overhead: expected chain"),
    ],
)
def test_a_table_that_is_none_is_refused(change, said, stored, tmp_path):
    table = json.loads(json.dumps(stored))
    change(table)
    (tmp_path / "table.json").write_text(json.dumps(table))
    with pytest.raises(KvshotError, match=rf"table\.json: .*{said}"):
        LatencyTable.load(tmp_path / "table.json")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_file_that_is_no_json_object_is_refused(text, tmp_path):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(KvshotError, match=r"table\.json"):
        LatencyTable.load(Path(tmp_path / "table.json"))
