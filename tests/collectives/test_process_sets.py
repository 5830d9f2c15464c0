"""Collectives among some of the ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import crossover as xo
from tests.collectives.launchers import THREE_RANKS
from tests.harness import run_ranks


def _some_of_three() -> None:
    early = xo.ProcessSet([2, 0])
    assert early.process_set_id is None
    xo.init(process_sets=[early])
    rank = xo.rank()
    late = xo.add_process_set([1, 2])
    assert (early.process_set_id, late.process_set_id, xo.global_process_set.process_set_id) == (1, 2, 0)
    assert early.ranks == [0, 2]
    assert xo.global_process_set.ranks == [0, 1, 2]
    assert early.included() == (rank != 1)
    assert (early.size(), early.rank()) == (2, [0, None, 1][rank])
    for chosen, members in ((early, [0, 2]), (late, [1, 2])):
        if not chosen.included():
            assert chosen.communicator is None
            with pytest.raises(ValueError, match="no member"):
                xo.allreduce(torch.ones(1), process_set=chosen)
            continue
        mine = torch.tensor([float(rank)])
        assert xo.allreduce(mine, op=xo.Sum, process_set=chosen).item() == sum(members)
        assert xo.allgather(mine, process_set=chosen).tolist() == members
        assert xo.broadcast(mine, root_rank=members[1], process_set=chosen).item() == members[1]
        assert xo.broadcast_object(rank, root_rank=members[1], process_set=chosen) == members[1]
        assert xo.alltoall(torch.tensor([rank, rank]), process_set=chosen).tolist() == members
        rows = xo.reducescatter(torch.ones(3), op=xo.Sum, process_set=chosen)
        assert rows.tolist() == [2.0] * (2 if rank == members[0] else 1)
        x = torch.ones(1, requires_grad=True)
        xo.allreduce(x, op=xo.Sum, process_set=chosen).backward()
        assert x.grad.item() == 2
        with pytest.raises(ValueError, match="root_rank"):
            xo.broadcast(mine, root_rank=3 - sum(members), process_set=chosen)
        xo.barrier(process_set=chosen)
    with pytest.raises(ValueError, match="exists already"):
        xo.add_process_set([0, 2])
    with pytest.raises(ValueError, match="exists already"):
        xo.add_process_set(xo.ProcessSet([0, 1, 2]))
    with pytest.raises(ValueError, match="rank 3"):
        xo.add_process_set([0, 3])
    with pytest.raises(xo.RankMismatchError, match="ranks disagree"):
        xo.add_process_set([0] if rank else [1])
    assert xo.remove_process_set(late)
    assert not xo.remove_process_set(late)
    assert not xo.remove_process_set(xo.global_process_set)
    assert late.process_set_id is None
    with pytest.raises(ValueError, match="has not been added"):
        xo.allreduce(torch.ones(1), process_set=late)
    xo.add_process_set(late)
    if late.included():
        assert xo.allreduce(torch.tensor([float(rank)]), op=xo.Max, process_set=late).item() == 2
    assert xo.allreduce(torch.tensor([float(rank)]), op=xo.Sum).item() == 3
    xo.barrier()
    xo.shutdown()


@pytest.mark.parametrize(("launcher", "size"), THREE_RANKS)
def test_process_sets(launcher: str, size: int) -> None:
    run_ranks(_some_of_three, size, launcher=launcher, timeout=90)


@pytest.mark.parametrize("ranks", [[], [0, 0], [-1], ["0"], 3, [True], [0.5]])
def test_ranks_have_to_be_different_whole_numbers(ranks: object) -> None:
    with pytest.raises(ValueError, match="ranks: is"):
        xo.ProcessSet(ranks)


def test_copies_of_a_set_stay_in_the_job() -> None:
    chosen = xo.ProcessSet([1, 0])
    assert copy.deepcopy(chosen) is chosen
    assert pickle.loads(pickle.dumps(chosen)).ranks == [0, 1]
    assert pickle.loads(pickle.dumps(xo.global_process_set)) is xo.global_process_set
    assert "ranks=[0, 1]" in str(chosen)
