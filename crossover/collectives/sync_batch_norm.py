"""Batch normalisation over the batches of all ranks together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from crossover.collectives.process_sets import ProcessSet, global_process_set, members
from crossover.comm.communicator import Communicator


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` and ``3d`` with the statistics of the joined batch of all ranks.

    Works on CPUs and GPUs and with batches that differ in size between ranks, empty ones included. In training, each
    forward pass is one collective and each backward pass another: every rank runs the layer equally often. The
    gradients of weight and bias are this rank's share; averaging or summing them over ranks is the optimizer's, as
    with every parameter.

    Args:
        num_features: length of dimension 1 of the input.
        eps: added to the variance.
        momentum: weight of the new value in the running statistics; ``None`` for their plain average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether running statistics are kept; without them eval mode uses those of the batch too.
        process_set: the ranks whose batches are joined.

    Raises:
        ValueError: the input has fewer than two dimensions, or there is one value per channel over all ranks.

    Example:
        >>> import torch, crossover as xo
        >>> xo.init()
        >>> layer = xo.SyncBatchNorm(3)
        >>> layer(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input: has {input.dim()} dimension(s); SyncBatchNorm needs (batch, channels, ...)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, of shape ``(batch, channels, ...)``. A collective unless in eval mode."""
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        communicator = members(self.process_set) if by_batch else None
        momentum = self._count_batch()
        if communicator is None or communicator.size == 1:
            mean, var = (self.running_mean, self.running_var) if not by_batch or self.training else (None, None)
            plain: Tensor = F.batch_norm(input, mean, var, self.weight, self.bias, by_batch, momentum, self.eps)
            return plain
        label = f"sync_batch_norm.{input.shape[1]}"  # the same at every step, which Horovod's response cache rewards
        output, mean, var, count = _Normalise.apply(communicator, label, self.eps, input, self.weight, self.bias)
        if self.training and self.running_mean is not None:
            self._update(mean, var, count, momentum)
        result: Tensor = output
        return result

    def _count_batch(self) -> float:
        """Count one more batch in training, and return the weight of its statistics."""
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, count: Tensor, momentum: float) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((var * (count / (count - 1))).to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """Replace every batch normalisation in ``module`` by this class, keeping parameters, buffers and mode.

        Args:
            module: a model; changed in place, unless it is itself a batch normalisation.
            process_set: the ranks whose batches are joined.

        Returns:
            ``module``, or what replaces it. Optimizers go on holding the same parameters.

        Example:
            >>> import torch, crossover as xo
            >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
            >>> type(xo.SyncBatchNorm.convert_sync_batchnorm(model)[1]).__name__
            'SyncBatchNorm'
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(cls, module: nn.Module, process_set: ProcessSet, done: dict[int, nn.Module]) -> nn.Module:
        if id(module) not in done:
            done[id(module)] = module
            if isinstance(module, _BatchNorm) and not isinstance(module, cls):
                done[id(module)] = cls._replacing(module, process_set)
            for name, child in module._modules.items():  # a layer may stand under two names
                if child is not None:
                    module._modules[name] = cls._converted(child, process_set, done)
        return done[id(module)]

    @classmethod
    def _replacing(cls, layer: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise ValueError("module: holds a lazy batch normalisation; run one batch through the model first")
        new = cls(layer.num_features, layer.eps, layer.momentum, False, False, process_set=process_set)
        new.affine, new.track_running_stats = layer.affine, layer.track_running_stats
        new._parameters.update(layer._parameters)
        new._buffers.update(layer._buffers)
        new.train(layer.training)
        return new


class _Normalise(torch.autograd.Function):
    """Normalises by the joined batch; also returns mean, biased variance and number of values per channel."""

    @staticmethod
    def forward(
        ctx: Any,
        communicator: Communicator,
        label: str,
        eps: float,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, ...]:
        mean, var, count = _joined_statistics(communicator, label, x)
        inverse = torch.rsqrt(var + eps)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        output = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(scale, x)
        if bias is not None:
            output = output + _per_channel(bias.to(mean.dtype), x)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        ctx.communicator, ctx.label = communicator, label
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        g = gradient.to(mean.dtype)
        normal = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(inverse, x)
        others = [dimension for dimension in range(x.dim()) if dimension != 1]
        local = torch.stack([g.sum(others), (g * normal).sum(others)])
        # every rank takes part, whether its own input needs a gradient or not
        total = local.clone()
        ctx.communicator.all_reduce(total, name=f"{ctx.label}.gradient").wait()
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        averages = total / count
        inner = g - _per_channel(averages[0], x) - normal * _per_channel(averages[1], x)
        for_x = (inner * _per_channel(scale, x)).to(x.dtype) if ctx.needs_input_grad[3] else None
        for_weight = local[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[4] else None
        for_bias = local[0].to(gradient.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[5] else None
        return None, None, None, for_x, for_weight, for_bias


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *([1] * (like.dim() - 2)))


def _joined_statistics(communicator: Communicator, label: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance per channel of the batches of all ranks, and the number of values in each."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))  # halves are too short for sums
    others = [dimension for dimension in range(x.dim()) if dimension != 1]
    count = x.numel() // x.shape[1]
    local_mean = exact.sum(others) / max(count, 1)
    squares = (exact - _per_channel(local_mean, x)).square().sum(others)
    mine = torch.stack([torch.full_like(local_mean, count), local_mean, squares])
    everyone = mine.new_empty(communicator.size, *mine.shape)
    communicator.all_gather(everyone, mine, name=f"{label}.statistics").wait()
    counts, means, scatters = everyone.unbind(1)
    total = counts[:, 0].sum()
    if count <= 1 and float(total) <= 1:  # in this order: asking for the value makes the host wait for the device
        raise ValueError(f"input: has {int(total)} value(s) per channel over all ranks; training needs two or more")
    mean = (counts * means).sum(0) / total
    # spread within each rank plus spread between ranks: no difference of large numbers
    var = (scatters + counts * (means - mean).square()).sum(0) / total
    return mean, var, total
