"""Which cores a host computes on, and how much of them it may use.

With a core or more for each host, a host has its cores to itself. With more hosts than cores every host gets the same
share of a core, kept by a cgroup's CPU quota: a host does not get faster while another one waits for the network.
Where no quota can be set, hosts only share cores by pinning, and :attr:`Share.method` says so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "crossover-testbed"
PERIOD_US = 10_000
REMOVE_SECONDS = 5.0
_counter = itertools.count()

# Outlives the driver by a moment: end of file on the pipe means that the driver is gone, however it went.
_JANITOR = """
read -r _ || true
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    rmdir "$@" 2>/dev/null
    for group; do [ ! -d "$group" ] || { sleep 0.1; continue 2; }; done
    exit 0
done
"""


@dataclass(frozen=True)
class Share:
    """What one host may compute on.

    Attributes:
        cores: the cores it is pinned to.
        fraction: how much computing it gets, in cores.
        method: ``"own cores"``, ``"cgroup v1 quota"``, ``"cgroup v2 quota"`` or ``"pinning only"``.
    """

    cores: tuple[int, ...]
    fraction: float
    method: str

    def __str__(self) -> str:
        listed = ",".join(map(str, self.cores))
        return f"{self.fraction:.3g} of a core on core(s) {listed} ({self.method})"


def plan(hosts: int, cores: Sequence[int], quota_method: str | None) -> list[Share]:
    """Each host's share of ``cores``; ``quota_method`` is what :func:`quota_support` found.

    With fewer hosts than cores each has ``len(cores) // hosts`` of them. Otherwise the shares are equal: hosts are
    spread evenly over the cores where they divide, and float over all of them where they do not.

    Raises:
        ValueError: fewer than one host, or no core.
    """
    if hosts < 1 or not cores:
        raise ValueError(f"hosts: got {hosts} on {len(cores)} cores; give at least one of each")
    if hosts <= len(cores):
        each = len(cores) // hosts
        return [Share(tuple(cores[h * each : (h + 1) * each]), 1.0, "own cores") for h in range(hosts)]
    method = quota_method or "pinning only"
    fraction = len(cores) / hosts
    if hosts % len(cores) == 0:
        return [Share((cores[h % len(cores)],), fraction, method) for h in range(hosts)]
    if quota_method:
        return [Share(tuple(cores), fraction, method) for _ in range(hosts)]
    # Without a quota only pinning keeps hosts apart, so all of them sit on one core: equal, if wasteful.
    return [Share((cores[0],), 1 / hosts, method) for _ in range(hosts)]


def quota_support(root: Path = Path("/sys/fs/cgroup")) -> tuple[str, Path] | None:
    """How a CPU quota can be set here: its name, and the directory under which a group is made; None if it cannot."""
    candidates = [("cgroup v1 quota", base) for base in (root / "cpu", root / "cpu,cpuacct")]
    for method, base in [*candidates, ("cgroup v2 quota", root)]:
        marker = "cpu.cfs_quota_us" if method.startswith("cgroup v1") else "cpu.max"
        trial = base / f"{PREFIX}-{os.getpid()}-trial{next(_counter)}"
        if method == "cgroup v2 quota" and not (base / "cgroup.controllers").exists():
            continue
        try:
            trial.mkdir()
        except OSError:
            continue
        try:
            if os.access(trial / marker, os.W_OK):
                return method, base
        finally:
            trial.rmdir()
    return None


class QuotaGroups:
    """One cgroup a host, each with the same CPU quota; removed by :meth:`close`, or by itself when the driver dies."""

    def __init__(self, method: str, base: Path, shares: Sequence[Share]) -> None:
        bed = f"{PREFIX}-{os.getpid()}-{next(_counter)}"
        self.groups = [base / f"{bed}-host{host}" for host in range(len(shares))]
        self._janitor = subprocess.Popen(
            ["sh", "-c", _JANITOR, "janitor", *map(str, self.groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for group, share in zip(self.groups, shares, strict=True):
            group.mkdir()
            quota = round(PERIOD_US * share.fraction)
            if method == "cgroup v2 quota":
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))

    def procs(self, host: int) -> str:
        """The file by which a process joins the host's group."""
        return str(self.groups[host] / "cgroup.procs")

    def close(self) -> None:
        """Remove the groups. The hosts' processes are gone by now."""
        for group in self.groups:
            remove(group)
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait(REMOVE_SECONDS)


def remove(group: Path) -> None:
    """Remove a cgroup, waiting for the last of its processes to be reaped."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while group.exists():
        with contextlib.suppress(FileNotFoundError):
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


def sweep(root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Remove the groups of drivers that are dead, with whatever still runs in them; returns what was removed."""
    stale = []
    for base in (root / "cpu", root / "cpu,cpuacct", root):
        for group in base.glob(f"{PREFIX}-*"):
            match = re.fullmatch(rf"{PREFIX}-(\d+)-.*", group.name)
            if match is None or Path(f"/proc/{match[1]}").exists():
                continue
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
                remove(group)
                stale.append(group)
    return stale
