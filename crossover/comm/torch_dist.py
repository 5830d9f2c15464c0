"""Communicators on ``torch.distributed``: NCCL, Gloo, or any other registered backend."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.distributed import distributed_c10d as c10d

from crossover.comm.board import Board
from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.comm.torch_groups import align_local_names, make_group
from crossover.comm.vigil import Vigil, profiler_span
from crossover.comm.waiting import waiting
from crossover.errors import CommunicationError

_TORCH_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
_PLAIN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int8, torch.uint8),
    }
)
_KNOWN_TO = {backend: _PLAIN | {torch.bool, torch.complex64, torch.complex128} for backend in ("gloo", "nccl")}
_ON_BOOLS = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}
# Their names before torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# These finish on the host: wait() returns when the result is there. The others order it on the device's current stream.
_WAITED_FOR_ON_HOST = frozenset({"gloo", "mpi"})


class TorchWork(Work):
    """A collective of a process group."""

    __slots__ = ("_communicator", "_work", "holds_host", "name")

    def __init__(self, communicator: TorchCommunicator, name: str, work: dist.Work, on_host: bool) -> None:
        self._communicator = communicator
        self._work = work
        self.holds_host = on_host
        self.name = name

    def wait(self) -> None:
        """See :meth:`Work.wait`. Where the backend works on a device's streams, only orders the current stream."""
        with waiting():
            self._wait()

    def _wait(self) -> None:
        started = time.monotonic()
        vigil = self._communicator.vigil
        if not self.holds_host:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise vigil.failure(self.name, time.monotonic() - started, error) from error
            return
        try:
            self._work.wait(self._communicator.first_slice)
        except RuntimeError:  # the slice passed, or the collective failed: asked again, torch says which
            failed_or_late = True
        else:
            failed_or_late = False
        if failed_or_late:  # out here, or the error would drag this exception along
            vigil.wait(self.name, self._poll, time.monotonic() - started)

    def _poll(self, seconds: float) -> bool:
        with contextlib.suppress(RuntimeError):
            self._work.wait(timedelta(seconds=seconds))
            return True
        if not self._work.is_completed():
            return False
        self._work.wait(self._communicator.first_slice)  # raises what the collective failed of, if it did
        return True

    def when_completed(self, callback: Callable[[int], None]) -> None:
        """See :meth:`Work.when_completed`. On a device's streams the host cannot tell."""
        if self.holds_host:
            self._work.get_future().add_done_callback(lambda _: callback(time.perf_counter_ns()))

    def is_completed(self) -> bool:
        """See :meth:`Work.is_completed`."""
        return bool(self._work.is_completed())


class TorchCommunicator(Communicator):
    """A ``ProcessGroup`` as a communicator. The group is used as it is; only groups made here are ever destroyed.

    Args:
        group: an initialised process group of which this rank is a member.
        timeout: seconds until a wait on the host fails. Backends that work on streams use the group's own time-out.
        stall_warning: seconds until a wait is warned of.
        board: where ranks tell each other why they failed.
        owned: whether :meth:`close` may destroy ``group``.

    Raises:
        ValueError: this rank is not a member of ``group``.

    Example:
        >>> import torch
        >>> from crossover import runtime
        >>> runtime.init()  # under torchrun
        >>> ones = torch.ones(2)
        >>> runtime.context().communicator.all_reduce(ones, name="ones").wait()
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: float = 600.0,
        stall_warning: float = 60.0,
        board: Board | None = None,
        owned: bool = False,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group: is {group!r}; pass a ProcessGroup of which this rank is a member")
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.timeout = timeout
        self._owned = owned
        self._backends = _backends_by_device(group)
        names = dict.fromkeys(self._backends.values())
        self.backend = "+".join(names)
        me = self.ranks[self.rank]
        self.vigil = Vigil(self.backend, self.rank, self.ranks, timeout, stall_warning, board or Board(None, me))
        self.first_slice = timedelta(seconds=self.vigil.first_slice)
        self._on_host = {device: name in _WAITED_FOR_ON_HOST for device, name in self._backends.items()}
        self._options = {op: _all_reduce_options(torch_op) for op, torch_op in _TORCH_OPS.items()}
        self._allreduce = group.allreduce

    @property
    def control_device(self) -> torch.device:
        """The CPU if the group has a backend for it, else its accelerator's current device."""
        if "cpu" in self._backends or not self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def unsupported_reason(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """See :meth:`Communicator.unsupported_reason`. Backends that are not known here are taken to support all."""
        backend = self._backends.get(device.type)
        if backend is None:
            has = ", ".join(f"{name} for {kind}" for kind, name in self._backends.items())
            return (
                f"the process group has no backend for {device.type} tensors (it has {has}); move the tensors, or "
                f"initialise with one, such as init_process_group('cpu:gloo,cuda:nccl')"
            )
        if dtype in _KNOWN_TO.get(backend, (dtype,)):
            return None
        kind = "float16 or bfloat16" if dtype.is_floating_point else "int32"
        return f"{backend} cannot reduce {dtype}; cast to {kind} first"

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.all_reduce`. Complex tensors: ``SUM`` only."""
        carrier = tensor
        if tensor.dtype not in _PLAIN or not tensor.is_contiguous():
            carrier, op = self._reducible(tensor, op, name)
        if _profiler_enabled():
            return self._start(name, tensor, lambda: self._allreduce([carrier], self._options[op]))
        try:
            work = self._allreduce([carrier], self._options[op])
        except RuntimeError as error:
            raise self._start_error(name, tensor, error) from error
        return TorchWork(self, name, work, self._on_host[tensor.device.type])

    def broadcast(self, tensor: Tensor, root: int, *, name: str) -> Work:
        """See :meth:`Communicator.broadcast`."""
        self._check_rank(root, "root")
        _check_contiguous(name, tensor)
        carrier, source = self._carrier(tensor), self.ranks[root]
        return self._start(name, tensor, lambda: dist.broadcast(carrier, source, group=self.group, async_op=True))

    def all_gather(self, output: Tensor, tensor: Tensor, *, name: str) -> Work:
        """See :meth:`Communicator.all_gather`."""
        _check_contiguous(name, output, tensor)
        wide, narrow = self._carrier(output).view(-1), self._carrier(tensor).view(-1)
        return self._start(name, tensor, lambda: _all_gather(wide, narrow, group=self.group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, name: str) -> Work:
        """See :meth:`Communicator.reduce_scatter`. Complex tensors: ``SUM`` only."""
        wide, wire_op = self._reducible(tensor, op, name)
        narrow, _ = self._reducible(output, op, name)
        flat_wide, flat_narrow, torch_op = wide.view(-1), narrow.view(-1), _TORCH_OPS[wire_op]
        return self._start(
            name, tensor, lambda: _reduce_scatter(flat_narrow, flat_wide, torch_op, group=self.group, async_op=True)
        )

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], *, name: str
    ) -> Work:
        """See :meth:`Communicator.all_to_all`."""
        _check_contiguous(name, output, tensor)
        received, sent = self._carrier(output), self._carrier(tensor)
        to, out_of = list(output_splits), list(input_splits)
        return self._start(
            name,
            tensor,
            lambda: dist.all_to_all_single(received, sent, to, out_of, group=self.group, async_op=True),
        )

    def new_group(self, ranks: Sequence[int], *, name: str) -> Communicator | None:
        """See :meth:`Communicator.new_group`. Members keep the order of their global ranks.

        Raises:
            ValueError: a rank is given twice or is not in this group.
            CommunicationError: not all ranks came within the time-out.
        """
        for rank in ranks:
            self._check_rank(rank, "ranks")
        members = sorted({self.ranks[rank] for rank in ranks})
        if len(members) != len(ranks):
            raise ValueError(f"ranks: is {list(ranks)}; give each rank once")
        everyone = len(self.ranks) == dist.get_world_size()
        me = self.ranks[self.rank]
        if not everyone:
            align_local_names(self, me, name)
        if not members or (me not in members and not everyone):
            return None
        started, vigil = time.monotonic(), self.vigil
        try:
            group = make_group(self.group, members, name, self.timeout, local=not everyone)
        except RuntimeError as error:
            raise vigil.failure(f"new_group {name}", time.monotonic() - started, error) from error
        if me not in members:
            return None
        return TorchCommunicator(
            group, timeout=self.timeout, stall_warning=vigil.stall_warning, board=vigil.board, owned=everyone
        )

    def close(self) -> None:
        """Destroy the group if :meth:`new_group` of a communicator of all ranks made it.

        One that reaches devices stays until the job ends: its destruction can wait for the other ranks, and this may be
        called by the garbage collector, at another time on each.
        """
        on_host = all(self._on_host.values())
        if self._owned and on_host and self.group in c10d._world.pg_map:
            dist.destroy_process_group(self.group)
        self._owned = False

    def _check_rank(self, rank: int, argument: str) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{argument}: {rank} is not a rank of this group; pass 0 to {self.size - 1}")

    def _reducible(self, tensor: Tensor, op: ReduceOp, name: str) -> tuple[Tensor, ReduceOp]:
        """A view and an operation that give the result, also for dtypes that backends reduce wrongly or not at all."""
        _check_contiguous(name, tensor)
        reason = self.unsupported_reason(tensor.dtype, tensor.device)
        if reason is not None:
            raise ValueError(f"{name!r}: {reason}")
        if tensor.dtype is torch.bool:  # Gloo's sum would leave 2 in the memory of a bool
            return tensor.view(torch.uint8), _ON_BOOLS.get(op, op)
        if not tensor.is_complex():
            return tensor, op
        if op is not ReduceOp.SUM:
            raise ValueError(
                f"op: {op} of complex tensors is not defined; use ReduceOp.SUM, or reduce their real views"
            )
        return torch.view_as_real(tensor), op

    def _carrier(self, tensor: Tensor) -> Tensor:
        """A view that the backend can move: bytes, where it does not know the dtype."""
        known = _KNOWN_TO.get(self._backends.get(tensor.device.type, ""))
        if known is None or tensor.dtype in known:
            return tensor
        rows = tensor.view(-1, 1) if tensor.dim() < 2 else tensor
        return rows.view(torch.uint8)

    def _start(self, name: str, tensor: Tensor, launch: Callable[[], Any]) -> Work:
        try:
            with profiler_span(name):
                work = launch()
        except RuntimeError as error:
            raise self._start_error(name, tensor, error) from error
        return TorchWork(self, name, work, self._on_host[tensor.device.type])

    def _start_error(self, name: str, tensor: Tensor, error: RuntimeError) -> ValueError | CommunicationError:
        reason = self.unsupported_reason(tensor.dtype, tensor.device)
        if reason is not None:
            return ValueError(f"{name!r}: {reason}")
        return self.vigil.failure(name, 0.0, error)


def _check_contiguous(name: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():  # Gloo would take it as it lies in memory
            raise ValueError(f"{name!r}: a tensor of shape {tuple(tensor.shape)} is not contiguous; pass one that is")


def _all_reduce_options(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):  # torch 2.8 and later: else NCCL would run on the current stream
        options.asyncOp = True
    return options


def _backends_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    """Device type -> backend name, from torch's ``"cpu:gloo,cuda:nccl"``."""
    pairs = (entry.partition(":") for entry in dist.get_backend_config(group).split(","))
    found = {device: name.lower() for device, _, name in pairs if name}
    return found or {torch.device(kind).type: dist.get_backend(group) for kind in group._device_types}
