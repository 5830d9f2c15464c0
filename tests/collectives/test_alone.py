"""One process without a launcher: every name works and changes nothing."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import crossover as xo
from tests.harness import run_ranks


def _alone() -> None:
    xo.init()
    assert (xo.rank(), xo.size()) == (0, 1)
    threads = threading.active_count()
    x = torch.tensor([1.5, -2.0], requires_grad=True)
    for op in (xo.Average, xo.Sum, xo.Adasum, xo.Min, xo.Max, xo.Product):
        assert torch.equal(xo.allreduce(x, op=op), x)
    for call in (xo.allgather, xo.alltoall, xo.reducescatter, lambda t: xo.broadcast(t, 0)):
        assert torch.equal(call(x), x)
        (gradient,) = torch.autograd.grad(call(x).sum(), x)
        assert gradient.tolist() == [1.0, 1.0]
    assert xo.allreduce(x, prescale_factor=2.0, postscale_factor=2.0).tolist() == [6.0, -8.0]
    rows, counts = xo.alltoall(x, splits=[2])
    assert rows.tolist() == [1.5, -2.0]
    assert counts.tolist() == [2]
    handle = xo.allreduce_async_(x.detach(), name="a")
    assert xo.poll(handle)
    assert torch.equal(xo.synchronize(handle), x)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(xo.sparse_allreduce_async(sparse, name="s", op=xo.Average)().to_dense(), torch.eye(3))
    assert xo.allgather_object({"a": 1}) == [{"a": 1}]
    assert xo.broadcast_object(x, root_rank=0) is x
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    xo.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    batch = torch.randn(4, 3)
    assert torch.equal(xo.SyncBatchNorm(3)(batch), nn.BatchNorm1d(3)(batch))
    assert xo.global_process_set.ranks == [0]
    xo.barrier()
    with pytest.raises(ValueError, match="root_rank: 1"):
        xo.broadcast(x, 1)
    assert threading.active_count() == threads
    assert not torch.distributed.is_initialized()
    assert isinstance(xo.nccl_built(), bool)
    assert not xo.mpi_enabled()
    assert not xo.gloo_enabled()
    assert not xo.ddl_built()
    with pytest.raises(ValueError, match="does not use MPI"):
        xo.mpi_threads_supported()
    xo.shutdown()


def test_alone() -> None:
    run_ranks(_alone, 1, launcher="none", timeout=60)


def _timeline(folder: str) -> None:
    xo.init()
    xo.start_timeline(f"{folder}/trace.json")
    xo.allreduce(torch.ones(2))
    xo.stop_timeline()
    xo.shutdown()


def test_timeline_writes_one_file_a_rank(tmp_path: object) -> None:
    run_ranks(_timeline, 2, str(tmp_path), launcher="torch")
    import json
    from pathlib import Path

    files = sorted(Path(str(tmp_path)).glob("trace*.json"))
    assert len(files) == 2
    assert all(isinstance(json.loads(file.read_text()), list) for file in files)
