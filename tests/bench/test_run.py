"""`kvshot bench` from recipe to file, on a tiny random target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvshot_ds.bench import run as module
from kvshot_ds.bench.run import names, run
from kvshot_ds.cli import cli
from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.decoding.engine import Engine
from kvshot_ds.errors import ConfigError, KvshotError
from tests.bench import made


@pytest.fixture
def recipe(tiny_target: Path, tmp_path: Path) -> Recipe:
    return made.recipe(tiny_target, tmp_path / "work")


def with_bench(recipe: Recipe, **bench: object) -> Recipe:
    return recipe.model_copy(update={"bench": recipe.bench.model_copy(update=bench)})


def test_measures_everything_in_one_run_and_writes_it(recipe, tiny_target, tmp_path, capsys):
    made.save_random(tmp_path / "block", tiny_target, "dflash-2")
    file = made.write_lines(tmp_path / "mine.jsonl", [{"prompt": ""}, {"prompt": made.text(60, 8)}, {"prompt": made.text(61, 8)}])
    result = run(with_bench(recipe, drafters=(recipe.run_dir, tmp_path / "block"), prompts=(file,), max_prompts=2))
    assert json.loads((recipe.work / "bench/mine.json").read_text()) == result
    methods = {m["name"]: m for m in result["methods"]}
    assert list(methods) == ["generate", "own loop", "prompt lookup", "mine", "block"]
    assert [q["question"] for q in result["questions"]["asked"]] == ["mine/2", "mine/3", "heldout/c0", "heldout/c1"]
    assert [s["reason"] for s in result["questions"]["skipped"]] == ["it is empty"]
    tokens = methods["generate"]["tokens"]
    assert 4 * 2 < tokens <= 40
    for name, m in methods.items():
        assert m["prompts"] == 4 and m["tokens"] == tokens and m["tokens_per_second"] == pytest.approx(tokens / m["seconds"])
        assert (m["lossless"]["identical"], m["lossless"]["different"]) == ((0, 0) if name == "generate" else (4, 0))
        assert set(m["speedup"]) == {"generate", "own loop", "prompt lookup"} - {name}
        assert set(m["by_source"]) == {"mine", "heldout"} and sum(s["tokens"] for s in m["by_source"].values()) == tokens
        assert 0 < m["time_per_token"]["p50"] <= m["time_per_token"]["p95"] and m["first_token"]["p50"] > 0
        assert sum(e["tokens"] for e in m["each"]) == tokens
        if (ours := m["round"]) is not None:
            assert ours["draft"] + ours["verify"] + ours["other"] == pytest.approx(1) and min(ours["verify"], ours["other"]) > 0
    assert methods["generate"]["round"] is None and methods["own loop"]["tau"]["value"] == 1
    assert methods["mine"]["levels"] == 3 and len(methods["mine"]["joint"]) == 3 and sum(methods["mine"]["histogram"]) == methods["mine"]["round"]["count"]
    gain = methods["generate"]["seconds"] / methods["mine"]["seconds"]
    assert methods["mine"]["speedup"]["generate"]["value"] == pytest.approx(gain)
    for name in ("mine", "block"):
        guess = methods[name]["predicted"]["decoding"]
        assert guess["speedup"]["value"] > 0 and guess["tokens"]["value"] == pytest.approx(1 + sum(j["value"] for j in methods[name]["joint"]))
        assert "eval.json" in methods[name]["predicted"]["heldout"]["why"] and methods["generate"]["predicted"] is None
    assert result["overlap"]["hits"] == [] and list(result["overlap"]["unseen"]) == ["block"] and len(result["machine"]["load_before"]) == 3
    said = capsys.readouterr().out
    assert "no question stands in" in said and "block: whether it was trained on these questions is not known" in said
    assert "1 questions were not asked" in said and "tokens/s, x generate, tau by source" in said


def test_the_same_again_is_not_measured_again(recipe, monkeypatch, capsys):
    quick = with_bench(recipe, predict=False, prompt_lookup=False, max_prompts=2, max_new_tokens=4)
    first = run(quick)
    monkeypatch.setattr(module, "measure", lambda *a: pytest.fail("measured again"))
    assert run(quick) == first and "already measured" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run(with_bench(quick, max_new_tokens=5))
    (recipe.run_dir / "eval.json").write_text('{"digest": "of acceptance that a prediction takes"}')
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run(quick)
    (recipe.run_dir / "eval.json").unlink()
    made.save_random(recipe.run_dir / "drafter", recipe.target.path, "hybrid-2")
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        run(quick)


def test_sampled_texts_are_compared_with_our_own_loop_where_that_can_be(recipe):
    quick = with_bench(recipe, predict=False, max_prompts=2, max_new_tokens=6)
    for scheme, against in (("coupled", "own loop"), ("rejection", None)):
        sampling = recipe.decode.sampling.model_copy(update={"temperature": 1.0, "scheme": scheme})
        sampled = quick.model_copy(update={"decode": recipe.decode.model_copy(update={"sampling": sampling})})
        methods = {m["name"]: m["lossless"] for m in run(sampled)["methods"]}
        assert methods["mine"]["against"] == against and methods["mine"]["identical"] == (2 if against else 0)
        assert methods["prompt lookup"]["against"] is None and "drawn anew" in methods["prompt lookup"]["why"]


def test_a_question_in_the_training_data_is_refused_left_out_or_told(recipe, capsys):
    line = f"{made.write_lines(recipe.prepared_dir / 'train.jsonl', [made.conversation(9), made.conversation(2)])}:2"
    quick = with_bench(recipe, predict=False, prompt_lookup=False, max_new_tokens=4)
    with pytest.raises(ConfigError, match=rf"(?s)1 of 4 questions stand in the training data.*heldout/c2 \(.*heldout\.jsonl:3\): {line}, 100%"):
        run(quick)
    left = run(with_bench(quick, overlap="drop"))
    assert [q["question"] for q in left["questions"]["asked"]] == [f"heldout/c{n}" for n in (0, 1, 3)]
    assert left["questions"]["skipped"][0]["reason"] == f"it stands in {line}"
    told = run(with_bench(quick, overlap="warn"))
    assert len(told["questions"]["asked"]) == 4 and told["overlap"]["hits"][0]["line"] == line
    assert "1 questions stand in the training data, and their numbers are too good" in capsys.readouterr().out
    made.write_lines(recipe.prepared_dir / "train.jsonl", [made.conversation(n) for n in range(4)])
    with pytest.raises(ConfigError, match="all 4 questions stand in the training data"):
        run(with_bench(quick, overlap="drop"))


def test_of_two_questions_of_one_id_only_the_one_in_the_training_data_is_left_out(recipe, tmp_path):
    made.write_lines(recipe.prepared_dir / "train.jsonl", [made.conversation(2)])
    asked = [{"id": "1", "prompt": made.text(2)}, {"id": "1", "prompt": "why do zebras have stripes on them"}]
    quick = with_bench(recipe, predict=False, prompt_lookup=False, max_new_tokens=4, heldout=False, prompts=(made.write_lines(tmp_path / "mine.jsonl", asked),))
    with pytest.raises(ConfigError, match="1 of 2 questions stand in the training data"):
        run(quick)
    more = made.write_lines(tmp_path / "mine.jsonl", [*asked, {"id": "2", "prompt": "and do lions have any spots"}])
    left = run(with_bench(quick, prompts=(more,), overlap="drop"))
    assert [s["place"].split(":")[-1] for s in left["questions"]["skipped"]] == ["1"]
    assert [q["place"].split(":")[-1] for q in left["questions"]["asked"]] == ["2", "3"]


def test_a_wrong_token_is_written_and_then_an_error(recipe, monkeypatch, capsys):
    plain = Engine._chosen

    def bent(self, logits, positions, numbers):
        found = plain(self, logits, positions, numbers)
        return torch_where_third(found, positions) if self.drafter is not None else found

    def torch_where_third(found, positions):
        return found.where(positions != 15, (found + 1) % 100)  # the fourth new token

    monkeypatch.setattr(Engine, "_chosen", bent)
    with pytest.raises(KvshotError, match=r"not lossless.*mine: heldout/c0 \(margin"):
        run(with_bench(recipe, predict=False, max_prompts=2))
    result = json.loads((recipe.work / "bench/mine.json").read_text())
    methods = {m["name"]: m["lossless"] for m in result["methods"]}
    assert methods["mine"]["different"] == 2 and methods["own loop"]["different"] == methods["prompt lookup"]["different"] == 0
    assert [(c["position"], c["fault"]) for c in methods["mine"]["cases"]] == [(3, True)] * 2
    assert "differs at new token 3" in capsys.readouterr().out


def test_a_drafter_of_another_target_or_none_is_refused(recipe, tiny_target, tmp_path):
    made.save_random(tmp_path / "foreign", tiny_target, "hybrid-1", digest="0" * 64)
    with pytest.raises(ConfigError, match="was trained against the target 'tiny'"):
        run(with_bench(recipe, drafters=(tmp_path / "foreign",)))
    with pytest.raises(KvshotError, match="no trained drafter here"):
        run(recipe.model_copy(update={"name": "unknown"}))
    with pytest.raises(ConfigError, match="is named more than once"):
        run(with_bench(recipe, drafters=(recipe.run_dir, recipe.run_dir)))


def test_drafters_are_told_apart(tmp_path):
    places = [tmp_path / "a/drafter", tmp_path / "a/drafter_best", tmp_path / "x/b", tmp_path / "y/b", tmp_path / "generate"]
    assert names(places) == ["a", "a/drafter_best", str(tmp_path / "x/b"), str(tmp_path / "y/b"), str(tmp_path / "generate")]


def test_the_command_prints_json_and_measures_or_asks_a_latency_table(recipe, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(with_bench(recipe, max_prompts=2, max_new_tokens=6)))

    def kvshot(*more: str):
        done = CliRunner().invoke(cli, ["bench", str(file), *more])
        assert done.exception is None, done.output
        return done.stdout

    said = json.loads(kvshot("bench.predict=false", "--json"))
    assert said["name"] == "mine" and said["format"] == "kvshot-bench/1" and said["latency"] is None
    table = tmp_path / "table.json"
    small = ("bench.latency.contexts=[16]", "bench.latency.widths=[1,2,4]", "bench.latency.positions=[1,2,4]", "bench.latency.rows=[1]")
    assert f"-> {table}" in kvshot("--latency", str(table), *small)
    joint = [{"num": 3, "den": 4}, {"num": 2, "den": 4}, {"num": 1, "den": 4}]
    (recipe.run_dir / "decode.json").write_text(json.dumps({"joint": joint, "drafting": recipe.decode.drafting.model_dump(mode="json"), "sampling": {}}))
    assert "acceptance of decode.json" in kvshot("--simulate", str(table))
    (told,) = json.loads(kvshot(f"bench.simulate={table}", "--json"))
    assert told["source"] == "decode.json" and len(told["predictions"]) == 3 and told["best"] in told["predictions"]
    both = CliRunner().invoke(cli, ["bench", str(file), "--simulate", str(table), "--latency", str(table)])
    assert isinstance(both.exception, ConfigError)
