"""The testbed: several hosts with slow links on one machine."""

from __future__ import annotations

import itertools
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import launchers, requirements, shares, topology
from .errors import TestbedError
from .job import Job, JobResult
from .namespace import Namespace
from .rates import format_rate, parse_rate

MAX_HOSTS = 16
FIRST_PORT = 29500
RENDEZVOUS_SECONDS = 30.0


class Testbed:
    """Hosts joined by shaped links, for as long as the ``with`` block runs.

    Host ``h`` is named ``host<h>`` and reaches the others at ``10.77.0.<h+1>`` over ``eth0``, whose rate is the same
    in both directions, and at ``10.78.0.<h+1>`` over ``eth1`` where there is a second link. Nothing leads out of it.
    Rank ``h`` runs on host ``h``, pinned, with one torch thread (:mod:`~benchmarks.testbed.shares`).

    Args:
        hosts: how many, 2 to 16.
        rate: each host's link, as TCP goodput: ``"500mbit"``, ``"1.5gbit"`` or bit/s.
        second_rate: likewise for a second link per host; its interface is in ``CROSSOVER_SECOND_IFACE``.
        check_bandwidth: measure the links before the first job at each rate and refuse to run when they are off.

    Raises:
        TestbedError: it cannot be built here; says what is missing and names the emulated link as the way out.
        ValueError: a bad number of hosts or rate.

    Example::

        with Testbed(hosts=2, rate="500mbit") as bed:
            for rate in ("500mbit", "1gbit"):
                bed.set_rate(rate)
                result = bed.run(["train.py", "--steps", "20"], timeout=120)
                print(rate, result.stdout[0])
    """

    __test__ = False

    def __init__(
        self,
        hosts: int = 2,
        rate: str | float = "500mbit",
        second_rate: str | float | None = None,
        *,
        check_bandwidth: bool = True,
    ) -> None:
        if not 2 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts: got {hosts}; the testbed joins 2 to {MAX_HOSTS} hosts")
        self.hosts = hosts
        self.rates = [parse_rate(rate)] + ([] if second_rate is None else [parse_rate(second_rate)])
        self._check_bandwidth = check_bandwidth
        self._verified: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        self._ports = itertools.count(FIRST_PORT)
        self._lock = threading.Lock()
        self._jobs: list[Job] = []
        self._namespaces: list[Namespace] = []
        self._quota: shares.QuotaGroups | None = None
        self.shares: list[shares.Share] = []

    def __enter__(self) -> Testbed:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Build it; ``with`` does this. Takes some tenths of a second."""
        lacking = requirements.missing()
        if lacking:
            raise TestbedError(requirements.advice(lacking, self.hosts, self.rates[0]))
        shares.sweep()
        try:
            self._share_cores()
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all jobs and remove everything that was made; safe to call twice."""
        while self._jobs:
            self._jobs.pop().close()
        while self._namespaces:
            self._namespaces.pop().close()
        if self._quota is not None:
            self._quota.close()
            self._quota = None

    def _share_cores(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        support = shares.quota_support() if self.hosts > len(cores) else None
        self.shares = shares.plan(self.hosts, cores, support and support[0])
        if support:
            self._quota = shares.QuotaGroups(*support, self.shares)

    def _build(self) -> None:
        hosts_file = topology.hosts_file(self.hosts)
        for name in [*map(topology.hostname, range(self.hosts)), "switch"]:
            self._namespaces.append(Namespace(name, hosts_file))
        for namespace in self._namespaces:
            namespace.wait_ready()
        links = len(self.rates)
        self.switch.configure("ip", topology.switch_setup([ns.pid for ns in self._namespaces[: self.hosts]], links))
        for host in range(self.hosts):
            self._namespaces[host].configure("ip", topology.host_setup(host, links))
        self._shape()

    def _shape(self) -> None:
        for host in range(self.hosts):
            self._namespaces[host].configure("tc", topology.host_shaping(self.rates))
        self.switch.configure("tc", topology.switch_shaping(self.hosts, self.rates))

    @property
    def switch(self) -> Namespace:
        """The namespace of the bridges; it has an address on each, over links that hosts alone are shaped on."""
        return self._namespaces[self.hosts]

    def set_rate(self, rate: str | float, second_rate: str | float | None = None) -> None:
        """Change the links' rate while the bed stands; not while a job runs.

        Raises:
            ValueError: a bad rate, or a second rate for a bed without second links.
        """
        rates = [parse_rate(rate), *self.rates[1:]]
        if second_rate is not None:
            if len(self.rates) == 1:
                raise ValueError("second_rate: this bed has one link per host; make it with second_rate to have two")
            rates[1] = parse_rate(second_rate)
        self.rates = rates
        self._shape()

    def verify(self) -> list[dict[str, Any]]:
        """Measure every link at the present rate, once, and refuse the bed if one is more than 5 % off.

        Returns the measurements as :func:`benchmarks.testbed.bandwidth.measure` gives them.

        Raises:
            BandwidthError: a link is off, also when measured again.
        """
        from .bandwidth import verify

        key = tuple(self.rates)
        if key not in self._verified:
            self._verified[key] = verify(self)
        return self._verified[key]

    def describe(self) -> dict[str, Any]:
        """Everything a table has to say about where its figures come from; fit for JSON."""
        return {
            "hosts": self.hosts,
            "rate_bit_s": self.rates[0],
            "second_rate_bit_s": self.rates[1] if len(self.rates) > 1 else None,
            "share": [str(share) for share in self.shares],
            "share_fraction": self.shares[0].fraction,
            "share_method": self.shares[0].method,
            "measured": self._verified.get(tuple(self.rates)),
        }

    def __str__(self) -> str:
        rates = " and ".join(map(format_rate, self.rates))
        shared = "; ".join(f"{topology.hostname(h)}: {share}" for h, share in enumerate(self.shares))
        return f"{self.hosts} hosts, links of {rates}; {shared}"

    def start(
        self,
        command: Sequence[str],
        *,
        launcher: str = "torchrun",
        env: Mapping[str, str] | None = None,
        echo: bool = False,
        hosts: Sequence[int] | None = None,
    ) -> Job:
        """Start ``command`` on every host (or those named) and return at once; several jobs may run side by side.

        Args:
            command: a Python script (``x.py``), ``-m module`` or ``-c code`` and its arguments, or another program.
            launcher: ``"torchrun"`` or ``"horovod"``: whose variables the ranks find.
            env: variables added to every rank's environment.
            echo: pass output on line by line with the rank in front.
            hosts: where the ranks run, by rank; default: host ``h`` is rank ``h``.

        Raises:
            BandwidthError: the links are off (see ``check_bandwidth``).
            ValueError: an empty command or an unknown launcher.
        """
        if launcher not in launchers.LAUNCHERS:
            raise ValueError(f"launcher: got {launcher!r}; give one of {', '.join(launchers.LAUNCHERS)}")
        if not command:
            raise ValueError("command: got nothing to run; give a script and its arguments")
        placed = list(range(self.hosts)) if hosts is None else list(hosts)
        with self._lock:
            self._jobs = [job for job in self._jobs if any(process.poll() is None for process in job.processes)]
            if self._check_bandwidth and not self._jobs:
                self.verify()
            port = next(self._ports)
            helper, variables = self._launcher_variables(launcher, placed, port)
            argv = [sys.executable, *command] if _is_python(command[0]) else list(command)
            base = [launchers.common(host, len(self.rates) > 1) for host in placed]
            environments = [{**b, **v, **(env or {})} for b, v in zip(base, variables, strict=True)]
            job = Job([self.enter(host, argv) for host in placed], environments, echo=echo, helper=helper)
            self._jobs.append(job)
        return job

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        launcher: str = "torchrun",
        env: Mapping[str, str] | None = None,
        echo: bool = False,
        check: bool = True,
    ) -> JobResult:
        """Run ``command`` on every host to its end; arguments as for :meth:`start`.

        Raises:
            JobError: with ``check``, a rank failed or the job took more than ``timeout`` seconds.
        """
        result = self.start(command, launcher=launcher, env=env, echo=echo).wait(timeout)
        return result.check() if check else result

    def enter(self, host: int, command: Sequence[str], *, shared: bool = True) -> list[str]:
        """The command line that runs ``command`` on the host; with ``shared``, on the host's share of the cores."""
        if not shared:
            return self._namespaces[host].enter(command, cores=sorted(os.sched_getaffinity(0)))
        procs = self._quota.procs(host) if self._quota else ""
        return self._namespaces[host].enter(command, cores=self.shares[host].cores, cgroup_procs=procs)

    def _launcher_variables(
        self, launcher: str, placed: Sequence[int], port: int
    ) -> tuple[subprocess.Popen[bytes] | None, list[dict[str, str]]]:
        size = len(placed)
        if launcher == "torchrun":
            master = topology.address(placed[0])
            return None, [launchers.torchrun(rank, size, master, port) for rank in range(size)]
        helper, port = self._start_rendezvous(placed)
        address = topology.switch_address()
        return helper, [launchers.horovod(r, size, topology.hostname(h), address, port) for r, h in enumerate(placed)]

    def _start_rendezvous(self, placed: Sequence[int]) -> tuple[subprocess.Popen[bytes], int]:
        script = str(Path(__file__).with_name("rendezvous.py"))
        host_list = ",".join(f"{topology.hostname(host)}:1" for host in placed)
        cores = sorted(os.sched_getaffinity(0))
        command = self.switch.enter([sys.executable, script, host_list, str(len(placed))], cores=cores)
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert helper.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(helper.stdout, selectors.EVENT_READ)
            answer = helper.stdout.readline() if selector.select(RENDEZVOUS_SECONDS) else b""
        if not answer.strip().isdigit():
            helper.kill()
            helper.wait()
            raise TestbedError(f"Horovod's rendezvous gave no port in {RENDEZVOUS_SECONDS:g} s; is horovod installed?")
        return helper, int(answer)


def _is_python(word: str) -> bool:
    return word.endswith(".py") or word in ("-m", "-c")
