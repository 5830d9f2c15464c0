"""SyncBatchNorm against torch's BatchNorm on the joined batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from tests.collectives.launchers import EVERY_WAY
from tests.harness import run_ranks

SHAPES = {nn.BatchNorm1d: [(), (7,)], nn.BatchNorm2d: [(4, 3)], nn.BatchNorm3d: [(2, 3, 2)]}


def _batches(size: int, shape: tuple[int, ...], rows: list[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 5, *shape, generator=generator, dtype=torch.float64).to(dtype) * 2 + 1 for n in rows[:size]]


def _compare(plain: nn.Module, shape: tuple[int, ...], rows: list[int], tolerance: float = 1e-12) -> None:
    rank, size = xo.rank(), xo.size()
    plain.zero_grad()
    synced = xo.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    for _ in range(2):  # the second pass finds running statistics that the first has changed
        batches = _batches(size, shape, rows)
        joined = torch.cat(batches).requires_grad_()
        mine = batches[rank].clone().requires_grad_()
        expected, result = plain(joined), synced(mine)
        weights = torch.linspace(-1, 1, joined.numel(), dtype=torch.float64).view(joined.shape)
        (expected * weights).sum().backward()
        first = sum(rows[:rank])
        here = slice(first, first + rows[rank])
        (result * weights[here]).sum().backward()
        assert torch.allclose(result, expected[here], rtol=0, atol=tolerance)
        assert torch.allclose(mine.grad, joined.grad[here], rtol=0, atol=tolerance)
        for one, other in zip(synced.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(xo.allreduce(one.grad, op=xo.Sum), other.grad, rtol=0, atol=tolerance * 100)
        for one, other in zip(synced.buffers(), plain.buffers(), strict=True):
            assert torch.allclose(one, other, rtol=0, atol=tolerance)
            assert one.dtype == other.dtype


def _variants() -> None:
    rows = [4, 1, 6]
    for kind, shapes in SHAPES.items():
        for shape in shapes:
            _compare(kind(5, dtype=torch.float64), shape, rows)
    for options in (
        {"momentum": None},
        {"momentum": 0.3, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
    ):
        layer = nn.BatchNorm2d(5, dtype=torch.float64, **options)
        _compare(layer, (3, 2), rows)
        _compare(layer.eval(), (3, 2), rows)
    frozen = nn.BatchNorm1d(5, dtype=torch.float64)
    nn.init.uniform_(frozen.weight)
    xo.broadcast_parameters(frozen.state_dict(), root_rank=0)
    _compare(frozen, (), [3, 0, 2])
    # far from zero, where a difference of squares would lose every digit
    offset = nn.BatchNorm1d(1, affine=False)
    values = torch.tensor([[1e4], [1e4 + 1]]) + xo.rank()
    everyone = torch.cat([torch.tensor([[1e4], [1e4 + 1]]) + rank for rank in range(xo.size())])
    synced = xo.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(offset))
    assert torch.allclose(synced(values), offset(everyone)[2 * xo.rank() : 2 * xo.rank() + 2], atol=1e-3)


def _gradients() -> None:
    """The numerical derivative of a sum over all ranks with respect to this rank's batch."""
    rank = xo.rank()
    layer = xo.SyncBatchNorm(2, affine=True, track_running_stats=False, dtype=torch.float64)
    x = torch.randn(3 + rank, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def loss(batch: Tensor) -> Tensor:
        return xo.allreduce(layer(batch).pow(3).sum(), op=xo.Sum)

    given = x.clone().requires_grad_()
    layer(given).pow(3).sum().backward()
    for moved in range(xo.size()):
        for index in ((0, 0, 0), (2, 1, 1)):
            shift = torch.zeros_like(x)
            shift[index] = 1e-5 if rank == moved else 0.0
            slope = (loss(x + shift) - loss(x - shift)).item() / 2e-5
            if rank == moved:
                assert given.grad[index].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def _precisions_and_errors() -> None:
    rank = xo.rank()
    for dtype in (torch.float16, torch.bfloat16):
        layer = xo.SyncBatchNorm(5)
        batches = _batches(xo.size(), (4, 4), [4, 2, 3], dtype)
        expected = nn.BatchNorm2d(5)(torch.cat(batches).float())
        result = layer(batches[rank].requires_grad_())
        result.float().pow(2).sum().backward()
        assert result.dtype is dtype
        assert batches[rank].grad.dtype is dtype
        first = sum([4, 2, 3][:rank])
        assert torch.allclose(result.float(), expected[first : first + result.shape[0]], atol=3e-2)
    images = torch.randn(2, 5, 4, 4).to(memory_format=torch.channels_last)
    assert xo.SyncBatchNorm(5)(images).is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="input: has 1 dimension"):
        xo.SyncBatchNorm(5)(torch.ones(5))
    with pytest.raises(ValueError, match="1 value"):
        xo.SyncBatchNorm(5)(torch.ones(1 if rank == 0 else 0, 5))


def _all_checks() -> None:
    xo.init()
    _variants()
    _gradients()
    _precisions_and_errors()
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), EVERY_WAY[:3])
def test_sync_batch_norm(launcher: str, size: int) -> None:
    run_ranks(_all_checks, size, launcher=launcher, timeout=90)


def test_conversion_keeps_parameters_buffers_mode_and_sharing() -> None:
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Sequential(shared, nn.BatchNorm2d(4, affine=False).eval()))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    converted = xo.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert all(isinstance(layer, xo.SyncBatchNorm) for layer in (model[1], model[2][0], model[2][1]))
    assert model[1] is model[2][0]
    assert not model[2][1].training
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is {**parameters, **buffers}[name]
    assert xo.SyncBatchNorm.convert_sync_batchnorm(model)[1] is model[1]
    assert isinstance(xo.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)), xo.SyncBatchNorm)
    copied = copy.deepcopy(model[1])
    assert copied.process_set is xo.global_process_set
    assert copied.state_dict().keys() == nn.BatchNorm1d(3).state_dict().keys()
