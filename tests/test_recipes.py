"""Every file a user runs as it stands can be loaded, says how, and means what its name says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import ds_configs
from kvshot_ds.config import Recipe, load_recipe
from kvshot_ds.errors import ConfigError

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
TARGETS = ("tiny", "smollm2_135m", "qwen3_8b")


def ids(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_each_target_has_its_recipes() -> None:
    found = {ids(path) for path in RECIPES}
    assert found >= {
        f"{target}/{name}"
        for target in TARGETS
        for name in ("base", "hidden_only", "mtp", "kv_only", "kv_none", "hybrid", "dflash", "kv_block", "hybrid_block")
    }


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_recipe_loads_and_says_how_to_run_it(path: Path) -> None:
    recipe = load_recipe(path)
    ds_configs.load(recipe.train.ds_config)
    assert recipe.name == path.stem, "the run folder should bear the name of the file"
    head = re.match(r"(#.*\n)+", path.read_text())
    assert head and "# Run:" in head[0] and "# Cost:" in head[0]
    for named in re.findall(r"recipes/[\w/]+\.(?:yaml|sh)", head[0]):
        assert (ROOT / named).is_file(), named


def base_of(path: Path) -> Path:
    """The recipe from which prep and capture are run for `path`: what it extends."""
    return path.parent / yaml.safe_load(path.read_text()).get("extends", path.name)


@pytest.mark.parametrize("path", [p for p in RECIPES if not p.stem.startswith(("base", "study"))], ids=ids)
def test_recipes_of_a_target_share_prep_and_capture(path: Path) -> None:
    recipe, base = load_recipe(path), load_recipe(base_of(path))
    shared = {"name", "train", "eval", "decode", "bench", "report", "ray", "sweep", "diagnose"}
    if path.stem == "sweep_table6":  # needs one more KV layer: captured from the same conversations into a folder of its own
        assert recipe.shards_dir != base.shards_dir and recipe.prepared_dir == base.prepared_dir
        shared |= {"shards", "capture"}
    assert recipe.model_dump(exclude=shared) == base.model_dump(exclude=shared)


@pytest.mark.parametrize("target", TARGETS)
def test_the_control_differs_from_kv_only_in_its_information_alone(target: str) -> None:
    control, kv_only = (load_recipe(ROOT / "recipes" / target / f"{name}.yaml") for name in ("kv_none", "kv_only"))

    def plain(recipe: Recipe) -> Recipe:
        return recipe.model_copy(update={"name": "", "train": recipe.train.model_copy(update={"drafter": None})})

    assert plain(control) == plain(kv_only)
    assert control.train.drafter.family == kv_only.train.drafter.family == "kv_only"
    assert control.train.drafter.depth == kv_only.train.drafter.depth
    assert (control.train.drafter.kv.injection, kv_only.train.drafter.kv.injection) == ("none", "linear_rope")


def test_qwen3_follows_the_paper() -> None:
    base = load_recipe(ROOT / "recipes/qwen3_8b/base.yaml")
    assert (base.train.objective.steps, base.train.draft_vocab_size, base.train.epochs) == (7, 32000, 3)
    depths = {load_recipe(p).train.drafter.depth for p in RECIPES if p.parent.name == "qwen3_8b" and p.stem.startswith("kv_only")}
    assert depths == {1, 2, 4}


def test_qwen3_marks_what_the_paper_does_not_state() -> None:
    lines = (ROOT / "recipes/qwen3_8b/base.yaml").read_text().splitlines()
    for option in ("lr", "betas", "weight_decay", "warmup_fraction", "final_lr_fraction", "clip", "conversations_per_step", "ds_config", "max_length"):
        [line] = [line for line in lines if re.match(rf"\s+{option}:", line)]
        assert "# not in the paper" in line, line


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ds_config_is_what_its_name_says(stage: int, precision: str) -> None:
    config = ds_configs.load(f"zero{stage}_{precision}")
    assert config["zero_optimization"]["stage"] == stage
    assert config.get("bf16", {"enabled": False})["enabled"] == (precision == "bf16") and "fp16" not in config


def test_ds_configs_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert ds_configs.load(str(path)) == {"zero_optimization": {"stage": 1}}
    refused = {"{": "not readable as JSON", "[]": "expected a JSON object, found list", '{"gradient_clipping": 1}': r"clipping \(set train\.optim\.clip\)"}
    for text, said in refused.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=said):
            ds_configs.load(str(path))
    with pytest.raises(ConfigError, match="neither a file nor one of zero0_bf16, zero0_fp32, zero1_bf16"):
        ds_configs.load("zero9")
    with pytest.raises(ConfigError, match=r"train\.ds_config=\."):
        ds_configs.load(".")


@pytest.mark.parametrize("path", [*ROOT.glob("cluster/*/*.sh"), *ROOT.glob("cluster/*/*.sbatch"), ROOT / "recipes/demo.sh", ROOT / ".ci/run"], ids=ids)
def test_shell_scripts_parse_and_can_be_run(path: Path) -> None:
    bash = shutil.which("bash")
    assert bash and subprocess.run([bash, "-n", path], capture_output=True, text=True).stderr == ""
    if path.name != "ray.sh":  # which the batch scripts source
        assert path.stat().st_mode & 0o111 and "set -euo pipefail" in path.read_text()


def test_demo_runs_what_exists_and_refuses_other_targets() -> None:
    script = ROOT / "recipes/demo.sh"
    done = subprocess.run([script, "gpt9"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage: recipes/demo.sh [smollm2|tiny]" in done.stderr


def test_ray_cluster_sets_the_token_wherever_ray_starts() -> None:
    config = yaml.safe_load((ROOT / "cluster/ray/cluster.yaml").read_text())
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert len(commands) == 2 and all("RAY_AUTH_MODE=token ray start" in command for command in commands)


def test_constraints_meet_the_ranges_and_admit_a_cuda_build() -> None:
    import tomllib

    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for texts in (project["dependencies"], *project["optional-dependencies"].values()) for text in texts]
    assert len(needed) > 20
    for requirement in needed:
        assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
    assert not [name for name, version in pins.items() if "+" in version], "a local version such as +cpu shuts out other builds"
