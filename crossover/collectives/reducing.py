"""How a list of tensors is all-reduced, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crossover.collectives import fusion, handles
from crossover.collectives.checking import describe, verify
from crossover.collectives.handles import Started
from crossover.collectives.reduce_ops import NAMES, Carrier, Max, Min, Product, ScaledOp, Sum, choose_carrier
from crossover.comm.communicator import Communicator


@dataclass(frozen=True, slots=True)
class ReduceCall:
    """An all-reduce with all arguments resolved but the tensors.

    Attributes:
        communicator: the ranks that take part.
        label: name on the wire.
        scaled: the operation and its factors.
    """

    communicator: Communicator
    label: str
    scaled: ScaledOp

    def start(self, tensors: Sequence[Tensor], *, single: bool = False, in_place: bool = False) -> int:
        """Start it and return the handle; ``single`` makes the result a tensor rather than a list."""
        return handles.start(self.communicator, self.label, lambda: self._launch(tensors, single, in_place))

    def _launch(self, originals: Sequence[Tensor], single: bool, in_place: bool) -> Started:
        tensors = [tensor.detach() for tensor in originals]
        scaled = self.scaled
        factors = f"{NAMES[scaled.op]} x{scaled.prescale} x{scaled.postscale}"
        verify(self.communicator, self.label, f"{factors} of {', '.join(map(describe, tensors))}")
        carriers = [choose_carrier(scaled, t.dtype, t.device, self.communicator) for t in tensors]
        wires = [scaled.before(c.load(t)) for c, t in zip(carriers, tensors, strict=True)]
        kinds = [(c.wire_dtype, c.wire_op, t.device) for c, t in zip(carriers, tensors, strict=True)]
        packs = fusion.plan([wire.numel() * wire.element_size() for wire in wires], kinds)
        buffers = []
        works = []
        for number, pack in enumerate(packs):
            buffer = fusion.join([wires[index] for index in pack])
            if not in_place and buffer.data_ptr() == tensors[pack[0]].data_ptr():
                buffer = buffer.clone()
            buffers.append(buffer)
            name = self.label if len(packs) == 1 else f"{self.label}.{number}"
            works.append(self.communicator.all_reduce(buffer, carriers[pack[0]].wire_op, name=name))

        def finish() -> Any:
            reduced = self._unpack(tensors, wires, carriers, packs, buffers)
            if in_place:
                for tensor, result in zip(tensors, reduced, strict=True):
                    fusion.assign(tensor, result)
                reduced = list(originals)
            return reduced[0] if single else reduced

        return Started(works, finish)

    @torch.no_grad()
    def _unpack(
        self,
        tensors: Sequence[Tensor],
        wires: Sequence[Tensor],
        carriers: Sequence[Carrier],
        packs: Sequence[Sequence[int]],
        buffers: Sequence[Tensor],
    ) -> list[Tensor]:
        results = [tensor if tensor.numel() else torch.empty_like(tensor) for tensor in tensors]
        for pack, buffer in zip(packs, buffers, strict=True):
            self.scaled.after_(buffer, self.communicator.size)
            for index, wire in zip(pack, fusion.split(buffer, [wires[i] for i in pack]), strict=True):
                result = carriers[index].unload(wire)
                # parts of one buffer would keep it alive, and autograd refuses to modify them in place
                results[index] = result.clone() if len(pack) > 1 else result
        return results


class AllReduce(torch.autograd.Function):
    """Differentiable form of :class:`ReduceCall`, once and again where the operation is linear."""

    @staticmethod
    def forward(ctx: Any, call: ReduceCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Reduce ``tensors``."""
        outputs = tuple(handles.synchronize(call.start(tensors)))
        ctx.call = call
        if call.scaled.op in (Min, Max, Product):
            ctx.save_for_backward(*tensors, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce the gradients; what is saved decides who gets them where the operation is not linear."""
        call: ReduceCall = ctx.call
        linear = call.scaled.op not in (Min, Max, Product)
        spec = call.scaled if linear else ScaledOp(Sum)
        reduced = AllReduce.apply(ReduceCall(call.communicator, f"{call.label}.gradient", spec), *gradients)
        if not linear:
            inputs, outputs = ctx.saved_tensors[: len(gradients)], ctx.saved_tensors[len(gradients) :]
            share = (
                _product_shares(call, inputs) if call.scaled.op == Product else _extreme_shares(call, inputs, outputs)
            )
            reduced = [gradient * part for gradient, part in zip(reduced, share, strict=True)]
        return (None, *reduced)


def _extreme_shares(call: ReduceCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Derivative of a minimum or maximum: in equal parts to the ranks that hold it."""
    factor = call.scaled.prescale * call.scaled.postscale
    held = []
    for x, y in zip(inputs, outputs, strict=True):
        carrier = choose_carrier(call.scaled, x.dtype, x.device, call.communicator)
        alone = carrier.unload(call.scaled.after_(call.scaled.before(carrier.load(x)).clone(), 1))
        held.append((alone == y).to(x.dtype))
    holders = ReduceCall(call.communicator, f"{call.label}.holders", ScaledOp(Sum))
    totals = handles.synchronize(holders.start(held))
    return [mask * factor / total for mask, total in zip(held, totals, strict=True)]


def _product_shares(call: ReduceCall, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Derivative of a product: that of the other ranks' values, not ``output / input``, as an input may be zero."""
    communicator = call.communicator
    factor = call.scaled.postscale * call.scaled.prescale**communicator.size
    shares = []
    for number, x in enumerate(inputs):
        sent = x.detach().contiguous().view(-1).view(torch.uint8)
        everyone = torch.empty(communicator.size, sent.numel(), dtype=torch.uint8, device=x.device)
        communicator.all_gather(everyone, sent, name=f"{call.label}.factors.{number}").wait()
        others = everyone.view(x.dtype)
        others[communicator.rank] = 1
        shares.append(others.prod(dim=0).view(x.shape) * factor)
    return shares
