"""The command line that the question scripts share, and what their drivers come to."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import notes, peers, workloads
from .harness import BASE, CEILING, Measure, Outcome, say, work
from .testbed import BandwidthError, JobError, TestbedError

UNAVAILABLE, OFF = 69, 3
"""Exit codes: no testbed can be built here; a link was off, so that its figures were not taken."""


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """For argparse: a list of known names with commas between them."""

    def parse(text: str) -> list[str]:
        asked = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in asked if name not in known]
        if unknown or not asked:
            raise argparse.ArgumentTypeError(f"got {text!r}; give some of {','.join(known)}")
        return list(dict.fromkeys(asked))

    return parse


def numbers(text: str) -> list[float]:
    """For argparse: positive numbers with commas between them."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"got {text!r}; give numbers above 0 with commas between them, like 0.5,1,2")
    return values


def parser(description: str, chosen: Sequence[str], crs: str, repeats: int) -> argparse.ArgumentParser:
    """The options that every question has; ``None`` where ``--quick`` decides about the default."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    made.add_argument(
        "--systems",
        type=names_of(peers.names()),
        default=list(peers.names()),
        help=f"with commas; {BASE} is always among them (default: all: {','.join(peers.names())})",
    )
    made.add_argument("--workloads", type=names_of(workloads.names()), help=f"with commas ({','.join(chosen)})")
    made.add_argument("--cr", type=numbers, help=f"coverage rates, with commas ({crs})")
    made.add_argument("--repeats", type=int, help=f"times that every figure is taken ({repeats})")
    made.add_argument("--quick", action="store_true", help="a look: one workload, one repeat, no search for settings")
    made.add_argument("--emulated", action="store_true", help="Crossover's emulated link, which needs no root")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    made.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    made.set_defaults(usual=(list(chosen), numbers(crs), repeats))
    return made


def complete(made: argparse.ArgumentParser, options: argparse.Namespace, quick: tuple[list[str], list[float]]) -> None:
    """Fill in what was not given, and refuse what cannot be."""
    usual_workloads, usual_crs, usual_repeats = options.usual
    quick_workloads, quick_crs = quick
    options.workloads = options.workloads or (quick_workloads if options.quick else usual_workloads)
    options.cr = options.cr or (quick_crs if options.quick else usual_crs)
    if options.repeats is None:
        options.repeats = 1 if options.quick else usual_repeats
    if options.repeats < 1:
        made.error(f"--repeats: is {options.repeats}; it has to be at least 1")
    options.systems = [BASE, *(name for name in options.systems if name not in (BASE, CEILING))]


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def carry_out(question: Callable[[], int]) -> int:
    """Run a driver; its exit code, or what a missing testbed, a wrong option and Ctrl-C come to."""
    # So that SIGTERM leaves through the with blocks too: the ranks are ended before the hosts.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return question()
    except BandwidthError as error:
        say(f"refused: {error}")
        return OFF
    except JobError as error:
        say(f"failed: {error}")
        return 1
    except TestbedError as error:
        say(str(error))
        say("With --emulated this script itself measures Crossover's systems on such a link, in tables that say so.")
        return UNAVAILABLE
    except ValueError as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def script(options: argparse.Namespace, measure: Measure, question: Callable[[argparse.Namespace], int]) -> int:
    """A question script with its command line read: a rank's worker, or the driver; the exit code."""
    if options.worker:
        work(options.worker, measure)
        return 0
    return carry_out(lambda: question(options))


def conclude(options: argparse.Namespace, name: str, title: str, sections: Sequence[str], data: Any) -> None:
    """Print the tables; write what was asked for."""
    print("\n\n".join(filter(None, sections)))
    if options.json:
        options.json.write_text(json.dumps({"machine": notes.machine(), "data": data}, indent=1) + "\n")
    if options.save:
        print(notes.save(name, title, [*filter(None, sections)], data))


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """0, or that a link was off."""
    return OFF if any(outcome.refused for outcome in outcomes) else 0
