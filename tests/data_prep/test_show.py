"""kvshot prep show: exact text, marks that need no colour, selection, and what it says of truncation."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_prep.chat import ChatTemplate
from data_prep.show import Shown, lines, pieces, print_conversation
from kvshot_ds.cli import cli
from kvshot_ds.target import load_tokenizer
from tests.data_prep.words import FOLDER, byte_tokenizer, says, user, word_template

TALK = [user("Hi 😀"), says("Yes.\nSo."), user("Why?"), says("So.")]
LEGEND = "⟦supervised⟧, with the turn's number in the margin  ·  ⏎ line break  ·  special tokens by their names\n"


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like SentencePiece's: the decoder drops the blank of the first word."""
    names = ["<unk>", "▁", *"abé", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("tokenizer", [byte_tokenizer("qwen2_5"), metaspace_tokenizer()], ids=["bytes", "metaspace"])
@given(text=st.text(st.sampled_from("ab é😀\n�中ok"), max_size=12), split=st.integers(0, 40))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_pieces_spell_the_text(tokenizer: Any, text: str, split: int) -> None:
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    turns = [int(j >= split) for j in range(len(tokens))]
    found = pieces(tokenizer, frozenset(), tokens, turns)
    assert "".join(piece.text for piece in found) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    assert "😀" not in text or any("😀" in piece.text for piece in found), "a character of several tokens is one piece"
    shown = "".join(line.plain for _, line in lines(found))
    assert re.sub("[⟦⟧]", "", shown) == "".join(piece.text for piece in found).replace("\n", "⏎")


def test_a_cut_character_is_shown_as_one() -> None:
    tokenizer = byte_tokenizer("qwen2_5")
    tokens = tokenizer("中", add_special_tokens=False).input_ids
    assert len(tokens) == 3
    assert [piece.text for piece in pieces(tokenizer, frozenset(), tokens, [1] * 3)] == ["中"]
    assert "".join(piece.text for piece in pieces(tokenizer, frozenset(), tokens[:2], [1] * 2)).strip("�") == ""


@pytest.fixture
def recipe(tmp_path: Path, tiny_target: Path) -> Path:
    path = tmp_path / "r.yaml"
    source = tmp_path / "talk.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in (TALK, [user("Hi")], [user("<|im_end|>"), says("Yes.")])))
    options = {"name": "r", "work": str(tmp_path / "work"), "target": {"path": str(tiny_target)}}
    path.write_text(json.dumps({**options, "prep": {"sources": [{"path": str(source)}], "regenerate": {"enabled": True}}}))
    return path


@pytest.fixture
def prepared(recipe: Path, tiny_target: Path) -> Path:
    """The recipe, with two conversations prepared for training and one held out."""
    template = ChatTemplate(load_tokenizer(tiny_target))
    folder = recipe.parent / "work" / "prepared"
    folder.mkdir(parents=True)
    whole = template.encode(TALK)
    short = whole.cut(len(whole.tokens) - 3)
    assert short is not None
    for split, ids in (("train", {"aa1": whole, "ab2": short}), ("heldout", {"cc3": whole})):
        rows = [{"id": id, "messages": TALK, "tokens": e.tokens, "turn": e.turn, "source": f"talk.jsonl:{n}"} for n, (id, e) in enumerate(ids.items(), 1)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return recipe


def show(recipe: Path, *words: object) -> str:
    done = CliRunner().invoke(cli, ["prep", "show", str(recipe), *map(str, words)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_a_prepared_conversation(prepared: Path) -> None:
    shown = show(prepared, "--line", 1)
    total, supervised = re.findall(r"(\d+) tokens, (\d+) supervised", shown)[0]
    assert shown == (
        "aa1  train.jsonl:1  from talk.jsonl:1\n"
        f"  {total} tokens, {supervised} supervised ({int(supervised) / int(total):.1%}) in 2 turns\n"
        "   │ <|im_start|>user⏎\n"
        "   │ Hi 😀<|im_end|>⏎\n"
        "   │ <|im_start|>assistant⏎\n"
        "  1▌ ⟦Yes.⏎\n"
        "  1▌ So.<|im_end|>⟧⏎\n"
        "   │ <|im_start|>user⏎\n"
        "   │ Why?<|im_end|>⏎\n"
        "   │ <|im_start|>assistant⏎\n"
        "  2▌ ⟦So.<|im_end|>⟧\n"
        "\n" + LEGEND
    )
    line = json.loads((prepared.parent / "work/prepared/train.jsonl").read_text().splitlines()[0])
    assert (int(total), int(supervised)) == (len(line["tokens"]), sum(turn > 0 for turn in line["turn"]))


def test_what_was_cut_is_told(prepared: Path) -> None:
    shown = show(prepared, "ab2")
    assert "  2▌ ⟦" in shown and "cut here: 3 more tokens are not used (prep.max_length=2048)" in shown
    assert "cut here" not in show(prepared, "aa1")


def test_an_answer_without_its_end_is_called_unfinished_not_cut(prepared: Path) -> None:
    path = prepared.parent / "work/prepared/train.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps({**row, "tokens": row["tokens"][:-1], "turn": row["turn"][:-1]}) + "\n")
    shown = show(prepared)
    assert "! the last answer is not finished" in shown and "cut here" not in shown


def test_turns_left_out_are_told(recipe: Path) -> None:
    shown = show(recipe, "1", f"prep.template.jinja={FOLDER / 'qwen3.jinja'}", "prep.template.thinking=false")
    assert "in 1 turns\n" in shown and "  2▌ ⟦So.<|im_end|>⟧\n" in shown
    assert "  ! assistant turns not supervised, as the template rewrites them once they are history: 1\n" in shown


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], ["aa1", "ab2"]),
        (["--count", 1], ["aa1"]),
        (["2"], ["ab2"]),
        (["--id", "a"], ["aa1", "ab2"]),
        (["--source", "elsewhere/talk.jsonl:2"], ["ab2"]),
        (["--source", "talk.jsonl"], ["aa1", "ab2"]),
        (["--split", "heldout", "prep.seed=3"], ["cc3"]),
    ],
)
def test_selection(prepared: Path, words: list[object], ids: list[str]) -> None:
    assert re.findall(r"^(\w+)  (?:train|heldout)\.jsonl:\d+", show(prepared, *words), re.MULTILINE) == ids


def test_nothing_fits(prepared: Path) -> None:
    for words, said in ((["zz"], "no conversation with id zz"), (["9"], "with line 9"), (["--source", "x.json"], "with source x.json")):
        with pytest.raises(Exception, match=said):
            show(prepared, *words)
    (prepared.parent / "work/prepared/train.jsonl").write_text('{"id": "aa1"}\n')
    with pytest.raises(Exception, match=r"train\.jsonl:1: not a prepared conversation"):
        show(prepared)


def test_before_preparation_the_sources_are_shown(recipe: Path) -> None:
    shown = show(recipe)
    assert shown.count("not prepared, as it stands in") == 3
    assert "  2▌ ⟦So.<|im_end|>⟧\n  ! before cleaning, with the answers of the source: the target will write its own\n" in shown
    assert "   │ Hi<|im_end|>⏎\n   │ <|im_start|>assistant⏎\n  ! before cleaning; the target will write the answer that follows\n" in shown
    assert "  left out: message 1 contains the special token '<|im_end|>' as text\n" in shown
    assert show(recipe, "--source", "talk.jsonl:2").count("not prepared") == 1
    assert "  left out: no assistant turn\n" in show(recipe, "2", "prep.regenerate.enabled=false")
    assert re.search(r"left out: nothing to learn from in the first 8 of \d+ tokens", show(recipe, "1", "prep.max_length=8", "prep.regenerate.enabled=false"))


def test_turns_on_one_line_are_parted() -> None:
    console = Console(file=io.StringIO(), width=60)
    template = word_template("mistral")
    print_conversation(console, template, Shown("t", template.encode([user("Hi"), says("Yes."), user("Why?"), says("So.")])))
    assert console.file.getvalue().splitlines()[2:] == ["  1▌ <s>[INST] Hi[/INST]⟦ Yes.</s>⟧[INST] Why?[/INST]", "  2▌ ⟦ So.</s>⟧", ""]


@pytest.mark.parametrize("plain", [False, True])
def test_colours_only_where_wanted(plain: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, force_terminal=True, color_system="standard", _environ={"NO_COLOR": "1"} if plain else {})
    template = word_template("qwen2_5")
    print_conversation(console, template, Shown("t", template.encode([user("Hi"), says("Yes " * 30)])))
    colours = re.findall(r"\x1b\[[\d;]*3[0-7]m", out.getvalue())
    assert bool(colours) != plain
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert text.count("⟦") == text.count("⟧") == 1
    assert max(map(len, text.splitlines()[2:])) <= 40
    assert sum(line.startswith("  1▌ ") for line in text.splitlines()) >= 3, "a wrapped line keeps its turn in the margin"


def test_prep_itself_is_still_there(recipe: Path) -> None:
    assert "kvshot prep show RECIPE [ID | LINE]" in CliRunner().invoke(cli, ["prep", "--help"]).output
    assert "Usage: cli prep show [OPTIONS] RECIPE" in CliRunner().invoke(cli, ["prep", "show", "--help"]).output
    done = CliRunner().invoke(cli, ["prep", str(recipe.with_name("absent.yaml"))])
    assert "no such recipe" in str(done.exception)
