"""Ranks as threads of this process: a communicator whose collectives meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from crossover.comm import Communicator, CompletedWork, ReduceOp, Work

Result = TypeVar("Result")
SECONDS = 20.0
_REDUCE: dict[ReduceOp, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
}


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.tensors: list[Tensor] = [torch.empty(0)] * size


class ThreadCommunicator(Communicator):
    """One thread's view of the group. ``calls`` lists the collectives it took part in, with what it sent."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self.backend, self.timeout = "threads", SECONDS
        self.calls: list[tuple[str, Tensor]] = []
        self._meeting = meeting

    def _rows(self, tensor: Tensor, name: str) -> Tensor:
        self.calls.append((name, tensor.clone()))
        self._meeting.tensors[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        rows = torch.stack(self._meeting.tensors)
        self._meeting.barrier.wait()
        return rows

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        tensor.copy_(_REDUCE[op](self._rows(tensor, name)))
        return CompletedWork(name)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        output.copy_(self._rows(tensor, name))
        return CompletedWork(name)

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        tensor.copy_(self._rows(tensor, name)[root])
        return CompletedWork(name)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        output.copy_(_REDUCE[op](self._rows(tensor, name))[self.rank])
        return CompletedWork(name)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        raise NotImplementedError

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def run_threads(size: int, function: Callable[[ThreadCommunicator], Result]) -> list[Result]:
    """``function`` on every rank; its results in rank order. The first rank's exception is raised again."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(ThreadCommunicator(meeting, rank, size)), range(size)))


def errors_of(size: int, function: Callable[[ThreadCommunicator], Any]) -> list[BaseException | None]:
    """What each rank raised."""

    def attempt(communicator: ThreadCommunicator) -> BaseException | None:
        try:
            function(communicator)
        except Exception as error:
            return error
        return None

    return run_threads(size, attempt)
