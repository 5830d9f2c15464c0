"""Situation 44: one rank has fewer batches than another.

A plain loop hangs near the end of the epoch. Ours ends within the time-out with an error that names the rank that is
not there any more, whether it has left or waits elsewhere. Within ``Join([optimizer])``, or with ``xo.join()`` after
the loop, the epoch ends: the averages are over the ranks that still have data, and all ranks hold the last one's
parameters.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import crossover as xo
from crossover import runtime
from crossover.attachment import Attachment
from crossover.schedulers.fifo_delayed import FifoDelayed
from crossover.schedulers.generations import Generations
from tests.cases import invariants
from tests.harness import run_ranks
from tests.training import adam, batch, flat, make_model, sgd

LAUNCHERS = ["torch", pytest.param("horovod", marks=pytest.mark.horovod)]
TIMEOUT = {"CROSSOVER_TIMEOUT": "5"}
BATCHES = (10, 7)
EPOCHS = 2


def backward(model: nn.Module, ranks: list[int], step: int, passes: int) -> None:
    for part in range(passes):
        pairs = [batch(rank, step, part) for rank in ranks]
        features, targets = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
        nn.functional.mse_loss(model(features), targets).backward()


def train(model: nn.Module, optimizer: Any, steps: int, passes: int = 1) -> None:
    for step in range(steps):
        backward(model, [xo.rank()], step, passes)
        optimizer.step()
        optimizer.zero_grad()


def alone(
    build: Callable[[nn.Module], torch.optim.Optimizer], counts: tuple[int, ...], passes: int, epochs: int
) -> Tensor:
    """One process with the joined batches of the ranks that still have data at each step."""
    model = make_model()
    optimizer = build(model)
    for _ in range(epochs):
        for step in range(max(counts)):
            backward(model, [rank for rank, count in enumerate(counts) if step < count], step, passes)
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)


def plain(then: str) -> None:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, BATCHES[xo.rank()])
    if then == "waits elsewhere":
        xo.barrier()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("then", ["leaves", "waits elsewhere"])
def test_a_plain_loop_ends_with_the_absent_rank_named(launcher: str, then: str) -> None:
    outcomes = run_ranks(plain, 2, then, launcher=launcher, env=TIMEOUT, expect_failure=True, timeout=60)
    waiting = outcomes[0]
    assert waiting.error == "CommunicationError", waiting.describe()
    assert waiting.exit_code == 1
    assert "optimizer0.bucket0" in waiting.message
    if then == "leaves":
        assert "Absent: rank 1, which ended before this rank" in waiting.message, waiting.message
        assert "crossover.join()" in waiting.message
        assert outcomes[1].returned, outcomes[1].describe()
    else:
        assert "rank 1" in waiting.message
        assert "barrier" in waiting.message, waiting.message
        assert outcomes[1].error == "CommunicationError"
        assert outcomes[1].exit_code == 1


KINDS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "sgd": (sgd, 1, {}),
    "adam, accumulation, small buckets": (adam, 2, invariants.SMALL_BUCKETS),
}


def joined(ways: tuple[str, ...], counts: tuple[int, ...], schedule: str) -> dict[str, Tensor]:
    log = invariants.start()
    results = {}
    for way in ways:
        for name, (build, passes, options) in KINDS.items():
            model = make_model()
            job = invariants.Job(model, build(model), backward_passes_per_step=passes, schedule=schedule, **options)
            for _ in range(EPOCHS):
                with Join([job.optimizer]) if way == "Join" else contextlib.nullcontext():
                    train(model, job.optimizer, counts[xo.rank()], passes)
                if way == "join()":
                    assert xo.join() == counts.index(max(counts))
            job.optimizer.flush()
            assert not log.open
            assert job.steps == counts[xo.rank()] * EPOCHS
            invariants.require_same("parameters", invariants.digests(model))
            invariants.require_same("state", _state(job.optimizer))
            results[f"{way}, {name}"] = flat(model)
            del job, model
            gc.collect()  # a rank without any batch stands in for every optimizer that lives
    invariants.require_same_collectives()
    return results


def _state(optimizer: Any) -> list[list[float]]:
    values = optimizer.state_dict()["state"].values()
    return [entry.flatten().tolist() for state in values for entry in state.values() if isinstance(entry, Tensor)]


def check(results: list[dict[str, Tensor]], counts: tuple[int, ...]) -> None:
    wanted = {name: alone(build, counts, passes, EPOCHS) for name, (build, passes, _) in KINDS.items()}
    for name, first in results[0].items():
        assert (first - wanted[name.partition(", ")[2]]).abs().max() < 1e-12, name
        assert all(torch.equal(result[name], first) for result in results), name


@pytest.mark.parametrize("schedule", ["overlapped", "priority"])
@pytest.mark.parametrize("counts", [BATCHES, (3, 0, 5)], ids=["10 and 7", "3, none and 5"])
def test_joined(schedule: str, counts: tuple[int, ...]) -> None:
    env = {"CROSSOVER_TIMEOUT": "15"}
    check(run_ranks(joined, len(counts), ("Join", "join()"), counts, schedule, env=env), counts)


@pytest.mark.horovod
def test_joined_through_horovod() -> None:
    env = {"CROSSOVER_TIMEOUT": "15"}
    check(run_ranks(joined, 2, ("join()",), BATCHES, "overlapped", launcher="horovod", env=env), BATCHES)


def joined_with_late_updates(on_device: bool) -> Tensor:
    xo.init()
    if on_device:  # as far as asking goes: how many ranks stood in is then looked at in join() and flush() alone
        Generations.on_host = property(lambda generations: False)  # type: ignore[assignment, method-assign]
    model = make_model()
    schedule = FifoDelayed(merged=2, warmup_steps=1)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), schedule=schedule)
    for _ in range(EPOCHS):
        train(model, optimizer, BATCHES[xo.rank()], 1)
        assert xo.join() == 0
        optimizer.flush()
    return flat(model)


def test_joined_with_late_updates_on_host_and_device() -> None:
    """A generation in which all ranks only stood in is no update; without asking, the ranks would stand in for ever."""
    env = {"CROSSOVER_TIMEOUT": "15"}
    host, device = (run_ranks(joined_with_late_updates, 2, on_device, env=env) for on_device in (False, True))
    assert all(torch.equal(result, host[0]) for result in [*host, *device])


def join_context_without_torch_distributed() -> str:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    with pytest.raises(ValueError, match="Join") as caught:
        Join([optimizer])
    return str(caught.value)


@pytest.mark.horovod
def test_the_join_context_under_horovod_names_the_way_out() -> None:
    for message in run_ranks(join_context_without_torch_distributed, launcher="horovod"):
        assert "crossover.join()" in message


def terminated_early() -> str:
    xo.init()
    model = make_model()
    optimizer = xo.DistributedOptimizer(sgd(model), model.named_parameters())
    with pytest.raises(RuntimeError) as caught, Join([optimizer], throw_on_early_termination=True):
        train(model, optimizer, BATCHES[xo.rank()])
    return str(caught.value)


def test_torchs_own_early_termination_works() -> None:
    first, second = run_ranks(terminated_early, env={"CROSSOVER_TIMEOUT": "15"})
    assert "exhausted" in first.lower()
    assert "exhausted" in second.lower()


def two_optimizers() -> None:
    """Both are stood in for, in the order in which they were wrapped; not the one of an earlier phase."""
    xo.init()
    earlier = make_model(seed=3)
    earlier_optimizer = xo.DistributedOptimizer(sgd(earlier), earlier.named_parameters())
    train(earlier, earlier_optimizer, BATCHES[xo.rank()])
    assert xo.join() == 0
    models = [make_model(seed) for seed in (1, 2)]
    optimizers = [xo.DistributedOptimizer(sgd(model), model.named_parameters()) for model in models]
    for step in range(BATCHES[xo.rank()]):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, [xo.rank()], step, 1)
            optimizer.step()
            optimizer.zero_grad()
    assert xo.join() == 0
    for model in models:
        invariants.require_same("parameters", invariants.digests(model))


def test_two_optimizers_join() -> None:
    run_ranks(two_optimizers, env={"CROSSOVER_TIMEOUT": "15"})


def sparse_and_unused() -> None:
    """A sparse gradient, and parameters that only one rank uses, while others have no data left."""
    xo.init()
    table = nn.Embedding(5, 2, sparse=True).double()
    unused = nn.Linear(2, 2).double()
    model = nn.ModuleList([table, unused])
    xo.broadcast_parameters(model.state_dict(), root_rank=0)
    reference = [table.weight.detach().clone(), unused.weight.detach().clone()]
    optimizer = xo.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for step in range(4 if xo.rank() == 1 else 2):
        optimizer.zero_grad()
        rows = table(torch.tensor([xo.rank(), step]))
        (unused(rows).sum() if step == 3 else rows.sum()).backward()
        optimizer.step()
    assert xo.join() == 1
    invariants.require_same("parameters", invariants.digests(model))
    expected = reference[0].clone()
    for step in range(3):
        for rank in (0, 1) if step < 2 else (1,):
            for row in (rank, step):
                expected[row] -= 0.5 if step < 2 else 1.0
    expected[[1, 3]] -= reference[1].sum(0)
    assert torch.allclose(table.weight, expected, atol=1e-12)
    assert not torch.equal(unused.weight, reference[1])


def test_sparse_gradients_and_unused_parameters_join() -> None:
    run_ranks(sparse_and_unused, env={"CROSSOVER_TIMEOUT": "15"})


def dropped_while_joining() -> None:
    """The garbage collector may run at any time, and an optimizer that the script has dropped is often in a cycle."""
    xo.init()
    gc.disable()
    model = make_model()
    earlier = xo.DistributedOptimizer(sgd(make_model(seed=3)))
    earlier.itself = earlier
    del earlier
    optimizer = xo.DistributedOptimizer(sgd(model))
    train(model, optimizer, BATCHES[xo.rank()])
    communicator = runtime.context().communicator
    gather = communicator.all_gather_object

    def collect_and_gather(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return gather(*args, **kwargs)

    communicator.all_gather_object = collect_and_gather  # type: ignore[method-assign]
    assert xo.join() == 0
    assert len(Attachment.attached) == 2
    gc.collect()
    assert len(Attachment.attached) == 1
    invariants.require_same("parameters", invariants.digests(model))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_optimizer_dropped_before_the_join(launcher: str) -> None:
    run_ranks(dropped_while_joining, launcher=launcher, env={"CROSSOVER_TIMEOUT": "15"})
