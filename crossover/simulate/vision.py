"""ResNet and VGG for images of 224 x 224 and 1000 classes, from their papers' tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from crossover.simulate.layers import Layer, ModelShape

SIDE = 224
CLASSES = 1000
EXPANSION = 4
_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
_VGG_WIDTHS = (64, 128, 256, 512, 512)


def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, bias: bool = False) -> Layer:
    """A convolution with an output of ``side`` x ``side``; without bias it is followed by batch normalisation."""
    weights = inputs * outputs * kernel * kernel
    return Layer(name, weights + (outputs if bias else 2 * outputs), 2.0 * weights * side * side)


def linear(name: str, inputs: int, outputs: int) -> Layer:
    """A fully connected layer with bias."""
    return Layer(name, inputs * outputs + outputs, 2.0 * inputs * outputs)


def resnet(blocks: Sequence[int], batch: int = 64) -> ModelShape:
    """A residual network of bottleneck blocks, ``blocks`` in each of four stages, stride in the 3x3 convolutions.

    Example:
        >>> resnet((3, 4, 6, 3)).parameters
        25557032
    """
    depth = 2 + 3 * sum(blocks)
    layers = [convolution("conv1", 3, 64, 7, SIDE // 2)]
    channels, side = 64, SIDE // 4
    for stage, ((width, stride), count) in enumerate(zip(_STAGES, blocks, strict=True), start=1):
        for block in range(count):
            step = stride if block == 0 else 1
            layers += _bottleneck(f"layer{stage}.{block}", channels, width, side, step)
            channels, side = EXPANSION * width, side // step
    layers.append(linear("fc", channels, CLASSES))
    source = "He et al., Deep Residual Learning (CVPR 2016), table 1; stride as in torchvision (v1.5)"
    return ModelShape(f"resnet{depth}", tuple(layers), "convolution", batch, "image", source)


def _bottleneck(name: str, inputs: int, width: int, side: int, stride: int) -> Iterator[Layer]:
    after = side // stride
    yield convolution(f"{name}.conv1", inputs, width, 1, side)
    yield convolution(f"{name}.conv2", width, width, 3, after)
    yield convolution(f"{name}.conv3", width, EXPANSION * width, 1, after)
    if stride != 1 or inputs != EXPANSION * width:
        yield convolution(f"{name}.downsample", inputs, EXPANSION * width, 1, after)


def vgg(convolutions: Sequence[int], batch: int = 64) -> ModelShape:
    """A VGG without batch normalisation, ``convolutions`` in each of five stages, then three fully connected layers.

    Example:
        >>> vgg((2, 2, 3, 3, 3)).parameters, vgg((2, 2, 4, 4, 4)).parameters
        (138357544, 143667240)
    """
    layers, channels, side = [], 3, SIDE
    for stage, (width, count) in enumerate(zip(_VGG_WIDTHS, convolutions, strict=True), start=1):
        for number in range(1, count + 1):
            layers.append(convolution(f"conv{stage}_{number}", channels, width, 3, side, bias=True))
            channels = width
        side //= 2
    layers += [
        linear("fc6", channels * side * side, 4096),
        linear("fc7", 4096, 4096),
        linear("fc8", 4096, CLASSES),
    ]
    depth = sum(convolutions) + 3
    source = "Simonyan and Zisserman, Very Deep Convolutional Networks (ICLR 2015), table 1"
    return ModelShape(f"vgg{depth}", tuple(layers), "convolution", batch, "image", source)
