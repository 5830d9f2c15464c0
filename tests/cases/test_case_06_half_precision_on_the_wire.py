"""Situation 6: gradients travel, or live, in half precision.

Where a sum is divided after it was taken, two gradients of 40,000 overflow although their mean does not, the sooner
the more ranks there are; and some backends lack operations on half precision on the CPU, which shows in the middle of
training. With us an average is divided before it is summed, whatever the compression, the dtype of the model or the
schedule; and what cannot be reduced is refused when the optimizer is wrapped, with the parameter and a way out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from crossover.attachment import Attachment
from tests.cases import invariants
from tests.cases.invariants import Job
from tests.harness import run_ranks

LARGE = 40_000.0


class Scale(nn.Module):
    """Its loss has the same gradient for every element of ``weight``, whatever the weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(9, 5, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(3, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum() + (self.bias * gradient).sum()


def gradients(job: Job) -> Tensor:
    """What ``step()`` was given for each parameter, read from the update with a learning rate of one."""
    job.optimizer.flush()
    return -torch.cat([parameter.detach().flatten().double() for parameter in job.model.parameters()])


def mean_of_large_gradients(dtype: torch.dtype, **options: Any) -> None:
    model = Scale(dtype)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)
    model(LARGE).backward()
    job.optimizer.step()
    model(0.0)  # where the Priority schedule updates
    update = gradients(job)
    exact = xo.size() == 2 and dtype is not torch.bfloat16  # which rounds 40,000
    rounding = 0.0 if exact else LARGE * 2**-7
    torch.testing.assert_close(update, torch.full_like(update, LARGE), rtol=0, atol=rounding)
    job.check(steps=1)


def large_gradients() -> None:
    invariants.start()
    for schedule in ("overlapped", "priority", "fifo_delayed", "deft"):
        for dtype in (torch.float32, torch.float64, torch.float16):
            mean_of_large_gradients(dtype, compression=xo.Compression.fp16, schedule=schedule)
        for dtype in (torch.float16, torch.bfloat16):
            mean_of_large_gradients(dtype, schedule=schedule)
            mean_of_large_gradients(dtype, schedule=schedule, gradient_predivide_factor=float(xo.size()))


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_of_large_gradients_is_finite(size: int) -> None:
    run_ranks(large_gradients, size)


class ToFloat8:
    """A compressor that a user wrote, to a dtype that no backend sums."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return tensor.to(torch.float8_e4m3fn), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


def refused(model: nn.Module, words: str, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=words):
        xo.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    assert Attachment.of(optimizer) is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def unsupported() -> None:
    invariants.start()
    model = Scale(torch.float32)
    model.weight.data = model.weight.data.to(torch.float8_e4m3fn)
    refused(model, r"weight.*float8_e4m3fn.*cast to float16 or bfloat16")
    model = Scale(torch.float32)
    refused(model, r"compression.*ToFloat8.*float8_e4m3fn.*cast to float16 or bfloat16", compression=ToFloat8)
    job = Job(model, torch.optim.SGD(model.parameters(), lr=1.0), compression=xo.Compression.fp16)  # the way out
    model(LARGE).backward()
    job.optimizer.step()
    assert gradients(job).tolist() == [LARGE] * 48
    job.check(steps=1)


def test_what_cannot_be_reduced_is_refused_when_wrapping() -> None:
    run_ranks(unsupported, 2)
