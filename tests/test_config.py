"""Recipes: precedence, inheritance, errors that name the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvshot_ds.config import Recipe, Section, dump_recipe, load_recipe, merge, parse_override
from kvshot_ds.errors import ConfigError
from kvshot_ds.options import walk

MINIMAL = "name: a\nwork: w\ntarget: {path: t}\n"


def write(folder: Path, text: str, name: str = "r.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def complaint(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_recipe(write(folder, text), overrides)
    return str(error.value)


def test_round_trip(tmp_path: Path) -> None:
    overrides = ("train.drafter.family=hybrid", "train.drafter.gate.init=bias:-2.5", "prep.sources=[{path: x.json}]", "eval.drafters=[a, b]", "shards=s")
    recipe = load_recipe(write(tmp_path, MINIMAL), overrides)
    assert recipe.train.drafter.family == "hybrid" and recipe.eval.drafters == (Path("a"), Path("b"))
    assert load_recipe(write(tmp_path, dump_recipe(recipe), "again.yaml")) == recipe


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {optim: {lr: 0.5, clip: 2}}\n")
    recipe = load_recipe(path, ("train.optim.lr=3e-4",))
    assert (recipe.train.optim.lr, recipe.train.optim.clip, recipe.train.optim.betas) == (3e-4, 2.0, (0.9, 0.95))
    assert load_recipe(path, ("train.seed=1", "train.seed=2")).train.seed == 2
    assert load_recipe(path, ("--train.seed=3",)).train.seed == 3


def test_folders_follow_from_work_and_name(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.prepared_dir, recipe.shards_dir, recipe.run_dir) == (Path("w/prepared"), Path("w/features"), Path("w/runs/a"))
    assert load_recipe(write(tmp_path, MINIMAL), ("shards=elsewhere",)).shards_dir == Path("elsewhere")
    assert load_recipe(write(tmp_path, MINIMAL + "shards: elsewhere\n"), ("shards=",)).shards_dir == Path("w/features")


def test_extends_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, MINIMAL + "train: {seed: 7, epochs: 2}\n", "base.yaml")
    write(tmp_path / "deep", "extends: ../base.yaml\nname: b\n", "middle.yaml")
    recipe = load_recipe(write(tmp_path / "deep", "extends: middle.yaml\ntrain: {epochs: 3}\n"))
    assert (recipe.name, recipe.train.seed, recipe.train.epochs) == ("b", 7, 3)


def test_extends_in_a_circle(tmp_path: Path) -> None:
    write(tmp_path, "extends: r.yaml\n", "other.yaml")
    assert "extends itself" in complaint(tmp_path, "extends: other.yaml\n")


def test_missing_file_and_missing_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: no such recipe$"):
        load_recipe(tmp_path / "absent.yaml")
    assert "no such recipe (extended by" in complaint(tmp_path, "extends: absent.yaml\n")


def test_a_folder_in_place_of_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path} is a folder, expected a recipe; a run folder's recipe is {tmp_path}/recipe\.yaml"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1", "not readable as YAML"),
        ("- a\n", "expected a mapping of options, found list"),
        ("", "expected a mapping of options, found NoneType"),
        (MINIMAL + "name: b\n", "given twice: name"),
        (MINIMAL + "train: {seed: 1, seed: 2}\n", "given twice: seed"),
        (MINIMAL + "train: !!python/object/apply:os.getcwd []\n", "not readable as YAML"),
    ],
)
def test_unreadable_files(tmp_path: Path, text: str, said: str) -> None:
    assert said in complaint(tmp_path, text)


@pytest.mark.parametrize("text", ["train.seed", "=1", "train..seed=1", ".seed=1", "", "--", "train.seed=[1"])
def test_bad_overrides(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.sed=1", "train.sed: no such option; did you mean train.seed?"),
        ("train.lr=1", "train.lr: no such option; did you mean train.optim.lr?"),
        ("trian.seed=1", "trian: no such option"),
        ("train.seed=x", "train.seed: Input should be a valid integer"),
        ("train.seed.x=1", "train.seed: Input should be a valid integer"),
        ("train.epochs=0", "train.epochs: Input should be greater than or equal to 1 (found 0)"),
        ("train=5", "train: Input should be"),
        ("train.drafter={family: hybrid, gate: {init: {bias: 1}}}", "train.drafter.gate.init: Input should be a valid string (found {'bias': 1})"),
        ("train.optim.lr=.inf", "train.optim.lr: Input should be a finite number"),
        ("train.optim.betas=[0.9,1.0]", "train.optim.betas[1]: Input should be less than 1"),
        ("target.dtype=fp16", "target.dtype: Input should be 'fp32' or 'bf16' (found 'fp16')"),
        ("target.path=", "target.path: Input"),
        ("name=a/b", "name: String should match pattern"),
        ("name=..", "name: String should match pattern"),
        ("train.seed=-1", "train.seed: Input should be greater than or equal to 0"),
        ("prep.sources=[{path: a, fromat: prompts}]", "prep.sources[0].fromat: no such option"),
        ("capture.features.hidden_layers=first", "capture.features.hidden_layers: Input should be a valid tuple"),
        ("capture.features.hidden_layers=[1,1]", "capture.features.hidden_layers: expected at least one layer, none negative, none twice (found [1, 1])"),
        ("capture.features.kv_layers=[]", "capture.features.kv_layers: expected at least one layer"),
        ("train.drafter.family=eagle", "train.drafter: Input tag 'eagle'"),
        ("train.drafter.depht=1", "train.drafter.depht: no such option; did you mean train.drafter.depth?"),
        ("train.drafter.depth=0", "train.drafter.depth: Input should be greater"),
        ("train.drafter.gate.init=random", "train.drafter.gate: exists only with train.drafter.family=hybrid or train.drafter.family=hybrid_block"),
    ],
)
def test_errors_name_the_option(tmp_path: Path, override: str, said: str) -> None:
    text = complaint(tmp_path, MINIMAL, override)
    assert said in text and "option(s) cannot be used" in text and len(text.splitlines()) >= 2


def test_errors_are_listed_together(tmp_path: Path) -> None:
    text = complaint(tmp_path, "name: a\n", "train.seed=x", "eval.bootstrap=1")
    assert all(f"  {option}: " in text for option in ("work", "target", "train.seed", "eval.bootstrap")) and "4 option(s)" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.conversations_per_step=6", "train.conversations_per_micro_batch=4"], "conversations_per_step=6 is no multiple"),
        (["train.drafter.family=hybrid", "train.drafter.kv.injection=none"], "drafter.family=hybrid needs KV"),
        (["train.drafter.family=kv_only", "train.drafter.kv.injection=per_layer"], "needs one target layer for each draft layer: depth=2"),
        (["train.drafter.family=hybrid", "train.drafter.kv={injection: per_layer, layers: [1, 2]}"], "needs one target layer for each draft layer: depth=1"),
        (["train.drafter.family=hybrid", "train.drafter.gate.init=bias:x"], "gate.init='bias:x' is none of"),
        (["prep.regenerate.enabled=false", "prep.synthesis.count=1"], "prompts have no answers"),
        (["prep.regenerate.enabled=false", "prep.sources=[{path: p, format: prompts}]"], "prompts have no answers"),
        (["prep.regenerate.max_new_tokens=64", "prep.max_length=64"], "leaves no room for a prompt"),
    ],
)
def test_contradictions_are_found_at_load(tmp_path: Path, overrides: list[str], said: str) -> None:
    assert said in complaint(tmp_path, MINIMAL, *overrides)


def test_per_layer_with_matching_layers_is_accepted(tmp_path: Path) -> None:
    load_recipe(write(tmp_path, MINIMAL), ("train.drafter.family=kv_only", "train.drafter.depth=3", "train.drafter.kv.injection=per_layer"))


def test_family_in_an_override_replaces_the_drafter_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {drafter: {family: hybrid, depth: 2, gate: {init: random}}}\n")
    drafter = load_recipe(path, ("train.drafter.family=kv_only",)).train.drafter
    assert (drafter.family, drafter.depth) == ("kv_only", 2) and not hasattr(drafter, "gate")
    for overrides in (["train.drafter.family=kv_only", "train.drafter.depth=4"], ["train.drafter.depth=4", "train.drafter.family=kv_only"]):
        assert load_recipe(path, tuple(overrides)).train.drafter.depth == 4, overrides
    assert load_recipe(path, ("train.drafter.depth=3",)).train.drafter.gate.init == "random"


def test_the_family_may_be_left_at_its_default(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "train: {drafter: {depth: 3}}\n")
    assert load_recipe(path).train.drafter.model_dump()["depth"] == 3
    assert load_recipe(path, ("train.drafter.family=hidden_only",)).train.drafter.depth == 3


def test_merge_leaves_its_arguments_alone() -> None:
    base, over = {"a": {"b": 1}}, {"a": {"c": 2}}
    assert merge(base, over) == {"a": {"b": 1, "c": 2}} and base == {"a": {"b": 1}} and over == {"a": {"c": 2}}


def test_resolved_values_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.seed = 1  # type: ignore[misc]


def sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Every section class below `Recipe`, found by subclass, not by walking fields as `walk` does."""
    return {model} | {s for child in model.__subclasses__() for s in sections(child)}


def leaves(value: Any, name: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {name}
    return {leaf for key, inner in value.items() for leaf in leaves(inner, f"{name}.{key}".lstrip("."))}


def test_every_field_is_described_and_in_the_table(tmp_path: Path) -> None:
    models = sections(Section) - {Section}
    assert len(models) > 10
    assert [(model.__name__, name) for model in models for name, field in model.model_fields.items() if not field.description] == []
    for family in ("hidden_only", "kv_only", "hybrid"):
        recipe = load_recipe(write(tmp_path, MINIMAL), (f"train.drafter.family={family}",))
        table = [o for o in walk(Recipe) if o.when in ("", f"train.drafter.family={family}")]
        assert {o.name for o in table if "[]" not in o.name} == leaves(recipe.model_dump()) and len({o.name for o in table}) == len(table)
        assert all(o.type and o.default and o.description for o in table)


def test_the_table_says_type_default_and_condition() -> None:
    table = {(o.name, o.when): o for o in walk(Recipe)}
    lr = table["train.optim.lr", ""]
    assert (lr.type, lr.default) == ("float > 0", "0.001")
    assert table["name", ""].default == "required"
    assert table["target.path", ""].default == "required"
    family = table["train.drafter.family", ""]
    assert (family.type, family.default) == ("hidden_only|kv_only|hybrid|dflash|kv_block|hybrid_block", "hidden_only")
    assert table["train.drafter.depth", "train.drafter.family=kv_only"].default == "2"
    assert table["capture.features.kv_layers", ""].type == "list of int or eagle3|all|none"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ("drafter: {family: kv_only, gate: {init: random}}", "gate: exists only with"),
        ("drafter: {family: dflash, block_size: 1}", "block_size: Input should be greater than or equal to 2"),
        ("drafter: {family: dflash, depth: 0}", "depth: Input should be greater"),
        ("drafter: {family: dflash, block_size: 4}", "objective.steps=7: a block of drafter.block_size=4 proposes 3"),
        ("{drafter: {family: dflash}, objective: {drift: offline}}", "makes all its proposals in one step, nothing drifts"),
        ("{drafter: {family: kv_block}, init: {head: random}}", "uses the target's frozen head"),
        ("drafter: {family: hybrid, kv: {injection: none}}", "drafter.family=hybrid needs KV"),
        ("drafter: {family: hybrid_block, kv: {injection: none}}", "drafter.family=hybrid_block needs KV"),
        ("drafter: {family: hybrid, cross_only: true, gate: {kind: scalar}}", "leaves nothing to gate"),
        ("drafter: {family: hybrid, gate: {kind: none, init: 'bias:1'}}", "gate.kind=none has no gate"),
        ("drafter: {family: hybrid, gate: {kind: none, open_steps: 5}}", "gate.kind=none has no gate"),
        ("drafter: {family: hybrid, gate: {floor: 0.5}}", "a floor needs both"),
        ("drafter: {family: hybrid, gate: {init: open}}", "is none of random"),
        ("drafter: {family: kv_only, kv: {injection: per_layer, layers: [1]}}", "per_layer needs one target layer for each draft layer"),
        ("drafter: {family: kv_only, kv: {injection: per_layer, projector: mlp, layers: [1, 2]}}", "has nothing to project"),
        ("drafter: {family: kv_only, kv: {injection: linear, qk_norm: true}}", "norms keys before they are rotated"),
        ("{drafter: {family: kv_only}, objective: {kv_branch_weight: 1}}", "needs a KV branch beside another one"),
        ("drafter: {family: hybrid, carry: none, norm_output: true}", "nothing is handed on"),
        ("{drafter: {family: hybrid, cross_only: true}, objective: {kv_branch_weight: 1}}", "needs a KV branch beside another one"),
        ("objective: {kv_gradient_scale: 50}", "hidden_only has no cross path"),
        ("objective: {query_distill_weight: 1}", "needs a drafter that queries the target's KV cache"),
        ("{drafter: {family: kv_only, kv: {injection: hidden_to_kv}}, objective: {query_distill_weight: 1}}", "needs a drafter that queries"),
        ("objective: {anchors: 4, row_fraction: 0.5}", "both choose rows"),
        ("objective: {anchors: 4, drift: offline}", "whose rows lie together"),
        ("init: {tensors: ['fc.*']}", "name a drafter in init.warm_start"),
        ("diagnose_conversations: 4", "set eval_every too"),
    ],
)
def test_impossible_combinations_say_what_to_change(tmp_path: Path, train: str, said: str) -> None:
    assert said in complaint(tmp_path, f"{MINIMAL}train: {train if train.startswith('{') else '{' + train + '}'}\n")


def test_the_paper_and_dflash_fit() -> None:
    for drafter, steps in (({"family": "dflash", "block_size": 16}, 15), ({"family": "kv_block"}, 7), ({"family": "hidden_only", "hidden_layers": "last"}, 7)):
        Recipe.model_validate({"name": "a", "work": "w", "target": {"path": "t"}, "train": {"drafter": drafter, "objective": {"steps": steps}}})
