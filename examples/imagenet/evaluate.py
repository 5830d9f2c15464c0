"""Accuracy over all ranks, every image counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from recipe import top_k_correct
from torch import Tensor, nn

import crossover as xo


@dataclass(frozen=True)
class Accuracy:
    """Shares of all images of all ranks, and their mean loss."""

    top1: float
    top5: float
    loss: float
    images: int


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    forward: Callable[[nn.Module, Tensor], Tensor],
    device: torch.device,
    expected: int,
) -> Accuracy:
    """Evaluate on this rank's share and sum over ranks. Collective; ranks may have different numbers of batches.

    Args:
        model: is in evaluation mode during the call and as before afterwards.
        batches: this rank's share, on the device. No collective happens while it is walked.
        forward: from the model and images to logits, under the run's precision.
        device: where sums are kept.
        expected: images in the whole set.

    Raises:
        RuntimeError: all ranks together did not see ``expected`` images.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # right in 1, right in 5, loss, images
    for images, targets in batches:
        logits = forward(model, images).float()
        top1, top5 = top_k_correct(logits, targets, 1), top_k_correct(logits, targets, 5)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack([top1.double(), top5.double(), loss.double(), torch.full_like(loss, len(targets)).double()])
    model.train(training)
    top1, top5, loss, count = xo.allreduce(sums, op=xo.Sum, name="evaluate").tolist()
    if round(count) != expected:
        raise RuntimeError(
            f"evaluation: {round(count)} images were counted, the set has {expected}; do all ranks see one tree?"
        )
    return Accuracy(top1 / count, top5 / count, loss / count, round(count))


@torch.no_grad()
def average_buffers(model: nn.Module) -> None:
    """Make floating-point buffers, such as the running statistics of BatchNorm, their mean over ranks. Collective.

    Each rank has estimated them from its own images. Updates of running statistics are linear, so averaging them here
    and there changes no later average but by rounding.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if not buffers or xo.size() == 1:
        return
    flat = torch.cat([buffer.flatten().float() for buffer in buffers])
    flat = xo.allreduce(flat, op=xo.Sum, name="buffers") / xo.size()
    means = torch.split_with_sizes(flat, [buffer.numel() for buffer in buffers])
    for buffer, mean in zip(buffers, means, strict=True):
        buffer.copy_(mean.view_as(buffer))
