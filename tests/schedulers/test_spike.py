"""Momentum for late gradients, against the recurrence written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from crossover.schedulers.spike import SpikeCompensation, spike_weights

RATE = 0.1
GRADIENTS = (0.7, -0.3, 1.1, 0.4)


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[float]:
    """The weight after each of some steps, all of them with late gradients."""
    parameter = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = make([parameter])
    compensation, weights = SpikeCompensation(enabled=True), []
    for gradient in GRADIENTS:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        compensation.complete(optimizer)
        weights.append(float(parameter.detach()))
    return weights


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_momentum_of_sgd(momentum: float, nesterov: bool, maximize: bool) -> None:
    if nesterov and not momentum:
        pytest.skip("torch knows no Nesterov without momentum")

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=RATE, momentum=momentum, nesterov=nesterov, maximize=maximize)

    weight, velocity, expected = 2.0, 0.0, []
    for gradient in GRADIENTS:
        gradient = -gradient if maximize else gradient
        velocity = momentum * velocity + gradient
        weight -= RATE * (momentum**2 * velocity + (1 + momentum) * gradient if momentum else gradient)
        expected.append(weight)
    assert trained(make) == pytest.approx(expected, abs=1e-14)


def test_dampening_and_weight_decay_of_sgd() -> None:
    decay, dampening, momentum = 0.01, 0.2, 0.9
    weight, velocity, expected = 2.0, 0.0, []
    for number, gradient in enumerate(GRADIENTS):
        before = weight
        decayed = gradient + decay * weight
        velocity = momentum * velocity + (1 - dampening) * decayed if number else decayed  # as torch begins
        weight -= RATE * (momentum**2 * velocity + (1 + momentum) * (1 - dampening) * gradient)
        weight *= 1 - RATE * (1 + momentum) * (1 - dampening) * decay
        expected.append(weight)
        assert abs(weight - before) > 1e-3
    made = trained(
        lambda parameters: torch.optim.SGD(
            parameters, lr=RATE, momentum=momentum, dampening=dampening, weight_decay=decay
        )
    )
    assert made == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_first_moment_of_adam(kind: type[torch.optim.Adam], amsgrad: bool) -> None:
    (first, second), decay = (0.9, 0.99), 0.1 if kind is torch.optim.AdamW else 0.0
    weight, moment, square, largest, expected = 2.0, 0.0, 0.0, 0.0, []
    for step, gradient in enumerate(GRADIENTS, start=1):
        moment = first * moment + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        largest = max(largest, square) if amsgrad else square
        size = (largest / (1 - second**step)) ** 0.5 + 1e-8
        weight -= RATE * decay * weight
        weight -= RATE * (first**2 * moment / (1 - first**step) + (1 - first**2) * gradient) / size
        expected.append(weight)
    made = trained(
        lambda parameters: kind(parameters, lr=RATE, betas=(first, second), weight_decay=decay, amsgrad=amsgrad)
    )
    assert made == pytest.approx(expected, abs=1e-12)


def test_weight_decay_in_the_gradient_of_adam() -> None:
    bare = trained(lambda parameters: torch.optim.Adam(parameters, lr=RATE))
    decayed = trained(lambda parameters: torch.optim.Adam(parameters, lr=RATE, weight_decay=0.5))
    assert decayed[-1] < bare[-1]


def test_others_are_left_alone() -> None:
    spike = SpikeCompensation(enabled=True)
    parameter = nn.Parameter(torch.ones(2))
    for optimizer in (torch.optim.RMSprop([parameter], momentum=0.9), torch.optim.Adagrad([parameter])):
        assert not spike.knows(optimizer)
        parameter.grad = torch.ones(2)
        optimizer.step()
        before = parameter.detach().clone()
        spike.complete(optimizer)
        assert torch.equal(parameter, before)
    sgd = torch.optim.SGD([parameter], lr=RATE, momentum=0.9)
    assert spike.knows(sgd)
    assert not SpikeCompensation(enabled=False).knows(sgd)
    spike.complete(sgd)  # has not stepped yet
    assert torch.equal(parameter, before)


def test_a_step_that_a_scaler_has_skipped_is_not_completed() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([parameter], lr=RATE, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()
    before = parameter.detach().clone()
    for found, changes in ((1.0, False), (0.0, True)):
        optimizer.found_inf = torch.tensor(found)  # as GradScaler sets it around the step of a fused optimizer
        SpikeCompensation(enabled=True).complete(optimizer)
        assert torch.equal(parameter, before) != changes


@pytest.mark.parametrize("momentum", [0.3, 0.5, 0.9, 0.99])
def test_every_gradient_counts_as_ever_in_the_long_run(momentum: float) -> None:
    of_buffer, of_gradient = spike_weights(momentum)
    assert of_buffer / (1 - momentum) + of_gradient == pytest.approx(1 / (1 - momentum))
