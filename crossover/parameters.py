"""Which parameters an optimizer holds, what they are called, and whether all ranks agree on them."""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from crossover.comm.communicator import Communicator
from crossover.errors import RankMismatchError


@dataclass(frozen=True, slots=True, eq=False)
class NamedParameter:
    """A parameter of the optimizer with the name used in messages and records."""

    name: str
    tensor: Tensor

    @property
    def description(self) -> str:
        """Name, shape and dtype, equal on two ranks exactly if the parameters match."""
        return f"{self.name} {tuple(self.tensor.shape)} {self.tensor.dtype}"


class ParameterBook:
    """The parameters of a user's optimizer as they are now: groups can be added, and parameters frozen and unfrozen.

    Args:
        optimizer: held weakly, so that wrapping does not keep it alive.
        named: see :func:`name_parameters`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        pairs = None if named is None else list(named)
        self._names = {id(p.tensor): p.name for p in name_parameters(self._all(), pairs)}
        # Some may be added to the optimizer later; held, so that no other tensor gets their id.
        self._named = [] if pairs is None else [tensor for _, tensor in pairs]
        self._names = {**_checked_names(pairs or []), **self._names}
        self._seen: list[int] | None = None
        self._frozen: list[Tensor] = []

    def _all(self) -> list[Tensor]:
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def changed(self) -> bool:
        """Whether parameters came, went or were unfrozen since :meth:`trainable` was last called."""
        return [id(p) for p in self._all()] != self._seen or any(p.requires_grad for p in self._frozen)

    def trainable(self) -> list[NamedParameter]:
        """The parameters that require a gradient, in group order."""
        parameters = self._all()
        self._seen = [id(parameter) for parameter in parameters]
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        return [
            NamedParameter(self._names.get(id(parameter), f"parameter {place}"), parameter)
            for place, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]


def name_parameters(parameters: Sequence[Tensor], named: Iterable[tuple[str, Tensor]] | None) -> list[NamedParameter]:
    """Give each parameter of an optimizer its name.

    Args:
        parameters: the optimizer's parameters.
        named: ``model.named_parameters()`` or pairs like it; may name more parameters than the optimizer has, and one
            parameter more than once (tied weights: the first name counts). ``None``: names are made from positions.

    Raises:
        ValueError: pairs of the wrong type, one name for two parameters, or a parameter without a name.
    """
    if named is None:
        return [NamedParameter(f"parameter {place}", parameter) for place, parameter in enumerate(parameters)]
    names = _checked_names(named)
    unnamed = [place for place, parameter in enumerate(parameters) if id(parameter) not in names]
    if unnamed and not names:
        raise ValueError(
            "named_parameters: is empty; a generator can be walked only once, pass model.named_parameters() "
            "anew or list(model.named_parameters())"
        )
    if unnamed:
        shapes = ", ".join(f"number {place} of shape {tuple(parameters[place].shape)}" for place in unnamed[:5])
        raise ValueError(
            f"named_parameters: {len(unnamed)} of the optimizer's {len(parameters)} parameters have no name "
            f"({shapes}); pass the named_parameters() of every model that this optimizer updates, or leave the "
            "argument out"
        )
    return [NamedParameter(names[id(parameter)], parameter) for parameter in parameters]


def _checked_names(named: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    names: dict[int, str] = {}
    owners: dict[str, int] = {}
    for entry in named:
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise ValueError(
                f"named_parameters: holds {entry!r:.80}; each entry has to be a pair (name, parameter) "
                "as model.named_parameters() gives"
            )
        name, parameter = entry
        if not isinstance(parameter, Tensor):
            raise ValueError(f"named_parameters: {name!r} is a {type(parameter).__name__}, not a parameter")
        if owners.setdefault(name, id(parameter)) != id(parameter):
            raise ValueError(
                f"named_parameters: {name!r} names two parameters; with several models, tell them apart with a prefix, "
                f"such as [(f'generator.{{n}}', p) for n, p in generator.named_parameters()]"
            )
        names.setdefault(id(parameter), name)
    return names


def agree(
    communicator: Communicator, parameters: Sequence[NamedParameter], options: dict[str, Any], *, name: str
) -> None:
    """Make sure that every rank holds the same parameters and options. Collective.

    Raises:
        RankMismatchError: on every rank, with the first difference named.
    """
    entries = [(parameter.name, parameter.description) for parameter in parameters]
    entries += [(key, f"{key}={value}") for key, value in sorted(options.items())]
    digest = hashlib.sha256("\n".join(text for _, text in entries).encode()).digest()
    digests = communicator.all_gather_object(digest, name=f"{name}.digest")
    if len(set(digests)) == 1:
        return
    everyone = communicator.all_gather_object(entries, name=f"{name}.entries")
    place = next(place for place, other in enumerate(everyone) if other != everyone[0])
    mine, theirs = _first_difference(everyone[0], everyone[place])
    raise RankMismatchError(
        f"DistributedOptimizer: ranks disagree: rank {communicator.ranks[0]} has {mine} where rank "
        f"{communicator.ranks[place]} has {theirs}; build the same model and the same optimizer, with the same "
        "options, on every rank"
    )


def _first_difference(mine: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Words for the first entry that differs between two ranks: a missing name comes before a different order."""
    here, there = dict(mine), dict(theirs)
    for key, text in mine:
        if there.get(key) != text:
            return text, there.get(key, "nothing of that name")
    for key, text in theirs:
        if key not in here:
            return "nothing of that name", text
    return next(
        (f"{one} as number {number}", other)
        for number, ((_, one), (_, other)) in enumerate(zip(mine, theirs, strict=True))
        if one != other
    )


def checksum(tensor: Tensor) -> int:
    """A number that is equal for bit-equal tensors and very likely different otherwise; order of elements counts."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    # not view(-1): where there is one element a contiguous tensor may have any stride, and cannot be seen as bytes then
    values = values.contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8)
    padded = torch.nn.functional.pad(values, (0, -values.numel() % 8)).view(torch.int64)
    weights = torch.arange(1, padded.numel() + 1, device=padded.device, dtype=torch.int64) * 2 + 1
    return int((padded * weights).sum().item()) if padded.numel() else 0


def require_equal_weights(
    communicator: Communicator, parameters: Sequence[NamedParameter], sums: Sequence[Sequence[int]]
) -> None:
    """Compare the checksums gathered from all ranks.

    Raises:
        RankMismatchError: on every rank, naming the first parameter whose values differ.
    """
    for number, parameter in enumerate(parameters):
        values = [rank_sums[number] for rank_sums in sums]
        for place, value in enumerate(values):
            if value != values[0]:
                raise RankMismatchError(
                    f"parameter {parameter.name!r}: rank {communicator.ranks[place]} started with other values than "
                    f"rank {communicator.ranks[0]}; call crossover.broadcast_parameters(model.state_dict(), "
                    "root_rank=0) before training"
                )


def held_by_ddp(parameters: Sequence[NamedParameter]) -> str | None:
    """The name of a parameter that a living ``DistributedDataParallel`` holds too, if there is one."""
    names = {id(parameter.tensor): parameter.name for parameter in parameters}
    living = gc.get_objects()
    kinds = {kind for kind in set(map(type, living)) if issubclass(kind, DistributedDataParallel)}
    for module in living if kinds else ():
        if type(module) in kinds:
            for tensor in module.parameters():
                if id(tensor) in names:
                    return names[id(tensor)]
    return None


def refuse_ddp(names: Sequence[str | None]) -> None:
    """Raise on every rank if one of them has a parameter in ``DistributedDataParallel``; ``names`` is one entry a rank.

    Both would average, into the same memory and with no order between them: training would be wrong without a word.
    """
    name = next((name for name in names if name is not None), None)
    if name is not None:
        raise ValueError(
            f"parameter {name!r}: belongs to a DistributedDataParallel model, which averages gradients itself; train "
            "the bare model (with Accelerate, leave the model out of prepare()), or keep the bare optimizer"
        )
