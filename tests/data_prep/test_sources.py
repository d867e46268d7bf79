"""Every layout and kind of file in, every kind of damage quarantined with file, line and reason."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import readers
from data_prep.sources import Conversation, Quarantined, evaluation_prompts, read
from kvshot_ds.config import SourceConfig
from kvshot_ds.errors import ConfigError, KvshotError

SHAREGPT = {"id": "x", "conversations": [{"from": "human", "value": " Hi "}, {"from": "gpt", "value": "Hello."}]}
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo."}]
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PARTS}]}
ULTRACHAT = {"id": "0", "data": ["Hi", "Hello."]}
ULTRACHAT_200K = {"prompt": "Hi", "prompt_id": "00ff", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def take(path: Path, layout: str = "auto") -> list[Conversation | Quarantined]:
    return list(read(SourceConfig.model_validate({"path": path, "format": layout})))


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.mark.parametrize("layout", ["auto", "explicit"])
def test_all_layouts_give_the_same_conversation(tmp_path: Path, layout: str) -> None:
    files = {
        "sharegpt": [lines(tmp_path / "a.jsonl", SHAREGPT), tmp_path / "a.json"],
        "messages": [lines(tmp_path / "b.jsonl", MESSAGES)],
        "ultrachat": [lines(tmp_path / "c.jsonl", ULTRACHAT), lines(tmp_path / "d.jsonl", ULTRACHAT_200K)],
    }
    (tmp_path / "a.json").write_text(json.dumps([SHAREGPT], indent=2))
    found = [take(path, layout=name if layout == "explicit" else "auto") for name, paths in files.items() for path in paths]
    assert all(len(items) == 1 for items in found)
    conversations = [items[0] for items in found]
    assert all(isinstance(c, Conversation) for c in conversations)
    assert len({c.id for c in conversations}) == 1
    assert conversations[0].messages == ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."})
    assert [c.source for c in conversations] == ["a.jsonl:1", "a.json:2", "b.jsonl:1", "c.jsonl:1", "d.jsonl:1"]


def test_roles_by_any_of_their_names(tmp_path: Path) -> None:
    names = {"Human": "user", "user": "user", "developer": "system", "ChatGPT": "assistant", " gpt ": "assistant", "model": "assistant", "TOOL": "tool"}
    (found,) = take(lines(tmp_path / "a.jsonl", {"messages": [{"role": name, "content": "x"} for name in names]}))
    assert [m["role"] for m in found.messages] == list(names.values())


def test_the_id_of_a_conversation_of_text_alone_is_that_of_earlier_versions(tmp_path: Path) -> None:
    import hashlib

    (found,) = take(lines(tmp_path / "a.jsonl", SHAREGPT))
    assert found.id == hashlib.sha256(b'[["user", "Hi"], ["assistant", "Hello."]]').hexdigest()[:32]


def test_prompts_plain_and_json(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfOne\r\n\n  [Two] {x}  \n")
    plain = take(tmp_path / "p.txt")
    assert [(c.messages[0]["content"], c.line) for c in plain] == [("One", 1), ("[Two] {x}", 3)]
    json_lines = take(lines(tmp_path / "p.jsonl", {"prompt": "One"}, {"prompt": 5}))
    assert json_lines[0].id == plain[0].id
    assert isinstance(json_lines[1], Quarantined) and json_lines[1].reason == "turn 1: expected text, found int"


def test_ids_depend_on_the_words_alone(tmp_path: Path) -> None:
    other = {"messages": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Hello."}]}
    one = {c.id for c in take(lines(tmp_path / "1.jsonl", MESSAGES, other))}
    two = {c.id for c in take(lines(tmp_path / "2.jsonl", other, SHAREGPT))}
    assert one == two and len(one) == 2


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WITH_TOOLS: dict[str, Any] = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking": "I add."},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "Two.", "reasoning": "Done."},
    ],
}


def test_tools_calls_and_reasoning_are_kept(tmp_path: Path) -> None:
    as_text = {**WITH_TOOLS, "tools": json.dumps([TOOL])}
    found, same, without = take(lines(tmp_path / "a.jsonl", WITH_TOOLS, as_text, {"messages": WITH_TOOLS["messages"]}))
    assert found.tools == (TOOL,) and found.uses_tools
    assert found.messages == (
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Done."},
    )
    assert found.id == same.id != without.id


BAD = {
    "{broken": "not readable as JSON",
    "[" * 100_000: "not readable as JSON",
    '"text"': "expected a JSON object, found str",
    '{"text": 1}': "expected one of the keys",
    '{"messages": []}': "empty conversation",
    '{"messages": "hi"}': "to be a list of objects",
    '{"data": ["a", {"b": 1}]}': "to be a list of objects",
    '{"messages": [{"role": "wizard", "content": "x"}]}': "turn 1: unknown role 'wizard'",
    '{"messages": [{"role": ["user"], "content": "x"}]}': "turn 1: unknown role",
    '{"messages": [{"role": 7, "content": "x"}]}': "turn 1: unknown role 7",
    '{"messages": [{"role": "user", "content": null}]}': "turn 1: expected text, found NoneType",
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}': "turn 1: expected text parts only, found image_url",
    '{"messages": [{"role": "user", "content": ["x"]}]}': "turn 1: expected text parts only, found str",
    '{"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}': "function_call is not supported",
    '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}': "'tool_calls': expected a list of objects with 'function'",
    '{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}': "'tools': expected a list of objects",
    '{"messages": [{"role": "user", "content": "x"}], "tools": "[oops"}': "'tools': not readable as JSON",
    '{"messages": [{"role": "user", "content": "\\ud83d"}]}': "turn 1: not UTF-8",
    '{"messages": [{"role": "user", "content": "x"}], "tools": [{"a": "\\ud83d"}]}': "'tools': not JSON in UTF-8",
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
    assert [type(i).__name__ for i in take(tmp_path / "p.txt")] == ["Conversation", "Quarantined"]


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


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_a_list_reads_the_same_whatever_the_blocks_it_is_read_in(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = {"messages": [{"role": "user", "content": 'q "\\ \u20ac\n{[' * 5}, {"role": "assistant", "content": "x"}], "n": [1.5e-7, True, None, -12]}
    text = json.dumps([SHAREGPT, 17, odd, "s", MESSAGES, -3.5, 12345], indent=1)
    (tmp_path / "a.json").write_text(text)
    whole = take(tmp_path / "a.json")
    assert [type(i).__name__[0] for i in whole] == list("CQCQCQQ")
    assert [text.splitlines()[i.line - 1].strip()[:2].strip(",") for i in whole] == ["{", "17", "{", '"s', "{", "-3", "12"]
    monkeypatch.setattr(readers, "_BLOCK", block)
    assert take(tmp_path / "a.json") == whole


def test_damage_in_the_middle_of_a_list_ends_it_without_reading_the_rest_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_BLOCK", 256)
    one = json.dumps(SHAREGPT)
    (tmp_path / "a.json").write_text(f"[{one}, {one[:40]}x{one[40:].replace('{', '', 1)}," + ",".join([one] * 1000) + "]")
    widths: list[int] = []
    more = readers._Scanner._more
    monkeypatch.setattr(readers._Scanner, "_more", lambda scan: widths.append(len(scan.text)) or more(scan))
    found = take(tmp_path / "a.json")
    assert [type(i).__name__ for i in found] == ["Conversation", "Quarantined"]
    assert max(widths) < 2000


def test_a_record_longer_than_the_limit_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LIMIT", 4000)
    monkeypatch.setattr(readers, "_BLOCK", 100)
    huge = {"messages": [{"role": "user", "content": "x" * 9000}]}
    first, second, third = take(lines(tmp_path / "a.jsonl", SHAREGPT, huge, SHAREGPT))
    assert "more than 4,000 characters" in second.reason and (second.line, third.line) == (2, 3) and isinstance(first, Conversation)
    (tmp_path / "a.json").write_text(json.dumps([SHAREGPT, huge, SHAREGPT]))
    assert [type(i).__name__ for i in take(tmp_path / "a.json")] == ["Conversation", "Quarantined"]


def test_one_record_over_many_lines_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SHAREGPT, indent=2) + "\n" + json.dumps(MESSAGES, indent=2))
    first, second = take(tmp_path / "a.json")
    assert isinstance(first, Conversation) and first.id == second.id and second.line == 14


def test_a_file_that_cannot_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(SourceConfig(path=path, format="auto"))
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


def zstandard(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstandard}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "p.txt"])
def test_packed_files_are_unpacked(tmp_path: Path, suffix: str, name: str) -> None:
    text = {"a.jsonl": json.dumps(SHAREGPT) + "\n" + json.dumps(MESSAGES), "a.json": json.dumps([SHAREGPT, MESSAGES]), "p.txt": "One\nTwo\n"}[name]
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}{suffix}").write_bytes(PACKERS[suffix](text.encode()))
    plain, packed = take(tmp_path / name), take(tmp_path / f"{name}{suffix}")
    assert len(plain) == 2 and [c.id for c in plain] == [c.id for c in packed]
    assert [c.line for c in plain] == [c.line for c in packed]


def table(path: Path, records: list[dict[str, Any]], rows: int = 1000) -> Path:
    columns = dict.fromkeys(key for record in records for key in record)
    pq.write_table(pa.Table.from_pylist([{key: record.get(key) for key in columns} for record in records]), path, row_group_size=rows)
    return path


def test_parquet_with_lists_of_structs(tmp_path: Path) -> None:
    plain = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]} for n in range(700)]
    path = table(tmp_path / "a.parquet", [*plain, {"messages": []}, WITH_TOOLS], rows=300)
    found = take(path)
    assert [c.line for c in found] == list(range(1, 703))
    assert [c.id for c in found[:700]] == [c.id for c in take(lines(tmp_path / "a.jsonl", *plain))]
    assert isinstance(found[700], Quarantined) and (found[700].file, found[700].reason) == (str(path), "empty conversation")
    (same,) = take(lines(tmp_path / "b.jsonl", WITH_TOOLS))
    assert found[701].id == same.id, "the nulls with which a table fills up its structs are left out"


def test_a_parquet_file_without_its_end_is_quarantined(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", [SHAREGPT])
    path.write_bytes(path.read_bytes()[:-20])
    (found,) = take(path)
    assert isinstance(found, Quarantined) and found.line == 1 and found.reason.startswith("not readable as Parquet")


def take_set(folder: Path, **more: Any) -> list[Conversation | Quarantined]:
    return list(read(SourceConfig.model_validate({"dataset": str(folder), **more})))


def test_data_sets_from_folders(tmp_path: Path) -> None:
    import datasets

    columns = {"from": ["human", "gpt"], "value": ["Hi", "Hello."]}
    whole = datasets.Dataset.from_list([SHAREGPT, {**SHAREGPT, "conversations": [{"from": "human", "value": "Bye"}]}])
    whole.save_to_disk(str(tmp_path / "disk"))
    datasets.DatasetDict({"test": whole}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "parquet").mkdir()
    whole.to_parquet(tmp_path / "parquet" / "train.parquet")
    (tmp_path / "jsonl").mkdir()
    lines(tmp_path / "jsonl" / "train.jsonl", SHAREGPT, {**SHAREGPT, "conversations": [{"from": "human", "value": "Bye"}]})
    found = [take_set(tmp_path / "disk"), take_set(tmp_path / "splits", split="test"), take_set(tmp_path / "parquet"), take_set(tmp_path / "jsonl")]
    assert [[(c.messages[0]["content"], c.line) for c in items] for items in found] == [[("Hi", 1), ("Bye", 2)]] * 4
    assert found[0][0].file == str(tmp_path / "disk")
    (sequence,) = take(lines(tmp_path / "columns.jsonl", {"conversations": columns}))
    assert sequence.id == found[0][0].id, "a Sequence of structs comes as columns"
    with pytest.raises(ConfigError, match="split nowhere"):
        take_set(tmp_path / "splits", split="nowhere")
    with pytest.raises(ConfigError, match="split nowhere"):
        take_set(tmp_path / "parquet", split="nowhere")


def test_a_hub_that_cannot_be_reached_is_an_error_and_no_end_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def rows() -> Any:
        yield SHAREGPT
        raise ConnectionError("reset by peer")

    def load(*names: Any, **options: Any) -> Any:
        asked.append((*names, options))
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    stream = read(SourceConfig(dataset="someone/talks", dataset_name="en", revision="v1", format="auto"))
    assert isinstance(next(stream), Conversation)
    with pytest.raises(KvshotError, match=r"someone/talks broke off after row 1 \(reset by peer\); run the command again"):
        next(stream)
    assert asked == [("someone/talks", "en", {"split": "train", "revision": "v1", "streaming": True})]

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ConfigError, match=r"someone/talks .* cannot be read: offline"):
        list(read(SourceConfig(dataset="someone/talks", format="auto")))


def test_text_that_begins_with_a_bracket_is_text(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("[INST] one\n{{ two }}\nthree\n")
    assert [c.messages[0]["content"] for c in take(tmp_path / "p.txt") if isinstance(c, Conversation)] == ["[INST] one", "{{ two }}", "three"]
    for text in (
        json.dumps([SHAREGPT]),
        f"[\r\n{json.dumps(SHAREGPT)}\r\n]",
        json.dumps(SHAREGPT),
        json.dumps(SHAREGPT, indent=1),
        "[ " + json.dumps(SHAREGPT) + "]",
    ):
        (tmp_path / "p").write_text(text)
        assert [type(c) for c in take(tmp_path / "p")] == [Conversation], text


def test_prompts_of_evaluation_sets(tmp_path: Path) -> None:
    two = {"messages": [{"role": r, "content": c} for r, c in (("user", "A"), ("assistant", "no"), ("user", "B"))]}
    records = [{"question_id": 81, "turns": ["One.", "Two."]}, {"question": "How many?", "answer": "3"}, {"task_id": "x", "prompt": "def f():"}, two]
    assert list(evaluation_prompts(lines(tmp_path / "e.jsonl", *records))) == ["One.", "Two.", "How many?", "def f():", "A", "B"]
    talk = [{"role": r, "content": c} for r, c in (("user", "Hi"), ("assistant", "Hello."), ("user", "And then?"))]
    every = list(evaluation_prompts(lines(tmp_path / "u.jsonl", {**ULTRACHAT_200K, "messages": talk}, {"prompt": "P", "messages": None})))
    assert every == ["Hi", "And then?", "P"], "all questions of a conversation, not its first alone"
    (tmp_path / "h.jsonl.gz").write_bytes(gzip.compress(json.dumps({"prompt": "def g():"}).encode()))
    assert list(evaluation_prompts(tmp_path / "h.jsonl.gz")) == ["def g():"]
    with pytest.raises(ConfigError, match=r"e\.jsonl, line 2: no evaluation prompt"):
        list(evaluation_prompts(lines(tmp_path / "e.jsonl", {"prompt": "x"}, {"text": "y"})))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_reading_tells_how_far_it_has_come(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        table(path, [SHAREGPT] * 700, rows=300)
    elif name == "a.json":
        path.write_text(json.dumps([SHAREGPT] * 700))
    else:
        path.write_bytes(PACKERS.get(path.suffix, bytes)((json.dumps(SHAREGPT) + "\n").encode() * 700))
    source, passed = SourceConfig(path=path, format="auto"), list[int]()
    assert len(list(read(source, passed.append))) == 700
    assert sum(passed) == readers.file_size(source) == path.stat().st_size


MEMORY = """
import sys
from pathlib import Path
from data_prep.sources import Conversation, read
from kvshot_ds.config import SourceConfig

def peak():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))

source = SourceConfig(path=Path(sys.argv[1]), format="auto")
stream = read(source)
found = 0
for found, _ in enumerate((c for c in stream if isinstance(c, Conversation)), 1):
    if found == int(sys.argv[2]):
        before = peak()
print(found, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads /proc")
@pytest.mark.parametrize("name", ["lines.jsonl", "one_line.json", "packed.jsonl.gz", "table.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    """100 MB of text; once a quarter of it is read (of a table by then some batches, a row group and what its library holds back), the other
    three quarters add less than 32 MB."""
    one = {"conversations": [{"from": "human", "value": "What is it? " * 40}, {"from": "gpt", "value": "It is this. " * 210}]}
    text, count = json.dumps(one), 32_000
    path = tmp_path / name
    if name == "table.parquet":
        part = pa.Table.from_pylist([one] * 1000)
        with pq.ParquetWriter(path, part.schema, use_dictionary=False, compression="none") as writer:
            for _ in range(count // 1000):
                writer.write_table(part)
    elif name == "packed.jsonl.gz":
        block = gzip.compress((text + "\n").encode() * 1000, 1)
        path.write_bytes(block * (count // 1000))  # members one after the other are one stream
    else:
        before, between, after = ("[", ", ", "]") if name == "one_line.json" else ("", "\n", "\n")
        path.write_text(before + between.join([text] * count) + after)
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}  # Arrow's own pools keep what is freed, now more, now less
    command = [sys.executable, "-c", MEMORY, str(path), str(count // 4)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=environment)
    found, grown = map(int, done.stdout.split())
    assert found == count and len(text) * count > 95e6
    assert grown < 32_000, f"{grown} KiB"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_tables_of_text_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("prompt\nHow are you?\n")
    with pytest.raises(ConfigError, match="tables of text are not read; expected JSON, JSONL, Parquet"):
        list(read(SourceConfig(path=tmp_path / name)))
