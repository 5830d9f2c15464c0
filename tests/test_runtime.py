"""Joining and leaving a job."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossover import runtime
from crossover.comm import Communicator
from crossover.runtime import Context, _placed
from tests.comm.jobs import BOTH
from tests.harness import run_ranks


def facts() -> tuple[Any, ...]:
    runtime.init()
    first = runtime.context()
    runtime.init()
    assert runtime.context() is first
    numbers = (runtime.rank(), runtime.size(), runtime.local_rank(), runtime.local_size())
    nodes = (runtime.cross_rank(), runtime.cross_size(), runtime.is_homogeneous())
    return first.launcher, first.communicator.backend, first.communicator.timeout, numbers, nodes


@pytest.mark.parametrize(("launcher", "backend"), [(BOTH[0], "gloo"), (BOTH[1], "horovod")])
def test_each_launcher_is_found(launcher: Any, backend: str) -> None:
    (name,) = launcher.values
    if launcher.marks:
        pytest.importorskip("horovod.torch")
    seen = run_ranks(facts, 2, launcher=name, env={"CROSSOVER_TIMEOUT": "30"})
    assert seen == [(name, backend, 30.0, (rank, 2, rank, 2), (0, 1, True)) for rank in range(2)]


def test_no_launcher_is_alone() -> None:
    assert run_ranks(facts, 1, launcher="none") == [("solo", "solo", 600.0, (0, 1, 0, 1), (0, 1, True))]


def test_the_environment_overrides_the_launcher() -> None:
    seen = run_ranks(facts, 2, env={"CROSSOVER_BACKEND": "solo"})
    assert [entry[0] for entry in seen] == ["solo", "solo"]
    assert [entry[3][:2] for entry in seen] == [(0, 1), (0, 1)]


def group_of_the_script() -> list[Any]:
    dist.init_process_group("gloo")
    mine = dist.group.WORLD
    hook = sys.excepthook
    runtime.init()
    comm: Any = runtime.context().communicator
    tensor = torch.ones(2)
    comm.all_reduce(tensor, name="x").wait()
    twin = comm.duplicate(name="twin")
    seen = [comm.group is mine, runtime.context().launcher, tensor.tolist(), twin.group is mine]
    runtime.shutdown()
    dist.all_reduce(tensor)
    return [*seen, dist.is_initialized(), tensor.tolist(), sys.excepthook is hook, runtime.is_initialized()]


def test_a_group_of_the_script_is_used_and_left_alone() -> None:
    expected = [True, "torch", [2.0, 2.0], False, True, [4.0, 4.0], True, False]
    assert run_ranks(group_of_the_script, 2) == [expected] * 2


def comes_back() -> list[Any]:
    hook = sys.excepthook
    seen: list[Any] = []
    for _ in range(2):
        runtime.init()
        tensor = torch.ones(1)
        runtime.context().communicator.all_reduce(tensor, name="x").wait()
        runtime.context().communicator.barrier()
        runtime.shutdown()
        runtime.shutdown()
        seen.append((tensor.item(), runtime.is_initialized(), dist.is_initialized()))
    if "HOROVOD_RANK" in os.environ:  # torch leaves a hook of its own behind
        assert sys.excepthook is hook
    return seen


@pytest.mark.parametrize("launcher", BOTH)
def test_a_job_can_be_left_and_joined_again(launcher: str) -> None:
    assert run_ranks(comes_back, 2, launcher=launcher) == [[(2.0, False, False)] * 2] * 2


def test_use_before_init_is_refused() -> None:
    assert not runtime.is_initialized()
    for call in (runtime.context, runtime.rank, runtime.size, runtime.local_rank, runtime.local_size):
        with pytest.raises(ValueError, match=r"call crossover\.init\(\) first"):
            call()
    for call in (runtime.cross_rank, runtime.cross_size, runtime.is_homogeneous):
        with pytest.raises(ValueError, match=r"call crossover\.init\(\) first"):
            call()
    with pytest.raises(ValueError, match="process_group: is None"):
        runtime.communicator_of(None)  # type: ignore[arg-type]
    runtime.shutdown()


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "soon"])
def test_a_bad_time_out_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout: is .* seconds above 0"):
        runtime.init(timeout=timeout)
    assert not runtime.is_initialized()


@pytest.mark.parametrize("variable", ["CROSSOVER_TIMEOUT", "CROSSOVER_STALL_WARNING"])
def test_a_bad_time_in_the_environment_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1 minute")
    with pytest.raises(ValueError, match=f"{variable}: is '1 minute'"):
        runtime.init()


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="backend: is 'tcp'; allowed are 'torch', 'gloo', 'nccl', 'horovod', 'solo'"):
        runtime.init(backend="tcp")


def half_an_environment() -> None:
    runtime.init()


def test_half_an_environment_is_refused() -> None:
    (outcome,) = run_ranks(half_an_environment, 1, env={"WORLD_SIZE": None}, expect_failure=True)
    assert (outcome.error, outcome.exit_code) == ("ValueError", 1)
    assert "WORLD_SIZE not set" in outcome.message
    assert outcome.stderr.rstrip().endswith(outcome.message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL could be used here")
def test_nccl_without_a_device_is_refused() -> None:
    for outcome in run_ranks(half_an_environment, 2, env={"CROSSOVER_BACKEND": "nccl"}, expect_failure=True):
        assert outcome.error == "ValueError"
        assert "'nccl' was asked for" in outcome.message
        assert "'gloo'" in outcome.message


class Place(Communicator):
    """Only a rank and a size."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


Place.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def places(entries: list[tuple[str | None, str, str | None]]) -> list[tuple[int, int, int, int, bool]]:
    contexts: list[Context] = [_placed(Place(rank, len(entries)), entries) for rank in range(len(entries))]
    return [(c.local_rank, c.local_size, c.cross_rank, c.cross_size, c.homogeneous) for c in contexts]


def test_nodes_from_host_names() -> None:
    seen = places([(None, "a", None), (None, "b", None), (None, "a", None), (None, "b", None)])
    assert seen == [(0, 2, 0, 2, True), (0, 2, 1, 2, True), (1, 2, 0, 2, True), (1, 2, 1, 2, True)]


def test_nodes_from_the_launcher_win_over_host_names() -> None:
    seen = places([("0", "same", "0"), ("0", "same", "1"), ("1", "same", "0"), ("1", "same", "1")])
    assert seen == [(0, 2, 0, 2, True), (1, 2, 0, 2, True), (0, 2, 1, 2, True), (1, 2, 1, 2, True)]


def test_unequal_nodes() -> None:
    seen = places([(None, "a", "0"), (None, "a", "1"), (None, "b", "0")])
    assert seen == [(0, 2, 0, 2, False), (1, 2, 0, 1, False), (0, 1, 1, 2, False)]


def process_sets_at_once() -> tuple[list[int], float]:
    from crossover.collectives.process_sets import ProcessSet

    pair = ProcessSet([0, 2])
    runtime.init(process_sets=[pair])
    tensor = torch.tensor([float(runtime.rank())])
    if pair.communicator is not None:
        pair.communicator.all_reduce(tensor, name="pair").wait()
    return pair.ranks, tensor.item()


@pytest.mark.parametrize("launcher", BOTH)
def test_process_sets_are_added_at_once(launcher: str) -> None:
    assert run_ranks(process_sets_at_once, 3, launcher=launcher) == [([0, 2], 2.0), ([0, 2], 1.0), ([0, 2], 2.0)]


def on_gpus() -> tuple[str, list[float], list[float]]:
    runtime.init()
    comm = runtime.context().communicator
    device, host = torch.ones(4, device="cuda"), torch.ones(4)
    comm.all_reduce(device, name="device").wait()
    comm.all_reduce(host, name="host").wait()
    return comm.backend, device.tolist(), host.tolist()


@pytest.mark.gpu
def test_two_ranks_on_one_device_are_refused_under_nccl_only() -> None:
    one = {"CUDA_VISIBLE_DEVICES": "0"}
    for outcome in run_ranks(on_gpus, 2, env=one, expect_failure=True, gpus=True):
        assert outcome.error == "ValueError"
        assert "both use CUDA device" in outcome.message
    through_host = run_ranks(on_gpus, 2, env={**one, "CROSSOVER_BACKEND": "gloo"}, gpus=True)
    assert through_host == [("gloo", [2.0] * 4, [2.0] * 4)] * 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_nccl_for_devices_and_gloo_for_the_host() -> None:
    assert run_ranks(on_gpus, 2, gpus=True) == [("gloo+nccl", [2.0] * 4, [2.0] * 4)] * 2
