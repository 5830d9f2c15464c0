"""What a benchmark trains: one object that fixes model, data, loss, optimizer and target, the same for every system."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


class Workload(ABC):
    """A model and its data, fully determined by the seed.

    Rank ``r`` of ``size`` sees every ``size``-th training example, starting with the ``r``-th of a permutation that is
    new each epoch and the same on every rank; what a rank sees at a step depends on nothing but rank, step and size.

    Args:
        batch_size: examples a rank and step; it sets the computing time. Default: the class's ``default_batch_size``.
        seed: of the initial parameters and the order of the data.

    Attributes:
        name: as in :func:`benchmarks.workloads.get`.
        learning_rate: for one rank; the script decides how it grows with the number of ranks.
        steps: a length of training at which two ranks are near the best accuracy.
        target_accuracy: what two ranks trained synchronously reach well before ``steps`` are over.
    """

    name: str
    default_batch_size: int
    learning_rate: float
    steps: int
    target_accuracy: float

    def __init__(self, batch_size: int | None = None, seed: int = 0) -> None:
        self.batch_size = self.default_batch_size if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}; give the number of examples a rank and step, at least 1")
        self.seed = seed
        self._orders: dict[int, Tensor] = {}

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, initialised from torch's global random state."""

    @abstractmethod
    def training_set(self) -> tuple[Tensor, Tensor]:
        """All training inputs and targets, first dimension the example."""

    @abstractmethod
    def test_set(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets that are never trained on."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean loss of a batch."""

    def model(self) -> nn.Module:
        """A new model, the same for the same seed; leaves torch's global random state as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.build()

    def optimizer(self, parameters: Iterable[nn.Parameter], scale: float = 1.0) -> torch.optim.Optimizer:
        """SGD with momentum at ``scale`` times the workload's learning rate."""
        return torch.optim.SGD(parameters, lr=self.learning_rate * scale, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int | None = None) -> LambdaLR:
        """Step it after each step: the rate rises over the first twentieth of ``steps`` and falls to 0 as a cosine."""
        total = self.steps if steps is None else steps
        rise = max(1, total // 20)

        def factor(step: int) -> float:
            if step < rise:
                return (step + 1) / rise
            return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, total - rise)))

        return LambdaLR(optimizer, factor)

    def batch(self, rank: int, step: int, size: int = 1) -> tuple[Tensor, Tensor]:
        """The input and target of ``rank`` of ``size`` at ``step``.

        Raises:
            ValueError: no such rank, or more examples a step than the training set has.
        """
        if not 0 <= rank < size or step < 0:
            raise ValueError(f"rank, step: got rank {rank} of {size} at step {step}; give 0 <= rank < size, step >= 0")
        inputs, targets = self.training_set()
        steps = self.steps_per_epoch(size)
        epoch, position = divmod(step, steps)
        mine = self._order(epoch, len(inputs))[rank::size]
        chosen = mine[position * self.batch_size : (position + 1) * self.batch_size]
        return self.augment(inputs[chosen], epoch, chosen), targets[chosen]

    def augment(self, inputs: Tensor, epoch: int, examples: Tensor) -> Tensor:
        """Vary the inputs, by nothing but seed, epoch and the examples' numbers. The default leaves them."""
        return inputs

    def steps_per_epoch(self, size: int = 1) -> int:
        """Full batches that each of ``size`` ranks finds in one pass over the training set."""
        examples = len(self.training_set()[0])
        steps = examples // size // self.batch_size
        if steps < 1:
            raise ValueError(
                f"batch_size: {self.batch_size} on {size} ranks is more than the {examples} examples of {self.name}; "
                f"give at most {examples // size}"
            )
        return steps

    def _order(self, epoch: int, examples: int) -> Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self._orders = {epoch: torch.randperm(examples, generator=generator)}
        return self._orders[epoch]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Share of the test set's targets (-100 left out) that the model's largest output hits, in 0 to 1."""
        inputs, targets = self.test_set()
        was_training = model.training
        model.eval()
        hits = counted = 0
        for start in range(0, len(inputs), 64):
            output = model(inputs[start : start + 64])
            expected = targets[start : start + 64]
            hits += int((output.argmax(dim=-1) == expected).sum())
            counted += int((expected != -100).sum())
        model.train(was_training)
        return hits / counted

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one step's gradients, which is what an all-reduce carries."""
        return sum(p.numel() * p.element_size() for p in self.model().parameters() if p.requires_grad)
