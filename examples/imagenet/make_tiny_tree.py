"""Make a small ImageNet-like tree of JPEGs: coloured shapes that a network can learn to tell apart in a few epochs.

    python examples/imagenet/make_tiny_tree.py out/tiny --classes 6 --train 48 --val 21

A class is a colour and a shape; place, size, background and noise are random, and the same for the same --seed.
"""

from __future__ import annotations

import argparse
import colorsys
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("disc", "square", "triangle", "cross")


def draw(kind: int, classes: int, pixels: int, source: random.Random) -> Image.Image:
    """One image of class ``kind``."""
    background = tuple(source.randint(60, 190) for _ in range(3))
    image = Image.new("RGB", (pixels, pixels), background)
    pen = ImageDraw.Draw(image)
    hue = kind / classes + source.uniform(-0.02, 0.02)
    colour = tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1.0, 0.9, source.uniform(0.75, 1.0)))
    half = source.uniform(0.22, 0.36) * pixels
    x, y = (source.uniform(half, pixels - half) for _ in range(2))
    shape = SHAPES[kind % len(SHAPES)]
    if shape == "disc":
        pen.ellipse((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "square":
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif shape == "triangle":
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=colour)
    else:
        pen.rectangle((x - half, y - half / 3, x + half, y + half / 3), fill=colour)
        pen.rectangle((x - half / 3, y - half, x + half / 3, y + half), fill=colour)
    noise = np.random.default_rng(source.getrandbits(32)).normal(0, 12, (pixels, pixels, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def make_tree(root: Path, classes: int = 6, train: int = 48, val: int = 21, pixels: int = 64, seed: int = 0) -> None:
    """Write ``root/train`` and ``root/val`` with this many images a class.

    Raises:
        ValueError: a number is below 1.
    """
    for name, value in {"classes": classes, "train": train, "val": val, "pixels": pixels}.items():
        if value < 1:
            raise ValueError(f"{name}: is {value}; it has to be at least 1")
    source = random.Random(seed)
    for part, count in (("train", train), ("val", val)):
        for kind in range(classes):
            folder = root / part / f"class{kind:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                draw(kind, classes, pixels, source).save(folder / f"{number:05d}.JPEG", quality=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--classes", type=int, default=6)
    parser.add_argument("--train", type=int, default=48, help="training images of each class")
    parser.add_argument("--val", type=int, default=21, help="images of each class to evaluate on")
    parser.add_argument("--pixels", type=int, default=64, help="width and height")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_tree(options.root, options.classes, options.train, options.val, options.pixels, options.seed)
    print(f"{options.root}: {options.classes} classes, {options.train} + {options.val} images each")


if __name__ == "__main__":
    main()
