"""How tensors travel: Horovod's ``Compression``, with bfloat16 beside its fp16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from crossover.reduction import Compressor


class NoneCompressor:
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        """The tensor, and nothing to remember."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        """The tensor."""
        return tensor


class FP16Compressor:
    """Sends floating point tensors as float16. A sum over 65504 overflows; prefer averages of scaled values."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """The tensor to send and its dtype; other than floating point tensors are sent as they are."""
        return _narrowed(tensor, torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """The tensor in its first dtype."""
        return tensor.to(ctx)


class BF16Compressor:
    """Sends floating point tensors as bfloat16: the range of float32 with 8 bits of precision."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """The tensor to send and its dtype; other than floating point tensors are sent as they are."""
        return _narrowed(tensor, torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """The tensor in its first dtype."""
        return tensor.to(ctx)


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    narrows = tensor.is_floating_point() and tensor.element_size() > 2
    return tensor.to(dtype) if narrows else tensor


class Compression:
    """The compressors to choose from. Any class with the same two static methods will do instead.

    Attributes:
        none: no compression, the default.
        fp16: float16 on the wire.
        bf16: bfloat16 on the wire; not in Horovod.

    Example:
        >>> import torch
        >>> from crossover.collectives import Compression
        >>> sent, kept = Compression.fp16.compress(torch.ones(3))
        >>> sent.dtype, Compression.fp16.decompress(sent, kept).dtype
        (torch.float16, torch.float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def compressor_of(choice: type[Compressor] | str) -> type[Compressor]:
    """The compressor itself, or one by name; whether it is one is checked where it is used.

    Args:
        choice: a compressor, or ``"none"``, ``"fp16"`` or ``"bf16"``.

    Raises:
        ValueError: no compressor has this name.

    Example:
        >>> compressor_of("fp16") is Compression.fp16
        True
    """
    if not isinstance(choice, str):
        return choice
    known: dict[str, type[Compressor]] = {
        "": NoneCompressor,
        "none": NoneCompressor,
        "fp16": FP16Compressor,
        "bf16": BF16Compressor,
    }
    found = known.get(choice.strip().lower())
    if found is None:
        raise ValueError(
            f"compression: is {choice!r}; use 'none', 'fp16' or 'bf16', or a class with static compress(tensor) and "
            "decompress(tensor, ctx)"
        )
    return found
