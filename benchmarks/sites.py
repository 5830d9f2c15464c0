"""Where the ranks of a measurement run: on the testbed, or on loopback slowed by Crossover's emulated link."""

from __future__ import annotations

import os
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from . import loopback
from .peers import System
from .testbed import JobError, Testbed, parse_rate
from .workloads import Workload
from .workloads.measure import ComputeTime, measure_compute, measure_on

WAIT_SECONDS = 60.0
LATENCY = "0.1ms"


class Site(ABC):
    """Hosts joined by links of one rate."""

    hosts: int

    @abstractmethod
    def set_rate(self, rate: float) -> None:
        """Give every link ``rate`` bit/s of goodput, and measure it.

        Raises:
            ValueError: no such rate is possible.
            BandwidthError: the measured rate is off.
        """

    @abstractmethod
    def compute(self, workload: Workload) -> ComputeTime:
        """What the slowest host needs for a step, under its share of the cores."""

    @abstractmethod
    def run(
        self,
        module: str,
        arguments: Sequence[str],
        launcher: str,
        timeout: float,
        variables: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Run a worker on every host, with ``variables`` in its environment; what each rank reported, by rank.

        May be called from several threads: several jobs then share the hosts.

        Raises:
            JobError: a rank failed.
        """

    @abstractmethod
    def refuses(self, system: System) -> str | None:
        """Why the system cannot be measured at this site, or ``None``."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts about the place, for JSON."""

    @abstractmethod
    def place(self) -> str:
        """Number of hosts, cores and shares, for a table."""

    @abstractmethod
    def links(self) -> str:
        """The links' rate and how far off it was, for a table."""


class Bed(Site):
    """The testbed: network namespaces and shaped links."""

    def __init__(self, testbed: Testbed) -> None:
        self.testbed, self.hosts = testbed, testbed.hosts

    def set_rate(self, rate: float) -> None:
        self.testbed.set_rate(rate)
        self.testbed.verify()

    def compute(self, workload: Workload) -> ComputeTime:
        return measure_on(self.testbed, workload)

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        launcher: str,
        timeout: float,
        variables: Mapping[str, str] | None = None,
    ) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            own = {loopback.RESULT_VARIABLE: folder, "CROSSOVER_TIMEOUT": str(WAIT_SECONDS), **(variables or {})}
            self.testbed.run(["-m", module, *arguments], timeout=timeout, launcher=launcher, env=own)
            return loopback.collect(folder, self.hosts)

    def refuses(self, system: System) -> str | None:
        return system.unavailable()

    def describe(self) -> dict[str, Any]:
        return {**self.testbed.describe(), "emulated": False, "cores": len(os.sched_getaffinity(0))}

    def place(self) -> str:
        facts = self.describe()
        own = facts["share_method"] == "own cores"
        shared = f"each host has {facts['share_fraction']:.3g} of a SHARED core ({facts['share_method']})"
        return f"{self.hosts} hosts on {facts['cores']} cores, {'no core is shared' if own else shared}"

    def links(self) -> str:
        worst = max(abs(entry["worst"]) for entry in self.testbed.verify())
        return f"links of {self.testbed.rates[0] / 1e6:.4g} Mbit/s, at most {worst:.1%} off when measured"


class Emulated(Site):
    """Ranks on loopback, slowed by Crossover's emulated link: no root needed, for Crossover's systems only."""

    def __init__(self, hosts: int) -> None:
        cores = len(os.sched_getaffinity(0))
        if not 2 <= hosts <= cores:
            raise ValueError(f"hosts: got {hosts}; the emulated link joins 2 to {cores} ranks here, one to a core")
        self.hosts, self.cores, self.rate = hosts, cores, 0

    def set_rate(self, rate: float) -> None:
        self.rate = parse_rate(rate)

    def compute(self, workload: Workload) -> ComputeTime:
        return measure_compute(workload)

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        launcher: str,
        timeout: float,
        variables: Mapping[str, str] | None = None,
    ) -> list[Any]:
        kind = "horovod" if launcher == "horovod" else "torch"
        own = {
            "CROSSOVER_EMULATED_LINK": f"{self.rate / 1e6:.6f}mbit,{LATENCY}",
            "CROSSOVER_TIMEOUT": str(WAIT_SECONDS),
            **(variables or {}),
        }
        try:
            return loopback.run(module, arguments, self.hosts, kind, timeout, own)
        except subprocess.TimeoutExpired as error:
            raise JobError(f"ranks still ran after {timeout:g} s", 124) from error
        except RuntimeError as error:
            raise JobError(str(error), 1) from error

    def refuses(self, system: System) -> str | None:
        if not system.emulated:
            return "the emulated link slows Crossover's communication only; this one needs the testbed (root)"
        return system.unavailable()

    def describe(self) -> dict[str, Any]:
        return {"hosts": self.hosts, "cores": self.cores, "rate_bit_s": self.rate, "emulated": True}

    def place(self) -> str:
        return (
            f"EMULATED LINK, figures are not measurements of a network: {self.hosts} ranks on loopback on {self.cores} "
            "cores, no core is shared"
        )

    def links(self) -> str:
        return f"{self.rate / 1e6:.4g} Mbit/s and {LATENCY} emulated"


@contextmanager
def site(hosts: int, emulated: bool) -> Iterator[Site]:
    """The place to measure at. ``TestbedError``: not to be had here, with what is missing."""
    if emulated:
        yield Emulated(hosts)
        return
    with Testbed(hosts, "500mbit") as testbed:
        yield Bed(testbed)
