"""One process that trains as ranks with delayed updates have to: the rule written down once more, by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.training import batch, flat, make_model

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Decision:
    """What one step does with generations: whether the one that accumulates closes, and how many are complete."""

    close: bool
    apply: int


SYNCHRONOUS = Decision(close=True, apply=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "momentum": momentum, "adam": adam}


class Delayed:
    """Generations of mean gradients over ``ranks``, each applied when a decision says so.

    Attributes:
        updates: number of updates so far.
    """

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        ranks: Sequence[int],
        gain: Callable[[int], float],
        clip: float | None = None,
        spike: bool = False,
    ) -> None:
        self.model = make_model()
        self.optimizer = make_optimizer(self.model)
        self.ranks = ranks
        self.gain = gain
        self.clip = clip
        self.spike = spike
        self.updates = 0
        self.accumulating: list[list[Tensor]] = []
        self.current: list[list[Tensor]] | None = None

    def gradient(self, step: int) -> list[Tensor]:
        """The mean gradient of one step over all ranks, at the weights of today."""
        total = [torch.zeros_like(parameter) for parameter in self.model.parameters()]
        for rank in self.ranks:
            features, targets = batch(rank, step)
            loss = nn.functional.mse_loss(self.model(features), targets)
            for sum_, part in zip(total, torch.autograd.grad(loss, list(self.model.parameters())), strict=True):
                sum_ += part / len(self.ranks)
        return total

    def step(self, step: int, decision: Decision) -> None:
        self.accumulating.append(self.gradient(step))
        if not decision.close:
            return
        closed, self.accumulating = self.accumulating, []
        if self.current is None and decision.apply:
            self.update(closed)
        elif decision.apply == 2:
            assert self.current is not None
            self.update([*self.current, *closed], late=True)
            self.current = None
        else:
            due, self.current = self.current, closed
            if due is not None:
                self.update(due, late=True)

    def flush(self) -> None:
        for generation, late in ((self.current, True), (self.accumulating, False)):
            if generation:
                self.update(generation, clip=False, late=late)
        self.current, self.accumulating = None, []

    def update(self, generation: list[list[Tensor]], clip: bool = True, late: bool = False) -> None:
        steps = len(generation)
        for place, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.stack([gradients[place] for gradients in generation]).sum(0) / steps
        if self.clip is not None and clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= self.gain(steps)
        self.optimizer.step()
        if late and self.spike:
            self.complete()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.updates += 1

    @torch.no_grad()
    def complete(self) -> None:
        """Momentum ``m`` for a late gradient: ``m**2`` of the buffer and ``1 + m`` of the gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state, gradient, rate = self.optimizer.state[parameter], parameter.grad, group["lr"]
                if "betas" in group:
                    (first, second), step = group["betas"], float(state["step"])
                    moment = state["exp_avg"] / (1 - first**step)
                    size = (state["exp_avg_sq"] / (1 - second**step)).sqrt() + group["eps"]
                    parameter -= rate * ((first**2 - 1) * moment + (1 - first**2) * gradient) / size
                elif momentum := group["momentum"]:
                    buffer = state["momentum_buffer"]
                    parameter -= rate * ((momentum**2 - 1) * buffer + (1 + momentum) * gradient)
                    parameter -= rate * (1 + momentum) * group["weight_decay"] * parameter

    def result(self) -> Tensor:
        return flat(copy.deepcopy(self.model))


def fifo_decisions(steps: int, merged: int, warmup_steps: int) -> list[Decision]:
    """What :class:`~crossover.schedulers.FifoDelayed` does in each step."""
    decisions, accumulated, current = [], 0, False
    for step in range(steps):
        if step < warmup_steps:
            decisions.append(SYNCHRONOUS)
            continue
        accumulated += 1
        close = accumulated >= merged
        decisions.append(Decision(close, int(close and current)))
        if close:
            accumulated, current = 0, True
    return decisions
