"""Situation 20: two optimizers, and one backward pass that reaches the parameters of both.

The generator's loss passes through the discriminator, whose hooks fire and start averaging gradients that nobody is
going to use; its own next step then fails, unless the script synchronises and throws the result away. With us no
workaround is needed: gradients that are cleared without a step leave nothing behind, with two critic steps for each
generator step, and with any schedule. What they cost in traffic is recorded and, as it goes on, warned of; it is
nothing when the discriminator is frozen during the generator's step, or when that pass is run within its
``no_sync()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import batch

ROUNDS, CRITIC_STEPS = 5, 2
Context = Callable[[nn.Module, Any], contextlib.AbstractContextManager[None]]


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 7)).double()
    discriminator = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return generator, discriminator


def make_optimizers(generator: nn.Module, discriminator: nn.Module) -> tuple[Any, Any]:
    return (
        torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5, 0.9)),
        torch.optim.SGD(discriminator.parameters(), lr=0.05, momentum=0.5),
    )


def loss_of(scores: Tensor, real: bool, parts: int) -> Tensor:
    return nn.functional.softplus(-scores if real else scores).mean() / parts


def critic_step(generator: nn.Module, discriminator: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    optimizer.zero_grad()
    for rank in ranks:
        features, noise = batch(rank, step)
        fake = generator(noise).detach()
        loss = loss_of(discriminator(features), True, len(ranks)) + loss_of(discriminator(fake), False, len(ranks))
        loss.backward()
    optimizer.step()


def generator_step(generator: nn.Module, discriminator: nn.Module, optimizer: Any, step: int, ranks: list[int]) -> None:
    optimizer.zero_grad()
    for rank in ranks:
        loss_of(discriminator(generator(batch(rank, step, 1)[1])), True, len(ranks)).backward()
    optimizer.step()


def nothing_special(discriminator: nn.Module, optimizer: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def frozen(discriminator: nn.Module, optimizer: Any) -> Any:
    discriminator.requires_grad_(False)
    yield
    discriminator.requires_grad_(True)


def not_shared(discriminator: nn.Module, optimizer: Any) -> contextlib.AbstractContextManager[None]:
    return optimizer.no_sync()


def reference() -> tuple[Tensor, Tensor]:
    generator, discriminator = make_pair()
    of_generator, of_discriminator = make_optimizers(generator, discriminator)
    everyone = list(range(xo.size()))
    for turn in range(ROUNDS):
        for part in range(CRITIC_STEPS):
            critic_step(generator, discriminator, of_discriminator, CRITIC_STEPS * turn + part, everyone)
        generator_step(generator, discriminator, of_generator, turn, everyone)
    return parameters(generator), parameters(discriminator)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(schedule: str, context: Context, log: invariants.Log) -> int:
    """Returns how many collectives of the discriminator's optimizer the generator's steps started."""
    generator, discriminator = make_pair()
    optimizers = make_optimizers(generator, discriminator)
    of_generator = Job(generator, optimizers[0], schedule=schedule, **SMALL_BUCKETS)
    of_discriminator = Job(discriminator, optimizers[1], schedule=schedule, **SMALL_BUCKETS)
    discarded = 0
    with invariants.warnings_of_the_library() as warnings:
        for turn in range(ROUNDS):
            for part in range(CRITIC_STEPS):
                critic_step(
                    generator, discriminator, of_discriminator.optimizer, CRITIC_STEPS * turn + part, [xo.rank()]
                )
            mark = log.mark
            with context(discriminator, of_discriminator.optimizer):
                generator_step(generator, discriminator, of_generator.optimizer, turn, [xo.rank()])
            discarded += len(log.since(mark, of_discriminator.optimizer))
    of_generator.check(steps=ROUNDS)
    of_discriminator.check(steps=ROUNDS * CRITIC_STEPS)
    expected = reference()
    invariants.require_close(f"generator, {schedule}", parameters(generator), expected[0])
    invariants.require_close(f"discriminator, {schedule}", parameters(discriminator), expected[1])
    assert len(warnings) == (1 if discarded and xo.rank() == 0 else 0), warnings
    for warning in warnings:
        assert "averaged over ranks 2 times for one step()" in warning
        assert "requires_grad_(False)" in warning
        assert "no_sync()" in warning
    return discarded


def cost_in_the_records(log: invariants.Log) -> None:
    """The critic's first step after each one of the generator's carries the cost of what was discarded."""
    records: list[dict[str, Any]] = []
    xo.telemetry.start(loggers=[records.append])
    train("overlapped", nothing_special, log)
    xo.telemetry.stop()
    usual = [record["crossover/bytes_sent"] for record in records if record["crossover/shared_passes"] == 1]
    costly = [record["crossover/bytes_sent"] for record in records if record["crossover/shared_passes"] == 2]
    assert len(costly) == ROUNDS - 1
    assert len(usual) == ROUNDS * (CRITIC_STEPS + 1) - len(costly)
    assert {nbytes / 2 for nbytes in costly} <= set(usual)


def every_way() -> None:
    log = invariants.start()
    cost_in_the_records(log)
    for schedule in ("overlapped", "priority"):
        assert train(schedule, nothing_special, log) > 0, "the cost that the warning tells of"
        assert train(schedule, frozen, log) == 0
        assert train(schedule, not_shared, log) == 0


def test_no_workaround_is_needed_and_the_cost_is_told() -> None:
    run_ranks(every_way, 2)
