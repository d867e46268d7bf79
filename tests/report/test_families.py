"""What tells drafters apart on the page: order, words, colours, and what is a control of what."""

from __future__ import annotations

import pytest

from kvshot_ds.config import AnyDrafterConfig
from kvshot_ds.report import figures
from kvshot_ds.report.families import COUNTERPARTS, CROSS_ONLY, FAMILIES, NO_TARGET, OFFLINE, ORDER, OWN_KV, Drafter, drafter_of, rank, styles
from kvshot_ds.report.gather import gather

from .conftest import KV, MANY, recipe_for


def drafter(options, **train):
    return drafter_of(recipe_for("work", "run", options, train=train))


def test_every_family_of_the_configuration_has_its_place():
    assert {variant.model_fields["family"].default for variant in AnyDrafterConfig.__args__} == set(FAMILIES)
    assert set(COUNTERPARTS) | set(COUNTERPARTS.values()) == set(FAMILIES)
    assert len(figures.LIGHT.series) == figures.COLOURS == len(ORDER), "a colour for each family"


def test_colour_is_the_family_and_no_style_is_given_twice(many):
    found = {run.name: run.style for run in gather(recipe_for(many)).runs}
    assert len(set(found.values())) == len(MANY)
    assert found["mtp"] % 6 == found["hidden_only"] % 6 != found["kv_only"] % 6 == found["kv_none"] % 6
    assert len({found[name] % 6 for name in ("hidden_only", "kv_only", "hybrid", "dflash", "kv_block", "hybrid_block")}) == 6
    assert {name: found[block] - found[name] for block, name in COUNTERPARTS.items()} == {"hidden_only": 3, "kv_only": 3, "hybrid": 3}


def test_styles_go_on_when_a_family_has_many_runs_or_is_not_known():
    strange = Drafter("strange", 1, None, "random", "random")
    given = styles([drafter(MANY["kv_only"])] * 30 + [None, strange] * 5)
    assert len(set(given)) == 40
    drawn = {figures.swatch(style) for style in given[:24]}
    assert len(drawn) == 24, "24 runs of one family: six markers and four dashes in one colour"


def test_order_of_the_page(many):
    assert [run.name for run in gather(recipe_for(many)).runs] == list(MANY)
    assert rank(None) > rank(Drafter("strange", 1, None, "", "")) > rank(drafter(MANY["hybrid_block"]))


@pytest.mark.parametrize(
    ("options", "train", "label"),
    [
        (MANY["hidden_only"], {}, "hidden-only · depth 1"),
        (MANY["mtp"], {}, "hidden-only, last layer · depth 1"),
        ({"family": "kv_only", "kv": {"projector": "mlp", "qk_norm": True}}, {}, "KV-only · depth 2 · linear_rope · mlp projector · QK-norm"),
        (MANY["hybrid"], {}, "hybrid · depth 1 · linear_rope · gate elementwise, random"),
        (MANY["hybrid"] | {"gate": {"kind": "none"}}, {}, "hybrid · depth 1 · linear_rope · no gate, random"),
        (
            MANY["hybrid"] | {"gate": {"open_steps": 5, "floor": 0.2, "floor_steps": 9}},
            {},
            "hybrid · depth 1 · linear_rope · gate elementwise, random, held open for 5 steps, floor 0.2 over 9 steps",
        ),
        (MANY["hybrid"] | {"cross_only": True}, {}, "hybrid · depth 1 · linear_rope · KV path alone"),
        (MANY["hybrid"] | {"carry": "none", "cross_only": True}, {}, "hybrid · depth 1 · linear_rope · KV path alone · hidden state at step 0 alone"),
        (MANY["kv_only"], {"objective": {"drift": "offline"}}, "KV-only · depth 2 · linear_rope · offline"),
        (MANY["dflash"], {}, "DFlash · depth 2 · blocks of 8"),
        (MANY["hybrid_block"], {}, "hybrid block · depth 2 · linear_rope · gate scalar, bias:-1 · blocks of 8"),
    ],
)
def test_labels(options, train, label):
    assert drafter(options, **train).label == label


def test_controls_are_what_they_leave_out():
    assert drafter(MANY["kv_only"]).controls == drafter(MANY["mtp"]).controls == frozenset()
    assert drafter(MANY["kv_none"], objective={"drift": "offline"}).controls == {NO_TARGET, OFFLINE}
    assert drafter({"family": "kv_block", "kv": {"injection": "hidden_to_kv"}}).controls == {OWN_KV}
    assert drafter({"family": "hybrid", **KV, "cross_only": True}).controls == {CROSS_ONLY}


def test_sentences_say_what_is_read():
    for name, options in MANY.items():
        text = drafter(options).text
        assert text.startswith(FAMILIES[options["family"]].text) and not text.endswith("."), name
    assert drafter(MANY["kv_none"]).text.endswith("control: it is told nothing of the target")
    assert drafter(MANY["mtp"]).text.endswith("the last layer's hidden state alone")
    assert Drafter("strange", 2, None, "", "").label == "strange · depth 2" and Drafter("strange", 2, None, "", "").text == ""
