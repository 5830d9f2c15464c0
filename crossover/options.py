"""The user's wishes for one optimizer, checked, and what they make of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossover import runtime
from crossover.auto import AutoGate
from crossover.auto.opening import OpeningExchange
from crossover.auto.watched import Watched
from crossover.auto.wishes import reconciled
from crossover.bucket_plan import MEBIBYTE
from crossover.collectives import Average, Compression, ProcessSet, Sum
from crossover.comm.communicator import Communicator
from crossover.engine import Engine
from crossover.exchange import Exchange
from crossover.gated import GatedExchange
from crossover.late import LateExchange
from crossover.layout import BucketOptions
from crossover.memory import keep_freed_memory
from crossover.parameters import NamedParameter, ParameterBook, agree
from crossover.reduction import Compressor, Reduction, scaling_for
from crossover.schedulers import Overlapped, Schedule
from crossover.schedulers.delayed import DelayedSchedule
from crossover.selsync.gate import Gate
from crossover.sync.sharing import Sharing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(slots=True)
class Options:
    """The arguments of ``DistributedOptimizer``, whose documentation says what they mean."""

    compression: type[Compressor]
    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    buckets: BucketOptions
    process_set: ProcessSet | None
    process_group: ProcessGroup | None
    schedule: Schedule
    gate: Gate | None = None
    sharing: Sharing | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, and make of ``"auto"`` what goes with the rest."""
        self.schedule, self.gate = reconciled(self.schedule, self.gate)
        check_options(self.op, self.backward_passes_per_step, self.gradient_predivide_factor, self.compression)
        if self.gate is not None:
            check_options_with_gate(self.gate, self.op, self.schedule)

    def facts(self) -> dict[str, Any]:
        """What has to be equal on all ranks, for comparing and for messages."""
        buckets = self.buckets
        return {
            "op": {Average: "Average", Sum: "Sum"}[self.op],
            "backward_passes_per_step": self.backward_passes_per_step,
            "compression": self.compression.__name__,
            "gradient_predivide_factor": self.gradient_predivide_factor,
            "schedule": type(self.schedule).__name__,
            "buckets": (buckets.cap_bytes, buckets.first_cap_bytes, buckets.num_groups, len(buckets.groups)),
            "sparse_as_dense": buckets.sparse_as_dense,
            "gate": "none" if self.gate is None else type(self.gate).__name__,
            **({} if self.gate is None else {f"gate.{key}": value for key, value in self.gate.settings().items()}),
            **({} if self.sharing is None else self.sharing.facts()),
        }


def connect(optimizer: torch.optim.Optimizer, book: ParameterBook, options: Options, number: int) -> Engine | None:
    """Take part in the job as it is now. Collective.

    Args:
        optimizer: the user's.
        book: its parameters.
        options: the user's wishes.
        number: tells the optimizers of a process apart; equal on all ranks.

    Returns:
        What brings gradients together; ``None`` for a lone rank and for ranks outside the process set.

    Raises:
        ValueError: a parameter cannot be reduced by this backend, or the optimizer cannot be used with peers.
        RankMismatchError: ranks disagree.
    """
    communicator = _communicator(options.process_set, options.process_group)
    if communicator is None or communicator.size == 1:
        return None
    _check_optimizer_with_peers(optimizer)
    name = f"optimizer{number}"
    parameters = book.trainable()
    agree(communicator, parameters, options.facts(), name=f"{name}.agree")
    _check_reducible(parameters, communicator, options.compression)
    reduction = Reduction(
        communicator.duplicate(name=name),
        scaling_for(options.op == Average, communicator.size, options.gradient_predivide_factor),
        None if options.compression is Compression.none else options.compression,
        name,
    )
    keep_freed_memory(parameter.tensor for parameter in parameters)
    options.schedule.attach(reduction, optimizer)
    exchange = _exchange(reduction, options, optimizer)
    if options.sharing is not None:
        local_rank = runtime.local_rank() if runtime.is_initialized() else 0
        used = parameters[0].tensor.device
        options.sharing.attach(used, communicator.rank, communicator.size, local_rank, communicator.backend)
    return Engine(book, exchange, options.backward_passes_per_step, options.sharing)


def _exchange(reduction: Reduction, options: Options, optimizer: torch.optim.Optimizer) -> Exchange:
    schedule, buckets, gate = options.schedule, options.buckets, options.gate
    if gate is None:
        return Exchange(reduction, schedule, buckets)
    if isinstance(gate, AutoGate) and isinstance(schedule, Watched):
        return OpeningExchange(reduction, schedule, buckets, gate, optimizer)
    if isinstance(schedule, DelayedSchedule):
        return LateExchange(reduction, schedule, buckets, gate, optimizer)
    return GatedExchange(reduction, schedule, buckets, gate, optimizer)


def _check_optimizer_with_peers(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer: LBFGS evaluates its closure a different number of times on each rank, which would hang; "
            "use a first-order optimizer, or run it on one rank and broadcast the parameters"
        )


def check_options(op: int, passes: int, predivide: float, compression: object) -> None:
    """Raise ``ValueError`` for a value that cannot be meant."""
    if op not in (Average, Sum):
        raise ValueError(f"op: is {op!r}; gradients are combined by crossover.Average or crossover.Sum")
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(f"backward_passes_per_step: is {passes!r}; it has to be a whole number of 1 or more")
    if not isinstance(predivide, int | float) or not predivide > 0:
        raise ValueError(f"gradient_predivide_factor: is {predivide!r}; it has to be a positive number")
    if predivide != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor: splits the division of an average; leave it at 1.0 with op=Sum")
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise ValueError(
            f"compression: is {compression!r}; use crossover.Compression.none, .fp16 or .bf16, or a class with static "
            "compress(tensor) and decompress(tensor, ctx)"
        )


def check_options_with_gate(gate: Gate, op: int, schedule: Schedule) -> None:
    """Raise ``ValueError`` for an option that means nothing, or something else, with a gate."""
    if op != Average:
        raise ValueError("op: is Sum; a gate averages over ranks, use crossover.Average")
    if isinstance(schedule, DelayedSchedule):
        _check_late_averages(gate, schedule)
    elif not isinstance(schedule, Overlapped):
        raise ValueError(
            f"schedule: {type(schedule).__name__} shares every step, and the gate {type(gate).__name__} does not; use "
            "Overlapped, DeFT or FifoDelayed with a gate, or no gate"
        )


def _check_late_averages(gate: Gate, schedule: Schedule) -> None:
    name = type(schedule).__name__
    if gate.average != "parameters":
        raise ValueError(
            f"gate: averages gradients, which with {name} would come late to steps that were not shared; use "
            "average='parameters', or the Overlapped schedule"
        )
    if gate.optimizer_state != "local":
        raise ValueError(
            f"gate: averages the optimizer's state, which has moved on when an average with {name} lands; use "
            "optimizer_state='local', or the Overlapped schedule"
        )


def _check_reducible(
    parameters: Sequence[NamedParameter], communicator: Communicator, compression: type[Compressor]
) -> None:
    known: set[tuple[torch.dtype, torch.device]] = set()
    for parameter in parameters:
        dtype, device = parameter.tensor.dtype, parameter.tensor.device
        if (dtype, device) in known:
            continue
        known.add((dtype, device))
        reason = communicator.unsupported_reason(dtype, device)
        if reason is not None:
            raise ValueError(f"parameter {parameter.name!r}: {reason}")
        wire, _ = compression.compress(torch.zeros(1, dtype=dtype.to_real(), device=device))
        reason = communicator.unsupported_reason(wire.dtype, wire.device)
        if reason is not None:
            raise ValueError(
                f"compression: {compression.__name__} sends parameter {parameter.name!r} as {wire.dtype}; {reason}"
            )


def bucket_options(
    book: ParameterBook,
    num_groups: int,
    groups: int | Sequence[Sequence[Tensor]] | None,
    sparse_as_dense: bool,
    cap_mb: float,
    first_cap_mb: float,
) -> BucketOptions:
    """The arguments that say how parameters share buckets, checked; ``ValueError`` says what is wrong."""
    for name, value in (("bucket_cap_mb", cap_mb), ("first_bucket_cap_mb", first_cap_mb)):
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"{name}: is {value!r}; it has to be a positive number of MiB")
    if groups is None:
        groups = num_groups
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups: is {groups}; it has to be 0 (buckets by size) or a number of buckets")
        return BucketOptions(int(cap_mb * MEBIBYTE), int(first_cap_mb * MEBIBYTE), groups, (), sparse_as_dense)
    known = {id(parameter.tensor) for parameter in book.trainable()}
    sets = tuple(frozenset(id(tensor) for tensor in group) for group in groups)
    grouped = [identity for group in sets for identity in group]
    if len(grouped) != len(set(grouped)):
        raise ValueError("groups: a parameter stands in two groups; it may stand in one")
    if not set(grouped) <= known:
        raise ValueError(
            "groups: holds tensors that are no trainable parameters of this optimizer; pass its parameters"
        )
    return BucketOptions(int(cap_mb * MEBIBYTE), int(first_cap_mb * MEBIBYTE), 0, sets, sparse_as_dense)


def _communicator(process_set: ProcessSet | None, process_group: ProcessGroup | None) -> Communicator | None:
    if process_set is not None and process_group is not None:
        raise ValueError("process_set and process_group: both are given; pass one of them")
    if process_group is not None:
        return runtime.communicator_of(process_group)
    if process_set is not None:
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_set: is {process_set!r}; pass a crossover.ProcessSet, as of add_process_set()")
        return process_set.communicator
    return runtime.context().communicator
