"""Situation 49: several jobs on one machine, or several ranks on one GPU.

With one default port the second job fails, and NCCL makes a riddle of two ranks on one device. Two jobs that were
started together train side by side here, each on the port that its launcher chose, and an end of one is nothing to
the other. On a port that is taken a job ends within its time-out and names the port. Ranks that would share a device
under NCCL are refused in words, on every rank. What concerns taking turns on a device comes with that part of the
library.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

import crossover as xo
from crossover.comm import torch_start
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import adam, batch, flat, make_model

STEPS = 12
ENV = {"CROSSOVER_TIMEOUT": "6"}


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def loss_of(model: nn.Module, ranks: list[int], step: int) -> Tensor:
    pairs = [batch(rank, step) for rank in ranks]
    features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    return nn.functional.mse_loss(model(features), targets)


def of_two_jobs(ports: list[int], killed: bool) -> tuple[int, Tensor, list[int]]:
    """Four processes are two jobs of two ranks, as two launchers on one machine would start them."""
    job, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_PORT"] = str(ports[job])
    invariants.start()
    model = make_model(seed=job)
    optimizer: Any = xo.DistributedOptimizer(adam(model), model.named_parameters())
    for step in range(STEPS):
        if killed and job == 1 and step == STEPS // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, [10 * job + rank], step).backward()
        optimizer.step()
    invariants.require_same("parameters", invariants.digests(model))
    return job, flat(model), [xo.rank(), xo.size(), xo.local_rank(), xo.local_size(), xo.cross_size()]


def alone(job: int) -> Tensor:
    model = make_model(seed=job)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, [10 * job, 10 * job + 1], step).backward()
        optimizer.step()
    return flat(model)


def test_two_jobs_started_together() -> None:
    env = {**ENV, "TORCHELASTIC_USE_AGENT_STORE": None}
    results = run_ranks(of_two_jobs, 4, free_ports(2), False, env=env)
    for number, (job, trained, places) in enumerate(results):
        assert job == number // 2
        assert places == [number % 2, 2, number % 2, 2, 1]
        assert (trained - alone(job)).abs().max() < 1e-12


def test_a_killed_job_is_nothing_to_the_other() -> None:
    env = {**ENV, "TORCHELASTIC_USE_AGENT_STORE": None}
    outcomes = run_ranks(of_two_jobs, 4, free_ports(2), True, env=env, expect_failure=True, timeout=60)
    for outcome in outcomes[:2]:
        assert outcome.returned, outcome.describe()
        assert (outcome.value[1] - alone(0)).abs().max() < 1e-12
    assert [outcome.exit_code for outcome in outcomes[2:]] == [-signal.SIGKILL] * 2


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which another job keeps its store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    yield store.port
    del store


def on_the_port(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    xo.init()


def test_a_port_that_is_taken_is_named(taken_port: int) -> None:
    env = {"CROSSOVER_TIMEOUT": "3", "TORCHELASTIC_USE_AGENT_STORE": None}
    outcomes = run_ranks(on_the_port, 2, taken_port, env=env, expect_failure=True, timeout=60)
    for outcome in outcomes:
        assert outcome.error == "CommunicationError", outcome.describe()
        assert outcome.exit_code == 1
        assert "crossover.init" in outcome.message
    assert str(taken_port) in outcomes[0].message, outcomes[0].message
    assert "in use" in outcomes[0].message.lower()


def test_ranks_that_share_a_device_are_refused_in_words() -> None:
    communicator: Any = SimpleNamespace(size=4)
    torch_start.refuse_shared_devices(["GPU-a", "GPU-b", None, None], communicator)
    torch_start.refuse_shared_devices([None] * 4, communicator)
    with pytest.raises(ValueError, match="ranks 1 and 3 of 4 both use CUDA device GPU-b") as caught:
        torch_start.refuse_shared_devices(["GPU-a", "GPU-b", "GPU-c", "GPU-b"], communicator)
    assert "one rank a device" in str(caught.value)
    assert "CROSSOVER_BACKEND=gloo" in str(caught.value)


def initialised() -> int:
    xo.init()
    model = nn.Linear(2, 2).cuda()
    optimizer: Any = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
    return xo.size()


@pytest.mark.gpu
def test_two_ranks_on_one_device_under_nccl() -> None:
    env = {**ENV, "CUDA_VISIBLE_DEVICES": "0"}
    for outcome in run_ranks(initialised, 2, env=env, expect_failure=True, timeout=120, gpus=True):
        assert outcome.error == "ValueError", outcome.describe()
        assert "both use CUDA device" in outcome.message
        assert outcome.exit_code == 1
    assert run_ranks(initialised, 2, env={**env, "CROSSOVER_BACKEND": "gloo"}, timeout=120, gpus=True) == [2, 2]
