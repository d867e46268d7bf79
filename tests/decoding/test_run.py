"""`kvshot decode`: what it measures, what it writes, what it refuses."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvshot_ds.config import DraftingConfig, Recipe, SamplingConfig
from kvshot_ds.decoding import run as module
from kvshot_ds.decoding.acceptance import conditional_counts, joint_counts
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.decoding.prompts import Prompt, read_prompts, reference, stop_tokens
from kvshot_ds.decoding.rounds import Decoded, Round
from kvshot_ds.decoding.run import Compared, Comparison, difference, margin, run, summary, tied
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.report.gather import read_run
from kvshot_ds.target import Target, load_geometry, weights_digest
from tests import toys
from tests.decoding.models import bound_drafter, hf_target, prompt, script

GREEDY = SamplingConfig()
PROMPTS = 3


def conversation(number: int, size: int = 12, answer: int = 5) -> dict[str, object]:
    tokens = [1, *(40 + (7 * number + 3 * i) % 90 for i in range(size + answer - 1))]
    return {"id": f"c{number}", "messages": [], "tokens": tokens, "turn": [0] * size + [1] * answer, "source": "test"}


def save_random(folder: Path, target: Path, name: str, digest: str | None = None, seed: int = 0) -> None:
    g = load_geometry(target)
    drafter = build_drafter(toys.FAMILIES[name], g, 64)
    drafter.reset(seed)
    drafter.set_vocab(torch.arange(36, 100))
    save_drafter(folder, drafter, DrafterInfo(toys.FAMILIES[name], g, 64, "tiny", digest or weights_digest(target), {}), torch.float32)


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> Recipe:
    write(tmp_path / "work", [conversation(i) for i in range(PROMPTS)])
    save_random(tmp_path / "work/runs/mine/drafter", tiny_target, "hybrid-1")
    return Recipe(
        name="mine", work=tmp_path / "work", target={"path": tiny_target, "dtype": "bf16", "device": "cpu"},
        decode={"max_prompts": PROMPTS, "max_new_tokens": 10, "drafting": {"length": 3}}, eval={"bootstrap": 100},
    )  # fmt: skip


def write(work: Path, conversations: list[dict[str, object]]) -> Path:
    path = work / "prepared/heldout.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return path


def changed(recipe: Recipe, **decode: object) -> Recipe:
    return recipe.model_copy(update={"decode": recipe.decode.model_copy(update=decode)})


def test_decodes_losslessly_and_writes_what_the_report_reads(recipe, capsys):
    (result,) = run(recipe).values()
    assert json.loads((recipe.run_dir / "decode.json").read_text()) == result
    assert result["lossless"] == {"against": "generate", "why": "", "identical": PROMPTS, "different": 0, "cases": []} and result["name"] == "mine"
    assert (result["prompts"], result["max_new_tokens"], result["strategy"], result["levels"], result["dtype"]) == (PROMPTS, 10, "chain", 3, "fp32")
    verifications = result["target_forwards"] - PROMPTS
    assert sum(result["histogram"]) == verifications and len(result["histogram"]) == 4
    assert len(result["joint"]) == len(result["conditional"]) == 3 and result["conditional"][0]["value"] == result["joint"][0]["value"]
    assert result["tau"]["value"] == pytest.approx((result["tokens"] - PROMPTS) / verifications)
    assert 0 < result["tokens"] <= 10 * PROMPTS and 0 < result["nodes"] <= 3
    seconds = result["seconds"]
    assert min(seconds.values()) > 0 and seconds["draft"] + seconds["verify"] + seconds["other"] == pytest.approx(seconds["drafted"])
    assert result["tokens_per_second"]["drafted"] == pytest.approx(result["tokens"] / seconds["drafted"])
    found = read_run(recipe.run_dir).decoding
    assert found.identical == PROMPTS and found.drafted_by == "chain of 3"
    said = capsys.readouterr().out
    assert "mine" in said and f"{PROMPTS} of {PROMPTS}" in said


def test_batches_count_their_time_once_and_change_no_text(recipe):
    (one,) = run(recipe).values()
    (many,) = run(changed(recipe, batch=2)).values()
    same = ("tokens", "histogram", "tau", "joint", "lossless", "target_forwards")
    assert {key: many[key] for key in same} == {key: one[key] for key in same} and many["batch"] == 2
    seconds = many["seconds"]
    assert seconds["draft"] + seconds["verify"] < seconds["drafted"], "summed over the prompts of a batch it would be more"


@pytest.mark.parametrize("drafting", [{"strategy": "dynamic_tree", "length": 3, "top_k": 2, "nodes": 5}, {"strategy": "static_tree", "branching": (2, 1)}])
def test_trees_are_measured_by_level(recipe, drafting):
    (result,) = run(changed(recipe, drafting=DraftingConfig(**drafting))).values()
    levels = 2 if "branching" in drafting else 3
    assert result["strategy"] == drafting["strategy"] and result["levels"] == len(result["joint"]) == levels and result["lossless"]["identical"] == PROMPTS
    assert result["nodes"] > 2 and len(result["histogram"]) == levels + 1


@pytest.mark.parametrize(
    ("sampling", "drafting", "against"),
    [
        ({"scheme": "coupled", "top_k": 20}, {"length": 3}, "own loop"),
        ({"scheme": "rejection"}, {"strategy": "dynamic_tree", "length": 3, "top_k": 2, "nodes": 5}, "own loop"),  # a tree's drafts are not drawn
        ({"scheme": "rejection"}, {"length": 3}, None),
    ],
)
def test_sampled_text_is_compared_where_it_is_the_targets_own(recipe, capsys, sampling, drafting, against):
    made = changed(recipe, sampling=SamplingConfig(temperature=0.9, seed=5, **sampling), drafting=DraftingConfig(**drafting))
    (result,) = run(made).values()
    lossless = result["lossless"]
    assert lossless["against"] == against and lossless["different"] == 0 and lossless["identical"] == (PROMPTS if against else 0)
    said = capsys.readouterr().out
    assert ("not compared token for token" in said) == ("not comparable" in said) == bool(lossless["why"]) == (against is None)


def test_every_drafter_into_its_own_folder_and_a_rerun_does_nothing(recipe, tiny_target, tmp_path, capsys):
    save_random(tmp_path / "other/drafter", tiny_target, "kv_only-1")
    save_random(tmp_path / "exported", tiny_target, "hidden_only-1")
    both = changed(recipe, drafters=(tmp_path / "other", tmp_path / "exported"))
    first = run(both)
    assert [r["name"] for r in first.values()] == ["other", "exported"]
    assert (tmp_path / "other/decode.json").is_file() and (tmp_path / "exported/decode.json").is_file()
    assert not (recipe.run_dir / "decode.json").exists()
    capsys.readouterr()
    assert run(both) == first
    assert capsys.readouterr().out.count("already decoded") == 2
    save_random(tmp_path / "other/drafter", tiny_target, "kv_only-1", seed=1)
    run(changed(both, drafters=(tmp_path / "exported", tmp_path / "other/drafter")))
    assert capsys.readouterr().out.count("already decoded") == 1, "new weights are decoded anew, and only they"
    assert run(changed(both, max_new_tokens=4, drafters=(tmp_path / "other",)))[str(tmp_path / "other")]["max_new_tokens"] == 4


def test_a_difference_is_reported_with_its_place_and_margin(recipe, monkeypatch, capsys):
    """As if `generate` had taken another token at one place: the case names both and how far that one lies below the best."""
    plain = module.reference

    def bent(target, tokens, length, stop):
        out = plain(target, tokens, length, stop)
        return [*out[:2], out[2] + 1, *out[3:]] if tokens[1] == conversation(1)["tokens"][1] and length == 10 else out

    monkeypatch.setattr(module, "reference", bent)
    with pytest.raises(KvshotError, match=r"not lossless.*c1 \(margin"):
        run(recipe)
    result = read_json(recipe.run_dir / "decode.json")  # written all the same
    assert (result["lossless"]["identical"], result["lossless"]["different"]) == (PROMPTS - 1, 1)
    (case,) = result["lossless"]["cases"]
    assert case["id"] == "c1" and case["position"] == 2 and case["alone"] == case["drafted"] + 1
    model = Target.load(recipe.target.model_copy(update={"dtype": "fp32"})).model
    tokens = conversation(1)["tokens"][:12]
    for _ in range(2):
        tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    logits = model(torch.tensor([tokens])).logits[0, -1]
    assert case["margin"] == pytest.approx(float(logits.max() - logits[case["alone"]]), abs=1e-4) and case["margin"] > 0
    assert "c1 differs at new token 2" in capsys.readouterr().out


def test_an_output_that_ends_early_is_a_difference():
    target, p = hf_target("Llama"), prompt(9, 2)
    full = reference(target, p, 6, ())
    assert difference(target, p, full, full, GREEDY, 0) is None
    case = difference(target, p, full, full[:4], GREEDY, 0)
    assert (case["position"], case["drafted"], case["alone"]) == (4, full[4], None)
    assert not tied(case) and margin(case) == "one text ended"


def test_the_margin_is_that_of_the_token_that_was_given():
    """Two best tokens that tie excuse each other, not a third one."""
    target, p = hf_target("Llama"), prompt(9, 2)
    own = reference(target, p, 4, ())
    with torch.inference_mode():
        logits = target.forward(torch.tensor([[*p, *own[:3]]]))[0, -1]
    for token in (t for t in range(toys.VOCAB) if t != own[3]):
        case = difference(target, p, [*own[:3], token], own, GREEDY, 0)
        assert case["margin"] == pytest.approx(float(logits.max() - logits[token]), abs=1e-5) and tied(case) == (case["margin"] <= 1e-2)


def test_the_margin_of_a_sample_is_that_of_its_noisy_choice():
    """The best perturbed token is the one that was drawn; the margin leads to the next best."""
    target, p, sampling = hf_target("Llama"), prompt(9, 2), SamplingConfig(temperature=1.0, seed=3)
    alone = Engine(target, None, DraftingConfig(), sampling).decode([p], 4, (), [7])[0].tokens
    case = difference(target, p, [*alone[:3], (alone[3] + 1) % toys.VOCAB], alone, sampling, 7)
    assert case["position"] == 3 and case["alone"] == alone[3] and case["margin"] > 0
    assert case["margin"] != pytest.approx(difference(target, p, [*alone[:3], 0 if alone[3] else 1], alone, sampling, 8)["margin"]), "other noise"


def test_order_alternates_and_both_ways_are_warmed_up(recipe, monkeypatch):
    calls = []
    plain, drafted = module.reference, Engine.decode
    monkeypatch.setattr(module, "reference", lambda *a: calls.append(("g", a[2])) or plain(*a))
    monkeypatch.setattr(Engine, "decode", lambda *a: calls.append(("d", a[2])) or drafted(*a))
    run(recipe)
    assert calls == [("d", 8), ("g", 8), ("d", 10), ("g", 10), ("g", 10), ("d", 10), ("d", 10), ("g", 10)]


def test_drafter_of_another_target_is_refused(recipe, tiny_target):
    save_random(recipe.run_dir / "drafter", tiny_target, "hybrid-1", digest="0" * 64)
    with pytest.raises(ConfigError, match=r"trained against the target 'tiny' \(digest 0000.*not the one in"):
        run(recipe)


def test_missing_things_are_refused_by_name(recipe):
    path = recipe.prepared_dir / "heldout.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"heldout\.jsonl: no held-out conversations.*heldout_fraction"):
        run(recipe)
    path.unlink()
    with pytest.raises(ConfigError, match="kvshot prep"):
        run(recipe)
    with pytest.raises(KvshotError, match="no trained drafter here"):
        run(recipe.model_copy(update={"name": "unknown"}))
    with pytest.raises(ConfigError, match="no such folder"):
        run(recipe.model_copy(update={"target": recipe.target.model_copy(update={"path": recipe.work / "nowhere"})}))


def test_prompts_end_before_the_first_answer_and_the_skipped_ones_are_told(recipe, tmp_path):
    two_turns = conversation(3) | {"turn": [0] * 4 + [1] * 3 + [0] * 4 + [2] * 6}
    silent, headless = conversation(4) | {"turn": [0] * 17}, conversation(5) | {"turn": [1] * 17}
    path = write(tmp_path, [silent, two_turns, conversation(6, size=40), headless, conversation(7), conversation(8)])
    prompts, skipped = read_prompts(path, changed(recipe, max_prompts=2).decode, context=32)
    assert [(p.id, len(p.tokens)) for p in prompts] == [("c3", 4), ("c7", 12)]
    assert prompts[0].tokens == tuple(two_turns["tokens"][:4])
    assert [s["id"] for s in skipped] == ["c4", "c6", "c5"]
    assert "no assistant turn" in skipped[0]["reason"] and "exceed the target's context of 32" in skipped[1]["reason"]
    assert [p.id for p in read_prompts(path, changed(recipe, max_new_tokens=20).decode, context=32)[0]] == ["c3", "c7", "c8"]
    with pytest.raises(ConfigError, match="none of the 6 held-out conversations gives a prompt"):
        read_prompts(path, changed(recipe, max_new_tokens=32).decode, context=32)
    path.write_text(json.dumps(conversation(0)) + '\n{"id": 1}\n')
    with pytest.raises(KvshotError, match=r"heldout\.jsonl:2: .*KeyError: 'tokens'"):
        read_prompts(path, recipe.decode, context=32)


def test_skipped_prompts_stand_in_the_result(recipe):
    write(recipe.work, [conversation(0, size=2045), *(conversation(i) for i in range(PROMPTS))])
    (result,) = run(recipe).values()
    assert result["prompts"] == PROMPTS and [s["id"] for s in result["skipped"]] == ["c0"]


def test_stop_tokens(tiny_target):
    target = Target.load(Recipe(name="x", work=".", target={"path": tiny_target, "dtype": "fp32", "device": "cpu"}).target)
    assert stop_tokens(target) == {2}
    target.model.generation_config.eos_token_id = [2, 5]
    assert stop_tokens(target) == {2, 5}
    target.model.generation_config.eos_token_id = None
    assert stop_tokens(target) == {target.tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_reference_is_the_plain_argmax_whatever_generation_config_says():
    target, p = hf_target("Llama"), prompt(9, 2)
    tokens = list(p)
    for _ in range(8):
        tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
    settings = target.model.generation_config
    settings.update(repetition_penalty=5.0, do_sample=True, temperature=3.0, no_repeat_ngram_size=1, max_length=3)
    settings.update(eos_token_id=tokens[10], suppress_tokens=tokens[9:])
    assert reference(target, p, 8, ()) == tokens[9:]
    assert target.model.generation_config is settings


def rounds(*committed: tuple[int, int, int]) -> Decoded:
    """(tokens, drafted, accepted) of each round after the prefill."""
    made = [Round((0,), 0, 0, 0, 0.0, 0.5), *(Round((0,) * n, drafted, drafted, accepted, 0.25, 0.5) for n, drafted, accepted in committed)]
    return Decoded(tuple(made), 10.0)


@pytest.mark.parametrize(
    ("decoded", "right", "counted"),
    [
        (rounds((4, 3, 3), (1, 3, 0), (3, 3, 2)), [2, 2, 1], [3, 3, 3]),
        # ends on a stop token, an accepted draft: of the last round one step is known; of the round before it, which failed at once, two
        (rounds((1, 3, 0), (1, 3, 1)), [1, 0, 0], [2, 1, 0]),
        # ends at max_new_tokens: the last rounds drafted 1 and 0
        (rounds((3, 3, 2), (1, 1, 0), (1, 0, 0)), [1, 1, 0], [2, 1, 1]),
        (rounds(), [0, 0, 0], [0, 0, 0]),
    ],
)
def test_joint_counts_by_hand(decoded, right, counted):
    assert joint_counts(decoded, 3) == (right, counted)


@pytest.mark.parametrize("stop", [False, True])
def test_joint_counts_follow_the_rule_of_heldout_rows(stop):
    """Counted again from the finished text: step k of a round counts iff its label lies in the answer and it was drafted."""
    target, p, k_max = hf_target("Llama"), prompt(9, 2), 7
    whole = reference(target, p, 30, ())
    want = whole[: max(map(whole.index, whole)) + 1] if stop else whole  # up to the last token that is new
    cut_short = 0
    for seed in range(3):
        drafter, rng = bound_drafter("kv_only-1", target), random.Random(seed)
        log = script(drafter, p + whole, lambda: rng.random() < 0.2)  # noqa: B023
        (out,) = Engine(target, drafter, DraftingConfig(length=k_max)).decode([p], 30, want[-1:] if stop else ())
        assert out.tokens == want
        text, right, counted = p + want, [0] * k_max, [0] * k_max
        for seen in log:
            for k in range(len(seen.proposed)):
                if seen.anchor + 2 + k < len(text):
                    counted[k] += 1
                    right[k] += seen.proposed[: k + 1] == text[seen.anchor + 2 : seen.anchor + 3 + k]
        assert joint_counts(out, k_max) == (right, counted)
        cut_short += counted[0] - counted[-1]
    assert cut_short


def test_conditional_counts_ask_only_what_was_reached():
    decoded = rounds((1, 3, 0), (3, 3, 2), (4, 3, 3), (4, 3, 3))
    assert joint_counts(decoded, 3) == ([3, 3, 2], [4, 4, 4])
    assert conditional_counts([decoded, rounds((1, 3, 0), (3, 3, 3))], 3) == ([4, 4, 3], [6, 4, 4])


def test_summary_adds_up(recipe):
    target, p = hf_target("Llama"), Prompt("x", (1, 2))
    one, two = rounds((4, 3, 3), (2, 3, 1)), rounds((1, 3, 0))

    def of(*decoded: Decoded) -> dict[str, object]:
        each = tuple(Compared(p, i, d, d.tokens) for i, d in enumerate(decoded))
        return summary(recipe, target, Comparison(each, drafted=20.0, draft=0.75, verify=2.5, alone=6.0))

    s = of(one, two)
    assert s["tau"]["value"] == pytest.approx(7 / 3) and s["tau"]["low"] <= 7 / 3 <= s["tau"]["high"]
    assert s["histogram"] == [1, 1, 0, 1] and s["tokens"] == 9 and s["target_forwards"] == 5 and s["levels"] == 3 and s["nodes"] == 3
    assert [(rate["num"], rate["den"]) for rate in s["joint"]] == [(2, 3), (1, 2), (1, 1)]
    assert [(rate["num"], rate["den"]) for rate in s["conditional"]] == [(2, 3), (1, 2), (1, 1)]
    assert s["seconds"] == {"drafted": 20.0, "alone": 6.0, "draft": 0.75, "verify": 2.5, "other": 16.75}
    assert s["tokens_per_second"] == {"drafted": pytest.approx(9 / 20), "alone": pytest.approx(9 / 6)}
    alone = of(replace(two, rounds=two.rounds[:1]))
    assert alone["tau"] == {"value": None, "low": None, "high": None} and alone["joint"] == alone["conditional"] == []
