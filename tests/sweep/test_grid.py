"""What a sweep's recipe asks for: cells, trials, their addresses, warm starts, controls, and what is refused."""

from __future__ import annotations

import datetime
import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshot_ds.config import SweepConfig, load_recipe
from kvshot_ds.describe import SHAPES
from kvshot_ds.drafters.build import FORMAT
from kvshot_ds.errors import ConfigError
from kvshot_ds.sweep.axes import cells, select, written
from kvshot_ds.sweep.folder import Trial
from kvshot_ds.sweep.grid import Data, Grid, address, expand, trial_recipe
from kvshot_ds.sweep.run import _note
from kvshot_ds.typed import parse
from tests.sweep.plans import TINY, data, manifest, recipe_of

SWEEPS = sorted((Path(__file__).parents[2] / "recipes").glob("*/sweep_*.yaml"))
TARGETS = {"tiny": TINY, "smollm2_135m": SHAPES["smollm2-135m"], "qwen3_8b": SHAPES["qwen3-8b"]}


def names(axes: list[Any], **more: Any) -> list[str]:
    return [cell.name for cell in cells(SweepConfig(axes=axes, **more)).kept]


def by_cell(grid: Grid, seed: int = 0) -> dict[str, Trial]:
    return {trial.cell: trial for trial in grid.trials if trial.seed == seed}


def test_items_are_crossed_and_names_of_one_item_zipped() -> None:
    axes = [{"depth": [1, 2]}, {"lr": [0.1, 0.2], "train.optim.clip": [1, 2]}]
    found = cells(SweepConfig(axes=axes)).kept
    assert [cell.name for cell in found] == [f"depth={d} lr={lr} train.optim.clip={clip}" for d in (1, 2) for lr, clip in ((0.1, 1), (0.2, 2))]
    assert found[1].options == {"train.drafter.depth": 1, "train.optim.lr": 0.2, "train.optim.clip": 2}


def test_named_variants_set_short_dotted_and_nested_options() -> None:
    variants = {"plain": None, "kv": {"family": "kv_only", "kv_layers": [1, 2], "train.drafter": {"kv": {"qk_norm": True}}}}
    plain, kv = cells(SweepConfig(axes=[{"drafter": variants}])).kept
    assert plain.options == {} and plain.labels == {"drafter": "plain"}
    assert kv.options == {"train.drafter.family": "kv_only", "train.drafter.kv.layers": [1, 2], "train.drafter.kv.qk_norm": True}


def test_values_as_text() -> None:
    assert names([{"warm_start": [None, "x"]}, {"kv_layers": ["all", [1, 2]]}]) == [
        f"warm_start={warm} kv_layers={layers}" for warm in ("none", "x") for layers in ("all", "[1,2]")
    ]
    assert names([{"lr": [datetime.date(2020, 1, 1), math.nan]}]) == ['lr="2020-01-01"', "lr=NaN"]  # judged by the option's own type, not here
    assert names([]) == ["recipe"]


@pytest.mark.parametrize("value", [[1, 2], "1e-3", "no", "null", None, True, 0.5, "bias:-2", "cell:", 'a "b", {c}', {"lr": 0.1}])
def test_a_label_is_written_so_that_an_exclusion_means_it(value: Any) -> None:
    (cell,) = cells(SweepConfig(axes=[{"init": [value]}])).kept
    assert select([cell], yaml.safe_load(f"{{init: {written(cell.labels['init'])}}}"), "here") == [cell]


def test_off_may_be_what_yaml_makes_of_it() -> None:
    assert SweepConfig.model_validate(yaml.safe_load("controls: off")).controls == "off"


def test_exclusions() -> None:
    axes = [{"family": ["hidden_only", "hybrid"]}, {"depth": [1, 2, 4]}]
    found = cells(SweepConfig(axes=axes, exclude=[{"family": "hybrid", "depth": [2, 4]}]))
    assert [cell.name for cell in found.kept] == [
        "family=hidden_only depth=1",
        "family=hidden_only depth=2",
        "family=hidden_only depth=4",
        "family=hybrid depth=1",
    ]
    assert [cell.name for cell in found.excluded] == ["family=hybrid depth=2", "family=hybrid depth=4"]
    variants = [{"drafter": {"a": {"family": "hybrid"}, "b": {"family": "kv_only"}}}]
    assert names(variants, exclude=[{"family": "hybrid"}]) == names(variants, exclude=[{"train.drafter.family": "hybrid"}]) == ["drafter=b"]


@pytest.mark.parametrize(
    ("axes", "more", "said"),
    [
        ([{"dept": [1]}], {}, r"no such axis or option 'dept'; did you mean depth"),
        ([{"train.optimizer.lr": [1]}], {}, r"'train\.optimizer\.lr'; did you mean lr or train\.optim\.lr"),
        ([{"train.optim": [1]}], {}, r"train\.optim is a section: name its options"),
        ([{"target.path": ["x"]}], {}, r"target\.path cannot vary within a sweep; .*`work` of its own"),
        ([{"capture.features.kv_layers": ["all"]}], {}, r"cannot vary within a sweep; capture once what any cell reads"),
        ([{"eval.steps": [3]}], {}, r"all trials are measured alike"),
        ([{"decode.drafting.length": [3]}], {}, r"only options below train\. shape a drafter"),
        ([{"train.data_workers": [0, 1]}], {}, r"does not shape the weights"),
        ([{"a": {"b": {"train.seed": 1}}}], {}, r"name them in sweep\.seeds"),
        ([{"a": {"b c": {}}}], {}, r"a variant's name without blanks"),
        ([{"a": {"b": 3}}], {}, r"a mapping from options to values, found 3"),
        ([{"depth": [1, 1]}], {}, r"axis depth has a value twice"),
        ([{"depth": [1]}, {"a": {"b": {"depth": 2}}}], {}, r"a=b sets train\.drafter\.depth to 2, another axis of the same cell to 1"),
        ([{"depth": [1]}], {"exclude": [{"depth": 3}]}, r"excludes no cell; values there are: depth: 1"),
        ([{"depth": [1]}], {"exclude": [{"dept": 1}]}, r"no axis and no varied option is named 'dept'; did you mean depth"),
        ([{"depth": [1]}], {"exclude": [{"depth": 1}]}, r"leaves none of the 1 cells"),
        ([{"depth": [1, 2]}, {"lr": [1, 2]}], {"baseline": {"depth": 1}}, r"means 2 cells, expected one \(depth=1 lr=1; depth=1 lr=2\)"),
        ([{"depth": [1, 2]}], {"baseline": {"depth": 3}}, r"means 0 cells"),
    ],
)  # fmt: skip
def test_refused(axes: list[Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cells(SweepConfig(axes=axes, **more))


def test_trials_are_all_cells_of_a_seed_then_of_the_next(tmp_path: Path) -> None:
    grid = expand(recipe_of(tmp_path, {"axes": [{"family": ["hidden_only", "kv_only"]}], "seeds": [3, 5]}), data())
    assert [(trial.seed, trial.cell) for trial in grid.trials] == [(s, f"family={f}") for s in (3, 5) for f in ("hidden_only", "kv_only")]
    assert grid.baseline == "family=hidden_only" and len({trial.name for trial in grid.trials}) == 4
    assert all(re.fullmatch(r"(hidden_only-1|kv_only-2)-[0-9a-f]{12}", trial.name) for trial in grid.trials)


def test_a_trial_is_the_recipe_with_its_options_and_nothing_of_the_sweep(tmp_path: Path) -> None:
    base = recipe_of(tmp_path, {"axes": [{"family": ["kv_only"]}, {"lr": [0.5]}], "seeds": [7]}, drafter={"family": "hybrid", "gate": {"init": "zero_delta"}})
    [trial] = expand(base, data()).trials
    again = parse(tuple[Trial, ...], json.loads(json.dumps([asdict(trial)])))[0]
    assert again == trial
    one = trial_recipe(base, again)
    assert one.run_dir == tmp_path / "trials" / trial.name and one.sweep == SweepConfig()
    assert (one.train.seed, one.train.optim.lr, one.train.drafter.family, one.train.drafter.depth) == (7, 0.5, "kv_only", 2)
    assert one.model_copy(update={"name": "mine", "runs": None, "sweep": base.sweep, "train": base.train}) == base


def test_an_address_is_of_the_contents_alone(tmp_path: Path) -> None:
    def of(found: Data | None = None, **train: Any) -> str:
        return address(recipe_of(tmp_path, {}, **train), found or data())

    base = of()
    assert re.fullmatch("[0-9a-f]{12}", base)
    assert base == of(log_every=3) == of(threads_per_rank=1) == address(recipe_of(tmp_path / "elsewhere", {}, name="other"), data())
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"stage": 1}}')
    first = of(ds_config=str(own))
    own.write_text('{"zero_optimization": {"stage": 2}}')
    others = [of(seed=1), of(optim={"lr": 0.5}), of(data(digest="other")), of(data(found=manifest(digest="other"))), first, of(ds_config=str(own))]
    assert len({base, *others}) == 1 + len(others)


def test_labels_and_order_of_axes_are_no_part_of_an_address(tmp_path: Path) -> None:
    grid = expand(recipe_of(tmp_path, {"axes": [{"depth": [1, 2]}, {"lr": [0.1, 0.2]}]}), data())
    other = expand(recipe_of(tmp_path, {"axes": [{"a": {"x": {"lr": 0.2}, "y": {"lr": 0.1}}}, {"b": {"z": {"depth": 2}, "w": {"depth": 1}}}]}, "other"), data())
    assert {trial.name for trial in grid.trials} == {trial.name for trial in other.trials}


def test_two_names_of_one_training_are_trained_once(tmp_path: Path) -> None:
    axes = [{"drafter": {"one": {"depth": 2}, "two": {"depth": 2}, "three": {}}}]
    grid = expand(recipe_of(tmp_path, {"axes": axes, "seeds": [0, 1], "baseline": {"drafter": "two"}}), data())
    assert [trial.cell for trial in grid.trials] == ["drafter=one", "drafter=three"] * 2
    assert grid.merged == ("drafter=two is the same training as drafter=one",) and grid.baseline == "drafter=one"


def test_cells_that_cannot_be_are_named_with_the_exclusion_that_helps(tmp_path: Path) -> None:
    sweep: dict[str, Any] = {"axes": [{"family": ["hybrid", "kv_only"]}, {"gate": ["random", "bias:2"]}]}
    with pytest.raises(
        ConfigError, match=r"2 of 4 cells cannot be trained\n  cell family=kv_only gate=random: train\.drafter\.gate: exists only with"
    ) as error:
        expand(recipe_of(tmp_path, sweep), data())
    excluded = [yaml.safe_load(line)[0] for line in re.findall(r"sweep\.exclude: (.*)", str(error.value))]
    grid = expand(recipe_of(tmp_path, {**sweep, "exclude": excluded}), data())
    assert [trial.cell for trial in grid.trials] == ["family=hybrid gate=random", "family=hybrid gate=bias:2"]
    assert grid.excluded == ("family=kv_only gate=random", "family=kv_only gate=bias:2")


def test_a_family_without_the_option_of_another_axis_is_told_how_to_write_it(tmp_path: Path) -> None:
    axes: list[Any] = [{"family": ["hidden_only", "hybrid"]}, {"gate": ["random", "bias:2"]}, {"conversations": [0, 8]}]
    with pytest.raises(ConfigError, match=r"leaves no cell with family=hidden_only\. Options that only some drafters have .*\(docs/sweeps\.md") as error:
        expand(recipe_of(tmp_path, {"axes": axes}), data())
    [proposed] = yaml.safe_load(str(error.value).splitlines()[-1])
    assert proposed["drafter"] == {
        "hidden_only": {"family": "hidden_only"},
        "hybrid_random": {"family": "hybrid", "gate": "random"},
        "hybrid_bias_2": {"family": "hybrid", "gate": "bias:2"},
    }
    assert len(expand(recipe_of(tmp_path, {"axes": [proposed, axes[2]]}), data()).trials) == 6
    for wrong in ([{"gate": ["random", "bias:2"]}], [{"family": ["hybrid"]}, {"gate": ["random", "shut"]}], [{"loss": ["kl", "soft"]}]):
        with pytest.raises(ConfigError, match="cannot be trained") as error:
            expand(recipe_of(tmp_path, {"axes": wrong}), data())
        assert "leaves no cell" not in str(error.value), "no variant could hold these"


def test_cells_that_fail_later_have_the_exclusion_too(tmp_path: Path) -> None:
    axes = [{"family": ["kv_only"]}, {"kv_layers": ["eagle3", [1, 99]]}, {"conversations": [5, 21]}]
    with pytest.raises(ConfigError, match="3 of 4 cells") as error:
        expand(recipe_of(tmp_path, {"axes": axes}), data())
    excluded = [yaml.safe_load(line)[0] for line in re.findall(r"sweep\.exclude: (.*)", str(error.value))]
    assert [trial.cell for trial in expand(recipe_of(tmp_path, {"axes": axes, "exclude": excluded}), data()).trials] == [
        "family=kv_only kv_layers=eagle3 conversations=5"
    ]


def test_a_wrong_value_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cell loss=soft: train\.objective\.loss: .*'soft_ce', 'kl'"):
        expand(recipe_of(tmp_path, {"axes": [{"loss": ["soft"]}]}), data())
    with pytest.raises(ConfigError, match=r"cell conversations=21: train\.max_conversations=21, but the train split holds 20"):
        expand(recipe_of(tmp_path, {"axes": [{"conversations": [5, 21]}]}), data())
    with pytest.raises(ConfigError, match=r"cell ds=no: train\.ds_config=nowhere"):
        expand(recipe_of(tmp_path, {"axes": [{"ds": {"no": {"train.ds_config": "nowhere"}}}]}), data())


def test_features_that_were_not_captured_are_named_with_the_capture(tmp_path: Path) -> None:
    sweep = {"axes": [{"family": ["kv_only"]}, {"kv_layers": ["eagle3", [1, 5]]}]}
    with pytest.raises(
        ConfigError,
        match=r"1 of 2 cells .*\n  cell family=kv_only kv_layers=\[1,5\]: the features lack key\.1.*kvshot capture RECIPE .*kv_layers=\[1, 2, 4, 5\]",
    ):
        expand(recipe_of(tmp_path, sweep), data())


def test_equal_steps(tmp_path: Path) -> None:
    axes = [{"conversations": [0, 8, 4]}]
    matched, plain = (expand(recipe_of(tmp_path, {"axes": axes, "match": match}, epochs=2), data()) for match in ("steps", "epochs"))
    recipes = [trial_recipe(recipe_of(tmp_path, {}, epochs=2), trial) for trial in matched.trials]
    assert list(matched.steps.values()) == [10, 10, 10] and list(plain.steps.values()) == [10, 4, 2]
    assert [(r.train.epochs, r.train.max_steps) for r in recipes] == [(2, 0), (5, 10), (10, 10)]
    assert matched.trials[0].name == plain.trials[0].name, "the longest is left as it is"
    assert not [line for line in matched.unequal if line.startswith("optimizer steps")]
    assert "passes over the data differ: 2, but 5 (conversations=8); 10 (conversations=4)" in matched.unequal
    assert "optimizer steps differ: 10, but 4 (conversations=8); 2 (conversations=4)" in plain.unequal


def test_what_is_unequal_is_told_unless_it_is_the_axis_itself(tmp_path: Path) -> None:
    assert expand(recipe_of(tmp_path, {"axes": [{"lr": [0.1, 0.2]}, {"family": ["hidden_only", "kv_only"]}]}), data()).unequal == ()
    axes = [{"drafter": {"a": {}, "b": {"lr": 0.1}, "c": {"train.conversations_per_step": 8, "steps": 2}}}]
    found = expand(recipe_of(tmp_path, {"axes": axes}), data()).unequal
    assert found == (
        "conversations of a step differ: 4, but 8 (drafter=c)",
        "draft steps in training differ: 3, but 2 (drafter=c)",
        "learning rates differ: 0.001, but 0.1 (drafter=b)",
        "passes over the data differ: 1, but 1.67 (drafter=c)",
    )


WARM = {"drafter": {"warm": {"family": "hybrid", "warm_start": "cell:drafter=source"}, "source": {"family": "hidden_only"}}}


def test_a_warm_start_takes_the_drafter_of_its_own_seed(tmp_path: Path) -> None:
    grid = expand(recipe_of(tmp_path, {"axes": [WARM], "seeds": [0, 1], "controls": "off"}), data())
    assert [trial.cell for trial in grid.trials] == ["drafter=source", "drafter=warm"] * 2, "the source is trained first"
    for seed in (0, 1):
        found = by_cell(grid, seed)
        warm, source = found["drafter=warm"], found["drafter=source"]
        assert warm.after == source.name and not source.after
        assert trial_recipe(recipe_of(tmp_path, {}), warm).train.init.warm_start == tmp_path / "trials" / source.name
    assert grid.unequal == ("training before the warm start is not counted in steps and tokens: drafter=warm",)


def test_the_address_of_a_warm_start_is_that_of_its_source(tmp_path: Path) -> None:
    def of(**source: Any) -> str:
        axes = [{"drafter": {**WARM["drafter"], "source": {"family": "hidden_only", **source}}}]
        return by_cell(expand(recipe_of(tmp_path, {"axes": axes, "controls": "off"}), data()))["drafter=warm"].name

    assert of() == of(depth=1) != of(depth=2)
    elsewhere = expand(recipe_of(tmp_path / "other", {"axes": [WARM], "controls": "off"}), data())
    assert by_cell(elsewhere)["drafter=warm"].name == of(), "where the work folder lies is no part of it"


def test_on_other_axes_the_source_is_like_the_cell(tmp_path: Path) -> None:
    axes = [{"conversations": [8, 12]}, {"family": ["hidden_only", "hybrid"]}, {"warm_start": [None, "cell:hidden_only"]}]
    grid = expand(recipe_of(tmp_path, {"axes": axes, "controls": "off"}), data())
    found = by_cell(grid)
    for n in (8, 12):
        source = found[f"conversations={n} family=hidden_only warm_start=none"].name
        assert found[f"conversations={n} family=hidden_only warm_start=cell:hidden_only"].after == source
        assert found[f"conversations={n} family=hybrid warm_start=cell:hidden_only"].after == source


STARTS: list[dict[str, Any]] = [
    {"drafter": {"cold": {"family": "hybrid"}, "warm": {"family": "hybrid", "warm_start": "cell:drafter=cold"}}},
    {"start": {"random": {}, "open": {"gate": "bias:2"}, "shut": {"gate": "bias:-2"}}},
    {"conversations": [8, 12]},
]


def test_a_source_has_the_one_value_there_is_where_it_cannot_have_the_cells_own_and_that_is_said(tmp_path: Path) -> None:
    grid = expand(recipe_of(tmp_path, {"axes": STARTS, "exclude": [{"drafter": "cold", "start": ["open", "shut"]}], "controls": "off"}), data())
    found = by_cell(grid)
    for start in ("random", "open", "shut"):
        for n in (8, 12):
            assert found[f"drafter=warm start={start} conversations={n}"].after == found[f"drafter=cold start=random conversations={n}"].name
    said = "drafter=warm start=open conversations=8 starts from drafter=cold start=random conversations=8, as no drafter=cold has start=open"
    assert said in grid.unequal and sum(" starts from " in line for line in grid.unequal) == 4


def test_a_source_that_is_one_of_several_and_has_not_the_cells_own_value_is_refused(tmp_path: Path) -> None:
    sweep = {"axes": STARTS, "exclude": [{"drafter": "cold", "start": "open"}], "controls": "off"}
    said = r"start=open conversations=8: .*cell:drafter=cold means 4 cells, of which none has this cell's own start=open .*: drafter=cold start=r"
    with pytest.raises(ConfigError, match=said):
        expand(recipe_of(tmp_path, sweep), data())
    named = [{"drafter": {**STARTS[0]["drafter"], "warm": {"family": "hybrid", "warm_start": "cell:drafter=cold start=shut"}}}, *STARTS[1:]]
    grid = expand(recipe_of(tmp_path, {**sweep, "axes": named}), data())
    found = by_cell(grid)
    assert found["drafter=warm start=open conversations=12"].after == found["drafter=cold start=shut conversations=12"].name
    assert not any(" starts from " in line for line in grid.unequal), "it is what was named"


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("cell:drafter=nobody", "means no cell of this sweep; cells: drafter=warm; drafter=source; drafter=deep"),
        ("cell:", "means no cell of this sweep"),
        ("cell:drafter=warm", "warm starts go in a circle: drafter=warm <- drafter=warm"),
        ("cell:drafter=deep", "warm starts go in a circle: drafter=warm <- drafter=deep <- drafter=warm"),
        ("nowhere/at/all", r"nowhere/at/all: no trained drafter here"),
    ],
)
def test_warm_starts_that_lead_nowhere(tmp_path: Path, start: str, said: str) -> None:
    axes = [{"drafter": {"warm": {"warm_start": start}, "source": {}, "deep": {"depth": 2, "warm_start": "cell:warm"}}}]
    with pytest.raises(ConfigError, match=said):
        expand(recipe_of(tmp_path, {"axes": axes}), data())


def test_a_warm_start_that_means_several_cells(tmp_path: Path) -> None:
    axes = [{"drafter": {"a": {"lr": 0.1}, "b": {"lr": 0.2}, "c": {"warm_start": "cell:injection=linear"}}}, {"injection": ["linear"]}]
    base = recipe_of(tmp_path, {"axes": axes}, drafter={"family": "kv_only"})
    with pytest.raises(
        ConfigError,
        match=r"cell drafter=c injection=linear: init\.warm_start=cell:injection=linear means 2 cells, of which none has .* drafter=c: .*name more",
    ):
        expand(base, data())


def test_controls_are_proposed_or_added(tmp_path: Path) -> None:
    proposed = expand(recipe_of(tmp_path, {"axes": [WARM]}), data())
    assert [(p.cell, p.control) for p in proposed.proposals] == [("drafter=warm", "scratch"), ("drafter=warm", "continued")]
    added_to = yaml.safe_load("\n".join(proposed.proposals[0].lines))["sweep"]
    base = recipe_of(tmp_path, {"axes": [WARM], **added_to})
    grid = expand(base, data())
    found = by_cell(grid)
    assert not grid.proposals and set(found) == {"drafter=source", "drafter=warm", "drafter=warm control=scratch", "drafter=warm control=continued"}
    scratch, continued, warm, source = (found[f"drafter={name}"] for name in ("warm control=scratch", "warm control=continued", "warm", "source"))
    assert (scratch.control, continued.control, warm.control) == ("scratch of drafter=warm", "continued of drafter=warm", "")
    assert (scratch.after, continued.after) == ("", source.name)
    trains = {trial.name: trial_recipe(base, trial).train for trial in grid.trials}

    def without_start(trial: Trial) -> Any:
        return trains[trial.name].model_copy(update={"init": None})

    assert without_start(scratch) == without_start(warm) and without_start(continued) == without_start(source)
    assert trains[continued.name].init.warm_start == trains[warm.name].init.warm_start and trains[scratch.name].init.warm_start is None


def test_controls_train_as_the_cell_does_and_are_not_doubled(tmp_path: Path) -> None:
    cells_ = {
        "source": {"family": "hidden_only", "conversations": 8},
        "hybrid": {"family": "hybrid"},
        "warm": {"family": "hybrid", "warm_start": "cell:source", "train.init.tensors": ["layers.*.self_attn.*"]},
        "slow": {"family": "hidden_only", "warm_start": "cell:source", "lr": 0.0001},
    }
    base = recipe_of(tmp_path, {"axes": [{"drafter": cells_}], "controls": "add"})
    grid = expand(base, data())
    found = by_cell(grid)
    assert {cell for cell in found if "control" in cell} == {"drafter=warm control=continued", "drafter=slow control=scratch"}, "hybrid is the scratch of warm"
    train = trial_recipe(base, found["drafter=warm control=continued"]).train
    assert (train.drafter.family, train.max_conversations, train.init.tensors) == ("hidden_only", 0, ("*",))
    assert set(grid.steps.values()) == {5}


def test_a_control_that_several_cells_share_is_that_of_all_of_them(tmp_path: Path) -> None:
    warm = {"family": "hybrid", "warm_start": "cell:source"}
    axes = [{"drafter": {"source": {"family": "hidden_only"}, "cold": {"family": "hybrid"}, "one": warm, "two": {**warm, "gate": "bias:2"}}}]
    proposed, added = (expand(recipe_of(tmp_path, {"axes": axes, "controls": controls}), data()) for controls in ("propose", "add"))
    assert [(p.cell, p.control) for p in proposed.proposals] == [("drafter=one; drafter=two", "continued"), ("drafter=two", "scratch")]
    assert by_cell(added)["drafter=one control=continued"].control == "continued of drafter=one; drafter=two"
    assert added.there == proposed.there == ("scratch of drafter=one is the cell drafter=cold",)


def test_controls_that_add_nothing_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = recipe_of(tmp_path, {"axes": [{"depth": [1, 2]}], "controls": "add"})
    grid = expand(base, data())
    assert grid.there == ("sweep.controls=add adds nothing, as no cell is warm-started (train.init.warm_start)",)
    _note(base, grid)
    assert capsys.readouterr().out == f"mine: {grid.there[0]}\n"
    cells_ = {"source": {}, "scratch": {"depth": 2}, "warm": {"depth": 2, "warm_start": "cell:source"}, "continued": {"warm_start": "cell:source"}}
    grid = expand(recipe_of(tmp_path, {"axes": [{"drafter": cells_}], "controls": "add"}), data())
    assert grid.there == (
        "sweep.controls=add adds nothing, as said here",
        "scratch of drafter=warm is the cell drafter=scratch",
        "continued of drafter=warm is the cell drafter=continued",
        "scratch of drafter=continued is the cell drafter=source",
        "continued of drafter=continued is that cell itself",
    )


def test_a_drafter_from_elsewhere_counts_by_its_weights(tmp_path: Path) -> None:
    def drafter(folder: Path, content: bytes) -> Path:
        folder.mkdir()
        target = {"name": "t", "digest": "target", "geometry": TINY.to_json()}
        described = {"format": FORMAT, "drafter": {"family": "hidden_only", "depth": 2}, "draft_vocab_size": 100, "target": target}
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "model.safetensors").write_bytes(content)
        return folder

    def grid(source: Path) -> Grid:
        return expand(recipe_of(tmp_path, {"axes": [{"drafter": {"warm": {"warm_start": str(source)}}}], "controls": "add"}), data())

    one, same, other = (drafter(tmp_path / name, content) for name, content in (("one", b"1"), ("same", b"1"), ("other", b"2")))
    assert grid(one).trials[0].name == grid(same).trials[0].name != grid(other).trials[0].name
    found = by_cell(grid(one))
    assert set(found) == {"drafter=warm", "drafter=warm control=scratch", "drafter=warm control=continued"}
    assert found["drafter=warm control=continued"].name.startswith("hidden_only-2-")
    numbered = {"family": "hidden_only", "depth": 2, "train.drafter.hidden_layers": [1, 3, 4], "warm_start": str(one)}
    axes = [{"drafter": {"warm": numbered, "scratch": {"depth": 2}}}]
    assert len(expand(recipe_of(tmp_path, {"axes": axes, "controls": "add"}), data()).trials) == 2, (
        "eagle3 names the layers 1, 3 and 4 of eight: nothing is missing"
    )


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_sweep_recipe_expands(path: Path) -> None:
    recipe, g = load_recipe(path), TARGETS[path.parent.name]
    sizes = ((200, 80),) * (60_000 if path.parent.name == "qwen3_8b" else 1000)
    grid = expand(recipe, Data.planned(recipe, "target", g, sizes))
    cells_ = {trial.cell for trial in grid.trials}
    assert len(grid.trials) == len(cells_) * len(recipe.sweep.seeds) and not grid.merged
    assert not [p for p in grid.proposals if p.control == "scratch"], "every warm-started cell has its like from scratch"
    for trial in grid.trials:
        gate = getattr(trial_recipe(recipe, trial).train.drafter, "gate", None)
        assert gate is None or gate.scheduled_steps < grid.steps[trial.name]
    assert path.stem == "sweep_scale" or len(set(grid.steps.values())) == 1
    assert {"sweep_table5": 12, "sweep_table6": 8, "sweep_gate": 8, "sweep_families": 10}.get(path.stem, len(cells_)) == len(cells_)


def test_the_documented_table_of_recipes_is_that_of_the_folders() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    table = [[part.strip() for part in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `sweep_") or "| `recipes/" in line]
    folders = [re.sub("`|recipes/|/", "", head) for head in table[0][2:]]
    told = {(folder, row[0].strip("`")): row[2 + i].split(",")[0] for row in table[1:] for i, folder in enumerate(folders)}
    counted = {}
    for path in SWEEPS:
        recipe = load_recipe(path)
        plan = Data.planned(recipe, "target", TARGETS[path.parent.name], ())
        counted[path.parent.name, path.name] = f"{len({trial.cell for trial in expand(recipe, plan).trials})} × {len(recipe.sweep.seeds)}"
    assert {cell: text for cell, text in told.items() if text != "-"} == counted


def test_the_documented_sweeps_expand(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(block)["sweep"] for block in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)]
    plan = Data.planned(recipe_of(tmp_path, {}), "target", TINY, ((200, 80),) * 1000)
    assert [len({t.cell for t in expand(recipe_of(tmp_path, block), plan).trials}) for block in blocks] == [6, 10, 3]


def test_each_target_has_the_sweeps_of_the_paper() -> None:
    found = {f"{path.parent.name}/{path.stem}" for path in SWEEPS}
    assert found >= {f"{target}/sweep_{name}" for target in TARGETS for name in ("table4", "table5", "table6", "gate")}


def test_a_plan_without_conversations_knows_no_steps(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"axes": [{"conversations": [0, 8]}]})
    grid = expand(recipe, Data.planned(recipe, "target", TINY, ()))
    assert len(grid.trials) == 2 and grid.steps == {}
