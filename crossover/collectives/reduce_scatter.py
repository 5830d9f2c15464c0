"""Reduce-scatter: each rank receives its rows of the average over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.collectives import handles
from crossover.collectives.all_gather import gather_rows
from crossover.collectives.checking import checked, describe, verify
from crossover.collectives.compression import Compression, compressor_of
from crossover.collectives.handles import Started
from crossover.collectives.process_sets import ProcessSet, global_process_set, members
from crossover.collectives.reduce_ops import (
    NAMES,
    Average,
    Max,
    Min,
    Product,
    ScaledOp,
    Sum,
    check_adasum,
    choose_carrier,
    resolve_op,
)
from crossover.comm.communicator import Communicator, Work
from crossover.reduction import Compressor


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the average (or ``op``) of every rank's ``tensor``; differentiable (``Average``, ``Sum``).

    Rows are shared out in order of rank; where they do not divide evenly, the first ranks get one more. The gradient
    is as in Horovod: every rank's gathered rows, times the number of ranks for a ``Sum``.

    Args:
        tensor: same shape and dtype on every rank, with one dimension or more; not modified.
        name: for messages, and for matching calls under Horovod.
        compression: how it travels.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        process_set: the ranks that take part.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.

    Raises:
        ValueError: the tensor has no dimensions, or an argument is not usable.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> rows = xo.reducescatter(torch.ones(4 * xo.size(), 2))
        >>> rows.shape[0]
        4
    """
    compressor = compressor_of(compression)
    sent, context = compressor.compress(checked(tensor))
    call = _call(op, prescale_factor, postscale_factor, name, process_set, "reducescatter")
    return compressor.decompress(_ReduceScatter.apply(*call, sent)[0], context)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`reducescatter` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    call = _call(op, prescale_factor, postscale_factor, name, process_set, "reducescatter")
    return _start_reduce_scatter(*call, [checked(tensor)], single=True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] | str = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """:func:`reducescatter` of a list. Differentiable for ``Average`` and ``Sum``."""
    compressor = compressor_of(compression)
    packed = [compressor.compress(checked(tensor)) for tensor in tensors]
    call = _call(op, prescale_factor, postscale_factor, name, process_set, "grouped_reducescatter")
    reduced = _ReduceScatter.apply(*call, *(sent for sent, _ in packed)) if packed else ()
    return [compressor.decompress(tensor, context) for tensor, (_, context) in zip(reduced, packed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start :func:`grouped_reducescatter`; :func:`synchronize` returns the list."""
    call = _call(op, prescale_factor, postscale_factor, name, process_set, "grouped_reducescatter")
    return _start_reduce_scatter(*call, [checked(tensor) for tensor in tensors])


def _call(
    op: int, prescale: float, postscale: float, name: str | None, process_set: ProcessSet, kind: str
) -> tuple[Communicator, str, ScaledOp]:
    scaled = ScaledOp(resolve_op(op), float(prescale), float(postscale))
    communicator = members(process_set)
    check_adasum(scaled.op, communicator)
    return communicator, handles.full_name(communicator, kind, name), scaled


def _start_reduce_scatter(
    communicator: Communicator, label: str, scaled: ScaledOp, originals: Sequence[Tensor], *, single: bool = False
) -> int:
    if any(not tensor.dim() for tensor in originals):
        raise ValueError("tensor: has no dimensions, so there are no rows to share out; use allreduce")

    def launch() -> Started:
        tensors = [tensor.detach() for tensor in originals]
        verify(communicator, label, f"{NAMES[scaled.op]} of {', '.join(map(describe, tensors))}")
        carriers = [choose_carrier(scaled, t.dtype, t.device, communicator) for t in tensors]
        outputs: list[Tensor] = []
        works: list[Work] = []
        for number, (tensor, carrier) in enumerate(zip(tensors, carriers, strict=True)):
            blocks = _blocks(scaled.before(carrier.load(tensor)), communicator.size)
            outputs.append(torch.empty_like(blocks[0]))
            if blocks.numel():
                name = label if len(tensors) == 1 else f"{label}.{number}"
                works.append(communicator.reduce_scatter(outputs[-1], blocks, carrier.wire_op, name=name))

        def finish() -> Any:
            results = []
            for tensor, carrier, output in zip(tensors, carriers, outputs, strict=True):
                rows = output[: rows_of(communicator.rank, tensor.shape[0], communicator.size)]
                results.append(carrier.unload(scaled.after_(rows, communicator.size)))
            return results[0] if single else results

        return Started(works, finish)

    return handles.start(communicator, label, launch)


def rows_of(rank: int, rows: int, size: int) -> int:
    """How many of ``rows`` rows ``rank`` receives: the remainder goes to the first ranks."""
    return rows // size + (rank < rows % size)


def _blocks(wire: Tensor, size: int) -> Tensor:
    """A copy of ``wire`` as ``size`` blocks of equally many rows, the last row of the shorter ones being zero."""
    rows = wire.shape[0]
    most = -(-rows // size)
    blocks = wire.new_zeros(size, most, *wire.shape[1:])
    first = 0
    for rank in range(size):
        count = rows_of(rank, rows, size)
        blocks[rank, :count] = wire[first : first + count]
        first += count
    return blocks


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, label: str, scaled: ScaledOp, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.communicator, ctx.label, ctx.scaled = communicator, label, scaled
        return tuple(handles.synchronize(_start_reduce_scatter(communicator, label, scaled, tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled: ScaledOp = ctx.scaled
        if scaled.op in (Min, Max, Product):
            raise RuntimeError(
                f"reducescatter: has no gradient for op={NAMES[scaled.op]}; use crossover.Average or crossover.Sum, or "
                "allreduce, and keep this rank's rows"
            )
        factor = scaled.prescale * scaled.postscale * (ctx.communicator.size if scaled.op == Sum else 1)
        sent = [gradient * factor for gradient in gradients]
        return None, None, None, *gather_rows(ctx.communicator, f"{ctx.label}.gradient", sent)
