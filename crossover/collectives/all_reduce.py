"""All-reduce in Horovod's forms: in place or not, now or later, one tensor or many, dense or sparse.

On torch.distributed, calls are matched between ranks by their order; under Horovod, by name. Make them in the same
order everywhere and both hold. Tensors that differ in shape or dtype between ranks are an error that the backend may
not notice: set ``CROSSOVER_CHECK=1`` to have every call checked (:mod:`crossover.collectives.checking`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from crossover.collectives import handles
from crossover.collectives.checking import checked
from crossover.collectives.compression import Compression, compressor_of
from crossover.collectives.process_sets import ProcessSet, global_process_set, members
from crossover.collectives.reduce_ops import ScaledOp, check_adasum, resolve_op
from crossover.collectives.reducing import AllReduce, ReduceCall
from crossover.reduction import Compressor


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The average (or ``op``) of every rank's ``tensor``. Differentiable.

    Any dtype and any strides will do: halves, booleans and complex numbers travel in a form that the backend can
    reduce. The gradient of an average is the average of the ranks' gradients, that of a sum their sum; that of
    ``Min`` and ``Max`` goes to the ranks which hold the extreme, that of ``Product`` is exact too (Horovod's differ
    there).

    Args:
        tensor: same shape and dtype on every rank; not modified.
        average: deprecated; ``True`` is ``op=Average``, ``False`` is ``op=Sum``.
        name: for messages, and for matching calls under Horovod; may be in flight once at a time.
        compression: how it travels, see :class:`~crossover.collectives.Compression`.
        op: ``Average`` (default; integers are rounded towards zero), ``Sum``, ``Min``, ``Max`` or ``Product``. For
            booleans ``Sum`` and ``Max`` mean "on any rank", ``Min`` and ``Product`` "on all".
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        process_set: the ranks that take part.

    Returns:
        A new tensor, equal on all ranks.

    Raises:
        ValueError: an argument is not usable, or the name is in flight.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> xo.allreduce(torch.tensor([1.0, 2.0]), name="loss").tolist()
        [1.0, 2.0]
    """
    compressor = compressor_of(compression)
    sent, context = compressor.compress(checked(tensor))
    call = _call([sent], average, name, op, prescale_factor, postscale_factor, process_set)
    (reduced,) = AllReduce.apply(call, sent)
    return compressor.decompress(reduced, context)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    call = _call([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return call.start([tensor], single=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """:func:`allreduce` in place; returns ``tensor``. Not differentiable."""
    result: Tensor = handles.synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`allreduce` in place. Leave ``tensor`` alone until :func:`synchronize` has returned."""
    call = _call([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return call.start([tensor], single=True, in_place=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """:func:`allreduce` of a list: small tensors of one dtype travel together. Differentiable."""
    compressor = compressor_of(compression)
    packed = [compressor.compress(checked(tensor)) for tensor in tensors]
    sent = [tensor for tensor, _ in packed]
    call = _call(sent, average, name, op, prescale_factor, postscale_factor, process_set, kind="grouped_allreduce")
    reduced = AllReduce.apply(call, *sent)
    return [compressor.decompress(tensor, context) for tensor, (_, context) in zip(reduced, packed, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce`; :func:`synchronize` returns the list."""
    call = _call(tensors, average, name, op, prescale_factor, postscale_factor, process_set, kind="grouped_allreduce")
    return call.start(tensors)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """:func:`grouped_allreduce` in place; returns the tensors passed in."""
    result: list[Tensor] = handles.synchronize(
        grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    )
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`grouped_allreduce` in place. Leave the tensors alone until :func:`synchronize` has returned."""
    call = _call(tensors, average, name, op, prescale_factor, postscale_factor, process_set, kind="grouped_allreduce")
    return call.start(tensors, in_place=True)


def _call(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    kind: str = "allreduce",
) -> ReduceCall:
    scaled = ScaledOp(resolve_op(op, average), float(prescale_factor), float(postscale_factor))
    for tensor in tensors:
        checked(tensor)
    communicator = members(process_set)
    check_adasum(scaled.op, communicator)
    return ReduceCall(communicator, handles.full_name(communicator, kind, name), scaled)
