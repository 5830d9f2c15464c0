"""Broadcasts in Horovod's forms, of any dtype and any strides, and the barrier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crossover.collectives import fusion, handles
from crossover.collectives.checking import checked, describe, verify
from crossover.collectives.handles import Started
from crossover.collectives.process_sets import ProcessSet, global_process_set, group_rank, members
from crossover.collectives.reduce_ops import Average, ScaledOp, as_bytes, from_bytes
from crossover.collectives.reducing import AllReduce, ReduceCall
from crossover.comm.communicator import Communicator


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The ``tensor`` of rank ``root_rank``, on every rank. Differentiable.

    The gradient that reaches the root is the average of the ranks' gradients, as in Horovod; other ranks get zeros.

    Args:
        tensor: same shape and dtype on every rank; not modified.
        root_rank: who sends, by its number in the whole job.
        name: for messages, and for matching calls under Horovod.
        process_set: the ranks that take part.

    Returns:
        A new tensor.

    Raises:
        ValueError: ``root_rank`` takes no part, or the name is in flight.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> xo.broadcast(torch.tensor([1.0, 2.0]), root_rank=0).tolist()
        [1.0, 2.0]
    """
    communicator = members(process_set)
    label = handles.full_name(communicator, "broadcast", name)
    result: Tensor = _Broadcast.apply(communicator, label, group_rank(communicator, root_rank), checked(tensor))
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast` and return a handle for :func:`poll` and :func:`synchronize`. Not differentiable."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "broadcast", name)
    return _start(communicator, label, group_rank(communicator, root_rank), checked(tensor), in_place=False)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """:func:`broadcast` in place; returns ``tensor``. Not differentiable."""
    result: Tensor = handles.synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start :func:`broadcast` in place. Leave ``tensor`` alone until :func:`synchronize` has returned."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "broadcast", name)
    return _start(communicator, label, group_rank(communicator, root_rank), checked(tensor), in_place=True)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of ``process_set`` has called it.

    Raises:
        CommunicationError: a rank failed or did not come within the time-out.
    """
    communicator = members(process_set)
    verify(communicator, "barrier", "")
    communicator.barrier(name="barrier")


def _start(communicator: Communicator, label: str, root: int, original: Tensor, *, in_place: bool) -> int:
    def launch() -> Started:
        tensor = original.detach()
        verify(communicator, label, f"from rank {communicator.ranks[root]} of {describe(tensor)}")
        source = tensor.contiguous() if in_place else tensor.clone(memory_format=torch.contiguous_format)
        wire = as_bytes(source)
        works = [communicator.broadcast(wire, root, name=label)] if wire.numel() else []

        def finish() -> Tensor:
            if not in_place:
                return from_bytes(wire, source).view(source.shape)
            with torch.no_grad():
                fusion.assign(tensor, from_bytes(wire, source).view(source.shape))
            return original

        return Started(works, finish)

    return handles.start(communicator, label, launch)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, communicator: Communicator, label: str, root: int, tensor: Tensor) -> Tensor:
        ctx.call = ReduceCall(communicator, f"{label}.gradient", ScaledOp(Average))
        ctx.is_root = communicator.rank == root
        result: Tensor = handles.synchronize(_start(communicator, label, root, tensor, in_place=False))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (averaged,) = AllReduce.apply(ctx.call, gradient)
        return None, None, None, averaged if ctx.is_root else averaged * 0
