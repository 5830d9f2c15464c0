"""Situation 10: passes that are not to be shared.

Where a wrapper of the model decides in ``forward`` whether a pass is shared, a context around ``backward`` alone
comes too late, and a context that covers some wrapped modules but not others shares half of the gradients. With us
the decision is taken when the gradient arrives, for all parameters of the optimizer: the context may stand around
``backward`` alone or around both, be nested, and be left through an exception, and all of them train alike and send
nothing. Afterwards passes are shared again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import SMALL_BUCKETS, Job
from tests.harness import run_ranks
from tests.training import batch, flat, make_model, sgd

STEPS, LOCAL_PASSES = 4, 2
LocalPass = Callable[[nn.Module, Any, Tensor, Tensor], None]


def loss_of(model: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(features), targets) / (LOCAL_PASSES + 1)


def around_backward(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> None:
    loss = loss_of(model, features, targets)
    with optimizer.no_sync():
        loss.backward()


def around_both(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> None:
    with optimizer.no_sync():
        loss_of(model, features, targets).backward()


def nested(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> None:
    with optimizer.no_sync():
        with optimizer.no_sync():
            loss = loss_of(model, features, targets)
        loss.backward()  # still inside the outer one


def left_by_exception(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> None:
    def pass_that_fails_at_its_end() -> None:
        with optimizer.no_sync(), optimizer.no_sync():
            loss_of(model, features, targets).backward()
            raise KeyError("in the user's loop")

    with pytest.raises(KeyError):
        pass_that_fails_at_its_end()


def left_by_exception_in_backward(model: nn.Module, optimizer: Any, features: Tensor, targets: Tensor) -> None:
    """The pass fails before any gradient has arrived, and is tried again."""

    def fail(gradient: Tensor) -> None:
        raise KeyError("in backward")

    loss = loss_of(model, features, targets)
    handle = loss.register_hook(fail)
    with pytest.raises(KeyError), optimizer.no_sync():
        loss.backward()
    handle.remove()
    around_both(model, optimizer, features, targets)


def train(model: nn.Module, optimizer: Any, local: LocalPass, log: invariants.Log) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        mark = log.mark
        for part in range(LOCAL_PASSES):
            local(model, optimizer, *batch(xo.rank(), step, part))
        sent = log.since(mark)
        assert not sent, f"sent within no_sync(): {sent}"
        features, targets = batch(xo.rank(), step, LOCAL_PASSES)
        loss_of(model, features, targets).backward()
        assert log.mark > mark, "a pass outside is shared"
        optimizer.step()


def reference() -> Tensor:
    model = make_model()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(LOCAL_PASSES + 1):
            for _, features, targets in invariants.parts_of_step(step, list(range(xo.size())), part):
                (loss_of(model, features, targets) / xo.size()).backward()
        optimizer.step()
    return flat(model)


def interrupted_pass(log: invariants.Log) -> None:
    """A pass in ``no_sync()`` fails half-way, with some gradients there; the script clears them and goes on."""
    model = make_model()
    job = Job(model, sgd(model), **SMALL_BUCKETS)
    train(model, job.optimizer, around_both, log)

    def fail(gradient: Tensor) -> None:
        raise KeyError("in backward")

    for passes in range(2):
        mark = log.mark
        with job.optimizer.no_sync():
            for part in range(passes):
                loss_of(model, *batch(xo.rank(), 90, part)).backward()
            handle = model[0].weight.register_hook(fail)
            with pytest.raises(KeyError):
                loss_of(model, *batch(xo.rank(), 90, 9)).backward()
            handle.remove()
        assert log.mark == mark
        job.optimizer.zero_grad()
    train(model, job.optimizer, around_both, log)
    job.check(steps=2 * STEPS)
    alone = make_model()
    optimizer = sgd(alone)
    for _ in range(2):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(LOCAL_PASSES + 1):
                for _, features, targets in invariants.parts_of_step(step, list(range(xo.size())), part):
                    (loss_of(alone, features, targets) / xo.size()).backward()
            optimizer.step()
    invariants.require_close("parameters", flat(model), flat(alone))


def every_context() -> None:
    log = invariants.start()
    expected = reference()
    for schedule in ("overlapped", "priority"):
        for local in (around_backward, around_both, nested, left_by_exception, left_by_exception_in_backward):
            model = make_model()
            job = Job(model, sgd(model), schedule=schedule, **SMALL_BUCKETS)
            train(model, job.optimizer, local, log)
            job.check(steps=STEPS)
            invariants.require_close(f"parameters, {local.__name__}", flat(model), expected)
    interrupted_pass(log)


def test_every_context_sends_nothing_and_trains_alike() -> None:
    run_ranks(every_context, 2)
