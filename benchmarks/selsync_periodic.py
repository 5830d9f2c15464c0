"""Is a threshold better than a period? SelSync, local SGD with as many shared steps, and DDP with post-local SGD.

    python -m benchmarks.selsync_periodic [--workloads resnet,gpt] [--delta 0.3] [--seeds 3] [--steps N]
                                          [--batch-size N] [--quick] [--save]

Two real ranks on loopback, one a core. For each seed SelSync trains first; then local SGD (``Periodic``) and PyTorch's
own post-local SGD have the same warm-up and the period that shares as nearly as possible as many steps. Beside them
SelSync with a bound on local steps in a row, DDP, which shares all, post-local SGD as its documentation sets it up, and
no sharing at all after the warm-up. All train the same model from the same parameters on the same batches with the same
learning rates, and are evaluated on the test set once ranks are averaged at the end; that average counts as no step.
LSSR is the share of local steps.

A difference is in pairs, seed by seed, to DDP; as its error stands the standard error over the seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters_or_parameter_groups
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import crossover as xo
from benchmarks import local_steps, notes, peers, workloads
from benchmarks.command import names_of
from benchmarks.local_steps import COLOURS, Answer, mean, with_spread
from benchmarks.peers.torch_ddp import AVERAGING_PERIOD
from benchmarks.workloads import Workload
from crossover.selsync import Periodic, SelSync

MODULE = "benchmarks.selsync_periodic"
BOUND = 16
LABELS = {
    "ddp": "DDP",
    "selsync": "SelSync",
    "selsync_bounded": f"SelSync, at most {BOUND} local steps in a row",
    "periodic": "local SGD, as many shared steps",
    "torch_matched": "DDP, post-local SGD, as many shared steps",
    "post_local_sgd": "DDP, post-local SGD as documented",
    "alone": "no sharing after the warm-up",
}
HEADER = ["system", "LSSR", "shared steps", "accuracy", "to DDP, points", "test loss", "to DDP"]


def period_for(shared: int, steps: int, warmup: int) -> int:
    """The period that shares as nearly as can be as many steps after the warm-up as were shared then.

    Args:
        shared: steps to share, those of the warm-up among them.
        steps: of the whole training.
        warmup: steps at its start, all shared.

    Example:
        >>> period_for(shared=35, steps=125, warmup=25)
        10
    """
    left, wanted = steps - warmup, shared - warmup
    if wanted <= 0:
        return left + 1
    near = left / wanted
    return min((math.floor(near), math.ceil(near)), key=lambda every: (abs(left // every - wanted), every))


def periodic_counts(steps: int, synchronous: int, first: int, every: int) -> Answer:
    """What post-local SGD shares: the ``synchronous`` first steps, step number ``first`` and every ``every``-th on."""
    shared = synchronous + max(0, -(-(steps - first) // every))
    return {"steps": steps, "shared": shared, "lssr": 1 - shared / steps}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def gated(workload: Workload, gate: str, task: dict[str, Any], every: int = 1, bound: int | None = None) -> Answer:
    """Crossover with a gate."""
    rank, size, warmup = xo.rank(), xo.size(), task["warmup"]

    def make(model: nn.Module) -> xo.selsync.Gate:
        if gate == "selsync":
            # the step that brings sample number warmup_steps is the first to be decided
            return SelSync(task["delta"], warmup_steps=warmup + 1, max_local_steps=bound, buffers=model)
        return Periodic(every, warmup, buffers=model)

    return local_steps.train(workload, make, task["steps"], lambda step: workload.batch(rank, step, size))


def torch_matched(workload: Workload, task: dict[str, Any], every: int) -> Answer:
    """PyTorch's post-local SGD with the warm-up and the period of ours; gradients are averaged in the warm-up."""
    model, warmup, steps = workload.model(), task["warmup"], task["steps"]
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    subgroup, _ = dist.new_subgroups(group_size=1)
    wrapped.register_comm_hook(PostLocalSGDState(None, subgroup, warmup), post_localSGD_hook)
    # Its averager shares step s (from 0) where s - warmup_steps is a whole multiple of the period: shifted, so that the
    # first average comes a period after the warm-up, as ours does.
    averager = PeriodicModelAverager(period=every, warmup_steps=warmup + every - 1)
    local = workload.optimizer(model.parameters())
    optimizer = PostLocalSGDOptimizer(optim=local, averager=averager)
    training = peers.Training(wrapped, optimizer, local, workload.loss)
    _run(training, workload, steps)
    average_parameters_or_parameter_groups(iter(model.parameters()), averager.process_group)
    counts = periodic_counts(steps, warmup, warmup + every - 1, every)
    return {**counts, **local_steps.evaluate(workload, model)}


def peer(workload: Workload, name: str, task: dict[str, Any]) -> Answer:
    """DDP, alone or with post-local SGD, as the other benchmarks set it up."""
    model, steps = workload.model(), task["steps"]
    training = peers.get(name).prepare(model, workload.optimizer, workload, steps)
    _run(training, workload, steps)
    training.finish()
    start = steps if name == "ddp" else training.facts["start"]
    return {**periodic_counts(steps, start, start, AVERAGING_PERIOD), **local_steps.evaluate(workload, model)}


def _run(training: peers.Training, workload: Workload, steps: int) -> None:
    scheduler = workload.scheduler(training.scheduled, steps)
    for step in range(steps):
        training(*workload.batch(xo.rank(), step, xo.size()))
        scheduler.step()


def measure(task: dict[str, Any]) -> dict[str, Answer]:
    """Every system, SelSync first. Collective."""
    workload = workloads.get(task["workload"], task["batch_size"], task["seed"])
    steps, warmup = task["steps"], task["warmup"]
    answers = {"selsync": gated(workload, "selsync", task)}
    every = period_for(int(answers["selsync"]["shared"]), steps, warmup)
    measures = {
        "selsync_bounded": partial(gated, workload, "selsync", task, bound=BOUND),
        "periodic": partial(gated, workload, "periodic", task, every),
        "torch_matched": partial(torch_matched, workload, task, every),
        "ddp": partial(peer, workload, "ddp", task),
        "post_local_sgd": partial(peer, workload, "post_local_sgd", task),
        "alone": partial(gated, workload, "periodic", task, steps + 1),
    }
    for name, measure_one in measures.items():
        torch.manual_seed(task["seed"])
        peers.tuning.clean_up()
        answers[name] = measure_one()
    return {name: answers[name] for name in LABELS}


# -- figures -----------------------------------------------------------------------------------------------------------

Results = dict[str, dict[str, list[Answer]]]
"""By workload and system, an answer for each seed."""


def difference(ours: Sequence[Answer], base: Sequence[Answer], key: str, factor: float = 1.0) -> str:
    """Mean over the seeds of what ours has more than the base, and its standard error."""
    pairs = [factor * (a[key] - b[key]) for a, b in zip(ours, base, strict=True)]
    text = f"{statistics.fmean(pairs):+.3f}"
    return f"{text} ± {statistics.stdev(pairs) / math.sqrt(len(pairs)):.3f}" if len(pairs) > 1 else text


def rows(by_system: dict[str, list[Answer]]) -> list[list[str]]:
    """A row for each system."""
    base = by_system["ddp"]
    return [
        [
            LABELS[name],
            f"{mean(answers, 'lssr'):.3f}",
            f"{mean(answers, 'shared'):.1f}",
            with_spread(answers, "accuracy"),
            "" if name == "ddp" else difference(answers, base, "accuracy", 100),
            with_spread(answers, "loss"),
            "" if name == "ddp" else difference(answers, base, "loss"),
        ]
        for name, answers in by_system.items()
    ]


def versus(by_system: dict[str, list[Answer]]) -> str:
    """The question itself: SelSync less local SGD at as many shared steps."""
    ours, base = by_system["selsync"], by_system["periodic"]
    accuracy, loss = difference(ours, base, "accuracy", 100), difference(ours, base, "loss")
    return (
        f"SelSync less local SGD with as many shared steps, in pairs over {len(ours)} seeds (± standard error): "
        f"accuracy {accuracy} points, test loss {loss}."
    )


def draw(results: Results, title: str, path: Path) -> None:
    """Test loss against LSSR: a dot for each seed, a cross for the mean."""
    with local_steps.picture(path, title, len(results)) as panels:
        for axes, (workload, by_system) in zip(panels, results.items(), strict=True):
            for (name, answers), colour in zip(by_system.items(), COLOURS, strict=True):
                lssr, loss = [a["lssr"] for a in answers], [a["loss"] for a in answers]
                axes.plot(lssr, loss, ".", color=colour, alpha=0.6)
                axes.plot(mean(answers, "lssr"), mean(answers, "loss"), "P", color=colour, label=LABELS[name])
            axes.set(title=f"{workload}: dots are seeds, crosses means", xlabel="LSSR", ylabel="test loss at the end")
        panels[0].legend()


# -- command line ------------------------------------------------------------------------------------------------------


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = local_steps.parser(__doc__, seeds=3)
    known = names_of(workloads.names())
    parser.add_argument("--workloads", type=known, help="with commas (resnet,gpt; resnet with --quick)")
    parser.add_argument("--delta", type=float, default=0.3, help="SelSync's threshold (%(default)s)")
    parser.add_argument("--steps", type=int, help="of training (120 for resnet, 240 for gpt; 24 with --quick)")
    parser.add_argument("--batch-size", type=int, help="examples a rank and step (half of each workload's own)")
    options = parser.parse_args(words)
    options.workloads = options.workloads or (["resnet"] if options.quick else ["resnet", "gpt"])
    options.seeds = 1 if options.quick else options.seeds
    if options.quick and options.steps is None:
        options.steps = 24
    if options.batch_size is not None and options.batch_size < 1:
        parser.error(f"--batch-size: is {options.batch_size}; it has to be at least 1")
    if options.seeds < 1 or (options.steps is not None and options.steps < 8):
        parser.error("--seeds has to be at least 1, --steps at least 8")
    return options


def steps_of(options: argparse.Namespace, name: str) -> tuple[int, int]:
    """Steps of training, and those of them that are warm-up."""
    steps: int = options.steps or workloads.get(name).steps * 3 // 5
    return steps, min(25, max(2, steps // 8))


def batch_size_of(options: argparse.Namespace, name: str) -> int:
    """Examples a rank and step: small batches, so that a study does not take hours."""
    return int(options.batch_size or workloads.get(name).batch_size // 2)


def section(options: argparse.Namespace, name: str, by_system: dict[str, list[Answer]]) -> str:
    """One workload's table, with what has to be known about it."""
    steps, warmup = steps_of(options, name)
    facts = (
        f"{batch_size_of(options, name)} examples a rank and step, {steps} steps, {warmup} of them warm-up, delta "
        f"{options.delta:g}, {options.seeds} seeds (±: standard deviation; of differences, standard error); "
        f"{local_steps.place([2])}"
    )
    return "\n\n".join([f"### {name}", facts, notes.table(HEADER, rows(by_system)), versus(by_system)])


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        local_steps.work(options.worker, measure)
        return 0
    results: Results = {name: {system: [] for system in LABELS} for name in options.workloads}
    for seed in range(options.seeds):
        for name in options.workloads:
            steps, warmup = steps_of(options, name)
            task = {
                "workload": name,
                "batch_size": batch_size_of(options, name),
                "seed": seed,
                "steps": steps,
                "warmup": warmup,
                "delta": options.delta,
            }
            first, *_ = local_steps.ask(MODULE, task, 2)
            for system, answer in first.items():
                results[name][system].append(answer)
    sections = [section(options, name, by_system) for name, by_system in results.items()]
    print("\n\n".join(sections))
    if options.save:
        title = "SelSync, local SGD and post-local SGD with as many shared steps"
        local_steps.save("selsync-periodic", title, sections, results, partial(draw, results, title))
    return 0


if __name__ == "__main__":
    sys.exit(main())
