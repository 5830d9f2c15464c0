"""What the timing of a step sees, and what it leaves out."""

from __future__ import annotations

import os

import torch
from torch import nn

from crossover.buckets import Bucket
from crossover.deft.measure import StepTimer


def watched(model: nn.Module) -> StepTimer:
    named = list(model.named_parameters())
    timer = StepTimer([Bucket(0, [(number, name, parameter) for number, (name, parameter) in enumerate(named)])])
    timer.start()
    timer.step_begins()
    return timer


def end_step(timer: StepTimer) -> None:
    timer.bucket_ready(0)
    timer.backward_ended()


def test_forward_begins_with_a_module_that_holds_parameters() -> None:
    """Not with a transform of the data, which is a module as well: fetching data is no computing."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    timer = watched(model)
    data = nn.Flatten()(torch.ones(2, 3))
    end_step(timer)
    assert timer.steps == 0
    timer.step_begins()
    nn.MSELoss()(model(data), torch.ones(2, 2))
    end_step(timer)
    assert timer.steps == 1
    forward, backward, between = timer.result()
    assert min(*forward, *backward, between) >= 0
    timer.stop()


def test_a_forked_worker_marks_nothing() -> None:
    """It inherits the hooks, and an event on a GPU would end it."""
    model = nn.Linear(3, 2)
    timer = watched(model)
    read, write = os.pipe()
    if not os.fork():
        model(torch.ones(1, 3))
        end_step(timer)
        os.write(write, bytes([timer.steps]))
        os._exit(0)
    assert os.read(read, 1) == bytes([0])
    os.wait()
    model(torch.ones(1, 3))
    end_step(timer)
    assert timer.steps == 1
    timer.stop()
