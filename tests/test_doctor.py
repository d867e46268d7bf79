"""kvshot doctor: every fault is found and comes with its fix; nothing that is absent stops the others; run for real on this machine."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from click.testing import CliRunner

from kvshot_ds import doctor, probes
from kvshot_ds.cli import cli
from tests.training.runs import free_port

ANYWHERE = Path("/")
Usage = namedtuple("Usage", "total used free")
Memory = namedtuple("Memory", "total available")
Device = namedtuple("Device", "name major minor total_memory")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("SLURM_", "RAY_", "NCCL_")) or n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]:
        monkeypatch.delenv(name)


def answer(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def refuse(error: Exception) -> Callable[..., Any]:
    def raise_it(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return raise_it


def test_for_real_one_line_of_each_and_the_same_as_json(tmp_path: Path) -> None:
    told = CliRunner().invoke(cli, ["doctor", "--folder", str(tmp_path / "not" / "yet")], catch_exceptions=False, standalone_mode=False)
    lines = told.stdout.splitlines()
    assert [line.split()[1] for line in lines] == list(doctor.CHECKS) and {line.split()[0] for line in lines} <= {"ok", "warn", "fail"}
    assert told.return_value == int(any(line.startswith("fail") for line in lines)), told.stdout
    assert not (tmp_path / "not").exists() and not list(tmp_path.iterdir()), "it leaves nothing behind"
    assert "could not be looked at" not in told.stdout
    as_json = json.loads(CliRunner().invoke(cli, ["doctor", "--json", "--folder", str(tmp_path)], standalone_mode=False).stdout)
    assert [finding["name"] for finding in as_json] == list(doctor.CHECKS)
    assert all(finding["fix"] for finding in as_json if finding["level"] != "ok")


def test_a_failure_is_the_exit_status_and_a_broken_check_is_no_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {"one": refuse(RuntimeError("boom")), "two": answer(doctor.Finding("two", "fail", "is wrong", "mend it"))}
    monkeypatch.setattr(doctor, "CHECKS", broken)
    assert doctor.run(ANYWHERE) == 1
    assert capsys.readouterr().out.splitlines() == ["warn  one         could not be looked at (RuntimeError: boom)", "fail  two         is wrong; mend it"]
    monkeypatch.setattr(doctor, "CHECKS", {"one": broken["one"]})
    assert doctor.run(ANYWHERE) == 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one good device."""
    monkeypatch.setattr(probes, "driver_version", answer("580.1"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", answer(True))
    monkeypatch.setattr(torch.cuda, "device_count", answer(1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", answer(Device("H200", 9, 0, 150e9)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", answer((149e9, 150e9)))
    monkeypatch.setattr(torch.cuda.nccl, "version", answer((2, 28, 9)))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", answer(True))
    return monkeypatch


def test_a_good_device(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert doctor.check_cuda(ANYWHERE) == doctor.Finding("cuda", "ok", "driver 580.1; H200 9.0 150 GB")
    assert doctor.check_nccl(ANYWHERE).text == "2.28.9, NCCL_SOCKET_IFNAME=eth0" and doctor.check_torch(ANYWHERE).level == "ok"


def test_faults_of_devices(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "mem_get_info", answer((10e9, 150e9)))
    assert said(doctor.check_cuda(ANYWHERE), "warn", "memory of device 0 is in use", "nvidia-smi")
    gpu.setattr(torch.cuda, "get_device_properties", answer(Device("V100", 7, 0, 32e9)))
    assert said(doctor.check_cuda(ANYWHERE), "warn", "V100 7.0", "fp32")
    gpu.setattr(torch.distributed, "is_nccl_available", answer(False))
    assert said(doctor.check_nccl(ANYWHERE), "fail", "no NCCL", "CUDA build")
    gpu.setattr(torch.cuda, "is_available", answer(False))
    assert said(doctor.check_cuda(ANYWHERE), "fail", "finds no device", "CUDA_VISIBLE_DEVICES")
    gpu.setattr(torch.version, "cuda", None)
    assert said(doctor.check_torch(ANYWHERE), "fail", "there is an NVIDIA driver", "CUDA build")
    gpu.setattr(torch.distributed, "is_gloo_available", answer(False))
    assert said(doctor.check_nccl(ANYWHERE), "fail", "no gloo", "install torch")


def test_offload_needs_a_compiler_that_fits(gpu: pytest.MonkeyPatch) -> None:
    from deepspeed.ops.op_builder import all_ops

    assert doctor.check_deepspeed(ANYWHERE).level == "ok"
    gpu.setattr(probes, "said", lambda command: "Cuda compilation tools, release 12.4, V12.4.99" if command[0] == "nvcc" else "g++ 12")
    assert said(doctor.check_compiler(ANYWHERE), "warn", "nvcc 12.4; ninja found, torch is for CUDA 13.0", "CUDA_HOME")
    gpu.setattr(all_ops, "ALL_OPS", {})
    assert said(doctor.check_deepspeed(ANYWHERE), "warn", "can be built: none", "CUDA_HOME")


def said(finding: doctor.Finding, level: str, text: str, fix: str) -> bool:
    assert (finding.level, text in finding.text, fix in finding.fix) == (level, True, True), finding
    return True


def test_faults_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.4.0", "ray": None}
    monkeypatch.setattr(probes, "version_of", lambda name: versions.get(name, plain(name)))
    found = doctor.check_packages(ANYWHERE)
    assert said(found, "fail", "not installed: ray; torch 2.4.0 (needed <2.16,>=2.13)", "constraints.txt")
    monkeypatch.setattr(probes, "version_of", answer(None))
    assert said(doctor.check_optional(ANYWHERE), "ok", "wandb (for train.trackers)", "")
    monkeypatch.setattr(doctor.platform, "python_version_tuple", answer(("3", "10", "1")))
    assert said(doctor.check_python(ANYWHERE), "fail", "at ", "make PYTHON=")
    monkeypatch.setattr(probes, "said", answer(""))
    assert said(doctor.check_compiler(ANYWHERE), "warn", "no C++ compiler", "apt-get install g++")
    monkeypatch.setattr(probes.socket, "gethostbyname", answer("10.0.0.1"))
    monkeypatch.setattr(psutil, "virtual_memory", answer(Memory(8e9, 1e9)))
    assert said(doctor.check_host(ANYWHERE), "warn", "8 GB memory, 1 free", "6 GB")
    monkeypatch.setattr(probes.socket, "gethostbyname", refuse(socket.gaierror("unknown")))
    assert said(doctor.check_host(ANYWHERE), "warn", "its name has no address", "/etc/hosts")


plain = probes.version_of


def test_faults_of_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert said(doctor.check_ray(ANYWHERE), "ok", "RAY_ADDRESS is not set", "")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert said(doctor.check_ray(ANYWHERE), "fail", "token not found", "ray get-auth-token --generate")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert said(doctor.check_ray(ANYWHERE), "warn", "RAY_AUTH_MODE=disabled", "RAY_AUTH_MODE=token")
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        (tmp_path / "token").write_text("secret")
        monkeypatch.setattr(probes, "ray_clocks", answer({"a": 0.1, "b": -7.0}))
        assert said(doctor.check_ray(ANYWHERE), "warn", "2 nodes, clocks within 7.0 s of this one: b -7.0 s", "chrony")
    assert said(doctor.check_ray(ANYWHERE), "fail", "nobody answers", "start Ray")


def test_faults_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", answer(None))
    assert doctor.check_slurm(ANYWHERE) == doctor.Finding("slurm", "ok", "not here")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None if name == "srun" else name)
    answers = {"--version": "slurm 24.05", "--noheader": "2 idle\n1 down"}
    monkeypatch.setattr(probes, "said", lambda command: answers.get(command[1], ""))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert said(doctor.check_slurm(ANYWHERE), "warn", "slurm 24.05, in job 7 on ?; nodes: 2 idle, 1 down; not found: srun", "client commands")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    assert doctor.check_slurm(ANYWHERE).level == "ok"
    answers.clear()
    assert said(doctor.check_slurm(ANYWHERE), "warn", "nodes: unknown", "scontrol ping")


def test_faults_of_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", answer(Usage(100e9, 0, 80e9)))
    assert said(doctor.check_disk(tmp_path), "ok", "80 of 100 GB free; fsync, rename, hard links and locks work", "")
    assert said(doctor.check_shm(ANYWHERE), "ok", "80.0 of 100.0 GB", "")
    monkeypatch.setattr(probes.os, "link", refuse(OSError("not supported")))
    monkeypatch.setattr(probes.fcntl, "flock", refuse(OSError("no locks")))
    assert said(doctor.check_disk(tmp_path), "warn", "no locks, hard links", "one command at a time")
    monkeypatch.setattr(probes.os, "fsync", refuse(OSError("invalid")))
    assert said(doctor.check_disk(tmp_path), "fail", "no fsync, locks, hard links", "another file system")
    monkeypatch.undo()
    for free, level, disk, shm in ((0.5e9, "fail", "make room", "--shm-size"), (3e9, "warn", "kvshot plan capture", "--shm-size=16g")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", answer(Usage(100e9, 0, free)))
        assert said(doctor.check_disk(tmp_path), level, "GB free", disk) and said(doctor.check_shm(ANYWHERE), level, "GB free", shm)
    monkeypatch.setattr(probes, "storage_lacks", refuse(PermissionError(13, "Permission denied")))
    assert said(doctor.check_disk(tmp_path), "fail", "Permission denied", "--folder")
    assert said(doctor.check_shm(ANYWHERE, tmp_path / "none"), "fail", "no ", "tmpfs")
    assert not list(tmp_path.iterdir())


def test_faults_of_limits_and_clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (limits[kind], 0))
    assert said(doctor.check_limits(ANYWHERE), "warn", "open files 1024, processes no limit", "ulimit -n")
    limits |= {resource.RLIMIT_NOFILE: 65536, resource.RLIMIT_NPROC: 100}
    assert said(doctor.check_limits(ANYWHERE), "warn", "processes 100", "ulimit -u")
    limits[resource.RLIMIT_NPROC] = 8192
    assert doctor.check_limits(ANYWHERE).level == "ok" == doctor.check_clock(tmp_path).level
    monkeypatch.setattr(doctor.time, "time", answer(doctor.time.time() + 60))
    assert said(doctor.check_clock(tmp_path), "warn", "stamped -", "chrony")
    assert not list(tmp_path.iterdir())


def test_faults_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(probes, "rank_clocks", answer([("a", 100.0), ("b", 105.0)]))
    assert said(doctor.check_ranks(ANYWHERE), "warn", "rank 1: 2 ranks on 2 host(s) meet, clocks within 5.00 s", "chrony")
    monkeypatch.setattr(probes, "rank_clocks", refuse(RuntimeError("timed out")))
    assert said(doctor.check_ranks(ANYWHERE), "fail", "does not reach the others at 10.0.0.1:29500 (timed out)", "MASTER_ADDR")


def test_ranks_really_meet() -> None:
    script = "from kvshot_ds.doctor import check_ranks; from pathlib import Path; print(check_ranks(Path('.')).line())"
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(Path(__file__).parents[1])}

    def rank(number: int) -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=shared | {"RANK": str(number)}, capture_output=True, text=True, timeout=200, check=True).stdout

    with ThreadPoolExecutor(2) as both:
        lines = list(both.map(rank, range(2)))
    assert all(line.startswith("ok    ranks") and f"rank {n}: 2 ranks on 1 host(s) meet" in line for n, line in enumerate(lines)), lines


def test_probes_survive_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.said(["kvshot-no-such-program"]) == "" == probes.said(["false"]) and probes.said(["echo", "yes"]) == "yes"
    assert probes.version_of("kvshot-no-such-package") is None
    assert probes.reachable("auto") and not probes.reachable(f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert probes.driver_version() == "" and shutil.which("sinfo") is None
    assert doctor.check_compiler(ANYWHERE).level == "warn" and doctor.check_slurm(ANYWHERE).text == "not here"
