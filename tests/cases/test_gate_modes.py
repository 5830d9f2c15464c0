"""The situations that concern any script, with a gate: each rank does as a bare optimizer would, averages aside.

Numbers are those of the situations. With local steps ``p.grad`` is this rank's own, so what comes between
``backward()`` and ``step()`` sees it: clipping is by each rank's own norm (1), a gradient that is ``None`` here stays
``None`` whatever others have (16).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import crossover as xo
from tests.cases import invariants
from tests.cases.gates import LATE, MODES, Situation, options_of, script_of, train
from tests.harness import run_ranks
from tests.selsync.local_steps import Scripted, backward, one_thread, several
from tests.training import adam, adamw_three_groups, batch, flat, make_model, sgd

ENV = {"CROSSOVER_TIMEOUT": "10"}
EACH_MODE = [(mode,) for mode in MODES]
WITH_LATE = [*EACH_MODE, (LATE,)]


def clipped(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    backward(model, rank, step)
    if rank == 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1000)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert (norm > 100) == (rank == 1)
    optimizer.step()


def leftover(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Windows of three passes, every other one cut short, every third one begun and dropped before."""
    if step % 3 == 2:
        backward(model, rank, step + 100, 2)
        optimizer.zero_grad()
    backward(model, rank, step, 3 if step % 2 == 0 else 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 4 < 2)


def each_pass(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    for part in range(4):
        features, targets = batch(rank, step, part)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
        model.zero_grad()


def local_passes(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    no_sync = getattr(optimizer, "no_sync", contextlib.nullcontext)
    with no_sync(), no_sync():
        backward(model, rank, step, 2)
    if step % 2 == 0:
        backward(model, rank, step + 50)
    optimizer.step()
    optimizer.zero_grad()


def frozen(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """A layer that is frozen at first is trained from the third step on, and frozen again in the fifth."""
    model[0].requires_grad_(2 <= step < 4)
    backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()


def frozen_model() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def added(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    if step == 3:
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.02})
    backward(model, rank, step)
    optimizer.step()
    model.zero_grad()


def without_last_layer(model: nn.Module) -> torch.optim.Optimizer:
    first = [*model[0].parameters(), *model[2].parameters()]  # type: ignore[index]
    return torch.optim.SGD(first, lr=0.05, momentum=0.9)


def unused(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """Rank 1 does not use the last layer in every step."""
    features, targets = batch(rank, step)
    output = model(features) if rank == 0 or step % 2 else model[:4](features)[:, :3]
    nn.functional.mse_loss(output, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3)
    model[2].weight = model[0].weight
    return model


def with_closure(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        features, targets = batch(rank, step)
        loss = nn.functional.mse_loss(model(features), targets)
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)


def with_rates(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
    backward(model, rank, step)
    optimizer.step()
    model.zero_grad()


def checkpointed(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """The first layers run twice, in backward passes of their own within the backward pass."""
    features, targets = batch(rank, step)
    hidden = checkpoint(model[:2], features.requires_grad_(), use_reentrant=True)
    again = checkpoint(model[:2], features.detach().requires_grad_(), use_reentrant=True)
    nn.functional.mse_loss(model[2:](hidden + again), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    """The checkpoint library steps by itself, on rank 0 only, and loads what it got."""
    if step in (0, 3) and rank == 0:
        state = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, state)
    backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()


def without_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)


def large_model() -> nn.Module:
    """With gradients that are read as they arrive."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def plain(model: nn.Module, optimizer: Any, rank: int, step: int) -> None:
    backward(model, rank, step)
    optimizer.step()
    optimizer.zero_grad()


SITUATIONS = {
    "01 clipping": Situation(clipped),
    "07 leftover passes": Situation(leftover, adam, options={"backward_passes_per_step": 3}),
    "10 no_sync": Situation(local_passes, adamw_three_groups, options={"backward_passes_per_step": 2}),
    "12 frozen": Situation(frozen, model=frozen_model),
    "14 added": Situation(added, without_last_layer),
    "16 no gradient": Situation(unused),
    "18 tied": Situation(plain, model=tied_model),
    "23 closure": Situation(with_closure),
    "25 rates": Situation(with_rates, adamw_three_groups),
    "31 hidden steps": Situation(saved, without_momentum, hidden=True),
    "53 reentrant": Situation(checkpointed),
    "large gradients": Situation(plain, adam, large_model),
}


def go_through(mode: str) -> None:
    invariants.start()
    for name, situation in SITUATIONS.items():
        train(situation, mode, name)


def test_situations() -> None:
    run_ranks(several, 2, go_through, WITH_LATE, env=ENV, timeout=100)


def step_after_each_pass(mode: str) -> list[str]:
    """Situation 8: a window of four passes, and a step after each of them."""
    invariants.start()
    model = make_model()
    job = invariants.Job(
        model, sgd(model), gate=Scripted(script_of(mode)), backward_passes_per_step=4, **options_of(mode)
    )
    with invariants.warnings_of_the_library() as warnings:
        for step in range(3):
            each_pass(model, job.optimizer, xo.rank(), step)
    job.check(steps=12)
    return warnings


def test_step_after_each_pass() -> None:
    first, second = run_ranks(several, 2, step_after_each_pass, WITH_LATE, env=ENV)
    assert [len(warnings) for warnings in first] == [1] * len(WITH_LATE)
    assert all("backward_passes_per_step" in warning for [warning] in first)
    assert not any(second)


def two_optimizers(mode: str) -> None:
    """Situation 20: the generator's loss passes through the discriminator, whose optimizer does not step then."""
    invariants.start()
    generator, critic = make_model(1), nn.Linear(3, 1).double()
    nn.init.constant_(critic.weight, 0.1)
    nn.init.zeros_(critic.bias)
    jobs = [
        invariants.Job(model, sgd(model), gate=Scripted(script_of(mode)), **options_of(mode))
        for model in (generator, critic)
    ]
    for step in range(8):
        features, targets = batch(xo.rank(), step)
        for _ in range(2):
            jobs[1].optimizer.zero_grad()
            (critic(targets) - critic(generator(features).detach())).mean().backward()
            jobs[1].optimizer.step()
        jobs[0].optimizer.zero_grad()
        critic(generator(features)).mean().backward()
        jobs[0].optimizer.step()
    jobs[0].check(steps=8)
    jobs[1].optimizer.flush()  # the vote on gradients that are not applied would be counted with the next step
    jobs[1].check(steps=16)


def test_two_optimizers() -> None:
    run_ranks(several, 2, two_optimizers, WITH_LATE, env=ENV)


BATCHES = (9, 6)


def uneven(mode: str, way: str, epochs: int = 2) -> Tensor:
    """Situation 44: rank 1 runs out of data; averages are over the ranks that still have some."""
    log = invariants.start()
    model = make_model()
    gate = xo.selsync.Periodic(3) if mode == "periodic" else Scripted(MODES[mode])
    job = invariants.Job(model, sgd(model), gate=gate)
    for _ in range(epochs):
        with Join([job.optimizer]) if way == "Join" else contextlib.nullcontext():
            for step in range(BATCHES[xo.rank()]):
                plain(model, job.optimizer, xo.rank(), step)
        if way == "join()":
            assert xo.join() == 0
        invariants.require_same("parameters", invariants.digests(model))
        invariants.require_same("counters", (gate.steps, gate.local_steps, gate.apart))
    assert not log.open
    invariants.require_same_collectives()
    return flat(model)


def uneven_by_hand(script: list[list[int]], epochs: int = 2) -> Tensor:
    """The last rank with data decides the end of an epoch; a rank without data takes every average."""
    models = [make_model() for _ in BATCHES]
    optimizers = [sgd(model) for model in models]
    taken = 0
    for _ in range(epochs):
        for step in range(max(BATCHES)):
            ranks = [rank for rank, count in enumerate(BATCHES) if step < count]
            for rank in ranks:
                plain(models[rank], optimizers[rank], rank, step)
            if any(rank in ranks for rank in script[taken % len(script)]):
                mean = torch.stack([flat(models[rank]) for rank in ranks]).mean(0)
                for model in models:
                    nn.utils.vector_to_parameters(mean.clone(), model.parameters())
            taken += 1
        nn.utils.vector_to_parameters(flat(models[0]), models[1].parameters())
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    return flat(models[0])


@pytest.mark.parametrize("way", ["Join", "join()"])
def test_uneven_inputs(way: str) -> None:
    scripts = {**MODES, "periodic": [[], [], [0, 1]]}
    first, second = run_ranks(several, 2, uneven, [(mode, way) for mode in scripts], env=ENV)
    for script, one, other in zip(scripts.values(), first, second, strict=True):
        assert torch.equal(one, other)
        if way == "Join":  # crossover.join() goes through further rounds, which count as steps
            assert (one - uneven_by_hand(script)).abs().max() < 1e-12


def alone(mode: str) -> Tensor:
    """Situation 38: one rank."""
    xo.init()
    model = make_model()
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), gate=Scripted(MODES[mode]))
    for step in range(5):
        plain(model, optimizer, 0, step)
    with optimizer.flushed():
        return flat(model)


def test_one_rank_is_the_bare_optimizer() -> None:
    model = make_model()
    optimizer = sgd(model)
    with one_thread():
        for step in range(5):
            plain(model, optimizer, 0, step)
    [results] = run_ranks(several, 1, alone, EACH_MODE, launcher="none")
    assert all(torch.equal(result, flat(model)) for result in results)
