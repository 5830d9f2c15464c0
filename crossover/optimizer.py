"""``DistributedOptimizer``: attaches to the user's optimizer, which stays the user's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crossover.attachment import Attachment
from crossover.bucket_plan import DEFAULT_CAP_BYTES, DEFAULT_FIRST_CAP_BYTES, MEBIBYTE
from crossover.collectives import Average, ProcessSet
from crossover.collectives.compression import compressor_of
from crossover.options import Options, bucket_options, connect
from crossover.parameters import ParameterBook
from crossover.reduction import Compressor
from crossover.schedulers import Schedule, schedule_of
from crossover.selsync import Gate, gate_of
from crossover.sync.sharing import SHARING_VARIABLE, Sharing, sharing_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SCHEDULE_VARIABLE = "CROSSOVER_SCHEDULE"
GATE_VARIABLE = "CROSSOVER_GATE"
COMPRESSION_VARIABLE = "CROSSOVER_COMPRESSION"


class WrappedOptimizer(torch.optim.Optimizer, Attachment if TYPE_CHECKING else object):  # type: ignore[misc]
    """For type checkers: the user's optimizer with the methods of :class:`~crossover.attachment.Attachment`."""


def DistributedOptimizer(  # noqa: N802 - the name that Horovod's users know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] | str | None = None,
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
    gate: Gate | str | None = None,
    sharing: Sharing | str | None = None,
    bucket_cap_mb: float = DEFAULT_CAP_BYTES / MEBIBYTE,
    first_bucket_cap_mb: float = DEFAULT_FIRST_CAP_BYTES / MEBIBYTE,
) -> WrappedOptimizer:
    """Average gradients over all ranks during ``backward()``.

    The optimizer passed in is returned: same object, class, ``param_groups``, ``state`` and ``state_dict()``. It is
    given hooks, and the methods of :class:`~crossover.attachment.Attachment` (``synchronize``, ``skip_synchronize``,
    ``no_sync``, ``flush``, ``flushed``, ...). When ``backward()`` returns, every ``p.grad`` holds exactly what
    ``step()`` will apply, so clipping, ``torch.amp.GradScaler`` and gradient logging need no call of ours. ``p.grad``
    is then a view into a bucket that the next shared backward pass writes to: clone what is to be kept. A rank
    without a gradient for a parameter counts as zero; where no rank has one it stays ``None``, and momentum and weight
    decay leave the parameter alone.

    With one rank nothing is attached but harmless methods: no hooks, threads or process group.

    Args:
        optimizer: any ``torch.optim.Optimizer`` but ``LBFGS``, whose line search differs between ranks.
        named_parameters: ``model.named_parameters()``; gives messages and records their names.
        compression: how gradients travel: ``Compression.none``, ``fp16``, ``bf16`` or their names, or a class with
            static ``compress`` and ``decompress`` that work elementwise on flat tensors; ``None`` is
            ``$CROSSOVER_COMPRESSION``, or none. Of a gate's averages of parameters the distance from the last average
            is compressed, which takes memory for one more copy of them in float32; after a checkpoint is loaded the
            first average travels as it is: training goes on equal to rounding.
        backward_passes_per_step: passes that are added up, on this rank alone, before the last of them is shared.
            Gradients are the sum over the passes: divide the loss by their number for a mean. Those of an unfinished
            window are in no checkpoint: a resumed job begins the window anew.
        op: ``Average`` or ``Sum`` over ranks.
        gradient_predivide_factor: with ``Average``, divide by this before the sum and by ``size / factor`` after it.
        num_groups: share the parameters out to this many buckets instead of buckets of a size. Horovod's older name.
        groups: number of buckets, or lists of parameters each of which shares one bucket.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part; others are left alone.
        process_group: the same as a ``torch.distributed`` group.
        schedule: when buckets travel: an object or name from :mod:`crossover.schedulers`, or ``"auto"``
            (:class:`crossover.auto.Auto`); ``None`` is ``$CROSSOVER_SCHEDULE`` or ``Overlapped()``.
        gate: decides which steps are shared: an object or name from :mod:`crossover.selsync`, such as
            ``SelSync(delta=0.3)``, ``"selsync:0.3"`` or ``"periodic:8"``, or ``"auto"``
            (:class:`crossover.auto.AutoGate`); ``None`` is ``$CROSSOVER_GATE``, or sharing every step. With one,
            ``p.grad`` stays this rank's own unless the gate averages gradients, replicas differ between shared steps,
            and ``optimizer.flushed()`` makes them equal for evaluation and checkpoints. What the gate counts is saved
            in ``state_dict()["crossover"]``, which a bare optimizer leaves aside.
        sharing: how this job shares its device with others: a :class:`crossover.sync.TimeShare`, or text such as
            ``"timeshare:job=a"``; ``None`` is ``$CROSSOVER_SHARING``, or the device is used at any time. Changes
            nothing but timing, and a lone rank takes no turns, as it waits for nobody.
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
    book = ParameterBook(optimizer, named_parameters)
    options = Options(
        compression=compressor_of(os.environ.get(COMPRESSION_VARIABLE, "none") if compression is None else compression),
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        buckets=bucket_options(book, num_groups, groups, sparse_as_dense, bucket_cap_mb, first_bucket_cap_mb),
        process_set=process_set,
        process_group=process_group,
        schedule=schedule_of(schedule if schedule is not None else os.environ.get(SCHEDULE_VARIABLE) or "overlapped"),
        gate=gate_of(gate if gate is not None else os.environ.get(GATE_VARIABLE)),
        sharing=sharing_of(sharing if sharing is not None else os.environ.get(SHARING_VARIABLE)),
    )
    return Attachment.attach(optimizer, partial(connect, book=book, options=options))  # type: ignore[return-value]


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"optimizer: is a {type(optimizer).__name__}; pass a torch.optim.Optimizer, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if Attachment.of(optimizer) is not None:
        raise ValueError("optimizer: is wrapped already; call DistributedOptimizer once for each optimizer")
