"""Preparation as a whole: files, accounts, refusals, and a run killed in the middle that ends like an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from data_prep import prepare
from data_prep.chat import ChatTemplate
from data_prep.pool import Pool, sole_user
from data_prep.sources import Conversation
from data_prep.writer import Answered, Unit, Writer
from kvshot_ds.config import Recipe, TemplateConfig, dump_recipe
from kvshot_ds.errors import ConfigError, KvshotError
from kvshot_ds.files import read_json
from kvshot_ds.target import load_tokenizer


def recipe(target: Path, work: Path, **prep: Any) -> Recipe:
    return Recipe.model_validate({"name": "t", "work": work, "target": {"path": target, "dtype": "fp32", "device": "cpu"}, "prep": prep})


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def conversations(count: int, start: int = 0) -> list[dict[str, Any]]:
    def one(n: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": f"The answer is {n * n}."}]}

    return [one(n) for n in range(start, start + count)]


def source(path: Path, *records: Any) -> list[dict[str, str]]:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records), encoding="utf-8")
    return [{"path": str(path)}]


KEPT = {"regenerate": {"enabled": False}}


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """One Ray for the in-process runs of this file: starting it takes seconds."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=1 << 27)
    yield
    ray.shutdown()


def test_given_answers_are_kept_and_accounts_add_up(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "a" * 400}]}
    lost = {"messages": [{"role": "user", "content": "b" * 400}, {"role": "assistant", "content": "x"}]}
    broken = {"messages": [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "x"}]}
    files = source(tmp_path / "c.jsonl", *conversations(40), "{oops", long, lost, broken, *conversations(3), {"messages": []})
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, max_length=120, heldout_fraction=0.25, **KEPT))
    assert (found.records, found.kept, found.duplicates, found.quarantined, found.cut) == (48, 41, 3, 4, 1)
    assert found.records + found.synthesised == found.kept + found.left_out
    folder = tmp_path / "w" / "prepared"
    train, heldout = rows(folder / "train.jsonl"), rows(folder / "heldout.jsonl")
    assert (len(train), len(heldout)) == (found.train.conversations, found.heldout.conversations)
    assert len(train) + len(heldout) == 41 and 3 <= len(heldout) <= 18
    template = ChatTemplate(load_tokenizer(tiny_target), TemplateConfig())
    for row in train + heldout:
        assert set(row) == {"id", "messages", "tokens", "turn", "source"}
        assert len(row["tokens"]) == len(row["turn"]) <= 120
        if len(row["tokens"]) < 120:
            whole = template.encode(row["messages"])
            assert (row["tokens"], row["turn"]) == (whole.tokens, whole.turn)
    reasons = {r["line"]: r["reason"] for r in rows(folder / "quarantine.jsonl")}
    assert sorted(reasons) == [41, 43, 44, 48]
    assert reasons[43].startswith("over-long: nothing to learn from in the first 120 of 4")
    assert "special token" in reasons[44]
    assert found.train.supervised == sum(t > 0 for row in train for t in row["turn"])
    assert read_json(folder / "summary.json")["status"] == "complete"
    assert read_json(folder / "provenance.json")["configuration"]["prep.max_length"] == 120
    assert (folder / "recipe.yaml").is_file() and not (folder / "parts").exists()
    printed = capsys.readouterr().out
    for row in ("records read 48", "kept 41", "dropped: exact_duplicates 3", "quarantined 4 1 over-long", "cut at max_length 1 of those kept"):
        assert f"prep: {row}" in " ".join(printed.split()), printed


def test_the_split_does_not_depend_on_order_or_company(tiny_target: Path, tmp_path: Path) -> None:
    records = conversations(30)
    shuffled = random.Random(0).sample(records, 30) + conversations(5, start=90)
    for name, files in (("a", source(tmp_path / "a.jsonl", *records)), ("b", source(tmp_path / "b.jsonl", *shuffled))):
        prepare.run(recipe(tiny_target, tmp_path / name, sources=files, heldout_fraction=0.3, **KEPT))
    first = {r["id"] for r in rows(tmp_path / "a/prepared/heldout.jsonl")}
    second = {r["id"] for r in rows(tmp_path / "b/prepared/heldout.jsonl")}
    everyone = {r["id"] for r in rows(tmp_path / "a/prepared/train.jsonl")} | first
    assert first and second & everyone == first


def test_a_complete_folder_returns_at_once_and_another_configuration_is_refused(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = source(tmp_path / "c.jsonl", *conversations(10))
    first = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    before = (tmp_path / "w/prepared/train.jsonl").stat().st_mtime_ns
    assert prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, workers=2, **KEPT)) == first
    assert "is complete already" in capsys.readouterr().out
    assert (tmp_path / "w/prepared/train.jsonl").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match=r"prep\.seed: there 0, now 1"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, seed=1, **KEPT))
    files = source(tmp_path / "c.jsonl", *conversations(11))
    with pytest.raises(ConfigError, match=r"prep\.sources\[0\]\.path \(content\)"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    with sole_user(tmp_path / "w/prepared", "kvshot prep"), pytest.raises(ConfigError, match="another kvshot prep is writing there"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))


def test_contradictions_and_missing_things_are_found_first(tiny_target: Path, tmp_path: Path) -> None:
    prompts = [{"path": str(tmp_path / "p.txt"), "format": "prompts"}]
    (tmp_path / "p.txt").write_text("Hi\n")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tiny_target, {}, "nothing to prepare"),
        (tiny_target, {"sources": [{"path": str(tmp_path / "absent.jsonl")}]}, "absent.jsonl cannot be read"),
        (tiny_target, {"sources": prompts, "max_length": 100_000}, "more than the 2048 positions"),
        (tmp_path / "nowhere", {"sources": prompts}, "no such folder"),
    ]
    for target, prep, text in cases:
        with pytest.raises(ConfigError, match=text):
            prepare.run(recipe(target, tmp_path / "w", **prep))
    assert not (tmp_path / "w").exists()


def test_a_target_without_template_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in tiny_target.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).symlink_to(file)
    with pytest.raises(ConfigError, match=r"has no chat template(.|\n)*prep\.template\.jinja"):
        prepare.run(recipe(bare, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(2)), **KEPT))


def messy(folder: Path) -> dict[str, Any]:
    """Sources with something for every rule, and the options that let each of them count."""
    evaluation = folder / "eval.jsonl"
    evaluation.write_text(json.dumps({"question": "How many apples does Tom have in his basket at noon?"}))
    words = " ".join(f"word{n}" for n in range(100))

    def two(question: str, answer: str = "So it is, and it always was, as far as anybody here can tell.") -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    first = source(
        folder / "a.jsonl",
        *conversations(60),
        *conversations(4),
        two(words),
        two(f"{words} more"),
        two("Say: how many apples does Tom have in his basket at noon?"),
        two("Pourquoi est-ce que le ciel est bleu pendant la journée ?", "Parce que la lumière du soleil est diffusée par l'atmosphère."),
        two("<p>A <b>page</b></p>"),
        {"messages": [{"role": "assistant", "content": "Hm."}, *two("Leading, repeated")["messages"], {"role": "assistant", "content": "Again."}]},
        {"messages": [*two("Then empty")["messages"], {"role": "user", "content": ""}, {"role": "assistant", "content": "lost"}]},
        {"messages": [{"role": "user", "content": "No answer"}]},
        two("special <|im_end|>"),
        two("b " * 600),
        "{oops",
        {"messages": 3},
    )
    (folder / "b.json").write_text(json.dumps([two(f"Another question, number {n}?") for n in range(9)])[:-30])
    cleaning = {"evaluation_sets": [str(evaluation)], "languages": ["en"]}
    return {"sources": [*first, {"path": str(folder / "b.json")}], "cleaning": cleaning, "max_length": 300, **KEPT}


def test_every_record_of_a_messy_input_is_accounted_for(tiny_target: Path, tmp_path: Path) -> None:
    found = prepare.run(recipe(tiny_target, tmp_path / "w", max_conversations=50, **messy(tmp_path)))
    folder = tmp_path / "w/prepared"
    assert found.records == 60 + 4 + 12 + 9
    assert found.records == found.kept + found.left_out
    assert found.kept + found.quarantined >= 50 > found.kept - 1 and found.beyond > 0 and found.duplicates == 4
    assert found.dropped["evaluation: eval.jsonl"] == 1 and found.dropped["near_duplicates"] >= 1 and found.dropped["languages"] >= 1
    assert set(found.mended) == {"html", "empty_turns", "leading_assistant", "repeated_roles"}
    assert len(rows(folder / "quarantine.jsonl")) == found.quarantined == sum(found.reasons.values())
    dropped = rows(folder / "dropped.jsonl")
    assert len(dropped) == sum(found.dropped.values()) + found.duplicates
    assert all(set(row) == {"file", "line", "rule", "reason", "record"} for row in dropped)
    reasons = " ".join(row["reason"] for row in rows(folder / "quarantine.jsonl"))
    for reason in ("not readable as JSON", "to the end of the file", "no assistant turn", "to be a list of objects"):
        assert reason in reasons
    ids = [row["id"] for name in ("train", "heldout") for row in rows(folder / f"{name}.jsonl")]
    assert len(ids) == found.kept == len(set(ids))
    for name in ("train", "heldout"):
        assert [row["id"] for row in rows(folder / f"{name}.jsonl")] == sorted(row["id"] for row in rows(folder / f"{name}.jsonl"))
    assert read_json(folder / "summary.json")["dropped"] == found.dropped


def test_two_processes_and_any_order_of_sources_give_the_same_files(tiny_target: Path, tmp_path: Path) -> None:
    options = messy(tmp_path)
    turned = {**options, "sources": options["sources"][::-1]}
    for name, prep in (("one", options), ("two", {**options, "tokenizer_processes": 2}), ("turned", turned)):
        prepare.run(recipe(tiny_target, tmp_path / name, **prep))
    files = ("train.jsonl", "heldout.jsonl", "quarantine.jsonl", "dropped.jsonl")
    one, two, other = ({file: (tmp_path / name / "prepared" / file).read_text() for file in files} for name in ("one", "two", "turned"))
    assert one == two
    assert (one["train.jsonl"], one["heldout.jsonl"]) == (other["train.jsonl"], other["heldout.jsonl"])


def test_a_smaller_set_lies_in_a_larger_one_and_a_mixture_has_its_shares(tiny_target: Path, tmp_path: Path) -> None:
    files = [{"weight": w, **source(tmp_path / f"{n}.jsonl", *conversations(40, 100 * n))[0]} for n, w in enumerate((3, 1))]
    found = {}
    for wanted in (8, 16, None):
        summary = prepare.run(recipe(tiny_target, tmp_path / f"{wanted}", sources=files, max_conversations=wanted, heldout_fraction=0.2, **KEPT))
        kept = [row for name in ("train", "heldout") for row in rows(tmp_path / f"{wanted}/prepared/{name}.jsonl")]
        assert summary.kept == len(kept) and summary.beyond == 80 - len(kept)
        found[wanted] = {row["id"]: row["source"][0] for row in kept}
    assert found[8].keys() < found[16].keys() < found[None].keys()
    assert [list(found[n].values()).count("0") for n in (8, 16, None)] == [6, 12, 40] and len(found[None]) in (53, 54)


def test_contradictions_of_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set weights, or synthesis"):
        recipe(tmp_path, tmp_path, sources=[{"path": "a", "weight": 1}], synthesis={"count": 1})


def served(conversation: Conversation) -> Answered:
    """What a server might answer."""
    question = conversation.messages[0]["content"]
    if "3" in question:
        return Answered(conversation.id, reason="the server does not answer: status 500", failed=True)
    cut = "length" if "4" in question else "stop"
    texts = [{"role": "assistant", "content": f"On {m['content']}", "finish_reason": cut} for m in conversation.messages if m["role"] == "user"]
    return Answered(conversation.id, texts=texts)


def test_answers_of_a_server_are_tokenised_here(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "open_pool", lambda *_: InProcess(lambda unit: [served(c) for c in unit.conversations]))
    two = {"messages": [{"role": r, "content": c} for r, c in (("user", "Hello"), ("assistant", "old"), ("user", "And?"), ("assistant", "old"))]}
    options = {"regenerate": {"base_url": "http://127.0.0.1:1/v1", "max_new_tokens": 40}, "batch_size": 2, "heldout_fraction": 0}
    files = source(tmp_path / "c.jsonl", *conversations(10), two)
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **options))
    assert (found.kept, found.quarantined, found.failed) == (10, 1, 1)
    template = ChatTemplate(load_tokenizer(tiny_target), TemplateConfig())
    for row in rows(tmp_path / "w/prepared/train.jsonl"):
        assert not any("finish_reason" in m or m["content"] == "old" for m in row["messages"])
        whole = template.encode(row["messages"])
        if "4" in row["messages"][0]["content"]:
            assert (row["tokens"], row["turn"]) == (whole.tokens[:-1], whole.turn[:-1]), "the end token of a cut answer is not the target's"
        else:
            assert (row["tokens"], row["turn"]) == (whole.tokens, whole.turn)
    assert found.generated == found.train.supervised


def test_mended_conversations_are_told_of_what_was_read(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mended one may turn out a duplicate, so there may be more of them than are kept."""
    twice = {"messages": [{"role": "user", "content": "Hi"}, *[{"role": "assistant", "content": "One."}] * 2]}
    found = prepare.run(
        recipe(
            tiny_target,
            tmp_path / "w",
            sources=source(tmp_path / "c.jsonl", *[twice] * 3, '{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
            heldout_fraction=0,
            **KEPT,
        )
    )
    assert (found.kept, found.mended) == (1, {"repeated_roles": 3})
    assert "prep: records read               4  mended: 3 by repeated_roles\n" in capsys.readouterr().out


def test_a_server_that_answered_nothing_is_asked_again_by_the_next_run(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = False

    def reply(conversation: Conversation) -> Answered:
        said = served(conversation)
        return said if alive else Answered(conversation.id, reason="the server does not answer: status 503", failed=True)

    monkeypatch.setattr(prepare, "open_pool", lambda *_: InProcess(lambda unit: [reply(c) for c in unit.conversations]))
    options = {"regenerate": {"base_url": "http://127.0.0.1:1/v1"}, "batch_size": 2, "heldout_fraction": 0}
    wanted = recipe(tiny_target, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(3)), **options)
    with pytest.raises(KvshotError, match=r"none of 3 conversations.*status 503.*run the command again"):
        prepare.run(wanted)
    alive = True
    assert prepare.run(wanted).kept == 3


def test_what_failed_while_a_server_died_is_asked_again(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that still comes after the first failures lets a unit with failures through."""
    dying, asked = True, list[int]()

    def reply(unit: Unit) -> list[Answered]:
        asked.append(unit.index)
        if dying and unit.index > 2:
            raise KvshotError("21 requests in a row were given up")
        found = [Answered(c.id, texts=[{"role": "assistant", "content": "Yes, so it is.", "finish_reason": "stop"}]) for c in unit.conversations]
        if dying and unit.index == 1:
            found[0] = Answered(found[0].id, reason="the server does not answer: status 503", failed=True)
        return found

    monkeypatch.setattr(prepare, "open_pool", lambda *_: InProcess(reply))
    options = {"regenerate": {"base_url": "http://127.0.0.1:1/v1"}, "batch_size": 1, "heldout_fraction": 0, "workers": 5}
    wanted = recipe(tiny_target, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(20, 1000)), **options)
    with pytest.raises(KvshotError, match="21 requests"):
        prepare.run(wanted)
    assert asked == [0, 1, 2, 3]
    dying = False
    found = prepare.run(wanted)
    assert asked[4:] == [1, *range(3, 10)], "with its unit, and with those that were not reached"
    assert (found.kept, found.failed) == (20, 0)


class ChatServer(BaseHTTPRequestHandler):
    """The least of an OpenAI-compatible server: it says each question back."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if self.path.endswith("/chat/completions"):
            choice["message"] = {"role": "assistant", "content": f"You ask: {asked['messages'][-1]['content']}"}
        else:
            choice["text"] = f"What is {asked['seed']}?"
        self.reply({"id": "1", "object": "x", "created": 0, "model": "tiny", "choices": [choice]})

    def reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_from_prompts_to_files_with_a_server(tiny_target: Path, tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = {"regenerate": {"base_url": f"http://127.0.0.1:{server.server_port}/v1"}, "synthesis": {"count": 3}, "heldout_fraction": 0.3}
        found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(20)), **options))
    finally:
        server.shutdown()
        server.server_close()
    assert (found.records, found.synthesised, found.kept, found.failed) == (20, 3, 23, 0)
    kept = rows(tmp_path / "w/prepared/train.jsonl") + rows(tmp_path / "w/prepared/heldout.jsonl")
    assert all(row["messages"][1]["content"] == f"You ask: {row['messages'][0]['content']}" for row in kept)
    assert sum(row["source"].startswith("synthesis-") for row in kept) == 3


def test_tools_with_answers_written_anew_are_refused_by_name(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "open_pool", lambda *_: InProcess(lambda unit: [served(c) for c in unit.conversations]))
    tools = {"messages": conversations(1)[0]["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]}
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=source(tmp_path / "c.jsonl", *conversations(9, 50), tools), heldout_fraction=0))
    assert any(reason.startswith("tools: ") and count == 1 for reason, count in found.reasons.items())


def test_data_sets_are_known_by_content_here_and_by_name_on_a_hub(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    datasets.Dataset.from_list(conversations(12)).save_to_disk(str(tmp_path / "set"))
    wanted = recipe(tiny_target, tmp_path / "w", sources=[{"dataset": str(tmp_path / "set")}], heldout_fraction=0, **KEPT)
    assert prepare.run(wanted).kept == 12
    datasets.Dataset.from_list(conversations(13)).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ConfigError, match=r"sources\[0\]\.dataset \(content\)"):
        prepare.run(wanted)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter(conversations(9)))
    hub = {"dataset": "someone/talks", "revision": "v1"}
    assert prepare.run(recipe(tiny_target, tmp_path / "h", sources=[hub], heldout_fraction=0, **KEPT)).kept == 9
    with pytest.raises(ConfigError, match=r"sources\[0\]\.revision: there v1, now v2"):
        prepare.run(recipe(tiny_target, tmp_path / "h", sources=[{**hub, "revision": "v2"}], heldout_fraction=0, **KEPT))


def test_nothing_usable_is_an_error_that_lists_the_reasons(tiny_target: Path, tmp_path: Path) -> None:
    files = source(tmp_path / "c.jsonl", "{oops", {"messages": []}, {"messages": []})
    with pytest.raises(KvshotError, match=r"no conversation is left to train on(.|\n)*2 x empty conversation"):
        prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **KEPT))
    assert len(rows(tmp_path / "w/prepared/quarantine.jsonl")) == 3
    assert not (tmp_path / "w/prepared/summary.json").exists()


def generating(target: Path, work: Path, folder: Path, **more: Any) -> Recipe:
    """24 prompts, one conversation of two turns and 2 synthesised prompts: 4 units of answers."""
    (folder / "p.txt").write_text("".join(f"Why is {n} a number?\n" for n in range(24)))
    two = [{"role": r, "content": c} for r, c in (("user", "Hello"), ("assistant", "old"), ("user", "And?"), ("assistant", "old"))]
    files = [{"path": str(folder / "p.txt")}, *source(folder / "m.jsonl", {"messages": two}, {"messages": []})]
    options = {"synthesis": {"count": 2, "max_new_tokens": 96}, "regenerate": {"max_new_tokens": 40}, "batch_size": 1, "max_length": 400}
    return recipe(target, work, sources=files, **options, **more)


@pytest.fixture(scope="module")
def uninterrupted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory, ray_here: None) -> Path:
    """Prepared folder of `generating`, by two workers."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    found = prepare.run(generating(tiny_target, folder / "w", folder, workers=2))
    assert (found.records, found.synthesised, found.quarantined, found.kept) == (26, 2, 1, 27)
    return folder / "w" / "prepared"


def test_answers_are_the_targets_own(uninterrupted: Path, tiny_target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    found = rows(uninterrupted / "train.jsonl") + rows(uninterrupted / "heldout.jsonl")
    assert len({r["source"].split("-")[0].split(":")[0] for r in found}) == 3
    assert all(m["content"] != "old" for r in found for m in r["messages"])
    for row in found:
        last = max(row["turn"])
        start = row["turn"].index(last)
        out = model.generate(torch.tensor([row["tokens"][:start]]), max_new_tokens=40, do_sample=False)[0, start:].tolist()
        assert row["tokens"][start:] == out
        assert row["turn"][start:] == [last] * len(out)
    (two,) = [r for r in found if r["source"].startswith("m.jsonl")]
    assert set(two["turn"]) == {0, 1, 2}


def finished(spool: Path) -> set[int]:
    """Units of answers that are stored."""
    if not spool.is_file():
        return set()
    with closing(sqlite3.connect(spool, timeout=10)) as database:
        try:
            return {number for (number,) in database.execute("SELECT number FROM units WHERE kind='answers'")}
        except sqlite3.OperationalError:  # not yet laid out
            return set()


def test_killed_and_run_again_ends_like_an_uninterrupted_run(
    uninterrupted: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_here: None
) -> None:
    wanted = generating(tiny_target, tmp_path / "w", tmp_path)
    (tmp_path / "r.yaml").write_text(dump_recipe(wanted))
    command = [sys.executable, "-m", "kvshot_ds.cli", "prep", str(tmp_path / "r.yaml")]
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    spool = tmp_path / "w/prepared/parts/spool.sqlite"
    deadline = time.monotonic() + 120
    while len(done := finished(spool)) < 2:
        assert child.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.01)
    family = [p for p in psutil.Process(child.pid).children(recursive=True) if "Agent" not in p.name()]  # Ray's agents take a minute to notice
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = finished(spool)
    assert not (tmp_path / "w/prepared/summary.json").exists()
    assert len(done) < 4, "it was killed in the middle"

    submitted: list[int] = []
    through = Pool.map

    def note(self: Pool, units: Any) -> Any:
        def noted() -> Iterator[Any]:
            for unit in units:
                assert not unit.count, "the prompts were written"
                submitted.append(unit.index)
                yield unit

        return through(self, noted())

    monkeypatch.setattr(Pool, "map", note)
    prepare.run(wanted)
    assert sorted({*submitted, *done}) == list(range(4)) and not done & set(submitted), "finished units are not made again"
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "w/prepared" / name).read_text() == (uninterrupted / name).read_text()
    assert not list((tmp_path / "w/prepared").rglob("*.tmp"))
    _, alive = psutil.wait_procs(family, timeout=30)
    assert family and not alive, "a killed run leaves no worker behind"


class InProcess:
    """Answers without Ray or a server: `work` for each unit, here."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, units: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        return ((unit, self.work(unit)) for unit in units)


def test_too_few_prompts_is_said_not_hidden(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prepare, "open_pool", lambda target, options, _: InProcess(Writer(target, options).work))
    options = {"synthesis": {"count": 6, "max_new_tokens": 4}, "regenerate": {"max_new_tokens": 4}}
    files = source(tmp_path / "c.jsonl", *conversations(4))
    found = prepare.run(recipe(tiny_target, tmp_path / "w", sources=files, **options))
    assert found.synthesised < 6
    assert found.synthesised + sum(found.unusable_prompts.values()) >= 18
    assert f"only {found.synthesised} of 6 prompts" in capsys.readouterr().out


class Refuses:
    def work(self, unit: int) -> int:
        raise ConfigError(f"{unit} is not allowed")


def test_an_error_of_a_worker_arrives_as_it_is(tmp_path: Path, ray_here: None) -> None:
    with Pool("prep", recipe(tmp_path, tmp_path).prep, Refuses) as pool, pytest.raises(ConfigError, match=r"^3 is not allowed$"):
        list(pool.map([3]))
