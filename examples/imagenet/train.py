"""Train a torchvision model on an ImageNet tree (train/CLASS/*.JPEG, val/CLASS/*.JPEG) with data parallelism.

Eight GPUs of this host:  torchrun --standalone --nproc-per-node 8 examples/imagenet/train.py DATA --amp bf16
The same under Horovod:   horovodrun -np 8 -H localhost:8 python examples/imagenet/train.py DATA --amp bf16
One process:              python examples/imagenet/train.py DATA

README.md beside this file has several hosts, Slurm, Kubernetes and a try-out without GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from checkpoint import Trained, sum_over_ranks, write_text
from data import (
    EpochSampler,
    ImageTree,
    ToDevice,
    evaluation_keys,
    evaluation_transform,
    make_loader,
    training_transform,
)
from evaluate import average_buffers, evaluate
from options import crossover_arguments, parse
from progress import Progress
from recipe import Ema, LearningRate, parameter_groups, seed_of
from torch import Tensor, nn

import crossover as xo


def pick_device(options: argparse.Namespace) -> torch.device:
    """This rank's GPU, or the CPU with this rank's share of the cores."""
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not options.deterministic
    if torch.cuda.is_available() and not options.cpu:
        device = torch.device("cuda", xo.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // xo.local_size()))
    return torch.device("cpu")


class Training:
    """Everything one run holds. Built alike on every rank; only rank 0 reads and writes checkpoints."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = pick_device(options)
        val_size = options.val_size or options.image_size
        val_resize = options.val_resize or round(val_size / 0.875)
        self.train_set = ImageTree(
            options.data / "train", training_transform(options.image_size, options.augment), options.seed
        )
        self.val_set = ImageTree(options.data / "val", evaluation_transform(val_size, val_resize))
        if self.train_set.classes != self.val_set.classes:
            raise ValueError(
                f"data: train/ and val/ of {options.data} have different classes; they have to have the same"
            )
        self.sampler = EpochSampler(self.train_set, xo.size(), xo.rank(), seed=options.seed)
        keys = evaluation_keys(len(self.val_set), xo.rank(), xo.size())
        common = {"batch_size": options.batch_size, "workers": options.workers, "device": self.device}
        self.train_loader = make_loader(self.train_set, self.sampler, whole_batches=True, **common)
        self.val_loader = make_loader(self.val_set, keys, whole_batches=False, **common)
        self.to_device = ToDevice(self.device, options.channels_last)

        self.passes = options.backward_passes_per_step
        self.steps_per_epoch = len(self.train_loader) // self.passes
        self.images_per_step: int = options.batch_size * self.passes * xo.size()
        self.save_steps = options.save_steps
        if not self.steps_per_epoch:
            raise ValueError(
                f"--batch-size: a step takes {self.images_per_step} images, the set has {len(self.train_set)}; lower it"
            )

        torch.manual_seed(options.seed)
        model = torchvision.models.get_model(options.model, num_classes=len(self.train_set.classes))
        self.model = model.to(self.device, memory_format=self.to_device.format)
        self.loss = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
        self.learning_rate = LearningRate(
            peak=options.lr * self.images_per_step / 256,
            steps_per_epoch=self.steps_per_epoch,
            epochs=options.epochs,
            warmup_epochs=options.warmup_epochs,
            decay=options.decay,
            step_epochs=options.step_epochs,
        )
        self.precision = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[options.amp]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=options.amp == "fp16")
        self.ema = Ema(self.model, options.ema_decay) if options.ema_decay else None
        self.optimizer = xo.DistributedOptimizer(
            self.make_optimizer(), named_parameters=self.model.named_parameters(), **crossover_arguments(options)
        )
        facts = {name: getattr(options, name) for name in ("model", "optimizer", "seed")}
        facts["classes"] = len(self.train_set.classes)
        self.trained = Trained(self.model, self.optimizer, self.scaler, self.ema, facts)
        self.position = self.trained.restore(options.out / "checkpoint.pt" if options.resume else None)
        first_step = self.position.epoch * self.steps_per_epoch + self.step_in_epoch()
        self.progress = Progress(
            xo.rank() == 0, options.out / "tensorboard" if options.tensorboard else None, first_step
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self.model, self.options.weight_decay)
        if self.options.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=self.learning_rate.peak)
        return torch.optim.SGD(groups, lr=self.learning_rate.peak, momentum=self.options.momentum)

    def step_in_epoch(self) -> int:
        """The next step; a checkpoint counts images, as the number of ranks may have changed since."""
        return self.position.images // self.images_per_step

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        with torch.autocast(self.device.type, dtype=self.precision, enabled=self.precision is not None):
            logits: Tensor = model(images)
        return logits

    def train_epoch(self) -> dict[str, float]:
        """Train to the end of the epoch that the position is in."""
        epoch, first_step = self.position.epoch, self.step_in_epoch()
        totals = torch.tensor(self.position.totals, dtype=torch.float64, device=self.device)
        if xo.rank() != 0:
            totals.zero_()  # what earlier runs summed up goes on at rank 0
        self.sampler.set_epoch(epoch, first=first_step * self.passes * self.options.batch_size)
        self.progress.start_epoch(epoch, self.options.epochs, self.steps_per_epoch, first_step)
        self.model.train()
        batches = iter(self.train_loader)
        for step in range(first_step, self.steps_per_epoch):
            torch.manual_seed(seed_of(self.options.seed, epoch, step, xo.rank()))  # dropout: nothing to save
            totals += self.train_step(batches, epoch * self.steps_per_epoch + step)
            self.progress.step(self.images_per_step)
            if (step + 1) % self.options.log_steps == 0:
                self.report(totals, step)
            if self.save_steps and (step + 1) % self.save_steps == 0 and step + 1 < self.steps_per_epoch:
                self.position.images = (step + 1) * self.images_per_step
                self.position.totals = sum_over_ranks(totals)
                self.save(["checkpoint.pt"])
        images_per_second = self.progress.end_epoch()
        loss, correct, images = sum_over_ranks(totals)
        return {"train_loss": loss / images, "train_top1": correct / images, "images_per_second": images_per_second}

    def train_step(self, batches: Iterator[Any], number: int) -> Tensor:
        """One optimizer step. Returns this rank's sum of losses, right answers and images."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(number)
        self.optimizer.zero_grad()
        for _ in range(self.passes):
            images, targets = self.to_device(*next(batches))
            logits = self.forward(self.model, images)
            loss = self.loss(logits.float(), targets)
            self.scaler.scale(loss / self.passes).backward()
            correct = (logits.detach().argmax(dim=1) == targets).sum()
            sums += torch.stack([loss.detach() * len(targets), correct, torch.full_like(correct, len(targets))])
        if self.options.clip:
            self.scaler.unscale_(self.optimizer)  # gradients are averages over ranks already
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.model, number)
        return sums

    def report(self, totals: Tensor, step: int) -> None:
        if xo.rank() == 0:
            loss, correct, images = totals.tolist()  # of this rank, since the start of the epoch
            number = self.position.epoch * self.steps_per_epoch + step
            values = {"loss": loss / images, "top1": correct / images, "lr": self.learning_rate(number)}
            self.progress.report(
                number, f"epoch {self.position.epoch + 1} step {step + 1}/{self.steps_per_epoch}", values
            )

    def evaluate(self) -> dict[str, float]:
        """Accuracy of the model, and of the running average of its weights if there is one. Collective."""
        models = {"": self.model} | ({"ema_": self.ema.module} if self.ema else {})
        results: dict[str, float] = {}
        with self.optimizer.flushed():
            for prefix, model in models.items():
                average_buffers(model)
                batches = (self.to_device(*batch) for batch in self.val_loader)
                accuracy = evaluate(model, batches, self.forward, self.device, len(self.val_set))
                results |= {f"{prefix}{name}": value for name, value in dataclasses.asdict(accuracy).items()}
        return results

    def finish_epoch(self, training: dict[str, float]) -> None:
        """Evaluate, tell, move on to the next epoch and save."""
        results = self.evaluate()
        position = self.position
        self.progress.scalars("val", results, (position.epoch + 1) * self.steps_per_epoch - 1)
        self.progress.say(
            f"epoch {position.epoch + 1}/{self.options.epochs}  training loss {training['train_loss']:.3f}  "
            f"{training['images_per_second']:.0f} images/s  "
            f"val top-1 {results['top1']:.2%}  top-5 {results['top5']:.2%}"
            + (f"  of the average {results['ema_top1']:.2%}" if self.ema else "")
        )
        position.history.append({"epoch": position.epoch + 1, **training, **results})
        best = results["top1"] > position.best_top1
        position.best_top1 = max(position.best_top1, results["top1"])
        position.epoch, position.images, position.totals = position.epoch + 1, 0, [0.0, 0.0, 0.0]
        self.save(["checkpoint.pt", *(["best.pt"] if best else [])])
        if xo.rank() == 0:
            write_text(json.dumps(position.history, indent=1) + "\n", self.options.out / "history.json")

    def save(self, names: list[str]) -> None:
        self.trained.save([self.options.out / name for name in names], self.position)
        place = f"epoch {self.position.epoch + 1} step {self.step_in_epoch() + 1}"
        self.progress.say(f"saved {', '.join(names)}: next is {place}")

    def run(self) -> None:
        self.progress.say(
            f"{self.options.model}: {xo.size()} rank(s) on {self.device.type}, {self.images_per_step} images a step, "
            f"{self.steps_per_epoch} steps an epoch, {len(self.train_set)} + {len(self.val_set)} images, "
            f"from epoch {self.position.epoch + 1} step {self.step_in_epoch() + 1}"
        )
        while self.position.epoch < self.options.epochs:
            self.finish_epoch(self.train_epoch())
        self.progress.say(f"best val top-1 {self.position.best_top1:.2%}; results in {Path(self.options.out)}")
        self.progress.close()
        xo.barrier()  # under Horovod, the first rank to leave would end the job for one that is still writing


def main() -> None:
    options = parse(__doc__)
    xo.init()  # finds torchrun, horovodrun or neither
    Training(options).run()
    xo.shutdown()


if __name__ == "__main__":
    main()
