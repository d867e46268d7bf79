"""The files that describe machines and images: held to the pins, the recipes and the commands that they name."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvshot_ds.cli import cli
from kvshot_ds.config import load_recipe

ROOT = Path(__file__).resolve().parents[2]
CONTAINER = ROOT / "cluster" / "Containerfile"
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) of each, continued lines joined, comments left out."""
    lines = [line for line in CONTAINER.read_text().replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_installs_the_pins_and_nothing_else() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and "pip install" in rest]
    assert installs == ["pip install \"$(grep '^torch==' constraints.txt)\"", "pip install --constraint constraints.txt --editable '.[demo,s3]'"]
    assert len(re.findall("^torch==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)) == 1
    assert {"demo", "s3"} <= PROJECT["project"]["optional-dependencies"].keys()
    in_makefile = (ROOT / "Makefile").read_text()
    assert "grep '^torch==' constraints.txt" in in_makefile and "--constraint constraints.txt --editable" in in_makefile, "as make installs"


def test_the_image_has_what_the_package_needs() -> None:
    copied = {name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    packages = {pattern.rstrip("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"constraints.txt", "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"], "recipes"} <= copied
    words = [word for word, _ in instructions()]
    assert ("USER", "1000:1000") in instructions() and "USER" not in words[words.index("USER") + 1 :]
    assert instructions()[-1] == ("CMD", '["kvshot", "doctor"]') and "doctor" in cli.commands
    base = next(rest for word, rest in instructions() if word == "FROM")
    assert base.endswith("-devel-ubuntu24.04"), "a compiler of CUDA for DeepSpeed's ops, and Python 3.12"
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def kuberay() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "cluster" / "ray" / "kuberay.yaml").read_text())
    return document


def test_kuberay_has_room_for_the_ranks_behind_a_token() -> None:
    job = kuberay()["spec"]
    cluster = job["rayClusterSpec"]
    assert (kuberay()["apiVersion"], kuberay()["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["rayVersion"] == PINS["ray"] and cluster["authOptions"] == {"mode": "token"}
    command = shlex.split(job["entrypoint"].partition(" && exec ")[2])
    assert command[:3] == ["kvshot", "train", "--ray"]
    ray = load_recipe(ROOT / command[3], tuple(command[4:])).ray
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    a_worker = ray.ranks / workers["replicas"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert a_worker * ray.gpus_per_rank == int(limits["nvidia.com/gpu"]) and a_worker * ray.cpus_per_rank <= int(limits["cpu"])
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounts["shm"] == "/dev/shm" and mounts.keys() == {volume["name"] for volume in spec["volumes"]}
        assert spec["containers"][0]["image"] == container["image"]
    assert all(argument.split("=")[1].startswith(mounts["work"]) for argument in command[4:] if argument.startswith(("work=", "target.path=")))
    assert yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "600"


@pytest.mark.parametrize("name", ["submit_capture", "submit_train", "submit_sweep"])
def test_the_scripts_of_ray_say_how_they_are_used(name: str) -> None:
    done = subprocess.run([ROOT / "cluster" / "ray" / f"{name}.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"usage: cluster/ray/{name}.sh RECIPE")


def lines_of(program: str) -> list[list[str]]:
    """Command lines of docs/cluster.md that begin with `program`, in words."""
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "cluster.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.startswith(program)]


@pytest.mark.parametrize("program", ["sbatch", "cluster/ray/", "deepspeed", "torchrun", "srun"])
def test_the_page_starts_what_exists(program: str) -> None:
    found = lines_of(program)
    assert found
    for words in found:
        scripts = [word for word in words if word.endswith((".sbatch", ".sh"))]
        assert all((ROOT / script).is_file() for script in scripts) and (scripts or "kvshot" in " ".join(words))
        recipe = next(i for i, word in enumerate(words) if word.startswith("recipes/"))
        load_recipe(ROOT / words[recipe], tuple(words[recipe + 1 :]))


def test_the_page_names_the_scripts_of_the_folder() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    scripts = [path.relative_to(ROOT) for path in (ROOT / "cluster").rglob("*") if path.is_file()]
    assert not [str(path) for path in scripts if str(path) not in page]
