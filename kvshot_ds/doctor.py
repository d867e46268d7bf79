"""`kvshot doctor`: whether this machine (or these ranks) can capture and train, and what to do where not.

Every check survives the absence of what it looks at.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from kvshot_ds import probes
from kvshot_ds.training.ranks import from_slurm

Level = Literal["ok", "warn", "fail"]
GB = 1e9
OPTIONAL = {"s3fs": "shards=s3://...", "gcsfs": "shards=gs://...", "gguf": "kvshot target smollm2", "wandb": "train.trackers", "mlflow": "train.trackers"}


@dataclass(frozen=True)
class Finding:
    """One line. fix: what to do about a warning or a failure, in words or as a command."""

    name: str
    level: Level
    text: str
    fix: str = ""

    def line(self) -> str:
        return f"{self.level:<5} {self.name:<11} {self.text}" + (f"; {self.fix}" if self.fix else "")


def run(folder: Path, as_json: bool = False) -> int:
    """Prints a line of each check of `folder` and this machine. Exit status: 1 if one has failed, else 0."""
    found = examine(folder)
    if as_json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    else:
        print("\n".join(finding.line() for finding in found))
    return int(any(finding.level == "fail" for finding in found))


def examine(folder: Path) -> list[Finding]:
    """All findings, in the order of CHECKS. Where `folder` is not made yet, the nearest one above it is looked at."""
    found, folder = [], folder.absolute()
    while not folder.exists():
        folder = folder.parent
    for name, check in CHECKS.items():
        try:
            with redirect_stdout(sys.stderr):  # libraries talk
                found.append(check(folder))
        except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, not the end of the others
            found.append(Finding(name, "warn", f"could not be looked at ({type(error).__name__}: {error})"))
    return found


def check_python(_folder: Path) -> Finding:
    text = f"{platform.python_version()} at {sys.executable}, {platform.machine()}"
    if tuple(map(int, platform.python_version_tuple()[:2])) < (3, 11):
        return Finding("python", "fail", text, "kvshot-ds needs 3.11 or newer: make PYTHON=python3.11 sets up with it")
    return Finding("python", "ok", text)


def check_packages(_folder: Path) -> Finding:
    """Everything that pyproject.toml asks for, in the versions it allows."""
    lacking, wrong = [], []
    needed = [Requirement(text) for text in importlib.metadata.requires("kvshot-ds") or ()]
    needed = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    for requirement in needed:
        version = probes.version_of(requirement.name)
        if version is None:
            lacking.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} (needed {requirement.specifier})")
    if lacking or wrong:
        faults = "; ".join([*([f"not installed: {', '.join(lacking)}"] if lacking else []), *wrong])
        return Finding("packages", "fail", faults, "pip install --constraint constraints.txt --editable .")
    return Finding("packages", "ok", f"all {len(needed)} in the versions that are known to work")


def check_optional(_folder: Path) -> Finding:
    lacking = [f"{name} (for {use})" for name, use in OPTIONAL.items() if probes.version_of(name) is None]
    return Finding("optional", "ok", f"not installed: {', '.join(lacking)}" if lacking else "all installed")


def check_host(_folder: Path) -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{socket.gethostname()}: {len(os.sched_getaffinity(0))} CPU cores for this process, "
    text += f"{memory.total / GB:.0f} GB memory, {memory.available / GB:.0f} free"
    if not probes.own_address():
        return Finding(
            "host", "warn", f"{text}; its name has no address", "ranks meet by name: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME to the network to use"
        )
    if memory.available < 4 * GB:
        return Finding("host", "warn", text, "a rank needs about 6 GB for an 8B target's frozen parts and a drafter: end what holds the rest")
    return Finding("host", "ok", text)


def check_torch(_folder: Path) -> Finding:
    import torch

    text = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}, {torch.get_num_threads()} threads"
    if probes.driver_version() and not torch.version.cuda:
        return Finding("torch", "fail", f"{text}, but there is an NVIDIA driver", "pip uninstall torch and install the same version's CUDA build (pytorch.org)")
    return Finding("torch", "ok", text)


def check_cuda(_folder: Path) -> Finding:
    import torch

    driver = probes.driver_version()
    if not torch.cuda.is_available():
        if driver and torch.version.cuda:
            text = f"driver {driver} is there, but torch for CUDA {torch.version.cuda} finds no device"
            return Finding("cuda", "fail", text, "update the driver, or see that CUDA_VISIBLE_DEVICES and the job's or container's devices are not empty")
        return Finding("cuda", "ok", "no device: capture and training run on CPU")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    text = f"driver {driver or 'unknown'}; " + ", ".join(f"{d.name} {d.major}.{d.minor} {d.total_memory / GB:.0f} GB" for d in devices)
    if any(d.major < 8 for d in devices):
        return Finding("cuda", "warn", text, "no bf16 below capability 8.0: take a train.ds_config in fp32 and target.dtype=fp32")
    taken = [i for i in range(len(devices)) if (free := torch.cuda.mem_get_info(i))[0] < 0.9 * free[1]]
    if taken:
        return Finding("cuda", "warn", f"{text}; memory of device {', '.join(map(str, taken))} is in use", "nvidia-smi shows by which process")
    return Finding("cuda", "ok", text)


def check_nccl(_folder: Path) -> Finding:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Finding("nccl", "fail", "torch has no gloo, which stops and resumes need on every machine", "install torch from pytorch.org or PyPI")
    if not torch.cuda.is_available():
        return Finding("nccl", "ok", "not needed without a device; ranks meet by gloo")
    if not torch.distributed.is_nccl_available():
        return Finding("nccl", "fail", "torch has no NCCL, by which ranks on GPUs meet", "install torch's CUDA build for Linux (pytorch.org)")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    settings = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
    return Finding("nccl", "ok", f"{version}{f', {settings}' if settings else ''}")


def check_deepspeed(_folder: Path) -> Finding:
    """Of its compiled parts training uses one, and that only to offload the optimizer from a GPU."""
    import torch

    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    built = [name for name, there in installed_ops.items() if there]
    can = [name for name, builder in ALL_OPS.items() if name != "deepspeed_not_implemented" and builder.is_compatible(verbose=False)]
    text = f"{probes.version_of('deepspeed')}; built: {', '.join(built) or 'none'}; can be built: {', '.join(can) or 'none'}; wanted: none"
    if torch.cuda.is_available():
        text += " but cpu_adam, for offload"
        if "cpu_adam" not in {*built, *can}:
            return Finding("deepspeed", "warn", text, "offload falls back to torch's AdamW, which is slower: needs nvcc of torch's CUDA version in CUDA_HOME")
    return Finding("deepspeed", "ok", text)


def check_compiler(_folder: Path) -> Finding:
    import torch

    found = {name: probes.said([name, "--version"]).partition("\n")[0] for name in ("c++", "g++", "clang++")}
    first = next((line for line in found.values() if line), "")
    release = re.search(r"release ([\d.]+)", probes.said(["nvcc", "--version"]))
    text = f"{first or 'no C++ compiler'}; {f'nvcc {release[1]}' if release else 'no nvcc'}; ninja {'found' if shutil.which('ninja') else 'not found'}"
    if not first:
        return Finding("compiler", "warn", text, "train.compile=true on CPU and offload from a GPU need one: apt-get install g++")
    if release and torch.version.cuda and release[1].split(".")[0] != torch.version.cuda.split(".")[0]:
        return Finding(
            "compiler", "warn", f"{text}, torch is for CUDA {torch.version.cuda}", "DeepSpeed builds ops with nvcc of torch's major version: set CUDA_HOME"
        )
    return Finding("compiler", "ok", text)


def check_ray(_folder: Path) -> Finding:
    """The cluster of RAY_ADDRESS is asked for its nodes' clocks."""
    address = os.environ.get("RAY_ADDRESS", "")
    token = bool(os.environ.get("RAY_AUTH_TOKEN")) or Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser().is_file()
    mode = os.environ.get("RAY_AUTH_MODE", "")
    text = f"{probes.version_of('ray')}; {f'RAY_ADDRESS={address}' if address else 'RAY_ADDRESS is not set: a Ray of its own is started'}; "
    text += f"token {'found' if token else 'not found'}, RAY_AUTH_MODE={mode or 'not set'}"
    if address and not probes.reachable(address):
        return Finding("ray", "fail", f"{text}; nobody answers there", "start Ray on the head, or unset RAY_ADDRESS")
    if mode == "token" and not token:
        return Finding("ray", "fail", text, "ray get-auth-token --generate, once, and copy ~/.ray/auth_token to every node")
    if address and mode != "token":
        return Finding("ray", "warn", text, "without a token whoever reaches the cluster's ports can run code there: start it with RAY_AUTH_MODE=token")
    if address and address not in ("auto", "local"):
        skews = probes.ray_clocks(address)
        text += f"; {len(skews)} nodes, clocks within {max(map(abs, skews.values()), default=0):.1f} s of this one"
        if late := [f"{node} {skew:+.1f} s" for node, skew in skews.items() if abs(skew) > 2]:
            return Finding("ray", "warn", f"{text}: {', '.join(late)}", "start chrony or systemd-timesyncd there")
    return Finding("ray", "ok", text)


def check_slurm(_folder: Path) -> Finding:
    if not shutil.which("sinfo"):
        return Finding("slurm", "ok", "not here")
    version = probes.said(["sinfo", "--version"]) or "version unknown"
    nodes = probes.said(["sinfo", "--noheader", "--format=%D %T"]).replace("\n", ", ")
    job = os.environ.get("SLURM_JOB_ID")
    where = f"in job {job} on {os.environ.get('SLURM_JOB_NODELIST', '?')}" if job else "outside of a job"
    lacking = [name for name in ("sbatch", "srun", "scancel", "scontrol") if not shutil.which(name)]
    text = f"{version}, {where}; nodes: {nodes or 'unknown'}"
    if lacking:
        return Finding("slurm", "warn", f"{text}; not found: {', '.join(lacking)}", "install the Slurm client commands: cluster/slurm/ needs them in the job")
    if not nodes:
        return Finding("slurm", "warn", text, "the controller does not answer: scontrol ping tells more; SLURM_CONF may name another cluster")
    return Finding("slurm", "ok", text)


def check_disk(folder: Path) -> Finding:
    """Free space, and what checkpoints and shards rely on: fsync, a rename over a file, hard links, locks."""
    try:
        lacking = probes.storage_lacks(folder)
    except OSError as error:
        return Finding("disk", "fail", f"{folder} cannot be written to ({error})", "name another with --folder, or mend its permissions")
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / GB:,.0f} of {usage.total / GB:,.0f} GB free"
    if any(name in lacking for name in ("fsync", "rename")):
        return Finding("disk", "fail", f"{text}; no {', '.join(lacking)}", "checkpoints and shards are not safe there: use another file system for `work`")
    if usage.free < 1 * GB:
        return Finding("disk", "fail", text, "make room: kvshot plan capture tells what features take, a checkpoint takes 12 to 16 bytes a trained parameter")
    if usage.free < 50 * GB:
        return Finding("disk", "warn", text, "enough for small targets; kvshot plan capture tells what features take")
    if lacking:
        return Finding(
            "disk", "warn", f"{text}; no {', '.join(lacking)}", "let one command at a time write there; kvshot data merge copies where it would link"
        )
    return Finding("disk", "ok", f"{text}; fsync, rename, hard links and locks work")


def check_shm(_folder: Path, shm: Path = Path("/dev/shm")) -> Finding:
    if not shm.is_dir():
        return Finding("shm", "fail", f"no {shm}", "mount a tmpfs there: Ray and NCCL share memory through it")
    usage = shutil.disk_usage(shm)
    text = f"{usage.free / GB:.1f} of {usage.total / GB:.1f} GB free in {shm}"
    if usage.free < 1 * GB:
        return Finding(
            "shm", "fail", text, "Ray and NCCL share memory through it: docker run --shm-size=16g (or --ipc=host), in Kubernetes an emptyDir of memory"
        )
    if usage.free < 4 * GB:
        return Finding("shm", "warn", text, "Ray's object store would spill to disk: give a container --shm-size=16g")
    return Finding("shm", "ok", text)


def check_limits(_folder: Path) -> Finding:
    files, processes = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    told = ["no limit" if n == resource.RLIM_INFINITY else str(n) for n in (files, processes)]
    text = f"open files {told[0]}, processes {told[1]}"
    if files != resource.RLIM_INFINITY and files < 4096:
        return Finding("limits", "warn", text, "ulimit -n 65536 before Ray is started (many workers and shards open many files)")
    if processes != resource.RLIM_INFINITY and processes < 4096:
        return Finding("limits", "warn", text, "ulimit -u 65536: Ray and its workers have hundreds of threads each")
    return Finding("limits", "ok", text)


def check_clock(folder: Path) -> Finding:
    """This machine's clock against the one that stamps files in `folder`: locks of dead writers are judged by age."""
    probe = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        before = time.time()
        probe.write_text("now")
        skew = probe.stat().st_mtime - (before + time.time()) / 2
    finally:
        probe.unlink(missing_ok=True)
    text = f"files in {folder} are stamped {skew:+.2f} s from this machine's clock"
    if abs(skew) > 2:
        return Finding("clock", "warn", text, "start chrony or systemd-timesyncd on this machine and on the file server")
    return Finding("clock", "ok", text)


def check_ranks(_folder: Path) -> Finding:
    """Started once per rank (srun, torchrun), the ranks meet and compare their clocks."""
    env = {**os.environ, **from_slurm(os.environ)}
    if int(env.get("WORLD_SIZE", "1")) < 2 or "RANK" not in env:
        return Finding("ranks", "ok", "one process: start it once per rank (srun kvshot doctor) to see whether the ranks meet")
    try:
        clocks = probes.rank_clocks(env)
    except Exception as error:  # noqa: BLE001 - torch raises many kinds
        text = f"rank {env['RANK']} of {env['WORLD_SIZE']} does not reach the others at {env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')} ({error})"
        return Finding(
            "ranks", "fail", text, "MASTER_ADDR must be the first node's address, its port open; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network"
        )
    hosts, spread = {host for host, _ in clocks}, max(t for _, t in clocks) - min(t for _, t in clocks)
    text = f"rank {env['RANK']}: {len(clocks)} ranks on {len(hosts)} host(s) meet, clocks within {spread:.2f} s"
    if spread > 2:
        return Finding("ranks", "warn", text, "start chrony or systemd-timesyncd on every node")
    return Finding("ranks", "ok", text)


CHECKS: dict[str, Callable[[Path], Finding]] = {
    "python": check_python,
    "packages": check_packages,
    "optional": check_optional,
    "host": check_host,
    "torch": check_torch,
    "cuda": check_cuda,
    "nccl": check_nccl,
    "deepspeed": check_deepspeed,
    "compiler": check_compiler,
    "ray": check_ray,
    "slurm": check_slurm,
    "disk": check_disk,
    "shm": check_shm,
    "limits": check_limits,
    "clock": check_clock,
    "ranks": check_ranks,
}
