"""What would each option bring on clusters that are not here? Simulated; writes docs/simulation.md and its pictures.

    python -m benchmarks.scale_curves [--out docs] [--quick]

16 to 1,024 GPUs behind links of 10 to 400 Gbit/s; the clusters of the DeFT and CrossoverScheduler papers; and how long
the simulator itself takes. Nothing here was measured on GPUs.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import notes
from benchmarks.published_ranges import DEFT_MODELS, crossover, deft
from benchmarks.simulated_points import OPTIONS, SHARING, Point, at, job, point
from crossover.simulate import Job, Part, gpus, listed, simulate
from crossover.simulate.layerwise import Priority, USByte
from crossover.simulate.picture import draw_curves
from crossover.simulate.systems import DeFT, Plain

RANKS = (16, 64, 256, 1024)
GIGABITS = (10, 25, 100, 400)
FINE_GIGABITS = (5, 10, 25, 50, 100, 200, 400, 800)
MODELS = ("resnet50", "vgg16", "gpt2", "bert-large")
PAYS = 1.03


def crossing(name: str, option: str, ranks: int, rates: Sequence[float]) -> str:
    """The rate from which on the option gains less than 3 %, between the rates that were simulated."""
    gains = [point(name, option, ranks, gigabits).speed_up for gigabits in rates]
    paying = [number for number, value in enumerate(gains) if value >= PAYS]
    if not paying:
        return f"below {rates[0]:g}"
    last = paying[-1]
    if last == len(rates) - 1:
        return f"above {rates[-1]:g}"
    share = (gains[last] - PAYS) / max(gains[last] - gains[last + 1], 1e-9)
    logarithm = math.log(rates[last]) + share * (math.log(rates[last + 1]) - math.log(rates[last]))
    return f"{math.exp(logarithm):.0f}"


# -- sections ----------------------------------------------------------------------------------------------------------


def scale(names: Sequence[str], ranks: Sequence[int], fine: Sequence[float], out: Path) -> Iterator[str]:
    """Curves, a table and the crossing points of each model."""
    options = [*OPTIONS, SHARING]
    yield "## 16 to 1,024 GPUs, 10 to 400 Gbit/s"
    yield (
        "Nodes of 8 A100 (TF32) with one link each; the batch a GPU is fixed. *Computing* is the share of a step in "
        f"which GPUs compute. An option pays where it gains {PAYS - 1:.0%} or more over plain; `sharing` counts the "
        "work of two equal jobs against the same two one after the other. "
        "SelSync's shares are waited for, so it gains nothing where DDP hides its own. Numbers in brackets: updates a "
        "step in the long run, where fewer than 1."
    )
    for name in names:
        picture = f"simulation-{name}.png"
        curves = {
            f"{gigabits} Gbit/s": {
                option: [(n, point(name, option, n, gigabits).busy) for n in ranks] for option in ("plain", *options)
            }
            for gigabits in GIGABITS
        }
        title = f"{name}, simulated: share of a step in which GPUs compute"
        draw_curves(curves, out / picture, "GPUs", "computing", title)
        yield f"### {name}, batch {job(name).batch} a GPU, computing {1e3 * job(name).compute_s:.0f} ms a step"
        yield f"![computing over ranks]({picture})"
        yield notes.table(
            ["x plain (updates)", *(_place(n, g) for g in GIGABITS for n in ranks)],
            [[option, *(_gained(point(name, option, n, g)) for g in GIGABITS for n in ranks)] for option in options],
        )
        yield "Rate in Gbit/s from which on the option no longer pays:"
        yield notes.table(
            ["GPUs", *map(str, ranks)],
            [[option, *(crossing(name, option, n, fine) for n in ranks)] for option in options],
        )


def _place(ranks: int, gigabits: float) -> str:
    return f"{ranks} at {gigabits:g}"


def _gained(found: Point) -> str:
    return f"{found.speed_up:.2f}" + (f" ({found.updates:.2f})" if found.updates < 0.995 else "")


def own_speed(ranks: int = 1024, buckets: int = 200, steps: int = 100) -> str:
    """How long the simulator takes."""
    large = Job("large", tuple(Part(1e-4, 2e-4, 2_000_000) for _ in range(buckets)), 1e-3)
    place = gpus(ranks, 100e9)
    spent = {}
    for system in (Plain(1, 1), DeFT(cap_bytes=1), Priority(fuse_bytes=0)):
        began = time.perf_counter()
        simulate(large, system, place, steps)
        spent[system.label] = time.perf_counter() - began
    said = ", ".join(f"{label} {seconds:.1f} s" for label, seconds in spent.items())
    return f"## The simulator's own time\n\n{ranks:,} ranks, {buckets} buckets, {steps} steps, on one core: {said}."


def assumptions() -> str:
    """All of them, with their sources."""
    place = at("16x10")
    made = [note for name in (*MODELS, *DEFT_MODELS) for note in job(name).notes]
    made += [*place.assumptions(), *(n for s in (Plain(), *OPTIONS.values(), USByte()) for n in s.assumptions())]
    return "\n".join(["## Assumptions", "", *(f"- {line}" for line in listed(made))])


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--quick", action="store_true", help="one model, two sizes of cluster")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    names, ranks = (MODELS[:1], RANKS[:2]) if options.quick else (MODELS, RANKS)
    fine = [float(rate) for rate in (GIGABITS if options.quick else FINE_GIGABITS)]
    head = (
        "# Simulated: what each option brings on clusters that are not here\n\n"
        "Written by `python -m benchmarks.scale_curves`. Every figure on this page is SIMULATED, by the planner, the "
        "orders and the turns that training uses, on a virtual clock; nothing was measured on GPUs. How far the "
        "simulator is off where measurements exist: `python -m benchmarks.simulator`."
    )
    made = [head, *scale(names, ranks, fine, options.out), *deft(options.out), *crossover(), own_speed(), assumptions()]
    page = options.out / "simulation.md"
    page.write_text("\n\n".join(made) + "\n")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
