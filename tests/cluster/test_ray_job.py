"""cluster/ray/submit_capture.sh, submit_train.sh and submit_sweep.sh against a real Ray head with its dashboard, guarded by a token.

One head for all tests of the file: after each, whatever of its jobs has not ended is stopped, and each looks at jobs of its own folder alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvshot_ds.config import Recipe, dump_recipe
from kvshot_ds.features.manifest import Manifest
from kvshot_ds.files import read_json
from kvshot_ds.sweep.folder import SweepFolder
from tests.data_prep.captures import recipe as capture_recipe
from tests.data_prep.captures import write_prepared

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds that anything may take on a loaded machine
HOST = "127.0.0.2"  # Ray keeps this one; 127.0.0.1 it would replace by the machine's address


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    try:
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


@dataclass(frozen=True)
class Cluster:
    """A Ray head. dashboard: its URL. token: what it wants to see. address: where it is joined."""

    dashboard: str
    token: str
    address: str

    def get(self, path: str, token: str | None = None, method: str = "GET", body: object = None) -> object:
        headers = {"Authorization": f"Bearer {self.token if token is None else token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.dashboard + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def jobs(self, folder: Path) -> list[dict[str, str]]:
        """Those submitted with a recipe of this folder."""
        return [job for job in self.submitted() if f"{folder}/" in job["entrypoint"]]

    def submitted(self) -> list[dict[str, str]]:
        return [job for job in self.get("/api/jobs/") if job["type"] == "SUBMISSION"]  # type: ignore[attr-defined]

    def settled(self) -> bool:
        return not any(job["status"] in ("PENDING", "RUNNING") for job in self.submitted())


@pytest.fixture
def cluster(head: Cluster) -> Iterator[Cluster]:
    """The head, on which no job of another test runs."""
    yield head
    for job in head.submitted():
        if job["status"] in ("PENDING", "RUNNING"):
            head.get(f"/api/jobs/{job['submission_id']}/stop", method="POST")
    wait_for(head.settled)


def wait_for(done: Callable[[], bool], submitted: subprocess.Popen[str] | None = None) -> None:
    """submitted: fails if it ends before."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert submitted is None or submitted.poll() is None, submitted.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    token = os.urandom(32).hex()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    environment.pop("RAY_ADDRESS", None)
    folder = tmp_path_factory.mktemp("ray")
    names = ("port", "dashboard-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port", "object-manager-port",
             "node-manager-port", "ray-client-server-port", "metrics-export-port")  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    flags = [f"--{name}={port}" for name, port in ports.items()]
    # the temporary folder's name goes into the paths of sockets, which must be short
    short = Path(f"/tmp/kvshot-ray-{os.getpid()}")
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        f"--node-ip-address={HOST}",
        f"--dashboard-host={HOST}",
        "--num-cpus=2",
    ]
    command += [*flags, "--num-cpus=2", f"--temp-dir={short}", "--object-store-memory=100000000", "--disable-usage-stats"]
    with open(folder / "ray.log", "wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    found = Cluster(f"http://{HOST}:{ports['dashboard-port']}", token, f"{HOST}:{ports['port']}")
    try:
        deadline = time.monotonic() + 240
        while True:
            try:
                # an agent that takes jobs comes up after the dashboard
                found.get("/api/jobs/", method="POST", body={"entrypoint": "true"})
                break
            except (OSError, ValueError):
                assert head.poll() is None and time.monotonic() < deadline, (folder / "ray.log").read_text()
                time.sleep(0.5)
        wait_for(found.settled)  # posted once or twice
        yield found
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:  # on a busy machine Ray waits longer for its own processes
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        subprocess.run(["rm", "-rf", short], check=True)


def job_environment(cluster: Cluster, root: Path) -> dict[str, str]:
    """Of whoever submits. root: stands for the repository on the cluster's nodes: a .venv whose programs are these."""
    root.mkdir()
    (root / ".venv").symlink_to(Path(sys.executable).parent.parent)
    environment = {**os.environ, "RAY_API_SERVER_ADDRESS": cluster.dashboard, "RAY_AUTH_TOKEN": cluster.token, "KVSHOT_ROOT": str(root)}
    environment.pop("RAY_ADDRESS", None)
    return environment | {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_capture_is_submitted_followed_and_succeeds(cluster: Cluster, tiny_target: Path, tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", 12, 3)
    (tmp_path / "a recipe.yaml").write_text(dump_recipe(capture_recipe(tiny_target, prepared, tmp_path / "features")))
    environment = job_environment(cluster, tmp_path / "root")
    script = ROOT / "cluster" / "ray" / "submit_capture.sh"
    done = subprocess.run(
        [script, tmp_path / "a recipe.yaml", "capture.workers=1", "capture.tokens_per_batch=128"],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"capture: train-000000\.tar: 3 conversations, .* of 5 shards", done.stdout), done.stdout
    assert "capture: 15 conversations" in done.stdout
    (job,) = cluster.jobs(tmp_path)
    assert job["status"] == "SUCCEEDED"
    assert Manifest.load(tmp_path / "features").splits["train"].samples == 12
    tasks = {task["name"] for task in cluster.get("/api/v0/tasks?detail=0")["data"]["result"]["result"]}  # type: ignore[index]
    assert {"train-000003.tar", "heldout-000000.tar"} <= tasks, "the dashboard shows the shards by name"
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.get("/api/jobs/", token="0" * 64)
    assert refused.value.code in (401, 403)


def test_every_command_of_the_cluster_file_wants_the_token() -> None:
    cluster = yaml.safe_load((ROOT / "cluster" / "ray" / "cluster.yaml").read_text())
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert cluster[key] and all("RAY_AUTH_MODE=token ray start" in command for command in cluster[key])
    assert "~/.ray/auth_token" in cluster["file_mounts"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_training_is_stopped_with_a_checkpoint_and_the_same_command_goes_on(cluster: Cluster, recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    r = recipe("on_ray", epochs=4, checkpoint_every=1)
    (tmp_path / "a recipe.yaml").write_text(dump_recipe(r))
    environment = job_environment(cluster, tmp_path / "root")
    command = [ROOT / "cluster" / "ray" / "submit_train.sh", tmp_path / "a recipe.yaml", "ray.ranks=2"]
    submitted = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for((r.run_dir / "checkpoints" / "latest").is_file, submitted)
    (job,) = cluster.jobs(tmp_path)
    stop = ["ray", "job", "stop", "--address", cluster.dashboard, job["submission_id"]]
    subprocess.run(stop, env=environment | {"RAY_AUTH_MODE": "token"}, check=True, timeout=240, capture_output=True)
    said = submitted.communicate(timeout=240)[0]
    assert re.search(r"on_ray: stopped after step \d+ of 44", said), said
    assert cluster.get(f"/api/jobs/{job['submission_id']}")["status"] == "STOPPED"  # type: ignore[index]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "continuing after step" in done.stdout, done.stdout + done.stderr
    summary = read_json(r.run_dir / "train.json")
    assert summary["world_size"] == 2 and len(summary["resumed_from"]) == 1
    ray = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": cluster.address}
    told = subprocess.run(["kvshot", "doctor", "--folder", tmp_path], env=environment | ray, capture_output=True, text=True, timeout=240, check=False).stdout
    assert re.search(rf"^ok +ray .*RAY_ADDRESS={cluster.address}; token found.*; 1 nodes, clocks within 0\.\d s", told, flags=re.MULTILINE), told


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_is_stopped_and_the_same_command_trains_what_is_left(cluster: Cluster, recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Two trials one after another, the second of which is cut short: it goes on, and the first is not trained again."""
    lengths = {"length": {"short": {"train.max_steps": 2}, "long": {"train.epochs": 8}}}
    r = recipe("swept", checkpoint_every=1)
    r = r.model_copy(update={"sweep": r.sweep.model_validate({"axes": [lengths], "match": "epochs", "parallel": 1})})
    (tmp_path / "a sweep.yaml").write_text(dump_recipe(r))
    environment = job_environment(cluster, tmp_path / "root")
    command = [ROOT / "cluster" / "ray" / "submit_sweep.sh", tmp_path / "a sweep.yaml", "ray.ranks=2"]
    submitted = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    sweep = SweepFolder(r.work / "sweeps" / "swept")
    wait_for(lambda: SweepFolder.is_one(sweep.path), submitted)
    short, long = sweep.trials()
    assert (short.labels, long.labels) == ({"length": "short"}, {"length": "long"})
    wait_for((sweep.run_dir(long) / "checkpoints" / "latest").is_file, submitted)
    (job,) = cluster.jobs(tmp_path)
    cluster.get(f"/api/jobs/{job['submission_id']}/stop", method="POST")
    said = submitted.communicate(timeout=240)[0]
    assert "1 of 2 trials complete" in said, said
    assert cluster.get(f"/api/jobs/{job['submission_id']}")["status"] == "STOPPED"  # type: ignore[index]
    before = (sweep.run_dir(short) / "train.json").stat().st_mtime_ns
    assert not (sweep.run_dir(long) / "train.json").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name: state.state for name, state in sweep.progress().trials.items()} == {short.name: "complete", long.name: "complete"}
    assert (sweep.run_dir(short) / "train.json").stat().st_mtime_ns == before, "trained once"
    summary = read_json(sweep.run_dir(long) / "train.json")
    assert summary["world_size"] == 2 and len(summary["resumed_from"]) == 1
    assert all((sweep.run_dir(trial) / "eval.json").is_file() for trial in (short, long))
