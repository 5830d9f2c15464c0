"""Every peer trains: exact ones as DDP does, approximate ones towards a smaller loss."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import Tensor, nn

import crossover as xo
from benchmarks import peers, workloads
from benchmarks.peers import decoupled, tuning
from tests.harness import run_ranks

pytest.importorskip("sklearn")

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
    # on loopback there is nothing to gain by a delay
    if peers.get(system).exact or system in ("crossover_deft", "crossover_auto"):
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


def search() -> tuple[object, object, object]:
    """DDP's bucket size for a tiny workload, what its hook takes over, and a system without anything to search."""
    xo.init()
    workload = workloads.get("vgg", batch_size=2)
    choice, tried = tuning.tune(peers.get("ddp"), workload)
    assert choice in peers.get("ddp").candidates(workload)
    assert tried[str(dict(choice))] == min(tried.values())
    assert len(tried) == len(peers.get("ddp").candidates(workload))
    return dict(choice), peers.get("ddp_fp16").tuned_as, tuning.tune(peers.get("powersgd"), workload)


def test_the_search_ends_alike_on_every_rank() -> None:
    first, second = run_ranks(search, 2, timeout=120)
    assert first == second
    assert first[1:] == ("ddp", ({}, {}))


def test_groups_keep_the_order_and_close_when_full() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))
    parameters = list(model.parameters())
    model[1].weight.requires_grad_(False)
    groups = decoupled.grouped(model, group_bytes=500)
    assert [[id(p) for p in group] for group in groups] == [
        [id(parameters[0]), id(parameters[2])],
        [id(parameters[3]), id(parameters[4])],
    ]
    model[4].double()
    assert [len(group) for group in decoupled.grouped(model, group_bytes=500)] == [2, 1, 1]
    assert [len(group) for group in decoupled.grouped(model, group_bytes=1)] == [1] * 4


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_groups_pieces_and_shards_fit_together(size: int) -> None:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((70_001,), (300, 500), (1,))]
    group = decoupled.Group(parameters, size)
    assert sum(view.numel() for view in group.views) <= group.buffer.numel() < 220_002 + size
    assert [piece.start for piece in group.pieces[1:]] == [piece.stop for piece in group.pieces[:-1]]
    assert group.pieces[-1].stop == group.buffer.numel() == size * len(group.shards)
    for piece, own in zip(group.pieces, group.own, strict=True):
        assert piece.stop - piece.start == size * (own.stop - own.start)
        assert (piece.stop - piece.start) * 4 <= decoupled.PIECE_BYTES


def borrows() -> None:
    xo.init()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    driver = decoupled.Decoupled(model, torch.optim.SGD(model.parameters(), lr=0.1), group_bytes=1)
    for _ in range(2):
        nn.functional.linear(model[0](torch.ones(1, 3)), model[1].weight, model[1].bias).sum().backward()
        driver.step()


def test_dear_refuses_a_parameter_whose_module_is_not_called() -> None:
    for outcome in run_ranks(borrows, 2, expect_failure=True):
        assert outcome.error == "RuntimeError"
        assert "without calling the module" in outcome.message


def test_registry() -> None:
    with pytest.raises(ValueError, match=r"ddp, .*crossover"):
        peers.get("nccl")
    with pytest.raises(ValueError, match="'ddp' is registered already"):
        peers.register(peers.get("ddp"))
    for name in peers.names():
        decider = peers.get(peers.get(name).tuned_as or name)
        candidates = decider.candidates(workloads.get("vgg"))
        assert len({str(candidate) for candidate in candidates}) == len(candidates) >= 1
