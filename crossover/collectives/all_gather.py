"""All-gathers: rows of every rank, joined in the order of ranks. How many rows a rank has may differ.

Each call first exchanges the numbers of rows and makes sure that dtypes and trailing dimensions agree, and waits for
that; the rows themselves travel while the caller goes on. Calls are matched between ranks by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.collectives import handles
from crossover.collectives.checking import checked, describe_rows, exchange, verify
from crossover.collectives.handles import Started
from crossover.collectives.process_sets import ProcessSet, global_process_set, members
from crossover.collectives.reduce_ops import NAMES, Average, ScaledOp, Sum, as_bytes, from_bytes, resolve_op
from crossover.collectives.reducing import AllReduce, ReduceCall
from crossover.comm.communicator import Communicator


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Every rank's ``tensor``, joined along the first dimension. Differentiable.

    The gradient is the average over ranks of the gradients of this rank's rows, as in Horovod.

    Args:
        tensor: same dtype and same trailing dimensions on every rank; a tensor without dimensions counts as one row.
        name: for messages, and for matching calls under Horovod.
        process_set: the ranks that take part.

    Returns:
        A new tensor, equal on all ranks.

    Raises:
        RankMismatchError: dtypes or trailing dimensions differ; raised on every rank.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> xo.allgather(torch.tensor([[1, 2]])).shape[1]
        2
    """
    communicator = members(process_set)
    label = handles.full_name(communicator, "allgather", name)
    (gathered,) = _AllGather.apply(communicator, label, checked(tensor))
    result: Tensor = gathered
    return result


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start :func:`allgather` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "allgather", name)
    return _start(communicator, label, [checked(tensor)], lambda results, _: results[0])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """:func:`allgather` of a list, with one exchange of the numbers of rows for all. Differentiable."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "grouped_allgather", name)
    return list(_AllGather.apply(communicator, label, *map(checked, tensors))) if tensors else []


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`grouped_allgather`; :func:`synchronize` returns the list."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "grouped_allgather", name)
    return _start(communicator, label, [checked(tensor) for tensor in tensors], lambda results, _: results)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start reducing a sparse tensor by gathering its indices and values.

    Args:
        tensor: sparse COO tensor, of the same shape and sparse dimensions on every rank.
        name: for messages.
        op: ``Average`` or ``Sum``.
        process_set: the ranks that take part.

    Returns:
        A function that waits and returns the sparse result, uncoalesced: indices that several ranks have occur
        repeatedly.

    Raises:
        ValueError: the tensor is not sparse, or another ``op``.
    """
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError("tensor: is not a sparse COO tensor; use allreduce_async for a dense one")
    if resolve_op(op) not in (Average, Sum):
        raise ValueError(f"op: {NAMES[op]} is not defined for sparse tensors; use crossover.Average or crossover.Sum")
    communicator = members(process_set)
    label = handles.full_name(communicator, "sparse_allreduce", name)
    parts = [tensor._indices().t().contiguous(), tensor._values().contiguous()]

    def assemble(results: list[Tensor], _: list[list[int]]) -> Tensor:
        indices, values = results
        if op == Average and communicator.size > 1:
            values = values / communicator.size
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    handle = _start(communicator, label, parts, assemble)
    return lambda: handles.synchronize(handle)


def _start(
    communicator: Communicator,
    label: str,
    originals: Sequence[Tensor],
    make_result: Callable[[list[Tensor], list[list[int]]], Any],
) -> int:
    """Start gathering; ``make_result`` is given the joined tensors and every rank's numbers of rows."""

    def launch() -> Started:
        tensors = [
            (tensor.detach() if tensor.dim() else tensor.detach().reshape(1)).contiguous() for tensor in originals
        ]
        facts = ", ".join(map(describe_rows, tensors))
        verify(communicator, label, facts)
        rows = exchange(communicator, label, [tensor.shape[0] for tensor in tensors], facts)
        works = []
        gathered: list[Tensor] = []
        for number, tensor in enumerate(tensors):
            wire = _padded(as_bytes(tensor), max(row[number] for row in rows))
            gathered.append(wire.new_empty(communicator.size, *wire.shape))
            if wire.numel():
                name = label if len(tensors) == 1 else f"{label}.{number}"
                works.append(communicator.all_gather(gathered[-1], wire, name=name))

        def finish() -> Any:
            results = []
            for number, (tensor, wires) in enumerate(zip(tensors, gathered, strict=True)):
                results.append(from_bytes(_trimmed(wires, [row[number] for row in rows]), tensor))
            return make_result(results, rows)

        return Started(works, finish)

    return handles.start(communicator, label, launch)


def _padded(wire: Tensor, rows: int) -> Tensor:
    if wire.shape[0] == rows:
        return wire
    padded = wire.new_zeros(rows, wire.shape[1])
    padded[: wire.shape[0]] = wire
    return padded


def _trimmed(wires: Tensor, rows: Sequence[int]) -> Tensor:
    if all(count == wires.shape[1] for count in rows):
        return wires.flatten(0, 1)
    return torch.cat([wire[:count] for wire, count in zip(wires, rows, strict=True)])


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, label: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        handle = _start(communicator, label, tensors, lambda results, rows: (results, rows))
        results, rows = handles.synchronize(handle)
        ctx.call = ReduceCall(communicator, f"{label}.gradient", ScaledOp(Average))
        ctx.firsts = [sum(row[number] for row in rows[: communicator.rank]) for number in range(len(tensors))]
        ctx.shapes = [tensor.shape for tensor in tensors]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        averaged = AllReduce.apply(ctx.call, *gradients)
        mine = []
        for gradient, first, shape in zip(averaged, ctx.firsts, ctx.shapes, strict=True):
            mine.append(gradient.narrow(0, first, shape[0] if shape else 1).reshape(shape))
        return None, None, *mine


def gather_rows(communicator: Communicator, label: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """:func:`grouped_allgather` on a communicator, under a full name."""
    return tuple(_AllGather.apply(communicator, label, *tensors))
