"""Damage of every kind: never a crash; each record is a conversation, or refused with file, line and reason, and the counts add up."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.chat import ChatError, ChatTemplate
from data_prep.cleaning import Cleaner, Dropped, Outcome, make_cleaner
from data_prep.sources import Conversation, Quarantined, read
from data_prep.spool import Spool
from kvshot_ds.config import CleaningConfig, SourceConfig, TemplateConfig
from kvshot_ds.target import load_tokenizer

STABLE = settings(derandomize=True, deadline=None, max_examples=150, database=None)
LAYOUTS = ("auto", "sharegpt", "ultrachat", "messages", "prompts")
SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": 'H"i\\ € 𝄞'}, {"from": "gpt", "value": "Hello."}]},
    {"id": 2, "conversations": [{"from": "human", "value": "Bye\n"}, {"from": "gpt", "value": "So\tlong."}]},
]

text = st.one_of(st.text(max_size=12), st.sampled_from(["\x00", "\ud83d", "<p>x</p>", " ", "", "<|im_end|>", "a" * 300]))
scalar = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), text)
value = st.recursive(scalar, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(text, inner, max_size=4)), max_leaves=12)
role = st.one_of(st.sampled_from(["system", "user", "human", "assistant", "gpt", "tool", "wizard", "", 7, None, ["user"]]), value)
part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", 3])}, optional={"text": st.one_of(text, value)})
content = st.one_of(text, value, st.lists(part, max_size=3))
turn = st.one_of(
    st.fixed_dictionaries(
        {"role": role, "content": content}, optional=dict.fromkeys(("tool_calls", "reasoning", "name", "function_call", "tool_call_id"), value)
    ),
    st.fixed_dictionaries({"from": role, "value": content}),
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": text}),
    value,
)
record = st.one_of(
    st.fixed_dictionaries({}, optional={key: st.one_of(st.lists(turn, max_size=5), value) for key in ("messages", "conversations", "data", "prompt", "tools")}),
    st.fixed_dictionaries({"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": text}), max_size=6)}),
    value,
)


def take(path: Path, layout: str = "auto") -> list[Conversation | Quarantined]:
    found = list(read(SourceConfig.model_validate({"path": path, "format": layout})))
    for item in found:
        assert item.file == str(path) and item.line >= 1
        if isinstance(item, Quarantined):
            assert item.reason
            json.dumps([item.reason, item.record], ensure_ascii=False).encode()
            assert len(item.record) <= 200
        else:
            assert len(item.id) == 32 and item.messages
            assert all(isinstance(m["content"], str) and m["role"] in ("system", "user", "assistant", "tool") for m in item.messages)
            json.dumps([item.messages, item.tools], ensure_ascii=False).encode()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


RULES: list[dict[str, Any]] = [{}, dict.fromkeys(("html", "empty_turns", "leading_assistant", "repeated_roles"), "off"), {"empty_turns": "refuse"}]
CLEANERS = [make_cleaner(CleaningConfig.model_validate(options), answers) for options in RULES for answers in (True, False)]


def through(cleaner: Cleaner, items: list[Conversation | Quarantined]) -> list[Outcome]:
    """Cleaned and stored: the counts have to add up."""
    outcomes = cleaner(items)
    with Spool(Path(":memory:")) as spool:
        spool.add(outcomes, 0, "read")
        spool.drop_near(0.8, "near")
        spool.select([None], 3)
        assert spool.counts("read") == len(items) == sum(spool.sizes()) + sum(spool.rules().values())
        assert len(list(spool.quarantined())) + len(list(spool.dropped())) == sum(spool.rules().values())
    return outcomes


@STABLE
@given(records=st.lists(record, max_size=8), layout=st.sampled_from(LAYOUTS), listed=st.booleans(), which=st.sampled_from(range(len(CLEANERS))))
def test_random_records_in_every_layout(folder: Path, records: list[Any], layout: str, listed: bool, which: int) -> None:
    if listed:
        path = folder / "a.json"
        path.write_text(json.dumps(records))
    else:
        path = folder / "a.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in records))
    found = take(path, layout)
    assert len(found) == len(records)
    for outcome in through(CLEANERS[which], found):
        assert isinstance(outcome.item, Conversation | Quarantined | Dropped)


@pytest.fixture(scope="module")
def template(tiny_target: Path) -> ChatTemplate:
    return ChatTemplate(load_tokenizer(tiny_target), TemplateConfig())


@STABLE
@given(records=st.lists(record, min_size=1, max_size=8), which=st.sampled_from(range(0, len(CLEANERS), 2)))
def test_what_comes_through_is_encoded_or_refused(folder: Path, template: ChatTemplate, records: list[Any], which: int) -> None:
    path = folder / "e.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    clean = [o.item for o in CLEANERS[which](take(path)) if isinstance(o.item, Conversation)]
    found = template.encode_many([(c.messages, c.tools) for c in clean])
    assert len(found) == len(clean)
    assert all(isinstance(one, ChatError) or len(one.tokens) == len(one.turn) for one in found)


@STABLE
@given(
    data=st.binary(max_size=300),
    suffix=st.sampled_from([".jsonl", ".json", ".txt", ".parquet", ".jsonl.gz", ".json.xz", ".jsonl.zst", ".bz2"]),
    layout=st.sampled_from(LAYOUTS),
)
def test_random_bytes_under_every_name(folder: Path, data: bytes, suffix: str, layout: str) -> None:
    path = folder / f"b{suffix}"
    path.write_bytes(data)
    take(path, layout)


@STABLE
@given(data=st.data())
def test_bytes_changed_in_good_files(folder: Path, data: Any) -> None:
    name, pack = data.draw(st.sampled_from(FILES))
    raw = bytearray(pack(json.dumps(SHAREGPT).encode() if ".json." in name or name == "c.json" else LINES))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path = folder / name
    path.write_bytes(raw)
    take(path)


LINES = "".join(json.dumps(one) + "\n" for one in SHAREGPT).encode()
FILES: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("c.json", bytes),
    ("c.jsonl", bytes),
    ("c.json.gz", gzip.compress),
    ("c.jsonl.gz", gzip.compress),
    ("c.jsonl.xz", lzma.compress),
    ("c.json.bz2", bz2.compress),
    ("c.jsonl.zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
]


@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_cut_at_every_byte(folder: Path, indent: int | None, ascii: bool) -> None:
    """Every record before the cut is used; the cut is one quarantined record, at its line."""
    raw = json.dumps(SHAREGPT, indent=indent, ensure_ascii=ascii).encode()
    path = folder / "cut.json"
    path.write_bytes(raw)
    whole = take(path)
    decoder, second = json.JSONDecoder(), raw.index(b'{"id": 2' if indent is None else b'{\n  "id": 2')
    first_end = raw.index(b"{") + len(raw[raw.index(b"{") : second].rstrip(b", \n"))
    second_end = len(raw[:-1].rstrip())
    assert len(whole) == 2 and decoder.decode(raw.decode())
    for cut in range(1, len(raw)):
        path.write_bytes(raw[:cut])
        found = take(path)
        used = (cut >= first_end) + (cut >= second_end)
        assert found[:used] == whole[:used], cut
        assert [type(item) for item in found[used:]] == [Quarantined], cut
        begin = second if used == 1 and cut > second else min(cut, raw.index(b"{")) if used == 0 else cut
        assert found[-1].line == raw[:begin].count(b"\n") + 1, cut


def test_lines_cut_at_every_byte(folder: Path) -> None:
    path = folder / "cut.jsonl"
    path.write_bytes(LINES)
    whole = take(path)
    ends = [i for i, byte in enumerate(LINES) if byte == ord("\n")]
    for cut in range(1, len(LINES)):
        path.write_bytes(LINES[:cut])
        found = take(path)
        used = sum(cut >= end for end in ends)
        assert found[:used] == whole[:used]
        rest = LINES[ends[used - 1] + 1 if used else 0 : cut]
        assert [(type(i), i.line) for i in found[used:]] == ([(Quarantined, used + 1)] if rest.strip() else []), cut


@pytest.mark.parametrize(("name", "pack"), [file for file in FILES if file[0].count(".") == 2], ids=lambda v: v if isinstance(v, str) else "")
def test_packed_files_cut_at_every_byte(folder: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    raw = pack(json.dumps(SHAREGPT).encode() if ".json." in name else LINES)
    path = folder / name
    path.write_bytes(raw)
    whole = take(path)
    assert len(whole) == 2 and all(isinstance(item, Conversation) for item in whole)
    for cut in range(1, len(raw)):
        path.write_bytes(raw[:cut])
        found = take(path)
        kept = [item for item in found if isinstance(item, Conversation)]
        assert kept == whole[: len(kept)], cut
        assert len(found) == len(kept) + 1 and isinstance(found[-1], Quarantined), cut


def test_parquet_cut_at_every_byte(folder: Path) -> None:
    path = folder / "cut.parquet"
    pq.write_table(pa.Table.from_pylist([{"conversations": one["conversations"]} for one in SHAREGPT]), path)
    raw = path.read_bytes()
    assert [type(item) for item in take(path)] == [Conversation, Conversation]
    for cut in range(1, len(raw)):
        path.write_bytes(raw[:cut])
        (found,) = take(path)
        assert isinstance(found, Quarantined) and found.line == 1


@STABLE
@given(data=st.data())
def test_parquet_with_bytes_changed(folder: Path, data: Any) -> None:
    path = folder / "good.parquet"
    pq.write_table(pa.Table.from_pylist([{"conversations": one["conversations"]} for one in SHAREGPT] * 3), path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(4, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "changed.parquet"
    damaged.write_bytes(raw)
    found = take(damaged)
    assert len(found) <= 7


@STABLE
@given(rows=st.lists(st.fixed_dictionaries({"a": scalar.filter(lambda v: not isinstance(v, str) or "\ud83d" not in v)}), min_size=1, max_size=4))
def test_parquet_of_anything(folder: Path, rows: list[Any]) -> None:
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, OverflowError):
        return
    pq.write_table(table, folder / "any.parquet")
    assert len(take(folder / "any.parquet")) == len(rows)


@pytest.mark.parametrize("brackets", ["[", '{"a":', '{"messages":[', '{"messages":[{"role":"user","content":['])
@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_huge_nesting(folder: Path, brackets: str, name: str) -> None:
    path = folder / name
    path.write_text(brackets * 100_000)
    assert take(path) and all(isinstance(item, Quarantined) for item in take(path))
    depth = 900  # within what the reader takes
    path.write_text('{"messages": [{"role": "user", "content": "x"}], "tools": [' + '{"a":' * depth + "1" + "}" * depth + "]}\n")
    assert len(take(path)) == 1


def test_duplicated_keys_take_the_last(folder: Path) -> None:
    path = folder / "twice.jsonl"
    path.write_text('{"prompt": "one", "prompt": "two"}\n')
    (found,) = take(path)
    assert isinstance(found, Conversation) and found.messages[0]["content"] == "two"


def test_numbers_beyond_any_measure(folder: Path) -> None:
    path = folder / "numbers.jsonl"
    path.write_text('{"prompt": "a", "n": ' + "9" * 5000 + '}\n{"prompt": "b", "n": 1e999}\n{"prompt": "c", "n": NaN}\n')
    assert [type(item) for item in take(path)] == [Quarantined, Conversation, Conversation]
    (folder / "numbers.json").write_text('[{"prompt": "a"}, {"n": ' + "9" * 5000 + '}, {"prompt": "b"}]')
    assert [type(item) for item in take(folder / "numbers.json")] == [Conversation, Quarantined]
