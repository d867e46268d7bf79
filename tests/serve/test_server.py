"""`kvshot serve` as a process of its own, asked by the openai client: answers are the target's, whatever way they are asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml

from kvshot_ds.config import TargetConfig, load_recipe
from kvshot_ds.decoding.prompts import reference, stop_tokens
from kvshot_ds.drafters.build import DrafterInfo, build_drafter, save_drafter
from kvshot_ds.errors import ConfigError
from kvshot_ds.serve.run import run
from kvshot_ds.target import Target, load_geometry, weights_digest
from tests import toys

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Was ist „Spekulation“? 日本"}]
LONG = 120  # tokens


@dataclass
class Server:
    """A process and what it has printed so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def url(self) -> str:
        """Where it listens, once it does."""
        while True:
            if found := [line for line in self.lines if line.startswith("kvshot serve: http://")]:
                return found[0].split()[2]
            assert self.process.poll() is None, "\n".join(self.lines)
            time.sleep(0.05)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url(), api_key="none", max_retries=0, timeout=120)

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url().removesuffix("/v1") + "/health", timeout=60) as response:
            return json.load(response)

    def ended(self) -> int:
        status = self.process.wait(120)
        self._reader.join(60)
        return status


@pytest.fixture(scope="module")
def recipe(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with a drafter of random weights, whose candidates are many, so that some are accepted."""
    folder = tmp_path_factory.mktemp("serve")
    g, config = load_geometry(tiny_target), toys.FAMILIES["hybrid-1"]
    drafter = build_drafter(config, g, 64)
    drafter.reset(0)
    drafter.set_vocab(torch.arange(36, 100))
    save_drafter(folder / "work/runs/mine/drafter", drafter, DrafterInfo(config, g, 64, "tiny", weights_digest(tiny_target), {}), torch.float32)
    options = {
        "name": "mine", "work": str(folder / "work"), "target": {"path": str(tiny_target), "dtype": "fp32", "device": "cpu"},
        "serve": {"port": 0, "max_new_tokens": 1500, "grace": 600}, "decode": {"drafting": {"strategy": "static_tree", "branching": [12, 2]}},
    }  # fmt: skip
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


@contextmanager
def started(recipe: Path) -> Iterator[Server]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "kvshot_ds.cli", "serve", str(recipe)]
    server = Server(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(recipe: Path) -> Iterator[Server]:
    with started(recipe) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(TargetConfig(path=tiny_target, dtype="fp32", device="cpu"))


def own_answer(target: Target, prompt: list[int], length: int) -> str:
    """What the target's own greedy `generate` says."""
    tokens = reference(target, prompt, length, stop_tokens(target))
    return target.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "mine", "messages": ASKED, "max_tokens": 60, **more})


def test_a_chat_is_the_targets_own_answer(client, server, target):
    text = target.tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prompt = target.tokenizer(text, add_special_tokens=False).input_ids
    want = own_answer(target, prompt, LONG)
    assert len(want) > 30
    answer = chat(client, max_tokens=LONG)
    assert answer.choices[0].message.content == want and answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].finish_reason == ("length" if answer.usage.completion_tokens == LONG else "stop")
    details, found = answer.usage.completion_tokens_details, answer.speculation
    assert details.accepted_prediction_tokens == found["accepted"] > 0 and details.rejected_prediction_tokens == found["nodes"] - found["accepted"]
    assert found["rounds"] == sum(found["histogram"]) and found["accepted"] == sum(k * n for k, n in enumerate(found["histogram"]))
    assert found["tau"] == pytest.approx((answer.usage.completion_tokens - 1) / found["rounds"], abs=1e-4)
    assert min(found["prefill_ms"], found["draft_ms"], found["verify_ms"]) > 0
    alone = chat(client, max_tokens=LONG, model="mine:target")
    assert alone.choices[0].message.content == want and alone.speculation["accepted"] == 0 < alone.speculation["rounds"]


def test_a_streamed_chat_says_the_same(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage and chunks[-2].speculation["histogram"] == whole.speculation["histogram"]


def test_completions_of_text_and_of_tokens(client, target):
    prompt = target.tokenizer("A cache is").input_ids
    want = own_answer(target, prompt, 16)
    answers = [client.completions.create(model="mine", prompt=p) for p in ("A cache is", prompt)]  # type: ignore[list-item]
    streamed = list(client.completions.create(model="mine", prompt="A cache is", stream=True))
    assert [a.choices[0].text for a in answers] == [want, want] and "".join(c.choices[0].text for c in streamed) == want
    assert answers[0].usage is not None and answers[0].usage.completion_tokens <= 16


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stream):
    full = chat(client).choices[0].message.content
    assert full is not None
    stop = full[20:24]
    answer = chat(client, stop=[stop, "never said"], stream=stream)
    if stream:
        found = list(answer)
        text, reason = "".join(c.choices[0].delta.content or "" for c in found), found[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == (full[: full.index(stop)], "stop")


def test_a_seed_repeats_a_sampled_text(client):
    def text(**more: Any) -> tuple[str, Any]:
        answer = chat(client, temperature=1.0, top_p=0.95, extra_body={"top_k": 50}, **more)
        return answer.choices[0].message.content, answer.speculation["seed"]

    first, other = text(seed=1), text(seed=2)
    assert first == text(seed=1) and first[0] != other[0] and first[1] == 1
    drawn = text()
    assert drawn[1] != text()[1] and text(seed=drawn[1]) == drawn, "a text without a seed tells the one it was made with"


def test_errors_reach_the_client_as_its_own(client, target):
    with pytest.raises(openai.NotFoundError, match="mine or mine:target"):
        chat(client, model="gpt-5")
    with pytest.raises(openai.BadRequestError, match="n=2 is not supported") as caught:
        chat(client, n=2)
    assert caught.value.param == "n" and caught.value.code == "unsupported_parameter"
    with pytest.raises(openai.BadRequestError, match=f"context holds {target.geometry.max_positions}"):
        chat(client, max_tokens=1500, messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(client, tools=[{"type": "function", "function": {"name": "f"}}])


def test_models(client, server):
    assert [m.id for m in client.models.list()] == ["mine", "mine:target"] and client.models.retrieve("mine").id == "mine"
    assert server.health()["status"] == "ok" and any(line.strip().startswith("curl http://127.0.0.1:") for line in server.lines)


@pytest.fixture(scope="module")
def endless(target: Target) -> list[int]:
    """A prompt whose answer does not end early."""
    for first in range(40, 90):
        prompt = [first, 41, 42]
        if len(reference(target, prompt, 200, stop_tokens(target))) == 200:
            return prompt
    pytest.fail("no such prompt")


def test_a_client_that_leaves_a_stream_stops_it(client, server, endless):
    before = server.health()
    with client.completions.create(model="mine:target", prompt=endless, max_tokens=1500, stream=True) as stream:
        assert next(iter(stream)).choices
    for _ in range(1200):
        if (now := server.health())["decoding"] == 0:
            break
        time.sleep(0.05)
    assert (now["abandoned"], now["answered"]) == (before["abandoned"] + 1, before["answered"])


def test_a_drafter_of_another_target_is_refused(recipe, tmp_path):
    made = load_recipe(recipe, (f"work={tmp_path}", "serve.drafter=null"))
    with pytest.raises(Exception, match="no trained drafter here"):
        run(made)
    folder = load_recipe(recipe).run_dir / "drafter"
    (tmp_path / "other").mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["target"]["digest"] = "0" * 64
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    (tmp_path / "other/model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="trained against the target 'tiny'"):
        run(load_recipe(recipe, (f"serve.drafter={tmp_path / 'other'}",)))


def test_signals(client, server, endless):
    """The last of this server. SIGTERM: what is under way and what waits is answered, nothing else. A second signal ends it at once."""
    before, begun = server.health(), threading.Event()

    def second() -> None:
        with client.completions.create(model="mine:target", prompt=endless, max_tokens=1500, stream=True) as stream:
            for _ in stream:
                begun.set()

    first = client.completions.create(model="mine", prompt=endless, max_tokens=200, stream=True)
    chunks = iter(first)
    next(chunks)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second)
        while server.health()["waiting"] == 0 and not begun.is_set():
            time.sleep(0.02)
        server.process.send_signal(signal.SIGTERM)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert begun.wait(120)
        with pytest.raises(openai.InternalServerError, match="being stopped") as caught:
            chat(client)
        assert caught.value.status_code == 503
        server.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="being stopped"):
            waiting.result()
    assert server.ended() == 0
    counts = f"{before['answered'] + 1} answered, {before['abandoned']} abandoned, {before['failed'] + 1} failed"
    assert any("stopping; 2 answer(s) under way have 600 s" in line for line in server.lines)
    assert server.lines[-1] == f"kvshot serve: stopped; {counts}"
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
