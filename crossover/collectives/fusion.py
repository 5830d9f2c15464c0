"""Sending many small tensors as few large ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

ALONE_BYTES = 1 << 20  # above this, what copying costs is more than what a collective of its own costs
FUSED_BYTES = 16 << 20


def plan(nbytes: Sequence[int], kinds: Sequence[Hashable]) -> list[list[int]]:
    """Which tensors travel together: those of one kind, in order, up to 16 MiB; one of 1 MiB or more goes alone.

    Depends on sizes and kinds only, so that all ranks come to the same. Tensors without elements are left out.

    Example:
        >>> plan([8, 4, 0, 8], ["float", "int", "float", "float"])
        [[0, 3], [1]]
    """
    packs: list[list[int]] = []
    opened: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        if not size:
            continue
        if size >= ALONE_BYTES:
            packs.append([index])
            continue
        if kind not in opened or filled[kind] + size > FUSED_BYTES:
            opened[kind] = []
            filled[kind] = 0
            packs.append(opened[kind])
        opened[kind].append(index)
        filled[kind] += size
    return packs


def join(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of contiguous tensors of one dtype, one after the other; a single one is not copied."""
    if len(tensors) == 1:
        return tensors[0].view(-1)
    return torch.cat([tensor.view(-1) for tensor in tensors])


def split(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into ``joined`` with the shapes of ``like``."""
    parts = joined.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def assign(target: Tensor, value: Tensor) -> None:
    """Copy ``value`` into ``target``, whatever its strides; one whose elements share memory is written once."""
    target = target.detach()
    for dimension, (length, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and length > 1:
            target = target.narrow(dimension, 0, 1)
            value = value.narrow(dimension, 0, 1)
    # strides may differ where there is one element, as of a 1x1 channels-last kernel, and are then no other layout
    alike = target.stride() == value.stride() or (target.is_contiguous() and value.is_contiguous())
    if target.data_ptr() != value.data_ptr() or not alike:
        target.copy_(value)
