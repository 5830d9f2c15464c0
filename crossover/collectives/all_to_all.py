"""All-to-all: each rank sends some of its rows to every rank.

Each call first exchanges how many rows go where and makes sure that dtypes and trailing dimensions agree, and waits for
that; the rows themselves travel while the caller goes on. Calls are matched between ranks by their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.collectives import handles
from crossover.collectives.checking import checked, describe_rows, exchange, verify
from crossover.collectives.handles import Started
from crossover.collectives.process_sets import ProcessSet, global_process_set, members
from crossover.collectives.reduce_ops import as_bytes, from_bytes
from crossover.comm.communicator import Communicator


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send consecutive rows of ``tensor`` to each rank, and return the rows that all ranks sent here. Differentiable.

    Args:
        tensor: same dtype and trailing dimensions on every rank, with one dimension or more; not modified.
        splits: how many rows go to each rank, in order of rank; any integer dtype. ``None``: equally many.
        name: for messages, and for matching calls under Horovod.
        process_set: the ranks that take part.

    Returns:
        The rows received, in order of rank; with ``splits`` also how many came from each rank, as a tensor of the
        dtype of ``splits`` (``int32`` for a list).

    Raises:
        ValueError: ``splits`` does not fit ``tensor`` or the number of ranks.
        RankMismatchError: dtypes or trailing dimensions differ; raised on every rank.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> xo.alltoall(torch.arange(2.0 * xo.size())).shape[0] == 2 * xo.size()
        True
    """
    communicator = members(process_set)
    label = handles.full_name(communicator, "alltoall", name)
    rows, received = _AllToAll.apply(communicator, label, _checked_splits(tensor, splits, communicator), tensor)
    return rows if splits is None else (rows, _like_splits(received, splits))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start :func:`alltoall`; :func:`synchronize` returns the pair (rows, received splits), as in Horovod."""
    communicator = members(process_set)
    label = handles.full_name(communicator, "alltoall", name)
    return _start_all_to_all(communicator, label, _checked_splits(tensor, splits, communicator), tensor, splits)


def _checked_splits(tensor: Tensor, splits: Tensor | Sequence[int] | None, communicator: Communicator) -> list[int]:
    if not checked(tensor).dim():
        raise ValueError("tensor: has no dimensions, so there are no rows to send")
    rows = tensor.shape[0]
    if splits is None:
        if rows % communicator.size:
            raise ValueError(
                f"tensor: its {rows} rows do not divide by {communicator.size} ranks; say which go where with splits="
            )
        return [rows // communicator.size] * communicator.size
    given = torch.as_tensor(splits)
    counts: list[int] = given.tolist() if given.dim() == 1 and not given.is_floating_point() else []
    if len(counts) != communicator.size or sum(counts) != rows or min(counts) < 0:
        raise ValueError(
            f"splits: is {given.tolist()}; has to be {communicator.size} whole numbers, one a rank, that add up to the "
            f"{rows} rows of tensor"
        )
    return counts


def _like_splits(received: Sequence[int] | Tensor, splits: Tensor | Sequence[int] | None) -> Tensor:
    given = splits if isinstance(splits, Tensor) else None
    if given is None:
        return torch.as_tensor(received, dtype=torch.int32)
    return torch.as_tensor(received, dtype=given.dtype, device=given.device)


def _start_all_to_all(
    communicator: Communicator,
    label: str,
    counts: list[int],
    original: Tensor,
    splits: Tensor | Sequence[int] | None = None,
) -> int:
    def launch() -> Started:
        tensor = original.detach().contiguous()
        facts = describe_rows(tensor)
        verify(communicator, label, facts)
        sent = exchange(communicator, label, counts, facts)
        received = [row[communicator.rank] for row in sent]
        wire = as_bytes(tensor)
        output = wire.new_empty(sum(received), wire.shape[1])
        works = []
        if wire.shape[1] and any(map(sum, sent)):
            works.append(communicator.all_to_all(output, wire, received, counts, name=label))
        return Started(works, lambda: (from_bytes(output, tensor), _like_splits(received, splits)))

    return handles.start(communicator, label, launch)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, communicator: Communicator, label: str, counts: list[int], tensor: Tensor
    ) -> tuple[Tensor, ...]:
        rows, received = handles.synchronize(_start_all_to_all(communicator, label, counts, tensor))
        ctx.communicator, ctx.label, ctx.received = communicator, label, received.tolist()
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        back, _ = _AllToAll.apply(ctx.communicator, f"{ctx.label}.gradient", ctx.received, gradient)
        return None, None, None, back
