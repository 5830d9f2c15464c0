"""Trainings with ``"auto"`` that several tests run on real ranks."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from crossover.deft import transfers
from tests.training import batch, flat, make_model, sgd

SLOW_LINK = {"CROSSOVER_EMULATED_LINK": "3mbit,0.1ms"}


class Pause(nn.Module):
    """Computing that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return values


def listen() -> io.StringIO:
    """What the log of this part says from now on."""
    said = io.StringIO()
    log = logging.getLogger("crossover.auto")
    log.addHandler(logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    return said


def make_job(pause: float, **options: Any) -> tuple[nn.Module, Any]:
    transfers.PROBE_BYTES = (1024, 16384)  # a link as slow as these tests' would take seconds for the usual ones
    model = make_model()
    if pause:
        model.append(Pause(pause))
    return model, xo.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def step(model: nn.Module, optimizer: Any, number: int, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    features, targets = batch(xo.rank(), number)
    nn.functional.mse_loss(model(features), targets).backward()
    optimizer.step()


def train(model: nn.Module, optimizer: Any, steps: range, set_to_none: bool = True) -> None:
    for number in steps:
        step(model, optimizer, number, set_to_none)


def weights(model: nn.Module) -> Tensor:
    return flat(model).clone()


def same_everywhere(model: nn.Module) -> bool:
    mine = flat(model)
    return all(torch.equal(mine, other) for other in xo.allgather_object(mine))
