"""Situation 18: one parameter under two names.

An embedding tied to the output layer, listed once per user and given one hook for each, is sent before its gradient
is complete, and results change with a bucket option that should not matter. With us it has one hook and one place in
one bucket, whichever names are passed, and equals one process with every bucket size, grouping and schedule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import crossover as xo
from tests.cases import invariants
from tests.cases.invariants import Job
from tests.harness import run_ranks

STEPS, WORDS, WIDTH = 5, 23, 12


class Tied(nn.Module):
    """A language model in little: the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.output = nn.Linear(WIDTH, WORDS)
        self.output.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.middle(self.embedding(tokens)))


def train(model: Tied, optimizer: Any, ranks: list[int], passes: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in ranks:
                generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                tokens = torch.randint(WORDS, (8, 2), generator=generator)
                loss = nn.functional.cross_entropy(model(tokens[:, 0]), tokens[:, 1])
                (loss / len(ranks)).backward()
        optimizer.step()


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def tied(expected: Tensor, passes: int = 1, **options: Any) -> None:
    model = Tied()
    both_names = list(model.named_parameters(remove_duplicate=False))
    assert len(both_names) == len(list(model.parameters())) + 1
    job = Job(
        model,
        adam(model),
        **{"named_parameters": both_names, "backward_passes_per_step": passes, **options},
    )
    train(model, job.optimizer, [xo.rank()], passes)
    job.check(steps=STEPS)
    invariants.require_close(f"parameters, {options}", parameters(model), expected)
    slots = [slot for bucket in invariants.engine_of(job.optimizer).buckets for slot in bucket.slots]
    assert len(slots) == len(list(model.parameters()))
    assert sum(slot.parameter is model.embedding.weight for slot in slots) == 1
    if options.get("named_parameters", both_names):
        assert any(slot.name == "embedding.weight" for slot in slots), "the first of its names"
    assert len(model.embedding.weight._post_accumulate_grad_hooks) == 1


def every_option() -> None:
    invariants.start()
    for passes in (1, 2):
        alone = Tied()
        train(alone, adam(alone), list(range(xo.size())), passes)
        expected = parameters(alone)
        for size in (1e-5, 1e-3, 25.0):
            tied(expected, passes, bucket_cap_mb=size, first_bucket_cap_mb=size)
        tied(expected, passes, num_groups=2)
        tied(expected, passes, named_parameters=None)
        tied(expected, passes, schedule="priority")
        tied(expected, passes, schedule=xo.schedulers.Priority(partition_bytes=256, fuse_bytes=64))


def test_a_tied_weight_has_one_hook_and_one_place() -> None:
    run_ranks(every_option, 2)
