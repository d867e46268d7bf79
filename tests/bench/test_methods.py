"""Every way to decode gives the same greedy text, and its steps add up to it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from kvshot_ds.bench.memory import peak_of
from kvshot_ds.bench.methods import ASSISTED, GENERATE, LOOKUP, LOOP, Ours, baselines
from kvshot_ds.config import DraftingConfig, SamplingConfig
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import reference
from kvshot_ds.errors import ConfigError
from kvshot_ds.target import Target
from tests.bench import made
from tests.decoding.models import bound_drafter

PROMPT = made.conversation(3)["tokens"][:12]


@pytest.fixture(scope="module")
def recipe(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory):
    return made.recipe(tiny_target, tmp_path_factory.mktemp("methods"), assistant=tiny_target)


@pytest.fixture(scope="module")
def target(recipe):
    return Target.load(recipe.target.model_copy(update={"dtype": "fp32"}))


def methods_of(recipe, target, temperature=0.0):
    sampling = SamplingConfig(temperature=temperature, seed=5)
    sampled = recipe.model_copy(update={"decode": recipe.decode.model_copy(update={"sampling": sampling})})
    drafter = Ours("ours", Engine(target, bound_drafter("hybrid-1", target), DraftingConfig(length=3), sampling))
    return {m.name: m for m in [*baselines(sampled, target), drafter]}


@pytest.mark.parametrize("stops", [False, True])
def test_all_give_the_targets_own_text_in_steps_that_add_up(recipe, target, stops):
    whole = reference(target, PROMPT, 20, ())
    stop = {whole[11]} if stops else set()
    want = reference(target, PROMPT, 20, stop)
    assert len(want) == (whole.index(whole[11]) + 1 if stops else 20)
    methods = methods_of(recipe, target)
    assert list(methods) == [GENERATE, LOOP, LOOKUP, ASSISTED, "ours"]
    for name, method in methods.items():
        started = time.perf_counter()
        trace = method.decode(PROMPT, 0, 20, stop)
        outer = time.perf_counter() - started
        assert list(trace.tokens) == want, name
        assert sum(s.tokens for s in trace.steps) == len(want) and min(s.seconds for s in trace.steps) > 0
        assert 0 < trace.first < sum(s.seconds for s in trace.steps) <= trace.seconds <= outer
        assert (trace.rounds is None) == (name in (GENERATE, LOOKUP, ASSISTED))
        if trace.rounds is not None:
            assert [len(r.tokens) for r in trace.rounds] == [s.tokens for s in trace.steps]
            assert all(r.draft_seconds + r.verify_seconds <= s.seconds for r, s in zip(trace.rounds, trace.steps, strict=True))
        if name in (GENERATE, LOOP):
            assert trace.accepted == [0] * (len(want) - 1)
    assert target.model.generation_config is not None and methods[ASSISTED].weights > 0 == methods[LOOP].weights


def test_an_assistant_that_is_the_target_has_its_drafts_accepted(recipe, target):
    assert max(methods_of(recipe, target)[ASSISTED].decode(PROMPT, 0, 20, ()).accepted) > 0


def test_samples_follow_their_seed_and_not_what_ran_before(recipe, target):
    for method in methods_of(recipe, target, temperature=1.5).values():
        torch.rand(1)
        state = torch.random.get_rng_state()
        first, second, other = (method.decode(PROMPT, number, 12, ()).tokens for number in (0, 0, 1))
        assert first == second != other
        assert torch.equal(torch.random.get_rng_state(), state)


def test_an_assistant_of_another_tokenizer_is_refused(recipe, target, tiny_target, tmp_path):
    other = shutil.copytree(tiny_target, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"bench\.assistant=.*tokenizer is not the target's"):
        baselines(recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"assistant": other})}), target)
    with pytest.raises(ConfigError, match=r"bench\.assistant=.*no such folder"):
        baselines(recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"assistant": tmp_path / "none"})}), target)


def test_peak_memory_begins_anew_for_every_piece_of_work():
    big = peak_of(lambda: torch.ones(1 << 24).sum(), torch.device("cpu"))  # 64 MiB
    small = peak_of(lambda: torch.ones(1 << 10).sum(), torch.device("cpu"))
    if big is None or small is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert 60 << 20 < big.rise < 100 << 20 and small.rise < 8 << 20 and small.total < big.total
