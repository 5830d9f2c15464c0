"""Small double-precision trainings that every distributed test compares with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import crossover as xo

BATCH = 6


def make_model(seed: int = 0, width: int = 40) -> nn.Module:
    """A float64 network whose parameters differ in size and shape."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, 30), nn.GELU(), nn.Linear(30, 3)).double()


def batch(rank: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one rank at one step."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1_009 * step + part)
    features = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)
    return features, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adamw_three_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, second, third = (model[n] for n in (0, 2, 4))  # type: ignore[index]
    groups = [
        {"params": first.parameters(), "lr": 0.01},
        {"params": second.parameters(), "lr": 0.02, "weight_decay": 0.1},
        {"params": third.parameters(), "lr": 0.005},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@dataclass(frozen=True)
class Recipe:
    """What a training does beside plain steps."""

    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    clip: float | None = None
    passes: int = 1
    decay: bool = False
    set_to_none: bool = True
    width: int = 40
    options: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "sgd with momentum": Recipe(),
    "adam": Recipe(adam),
    "adamw, three groups": Recipe(adamw_three_groups),
    "clipping": Recipe(clip=0.5),
    "accumulation 3": Recipe(passes=3),
    "scheduler": Recipe(adam, decay=True),
    "all of it": Recipe(adamw_three_groups, clip=0.5, passes=3, decay=True),
    "zeroed in place": Recipe(set_to_none=False),
    "a tensor copied by itself among small ones": Recipe(width=150),
}


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def micro_batches(recipe: Recipe, ranks: list[int], step: int) -> Iterator[tuple[Tensor, Tensor]]:
    for part in range(recipe.passes):
        pairs = [batch(rank, step, part) for rank in ranks]
        yield torch.cat([features for features, _ in pairs]), torch.cat([targets for _, targets in pairs])


def _step(recipe: Recipe, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if recipe.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def _scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.7) if recipe.decay else None


def alone(recipe: Recipe, ranks: list[int], steps: int) -> Tensor:
    """Parameters after one process trained on the batches of all ``ranks`` joined."""
    model = make_model(width=recipe.width)
    optimizer = recipe.optimizer(model)
    scheduler = _scheduler(recipe, optimizer)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        for features, targets in micro_batches(recipe, ranks, step):
            nn.functional.mse_loss(model(features), targets).backward()
        _step(recipe, model, optimizer, scheduler)
    return flat(model)


def with_ddp(recipe: Recipe, steps: int) -> Tensor:
    """Parameters after training under DistributedDataParallel."""
    model = make_model(width=recipe.width)
    wrapped = DistributedDataParallel(model)
    optimizer = recipe.optimizer(model)
    scheduler = _scheduler(recipe, optimizer)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        parts = list(micro_batches(recipe, [torch.distributed.get_rank()], step))
        for features, targets in parts[:-1]:
            with wrapped.no_sync():
                nn.functional.mse_loss(wrapped(features), targets).backward()
        features, targets = parts[-1]
        nn.functional.mse_loss(wrapped(features), targets).backward()
        _step(recipe, model, optimizer, scheduler)
    return flat(model)


def with_crossover(recipe: Recipe, steps: int) -> Tensor:
    """Parameters after training with the library."""
    model = make_model(width=recipe.width)
    optimizer = xo.DistributedOptimizer(
        recipe.optimizer(model),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=recipe.passes,
        **recipe.options,
    )
    scheduler = _scheduler(recipe, optimizer)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=recipe.set_to_none)
        for features, targets in micro_batches(recipe, [xo.rank()], step):
            nn.functional.mse_loss(model(features), targets).backward()
        _step(recipe, model, optimizer, scheduler)
    with optimizer.flushed():
        return flat(model)
