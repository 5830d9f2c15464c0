"""What each system does in a step: without communication, like DDP, Horovod, DeFT, delayed first come first served.

A system takes a :class:`~crossover.simulate.worker.Worker` through its steps. :mod:`~crossover.simulate.layerwise` has
those that cross the barrier between steps, :mod:`~crossover.simulate.gated` those with local steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from crossover.bucket_plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES
from crossover.deft.partition import bucket_bytes, cuts
from crossover.deft.pilot import Pilot, Preserver
from crossover.deft.plan import Plan, QueueState, StepPlan, merged_sizes, synchronous_plan
from crossover.deft.planner import Limits, make_plan
from crossover.deft.preserver import IGNORED_SAMPLES
from crossover.simulate.assumptions import Assumption
from crossover.simulate.cluster import Cluster
from crossover.simulate.events import Process, Transfer, Wish
from crossover.simulate.job import Job
from crossover.simulate.worker import Worker


class System(ABC):
    """A way to train. ``label`` is for tables, ``script`` what a user writes for it."""

    label: str
    script: str = ""

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """The job with the parts that this system sends."""
        return job

    @abstractmethod
    def run(self, worker: Worker, steps: int) -> Process:
        """Train so many steps."""

    def merged(self, job: Job, cluster: Cluster) -> list[int]:
        """Steps of each update, in the long run; ``[1]`` for an update a step."""
        return [1]

    def assumptions(self) -> list[Assumption]:
        """What a prediction for it rests on besides job and cluster."""
        return []


@dataclass(frozen=True)
class Alone(System):
    """The same computing without any communication."""

    label: str = "no communication"

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        for _ in range(steps):
            yield from worker.begin()
            yield from worker.forward()
            yield from worker.backward(lambda part: None)
            yield from worker.give_up()
            worker.end_step(1)


@dataclass(frozen=True)
class Plain(System):
    """Buckets in backward order, all awaited before the update: DDP, and the library's ``Overlapped``.

    Attributes:
        cap_bytes: size at which a bucket is closed.
        first_cap_bytes: the same for the first.
        wire: bytes on the wire for each byte of gradients: a half with 16-bit compression.
        extra_s_per_byte: computing for each byte of gradients, such as casts.
        source: of these numbers.
    """

    cap_bytes: int = DEFAULT_CAP_BYTES
    first_cap_bytes: int = DEFAULT_FIRST_CAP_BYTES
    wire: float = 1.0
    extra_s_per_byte: float = 0.0
    label: str = "plain (DDP-like)"
    script: str = "xo.DistributedOptimizer(optimizer, model.named_parameters())"
    source: str = "PyTorch's and the library's defaults"

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`."""
        return job.in_buckets(self.cap_bytes, self.first_cap_bytes)

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        sent: list[Transfer] = []

        def ready(part: int) -> None:
            if worker.job.parts[part].nbytes:
                sent.append(worker.all_reduce(self.wire * worker.job.parts[part].nbytes, f"bucket {part}"))

        for _ in range(steps):
            sent.clear()
            yield from worker.begin()
            yield from worker.compute(self.extra_s_per_byte * worker.job.nbytes, "update", "compression")
            yield from worker.forward()
            yield from worker.backward(ready)
            yield from worker.give_up()
            yield from worker.wait(list(sent))
            worker.end_step(1)

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        sizes = f"buckets of {self.cap_bytes / 2**20:.3g} MiB, the first of {self.first_cap_bytes / 2**20:.3g}"
        return [Assumption(self.label, sizes, self.source)]


@dataclass(frozen=True)
class DeFT(System):
    """Delayed updates by the plan that training would make of the same times.

    Attributes:
        capacity: factor on the windows; ``None`` lets the library's preserver choose, as in training.
        most_merged: steps in an update at most.
        cap_bytes: size at which buckets are closed; ``None``: as the library sizes them.
        noise_scale: of the gradients, in batches of one rank, for the preserver; ``None``: not known.
        preserver: what may be lost in convergence.
    """

    capacity: tuple[int, int] | None = (1, 1)
    most_merged: int = 8
    cap_bytes: int | None = None
    noise_scale: float | None = None
    preserver: Preserver = field(default_factory=Preserver)
    label: str = "DeFT"
    script: str = "xo.DistributedOptimizer(optimizer, model.named_parameters(), schedule=xo.deft.DeFT())"

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`. Buckets and pieces are made by the library's own rules."""
        cost = cluster.network.link_cost()
        made = job.in_buckets(self.cap_bytes or bucket_bytes(cost, job.nbytes))
        return made.cut(cuts(made.profile(cluster.links, cluster.ranks), cost))

    def plan(self, job: Job, cluster: Cluster, state: QueueState | None = None) -> Plan:
        """Of a prepared job, from ``state`` on."""
        times = job.profile(cluster.links, cluster.ranks).times()
        if self.capacity is not None:
            return make_plan(times, Limits(self.capacity, most_merged=self.most_merged), state)
        pilot = Pilot(self.preserver, Limits(most_merged=self.most_merged), fixed_capacity=False)
        pilot.silent = True
        if self.noise_scale is not None:
            known = {"samples": IGNORED_SAMPLES + 1, "signal": 1.0, "noise": self.noise_scale}
            pilot.noise.load_state_dict(known)
        return pilot.choose(0, times, cluster.ranks, state or QueueState()) or synchronous_plan(times.buckets)

    def merged(self, job: Job, cluster: Cluster) -> list[int]:
        """See :meth:`System.merged`."""
        return merged_sizes(self.plan(self.prepare(job, cluster), cluster).repeated)

    def stays_synchronous(self, job: Job, cluster: Cluster) -> bool:
        """Whether the preserver finds that no delay pays."""
        made = self.prepare(job, cluster)
        return self.plan(made, cluster) == synchronous_plan(len(made.parts))

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        plan, position = self.plan(worker.job, worker.cluster), 0
        current: list[Transfer] = []
        for _ in range(steps):
            step = plan.step(position)
            if step is None:  # no cycle was found: training plans again from where it stands
                plan, position = self.plan(worker.job, worker.cluster, plan.final), 0
                step = plan.repeated[0]
            current = yield from follow(worker, step, current)
            position += 1

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        how = "chosen by the preserver" if self.capacity is None else f"{self.capacity[0]}/{self.capacity[1]}"
        value = f"capacity {how}, at most {self.most_merged} steps merged, one update late at most"
        return [Assumption(self.label, value, "the library's planner on the times above")]


def follow(worker: Worker, step: StepPlan, current: Sequence[Transfer]) -> Generator[Wish, None, list[Transfer]]:
    """One step of a plan, as the library's executor takes it; returns what is then on its way.

    What the plan has in forward and in backward is queued when the step begins; what is fresh, once it is ready.
    """
    networks, parts = worker.cluster.links, worker.job.parts

    def send(link: int, bucket: int) -> Transfer:
        return worker.send(networks[link].all_reduce_s(parts[bucket].nbytes), f"bucket {bucket}", link)

    late = [*current, *(send(link, bucket) for link, bucket in (*step.forward, *step.backward))]
    wanted = {bucket: link for link, bucket in step.fresh}
    fresh: list[Transfer] = []
    yield from worker.begin()
    yield from worker.forward()
    yield from worker.backward(lambda part: fresh.append(send(wanted[part], part)) if part in wanted else None)
    yield from worker.give_up()
    everything = step.close and len(step.fresh) == len(parts)
    if step.close:
        if step.apply > int(everything):
            yield from worker.wait(late)
        if everything:
            yield from worker.wait(fresh)
        late = [] if everything else fresh
    worker.end_step(int(step.close and step.apply > 0))
    return late


@dataclass(frozen=True)
class FifoDelayed(System):
    """DeFT's ablation: every ``merged`` steps all is sent, first come first served, and applied ``merged`` steps later.

    Attributes:
        merge: steps of an update; ``None``: the coverage rate, rounded up.
        cap_bytes: size at which buckets are closed.
    """

    merge: int | None = None
    cap_bytes: int = DEFAULT_CAP_BYTES
    label: str = "delayed, first come first served"
    script: str = "xo.DistributedOptimizer(..., schedule=xo.schedulers.FifoDelayed(merged=...))"

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`."""
        return job.in_buckets(self.cap_bytes, min(self.cap_bytes, DEFAULT_FIRST_CAP_BYTES))

    def merged(self, job: Job, cluster: Cluster) -> list[int]:
        """See :meth:`System.merged`."""
        return [self.merge or max(1, -int(-job.coverage_rate(cluster.network) // 1))]

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        [merged] = self.merged(worker.job, worker.cluster)
        current: list[Transfer] = []
        for number in range(steps):
            yield from worker.begin()
            yield from worker.forward()
            yield from worker.backward(lambda part: None)
            yield from worker.give_up()
            close = (number + 1) % merged == 0
            if close:
                yield from worker.wait(current)
            worker.end_step(int(close))
            if close:
                parts = worker.job.parts
                current = [worker.all_reduce(parts[n].nbytes, f"bucket {n}") for n in range(len(parts) - 1, -1, -1)]
