"""A place that needs no network, for tests of question scripts."""

from __future__ import annotations

from typing import Any

from benchmarks.sites import Site
from benchmarks.testbed import BandwidthError
from benchmarks.workloads.measure import ComputeTime

COMPUTE = ComputeTime("vgg", 64, 4_000_000, forward_backward_s=0.040, step_s=0.050, spread=0.01)


class FakeSite(Site):
    """Two hosts that compute as :data:`COMPUTE` says; ``off`` rates are refused. What jobs answer is the subclass's."""

    hosts = 2

    def __init__(self, off: tuple[float, ...] = ()) -> None:
        self.off = off
        self.rate = 0.0
        self.rates: list[float] = []

    def set_rate(self, rate: float) -> None:
        if rate in self.off:
            raise BandwidthError("link 0 is off")
        self.rate = rate
        self.rates.append(rate)

    def compute(self, workload: Any) -> ComputeTime:
        return COMPUTE

    def refuses(self, system: Any) -> str | None:
        return None

    def describe(self) -> dict[str, Any]:
        return {"hosts": 2}

    def place(self) -> str:
        return "2 hosts"

    def links(self) -> str:
        return f"{self.rate:g} bit/s"
