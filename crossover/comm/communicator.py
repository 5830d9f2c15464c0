"""What the rest of the library needs from a communication backend.

A :class:`Communicator` is a fixed set of ranks that run the same collectives in the same order. Everything above this
package is written against it, so that NCCL, Gloo, Horovod, a lone process and an emulated slow link are one to them.
"""

from __future__ import annotations

import enum
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class ReduceOp(enum.Enum):
    """Elementwise reductions that every backend offers. An average is a ``SUM`` that the caller scales."""

    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PRODUCT = "product"


class Work(ABC):
    """A collective on its way.

    The tensors handed to the collective belong to it until :meth:`wait` returns.

    Attributes:
        name: the readable name under which the collective was started.
        holds_host: whether :meth:`wait` holds the host until the result is there, so that its time is known.
    """

    name: str
    holds_host: bool = True

    @abstractmethod
    def wait(self) -> None:
        """Return once the result may be used on the current stream (for CPU tensors: once it is there).

        Raises:
            CommunicationError: a rank failed or the communicator's time-out passed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the result is there. For records only: no decision may depend on it, as it differs between ranks."""

    def when_completed(self, callback: Callable[[int], None]) -> None:
        """For records: call back once with ``time.perf_counter_ns()`` at completion, from any thread.

        A backend that cannot tell never calls; completion then counts as the end of :meth:`wait`.
        """


class Communicator(ABC):
    """A group of ranks and the collectives among them.

    Every method that takes ``name`` is a collective: all ranks of the group call it, in the same order, with the same
    name and with tensors of the same shape and dtype unless said otherwise.

    Attributes:
        rank: position of this process in the group, ``0 <= rank < size``.
        size: number of processes in the group.
        ranks: the members' global ranks, indexed by group rank.
        backend: ``"gloo"``, ``"nccl"``, ``"horovod"``, ``"solo"``, ... for messages.
        timeout: seconds after which a wait fails with :class:`~crossover.errors.CommunicationError`.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    backend: str
    timeout: float

    @abstractmethod
    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """``None`` if tensors of this kind can be all-reduced here, else why not and the way out, for a message."""

    def carried_as(self, dtype: torch.dtype) -> torch.dtype:
        """What travels of a tensor of this dtype: another one where the backend reduces it as such."""
        return dtype

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """Start reducing the contiguous ``tensor`` over all ranks, in place."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        """Start copying the contiguous ``tensor`` of group rank ``root`` to all ranks, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """Start gathering every rank's contiguous ``tensor`` into ``output``, of shape ``(size, *tensor.shape)``."""

    @abstractmethod
    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """Start reducing ``tensor`` of shape ``(size, *output.shape)``; rank ``r`` gets slice ``r`` in ``output``."""

    @abstractmethod
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        """Start sending consecutive blocks of ``tensor`` (``input_splits[r]`` rows to rank ``r``) into ``output``."""

    @abstractmethod
    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        """A communicator of a subset, given by group ranks. Collective over *this* group; ``None`` on non-members."""

    @abstractmethod
    def close(self) -> None:
        """Release what this communicator itself made. Not a collective; the backend's own group is left alone."""

    def duplicate(self, *, name: str) -> Communicator:
        """The same ranks on a channel of their own, whose collectives need no order relative to this one's."""
        group = self.new_group(range(self.size), name=name)
        assert group is not None
        return group

    def barrier(self, *, name: str = "barrier") -> None:
        """Return when every rank has called it."""
        token = torch.zeros(1, dtype=torch.int32, device=self.control_device)
        self.all_reduce(token, name=name).wait()
        token.item()  # where a wait only orders a device's stream, this is what holds the host

    @property
    def control_device(self) -> torch.device:
        """Where small control tensors (votes, lengths, objects) have to live for this backend."""
        return torch.device("cpu")

    def all_gather_object(self, value: Any, *, name: str) -> list[Any]:
        """Every rank's picklable ``value``, indexed by rank. Unpickles what peers sent: trusted jobs only."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, 1, dtype=torch.int64, device=self.control_device)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device=self.control_device)
        self.all_gather(lengths, length, name=f"{name}.length").wait()
        sizes = lengths.flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.control_device)
        padded[: payload.numel()] = payload
        gathered = torch.zeros(self.size, max(sizes), dtype=torch.uint8, device=self.control_device)
        self.all_gather(gathered, padded, name=f"{name}.bytes").wait()
        rows = gathered.cpu()
        return [pickle.loads(rows[rank, : sizes[rank]].numpy().tobytes()) for rank in range(self.size)]

    def broadcast_object(self, value: Any, root: int = 0, *, name: str) -> Any:
        """``root``'s picklable ``value`` on every rank. Unpickles what the root sent: trusted jobs only."""
        payload = pickle.dumps(value) if self.rank == root else b""
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.control_device)
        self.broadcast(length, root, name=f"{name}.length").wait()
        data = torch.zeros(int(length.item()), dtype=torch.uint8)
        if self.rank == root:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        data = data.to(self.control_device)
        self.broadcast(data, root, name=f"{name}.bytes").wait()
        return value if self.rank == root else pickle.loads(data.cpu().numpy().tobytes())
