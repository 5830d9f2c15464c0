"""Systems with local steps (SelSync, local SGD), and Horovod's fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from crossover.simulate.assumptions import Assumption
from crossover.simulate.cluster import Cluster
from crossover.simulate.events import Process, Transfer
from crossover.simulate.job import Job
from crossover.simulate.systems import System
from crossover.simulate.worker import Worker


@dataclass(frozen=True)
class Local(System):
    """Steps without communication, and now and then an average of all parameters.

    Attributes:
        lssr: share of local steps: which steps share is spread evenly.
        vote: ranks vote in every step, beside the update, as with SelSync; local SGD counts steps in place of that.
        extra_s: computing of a step for the gate, such as norms.
        cap_bytes: size of the pieces in which parameters travel.
    """

    lssr: float = 0.8
    vote: bool = True
    extra_s: float = 0.0
    cap_bytes: int = 25 * 2**20
    label: str = "SelSync"
    script: str = "xo.DistributedOptimizer(optimizer, model.named_parameters(), gate=xo.selsync.SelSync(delta=...))"

    def __post_init__(self) -> None:
        if not 0 <= self.lssr <= 1:
            raise ValueError(f"lssr: is {self.lssr}; give the share of local steps, 0 to 1")

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`."""
        return job.in_buckets(self.cap_bytes)

    def shares(self, number: int) -> bool:
        """Whether this step shares."""
        rate = 1.0 - self.lssr
        return int((number + 1) * rate + 1e-9) > int(number * rate + 1e-9)

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        parts, network = worker.job.parts, worker.cluster.network
        for number in range(steps):
            yield from worker.begin()
            yield from worker.forward(updating=False)
            yield from worker.backward(lambda part: None)
            yield from worker.compute(self.extra_s, "update", "gate")
            vote = [worker.send(network.vote_s(), "vote")] if self.vote else []
            yield from worker.compute(worker.job.update_s, "update")
            yield from worker.give_up()
            yield from worker.wait(vote, "waits for the vote")
            if self.shares(number):
                averages = [worker.all_reduce(part.nbytes, f"parameters {n}") for n, part in enumerate(parts)]
                yield from worker.wait(averages, "waits for the average")
            worker.end_step(1)

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        return [
            Assumption(self.label, f"LSSR {self.lssr:g}, evenly spread; every share is waited for", "asked for"),
            Assumption(f"{self.label}, progress", "as much a step as with shared updates", "SelSync's claim"),
        ]


@dataclass(frozen=True)
class Fused(System):
    """Horovod: a background thread joins what is ready at its next turn into one all-reduce.

    Attributes:
        cycle_s: seconds between two turns.
        cap_bytes: most that is joined.
    """

    cycle_s: float = 1e-3
    cap_bytes: int = 128 * 2**20
    label: str = "Horovod"

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        parts = worker.job.parts
        cost = worker.cluster.network.all_reduce_s
        last = {min(group): group for group in fuse(worker.job, cost, self.cycle_s, self.cap_bytes)}
        sent: list[Transfer] = []

        def ready(part: int) -> None:
            if part in last:
                sent.append(worker.all_reduce(sum(parts[n].nbytes for n in last[part]), f"fused {part}"))

        for _ in range(steps):
            sent.clear()
            yield from worker.begin()
            yield from worker.forward()
            yield from worker.backward(ready)
            yield from worker.give_up()
            yield from worker.wait(list(sent))
            worker.end_step(1)

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        value = f"cycle {1e3 * self.cycle_s:g} ms, fusion up to {self.cap_bytes / 2**20:g} MiB"
        return [Assumption(self.label, value, "Horovod 0.28's defaults")]


def fuse(job: Job, cost: Callable[[float], float], cycle_s: float, cap_bytes: int) -> list[Sequence[int]]:
    """Which parts travel together: those that are ready when the thread, done with the last, looks again."""
    ready = job.ready_s()
    waiting = [number for number in range(len(job.parts) - 1, -1, -1) if job.parts[number].nbytes]
    groups: list[Sequence[int]] = []
    clock = 0.0
    while waiting:
        clock = max(clock, ready[waiting[0]]) + cycle_s
        group: list[int] = []
        total = 0
        while (
            waiting and ready[waiting[0]] <= clock and (not group or total + job.parts[waiting[0]].nbytes <= cap_bytes)
        ):
            total += job.parts[waiting[0]].nbytes
            group.append(waiting.pop(0))
        groups.append(group)
        clock += cost(total)
    return groups
