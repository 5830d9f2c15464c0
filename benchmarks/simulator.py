"""Does the simulator predict what the testbed measured?

    python -m benchmarks.simulator [--note benchmarks/results/DATE-step-time.json] [--save]
    python -m benchmarks.simulator [options of benchmarks.step_time]

Reads the measurements of a step_time note, or takes them. Each cell is predicted from the step without communication
(measured in the same cell), the layers' shares of it (measured here), the link's rate, and four constants of the
testbed that hold for all cells and systems. Three of these (the share of the link's rate that gradients get, Gloo's own
work on each byte, and the computing that communication costs) are fitted to DDP's own cells; every other system's
figure is a prediction.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command, figures, notes, peers, step_time
from benchmarks.harness import BASE, CEILING, say
from benchmarks.layer_times import layer_times
from benchmarks.simulated import Constants, Measured, predict
from crossover.simulate import Job, Part

FIT_STEPS = 6
TOLERANCE = 0.1
GOODPUTS = [0.9, 0.92, 0.94, 0.96, 0.98, 1.0]
COPIES = [0.4e-9 * n for n in range(7)]
COSTS = [0.4e-9 * n for n in range(7)]
"""Candidates of the fit; see :class:`Constants`."""
HEADER = ["system", "measured, ms", "predicted, ms", "error"]


# -- reading -----------------------------------------------------------------------------------------------------------


def read(data: Sequence[dict[str, Any]]) -> list[Measured]:
    """All figures of a note, cell by cell; a cell without the step that does not communicate is left out."""
    found: list[Measured] = []
    for entry in data:
        times = {name: _seconds(kept["runs"]) for name, kept in entry["systems"].items() if _ran(kept)}
        if entry["refused"] is not None or CEILING not in times:
            continue
        job = job_of(entry, times[CEILING])
        cell = f"{entry['workload']}, coverage rate {entry['cr']:g}, {entry['hosts']} hosts"
        for name, seconds in times.items():
            first = entry["systems"][name]["runs"][0][0]
            steps = step_time.WINDOW * len(first["windows"])
            facts = first.get("facts", {})
            place = (entry["hosts"], entry["rate_bit_s"], steps, facts)
            found.append(Measured(cell, name, seconds, job, *place, layer_times(entry["workload"]).compressible))
    return found


def _ran(kept: dict[str, Any]) -> bool:
    return kept["reason"] is None and bool(kept["runs"])


def _seconds(runs: Sequence[Sequence[dict[str, Any]]]) -> float:
    """As step_time has it: the median over windows as long as on the slowest rank, then over repeats."""
    each = [statistics.median(figures.slowest([answer["windows"] for answer in ranks])) for ranks in runs]
    return statistics.median(each)


def job_of(entry: dict[str, Any], alone_s: float) -> Job:
    """The cell's job: layers in the proportions measured here, a step as long as the cell's without communication."""
    layers = layer_times(entry["workload"])
    between = layers.load_s + layers.update_s
    whole = between + 1e-6 * (sum(layers.forward_us) + sum(layers.backward_us))
    factor = alone_s / whole
    rows = zip(layers.forward_us, layers.backward_us, layers.nbytes, strict=True)
    parts = tuple(Part(factor * 1e-6 * f, factor * 1e-6 * b, nbytes) for f, b, nbytes in rows)
    return Job(entry["workload"], parts, factor * between, factor * layers.load_s)


# -- fitting ---------------------------------------------------------------------------------------------------------


def fit(measured: Sequence[Measured]) -> Constants:
    """The constants with which DDP's own cells are predicted best."""
    own = [entry for entry in measured if entry.system == BASE]
    candidates = [Constants(*chosen) for chosen in itertools.product(GOODPUTS, COPIES, COSTS)]

    def wrong(constants: Constants) -> float:
        return sum(abs(error(entry, predict(entry, constants, FIT_STEPS))) for entry in own)

    return min(candidates, key=wrong) if own else Constants()


def error(measured: Measured, predicted: float | None) -> float:
    """Relative; not a number where there is no prediction."""
    return float("nan") if predicted is None else predicted / measured.seconds - 1


# -- telling -----------------------------------------------------------------------------------------------------------


def sections(measured: Sequence[Measured], constants: Constants) -> Iterator[str]:
    """A table for each cell, and how many predictions are within the tolerance."""
    predicted = [(entry, predict(entry, constants)) for entry in measured]
    counted = [(e, p) for e, p in predicted if e.system not in (CEILING, BASE) and p is not None]
    within = sum(abs(error(e, p)) <= TOLERANCE for e, p in counted)
    typical = statistics.median(abs(error(e, p)) for e, p in counted) if counted else 0.0
    yield (
        f"{within} of {len(counted)} predictions within {TOLERANCE:.0%} of what was measured, median error "
        f"{typical:.1%}. Not counted: the step without communication, from which predictions start, and DDP, to "
        f"which three constants were fitted: gradients get {constants.goodput:.0%} of the links' rate, each megabyte "
        f"takes {1e9 * constants.copy_s_per_byte:.1f} ms beside its time on the link, and costs "
        f"{1e9 * constants.cost_s_per_byte:.1f} ms of computing done meanwhile. A collective costs "
        f"{1e3 * constants.launch_s:g} ms beyond its bytes."
    )
    yield notes.table(["system", "cells", "within 10 %", "median error", "worst"], list(_by_system(counted)))
    for cell in dict.fromkeys(entry.cell for entry in measured):
        rows = [_row(entry, seconds) for entry, seconds in predicted if entry.cell == cell]
        yield f"### {cell}\n\n{notes.table(HEADER, rows)}"


def _by_system(counted: Sequence[tuple[Measured, float | None]]) -> Iterator[list[str]]:
    for name in dict.fromkeys(entry.system for entry, _ in counted):
        errors = [error(entry, seconds) for entry, seconds in counted if entry.system == name]
        within = sum(abs(e) <= TOLERANCE for e in errors)
        worst = max(errors, key=abs)
        yield [_label(name), str(len(errors)), str(within), f"{statistics.median(errors):+.1%}", f"{worst:+.1%}"]


def _row(entry: Measured, predicted: float | None) -> list[str]:
    if predicted is None:
        return [_label(entry.system), f"{1e3 * entry.seconds:.1f}", "no model", ""]
    return [
        _label(entry.system),
        f"{1e3 * entry.seconds:.1f}",
        f"{1e3 * predicted:.1f}",
        f"{error(entry, predicted):+.1%}",
    ]


def _label(name: str) -> str:
    return peers.get(name).label if name in peers.names() else name


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--note", type=Path)
    parser.add_argument("--save", action="store_true")
    known, rest = parser.parse_known_args(words)

    def question() -> int:
        if known.note is not None:
            data = json.loads(known.note.read_text())["data"]
        else:
            options = step_time.options_of(rest, __doc__ or "", (["resnet", "vgg", "gpt", "mlp"], "0.5,1,2,4", 3))
            data = figures.as_data(step_time.everywhere(options, options.hosts or [2]))
        measured = read(data)
        if not measured:
            say("the measurements hold no cell with the step without communication")
            return 1
        constants = fit(measured)
        made = list(sections(measured, constants))
        print("\n\n".join(made))
        if known.save:
            rows = [[e.cell, e.system, e.seconds, predict(e, constants)] for e in measured]
            print(notes.save("simulator", "The simulator against the testbed", made, rows))
        return 0

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
