"""All-reduce and reduce-scatter in every form, against what one process computes from all ranks' tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import crossover as xo
from tests.collectives.launchers import EVERY_WAY
from tests.harness import run_ranks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _values(rank: int, dtype: torch.dtype, rows: int = 5) -> Tensor:
    """Small whole numbers: exact in every dtype, different on every rank."""
    numbers = torch.arange(rows * 3).reshape(rows, 3) % 4 + rank + 1
    return numbers.to(dtype) * (1 + 2j) if dtype.is_complex else numbers.to(dtype)


def _together(size: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([_values(rank, dtype) for rank in range(size)])


def _expected(op: int, everyone: Tensor) -> Tensor:
    if op == xo.Average:
        if everyone.dtype in INTEGERS:
            return torch.div(everyone.long().sum(0), everyone.shape[0], rounding_mode="trunc").to(everyone.dtype)
        return everyone.sum(0) / everyone.shape[0]
    if op == xo.Sum:
        return everyone.sum(0).to(everyone.dtype)
    if op == xo.Product:
        return everyone.prod(0).to(everyone.dtype)
    return everyone.amin(0) if op == xo.Min else everyone.amax(0)


def _dtypes_and_operations(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for op in (xo.Average, xo.Sum, xo.Min, xo.Max, xo.Product):
            mine = _values(rank, dtype)
            expected = _expected(op, _together(size, dtype))
            result = xo.allreduce(mine, op=op)
            assert result.dtype == dtype
            assert torch.equal(result, expected), (dtype, op, result, expected)
            assert torch.equal(mine, _values(rank, dtype)), "the input was modified"
            start = sum(5 // size + (r < 5 % size) for r in range(rank))
            rows = xo.reducescatter(mine, op=op)
            assert torch.equal(rows, expected[start : start + rows.shape[0]]), (dtype, op)
            assert rows.shape[0] == 5 // size + (rank < 5 % size)
    for dtype in (torch.complex64, torch.complex128):
        everyone = _together(size, dtype)
        assert torch.equal(xo.allreduce(_values(rank, dtype), op=xo.Sum), everyone.sum(0))
        assert torch.allclose(xo.allreduce(_values(rank, dtype).conj()), everyone.conj().sum(0) / size)
        with pytest.raises(ValueError, match="op: Max"):
            xo.allreduce(_values(rank, dtype), op=xo.Max)


def _booleans(rank: int, size: int) -> None:
    mine = torch.tensor([rank == 0, True, False])
    for op, expected in ((xo.Sum, [1, 1, 0]), (xo.Max, [1, 1, 0]), (xo.Min, [0, 1, 0]), (xo.Product, [0, 1, 0])):
        result = xo.allreduce(mine, op=op)
        assert result.dtype is torch.bool
        assert result.tolist() == [bool(value) for value in expected], op
    with pytest.raises(ValueError, match="op: Average"):
        xo.allreduce(mine)


def _strides_and_shapes(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    base = torch.arange(24.0).reshape(2, 3, 2, 2)
    for view in (
        base.to(memory_format=torch.channels_last),
        base.transpose(0, 1),
        base[:, ::2],
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.ones(1).expand(6),
    ):
        mine = view * (rank + 1) if view.stride() != (0,) else torch.full((1,), float(rank + 1)).expand(6)
        assert torch.equal(xo.allreduce(mine, op=xo.Sum), view * total)
        assert torch.equal(xo.allreduce_(mine.clone(), op=xo.Sum), view * total)
    target = base.clone()[:, ::2]
    target.mul_(rank + 1)
    assert xo.allreduce_(target, op=xo.Sum) is target
    assert torch.equal(target, base[:, ::2] * total)
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert xo.allreduce_(parameter) is parameter
    assert parameter.tolist() == [(size - 1) / 2] * 2
    assert parameter.requires_grad


def _factors(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    mine = torch.tensor([4.0, 8.0]) * (rank + 1)
    scaled = xo.allreduce(mine, op=xo.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert scaled.tolist() == [4.0 * total * 1.5, 8.0 * total * 1.5]
    assert mine.tolist() == [4.0 * (rank + 1), 8.0 * (rank + 1)]
    whole = xo.allreduce(torch.tensor([5, -3]), op=xo.Sum, prescale_factor=0.5)
    assert whole.tolist() == [2 * size, -1 * size]
    in_place = mine.clone()
    xo.allreduce_(in_place, op=xo.Sum, prescale_factor=0.5)
    assert in_place.tolist() == [2.0 * total, 4.0 * total]


def _compression(rank: int, size: int) -> None:
    class Halved:
        @staticmethod
        def compress(tensor: Tensor) -> tuple[Tensor, float]:
            return tensor / 2, 2.0

        @staticmethod
        def decompress(tensor: Tensor, ctx: float) -> Tensor:
            return tensor * ctx

    mine = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    average = torch.tensor([1.0, 2.0, 3.0]) * (size + 1) / 2
    for compression in (xo.Compression.none, xo.Compression.fp16, xo.Compression.bf16, Halved, "fp16"):
        result = xo.allreduce(mine, compression=compression)
        assert result.dtype is torch.float32
        assert torch.allclose(result, average, rtol=1e-2), compression
    whole = xo.allreduce(torch.tensor([2, 4]), compression=xo.Compression.fp16, op=xo.Sum)
    assert whole.dtype is torch.int64
    assert whole.tolist() == [2 * size, 4 * size]


def _groups(rank: int, size: int) -> None:
    def tensors(factor: int) -> list[Tensor]:
        shapes: list[tuple[int, ...]] = [(3,), (2, 2), (), (0,), (600_000,)]
        made = [torch.ones(shape) * factor for shape in shapes]
        return [*made, torch.ones(2, dtype=torch.int64) * factor, torch.ones(3, dtype=torch.bfloat16) * factor]

    total = sum(range(1, size + 1))
    results = xo.grouped_allreduce(tensors(rank + 1), op=xo.Sum)
    for result, expected in zip(results, tensors(total), strict=True):
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected)
    results[0].add_(1)
    targets = tensors(rank + 1)
    handle = xo.grouped_allreduce_async_(targets, op=xo.Sum, name="group")
    returned = xo.synchronize(handle)
    for target, result, expected in zip(targets, returned, tensors(total), strict=True):
        assert result is target
        assert torch.equal(target, expected)
    assert torch.equal(xo.grouped_allreduce_(tensors(rank + 1), op=xo.Max)[0], torch.full((3,), float(size)))
    assert xo.grouped_allreduce([]) == []
    scattered = xo.grouped_reducescatter([torch.ones(size, 2), torch.ones(size + 1)], op=xo.Sum)
    assert scattered[0].tolist() == [[size, size]]
    assert scattered[1].tolist() == [size] * (1 + (rank == 0))
    assert xo.synchronize(xo.grouped_reducescatter_async([torch.ones(size)]))[0].tolist() == [1.0]


def _handles(rank: int, size: int) -> None:
    one = xo.allreduce_async(torch.full((2,), float(rank)), name="one", op=xo.Sum)
    two = xo.allreduce_async(torch.full((2,), float(rank)), name="two", op=xo.Max)
    assert isinstance(one, int)
    with pytest.raises(ValueError, match="already in flight"):
        xo.allreduce_async(torch.zeros(2), name="one")
    assert xo.synchronize(two).tolist() == [size - 1.0] * 2
    while not xo.poll(one):
        pass
    assert xo.synchronize(one).tolist() == [sum(range(size))] * 2
    for use in (xo.synchronize, xo.poll):
        with pytest.raises(ValueError, match="handle"):
            use(one)
    assert xo.allreduce(torch.ones(1), name="one").item() == 1.0, "the name is free again"


def _bad_arguments(rank: int, size: int) -> None:
    with pytest.warns(DeprecationWarning, match="average") as caught:
        assert xo.allreduce(torch.full((1,), float(rank)), average=False).item() == sum(range(size))
    assert caught[0].filename == __file__
    for call, words in (
        (lambda: xo.allreduce(torch.ones(1), average=True, op=xo.Sum), "average"),
        (lambda: xo.allreduce(torch.ones(1), op=17), "op: 17"),
        (lambda: xo.allreduce(torch.ones(1), op=xo.Adasum), "op=crossover.Average"),
        (lambda: xo.allreduce([1.0]), "tensor"),
        (lambda: xo.allreduce(torch.ones(2, 2).to_sparse()), "sparse_allreduce_async"),
        (lambda: xo.reducescatter(torch.tensor(1.0)), "no dimensions"),
        (lambda: xo.allreduce(torch.ones(1), process_set=3), "process_set"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def _sparse(rank: int, size: int) -> None:
    mine = torch.sparse_coo_tensor([[0, rank + 1]], torch.tensor([[1.0, 2.0]] * 2), (size + 1, 2))
    for op in (xo.Sum, xo.Average):
        result = xo.sparse_allreduce_async(mine, name="rows", op=op)()
        factor = 1 if op == xo.Sum else 1 / size
        dense = torch.stack([torch.tensor([1.0, 2.0]) * (size if row == 0 else 1) for row in range(size + 1)])
        assert torch.allclose(result.to_dense(), dense * factor)
    nothing = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 2), (size + 1, 2))
    result = xo.sparse_allreduce_async(mine if rank else nothing, name="rows", op=xo.Sum)()
    assert result.to_dense()[0].tolist() == [size - 1.0, 2.0 * (size - 1)]
    with pytest.raises(ValueError, match="not a sparse"):
        xo.sparse_allreduce_async(torch.ones(2), name="dense", op=xo.Sum)


def _gradients(rank: int, size: int) -> None:
    weights = torch.tensor([1.0, 10.0]) * (rank + 1)  # the gradient that arrives differs between ranks
    total = torch.tensor([1.0, 10.0]) * sum(range(1, size + 1))

    def gradient(op: int, start: Tensor, **options: float) -> Tensor:
        x = start.clone().requires_grad_()
        (xo.allreduce(x, op=op, **options) * weights).sum().backward()
        assert x.grad is not None
        return x.grad

    here = torch.tensor([2.0, -3.0]) * (rank + 1)
    assert torch.allclose(gradient(xo.Average, here), total / size)
    assert torch.allclose(gradient(xo.Sum, here), total)
    assert torch.allclose(gradient(xo.Sum, here, prescale_factor=0.5, postscale_factor=3.0), total * 1.5)
    assert torch.allclose(gradient(xo.Max, here), total * torch.tensor([rank == size - 1, rank == 0]))
    assert torch.allclose(gradient(xo.Min, torch.ones(2)), total / size)
    with_zero = torch.tensor([2.0, 0.0 if rank == 0 else 5.0])
    others = torch.tensor([2.0 ** (size - 1), 5.0 ** (size - 1) if rank == 0 else 0.0])
    assert torch.allclose(gradient(xo.Product, with_zero), total * others)
    x = torch.ones(3, requires_grad=True)
    xo.allreduce(x, op=xo.Sum).sum().backward()  # the gradient is an expanded scalar
    assert x.grad.tolist() == [size] * 3
    parts = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    reduced = xo.grouped_allreduce(parts, op=xo.Sum)
    reduced[1].sum().backward()
    assert parts[0].grad.tolist() == [0, 0]
    assert parts[1].grad.tolist() == [size] * 3
    rows = torch.ones(size, 2, requires_grad=True)
    (xo.reducescatter(rows, op=xo.Average) * (rank + 1)).sum().backward()
    assert rows.grad.tolist() == [[r + 1] * 2 for r in range(size)]
    z = torch.ones(2, requires_grad=True)
    (first,) = torch.autograd.grad((xo.allreduce(z) ** 3).sum(), z, create_graph=True)
    first.sum().backward()
    assert z.grad.tolist() == [6.0, 6.0]


def _all_reductions() -> None:
    xo.init()
    for check in (
        _dtypes_and_operations,
        _booleans,
        _strides_and_shapes,
        _factors,
        _compression,
        _groups,
        _handles,
        _bad_arguments,
        _sparse,
        _gradients,
    ):
        check(xo.rank(), xo.size())
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), EVERY_WAY)
def test_reductions(launcher: str, size: int) -> None:
    run_ranks(_all_reductions, size, launcher=launcher, timeout=120)


def _differ(what: str) -> None:
    xo.init()
    rank = xo.rank()
    if what == "shape":
        xo.allreduce(torch.ones(2 + rank), name="loss")
    elif what == "dtype":
        xo.allreduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32), name="loss")
    elif what == "op":
        xo.allreduce(torch.ones(2), op=xo.Sum if rank else xo.Average, name="loss")
    else:
        (xo.barrier if rank else xo.allgather)(*([] if rank else [torch.ones(2)]))


@pytest.mark.parametrize("launcher", ["torch", pytest.param("horovod", marks=pytest.mark.horovod)])
@pytest.mark.parametrize("what", ["shape", "dtype", "op", "call"])
def test_with_crossover_check_every_rank_learns_what_differs(launcher: str, what: str) -> None:
    outcomes = run_ranks(
        _differ, 2, what, launcher=launcher, env={"CROSSOVER_CHECK": "1"}, expect_failure=True, timeout=60
    )
    for outcome in outcomes:
        assert outcome.error == "RankMismatchError", outcome.describe()
        assert "rank 0: " in outcome.message
        assert "rank 1: " in outcome.message
        assert {"shape": "float32(3,)", "dtype": "int32(2,)", "op": "Sum", "call": "barrier"}[what] in outcome.message
