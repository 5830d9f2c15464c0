"""Systems that cross the barrier between steps: each layer's forward waits for its own gradients only."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from crossover.schedulers.piece_order import Piece, priority_order
from crossover.simulate.assumptions import Assumption
from crossover.simulate.cluster import Cluster
from crossover.simulate.events import Process, Transfer
from crossover.simulate.job import Job
from crossover.simulate.systems import System
from crossover.simulate.us_byte import Groups, Times, us_byte_groups
from crossover.simulate.worker import Worker


class Ordered(System):
    """Pieces enter the link in an order that was worked out beforehand, each once its gradients are ready."""

    @abstractmethod
    def order(self, job: Job, cluster: Cluster) -> Groups:
        """``(part, bytes)`` in the order in which they enter."""

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        order = self.order(worker.job, worker.cluster)
        sent: dict[int, list[Transfer]] = {}
        ready: set[int] = set()
        place = 0

        def arrived(part: int) -> None:
            nonlocal place
            ready.add(part)
            while place < len(order) and order[place][0] in ready:
                number, nbytes = order[place]
                sent.setdefault(number, []).append(worker.all_reduce(nbytes, f"part {number}"))
                place += 1

        for _ in range(steps):
            yield from worker.begin()
            yield from worker.compute(worker.job.load_s, "update", "data")
            for number, part in enumerate(worker.job.parts):
                yield from worker.wait(sent.pop(number, []), f"waits for part {number}")
                share = part.nbytes / max(worker.job.nbytes, 1)
                yield from worker.compute(worker.job.update_s * share + part.forward_s, "forward", f"forward {number}")
            ready.clear()
            place = 0
            yield from worker.backward(arrived)
            yield from worker.give_up()
            worker.end_step(1)


@dataclass(frozen=True)
class Priority(Ordered):
    """ByteScheduler's scheduling, and the library's ``Priority``: small pieces, the input side first, within a credit.

    Attributes:
        partition_bytes: largest piece.
        credit_bytes: what may be in flight before what comes later can no longer overtake.
        fuse_bytes: smaller tensors travel together up to this size; 0 for none, as in ByteScheduler.
    """

    partition_bytes: int = 4_000_000
    credit_bytes: int = 16_000_000
    fuse_bytes: int = 262_144
    label: str = "Priority (ByteScheduler)"
    script: str = "xo.DistributedOptimizer(optimizer, model.named_parameters(), schedule=xo.schedulers.Priority())"

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`."""
        return job.in_buckets(max(self.fuse_bytes, 1))

    def order(self, job: Job, cluster: Cluster) -> Groups:
        """See :meth:`Ordered.order`. By the library's own rule, in whole nanoseconds."""
        pieces, entries = [], []
        ready = job.ready_s()
        for number in range(len(job.parts) - 1, -1, -1):
            left = job.parts[number].nbytes
            while left:
                nbytes = min(left, self.partition_bytes)
                duration = round(1e9 * cluster.network.all_reduce_s(nbytes))
                pieces.append(Piece(number, round(1e9 * ready[number]), duration, nbytes))
                entries.append((number, nbytes))
                left -= nbytes
        return [entries[index] for index in priority_order(pieces, self.credit_bytes)]

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        sizes = f"pieces of {self.partition_bytes / 1e6:g} MB, credit {self.credit_bytes / 1e6:g} MB"
        return [Assumption(self.label, sizes, "ByteScheduler's defaults: 1 and 4 million parameters")]


@dataclass(frozen=True)
class USByte(Ordered):
    """US-Byte's scheduling: unequal groups of blocks in an order found by a search.

    Attributes:
        block_bytes: of a block.
    """

    block_bytes: int = 1_000_000
    label: str = "US-Byte"

    def order(self, job: Job, cluster: Cluster) -> Groups:
        """See :meth:`Ordered.order`."""
        nbytes = [part.nbytes for part in job.parts]
        forward = [part.forward_s for part in job.parts]
        return us_byte_groups(Times(job.ready_s(), forward, nbytes, self.block_bytes, cluster.network.all_reduce_s))

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        value = f"blocks of {self.block_bytes / 1e6:g} MB, no fusion of tensors"
        return [Assumption(self.label, value, "the rules of its public code; the size of a block is our choice")]


@dataclass(frozen=True)
class Decoupled(System):
    """DeAR's scheduling: reduce-scatters in backward, all-gathers in the next forward; one barrier between them.

    Attributes:
        group_bytes: size at which a group is closed.
    """

    group_bytes: int = 25 * 2**20
    label: str = "DeAR"

    def prepare(self, job: Job, cluster: Cluster) -> Job:
        """See :meth:`System.prepare`."""
        return job.in_groups(self.group_bytes)

    def run(self, worker: Worker, steps: int) -> Process:
        """See :meth:`System.run`."""
        parts, network = worker.job.parts, worker.cluster.network
        scattered: list[Transfer] = []
        gathers: dict[int, Transfer] = {}

        def half(number: int, what: str) -> Transfer:
            return worker.send(network.half_s(parts[number].nbytes), f"{what} {number}")

        for _ in range(steps):
            yield from worker.begin()
            yield from worker.compute(worker.job.load_s, "update", "data")
            for number, part in enumerate(parts):
                if number in gathers:
                    yield from worker.wait([gathers.pop(number)], f"waits for group {number}")
                    if number + 1 < len(parts):
                        gathers[number + 1] = half(number + 1, "all-gather")
                share = part.nbytes / max(worker.job.nbytes, 1)
                yield from worker.compute(worker.job.update_s * share + part.forward_s, "forward", f"forward {number}")
            scattered.clear()
            yield from worker.backward(lambda number: scattered.append(half(number, "reduce-scatter")))
            yield from worker.give_up()
            yield from worker.wait(list(scattered))
            gathers[0] = half(0, "all-gather")
            worker.end_step(1)

    def assumptions(self) -> list[Assumption]:
        """See :meth:`System.assumptions`."""
        return [Assumption(self.label, f"groups of {self.group_bytes / 2**20:.3g} MiB", "DeAR's default")]
