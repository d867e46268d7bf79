"""Answers of a server that was cut off while it was thinking: the end of the thought is the template's, so nothing of that turn is taught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.sources import Conversation, Quarantined
from data_prep.spool import Stored
from data_prep.tokenise import Line, Tokeniser
from kvshot_ds.config import PrepConfig, TargetConfig
from tests.data_prep.words import FOLDER


def test_a_thought_that_was_cut_is_left_out(tiny_target: Path) -> None:
    options = PrepConfig.model_validate({"regenerate": {"base_url": "http://127.0.0.1:1/v1"}, "template": {"jinja": FOLDER / "qwen3.jinja"}})
    tokeniser = Tokeniser(TargetConfig(path=tiny_target), options)
    first = {"role": "assistant", "content": "Yes.", "finish_reason": "stop"}
    lost = {"role": "assistant", "content": "", "reasoning_content": "Hm, hm", "finish_reason": "length"}

    def made(*texts: dict[str, Any]) -> Line | Quarantined:
        said = Conversation(tuple({"role": "user", "content": f"Question {n}?"} for n in range(2)), "q.txt", 1)
        [line] = tokeniser([Stored(said.id, said, {"answers": [], "texts": list(texts), "reason": ""})])
        return line

    assert made(first, lost) == made(first)
    alone = made(lost)
    assert isinstance(alone, Quarantined) and "still thinking" in alone.reason and "prep.regenerate.max_new_tokens" in alone.reason
    assert isinstance(made(first, {**lost, "finish_reason": "stop"}), Line)
    assert made(first, {**lost, "finish_reason": "stop"}) != made(first)
