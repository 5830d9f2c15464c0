"""A slow network for tests, demonstrations and laptops: completion held back by a model of a link.

The model. Every rank has one full-duplex link, with one direction out and one in. A collective occupies the directions
it uses, one collective at a time, in the order in which they were started::

    begin  = max(time of the call, end of the collective before it, in each direction used)
    end    = begin + duration            wait() returns at the later of this and the real completion

With ``L`` seconds of latency, ``B`` bytes per second, ``N`` ranks and ``n`` bytes in the tensor that a rank hands in,
the durations are those of the usual algorithms on a ring::

    all-reduce        2 (N-1) L  +  2 (N-1)/N n/B      both directions
    all-gather          (N-1) L  +  (N-1) n/B          both directions
    reduce-scatter      (N-1) L  +  (N-1)/N n/B        both directions
    broadcast           (N-1) L  +  n/B                both directions (a pipeline along the ring)
    all-to-all          (N-1) L  +  bytes/B            out: bytes sent to others; in: bytes received from others

All communicators made from one another share the link. What the model leaves out: packets, congestion between ranks,
and the wait for a late rank, which takes its real time and runs beside the emulated one. Waits block the host, also
for GPU tensors. Figures obtained so are emulated and have to be labelled as such.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.comm.waiting import waiting


@dataclass(frozen=True)
class LinkModel:
    """A link.

    Attributes:
        latency_s: seconds that a message takes by itself, one way.
        bandwidth_bytes_per_s: bytes per second, each direction.

    Raises:
        ValueError: negative latency, or bandwidth that is not positive.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0:
            raise ValueError(f"latency_s: is {self.latency_s}; pass 0 or more seconds")
        if not self.bandwidth_bytes_per_s > 0:
            raise ValueError(f"bandwidth_bytes_per_s: is {self.bandwidth_bytes_per_s}; pass more than 0")

    @classmethod
    def parse(cls, text: str, argument: str = "CROSSOVER_EMULATED_LINK") -> LinkModel:
        """Read ``"500mbit,1ms"``: bandwidth a second in ``kbit``, ``mbit``, ``gbit``; latency in ``us``, ``ms``, ``s``.

        Raises:
            ValueError: anything else.

        Example:
            >>> LinkModel.parse("500mbit,1ms")
            LinkModel(latency_s=0.001, bandwidth_bytes_per_s=62500000.0)
        """
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmg])bit\s*,\s*([\d.]+)\s*(us|ms|s)\s*", text.lower())
        try:
            if match is None:
                raise ValueError
            bits = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]
            return cls(float(match[3]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[match[4]], bits / 8)
        except ValueError:
            raise ValueError(
                f"{argument}: is {text!r}; give bandwidth (kbit, mbit, gbit) and latency (us, ms, s): '500mbit,1ms'"
            ) from None


class Clock(ABC):
    """Where an emulated link takes its time from."""

    @abstractmethod
    def now(self) -> float:
        """Seconds since some start."""

    @abstractmethod
    def sleep_until(self, moment: float) -> None:
        """Return when :meth:`now` has reached ``moment``."""


class RealClock(Clock):
    """The time that passes."""

    def now(self) -> float:
        """Seconds of :func:`time.perf_counter`, as in all records."""
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        """Sleep; the processor is free for computing."""
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(left)


class VirtualClock(Clock):
    """A clock that only goes on when something sleeps, or by :meth:`advance`: tests get exact times and never wait."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._now

    def sleep_until(self, moment: float) -> None:
        """Jump to ``moment`` if it lies ahead."""
        self._now = max(self._now, moment)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, as if the caller computed."""
        self._now += seconds


class _Link:
    """The two directions of a rank's link, and the times at which they are free again."""

    def __init__(self, model: LinkModel, clock: Clock) -> None:
        self.model = model
        self.clock = clock
        self._free = {"out": 0.0, "in": 0.0}

    def occupy(self, messages: int, sent: float, received: float) -> float:
        """The moment at which a collective of ``messages`` rounds that starts now has sent and received its bytes."""
        now = end = self.clock.now()
        for direction, size in (("out", sent), ("in", received)):
            duration = messages * self.model.latency_s + size / self.model.bandwidth_bytes_per_s
            if duration > 0:
                self._free[direction] = max(now, self._free[direction]) + duration
                end = max(end, self._free[direction])
        return end


class EmulatedWork(Work):
    """A collective whose completion is held back until ``due``, in the clock's seconds."""

    __slots__ = ("_clock", "_work", "due", "name")

    def __init__(self, work: Work, clock: Clock, due: float) -> None:
        self._work = work
        self._clock = clock
        self.due = due
        self.name = work.name

    def wait(self) -> None:
        """See :meth:`Work.wait`. Also sleeps until the link would have carried it."""
        with waiting():
            self._work.wait()
            self._clock.sleep_until(self.due)

    def when_completed(self, callback: Callable[[int], None]) -> None:
        """See :meth:`Work.when_completed`. The time told is when the link would have carried it, on the real clock."""
        if isinstance(self._clock, RealClock):
            self._work.when_completed(lambda moment: callback(max(moment, int(self.due * 1e9))))

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return self._clock.now() >= self.due and self._work.is_completed()


class EmulatedLink(Communicator):
    """Another communicator on a slow link, after the model at the head of this module.

    Args:
        communicator: does the communication.
        model: the link.
        clock: :class:`RealClock` to feel the delay, :class:`VirtualClock` to compute it.

    Attributes:
        inner: the communicator underneath.

    Example:
        >>> import torch
        >>> from crossover.comm import EmulatedLink, LinkModel, Solo, VirtualClock
        >>> clock = VirtualClock()
        >>> slow = EmulatedLink(Solo(), LinkModel(0.001, 1e6), clock)
        >>> slow.all_reduce(torch.ones(4), name="ones").wait()
        >>> clock.now()  # one rank sends nothing
        0.0
    """

    def __init__(self, communicator: Communicator, model: LinkModel, clock: Clock | None = None) -> None:
        self._attach(communicator, _Link(model, clock or RealClock()))

    def _attach(self, communicator: Communicator, link: _Link) -> None:
        self.inner = communicator
        self._link = link
        self.rank = communicator.rank
        self.size = communicator.size
        self.ranks = communicator.ranks
        self.timeout = communicator.timeout
        self.backend = f"{communicator.backend} on an emulated link"

    @property
    def model(self) -> LinkModel:
        """The link."""
        return self._link.model

    @property
    def control_device(self) -> torch.device:
        """See :attr:`Communicator.control_device`."""
        return self.inner.control_device

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See :meth:`Communicator.unsupported_reason`."""
        return self.inner.unsupported_reason(dtype, device)

    def carried_as(self, dtype: torch.dtype) -> torch.dtype:
        """See :meth:`Communicator.carried_as`."""
        return self.inner.carried_as(dtype)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.all_reduce`."""
        size = 2 * self._part * tensor.nbytes
        return self._held(self.inner.all_reduce(tensor, op, name=name), 2 * (self.size - 1), size, size)

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        """See :meth:`Communicator.broadcast`."""
        size = tensor.nbytes if self.size > 1 else 0
        return self._held(self.inner.broadcast(tensor, root, name=name), self.size - 1, size, size)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """See :meth:`Communicator.all_gather`."""
        size = (self.size - 1) * tensor.nbytes
        return self._held(self.inner.all_gather(output, tensor, name=name), self.size - 1, size, size)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.reduce_scatter`."""
        size = self._part * tensor.nbytes
        return self._held(self.inner.reduce_scatter(output, tensor, op, name=name), self.size - 1, size, size)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        work = self.inner.all_to_all(output, tensor, output_splits, input_splits, name=name)
        sent = _bytes_for_others(tensor, input_splits, self.rank)
        received = _bytes_for_others(output, output_splits, self.rank)
        return self._held(work, self.size - 1, sent, received)

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        """See :meth:`Communicator.new_group`. The new communicator shares this one's link."""
        group = self.inner.new_group(ranks, name=name)
        return None if group is None else self.sharing_link(group)

    def duplicate(self, *, name: str) -> Communicator:
        """See :meth:`Communicator.duplicate`. The new communicator shares this one's link."""
        return self.sharing_link(self.inner.duplicate(name=name))

    def sharing_link(self, communicator: Communicator) -> EmulatedLink:
        """Put another communicator on this one's link: what either sends, the other waits for."""
        twin = EmulatedLink.__new__(EmulatedLink)
        twin._attach(communicator, self._link)
        return twin

    def close(self) -> None:
        """See :meth:`Communicator.close`."""
        self.inner.close()

    @property
    def _part(self) -> float:
        return (self.size - 1) / self.size

    def _held(self, work: Work, messages: int, sent: float, received: float) -> Work:
        return EmulatedWork(work, self._link.clock, self._link.occupy(messages, sent, received))


def _bytes_for_others(tensor: Tensor, splits: Sequence[int], rank: int) -> int:
    rows = sum(splits)
    return tensor.nbytes // rows * (rows - splits[rank]) if rows else 0
