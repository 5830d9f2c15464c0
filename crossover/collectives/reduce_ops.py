"""Horovod's reduction constants, and what each means to a communicator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator, ReduceOp

# plain integers with Horovod's values, so that scripts which store or compare them keep working
Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

NAMES = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}
_WIRE_OPS = {
    Average: ReduceOp.SUM,
    Sum: ReduceOp.SUM,
    Adasum: ReduceOp.SUM,  # only ever over one rank, where it is the identity
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}
_WIDER = {
    torch.bool: (torch.uint8, torch.int32),
    torch.uint8: (torch.int32, torch.int64),
    torch.int8: (torch.int32, torch.int64),
    torch.int16: (torch.int32, torch.int64),
    torch.uint16: (torch.int32, torch.int64),
    torch.float16: (torch.float32,),
    torch.bfloat16: (torch.float32,),
}

_SMALL_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16)  # the sum behind an average may not fit


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction meant by ``op`` and the deprecated ``average``.

    Raises:
        ValueError: both are given, or ``op`` is none of Horovod's.
    """
    if average is not None:
        if op is not None:
            raise ValueError("average: replaced by op, give one of them only; average=True is op=crossover.Average")
        warnings.warn(
            "average= is deprecated: write op=crossover.Average or op=crossover.Sum", DeprecationWarning, stacklevel=4
        )
        return Average if average else Sum
    if op is None:
        return Average
    if isinstance(op, bool) or op not in NAMES:
        raise ValueError(f"op: {op!r} is no reduction; use crossover.{', crossover.'.join(NAMES.values())}")
    return int(op)


def check_adasum(op: int, communicator: Communicator) -> None:
    """Refuse Adasum where more than one rank takes part: no backend here computes it."""
    if op == Adasum and communicator.size > 1:
        raise ValueError(
            f"op: Adasum is not available on the {communicator.backend} backend; use op=crossover.Average, or run the "
            "script with horovod.torch built with MPI (HOROVOD_WITH_MPI=1), where Horovod computes it"
        )


@dataclass(frozen=True, slots=True)
class ScaledOp:
    """How one tensor is reduced: the operation and Horovod's two factors.

    Attributes:
        op: one of the constants above.
        prescale: factor before the reduction; integers are truncated towards zero, as in Horovod.
        postscale: factor after it.
    """

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def wire_op(self) -> ReduceOp:
        """What the communicator computes."""
        return _WIRE_OPS[self.op]

    def refuse(self, dtype: torch.dtype) -> None:
        """Raise ``ValueError`` if the operation has no meaning for ``dtype``."""
        if dtype is torch.bool and (self.op in (Average, Adasum) or self.prescale != 1 or self.postscale != 1):
            raise ValueError(
                f"op: {NAMES[self.op]} with factors {self.prescale} and {self.postscale} has no meaning for bool "
                "tensors; use op=crossover.Max (true on any rank), crossover.Min (true on all), or tensor.float()"
            )
        if dtype.is_complex and self.op in (Min, Max, Product):
            raise ValueError(
                f"op: {NAMES[self.op]} is not defined here for {dtype}; use crossover.Sum or crossover.Average, "
                "or reduce torch.view_as_real(tensor)"
            )

    def before(self, tensor: Tensor) -> Tensor:
        """``tensor`` times the first factor; the tensor itself where that is 1."""
        if self.prescale == 1.0:
            return tensor
        if tensor.is_floating_point():
            return tensor * self.prescale
        return (tensor.double() * self.prescale).to(tensor.dtype)

    def after_(self, tensor: Tensor, size: int) -> Tensor:
        """Apply in place what is left to apply to ``tensor``, a result over ``size`` ranks."""
        if self.op == Average and size > 1:
            tensor.div_(size, rounding_mode=None if tensor.is_floating_point() else "trunc")
        if self.postscale != 1.0 and tensor.is_floating_point():
            tensor.mul_(self.postscale)
        elif self.postscale != 1.0:
            tensor.copy_(tensor.double() * self.postscale)
        return tensor


@dataclass(frozen=True, slots=True)
class Carrier:
    """The form in which a tensor is reduced where the backend does not take its dtype.

    Booleans travel as bytes, small integers and halves in a wider type, complex numbers as pairs of real ones.

    Attributes:
        dtype: of the tensor.
        wire_dtype: that travels; real.
        wire_op: what the communicator computes on it.
    """

    dtype: torch.dtype
    wire_dtype: torch.dtype
    wire_op: ReduceOp

    def load(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor to send, which may share memory with ``tensor``. Complex gains a last dimension of 2."""
        tensor = tensor.contiguous().resolve_conj()
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return real.to(self.wire_dtype)

    def unload(self, wire: Tensor) -> Tensor:
        """The tensor that ``wire`` stands for."""
        if self.dtype.is_complex:
            return torch.view_as_complex(wire).to(self.dtype)
        return wire.to(self.dtype)


def choose_carrier(scaled: ScaledOp, dtype: torch.dtype, device: torch.device, communicator: Communicator) -> Carrier:
    """The first form of ``dtype`` that this communicator can reduce; depends on nothing that differs by rank.

    Raises:
        ValueError: there is none, or the operation has no meaning for ``dtype``.
    """
    scaled.refuse(dtype)
    wire_op = scaled.wire_op
    if dtype is torch.bool:
        # as numbers, true + true would not be true and a sum could wrap to false
        wire_op = ReduceOp.MAX if scaled.op in (Sum, Max) else ReduceOp.MIN
    real = dtype.to_real() if dtype.is_complex else dtype
    forms = _WIDER.get(real, ())
    reason = communicator.unsupported_reason(real, device)
    if dtype is not torch.bool and not (scaled.op == Average and dtype in _SMALL_INTEGERS):
        forms = (real, *forms)
    for form in forms:
        if communicator.unsupported_reason(form, device) is None:
            return Carrier(dtype, form, wire_op)
    raise ValueError(f"tensor: {dtype} on {device} cannot be reduced here: {reason}")


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as ``uint8`` of shape ``(rows, bytes per row)``: any dtype can be moved like that.

    A tensor without dimensions is one row. Shares memory with ``tensor``.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not tensor.numel():
        width = tensor.shape[1:].numel() * tensor.element_size()
        return torch.empty(rows, width, dtype=torch.uint8, device=tensor.device)
    # not view(-1): a contiguous tensor may have any stride where it has one element, and then cannot be seen as bytes
    flat = tensor.resolve_conj().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(rows, -1)


def from_bytes(wire: Tensor, like: Tensor) -> Tensor:
    """Rows of bytes as rows of a tensor with the dtype and the trailing dimensions of ``like``."""
    trailing = like.shape[1:]
    if not wire.numel():
        return torch.empty(wire.shape[0], *trailing, dtype=like.dtype, device=like.device)
    return wire.contiguous().view(like.dtype).reshape(wire.shape[0], *trailing)
