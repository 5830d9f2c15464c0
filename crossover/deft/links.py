"""A second link: another network interface, or another backend, that carries a part of the buckets.

The paper uses heterogeneous links to lower the coverage rate (Meng and Sun, DeFT, arXiv 2503.16815, abstract). Here the
second link is a Gloo group of its own beside whatever the job runs on (NCCL, Gloo or Horovod), over an interface of its
own where there is one.

Gradients on a GPU are staged here and not by Gloo, whose own copies were ordered on streams only: the sum on the host
could begin before the copy had ended (pytorch pull request 170239). One thread does, in launch order: wait for the copy
to pinned memory, all-reduce it, copy it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from crossover.comm.communicator import Communicator, Work
from crossover.errors import CommunicationError

SECOND_INTERFACE = "CROSSOVER_SECOND_IFACE"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_SLICE = 1.0


class HostWork(Work):
    """A sum on the host."""

    def __init__(self, link: GlooLink, name: str, work: Any) -> None:
        self.name = name
        self._link = link
        self._work = work

    def wait(self) -> None:
        """See :meth:`Work.wait`."""
        deadline = time.monotonic() + self._link.timeout
        while True:
            with contextlib.suppress(RuntimeError):
                self._work.wait(timedelta(seconds=min(_SLICE, self._link.timeout)))
                return
            if self._work.is_completed():
                try:
                    self._work.wait()
                except RuntimeError as error:
                    raise self._link.failure(self.name, str(error)) from error
                return
            if time.monotonic() > deadline:
                raise self._link.failure(self.name, f"not complete after {self._link.timeout:g} s")

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return bool(self._work.is_completed())

    def when_completed(self, callback: Callable[[int], None]) -> None:
        """See :meth:`Work.when_completed`."""
        self._work.get_future().add_done_callback(lambda _: callback(time.perf_counter_ns()))


class StagedWork(Work):
    """A sum of a tensor on a GPU: copied to the host, summed there, copied back, each on the staging stream."""

    def __init__(self, link: GlooLink, name: str, tensor: Tensor, pinned: Tensor, copied: torch.cuda.Event) -> None:
        self.name = name
        self.tensor = tensor
        self.pinned = pinned
        self.copied = copied
        self.back = torch.cuda.Event()
        self.error: BaseException | None = None
        self._link = link
        self._done = threading.Event()
        self._callback: Callable[[int], None] | None = None

    def run(self, stream: torch.cuda.Stream) -> None:
        """In the staging thread."""
        try:
            self.copied.synchronize()
            self._link.host_sum(self.pinned, self.name).wait()
            with torch.cuda.stream(stream):
                self.tensor.copy_(self.pinned, non_blocking=True)
                self.back.record(stream)
        except BaseException as error:
            self.error = error
        if self._callback is not None:
            self._callback(time.perf_counter_ns())
        self._done.set()

    def wait(self) -> None:
        """See :meth:`Work.wait`: the current stream goes on after the copy back; the host waits for the sum."""
        if not self._done.wait(self._link.timeout):
            raise self._link.failure(self.name, f"not complete after {self._link.timeout:g} s")
        if self.error is not None:
            raise self._link.failure(self.name, str(self.error)) from self.error
        torch.cuda.current_stream(self.tensor.device).wait_event(self.back)
        self._link.give_back(self.pinned)

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return self._done.is_set() and self.back.query()

    def when_completed(self, callback: Callable[[int], None]) -> None:
        """See :meth:`Work.when_completed`."""
        self._callback = callback


class GlooLink:
    """Sums tensors over the ranks of ``communicator``, over a Gloo group of its own. Making one is collective.

    Args:
        communicator: the ranks; its own traffic goes elsewhere.
        interface: name of the network interface; by default ``$CROSSOVER_SECOND_IFACE``, else what Gloo takes.
        name: tells the links of a job apart.

    Raises:
        ValueError: the interface does not exist.
        CommunicationError: the ranks did not find each other.
    """

    def __init__(self, communicator: Communicator, interface: str, name: str) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.timeout = communicator.timeout
        self.interface = interface
        self.name = f"gloo over {interface}" if interface else "gloo"
        self._store = self._meet(communicator, name)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) if interface else gloo.create_default_device()]
        options._timeout = timedelta(seconds=self.timeout)
        try:
            store = c10d.PrefixStore(name, self._store)
            self._group = gloo(store, self.rank, self.size, options)
        except RuntimeError as error:
            raise self.failure("connecting", str(error)) from error
        self._waiting: queue.SimpleQueue[StagedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pinned: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def _meet(self, communicator: Communicator, name: str) -> Any:
        """A store on rank 0, which all ranks reach over the interface itself."""
        store, address = None, None
        wait = timedelta(seconds=self.timeout)
        if self.rank == 0:
            host = address_of(self.interface) if self.interface else socket.gethostbyname(socket.gethostname())
            store = c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
            address = (host, store.port)
        host, port = communicator.broadcast_object(address, name=f"{name}.address")
        try:
            return store or c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
        except RuntimeError as error:
            raise self.failure(f"reaching rank 0 at {host}:{port}", str(error)) from error

    def failure(self, what: str, why: str) -> CommunicationError:
        """For raising: the second link did not do what it should."""
        return CommunicationError(
            f"rank {self.rank}: the second link ({self.name}) failed in {what!r}: {why}; train without second_link, or "
            "check that all hosts reach each other over that interface"
        )

    def all_reduce(self, tensor: Tensor, *, name: str) -> Work:
        """Start summing over all ranks, in place. Same order of calls on every rank."""
        if tensor.device.type != "cuda":
            return self.host_sum(tensor, name)
        if self._thread is None:
            self._stream = torch.cuda.Stream(tensor.device)
            self._thread = threading.Thread(target=self._stage, name="crossover second link", daemon=True)
            self._thread.start()
        stream = self._stream
        assert stream is not None
        pinned = self._borrow(tensor)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            pinned.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its owner may let go of it before it has been waited for
            copied = torch.cuda.Event(blocking=True)  # else its wait takes a core
            copied.record(stream)
        work = StagedWork(self, name, tensor, pinned, copied)
        self._waiting.put(work)
        return work

    def host_sum(self, tensor: Tensor, name: str) -> HostWork:
        """Sum a tensor on the host."""
        carrier = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM
        try:
            return HostWork(self, name, self._group.allreduce([carrier], options))
        except RuntimeError as error:
            raise self.failure(name, str(error)) from error

    def close(self) -> None:
        """End the staging thread. Not a collective."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread = None

    def give_back(self, pinned: Tensor) -> None:
        """Keep pinned memory for the next tensor of its size."""
        self._pinned.setdefault((pinned.dtype, pinned.numel()), []).append(pinned)

    def _borrow(self, like: Tensor) -> Tensor:
        kept = self._pinned.get((like.dtype, like.numel()))
        return kept.pop() if kept else torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def _stage(self) -> None:
        assert self._stream is not None
        torch.cuda.set_device(self._stream.device)  # a thread begins on the first one
        while (work := self._waiting.get()) is not None:
            work.run(self._stream)


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this host.

    Raises:
        ValueError: there is none of that name, or it has no address.

    Example:
        >>> address_of("lo")
        '127.0.0.1'
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ValueError(
                f"second_link: interface {interface!r} has no address ({error}); this host has {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])
