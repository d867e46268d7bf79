"""Questions in training data: found by half of their words in rows, not by a phrase in common; the line is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshot_ds.bench.overlap import Hit, Index, find, training_data
from kvshot_ds.bench.questions import Question
from kvshot_ds.config import dump_recipe
from kvshot_ds.errors import KvshotError
from tests.bench import made


def question(number: int, text: str) -> Question:
    return Question(str(number), "set", f"q.jsonl:{number}", (text,), (1, 2))


def slow_share(asked: str, conversation: str, n: int = 13) -> float:
    """With plain sets of tuples of words."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    return len(runs(asked) & runs(conversation)) / len(runs(asked))


def test_shares_are_those_of_plain_sets_of_words():
    asked = [made.text(1), made.text(2), made.text(1).upper().replace(" ", ",\n")]
    words = made.text(1).split()
    told = f"Well: {' '.join(words[:17])}! And {' '.join(words[5:22])}."
    found = Index.build(asked).shares([("user", told)])
    assert found == {0: pytest.approx(slow_share(asked[0], told)), 2: pytest.approx(slow_share(asked[0], told))}
    assert 0 < found[0] < 1


@pytest.mark.parametrize(
    ("asked", "told", "share"),
    [
        ("What is the capital of France?", [("user", "Tell me, what is the CAPITAL of france and why")], 1.0),  # 6 words, within a message
        ("What is the capital of France?", [("user", "What is the capital"), ("assistant", "of France?")], None),  # over two messages
        ("Tell a joke", [("user", "tell a joke!")], 1.0),  # 3 words: all of a user turn
        ("Tell a joke", [("user", "tell a joke about cats")], None),
        ("Tell a joke", [("assistant", "tell a joke")], None),
        ("?!", [("user", "?!")], None),  # no words at all
    ],
)
def test_short_questions(asked, told, share):
    assert Index.build([asked]).shares(told) == ({} if share is None else {0: share})


def test_the_first_line_that_holds_a_question_is_named(tmp_path):
    head = " ".join(made.text(1).split()[:16])  # a phrase in common: 4 of 18 runs
    lines = [
        made.conversation(7, asked=f"{head} {made.text(50)}"),
        made.conversation(8),
        made.conversation(1),
        made.conversation(1, asked=f"Again: {made.text(1)}"),
    ]
    file = made.write_lines(tmp_path / "train.jsonl", lines)
    hits = find([question(0, made.text(3)), question(1, made.text(1))], file, tokenizer=None)
    assert hits == [Hit("set/1", "q.jsonl:1", f"{file}:3", 1.0)]


def test_conversations_without_text_are_read_from_their_tokens(tmp_path):
    class Tokenizer:
        def decode(self, tokens, skip_special_tokens):
            return made.text(tokens[0]) if skip_special_tokens else ""

    record = made.conversation(1) | {"messages": [], "tokens": [4, 5]}
    file = made.write_lines(tmp_path / "train.jsonl", [record])
    assert [h.line for h in find([question(0, made.text(4))], file, Tokenizer())] == [f"{file}:1"]
    untold = Question("0", "heldout", "h:1", (), (4, 9))  # a prompt without its text, likewise
    assert [h.share for h in find([untold], file, Tokenizer())] == [1.0]
    (tmp_path / "bad.jsonl").write_text('{"tokens": [1]}\n')
    with pytest.raises(KvshotError, match=r"bad\.jsonl:1: expected a conversation as `kvshot prep` writes it"):
        find([untold], tmp_path / "bad.jsonl", Tokenizer())


def test_training_data_is_that_of_each_drafters_own_recipe(tiny_target: Path, tmp_path: Path):
    mine = made.recipe(tiny_target, tmp_path / "work")
    other = made.recipe(tiny_target, tmp_path / "elsewhere")
    (other.run_dir / "recipe.yaml").write_text(dump_recipe(other))
    gone = tmp_path / "gone/run"
    gone.mkdir(parents=True)
    (gone / "recipe.yaml").write_text(dump_recipe(mine.model_copy(update={"work": tmp_path / "nowhere"})))
    folders = [mine.run_dir / "drafter", mine.run_dir / "drafter_best", other.run_dir / "drafter", gone / "drafter", tmp_path / "imported"]
    seen, unseen = training_data(mine, folders, ["a", "b", "c", "d", "e"])
    assert seen == {str(mine.prepared_dir / "train.jsonl"): ["a", "b"], str(other.prepared_dir / "train.jsonl"): ["c"]}
    assert unseen["d"].endswith("nowhere/prepared/train.jsonl is not there") and "holds no recipe.yaml" in unseen["e"]
