"""Giving every rank the parameters of one: thousands of tensors in a few collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.collectives import fusion, handles
from crossover.collectives.checking import describe, exchange
from crossover.collectives.process_sets import ProcessSet, global_process_set, group_rank, members
from crossover.collectives.reduce_ops import as_bytes
from crossover.comm.communicator import Communicator


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int = 0,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the tensors on every rank with those of rank ``root_rank``, exactly, whatever their dtype and strides.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()`` or a list of such
            entries; the same names, shapes and dtypes on every rank, in any order where there are names in a mapping.
        root_rank: who sends, by its number in the whole job.
        process_set: the ranks that take part.

    Raises:
        ValueError: an entry is no dense tensor, or ``root_rank`` takes no part.
        RankMismatchError: names, shapes or dtypes differ; raised on every rank.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> model = torch.nn.Linear(2, 2)
        >>> xo.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    communicator = members(process_set)
    root = group_rank(communicator, root_rank)
    named = _entries(params)
    label = handles.full_name(communicator, "broadcast_parameters", None)
    if communicator.size == 1:
        return
    exchange(communicator, label, [], "; ".join(f"{name} {describe(tensor)}" for name, tensor in named))
    broadcast_tensors(communicator, [tensor for _, tensor in named], root, label)


def _entries(params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor]) -> list[tuple[str, Tensor]]:
    if isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        raise ValueError(f"params: is a {type(params).__name__}; pass model.state_dict() or model.named_parameters()")
    listed: Sequence[Any] = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    named = []
    for number, entry in enumerate(listed):
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"tensor {number}", entry)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(
                f"params: {name!r} is {kind}, not a dense tensor; leave it out and send it with "
                "crossover.broadcast_object"
            )
        named.append((str(name), tensor))
    return named


@torch.no_grad()
def broadcast_tensors(communicator: Communicator, tensors: Sequence[Tensor], root: int, label: str) -> None:
    """Overwrite ``tensors`` with those of group rank ``root``. Shapes and dtypes have to be equal on all ranks."""
    wires = [_reachable(communicator, as_bytes(tensor.detach().contiguous())) for tensor in tensors]
    packs = fusion.plan([wire.numel() for wire in wires], [wire.device for wire in wires])
    works = []
    buffers = []
    for number, pack in enumerate(packs):
        buffers.append(fusion.join([wires[index] for index in pack]))
        works.append(communicator.broadcast(buffers[-1], root, name=f"{label}.{number}"))
    for pack, buffer, work in zip(packs, buffers, works, strict=True):
        work.wait()
        if communicator.rank == root:
            continue
        for index, wire in zip(pack, fusion.split(buffer, [wires[i] for i in pack]), strict=True):
            target = tensors[index]
            wires[index].copy_(wire)  # a place of its own for it, aligned for its dtype
            fusion.assign(target, wires[index].view(-1).view(target.dtype).view(target.shape))


def _reachable(communicator: Communicator, wire: Tensor) -> Tensor:
    """``wire`` where the backend can send from: optimizers count steps in host memory, which NCCL does not read."""
    if communicator.unsupported_reason(wire.dtype, wire.device) is None:
        return wire
    return wire.to(communicator.control_device)
