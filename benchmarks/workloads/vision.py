"""Three networks on scikit-learn's handwritten digits: 1,797 real images of 8x8, shown at 32x32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .workload import Workload

SIDE = 32
CLASSES = 10
FEATURES = 640
TEST_IMAGES = 360
MARGIN = 4
"""Training images are shifted by up to this many pixels each way."""


@functools.lru_cache(maxsize=1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images ``(n, 1, 32, 32)`` of zero mean and unit spread, their classes; test images and classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1)
    images = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    images = (images - images.mean()) / images.std()
    classes = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(20))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[training], classes[training], images[test], classes[test]


class Digits(Workload):
    """Ten classes, cross-entropy, images shifted at random."""

    def training_set(self) -> tuple[Tensor, Tensor]:
        return digits()[:2]

    def test_set(self) -> tuple[Tensor, Tensor]:
        return digits()[2:]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def augment(self, inputs: Tensor, epoch: int, examples: Tensor) -> Tensor:
        """Shift each image by its own number of pixels, the border value coming in."""
        seed = 7_919 * (1_000_003 * self.seed + epoch) + int(examples[0])
        shifts = torch.randint(0, 2 * MARGIN + 1, (len(inputs), 2), generator=torch.Generator().manual_seed(seed))
        padded = nn.functional.pad(inputs, (MARGIN,) * 4, mode="replicate")
        rows = shifts[:, :1] + torch.arange(SIDE)
        columns = shifts[:, 1:] + torch.arange(SIDE)
        return padded[torch.arange(len(inputs))[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


class MLP(Digits):
    """Eight layers of 1024x1024 with bias: 33.6 MB of gradients in equal pieces. Ten outputs are the classes."""

    name = "mlp"
    default_batch_size = 256
    learning_rate = 0.02
    steps = 200
    target_accuracy = 0.95

    def build(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for layer in range(8):
            linear = nn.Linear(SIDE * SIDE, SIDE * SIDE)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu" if layer < 7 else "linear")
            layers += [linear, nn.ReLU()] if layer < 7 else [linear]
        return nn.Sequential(*layers)


class _Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.around = nn.Sequential(around, nn.BatchNorm2d(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.body(inputs) + self.around(inputs))


class ResNet(Digits):
    """A residual network of eight blocks in four stages with batch normalisation; many small tensors."""

    name = "resnet"
    default_batch_size = 64
    learning_rate = 0.05
    steps = 200
    target_accuracy = 0.97

    def build(self) -> nn.Module:
        widths = (16, 32, 64, 128)
        layers: list[nn.Module] = [nn.Conv2d(1, widths[0], 3, 2, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
        channels = widths[0]
        for stage, width in enumerate(widths):
            layers += [_Block(channels, width, 1 if stage == 0 else 2), _Block(width, width, 1)]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class VGG(Digits):
    """Convolutions and pooling, then fully connected layers that hold nine tenths of the parameters.

    Their gradients are the first to be ready in a backward pass and the last to be used in the next forward pass.
    """

    name = "vgg"
    default_batch_size = 64
    learning_rate = 0.02
    steps = 200
    target_accuracy = 0.98

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width, convolutions in ((16, 1), (32, 2), (64, 2)):
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(channels * 16, FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)
        )
