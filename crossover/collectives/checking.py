"""Whether ranks agree: what to say where they do not, and ``CROSSOVER_CHECK=1``.

On torch.distributed calls are matched by order, and an all-reduce of tensors that differ in shape hangs, fails or
returns nonsense, depending on the backend. With ``CROSSOVER_CHECK=1`` on every rank, each collective is preceded by
an exchange of its kind, name, shapes, dtypes and options, and a difference raises
:class:`~crossover.errors.RankMismatchError` on all ranks. It costs two small collectives per call and, under Horovod,
requires one order of calls on all ranks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator
from crossover.errors import RankMismatchError

CHECK_VARIABLE = "CROSSOVER_CHECK"


def checked(tensor: Tensor) -> Tensor:
    """``tensor`` itself, if it is a dense tensor; else ``ValueError``."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        raise ValueError(
            f"tensor: is a {type(tensor).__name__} of layout {getattr(tensor, 'layout', None)}; pass a dense "
            "torch.Tensor, or use sparse_allreduce_async for a sparse one"
        )
    return tensor


def describe(tensor: Tensor) -> str:
    """Dtype and shape in short, such as ``float32(3, 4)``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def describe_rows(tensor: Tensor) -> str:
    """The same without the number of rows, such as ``float32(rows, 4)``."""
    trailing = "".join(f", {length}" for length in tensor.shape[1:])
    return f"{str(tensor.dtype).removeprefix('torch.')}(rows{trailing})"


def verify(communicator: Communicator, label: str, facts: str) -> None:
    """With ``CROSSOVER_CHECK=1``: make sure that every rank is about to do the same. Otherwise nothing. Collective.

    Raises:
        RankMismatchError: on every rank.
    """
    if communicator.size == 1 or os.environ.get(CHECK_VARIABLE, "") in ("", "0"):
        return
    # one name for all calls, so that ranks which are about to do different things meet here
    said = communicator.all_gather_object(f"{label}: {facts}", name="crossover.check")
    require_equal(communicator, "collective", said)


def require_equal(communicator: Communicator, subject: str, said: Sequence[Any]) -> None:
    """Raise :class:`RankMismatchError` naming the ranks if ``said``, one entry a rank, holds different values."""
    if all(value == said[0] for value in said):
        return
    holders: dict[str, list[int]] = {}
    for place, value in enumerate(said):
        holders.setdefault(str(value), []).append(communicator.ranks[place])
    parts = [f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {value}" for value, r in holders.items()]
    raise RankMismatchError(
        f"{subject}: ranks disagree - {'; '.join(parts)}; make the same calls with equal shapes and options"
    )


def exchange(communicator: Communicator, label: str, numbers: Sequence[int], facts: str) -> list[list[int]]:
    """Every rank's ``numbers``, after making sure that ``facts`` are equal everywhere. Collective, and waits.

    Args:
        communicator: the ranks.
        label: name of the collective for which this is done.
        numbers: as many on every rank.
        facts: words that have to be the same on all ranks.

    Raises:
        RankMismatchError: on every rank, with what each of them said.
    """
    control = communicator.control_device
    mine = torch.tensor([zlib.crc32(facts.encode()), *numbers], dtype=torch.int64, device=control)
    everyone = torch.zeros(communicator.size, mine.numel(), dtype=torch.int64, device=control)
    communicator.all_gather(everyone, mine, name=f"{label}.sizes").wait()
    rows: list[list[int]] = everyone.tolist()
    if any(row[0] != rows[0][0] for row in rows):
        said = communicator.all_gather_object(facts, name=f"{label}.facts")
        require_equal(communicator, label, said)
    return [row[1:] for row in rows]
