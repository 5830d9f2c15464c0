"""Looks at a machine as a place to train on: versions, devices, backends, launcher, network, a real all-reduce."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from crossover import selftest

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_CONTROLLER",
    "HOROVOD_GLOO_IFACE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
"""Printed if set. Named one by one, as launchers also keep secrets in the environment."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the examination.

    Attributes:
        name: what was looked at.
        value: what was seen.
        remedy: what to do, if it keeps a training from working; else empty.
    """

    name: str
    value: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.remedy


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether training can work here."""
        return all(finding.ok for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


def examine(timeout_s: float = selftest.TIMEOUT_S) -> Diagnosis:
    """Look at everything; ends within about twice ``timeout_s``."""
    looks: tuple[Callable[[], list[Finding]], ...] = (
        _versions,
        _horovod,
        _backends,
        _devices,
        _cores,
        _launcher,
        _interfaces,
        _host_name,
    )
    findings = [finding for look in looks for finding in look()]
    findings += [_all_reduce(backend, timeout_s) for backend in _testable()]
    return Diagnosis(tuple(findings))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> list[Finding]:
    import torch

    return [
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        Finding("crossover", _version("crossover") or "not installed, run from its source"),
        Finding("torch", str(torch.__version__)),
    ]


def _horovod() -> list[Finding]:
    version = _version("horovod")
    if version is None:
        return [Finding("horovod", "not installed (only needed for horovodrun)")]
    try:
        import horovod.torch as hvd
    except ImportError as error:
        remedy = "build it for this torch again (make horovod in Crossover's source), or uninstall it"
        return [Finding("horovod", f"{version}, but its torch part does not load: {error}", remedy)]
    built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
    return [Finding("horovod", f"{version} with {', '.join(built) or 'no transport'}")]


def _backends() -> list[Finding]:
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("torch.distributed", "not in this build of torch", "install a build of torch that has it")]
    names = [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _has(name)]
    remedy = "" if names else "install a build of torch with Gloo or NCCL"
    return [Finding("torch.distributed", f"backends {', '.join(names) or 'none'}", remedy)]


def _has(backend: str) -> bool:
    import torch.distributed as dist

    available = getattr(dist, f"is_{backend}_available", None)
    return available is not None and bool(available())


def _devices() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("GPUs", "none usable: training runs on the CPU")]
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    seen = ", ".join(f"{item.name} ({item.total_memory / 2**30:.0f} GiB)" for item in properties)
    return [Finding("GPUs", f"{len(properties)}: {seen}")]


def _cores() -> list[Finding]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [Finding("cores", f"{usable} usable of {os.cpu_count()}, {torch.get_num_threads()} torch threads a process")]


def _launcher() -> list[Finding]:
    seen = [f"{name}={os.environ[name]}" for name in LAUNCHER_VARIABLES if name in os.environ]
    ours = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CROSSOVER_")]
    return [
        Finding("launcher variables", " ".join(seen) or "none: this process was not started by a launcher"),
        *([Finding("crossover variables", " ".join(ours))] if ours else []),
    ]


def _interfaces() -> list[Finding]:
    found = []
    for _, name in socket.if_nameindex():
        speed = _read_system(name, "speed")
        known = speed.lstrip("-").isdigit() and int(speed) > 0
        state = "up" if _read_system(name, "operstate") in ("up", "unknown") else "down"
        found.append(f"{name} {state}{f' {speed} Mbit/s' if known else ''}")
    remedy = "" if found else "give the container a network, at least the loopback interface"
    return [Finding("network interfaces", ", ".join(found) or "none", remedy)]


def _read_system(interface: str, entry: str) -> str:
    try:
        with open(f"/sys/class/net/{interface}/{entry}", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _host_name() -> list[Finding]:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        remedy = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts"
        return [Finding("host name", f"{name} has no address: {error}", remedy)]
    return [Finding("host name", f"{name} is {', '.join(addresses)}")]


def _testable() -> list[str]:
    import torch

    several_gpus = _has("nccl") and torch.cuda.is_available() and torch.cuda.device_count() >= selftest.RANKS
    return [*(["gloo"] if _has("gloo") else []), *(["nccl"] if several_gpus else [])]


def _all_reduce(backend: str, timeout_s: float) -> Finding:
    name = f"all-reduce, 2 ranks, {backend}"
    result = selftest.run(backend, timeout_s)
    if not result.ok or result.bytes_per_s is None:
        return Finding(name, result.problem, result.remedy)
    where = "on the loopback interface" if backend == "gloo" else "between the first two GPUs"
    return Finding(name, f"right, {result.bytes_per_s / 1e6:.0f} MB/s of payload {where}")
