"""Does it matter which data a rank sees between shared steps? SelDP and data injection beside the default partitioning.

    python -m benchmarks.selsync_data [--ranks 5] [--labels 2] [--delta 0.3] [--steps 120] [--seeds 3]
                                      [--quick] [--save]

Digits, a small CNN without BatchNorm, SelSync with one threshold. All ranks are real processes on loopback. In the
skewed split each rank has the images of ``--labels`` classes only. Beside it: the same with data injection, where ranks
give each other samples at each step; and SelDP, where each rank goes through all chunks in turn, here with the chunks
of the skewed split (classes one after the other, ``contiguous``) and with shuffled ones. In the split of shuffled data
all ranks have all classes, but each its own images (the default partitioning) or all of them (SelDP); there gradients
are averaged, as in the paper's comparison of the two, and parameters too.

Accuracy of the average is that of the mean of all ranks' parameters at the end; of the ranks, the mean over the ranks'
own replicas before that. The gain is in percentage points over the default partitioning of the same split.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import crossover as xo
from benchmarks import local_steps, notes, peers
from benchmarks.local_steps import COLOURS, Answer, mean, with_spread
from benchmarks.workloads.vision import CLASSES, Digits
from crossover.selsync import DataInjection, SelSync, SelSyncSampler, label_skew_indices

MODULE = "benchmarks.selsync_data"
BATCH = 16
WARMUP = 10
HEADER = ["split and partitioning", "LSSR", "accuracy of the average", "gain", "of the ranks", "gain"]


class SmallCNN(Digits):
    """Three convolutions and one layer on top; no BatchNorm, whose statistics of one class serve no other."""

    name = "small_cnn"
    default_batch_size = BATCH
    learning_rate = 0.02
    steps = 120
    target_accuracy = 0.9

    def build(self) -> nn.Module:
        layers: list[nn.Module] = []
        channels = 1
        for width in (8, 16, 32):
            layers += [nn.Conv2d(channels, width, 3, 2, 1), nn.ReLU()]
            channels = width
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, CLASSES))


# -- what a rank sees --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One row.

    Attributes:
        key: for the command line of workers.
        label: for tables.
        labels: classes that a rank has; 0: shuffled data.
        partition: ``"default"``, ``"chunks"`` (SelDP, order of the classes kept), ``"seldp"`` or ``"injection"``.
        share: alpha and beta of the injection.
        average: what a shared step averages.
    """

    key: str
    label: str
    labels: int
    partition: str
    share: float = 0.0
    average: str = "parameters"

    @property
    def base(self) -> tuple[int, str]:
        """What the default partitioning that it is compared with has in common with it."""
        return self.labels, self.average


def settings_of(labels: Sequence[int]) -> list[Setting]:
    """All rows, the default partitioning of each split first."""
    made = []
    for count in labels:
        split = f"{count} label{'s' if count > 1 else ''} a rank"
        made += [
            Setting(f"{count}-default", f"{split}: default", count, "default"),
            Setting(f"{count}-inject-0.5", f"{split}: injection (0.5, 0.5)", count, "injection", 0.5),
            Setting(f"{count}-inject-0.75", f"{split}: injection (0.75, 0.75)", count, "injection", 0.75),
            Setting(f"{count}-chunks", f"{split}: SelDP, chunks in turn", count, "chunks"),
            Setting(f"{count}-seldp", f"{split}: SelDP, shuffled", count, "seldp"),
        ]
    for average in ("gradients", "parameters"):
        split = f"shuffled data, {average} averaged"
        made += [
            Setting(f"iid-default-{average}", f"{split}: default", 0, "default", average=average),
            Setting(f"iid-seldp-{average}", f"{split}: SelDP", 0, "seldp", average=average),
        ]
    return made


def indices_of(classes: Tensor, labels: int, seed: int, rank: int, size: int) -> list[int]:
    """The default partitioning: this rank's images in a split by classes, or for no ``labels`` in a shuffled one."""
    if labels:
        return label_skew_indices(classes, rank, size, labels)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    share = len(classes) // size
    return [int(index) for index in order[rank * share : (rank + 1) * share]]


def batches_of(setting: Setting, workload: Digits, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches without end. With injection each one is a collective."""
    inputs, classes = workload.training_set()
    if setting.partition in ("chunks", "seldp"):
        yield from _by_sampler(setting, inputs, classes, workload, rank, size)
    mine = indices_of(classes, setting.labels, workload.seed, rank, size)
    data = Subset(TensorDataset(inputs, classes), mine)
    injection = None
    batch_size = workload.batch_size
    if setting.partition == "injection":
        injection = DataInjection(setting.share, setting.share, batch_size=batch_size, seed=workload.seed)
        batch_size = injection.local_batch_size
    order = torch.Generator().manual_seed(1_000 * workload.seed + rank)
    loader = DataLoader(data, min(batch_size, len(mine)), shuffle=True, drop_last=True, generator=order)
    for _ in itertools.count():
        for batch, target in loader:
            yield (batch, target) if injection is None else injection((batch, target))


def _by_sampler(
    setting: Setting, inputs: Tensor, classes: Tensor, workload: Digits, rank: int, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.argsort(classes, stable=True)  # so that a chunk is about what a rank of the skewed split has
    data = TensorDataset(inputs[order], classes[order])
    kept = setting.partition == "chunks"
    sampler = SelSyncSampler(
        data, workload.batch_size, rank=rank, size=size, seed=workload.seed, contiguous=kept, shuffle=not kept
    )
    loader = DataLoader(data, workload.batch_size, sampler=sampler, drop_last=True)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def measure(task: dict[str, Any]) -> dict[str, Answer]:
    """One training for each setting. Collective."""
    workload = SmallCNN(seed=task["seed"])
    answers = {}
    for setting in settings_of(task["labels"]):
        stream = batches_of(setting, workload, xo.rank(), xo.size())
        answers[setting.key] = local_steps.train(
            workload, gate_of(setting, task["delta"]), task["steps"], partial(in_order, stream)
        )
        peers.tuning.clean_up()
    return answers


def in_order(stream: Iterator[tuple[Tensor, Tensor]], step: int) -> tuple[Tensor, Tensor]:
    """The next batch, whatever the step."""
    return next(stream)


def gate_of(setting: Setting, delta: float) -> Callable[[nn.Module], SelSync]:
    """The threshold alone decides once the warm-up is over."""

    def make(model: nn.Module) -> SelSync:
        return SelSync(delta, warmup_steps=WARMUP, average=setting.average, lr_drop=None)

    return make


# -- figures -----------------------------------------------------------------------------------------------------------

Results = dict[str, list[Answer]]
"""By setting, an answer for each seed, ``own_accuracy`` the mean over the ranks."""


def merged(ranks: Sequence[dict[str, Answer]]) -> dict[str, Answer]:
    """One answer for each setting: what is equal on all ranks from the first, ``own_accuracy`` averaged."""
    return {
        key: {**answer, "own_accuracy": mean([rank[key] for rank in ranks], "own_accuracy")}
        for key, answer in ranks[0].items()
    }


def gains(settings: Sequence[Setting], results: Results, key: str) -> dict[str, float | None]:
    """Percentage points over the default partitioning of the same split; ``None`` for that itself."""
    bases = {setting.base: setting for setting in settings if setting.partition == "default"}
    found: dict[str, float | None] = {}
    for setting in settings:
        base = bases[setting.base]
        gain = 100 * (mean(results[setting.key], key) - mean(results[base.key], key))
        found[setting.key] = None if base is setting else gain
    return found


def rows(settings: Sequence[Setting], results: Results) -> list[list[str]]:
    """A row for each setting."""
    of_average, of_ranks = (gains(settings, results, key) for key in ("accuracy", "own_accuracy"))

    def points(gain: float | None) -> str:
        return "" if gain is None else f"{gain:+.2f}"

    return [
        [
            setting.label,
            f"{mean(results[setting.key], 'lssr'):.3f}",
            with_spread(results[setting.key], "accuracy"),
            points(of_average[setting.key]),
            with_spread(results[setting.key], "own_accuracy"),
            points(of_ranks[setting.key]),
        ]
        for setting in settings
    ]


def draw(settings: Sequence[Setting], results: Results, title: str, path: Path) -> None:
    """Bars of both accuracies, a dot for each seed."""
    with local_steps.picture(path, title, 2) as panels:
        places = range(len(settings))
        shades = {base: COLOURS[n % len(COLOURS)] for n, base in enumerate(dict.fromkeys(s.base for s in settings))}
        for axes, key, head in zip(
            panels, ("accuracy", "own_accuracy"), ("the average of all ranks", "the ranks' own replicas"), strict=True
        ):
            for place, setting in zip(places, settings, strict=True):
                answers = results[setting.key]
                shade = 0.45 if setting.partition == "default" else 0.9
                axes.barh(place, 100 * mean(answers, key), color=shades[setting.base], alpha=shade)
                axes.plot([100 * answer[key] for answer in answers], [place] * len(answers), "k.", markersize=4)
            axes.set(title=f"Accuracy of {head}, dots: seeds", xlabel="% of the test set")
            axes.invert_yaxis()
        panels[0].set_yticks(places, [setting.label for setting in settings], fontsize=8)
        panels[1].set_yticks(places, [""] * len(settings))


# -- command line ------------------------------------------------------------------------------------------------------


def labels_of(text: str) -> list[int]:
    """For argparse: numbers of classes a rank with commas between them."""
    if not all(word.strip().isdigit() and 1 <= int(word) <= CLASSES for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}; give numbers from 1 to {CLASSES} with commas between them")
    return sorted({int(word) for word in text.split(",")})


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = local_steps.parser(__doc__, seeds=3)
    parser.add_argument("--ranks", type=int, default=5, help="how many (%(default)s)")
    parser.add_argument(
        "--labels", type=labels_of, default=[2], help="classes a rank in the skewed split (2), with commas"
    )
    parser.add_argument("--delta", type=float, default=0.3, help="threshold (%(default)s)")
    parser.add_argument("--steps", type=int, help="of training (120; 30 with --quick)")
    options = parser.parse_args(words)
    options.steps = options.steps or (30 if options.quick else 120)
    options.seeds = 1 if options.quick else options.seeds
    if options.ranks < 2 or options.steps < 1 or options.seeds < 1:
        parser.error("--ranks has to be at least 2, --steps and --seeds at least 1")
    if options.ranks * min(options.labels) < CLASSES:
        parser.error(f"--labels: {options.ranks} ranks of {min(options.labels)} leave some of {CLASSES} classes out")
    return options


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        local_steps.work(options.worker, measure)
        return 0
    settings = settings_of(options.labels)
    results: Results = {setting.key: [] for setting in settings}
    for seed in range(options.seeds):
        task = {"seed": seed, "steps": options.steps, "labels": options.labels, "delta": options.delta}
        for key, answer in merged(local_steps.ask(MODULE, task, options.ranks)).items():
            results[key].append(answer)
    facts = (
        f"Digits, {BATCH} images a rank and step, {options.steps} steps, {WARMUP} of them warm-up, delta "
        f"{options.delta:g}, {options.seeds} seeds (±: standard deviation over them); "
        f"{local_steps.place([options.ranks])}"
    )
    sections = [facts, notes.table(HEADER, rows(settings, results))]
    print("\n\n".join(sections))
    if options.save:
        title = "SelSync: what a rank sees between shared steps"
        local_steps.save("selsync-data", title, sections, results, partial(draw, settings, results, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
