"""Text in pieces is the text as a whole: characters, stop strings, any way it is cut."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from kvshot_ds.serve.text import AnswerText, Characters, Stops
from kvshot_ds.target import load_tokenizer

Decode = Callable[[list[int]], str]


def decoding(tokenizer: Any) -> Decode:
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def tokenizers(tiny_target: Path) -> dict[str, tuple[Any, int]]:
    """(tokenizer, V): bytes as GPT-2 writes them, and SentencePiece's blanks with bytes for what has no token."""
    words = ["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "▁the", "▁cat", "s", "a", "é", "日", "本", "."]
    inner = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    pieces = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    return {"bytes": (load_tokenizer(tiny_target), 259), "pieces": (pieces, len(words))}


def check_pieces(decode: Decode, tokens: list[int]) -> None:
    characters = Characters(decode)
    pieces = [characters.push(token) for token in tokens]
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + characters.flush() == decode(tokens)


def test_pieces_join_to_what_decoding_all_gives_whatever_the_bytes(tokenizers):
    tokenizer, vocab = tokenizers["bytes"]
    decode = decoding(tokenizer)
    given(st.lists(st.integers(0, vocab - 1), max_size=40))(lambda tokens: check_pieces(decode, tokens))()


def test_pieces_join_to_what_decoding_all_gives_with_blanks_and_byte_tokens(tokenizers):
    """Whole characters only: of a run of byte tokens with a wrong one among them this decoder makes marks, those before it included."""
    tokenizer, vocab = tokenizers["pieces"]
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: [2 + byte for byte in c.encode()])
    units = st.lists(character | st.sampled_from([[n] for n in (1, *range(258, vocab))]), max_size=20)
    decode = decoding(tokenizer)
    given(units)(lambda found: check_pieces(decode, [token for unit in found for token in unit]))()


def test_a_character_comes_whole_or_at_the_end_as_a_mark(tokenizers):
    tokenizer = tokenizers["bytes"][0]
    tokens = tokenizer("aé日🙂z").input_ids
    characters = Characters(decoding(tokenizer))
    assert [characters.push(token) for token in tokens] == ["a", "", "é", "", "", "日", "", "", "", "🙂", "z"]
    assert characters.flush() == ""
    cut = Characters(decoding(tokenizer))
    assert [cut.push(token) for token in tokens[:5]] == ["a", "", "é", "", ""] and cut.flush() == "\ufffd"


def slow_cut(text: str, strings: list[str]) -> str:
    """Character by character: before the stop string that is complete first, of several the longest."""
    for end in range(len(text) + 1):
        done = [s for s in strings if text[:end].endswith(s)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 30), max_size=8))
def test_a_stop_string_cuts_at_the_same_place_however_the_text_comes(text, strings, cuts):
    places = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    stops, said = Stops(strings), ""
    want = slow_cut(text, strings)
    for a, b in pairwise(places):
        said += stops.push(text[a:b])
        assert want.startswith(said), "what has been sent is never taken back"
    assert said + stops.flush() == want
    assert stops.found == (want != text or any(text.endswith(s) for s in strings))


def test_only_what_may_become_a_stop_string_is_held_back():
    stops = Stops(["END", "."])
    assert [stops.push(piece) for piece in ("one E", "N", "Emy EN", "D two", "three")] == ["one ", "", "ENEmy ", "", ""]
    assert stops.found and stops.flush() == ""
    free = Stops([])
    assert free.push("E") == "E"


def test_a_stop_string_inside_a_split_character_and_in_the_last_breath(tokenizers):
    tokenizer = tokenizers["bytes"][0]
    decode = decoding(tokenizer)
    tokens = tokenizer("ab日本cd").input_ids
    text = AnswerText(decode, ["日本"])
    said = ""
    for used, token in enumerate(tokens, 1):  # noqa: B007
        said += text.push(token)
        if text.stopped:
            break
    assert (said, used) == ("ab", 8) and text.flush() == ""
    late = AnswerText(decode, ["b\ufffd"])
    assert "".join(late.push(token) for token in tokens[:4]) == "a" and late.flush() == "" and late.stopped
