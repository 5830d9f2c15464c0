"""A process by itself: copies, no threads, no process group."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from crossover import runtime
from crossover.comm import ReduceOp, Solo
from tests.harness import run_ranks


def test_collectives_are_copies() -> None:
    comm = Solo()
    tensor = torch.arange(6.0).view(2, 3)
    for op in ReduceOp:
        work = comm.all_reduce(tensor, op, name="same")
        work.wait()
        assert work.is_completed()
        assert work.name == "same"
    comm.broadcast(tensor, 0, name="same").wait()
    torch.testing.assert_close(tensor, torch.arange(6.0).view(2, 3))
    gathered = torch.zeros(1, 2, 3)
    comm.all_gather(gathered, tensor, name="gather").wait()
    torch.testing.assert_close(gathered[0], tensor)
    part = torch.zeros(2, 3)
    comm.reduce_scatter(part, tensor[None], name="scatter").wait()
    torch.testing.assert_close(part, tensor)
    received = torch.zeros(2, 3)
    comm.all_to_all(received, tensor, [2], [2], name="exchange").wait()
    torch.testing.assert_close(received, tensor)
    assert comm.all_gather_object({"a": 1}, name="object") == [{"a": 1}]
    assert comm.broadcast_object("b", name="object") == "b"


def test_groups() -> None:
    comm = Solo()
    twin = comm.duplicate(name="twin")
    assert (twin.rank, twin.size, twin.ranks) == (0, 1, (0,))
    assert comm.new_group([], name="none") is None


def test_ranks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="root: is 1"):
        Solo().broadcast(torch.zeros(1), 1, name="x")
    with pytest.raises(ValueError, match=r"ranks: is \[0, 1\]"):
        Solo().new_group([0, 1], name="x")


def lone_process() -> tuple[int, bool, str, int]:
    before = len(os.listdir("/proc/self/task"))
    runtime.init()
    comm = runtime.context().communicator
    comm.all_reduce(torch.ones(3), name="x").wait()
    comm.barrier()
    comm.all_gather_object(1, name="y")
    started = len(os.listdir("/proc/self/task")) - before
    return started, dist.is_initialized(), runtime.context().launcher, runtime.size()


@pytest.mark.parametrize("launcher", ["none", "torch"])
def test_a_lone_process_starts_no_thread_and_no_group(launcher: str) -> None:
    assert run_ranks(lone_process, 1, launcher=launcher) == [(0, False, "solo", 1)]
