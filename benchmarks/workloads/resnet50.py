"""torchvision's ResNet-50, whose shapes are those of the published figures: 161 tensors, 102 MB of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .workload import Workload

CLASSES = 1000
SIDE = 224


class ResNet50(Workload):
    """For costs of a step only: its images are noise, so it is in no list of workloads that are trained.

    Needs torchvision, as in the environment of ``make imagenet-test``.
    """

    name = "resnet50"
    default_batch_size = 8
    learning_rate = 0.1
    steps = 1
    target_accuracy = 0.0

    def build(self) -> nn.Module:
        from torchvision.models import resnet50

        model: nn.Module = resnet50(num_classes=CLASSES)
        return model

    def training_set(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        images = torch.randn(4 * self.batch_size, 3, SIDE, SIDE, generator=generator)
        return images, torch.randint(CLASSES, (len(images),), generator=generator)

    def test_set(self) -> tuple[Tensor, Tensor]:
        return self.training_set()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)
