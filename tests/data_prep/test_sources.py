"""Every layout in, every kind of damage quarantined with file, line and reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_prep.sources import Conversation, Quarantined, read
from kvshot_ds.config import SourceConfig
from kvshot_ds.errors import ConfigError

SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": " Hi "}, {"from": "gpt", "value": "Hello."}]}
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PARTS}]}


def take(path: Path, questions_only: bool = False, layout: str = "auto") -> list[Conversation | Quarantined]:
    return list(read(SourceConfig.model_validate({"path": path, "format": layout}), questions_only))


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("layout", ["auto", "explicit"])
def test_all_layouts_give_the_same_conversation(tmp_path: Path, layout: str) -> None:
    files = {
        "sharegpt": [lines(tmp_path / "a.jsonl", SHAREGPT), tmp_path / "a.json"],
        "messages": [lines(tmp_path / "b.jsonl", MESSAGES)],
    }
    (tmp_path / "a.json").write_text(json.dumps([SHAREGPT], indent=2))
    found = [take(path, layout=name if layout == "explicit" else "auto") for name, paths in files.items() for path in paths]
    assert all(len(items) == 1 for items in found)
    conversations = [items[0] for items in found]
    assert all(isinstance(c, Conversation) for c in conversations)
    assert len({c.id for c in conversations}) == 1
    assert conversations[0].messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."})
    assert [c.source for c in conversations] == ["a.jsonl:1", "a.json:2", "b.jsonl:1"]


def test_prompts_plain_and_json(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfOne\r\n\n  [Two] {x}  \n")
    plain = take(tmp_path / "p.txt", questions_only=True)
    assert [(c.messages[0]["content"], c.line) for c in plain] == [("One", 1), ("[Two] {x}", 3)]
    json_lines = take(lines(tmp_path / "p.jsonl", {"prompt": "One"}, {"prompt": ""}), questions_only=True)
    assert json_lines[0].id == plain[0].id
    assert isinstance(json_lines[1], Quarantined) and json_lines[1].reason == "turn 1: empty"


def test_ids_depend_on_the_words_alone(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Hello."}]}
    one = {c.id for c in take(lines(tmp_path / "1.jsonl", MESSAGES, other))}
    two = {c.id for c in take(lines(tmp_path / "2.jsonl", other, SHAREGPT))}
    assert one == two and len(one) == 2
    assert {c.id for c in take(tmp_path / "1.jsonl", questions_only=True)}.isdisjoint(one), "with and without answers are different conversations"


def test_questions_only_drops_answers_and_keeps_a_trailing_question(tmp_path: Path) -> None:
    turns = [("system", "Be kind."), ("user", "A"), ("assistant", ""), ("user", "B")]
    path = lines(tmp_path / "m.jsonl", {"messages": [{"role": r, "content": c} for r, c in turns]})
    (found,) = take(path, questions_only=True)
    assert [(m["role"], m["content"]) for m in found.messages] == [("system", "Be kind."), ("user", "A"), ("user", "B")]


def test_a_trailing_question_without_regeneration_is_left_out(tmp_path: Path) -> None:
    record = {"messages": [*MESSAGES["messages"], {"role": "user", "content": "More?"}]}
    (found,) = take(lines(tmp_path / "m.jsonl", record))
    assert [m["role"] for m in found.messages] == ["user", "assistant"]


BAD = {
    "{broken": "not readable as JSON",
    "[" * 100_000: "not readable as JSON",
    '"text"': "expected a JSON object, found str",
    '{"text": 1}': "expected one of the keys",
    '{"messages": []}': "empty conversation",
    '{"messages": "hi"}': "to be a list of objects",
    '{"messages": [{"role": "wizard", "content": "x"}]}': "turn 1: unknown role 'wizard'",
    '{"messages": [{"role": ["user"], "content": "x"}]}': "turn 1: unknown role",
    '{"messages": [{"role": "user", "content": "x"}]}': "no assistant turn",
    '{"messages": [{"role": "assistant", "content": "x"}]}': "cannot begin with assistant",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]}': "turn 2: user cannot follow user",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}': "turn 2: system cannot follow user",
    '{"messages": [{"role": "user", "content": "  "}, {"role": "assistant", "content": "y"}]}': "turn 1: empty",
    '{"messages": [{"role": "user", "content": null}]}': "turn 1: expected text, found NoneType",
    '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}': "expected text parts only",
    '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{}]}]}': "tool calls are not supported",
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}': "turn 1: not UTF-8",
}


def test_each_kind_of_bad_record_is_quarantined_and_the_good_ones_kept(tmp_path: Path) -> None:
    path = lines(tmp_path / "bad.jsonl", MESSAGES, *BAD, MESSAGES)
    found = take(path)
    assert isinstance(found[0], Conversation) and isinstance(found[-1], Conversation)
    for n, (item, (record, reason)) in enumerate(zip(found[1:-1], BAD.items(), strict=True), 2):
        assert isinstance(item, Quarantined), record[:80]
        assert reason in item.reason, item.reason
        assert (item.file, item.line, item.record) == (str(path), n, record[:200])


def test_bytes_that_are_no_utf8_cost_one_line(tmp_path: Path) -> None:
    good = json.dumps(MESSAGES).encode()
    (tmp_path / "x.jsonl").write_bytes(good.replace(b"Hi", b"H\xff") + b"\n" + b"\xfe{}\n" + good + b"\n")
    found = take(tmp_path / "x.jsonl")
    assert [type(i).__name__ for i in found] == ["Quarantined", "Quarantined", "Conversation"]
    assert found[0].reason == "turn 1: not UTF-8"
    found[0].record.encode()  # can be written
    (tmp_path / "p.txt").write_bytes(b"ok\nH\xff\n")
    assert [type(i).__name__ for i in take(tmp_path / "p.txt", questions_only=True)] == ["Conversation", "Quarantined"]


def test_a_list_that_is_cut_off_keeps_what_is_whole(tmp_path: Path) -> None:
    text = json.dumps([SHAREGPT, SHAREGPT, SHAREGPT], indent=1)
    (tmp_path / "cut.json").write_text(text[: text.rindex("Hello")])
    found = take(tmp_path / "cut.json")
    assert [type(i).__name__ for i in found] == ["Conversation", "Conversation", "Quarantined"]
    assert "to the end of the file" in found[2].reason
    assert text.splitlines()[found[2].line - 1].strip() == "{"
    (tmp_path / "open.json").write_text(json.dumps([SHAREGPT])[:-1])
    assert take(tmp_path / "open.json")[1].reason == "the list is not closed: the file is cut off"
    (tmp_path / "more.json").write_text(json.dumps([SHAREGPT]) + " {}")
    assert take(tmp_path / "more.json")[1].reason == "text after the end of the list; a file of one record a line is named .jsonl"


def test_a_file_that_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(SourceConfig(path=path, format="auto"), False)
    (tmp_path / "empty.jsonl").touch()
    assert take(tmp_path / "empty.jsonl") == []


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.data"])
def test_records_are_known_by_their_content_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    (found,) = take(lines(tmp_path / name, SHAREGPT))
    assert isinstance(found, Conversation) and found.messages[0]["content"] == "Hi"


def test_a_line_that_is_a_list_costs_one_line(tmp_path: Path) -> None:
    found = take(lines(tmp_path / "a.jsonl", "[]", SHAREGPT, MESSAGES))
    assert [type(f) for f in found] == [Quarantined, Conversation, Conversation] and found[0].line == 1


def test_a_bad_entry_of_a_list_on_one_line_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([SHAREGPT, {"conversations": []}, MESSAGES]))
    found = take(tmp_path / "a.json")
    assert isinstance(found[1], Quarantined) and (found[1].line, found[1].reason) == (1, "entry 2: empty conversation")
