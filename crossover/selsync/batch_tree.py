"""Batches as data loaders make them: tensors in tuples, lists and mappings, taken apart and put together again."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaf:
    """One tensor of a batch.

    Attributes:
        path: where it is in the batch, as Python would index it.
        dtype: of its elements.
        shape: of one sample.
    """

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.path}: {self.dtype} of shape {self.shape} a sample"


def tensors_of(batch: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in ``batch`` with its place, in a fixed order.

    Raises:
        ValueError: the batch holds something else than tensors, ``None``, tuples, lists and mappings.
    """
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_of(value, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for place, value in enumerate(batch):
            yield from tensors_of(value, f"{path}[{place}]")
    elif batch is not None:
        _refuse(path, batch)


def _refuse(path: str, value: Any) -> NoReturn:
    raise ValueError(
        f"{path}: is a {type(value).__name__}; a batch has to consist of tensors in tuples, lists and mappings: "
        "turn other values into tensors in the loader's collate_fn, or leave them out"
    )


def check_samples(path: str, tensor: Tensor, samples: int) -> None:
    """Refuse a tensor that does not hold ``samples`` samples.

    Raises:
        ValueError: its first dimension is another one, or it has none.
    """
    if tensor.layout is not torch.strided or tensor.dim() == 0 or len(tensor) != samples:
        raise ValueError(
            f"{path}: is a tensor of shape {tuple(tensor.shape)}; its first dimension has to be {samples}, "
            "local_batch_size: build the DataLoader with batch_size=injection.local_batch_size, drop_last=True"
        )


def rebuilt(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """``batch`` anew, with ``tensors`` in place of its own, in the order of :func:`tensors_of`."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        values = {key: rebuilt(value, tensors) for key, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        clone = copy.copy(batch)
        clone.update(values)
        return clone
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rebuilt(value, tensors) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(rebuilt(value, tensors) for value in batch)
    return batch


def sample_nbytes(tensor: Tensor, samples: int) -> int:
    """Bytes of ``samples`` samples of ``tensor``."""
    return samples * math.prod(tensor.shape[1:]) * tensor.element_size()


def first_difference(expected: Sequence[Leaf], found: Sequence[Leaf]) -> str:
    """For a message: where two batches are not built alike."""
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return f"{one} against {other}"
    return f"{len(expected)} tensors against {len(found)}"
