"""The systems of step_time as the simulator has them, and the testbed's links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import step_time
from benchmarks.harness import BASE, CEILING
from benchmarks.layer_times import pass_s_per_byte
from crossover.simulate import Cluster, Job, Network, Part, simulate
from crossover.simulate.gated import Fused, Local
from crossover.simulate.layerwise import Decoupled, Priority
from crossover.simulate.systems import Alone, DeFT, FifoDelayed, Plain, System

MEBIBYTE = 1 << 20
STEPS = 24
LATENCY_S = 0.05e-3
LAUNCH_S = 0.3e-3
"""Of a Gloo all-reduce of one number between two processes here: 0.24 to 0.44 ms, measured."""
HOROVOD_SHARE = 0.15
"""Of a core, that Horovod's background thread takes with its usual cycle of 1 ms: 13 to 18 %, measured."""
Facts = dict[str, Any]


@dataclass(frozen=True)
class Constants:
    """Of the testbed, for all cells and systems.

    Attributes:
        goodput: share of the links' rate that gradients get.
        copy_s_per_byte: of a transfer, beside its time on the link: copies and sums between the link's two halves.
        cost_s_per_byte: computing lost for each byte of gradients that travels meanwhile.
        launch_s: fixed cost of a collective.
    """

    goodput: float = 1.0
    copy_s_per_byte: float = 0.0
    cost_s_per_byte: float = 0.0
    launch_s: float = LAUNCH_S


@dataclass(frozen=True)
class Measured:
    """One system in one cell; ``compressible`` as in :class:`~benchmarks.layer_times.LayerTimes`."""

    cell: str
    system: str
    seconds: float
    job: Job
    hosts: int
    rate: float
    steps: int
    facts: Facts
    compressible: float = 1.0


def cluster_for(measured: Measured, constants: Constants) -> Cluster:
    """The testbed with the cell's links."""
    copies = 1 / max(constants.copy_s_per_byte, 1e-15)
    network = Network(
        measured.hosts,
        measured.rate,
        LATENCY_S,
        constants.goodput,
        local_bytes_s=copies,
        launch_s=constants.launch_s,
        source="the cell's; fitted to DDP's cells",
    )
    nbytes = measured.job.nbytes
    loss = min(constants.cost_s_per_byte * nbytes / network.all_reduce_s(nbytes), 0.5)
    return Cluster("testbed", measured.hosts, network, contention=loss)


def predict(measured: Measured, constants: Constants, steps: int = STEPS) -> float | None:
    """Seconds a step; ``None`` where there is no model of the system."""
    make = MODELS.get(measured.system)
    if make is None:
        return None
    system = make(measured)
    job = slowed(measured.job, 1 / (1 - HOROVOD_SHARE)) if "horovod" in measured.system else measured.job
    return simulate(job, system, cluster_for(measured, constants), steps).step_s


def slowed(job: Job, factor: float) -> Job:
    """The same with all computing ``factor`` times as long."""
    parts = tuple(Part(factor * part.forward_s, factor * part.backward_s, part.nbytes) for part in job.parts)
    return replace(job, parts=parts, between_s=factor * job.between_s, load_s=factor * job.load_s)


def _cap(facts: Facts) -> tuple[int, int]:
    cap = facts.get("bucket_cap_mb")
    if not isinstance(cap, int | float):
        return 25 * MEBIBYTE, MEBIBYTE
    return int(cap * MEBIBYTE), int(cap * MEBIBYTE)


def _plain(measured: Measured) -> System:
    return Plain(*_cap(measured.facts))


def _half(measured: Measured) -> System:
    # to 16 bits and back: one and a half passes over the gradients
    return Plain(*_cap(measured.facts), wire=0.5, extra_s_per_byte=1.5 * pass_s_per_byte())


def _power(measured: Measured) -> System:
    # error added and kept, two products, the approximation written: about five passes over the gradients
    whole = measured.job.nbytes
    return Plain(whole, whole, wire=measured.compressible, extra_s_per_byte=5 * pass_s_per_byte())


def _priority(measured: Measured) -> System:
    sizes = measured.facts
    return Priority(sizes["partition_bytes"], sizes["credit_bytes"], sizes["fuse_bytes"])


def _selsync(measured: Measured) -> System:
    # the LSSR is of the whole run; warm-up steps shared and were not timed
    facts, total = measured.facts, step_time.WARM_UP_STEPS + measured.steps
    shared = max((1 - facts["lssr"]) * total - facts["warmup"], 0)
    lssr = 1 - min(shared / (total - facts["warmup"]), 1)
    return Local(lssr, extra_s=pass_s_per_byte() * measured.job.nbytes)


def _periodic(measured: Measured) -> System:
    facts = measured.facts
    every: int = facts["every"] if "every" in facts else facts.get("period", 4)
    return Local(1 - 1 / every, vote=False, label="local SGD")


def _dear(measured: Measured) -> System:
    return Decoupled(int(measured.facts["group_bytes"]))


MODELS: dict[str, Callable[[Measured], System]] = {
    CEILING: lambda measured: Alone(),
    BASE: _plain,
    "ddp_fp16": _half,
    "ddp_bf16": _half,
    "powersgd": _power,
    "post_local_sgd": _periodic,
    "horovod": lambda measured: Fused(),
    "dear": _dear,
    "crossover": _plain,
    "crossover_fp16": _half,
    "crossover_selsync": _selsync,
    "crossover_periodic": _periodic,
    "crossover_priority": _priority,
    "crossover_horovod": _plain,
    "crossover_deft": lambda measured: DeFT(capacity=None),
    "crossover_fifo": lambda measured: FifoDelayed(measured.facts.get("merged")),
}
