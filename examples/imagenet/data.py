"""Images from an ImageNet tree: which ones a rank gets, and how they are cut and augmented.

Every image's augmentation is a function of (seed, epoch, image): the number of workers and ranks, and where a run was
resumed, do not change it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from recipe import seed_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

Key = tuple[int, int]  # (epoch, place of the image in the tree)

# Of ImageNet's training images, for pixels from 0 to 255.
MEAN = torch.tensor([0.485, 0.456, 0.406]).mul(255).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).mul(255).view(1, 3, 1, 1)


class ImageTree(Dataset[tuple[Tensor, int]]):
    """Images under ``root/CLASS/...`` as ``(uint8 tensor of shape (3, height, width), class number)``.

    Paths are kept in one array rather than a million Python objects, which every loader worker would copy.

    Args:
        root: a folder that ``torchvision.datasets.ImageFolder`` can read.
        transform: from a PIL image to a tensor; its random numbers come from torch's global CPU generator.
        seed: of the run.
    """

    def __init__(self, root: Path, transform: Callable[[Image.Image], Tensor], seed: int = 0) -> None:
        folder = ImageFolder(root)
        self.root = root
        self.classes: list[str] = folder.classes
        self.paths = np.array([os.fsencode(os.path.relpath(path, root)) for path, _ in folder.samples])
        self.targets = np.array(folder.targets)
        self.transform = transform
        self.seed = seed

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        epoch, place = key
        with Image.open(self.root / os.fsdecode(self.paths[place])) as file:
            image = file.convert("RGB")
        generator = torch.default_generator
        before = generator.get_state()
        generator.manual_seed(seed_of(self.seed, epoch, place))
        try:
            return self.transform(image), int(self.targets[place])
        finally:
            generator.set_state(before)


class EpochSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that tells the data set the epoch and can start in the middle of it.

    Rank ``r`` of ``n`` gets places ``r, r + n, ...`` of the epoch's order, so what all ranks have had after ``k``
    images each is the order's first ``n * k``, and another number of ranks can go on from there.
    """

    first = 0

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch, whose order is the same on every rank, and how many of this rank's images to skip."""
        super().set_epoch(epoch)
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        for place in itertools.islice(super().__iter__(), self.first, None):
            yield self.epoch, place

    def __len__(self) -> int:
        return max(super().__len__() - self.first, 0)


def evaluation_keys(images: int, rank: int, size: int) -> list[Key]:
    """This rank's share of a set that is to be seen exactly once: nothing is padded, so shares may differ by one."""
    return [(0, place) for place in range(rank, images, size)]


def training_transform(size: int, augment: str) -> v2.Transform:
    """A random piece of the image, mirrored half the time; ``augment`` is ``"none"`` or ``"trivial"``."""
    extra = [v2.TrivialAugmentWide()] if augment == "trivial" else []
    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *extra, v2.PILToTensor()])


def evaluation_transform(size: int, resize: int) -> v2.Transform:
    """The centre of the image whose shorter side was made ``resize`` pixels long."""
    return v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size), v2.PILToTensor()])


def make_loader(
    images: ImageTree, keys: Iterable[Key], batch_size: int, workers: int, device: torch.device, whole_batches: bool
) -> DataLoader[Any]:
    """A loader of batches; ``whole_batches`` drops a last one that is smaller."""
    return DataLoader(
        images,
        batch_size=batch_size,
        sampler=keys,
        num_workers=workers,
        drop_last=whole_batches,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
        # A fork would copy the locks of the threads that carry gradients, in whatever state they are.
        multiprocessing_context="forkserver" if workers else None,
    )


class ToDevice:
    """Moves a batch to the device as bytes, and makes it zero-mean floats there.

    Args:
        device: where the model is.
        channels_last: whether images are to lie in memory pixel by pixel.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self.device = device
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.mean, self.deviation = MEAN.to(device), DEVIATION.to(device)

    def __call__(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        images = images.to(self.device, non_blocking=True).to(torch.float32, memory_format=self.format)
        return images.sub_(self.mean).div_(self.deviation), targets.to(self.device, non_blocking=True)
