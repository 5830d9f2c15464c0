"""Giving every rank the optimizer state of one, without a step being taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossover.collectives import handles
from crossover.collectives.checking import require_equal
from crossover.collectives.model_state import broadcast_tensors
from crossover.collectives.objects import dumps, loads
from crossover.collectives.process_sets import ProcessSet, global_process_set, group_rank, members
from crossover.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in a pickled structure.

    Attributes:
        number: position among the tensors that travel.
        dtype: of the tensor.
        shape: of the tensor.
        device: where it lives on the root; ``None``: where its parameter does.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str | None


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the optimizer state and the options (learning rate, ...) of rank ``root_rank``.

    Nothing is stepped: a fresh optimizer stays fresh, parameters stay as they are, and state that only the root has
    is made on the other ranks; state that the root does not have is removed. Types are kept: numbers, strings,
    ``None``, tensors, and structures of them, as in ``LBFGS``. Tensors of the same shape and dtype are overwritten in
    place, so that a tensor learning rate shared with a scheduler stays shared.

    Args:
        optimizer: any ``torch.optim.Optimizer``, wrapped by ``DistributedOptimizer`` or not, with the same parameter
            groups on every rank.
        root_rank: who sends, by its number in the whole job.
        model: not needed; Horovod's callers pass it for sparse parameters.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``optimizer`` is no optimizer, or ``root_rank`` takes no part.
        RankMismatchError: parameter groups differ; raised on every rank.
        CommunicationError: a rank failed or did not come within the time-out.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
        >>> xo.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer: is a {type(optimizer).__name__}; pass a torch.optim.Optimizer")
    communicator = members(process_set)
    root = group_rank(communicator, root_rank)
    label = handles.full_name(communicator, "broadcast_optimizer_state", None)
    if communicator.size > 1:
        share_optimizer_state(communicator, optimizer, root, label)


def share_optimizer_state(communicator: Communicator, optimizer: torch.optim.Optimizer, root: int, label: str) -> None:
    """:func:`broadcast_optimizer_state` from group rank ``root``, under a name for its collectives."""
    layout = [[tuple(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
    said = [f"{type(optimizer).__name__} with parameter shapes by group {layout}"]
    require_equal(communicator, "optimizer", communicator.all_gather_object(said, name=f"{label}.layout"))
    tensors: list[Tensor] = []
    if communicator.rank == root:
        sent = _taken_apart(optimizer, tensors)
        communicator.broadcast_object(dumps(sent), root, name=f"{label}.structure")
    else:
        received = loads(communicator.broadcast_object(None, root, name=f"{label}.structure"))
        _put_together(optimizer, received, tensors)
    broadcast_tensors(communicator, tensors, root, f"{label}.tensors")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _taken_apart(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> dict[str, Any]:
    """The root's options and state with a :class:`_Place` for each tensor; the tensors themselves go to ``tensors``."""
    parameters = _parameters(optimizer)
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    options = [{k: _replaced(v, None, tensors) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = []
    for key, value in optimizer.state.items():
        owner = parameters[numbers[id(key)]] if id(key) in numbers else None
        state.append((None if owner is not None else key, numbers.get(id(key)), _replaced(value, owner, tensors)))
    return {"options": options, "state": state}


def _replaced(value: Any, owner: Tensor | None, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors.append(value)
        with_owner = owner is not None and value.device == owner.device
        return _Place(len(tensors) - 1, value.dtype, tuple(value.shape), None if with_owner else value.device.type)
    if type(value) is dict:
        return {key: _replaced(entry, owner, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(entry, owner, tensors) for entry in value)
    return value


def _put_together(optimizer: torch.optim.Optimizer, received: dict[str, Any], tensors: list[Tensor]) -> None:
    """Make this rank's options and state like the root's, with tensors to be filled in ``tensors``."""
    parameters = _parameters(optimizer)
    for group, options in zip(optimizer.param_groups, received["options"], strict=True):
        for key in [key for key in group if key != "params" and key not in options]:
            del group[key]
        for key, value in options.items():
            group[key] = _restored(value, group.get(key), None, tensors)
    state: dict[Any, Any] = {}
    for key, number, value in received["state"]:
        owner = None if number is None else parameters[number]
        held = optimizer.state.get(key if owner is None else owner)
        state[key if owner is None else owner] = _restored(value, held, owner, tensors)
    optimizer.state.clear()
    optimizer.state.update(state)


def _restored(value: Any, held: Any, owner: Tensor | None, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        tensor = _tensor_for(value, held, owner)
        tensors.append(tensor)
        return tensor
    if type(value) is dict:
        entries = held if isinstance(held, dict) else {}
        return {key: _restored(entry, entries.get(key), owner, tensors) for key, entry in value.items()}
    if type(value) in (list, tuple):
        parts = held if isinstance(held, list | tuple) and len(held) == len(value) else [None] * len(value)
        return type(value)(_restored(entry, part, owner, tensors) for entry, part in zip(value, parts, strict=True))
    return value


def _tensor_for(place: _Place, held: Any, owner: Tensor | None) -> Tensor:
    device = owner.device if place.device is None and owner is not None else torch.device(place.device or "cpu")
    if (
        isinstance(held, Tensor)
        and held.layout is torch.strided
        and (held.dtype, tuple(held.shape), held.device.type) == (place.dtype, place.shape, device.type)
    ):
        return held
    if owner is not None and (owner.dtype, tuple(owner.shape), owner.device) == (place.dtype, place.shape, device):
        return torch.zeros_like(owner)  # with its strides too, as the optimizer itself would make it
    return torch.zeros(place.shape, dtype=place.dtype, device=device)
