"""All ranks of one job on the virtual clock: what a system's step is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossover.simulate.cluster import Cluster, Floats
from crossover.simulate.events import Device, Landed, Link, Process, Simulation, Transfer, Turn, Until
from crossover.simulate.job import Job
from crossover.sync.arbiter.policy import Claim


@dataclass(frozen=True, slots=True)
class Span:
    """What rank 0 did for some time; seconds."""

    track: str
    name: str
    start: float
    end: float


class Worker:
    """A job's ranks, each at its own time.

    Args:
        simulation: whose clock it is.
        job: with the parts that the system in question made of it.
        cluster: it runs on.
        links: one for each of the cluster's.
        device: shared with other jobs; ``None`` where the job has it to itself.
        weight: the job's share of that.

    Attributes:
        clock: seconds, of each rank.
        marks: when each step ended, on the last rank.
        updates: of the weights so far.
        updates_at: number of updates at each mark.
        exposed_s: mean over ranks of the time waited for transfers so far.
        exposed_at: that at each mark.
        spans: of rank 0.
    """

    def __init__(
        self,
        simulation: Simulation,
        job: Job,
        cluster: Cluster,
        links: Sequence[Link],
        device: Device | None = None,
        weight: float = 1.0,
    ) -> None:
        self.simulation, self.job, self.cluster, self.links, self.device = simulation, job, cluster, links, device
        self.clock: Floats = np.zeros(cluster.ranks)
        self.marks: list[float] = []
        self.updates = 0
        self.updates_at: list[int] = []
        self.exposed_s = 0.0
        self.exposed_at: list[float] = []
        self.spans: list[Span] = []
        self._claim = Claim(job.name, weight=weight)
        self._held: Floats | None = None
        self._last_ready = [0.0] * len(links)
        self._pace = cluster.pace(0)
        self._uneven = bool(cluster.jitter or cluster.slow)

    # -- computing ---------------------------------------------------------------------------------------------------

    def begin(self) -> Process:
        """The next step: take the turn, and compute as fast as each rank does this time."""
        if self._uneven:
            self._pace = self.cluster.pace(len(self.marks))
        yield from self.take_turn()

    def take_turn(self) -> Process:
        """Wait until the device is this job's, unless it is."""
        if self.device is None or self._held is not None:
            return
        asked = self.clock
        yield Turn(self.device, self._claim, asked)
        self.clock = self._held = self.device.start(self._claim, asked)
        self._span("turn", "waits for its turn", float(asked[0]))

    def give_up(self) -> Process:
        """Let other jobs compute."""
        if self.device is None or self._held is None:
            return
        held = float((self.clock - self._held).mean())
        self._held = None
        yield Until(float(self.clock.max()))
        self.device.give_up(held, self.clock)

    def compute(self, seconds: float, track: str = "forward", name: str = "") -> Process:
        """Compute; transfers that are under way slow it down."""
        if seconds <= 0:
            return
        began = float(self.clock[0])
        work = seconds * self._pace
        loss = self.cluster.contention
        if loss:
            yield Until(float(self.clock.max()))  # what was started at this moment gets onto its link first
            busy = max(link.free for link in self.links) - self.clock
            work = np.minimum(work / (1.0 - loss), work + loss * np.maximum(busy, 0.0))
        self.clock = self.clock + work
        self._span(track, name or track, began)
        yield Until(float(self.clock.max()))

    def forward(self, updating: bool = True) -> Process:
        """The update of the step before, data, and the whole forward pass."""
        yield from self.compute(self.job.between_s if updating else self.job.load_s, "update")
        yield from self.compute(self.job.forward_s, "forward")

    def backward(self, ready: Callable[[int], None]) -> Process:
        """The backward pass; ``ready(part)`` is called when the gradients of each part are there."""
        for number in range(len(self.job.parts) - 1, -1, -1):
            yield from self.compute(self.job.parts[number].backward_s, "backward", f"backward {number}")
            ready(number)

    # -- communicating -----------------------------------------------------------------------------------------------

    def send(self, seconds: float, name: str, link: int = 0) -> Transfer:
        """Start a collective now, behind those that this job has started on the link before."""
        ready = max(float(self.clock.max()), self._last_ready[link])
        self._last_ready[link] = ready
        return self.simulation.send(self.links[link], Transfer(name, self.job.name, seconds, ready))

    def all_reduce(self, nbytes: float, name: str, link: int = 0) -> Transfer:
        """An all-reduce of so many bytes."""
        return self.send(self.cluster.links[link].all_reduce_s(nbytes), name, link)

    def wait(self, transfers: Sequence[Transfer], name: str = "exposed") -> Process:
        """Until all of them are through on every rank."""
        if not transfers:
            return
        began = self.clock
        yield Landed(transfers, float(began.max()))
        end = max(transfer.end for transfer in transfers if transfer.end is not None)
        self.clock = np.maximum(began, end)
        self.exposed_s += float((self.clock - began).mean())
        self._span("exposed", name, float(began[0]))

    # -- counting ----------------------------------------------------------------------------------------------------

    def end_step(self, updates: int) -> None:
        """A step has ended with so many updates of the weights."""
        self.updates += updates
        self.marks.append(float(self.clock.max()))
        self.updates_at.append(self.updates)
        self.exposed_at.append(self.exposed_s)

    def _span(self, track: str, name: str, began: float) -> None:
        if self.clock[0] > began:
            self.spans.append(Span(track, name, began, float(self.clock[0])))
