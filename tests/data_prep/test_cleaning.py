"""Each rule on its own, their order, and what they count; n-grams and MinHash against slow definitions."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest

from data_prep.cleaning import Cleaner, Dropped, empty_turns, html, leading_assistant, make_cleaner, repeated_roles, usable
from data_prep.overlap import EvaluationSets, band_keys, growing_grams, jaccard, near_grams, rows_per_band, word_hashes
from data_prep.page import page_text
from data_prep.sources import BadRecord, Conversation, Quarantined
from kvshot_ds.config import CleaningConfig
from kvshot_ds.errors import ConfigError


def said(*turns: str) -> tuple[dict[str, Any], ...]:
    """'u: text' -> a message of the user, and so on."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return tuple({"role": names[turn[0]], "content": turn[2:].strip()} for turn in turns)


def cleaner(answers: bool = True, **options: Any) -> Cleaner:
    return make_cleaner(CleaningConfig.model_validate(options), answers)


def cleaned(messages: tuple[dict[str, Any], ...], answers: bool = True, **options: Any) -> Any:
    return cleaner(answers, **options).outcome(Conversation(messages, "f", 1))


CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}


def test_empty_turns() -> None:
    fine = said("s: S", "u: A", "a: B")
    assert empty_turns(fine, True).found == ""
    found = empty_turns(said("s:", "u: A", "a: B", "u:", "a: C", "u: D"), True)
    assert found.messages == said("u: A", "a: B") and found.found == "turn 1 is empty"
    assert empty_turns((*said("u: A"), CALLS, *said("t:", "a: B")), True).found == "", "a call has no words, and a tool may answer nothing"
    assert empty_turns(said("u: A", "a:", "u: B"), answers=False).found == "", "answers that are written anew may be empty"


def test_leading_assistant() -> None:
    assert leading_assistant(said("s: S", "u: A"), True).found == ""
    found = leading_assistant(said("s: S", "a: X", "t: Y", "u: A", "a: B"), True)
    assert found.messages == said("s: S", "u: A", "a: B") and found.found.startswith("turn 2 ")
    assert leading_assistant(said("a: X"), True).messages == ()


def test_repeated_roles() -> None:
    assert repeated_roles(said("s: S", "u: A", "a: B", "u: C"), True).found == ""
    found = repeated_roles(said("u: A", "u: B", "u: C", "a: D", "a: E"), True)
    assert found.messages == said("u: A\n\nB\n\nC", "a: D\n\nE") and found.found == "turn 2 is the user's again"
    tools = (*said("u: A"), CALLS, *said("t: 1", "t: 2", "a: B"))
    assert repeated_roles(tools, True).messages == tools
    thoughts = tuple({**m, "reasoning_content": m["content"].lower()} for m in said("a: D", "a: E"))
    assert repeated_roles(thoughts, True).messages == ({"role": "assistant", "content": "D\n\nE", "reasoning_content": "d\n\ne"},)


PAGES = {
    "<p>Hello <strong>you</strong>,<br>1 &lt; 2</p>": "Hello you,\n1 < 2",
    "<div class='markdown prose'><p>a</p><p>b</p></div>": "a\n\nb",
    "<p>a</p>\n<p>b</p>": "a\n\nb",
    "<html><body><h1>T</h1><p>x</p></body></html>": "T\n\nx",
    "<p>To do:</p><ol><li>One</li><li><p>Two</p><ul><li>in</li></ul></li></ol><p>End</p>": "To do:\n\n1. One\n2. Two\n  - in\n\nEnd",
    "<p>Call <code>f(x)</code> now</p>": "Call `f(x)` now",
    '<p>See</p><pre><div><span>css</span><button>Copy <svg><path d="M1"></path></svg>code</button></div><code class="language-css">'
    "a {\n  b: <span>1</span>;\n}\n</code></pre>": "See\n\n```css\na {\n  b: 1;\n}\n```",
    "<pre>x\n  y</pre>": "```\nx\n  y\n```",
    "<table><thead><tr><th>A</th><th>B</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>": "A | B\n1 | 2",
}
NO_PAGES = [
    "Use <b>tags</b>.",
    "<p>a</p> and then",
    "<p>unclosed",
    "<p>crossed<b></p></b>",
    "</p>",
    "<p>",
    "<b>bold alone</b>",
    "<br>",
    "<!DOCTYPE html><html><body><p>x</p></body></html>",
    "<html><head><title>x</title></head><body><p>x</p></body></html>",
    "<div>\n  <p>indented source</p>\n</div>",
    "<script>alert(1)</script>",
    '<p onclick="go()">x</p>',
    '<p v-if="x">x</p>',
    '<li :key="x">x</li>',
    "<p>{{ name }}</p>",
    '<p class="{% if x %}a{% endif %}">x</p>',
    "<ul>{items.map(i => <Item key={i} />)}</ul>",
    "<form><p>x</p></form>",
    "<note><to>x</to></note>",
    "<?php echo '<p>x</p>' ?>",
    "<![CDATA[<p>x</p>]]>",
    "```html\n<p>x</p>\n```",
    "<",
    "<>",
    "<p></p>",
    "a < b and c > d",
]


@pytest.mark.parametrize("page", PAGES)
def test_a_rendered_page_becomes_its_text(page: str) -> None:
    assert page_text(page) == PAGES[page]
    assert html(said(f"u: {page}"), True).messages == said(f"u: {PAGES[page]}")


@pytest.mark.parametrize("text", NO_PAGES)
def test_what_is_no_rendered_page_is_left_alone(text: str) -> None:
    assert page_text(text) is None
    assert html(said(f"u: {text}"), True).messages == said(f"u: {text}")


@pytest.mark.parametrize(("opening", "closing"), [("<b>", "</b>"), ("<ul><li>", "</li></ul>")])
def test_tags_without_end_within_each_other_are_no_page(opening: str, closing: str) -> None:
    """They would cost their number squared, in time or in blanks."""

    def nested(depth: int) -> str:
        return f"<p>{opening * depth}x{closing * depth}</p>"

    assert page_text(nested(20)) is not None
    assert page_text(nested(20_000)) is None


def test_usable() -> None:
    assert usable(said("u: A", "a: B", "u: C"), True) == said("u: A", "a: B")
    assert usable(said("s: S", "u: A", "a: B", "u: C", "a: D"), False) == said("s: S", "u: A", "u: C")
    for messages, why in ((said("s: S"), "no user turn"), (said("u: A"), "no assistant turn"), ((), "no user turn")):
        with pytest.raises(BadRecord, match=why):
            usable(messages, True)


def test_rules_mend_in_order_refuse_or_are_off() -> None:
    messy = said("s:", "a: hello", "u: <p>A</p>", "u: A2", "a: B", "u:", "a: lost")
    done = cleaned(messy)
    assert done.item.messages == said("u: A\n\nA2", "a: B")
    assert done.mended == ("html", "empty_turns", "leading_assistant", "repeated_roles")
    for rule, why in (("html", "html: turn 3 is a rendered page"), ("empty_turns", "empty_turns: turn 1 is empty")):
        assert cleaned(messy, **{rule: "refuse"}).item.reason.startswith(why)
    off = cleaned(messy, html="off", empty_turns="off", leading_assistant="off", repeated_roles="off")
    assert off.item.messages == messy and off.mended == ()
    assert cleaned(said("u:", "a: B")).item.reason == "no user turn (after empty_turns)"
    broken = Quarantined("f", 1, "why", "x")
    assert cleaner().outcome(broken).item is broken


def test_questions_alone() -> None:
    done = cleaned(said("u: A", "a:", "u: B", "a: <p>x</p>"), answers=False)
    assert done.item.messages == said("u: A", "u: B") and done.mended == ()
    for messages, tools in (((*said("u: A"), CALLS), ()), (said("u: A", "a: B"), ({"type": "function"},)), (said("u: A", "a: B", "t: C"), ())):
        made = make_cleaner(CleaningConfig(), answers=False).outcome(Conversation(messages, "f", 1, tools))
        assert isinstance(made.item, Quarantined) and made.item.reason.startswith("tools: ")
        assert isinstance(make_cleaner(CleaningConfig(), answers=True).outcome(Conversation((*messages, *said("a: C")), "f", 1, tools)).item, Conversation)


def test_languages() -> None:
    english = said("u: Where is the nearest railway station, please?", "a: It is just around the corner, next to the old town hall.")
    french = said("u: Où se trouve la gare la plus proche, s'il vous plaît ?", "a: Elle est juste au coin de la rue, à côté de l'hôtel de ville.")
    assert isinstance(cleaned(english, languages=["en"]).item, Conversation)
    out = cleaned(french, languages=["en", "de"]).item
    assert isinstance(out, Dropped) and (out.rule, out.reason) == ("languages", "its language is fr")
    assert isinstance(cleaned(french, languages=["fr"]).item, Conversation)
    code = said(
        "u: Quelle est la sortie de ce programme ?\n```python\n" + "for the in range(that): print('with this and those')\n" * 20 + "```\nMerci beaucoup !",
        "a: Rien.",
    )
    assert isinstance(cleaned(code, languages=["fr"]).item, Conversation), "code blocks do not count"
    with pytest.raises(ConfigError, match=r"languages: klingon not known; known: .*en.*fr"):
        cleaner(languages=["klingon"])


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_grams_are_those_of_a_slow_count() -> None:
    draw = random.Random(0)
    text = " ".join(draw.choice(("The", "cat,", "sat!", "on", "a", "MAT?", "and", "dog")) for _ in range(60))
    plain = words_of(text)
    for n, grams in growing_grams(word_hashes(text), 13):
        slow = [tuple(plain[i : i + n]) for i in range(len(plain) - n + 1)]
        assert len(grams) == len(slow)
        assert len(set(grams.tolist())) == len(set(slow)) == len(set(zip(slow, grams.tolist(), strict=True)))
    assert len(word_hashes("...!")) == 0 and len(near_grams(["", "?"])) == 0
    assert len(near_grams(["one two", "three"])) == 1, "fewer than five words count as one n-gram"
    assert len(word_hashes("我能吞 ok")) == 4, "each ideograph is a word"


def test_minhash_finds_what_is_alike() -> None:
    """Bands bring together nearly all pairs above the threshold, and few of those far below it; jaccard is the true one."""
    draw = random.Random(1)
    rows = rows_per_band(0.8)
    hits = {True: [0, 0], False: [0, 0]}
    for _ in range(200):
        base = [f"w{draw.randrange(5000)}" for _ in range(300)]
        rate = draw.choice((0.01, 0.3))
        changed = [f"x{draw.randrange(5000)}" if draw.random() < rate else w for w in base]
        a, b = near_grams([" ".join(base)]), near_grams([" ".join(changed)])
        slow_a, slow_b = ({tuple(w[i : i + 5]) for i in range(len(w) - 4)} for w in (base, changed))
        similarity = len(slow_a & slow_b) / len(slow_a | slow_b)
        assert jaccard(a, b) == pytest.approx(similarity, abs=1e-12)
        shares = bool(set(band_keys(a, rows)) & set(band_keys(b, rows)))
        if similarity >= 0.8 or similarity < 0.3:
            hits[similarity >= 0.8][0] += shares
            hits[similarity >= 0.8][1] += 1
    assert hits[True][1] > 20 and hits[True][0] >= 0.95 * hits[True][1]
    assert hits[False][1] > 20 and hits[False][0] <= 0.05 * hits[False][1]
    assert len(band_keys(near_grams([]), rows)) == 0
    assert (band_keys(a, rows) == band_keys(a, rows)).all() and len(band_keys(a, rows)) == 128 // rows
    assert rows_per_band(1.0) == 128


def test_band_keys_do_not_depend_on_the_process() -> None:
    import subprocess
    import sys

    code = "from data_prep.overlap import *; print(band_keys(near_grams(['one two three four five six']), 7).tolist())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert json.loads(done.stdout) == band_keys(near_grams(["one two three four five six"]), 7).tolist()


LONG = "Write a function that takes a list of numbers and returns the two largest of them in order, please."


def test_evaluation_prompts_are_found_by_thirteen_words_in_a_row(tmp_path: Path) -> None:
    mt = tmp_path / "question.jsonl"
    mt.write_text(json.dumps({"turns": [LONG, "Now in Rust!", "Why is the sky blue?"]}) + "\n")
    human = tmp_path / "HumanEval.jsonl.gz"
    human.write_bytes(gzip.compress(json.dumps({"prompt": "def add(a: int, b: int) -> int: ''' returns the sum of both numbers, a and b '''"}).encode()))
    clean = cleaner(evaluation_sets=[mt, human])

    def rule(*turns: str) -> str:
        item = clean.outcome(Conversation(said(*turns), "f", 1)).item
        return item.rule if isinstance(item, Dropped) else ""

    thirteen = " ".join(words_of(LONG)[2:15])
    assert rule(f"u: well: {thirteen.upper()}, yes", "a: x") == "evaluation: question.jsonl"
    assert rule("u: x", f"a: quote: {thirteen}") == "evaluation: question.jsonl", "in any message"
    assert rule("u: " + " ".join(words_of(LONG)[2:14]), "a: x") == "", "twelve are not enough"
    assert rule("u: def add(a: int, b: int) -> int:\n  returns the sum of both numbers a and b", "a: x") == "evaluation: HumanEval.jsonl.gz"
    assert rule("u: Tell me: why IS the sky blue, then?", "a: x") == "evaluation: question.jsonl", "five words of a prompt of five"
    assert rule("u: now, in rust", "a: x") == "evaluation: question.jsonl", "a short prompt that is all of a turn"
    assert rule("u: now, in rust, please", "a: x") == "" and rule("u: x", "a: Now in Rust!") == ""
    assert rule("u: Something else", "a: x") == ""
    assert not cleaner(evaluation_sets=[mt], evaluation_ngram=0).evaluation.names
    again: Cleaner = pickle.loads(pickle.dumps(clean))  # noqa: S301 - as it goes to another process
    assert again.evaluation.hit(said(f"u: {LONG}")) == "question.jsonl"


def test_evaluation_hits_are_those_of_a_slow_search() -> None:
    draw = random.Random(2)
    words = [f"w{n}" for n in range(12)]
    prompts = [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(30)]
    sets = EvaluationSets.build({"e": prompts}, 6)

    def slow(text: str) -> bool:
        found = words_of(text)
        for prompt in map(words_of, prompts):
            n = min(6, len(prompt))
            wanted = [prompt[i : i + n] for i in range(len(prompt) - n + 1)]
            if n < 5 and found == prompt:
                return True
            if n >= 5 and any(found[i : i + n] in wanted for i in range(len(found) - n + 1)):
                return True
        return False

    texts = [" ".join(draw.choices(words, k=draw.randint(1, 4))) for _ in range(3000)]
    texts += [" ".join([*draw.choices(words, k=9), *draw.choice(prompts).split()[: draw.randint(1, 9)], *draw.choices(words, k=9)]) for _ in range(500)]
    found = [sets.hit(said(f"u: {text}")) == "e" for text in texts]
    assert found == [slow(text) for text in texts] and 100 < sum(found) < 3000


def test_two_evaluation_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "e.jsonl", tmp_path / "b" / "e.jsonl"]
    for n, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(json.dumps({"prompt": f"this is the evaluation prompt of number {n}"}))
    assert cleaner(evaluation_sets=paths).evaluation.hit(said("u: this is the evaluation prompt of number 1")) == str(paths[1])


def test_unknown_combinations_are_refused() -> None:
    with pytest.raises(ValueError, match="needs near_duplicates=0"):
        CleaningConfig(exact_duplicates=False)
    assert not CleaningConfig(exact_duplicates=False, near_duplicates=0).exact_duplicates
