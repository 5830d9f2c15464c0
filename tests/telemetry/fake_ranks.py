"""Ranks as threads of one process, with clocks set as a test likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator, ReduceOp, Work

Result = TypeVar("Result")

TIMEOUT_S = 30.0


class Done(Work):
    def __init__(self, name: str) -> None:
        self.name = name

    def wait(self) -> None:
        return

    def is_completed(self) -> bool:
        return True


class Meeting:
    """What the threads share: a place to put a tensor each, and the log of collectives."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.places: list[Any] = [None] * size
        self.names: list[list[str]] = [[] for _ in range(size)]


class ThreadRank(Communicator):
    """One rank of a :class:`Meeting`; each collective is over when it returns."""

    backend = "threads"
    timeout = TIMEOUT_S

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))
        self._meeting = meeting

    def _exchange(self, value: Any, name: str) -> list[Any]:
        self._meeting.names[self.rank].append(name)
        self._meeting.places[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.places)
        self._meeting.barrier.wait()
        return values

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        return None

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        tensor.copy_(torch.stack(self._exchange(tensor.clone(), name)).sum(0))
        return Done(name)

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        tensor.copy_(self._exchange(tensor.clone(), name)[root])
        return Done(name)

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        output.copy_(torch.stack(self._exchange(tensor.clone(), name)))
        return Done(name)

    def all_gather_object(self, value: Any, *, name: str) -> list[Any]:
        return self._exchange(value, name)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        raise NotImplementedError

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        raise NotImplementedError

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        raise NotImplementedError

    def close(self) -> None:
        return


def on_ranks(size: int, work: Callable[[ThreadRank], Result]) -> tuple[list[Result], Meeting]:
    """``work`` of every rank at once; results by rank. An exception on one rank is raised here."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadRank(rank, size, meeting)) for rank in range(size)]
        return [future.result(TIMEOUT_S * 2) for future in futures], meeting
