"""The command line of ``train.py``."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from pathlib import Path
from typing import Any

import torchvision

import crossover as xo

COMPRESSIONS = {"none": xo.Compression.none, "fp16": xo.Compression.fp16, "bf16": xo.Compression.bf16}


def parse(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """Read and check the command line; every rank gets the same one."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    _add_job(parser)
    _add_recipe(parser)
    _add_crossover(parser)
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _add_job(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("data, model and output")
    job.add_argument("data", type=Path, help="folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG")
    job.add_argument("--out", type=Path, default=Path("out/imagenet"), help="checkpoints and results (%(default)s)")
    job.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    job.add_argument(
        "--model", default="resnet50", metavar="NAME", help="any classifier of torchvision.models (%(default)s)"
    )
    job.add_argument("--image-size", type=int, default=224, metavar="PIXELS", help="for training (%(default)s)")
    job.add_argument("--val-size", type=int, metavar="PIXELS", help="for evaluation (as --image-size)")
    job.add_argument(
        "--val-resize", type=int, metavar="PIXELS", help="shorter side before the centre is cut (--val-size / 0.875)"
    )
    job.add_argument("--workers", type=int, default=8, metavar="N", help="loader processes of each rank (%(default)s)")
    job.add_argument(
        "--save-steps", type=int, default=0, metavar="N", help="save every N steps as well as after each epoch (off)"
    )
    job.add_argument("--log-steps", type=int, default=20, metavar="N", help="report every N steps (%(default)s)")
    job.add_argument("--tensorboard", action="store_true", help="write OUT/tensorboard")
    job.add_argument("--seed", type=int, default=0, help="weights, order and augmentation of images (%(default)s)")
    job.add_argument(
        "--deterministic", action="store_true", help="only kernels that give the same bits each time; slower"
    )
    job.add_argument("--cpu", action="store_true", help="leave GPUs alone")


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--epochs", type=int, default=90)
    recipe.add_argument("--batch-size", type=int, default=32, help="images a backward pass on each rank (%(default)s)")
    recipe.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    recipe.add_argument(
        "--lr", type=float, default=0.1, help="for 256 images a step; scaled to those there are (%(default)s)"
    )
    recipe.add_argument("--momentum", type=float, default=0.9)
    recipe.add_argument(
        "--weight-decay", type=float, default=1e-4, help="not of biases and normalisations (%(default)s)"
    )
    recipe.add_argument("--warmup-epochs", type=float, default=5.0)
    recipe.add_argument(
        "--decay", choices=["cosine", "step"], default="cosine", help="of the learning rate after the warm-up"
    )
    recipe.add_argument(
        "--step-epochs", type=int, default=30, help="with --decay step: a tenth after each N epochs (%(default)s)"
    )
    recipe.add_argument("--label-smoothing", type=float, default=0.1)
    recipe.add_argument(
        "--augment", choices=["none", "trivial"], default="none", help="beside random crop and mirroring"
    )
    recipe.add_argument(
        "--amp", choices=["none", "bf16", "fp16"], default="none", help="mixed precision; fp16 with GradScaler"
    )
    recipe.add_argument("--channels-last", action="store_true")
    recipe.add_argument(
        "--ema-decay", type=float, default=0.0, help="evaluate a running average of the weights too (off; 0.9999)"
    )
    recipe.add_argument("--clip", type=float, default=0.0, metavar="NORM", help="clip the gradient's norm (off)")


def _add_crossover(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("crossover", "CROSSOVER_* variables work too")
    group.add_argument("--schedule", help="overlapped, priority, ... (CROSSOVER_SCHEDULE, else overlapped)")
    group.add_argument("--compression", choices=list(COMPRESSIONS), default="none", help="how gradients travel")
    group.add_argument(
        "--backward-passes-per-step", type=int, default=1, metavar="N", help="batches added up for one step"
    )
    group.add_argument(
        "--crossover",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further arguments of DistributedOptimizer: bucket_cap_mb=50",
    )


def crossover_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What the command line says for ``DistributedOptimizer``."""
    arguments: dict[str, Any] = {
        "compression": COMPRESSIONS[options.compression],
        "backward_passes_per_step": options.backward_passes_per_step,
        "schedule": options.schedule,
    }
    for pair in options.crossover:
        name, _, text = pair.partition("=")
        try:
            arguments[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            arguments[name] = text
    return arguments


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the command line, if anything."""
    for name in ("epochs", "batch_size", "image_size", "backward_passes_per_step", "log_steps", "step_epochs"):
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')}: is {getattr(options, name)}; it has to be at least 1"
    for name in ("workers", "save_steps", "warmup_epochs", "clip"):
        if getattr(options, name) < 0:
            return f"--{name.replace('_', '-')}: is {getattr(options, name)}; it has to be 0 or more"
    if not 0 <= options.ema_decay < 1:
        return f"--ema-decay: is {options.ema_decay}; it has to be at least 0 (off) and below 1"
    for part in ("train", "val"):
        if not (options.data / part).is_dir():
            return f"data: {options.data} has no folder {part}/; make_tiny_tree.py makes a small tree to try with"
    if options.model not in torchvision.models.list_models(module=torchvision.models):
        return (
            f"--model: torchvision has no classifier {options.model!r}; resnet18, resnet50, vgg16 and vit_b_16 are some"
        )
    known = set(inspect.signature(xo.DistributedOptimizer).parameters) - {"optimizer", "named_parameters"}
    for pair in options.crossover:
        if "=" not in pair or pair.partition("=")[0] not in known:
            return f"--crossover: {pair!r}; it has to be NAME=VALUE with a NAME of {', '.join(sorted(known))}"
    schedule = options.schedule or os.environ.get("CROSSOVER_SCHEDULE")
    if schedule == "priority" and (options.clip or options.amp == "fp16"):
        return "--schedule priority: averages arrive after step(), too late for --clip and --amp fp16; leave them out"
    return None
