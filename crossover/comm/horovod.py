"""The communicator on Horovod's engine, for jobs started by ``horovodrun`` (Gloo, MPI or NCCL underneath).

Horovod matches tensors between ranks by name, reduces five dtypes, spins while it waits and has no time-out. Here names
are made unique, other dtypes are carried as ones that it knows, waits sleep, and a rank that does not come is named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from crossover.comm.board import Board
from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.comm.horovod_work import Chained, HorovodWork
from crossover.comm.vigil import Vigil, profiler_span
from crossover.errors import CommunicationError

_OPS = {ReduceOp.SUM: hvd.Sum, ReduceOp.MAX: hvd.Max, ReduceOp.MIN: hvd.Min, ReduceOp.PRODUCT: hvd.Product}
_REDUCED = frozenset({torch.float16, torch.float32, torch.float64, torch.int32, torch.int64})
_MOVED = _REDUCED | {torch.uint8, torch.int8}
# Every value on the left is one on the right, and a sum on the right, cast back, is that on the left, rounded once.
_REDUCED_AS = {
    torch.bfloat16: torch.float32,
    torch.bool: torch.int32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
_sets: dict[tuple[int, ...], hvd.ProcessSet] = {}


class HorovodCommunicator(Communicator):
    """A Horovod process set as a communicator. ``horovod.torch.init`` must have run with dynamic process sets.

    Args:
        ranks: global ranks of the members; the whole job by default.
        process_set: Horovod's object for them.
        path: prefix of all names on the wire; different for each communicator, the same on all ranks.
        timeout: seconds until a wait fails.
        stall_warning: seconds until a wait is warned of.
        board: where ranks tell each other why they failed.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        process_set: hvd.ProcessSet | None = None,
        *,
        path: str = "crossover",
        timeout: float = 600.0,
        stall_warning: float = 60.0,
        board: Board | None = None,
    ) -> None:
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(hvd.size()))
        self.rank = self.ranks.index(hvd.rank())
        self.size = len(self.ranks)
        self.backend = "horovod"
        self.timeout = timeout
        board = board or Board(None, hvd.rank())
        self.vigil = Vigil(self.backend, self.rank, self.ranks, timeout, stall_warning, board)
        self._set = process_set or hvd.global_process_set
        self._path = path
        self._groups = 0
        self._in_flight: set[str] = set()

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See :meth:`Communicator.unsupported_reason`. bfloat16 is summed in float32 and rounded once."""
        if device.type not in ("cpu", "cuda"):
            return f"horovod cannot reduce {device.type} tensors; move them to the CPU or a GPU"
        if dtype in _REDUCED or dtype in _REDUCED_AS or dtype in (torch.complex64, torch.complex128):
            return None
        kind = "float16 or bfloat16" if dtype.is_floating_point else "int64"
        return f"horovod cannot reduce {dtype}; cast to {kind} first"

    def carried_as(self, dtype: torch.dtype) -> torch.dtype:
        """See :meth:`Communicator.carried_as`."""
        return _REDUCED_AS.get(dtype, dtype)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.all_reduce`. Complex tensors: ``SUM`` only."""
        reason = self.unsupported_reason(tensor.dtype, tensor.device)
        if reason is not None:
            raise ValueError(f"{name!r}: {reason}")
        carrier = _reducible(tensor, op)
        return self._start(
            name,
            lambda wire: hvd.allreduce_async_(carrier, name=wire, op=_OPS[op], process_set=self._set),
            tensor.copy_ if tensor.dtype in _REDUCED_AS else None,
        )

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        """See :meth:`Communicator.broadcast`."""
        if not 0 <= root < self.size:
            raise ValueError(f"root: {root} is not a rank of this group; pass 0 to {self.size - 1}")
        carrier = _movable(tensor)
        return self._start(
            name, lambda wire: hvd.broadcast_async_(carrier, self.ranks[root], name=wire, process_set=self._set), None
        )

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """See :meth:`Communicator.all_gather`."""
        carrier, received = _movable(tensor).view(-1), _movable(output).view(-1)
        return self._start(
            name,
            lambda wire: hvd.allgather_async(carrier, name=wire, process_set=self._set),
            received.copy_,
        )

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.reduce_scatter`. Complex tensors: ``SUM`` only."""
        if op is not ReduceOp.SUM:  # Horovod's reduce-scatter only sums
            total = tensor.clone()
            return Chained(self.all_reduce(total, op, name=name), lambda: output.copy_(total[self.rank]))
        carrier = _reducible(tensor, op)
        target = torch.view_as_real(output) if output.is_complex() else output
        return self._start(
            name,
            lambda wire: hvd.reducescatter_async(carrier, name=wire, op=hvd.Sum, process_set=self._set),
            lambda mine: target.copy_(mine.view(target.shape)),
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        carrier, received = _movable(tensor), _movable(output)
        splits = torch.tensor(list(input_splits), dtype=torch.int32)
        return self._start(
            name,
            lambda wire: hvd.alltoall_async(carrier, splits, name=wire, process_set=self._set),
            lambda result: received.copy_(result[0].view(received.shape)),
        )

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        """See :meth:`Communicator.new_group`. Members keep the order of their global ranks.

        Raises:
            ValueError: a rank is given twice or is not in this group; or this group is a part of the job and the ranks
                are other than its own: Horovod makes process sets only with all ranks of the job.
            CommunicationError: not all ranks came within the time-out.
        """
        if any(not 0 <= rank < self.size for rank in ranks) or len(set(ranks)) != len(ranks):
            raise ValueError(f"ranks: is {list(ranks)}; give different ranks of this group, 0 to {self.size - 1}")
        members = tuple(sorted(self.ranks[rank] for rank in ranks))
        self._groups += 1
        path = f"{self._path}/{self._groups}:{name}"
        if members == self.ranks:
            process_set = self._set  # names keep the two apart: nothing has to be agreed on
        elif self.size < hvd.size():
            raise ValueError(
                f"ranks: is {list(ranks)} of a group of ranks {list(self.ranks)}; under Horovod make groups of a part "
                "of the job from the communicator of all ranks"
            )
        else:
            process_set = self._process_set(members, name)
        if hvd.rank() not in members:
            return None
        vigil = self.vigil
        return HorovodCommunicator(
            members, process_set, path=path, timeout=self.timeout, stall_warning=vigil.stall_warning, board=vigil.board
        )

    def _process_set(self, members: tuple[int, ...], name: str) -> hvd.ProcessSet:
        if not members:
            raise ValueError("ranks: is empty; Horovod has no empty process sets, give at least one rank")
        known = _sets.get(members)
        if known is not None and known.process_set_id is not None:
            return known
        # Horovod's call waits without a time-out, so all ranks meet under ours before they make it.
        self.barrier(name=f"new_group.{name}")
        found = self._existing_set(members)
        if found is None:
            found = _within(self.timeout, lambda: hvd.add_process_set(list(members)), f"new_group {name}", self.vigil)
        _sets[members] = found
        return found

    @staticmethod
    def _existing_set(members: tuple[int, ...]) -> hvd.ProcessSet | None:
        """A set of these ranks that the script has made by itself: Horovod refuses a second one."""
        from horovod.common import process_sets

        for number, ranks in process_sets._basics._get_process_set_ids_and_ranks().items():
            if tuple(ranks) == members:
                existing = hvd.ProcessSet(list(members))
                existing.process_set_id = number
                return existing
        return None

    def close(self) -> None:
        """Nothing here can be released by one rank: process sets end with Horovod's shutdown."""

    def _start(self, name: str, launch: Callable[[str], int], finish: Callable[[Any], object] | None) -> Work:
        wire = self._wire_name(name)
        try:
            with profiler_span(name):
                handle = launch(wire)
        except RuntimeError as error:
            self._in_flight.discard(wire)
            raise self.vigil.failure(name, 0.0, error) from error
        except ValueError as error:
            self._in_flight.discard(wire)
            raise ValueError(f"{name!r}: {error}") from error
        return HorovodWork(self.vigil, name, handle, partial(self._in_flight.discard, wire), finish)

    def _wire_name(self, name: str) -> str:
        """The same at every step, which Horovod's response cache rewards; another while the first is not waited for.

        Launches and waits come in the same order on every rank, so all ranks choose the same.
        """
        wire = base = f"{self._path}.{name}"
        copies = 1
        while wire in self._in_flight:
            copies += 1
            wire = f"{base}#{copies}"
        self._in_flight.add(wire)
        return wire


def _reducible(tensor: Tensor, op: ReduceOp) -> Tensor:
    if not tensor.is_complex():
        return tensor.to(_REDUCED_AS.get(tensor.dtype, tensor.dtype))
    if op is not ReduceOp.SUM:
        raise ValueError(f"op: {op} of complex tensors is not defined; use ReduceOp.SUM, or reduce their real views")
    return torch.view_as_real(tensor)


def _movable(tensor: Tensor) -> Tensor:
    """A view that Horovod can copy: bytes, where it does not know the dtype. It has at least one dimension."""
    if tensor.dim() == 0:
        tensor = tensor.view(1)
    if tensor.dtype in _MOVED:
        return tensor
    return (tensor.view(-1, 1) if tensor.dim() == 1 else tensor).view(torch.uint8)


def _within(seconds: float, call: Callable[[], Any], name: str, vigil: Vigil) -> Any:
    """``call()``, in a thread that is left behind if it does not return."""
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"crossover {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors and not isinstance(errors[0], RuntimeError):
        raise errors[0]
    if not outcome:
        raise vigil.failure(name, seconds, errors[0] if errors else None)
    return outcome[0]


def start() -> None:
    """``horovod.torch.init()`` with process sets that may be added later.

    Raises:
        CommunicationError: the ranks did not find each other.
    """
    _sets.clear()
    try:
        hvd.init(process_sets="dynamic")
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"crossover.init: Horovod did not start on this rank: {error}. Look at the other ranks' output; if they "
            "only start late, set HOROVOD_GLOO_TIMEOUT_SECONDS (30 by default) higher"
        ) from error


def agreed_number(timeout: float) -> int:
    """A number that all ranks have in common and no job before this one had.

    Raises:
        CommunicationError: not all ranks came within ``timeout`` seconds.
    """
    number = torch.tensor(time.time_ns())
    HorovodCommunicator(timeout=timeout, stall_warning=timeout).broadcast(number, 0, name="crossover.init").wait()
    return int(number)
