"""Question files in their public layouts, as the target is asked; what cannot be asked is listed, what is of another layout is an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvshot_ds.bench.questions import Renderer, read
from kvshot_ds.config.preparation import TemplateConfig
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.target import load_tokenizer
from tests.bench import made

MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post about Hawaii.", "Rewrite it."]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "    return a + b", "test": ""}
GSM8K = {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"}
GSM8K_CASES = {"id": "gsm8k-test-0013", "source": "gsm8k", "prompt": "Two and two?", "expected": "4"}
IFBENCH = {"key": "0", "prompt": "Say kaleidoscope once.", "instruction_id_list": ["count:keywords"], "kwargs": [{}]}


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path):
    return load_tokenizer(tiny_target)


@pytest.fixture
def asked(tiny_target: Path, tmp_path: Path, tokenizer):
    def ask(context: int = 512, **bench):
        return read(made.recipe(tiny_target, tmp_path / "work", **bench), tokenizer, context)

    return ask


def rendered(tokenizer, *messages: tuple[str, str]) -> tuple[int, ...]:
    told = [{"role": role, "content": content} for role, content in messages]
    return tuple(tokenizer.apply_chat_template(told, add_generation_prompt=True, tokenize=True, return_dict=False))


@pytest.mark.parametrize(
    ("option", "record", "id", "text"),
    [
        ("mt_bench", MT_BENCH, "81", "Write a post about Hawaii."),
        ("humaneval", HUMANEVAL, "HumanEval/0", "def add(a, b):\n"),
        ("gsm8k", GSM8K, "1", "Two and two?"),
        ("gsm8k", GSM8K_CASES, "gsm8k-test-0013", "Two and two?"),
        ("ifbench", IFBENCH, "0", "Say kaleidoscope once."),
        ("prompts", {"prompt": "Hello there"}, "1", "Hello there"),
    ],
)
def test_every_public_layout_becomes_the_chat_of_its_question(asked, tmp_path, tokenizer, option, record, id, text):
    file = made.write_lines(tmp_path / "q.jsonl", [record])
    (one,) = asked(heldout=False, **{option: (file,) if option == "prompts" else file}).asked
    assert (one.id, one.source, one.place, one.asked) == (id, "q" if option == "prompts" else option, f"{file}:1", (text,))
    assert one.tokens == rendered(tokenizer, ("user", text))


def test_gzip_and_messages_up_to_the_last_user_turn(asked, tmp_path, tokenizer):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Who are you?"), ("assistant", "left out")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    file = tmp_path / "q.jsonl.gz"
    file.write_bytes(gzip.compress((json.dumps(record) + "\n\n").encode()))
    (one,) = asked(heldout=False, prompts=(file,)).asked
    assert one.asked == ("Hi", "Who are you?") and one.tokens == rendered(tokenizer, *turns[:4])


def test_heldout_prompts_are_the_prepared_tokens_before_the_first_answer(asked):
    found = asked(max_prompts=3)
    assert [q.name for q in found.asked] == ["heldout/c0", "heldout/c1", "heldout/c2"] and not found.skipped
    assert found.asked[1].tokens == tuple(made.conversation(1)["tokens"][:12]) and found.asked[1].asked == (made.text(1),)


def test_what_cannot_be_asked_is_listed_and_the_next_takes_its_place(asked, tmp_path):
    texts = ("  ", "long " * 300, "a <|im_end|> b", "half \ud800", "fine", "also", "not reached")
    records = [{"id": f"q{n}", "prompt": text} for n, text in enumerate(texts)]
    file = made.write_lines(tmp_path / "q.jsonl", records)
    found = asked(context=200, heldout=False, prompts=(file,), max_prompts=2)
    assert [q.id for q in found.asked] == ["q4", "q5"]
    empty, long, special, half = found.skipped
    assert (empty.place, empty.reason) == (f"{file}:1", "it is empty")
    assert "surrogates not allowed" in half.reason
    assert "bench.max_new_tokens=10 exceed the target's context of 200" in long.reason and "special token '<|im_end|>' as text" in special.reason
    with pytest.raises(ConfigError, match=r"none of the 4 questions can be asked; the first, .*q\.jsonl:1: it is empty"):
        asked(context=200, heldout=False, prompts=(made.write_lines(tmp_path / "q.jsonl", records[:4]),))


def test_heldout_conversations_without_a_prompt_are_listed(tiny_target, tmp_path, tokenizer):
    recipe = made.recipe(tiny_target, tmp_path)
    lines = [made.conversation(1) | {"turn": [0] * 17}, made.conversation(2) | {"turn": [1] * 17}, made.conversation(3, size=30), made.conversation(4)]
    file = made.write_lines(recipe.prepared_dir / "heldout.jsonl", lines)
    found = read(recipe, tokenizer, 39)
    assert [q.id for q in found.asked] == ["c4"] and [s.place for s in found.skipped] == [f"{file}:{n}" for n in (1, 2, 3)]
    assert [s.reason[:20] for s in found.skipped] == ["it has no assistant turn"[:20], "nothing stands before"[:20], "a prompt of 30 tokens and"[:20]]


@pytest.mark.parametrize(
    ("option", "record", "error"),
    [
        ("gsm8k", HUMANEVAL, r"gsm8k=.*line 2: expected \{\"question\", \"answer\"\}.*found the keys 'task_id', 'prompt'.*another set's file"),
        ("humaneval", IFBENCH, r"humaneval=.*line 2: expected .*entry_point"),
        ("mt_bench", {"question_id": 1, "category": "x", "turns": [3]}, r"mt_bench=.*line 2: expected .*found 'turns' holding 3"),
        ("prompts", {"text": "x"}, r"prompts=.*line 2: expected \{\"prompt\": text\}.*found the keys 'text'"),
        ("prompts", {"messages": [{"role": "user", "content": ["part"]}]}, r"line 2: expected .*found 'messages' holding"),
        ("prompts", [1], r"line 2: expected a JSON object, found list"),
    ],
)
def test_another_layout_is_refused_with_its_line(asked, tmp_path, option, record, error):
    good = {"gsm8k": GSM8K, "humaneval": HUMANEVAL, "mt_bench": MT_BENCH, "prompts": {"prompt": "x"}}[option]
    file = made.write_lines(tmp_path / "q.jsonl", [good, record])
    with pytest.raises(KvshotError, match=error):
        asked(heldout=False, **{option: (file,) if option == "prompts" else file})


def test_files_that_are_not_there_or_no_json_are_refused(asked, tmp_path):
    with pytest.raises(ConfigError, match=r"bench: no questions: name a file"):
        asked(heldout=False)
    with pytest.raises(ConfigError, match=r"bench\.gsm8k=.*no such file; docs/bench\.md"):
        asked(gsm8k=tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(KvshotError, match=r"bad\.jsonl, line 2: expected a line of JSON"):
        asked(prompts=(tmp_path / "bad.jsonl",))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl: it is empty"):
        asked(prompts=(tmp_path / "empty.jsonl",))


def test_files_of_one_name_keep_their_questions_apart(asked, tmp_path):
    files = tuple(made.write_lines(tmp_path / folder / "q.jsonl", [{"prompt": folder}]) for folder in ("a", "b"))
    assert [q.name for q in asked(heldout=False, prompts=files).asked] == [f"{file}/1" for file in files]


def test_the_options_of_preparation_hold_for_questions(tokenizer, tmp_path):
    told = [{"role": "user", "content": "Hi"}]
    with_system = Renderer(tokenizer, TemplateConfig(system="Be brief."))(told)
    assert tuple(with_system) == rendered(tokenizer, ("system", "Be brief."), ("user", "Hi"))
    (tmp_path / "t.jinja").write_text("Q:{{ messages[0]['content'] }}:{% if enable_thinking %}think{% endif %}")
    own = Renderer(tokenizer, TemplateConfig(jinja=tmp_path / "t.jinja", thinking=True))
    assert tokenizer.decode(own(told)) == "Q:Hi:think"
    with pytest.raises(ConfigError, match="not readable as a Jinja template"):
        Renderer(tokenizer, TemplateConfig(jinja=tmp_path / "none.jinja"))
