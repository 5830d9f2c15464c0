"""Does DeFT end at DDP's accuracy after as many steps? And what does each part of it do for that?

    python -m benchmarks.deft_accuracy [--workloads resnet,gpt] [--cr 2,4] [--seeds 5] [--ablation-seeds 3] [--quick]
                                       [--save]

Two real ranks on loopback, one a core, train the same model from the same parameters on the same batches with the same
learning rates. THE COVERAGE RATE IS EMULATED: DeFT plans from a fixed profile of equal buckets whose all-reduces take
so many times the computing, and no link is slow. So updates come as late, and merge as many steps, as they would there;
and ``step`` is a time by the plan, in units of computing, not a measurement.

* ``DeFT`` is with the Preserver: it may hold merging back, and decides anew as it learns the gradient noise scale.
* ``Preserver off`` takes the plan that hides everything, however many steps that merges.
* ``FIFO`` sends everything in order and applies it a fixed number of steps later: delay without knapsacks.

The ablations change one thing at a time of ``Preserver off`` on the first workload, at the first coverage rate.
Accuracies and losses are of the test set after the last step. A difference to DDP is in pairs, seed by seed; the errors
are standard errors over the seeds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import local_steps, notes, peers, workloads
from benchmarks.command import names_of, numbers
from benchmarks.deft_cases import ABLATIONS, CASES, MAIN, synchronous_step, train
from crossover.deft import scout
from crossover.telemetry.style import GREY, GRID, STYLE

MODULE = "benchmarks.deft_accuracy"
SIZES = {"resnet": (120, 16), "vgg": (120, 16), "gpt": (160, 8), "mlp": (120, 16)}
HEADER = ["system", "accuracy", "to DDP, points", "test loss", "to DDP", "updates a step", "step", "x DDP"]


# -- on the ranks ------------------------------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """All cases of a task, one after the other. Collective."""
    # accuracy does not depend on whether the second of two links on one wire pays
    vars(scout)["second_link_pays"] = lambda *_: True
    workload = workloads.get(task["workload"], task["batch_size"], task["seed"])
    answers = {}
    for name in task["cases"]:
        answers[name] = train(CASES[name], workload, task["cr"], task["steps"])
        peers.tuning.clean_up()
    return answers


# -- in turn -----------------------------------------------------------------------------------------------------------

Answers = dict[str, list[dict[str, Any]]]
"""By case, rank 0's answer for each seed."""


def in_turn(
    workload: str, cr: float, cases: Sequence[str], seeds: int, options: argparse.Namespace, known: Answers
) -> Answers:
    """Train all cases with each seed; those that are ``known`` have been trained."""
    steps, batch_size = size_of(workload, options)
    new = [name for name in cases if name not in known]
    task = {"workload": workload, "batch_size": batch_size, "steps": steps, "cr": cr, "cases": new}
    found: Answers = {name: known.get(name, [])[:seeds] for name in cases}
    for seed in range(seeds if new else 0):
        ranks = local_steps.ask(MODULE, {**task, "seed": seed}, 2)
        for name in new:
            found[name].append(ranks[0][name])
    return found


def size_of(workload: str, options: argparse.Namespace) -> tuple[int, int]:
    """Steps of training, and examples a rank and step."""
    steps, batch_size = SIZES[workload]
    return options.steps or steps, options.batch_size or batch_size


def at_rate(answers: Answers, workload: str, cr: float) -> Answers:
    """DDP's answers at another coverage rate: the same training in longer steps."""
    step = synchronous_step(workloads.get(workload).model(), cr)
    return {"ddp": [{**answer, "step": step} for answer in answers["ddp"]]}


def error(values: Sequence[float]) -> float:
    """Standard error of the mean; 0 for one."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def mean_and_error(values: Sequence[float], form: str) -> str:
    """For a table."""
    text = format(statistics.fmean(values), form)
    return f"{text} ± {error(values):{form.lstrip('+')}}" if len(values) > 1 else text


def differences(answers: Answers, name: str, base: str, key: str) -> list[float]:
    """To ``base``, seed by seed: of accuracy in points, of the loss in per cent."""
    pairs = zip(answers[name], answers[base], strict=False)
    if key == "accuracy":
        return [100 * (own["accuracy"] - other["accuracy"]) for own, other in pairs]
    return [100 * (own[key] / other[key] - 1) for own, other in pairs]


def row(answers: Answers, name: str, base: str) -> list[str]:
    """One case's line."""
    own = answers[name]
    step = statistics.fmean(answer["step"] for answer in own)
    return [
        CASES[name].label,
        mean_and_error([answer["accuracy"] for answer in own], ".4f"),
        mean_and_error(differences(answers, name, base, "accuracy"), "+.2f"),
        mean_and_error([answer["loss"] for answer in own], ".4f"),
        mean_and_error(differences(answers, name, base, "loss"), "+.1f") + " %",
        f"{statistics.fmean(answer['updates'] for answer in own):.2f}",
        f"{step:.2f}",
        f"{step / statistics.fmean(answer['step'] for answer in answers[base]):.2f}",
    ]


def verdict(answers: Answers) -> str:
    """Whether DeFT with the Preserver is where the target wants it."""
    base = [answer["accuracy"] for answer in answers["ddp"]]
    floor = statistics.fmean(base) - error(base)
    own = statistics.fmean(answer["accuracy"] for answer in answers["deft"])
    loss = statistics.fmean(differences(answers, "deft", "ddp", "loss"))
    reached = "is" if own >= floor else "IS NOT"
    within = "is" if loss <= 1.0 else "IS NOT"
    return (
        f"DeFT's mean accuracy {own:.4f} {reached} at least DDP's mean less one standard error, {floor:.4f}; its loss, "
        f"{loss:+.1f} % from DDP's, {within} within 1 %."
    )


def section(head: str, answers: Answers, base: str = "ddp") -> str:
    """A table, what it says of the target, and what the Preserver decided with the first seed."""
    parts = [f"### {head}", notes.table(HEADER, [row(answers, name, base) for name in answers])]
    if "deft" in answers:
        decisions = "\n".join(f"- {text}" for text in answers["deft"][0]["decisions"])
        parts += [verdict(answers), f"Decisions of DeFT with the first seed:\n\n{decisions}"]
    return "\n\n".join(parts)


# -- the picture -------------------------------------------------------------------------------------------------------


def draw(results: Mapping[tuple[str, float], Answers], ablations: Answers, path: Path) -> None:
    """Accuracy to DDP's against time by the plan: the systems on each workload, and the ablations.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    panels = [(f"{workload}, coverage rate {cr:g}", answers) for (workload, cr), answers in results.items()]
    panels += [("ablations", ablations)] if ablations else []
    columns = min(2, len(panels))
    with matplotlib.rc_context({**STYLE, **GRID}):
        figure = Figure(figsize=(5.6 * columns, 3.6 * math.ceil(len(panels) / columns)), layout="constrained")
        axes = list(figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flat)
        for place, (title, answers) in zip(axes, panels, strict=False):
            panel(place, title, answers)
        for place in axes[len(panels) :]:
            place.set_visible(False)
        figure.savefig(path, dpi=130)


def panel(axes: Any, title: str, answers: Answers) -> None:
    """One set of cases: a line each, beside the name the time of a step in DDP's."""
    names = [name for name in answers if name != "ddp"]
    base = statistics.fmean(answer["step"] for answer in answers["ddp"])
    for place, name in enumerate(names):
        found = differences(answers, name, "ddp", "accuracy")
        colour = local_steps.COLOURS[place % len(local_steps.COLOURS)]
        axes.errorbar(statistics.fmean(found), place, xerr=error(found), fmt="o", capsize=3, color=colour)
    times = [statistics.fmean(answer["step"] for answer in answers[name]) / base for name in names]
    axes.set_yticks(range(len(names)), [f"{CASES[n].label}, {t:.2f} x" for n, t in zip(names, times, strict=True)])
    axes.invert_yaxis()
    axes.axvline(0, color=GREY, linewidth=0.8)
    accuracies = [answer["accuracy"] for answer in answers["ddp"]]
    axes.axvspan(-100 * error(accuracies), 100 * error(accuracies), color=GREY, alpha=0.15, linewidth=0)
    axes.set(title=title, xlabel="accuracy to DDP's, points (grey: standard error)")


# -- the command -------------------------------------------------------------------------------------------------------


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line, completed."""
    parser = local_steps.parser(__doc__, 5)
    parser.add_argument("--workloads", type=names_of(tuple(SIZES)), default=["resnet", "gpt"], help="with commas")
    parser.add_argument("--cr", type=numbers, default=[2.0, 4.0], help="emulated coverage rates, with commas")
    parser.add_argument("--ablation-seeds", type=int, default=3, help="of the ablations; 0: none (%(default)s)")
    parser.add_argument(
        "--systems", type=names_of(tuple(CASES)), help=f"instead of {','.join(MAIN)}; ddp is among them"
    )
    parser.add_argument("--steps", type=int, help="of training (each workload's own)")
    parser.add_argument("--batch-size", type=int, help="examples a rank and step (each workload's own)")
    options = parser.parse_args(words)
    if options.quick:
        options.seeds, options.ablation_seeds = 1, min(options.ablation_seeds, 1)
        options.workloads, options.cr, options.steps = options.workloads[:1], options.cr[:1], options.steps or 40
    if options.seeds < 1 or options.ablation_seeds < 0:
        parser.error("--seeds, --ablation-seeds: give 1 or more, and 0 or more")
    return options


def compare(options: argparse.Namespace) -> dict[tuple[str, float], Answers]:
    """The systems on each workload at each coverage rate; DDP trains once a workload and seed."""
    cases = list(dict.fromkeys(["ddp", *(options.systems or MAIN)]))
    results: dict[tuple[str, float], Answers] = {}
    for workload in options.workloads:
        known: Answers = {}
        for cr in options.cr:
            known = at_rate(known, workload, cr) if known else {}
            known = results[workload, cr] = in_turn(workload, cr, cases, options.seeds, options, known)
    return results


def ablate(options: argparse.Namespace, results: Mapping[tuple[str, float], Answers]) -> Answers:
    """The ablations beside what was measured of the first workload at the first coverage rate."""
    if not options.ablation_seeds:
        return {}
    (workload, cr), known = next(iter(results.items()))
    seeds = min(options.ablation_seeds, options.seeds)
    return in_turn(workload, cr, ["ddp", "off", "fifo", *ABLATIONS], seeds, options, known)


def sections_of(options: argparse.Namespace, results: Mapping[tuple[str, float], Answers]) -> list[str]:
    """What holds for all, and a table for each workload and coverage rate."""
    emulated = (
        "THE COVERAGE RATE IS EMULATED by a fixed profile: ``step`` is a time by the plan, in units of computing."
    )
    sections = [f"{local_steps.place([2])} {emulated}"]
    for (workload, cr), answers in results.items():
        steps, batch_size = size_of(workload, options)
        size = f"{steps} steps of {batch_size} examples a rank, {options.seeds} seeds"
        sections.append(section(f"{workload}, coverage rate {cr:g}, {size}", answers))
    return sections


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)
    if options.worker:
        local_steps.work(options.worker, measure)
        return 0
    results = compare(options)
    ablations = ablate(options, results)
    sections = sections_of(options, results)
    if ablations:
        seeds = len(ablations["ddp"])
        sections.append(
            section(f"Ablations: {options.workloads[0]}, coverage rate {options.cr[0]:g}, {seeds} seeds", ablations)
        )
    print("\n\n".join(sections))
    if options.save:
        data = {**{f"{name} {cr:g}": answers for (name, cr), answers in results.items()}, "ablations": ablations}
        title = "DeFT's accuracy after as many steps as DDP"
        local_steps.save("deft-accuracy", title, sections, data, lambda path: draw(results, ablations, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
