"""Every peer trains: exact ones as DDP does, approximate ones towards a smaller loss."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from benchmarks import peers, workloads
from benchmarks.peers import decoupled, horovod, torch_ddp, tuning
from benchmarks.workloads.measure import measure_compute
from tests.harness import run_ranks

STEPS = 12
TOLERANCE = 1e-9
LAUNCHERS = {"torchrun": "torch", "horovod": "horovod"}

Trained = tuple[Tensor, list[float]]
Results = dict[str, list[Trained | str]]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(system: peers.System) -> Trained:
    """Parameters and losses after some steps of the smallest buckets, with a learning rate that changes every step."""
    workload = workloads.get("gpt", batch_size=2)
    model = workload.model().double()
    settings = system.candidates(workload)[-1]
    training = system.prepare(model, workload.optimizer, workload, peers.HORIZON, **settings)
    scheduler = workload.scheduler(training.scheduled, 4 * STEPS)
    losses = []
    for step in range(STEPS):
        losses.append(float(training(*workload.batch(xo.rank(), step, xo.size()))))
        scheduler.step()
    training.finish()
    parameters = flat(model)
    del training
    tuning.clean_up()
    return parameters, losses


def train_each(names: list[str]) -> dict[str, Trained | str]:
    xo.init()
    return {name: trained_or_reason(peers.get(name)) for name in names}


def trained_or_reason(system: peers.System) -> Trained | str:
    try:
        return train(system)
    except peers.NotRunnable as reason:
        return str(reason)


def systems_of(launcher: str) -> list[str]:
    return [name for name in peers.names() if peers.get(name).launcher == launcher]


def run(launcher: str) -> Results:
    names = systems_of(launcher)
    ranks = run_ranks(train_each, 2, names, launcher=LAUNCHERS[launcher], timeout=100)
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.fixture(scope="module")
def by_torchrun() -> Results:
    return run("torchrun")


@pytest.fixture(scope="module")
def by_horovod() -> Results:
    return run("horovod")


def check(system: str, results: Results, reference: Results) -> None:
    if isinstance(results[system][0], str):
        assert system == "ddp_bf16", "every other system runs where these tests do"
        pytest.skip(results[system][0])
    (first, losses), (second, _) = results[system]
    ddp = reference["ddp"][0][0]
    assert statistics.mean(losses[-3:]) < losses[0] - 0.1
    if system == "alone":
        assert not torch.equal(first, second)
        return
    assert torch.allclose(first, second, rtol=0, atol=TOLERANCE), "ranks differ after finish()"
    difference = (first - ddp).abs().max()
    if peers.get(system).exact:
        assert difference < TOLERANCE
    else:
        assert difference > 10 * TOLERANCE, "it was to be an approximation"


@pytest.mark.slow
@pytest.mark.parametrize("system", systems_of("torchrun"))
def test_trains_under_torchrun(system: str, by_torchrun: Results) -> None:
    check(system, by_torchrun, by_torchrun)


@pytest.mark.slow
@pytest.mark.horovod
@pytest.mark.parametrize("system", systems_of("horovod"))
def test_trains_under_horovod(system: str, by_horovod: Results, by_torchrun: Results) -> None:
    check(system, by_horovod, by_torchrun)
