"""Broadcast, all-gather, all-to-all and objects: what arrives is what was sent, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import crossover as xo
from tests.collectives.launchers import EVERY_WAY
from tests.harness import run_ranks

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.float8_e4m3fn),
)


def _made(rank: int, dtype: torch.dtype, rows: int = 4) -> Tensor:
    numbers = (torch.arange(rows * 3).reshape(rows, 3) * 7 + rank * 5) % 2 if dtype is torch.bool else None
    if numbers is None:
        numbers = torch.arange(rows * 3).reshape(rows, 3) + rank
    return numbers.to(torch.float32).to(dtype) if dtype is torch.float8_e4m3fn else numbers.to(dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    return bool((one.contiguous().view(-1).view(torch.uint8) == other.contiguous().view(-1).view(torch.uint8)).all())


def _broadcasts(rank: int, size: int) -> None:
    root = size - 1
    for dtype in DTYPES:
        mine = _made(rank, dtype)
        assert _same(xo.broadcast(mine, root), _made(root, dtype)), dtype
        assert _same(mine, _made(rank, dtype))
        handle = xo.broadcast_async_(mine, root, name="mine")
        assert xo.synchronize(handle) is mine
        assert _same(mine, _made(root, dtype)), dtype
    layered = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    assert xo.broadcast_(layered, root) is layered
    assert layered.is_contiguous(memory_format=torch.channels_last)
    assert layered.unique().tolist() == [root]
    columns = torch.full((4, 4), float(rank))
    xo.broadcast_(columns[:, ::2], 0)
    assert columns.tolist() == [[0.0, rank, 0.0, rank]] * 4
    shared = torch.full((1,), float(rank)).expand(5)
    assert xo.broadcast_(shared, root).tolist() == [root] * 5
    for odd in (torch.tensor(float(rank)), torch.empty(0, 3)):
        assert _same(xo.synchronize(xo.broadcast_async(odd, root)), odd * 0 + root)
    x = torch.ones(2, requires_grad=True)
    (xo.broadcast(x, root) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [(size + 1) / 2 if rank == root else 0.0] * 2
    with pytest.raises(ValueError, match="root_rank: 99"):
        xo.broadcast(torch.ones(1), 99)


def _gathers(rank: int, size: int) -> None:
    for dtype in DTYPES:
        even = xo.allgather(_made(rank, dtype))
        uneven = xo.allgather(_made(rank, dtype, rows=rank))
        for result, rows in ((even, lambda r: 4), (uneven, lambda r: r)):
            parts = [_made(r, dtype, rows(r)).contiguous().view(-1).view(torch.uint8) for r in range(size)]
            assert result.dtype == dtype
            assert torch.equal(result.contiguous().view(-1).view(torch.uint8), torch.cat(parts)), dtype
    assert xo.allgather(torch.tensor(float(rank))).tolist() == [float(r) for r in range(size)]
    assert xo.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert xo.allgather(torch.empty(rank, 0)).shape == (sum(range(size)), 0)
    assert xo.allgather(torch.arange(6).reshape(2, 3).t() + rank).shape == (3 * size, 2)
    handle = xo.allgather_async(torch.full((rank + 1,), rank), name="ranks")
    assert xo.synchronize(handle).tolist() == [r for r in range(size) for _ in range(r + 1)]
    ones, twos = xo.grouped_allgather([torch.ones(rank), torch.full((2, 1), rank, dtype=torch.int16)])
    assert ones.numel() == sum(range(size))
    assert twos.flatten().tolist() == [r for r in range(size) for _ in range(2)]
    assert xo.synchronize(xo.grouped_allgather_async([torch.tensor([rank])]))[0].tolist() == list(range(size))
    assert xo.grouped_allgather([]) == []
    x = torch.ones(rank + 1, requires_grad=True)
    rows = torch.arange(float(sum(range(size + 1))))
    (xo.allgather(x) * rows * (rank + 1)).sum().backward()
    first = sum(range(rank + 1))
    assert torch.allclose(x.grad, rows[first : first + rank + 1] * (size + 1) / 2)
    for wrong in (torch.ones(2, 3 + rank), torch.ones(2, dtype=torch.float32 if rank else torch.int64)):
        with pytest.raises(xo.RankMismatchError, match=r"rank 0: .*rank") as caught:
            xo.allgather(wrong, name="wrong")
        assert "float32(rows" in str(caught.value)


def _all_to_alls(rank: int, size: int) -> None:
    for dtype in DTYPES:
        received = xo.alltoall(_made(rank, dtype, rows=2 * size))
        assert isinstance(received, Tensor)
        expected = torch.cat(
            [_made(r, dtype, 2 * size)[2 * rank : 2 * rank + 2].view(torch.uint8) for r in range(size)]
        )
        assert torch.equal(received.view(torch.uint8), expected), dtype
    sent = torch.arange(sum(range(size)), dtype=torch.float32) + 100 * rank
    for splits in (list(range(size)), torch.arange(size), torch.arange(size, dtype=torch.int32)):
        rows, counts = xo.alltoall(sent, splits=splits)
        start = sum(range(rank))
        assert counts.tolist() == [rank] * size
        assert counts.dtype == (splits.dtype if isinstance(splits, Tensor) else torch.int32)
        assert rows.tolist() == [100.0 * r + start + k for r in range(size) for k in range(rank)]
    rows, counts = xo.synchronize(xo.alltoall_async(torch.full((size,), rank), name="exchange"))
    assert rows.tolist() == list(range(size))
    assert counts.tolist() == [1] * size
    rows, _ = xo.alltoall(torch.empty(0, 2), splits=[0] * size)
    assert rows.shape == (0, 2)
    x = torch.ones(size, requires_grad=True)
    (xo.alltoall(x) * (rank + 1)).sum().backward()
    assert x.grad.tolist() == [r + 1.0 for r in range(size)]
    for splits in ([1] * (size + 1), [2] * size, [-1, *[1] * (size - 2), 2], [1.0] * size):
        with pytest.raises(ValueError, match="splits"):
            xo.alltoall(torch.ones(size), splits=splits)
    with pytest.raises(ValueError, match="do not divide"):
        xo.alltoall(torch.ones(size + 1))
    with pytest.raises(xo.RankMismatchError, match="rank"):
        xo.alltoall(torch.ones(size, rank + 1))


def _objects(rank: int, size: int) -> None:
    sent = {"epoch": rank, "text": "é" * rank, "tensor": torch.full((2,), rank), "none": None}
    received = xo.broadcast_object(sent if rank == 1 else "ignored", root_rank=1, name="state")
    assert received["epoch"] == 1
    assert received["tensor"].tolist() == [1, 1]
    gathered = xo.allgather_object(["x" * rank, rank])
    assert gathered == [["x" * r, r] for r in range(size)]


def _all_movements() -> None:
    xo.init()
    for check in (_broadcasts, _gathers, _all_to_alls, _objects):
        check(xo.rank(), xo.size())
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), EVERY_WAY)
def test_movement(launcher: str, size: int) -> None:
    run_ranks(_all_movements, size, launcher=launcher, timeout=120)


def _like_horovod() -> None:
    import horovod.torch as hvd

    xo.init()
    rank, size = xo.rank(), xo.size()
    assert [xo.Average, xo.Sum, xo.Adasum, xo.Min, xo.Max, xo.Product] == [
        *(hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    ]
    torch.manual_seed(rank)
    whole = torch.randint(-50, 50, (7,))
    real = torch.randn(7, 3)
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max):
        assert torch.equal(xo.allreduce(whole, op=op), hvd.allreduce(whole, op=op))
        assert torch.allclose(xo.allreduce(real, op=op), hvd.allreduce(real, op=op))
    for op in (hvd.Average, hvd.Sum):
        assert torch.allclose(xo.reducescatter(real, op=op), hvd.reducescatter(real, op=op))
    ours, theirs = real.clone().requires_grad_(), real.clone().requires_grad_()
    for op in (hvd.Average, hvd.Sum):
        for module, x in ((xo, ours), (hvd, theirs)):
            (module.allgather(module.reducescatter(module.broadcast(x, 0), op=op)) * (rank + 1)).pow(2).sum().backward()
        assert torch.allclose(ours.grad, theirs.grad)
    splits = torch.tensor([1] * (size - 1) + [8 - size], dtype=torch.int32)
    for mine, their in zip(xo.alltoall(real, splits), hvd.alltoall(real, splits), strict=True):
        assert torch.equal(mine, their)
    names = [name for name, value in vars(hvd).items() if callable(value) and not name.startswith("_")]
    missing = [name for name in names if name not in xo.__all__]
    assert missing == ["check_extension"]
    assert xo.gloo_built() == hvd.gloo_built()
    assert xo.mpi_enabled() == hvd.mpi_enabled()
    xo.barrier()
    xo.shutdown()


@pytest.mark.horovod
def test_results_and_gradients_equal_those_of_horovod() -> None:
    run_ranks(_like_horovod, 2, launcher="horovod", timeout=90)
