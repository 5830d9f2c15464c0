"""``DistributedOptimizer``: attaches to the user's optimizer, which stays the user's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crossover import runtime
from crossover.attachment import Attachment
from crossover.buckets import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MEBIBYTE
from crossover.collectives import Average, Compression, ProcessSet, Sum
from crossover.comm.communicator import Communicator
from crossover.engine import Engine
from crossover.layout import BucketOptions
from crossover.parameters import NamedParameter, ParameterBook, agree
from crossover.reduction import Compressor, Reduction, scaling_for
from crossover.schedulers import Schedule, schedule_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEDULE_VARIABLE = "CROSSOVER_SCHEDULE"

_numbers = itertools.count()


class WrappedOptimizer(torch.optim.Optimizer, Attachment if TYPE_CHECKING else object):  # type: ignore[misc]
    """For type checkers: the user's optimizer with the methods of :class:`~crossover.attachment.Attachment`."""


def DistributedOptimizer(  # noqa: N802 - the name that Horovod's users know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
    *,
    process_group: ProcessGroup | None = None,
    schedule: Schedule | str | None = None,
    gate: None = None,
    sharing: None = None,
    bucket_cap_mb: float = DEFAULT_CAP_BYTES / MEBIBYTE,
    first_bucket_cap_mb: float = DEFAULT_FIRST_CAP_BYTES / MEBIBYTE,
) -> WrappedOptimizer:
    """Average gradients over all ranks during ``backward()``.

    The optimizer passed in is returned: same object, class, ``param_groups``, ``state`` and ``state_dict()``. It is
    given hooks, and the methods of :class:`~crossover.attachment.Attachment` (``synchronize``, ``skip_synchronize``,
    ``no_sync``, ``flush``, ``flushed``, ...). When ``backward()`` returns, every ``p.grad`` holds exactly what
    ``step()`` will apply, so clipping, ``torch.amp.GradScaler`` and gradient logging need no call of ours. ``p.grad``
    is then a view into a bucket that the next shared backward pass writes to: clone what is to be kept.

    With one rank nothing is attached but harmless methods: no hooks, threads or process group.

    Args:
        optimizer: any ``torch.optim.Optimizer`` but ``LBFGS``, whose line search differs between ranks.
        named_parameters: ``model.named_parameters()``; gives messages and records their names.
        compression: how gradients travel: ``Compression.none``, ``fp16``, ``bf16``, or a class with static
            ``compress`` and ``decompress`` that work elementwise on flat tensors.
        backward_passes_per_step: passes that are added up, on this rank alone, before the last of them is shared.
            Gradients are the sum over the passes: divide the loss by their number for a mean.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: with ``Average``, divide by this before the sum and by ``size / factor`` after it.
        num_groups: share the parameters out to this many buckets instead of buckets of a size. Horovod's older name.
        groups: number of buckets, or lists of parameters each of which shares one bucket.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part; others are left alone.
        process_group: the same as a ``torch.distributed`` group.
        schedule: when buckets travel: an object or name from :mod:`crossover.schedulers`; ``None`` is
            ``$CROSSOVER_SCHEDULE`` or ``Overlapped()``.
        gate: reserved for deciding which steps are shared; ``None`` shares every step.
        sharing: reserved for taking turns on a device; ``None`` takes none.
        bucket_cap_mb: size at which a bucket is closed, MiB.
        first_bucket_cap_mb: the same for the first bucket, MiB.

    Returns:
        ``optimizer`` itself.

    Raises:
        ValueError: an argument is not usable; the message says what is.
        RankMismatchError: ranks hold different parameters or options; raised on every rank. This call is a collective.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> optimizer = xo.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()

    Source: the signature and meaning are those of ``horovod.torch.DistributedOptimizer``.
    """
    _check_optimizer(optimizer)
    _check_options(op, backward_passes_per_step, gradient_predivide_factor, compression)
    _check_reserved(gate, sharing)
    book = ParameterBook(optimizer, named_parameters)
    options = _bucket_options(book, num_groups, groups, sparse_as_dense, bucket_cap_mb, first_bucket_cap_mb)
    chosen = schedule_of(schedule if schedule is not None else os.environ.get(SCHEDULE_VARIABLE) or "overlapped")
    communicator = _communicator(process_set, process_group)
    engine = None
    if communicator is not None and communicator.size > 1:
        facts = {
            "op": {Average: "Average", Sum: "Sum"}[op],
            "backward_passes_per_step": backward_passes_per_step,
            "compression": compression.__name__,
            "gradient_predivide_factor": gradient_predivide_factor,
            "schedule": type(chosen).__name__,
            "buckets": (options.cap_bytes, options.first_cap_bytes, options.num_groups, len(options.groups)),
            "sparse_as_dense": sparse_as_dense,
        }
        parameters = book.trainable()
        _check_optimizer_with_peers(optimizer)
        name = f"optimizer{next(_numbers)}"
        agree(communicator, parameters, facts, name=f"{name}.agree")
        _check_reducible(parameters, communicator)
        reduction = Reduction(
            communicator.duplicate(name=name),
            scaling_for(op == Average, communicator.size, gradient_predivide_factor),
            None if compression is Compression.none else compression,
            name,
        )
        chosen.attach(reduction, optimizer)
        engine = Engine(book, reduction, chosen, options, backward_passes_per_step)
    return Attachment.attach(optimizer, engine)  # type: ignore[return-value]


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer: is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if Attachment.of(optimizer) is not None:
        raise ValueError("optimizer: is wrapped already; call DistributedOptimizer once for each optimizer")


def _check_optimizer_with_peers(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "optimizer: LBFGS evaluates its closure a different number of times on each rank, which would hang; "
            "use a first-order optimizer, or run it on one rank and broadcast the parameters"
        )


def _check_options(op: int, passes: int, predivide: float, compression: object) -> None:
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


def _check_reserved(gate: object, sharing: object) -> None:
    for name, value in (("gate", gate), ("sharing", sharing)):
        if value is not None:
            raise ValueError(f"{name}: is {value!r}; this version has none to choose from, leave it at None")


def _check_reducible(parameters: Sequence[NamedParameter], communicator: Communicator) -> None:
    for parameter in parameters:
        reason = communicator.unsupported_reason(parameter.tensor.dtype, parameter.tensor.device)
        if reason is not None:
            raise ValueError(f"parameter {parameter.name!r}: {reason}")


def _bucket_options(
    book: ParameterBook,
    num_groups: int,
    groups: int | Sequence[Sequence[Tensor]] | None,
    sparse_as_dense: bool,
    cap_mb: float,
    first_cap_mb: float,
) -> BucketOptions:
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
        return process_set.communicator
    return runtime.context().communicator
