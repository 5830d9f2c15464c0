"""What do jobs that share their devices get done: one after the other, at once, and taking turns?

    python -m benchmarks.two_jobs [--scenarios two,three,unequal] [--repeats 3] [--quick] [--save]

Each job has one rank on every host and a host's jobs share its cores. Three ways, in alternating order, ``--repeats``
times: each job alone with the device, one after the other; all at once without coordination; all at once with
``TimeShare``. The figure is work done: with the steps a second that each job makes while all of them run, and the
seconds that its step takes alone, ``gain = sum(steps/s x seconds alone)``; 1 is what one after the other gets done.
``wall`` is the time in which each of the jobs gets one of its steps done on average: the sum of their seconds alone,
over the gain. Final weights have to be the same bits all three ways, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import command, loopback, notes, workloads
from benchmarks.figures import milliseconds
from benchmarks.harness import say
from benchmarks.sharing_rank import START_SECONDS, WARM_UP_STEPS
from benchmarks.testbed import JobError, Testbed, parse_rate
from benchmarks.workloads import coverage
from crossover.sync import Forecast, JobProfile, forecast

RANK_MODULE = "benchmarks.sharing_rank"
ALONE, AT_ONCE, TURNS = "one after the other", "at once, no coordination", "with turns"
WAYS = (ALONE, AT_ONCE, TURNS)
HEADER = ["way", "wall, ms", "lowest to highest", "gain", "forecast", "turn, ms", "waited for turns"]


@dataclass(frozen=True)
class Scenario:
    """Jobs that share hosts.

    Attributes:
        jobs: each a workload and its batch size.
    """

    name: str
    hosts: int
    rate: str
    jobs: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        jobs = ", ".join(f"{name} (batch {batch})" for name, batch in self.jobs)
        return f"{len(self.jobs)} jobs on {self.hosts} hosts, {self.rate}: {jobs}"


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("two", 2, "1gbit", (("mlp", 256),) * 2),
        Scenario("two_slow", 2, "500mbit", (("mlp", 256),) * 2),
        Scenario("three", 2, "500mbit", (("mlp", 256),) * 3),
        Scenario("four", 2, "500mbit", (("mlp", 256),) * 4),
        Scenario("unequal", 2, "1gbit", (("mlp", 256), ("vgg", 64))),
        Scenario("four_hosts", 4, "500mbit", (("mlp", 256),) * 2),
    )
}


# -- jobs --------------------------------------------------------------------------------------------------------------

Ranks = list[dict[str, Any]]
"""What each rank of a job reported."""


def run_jobs(
    bed: Testbed, scenario: Scenario, numbers: Sequence[int], steps: Mapping[int, int], way: str
) -> list[Ranks]:
    """Run some of a scenario's jobs at the same time; what each one's ranks reported."""
    with tempfile.TemporaryDirectory(prefix="xo-") as folder:
        meeting = Path(folder, "meeting")
        meeting.mkdir()
        started = []
        for number in numbers:
            name, batch = scenario.jobs[number]
            results = Path(folder, f"job{number}")
            results.mkdir()
            task = {
                **{"workload": name, "batch": batch, "number": number, "steps": steps[number]},
                **{"meeting": str(meeting), "together": len(numbers)},
            }
            variables = {
                loopback.RESULT_VARIABLE: str(results),
                "CROSSOVER_TIMEOUT": "120",
                "CROSSOVER_RUN_DIR": folder,
                "CROSSOVER_SHARING": f"timeshare:job=job{number}" if way == TURNS else "",
            }
            started.append((results, bed.start(["-m", RANK_MODULE, json.dumps(task)], env=variables)))
        for _, job in started:
            job.wait(timeout=START_SECONDS + 300).check()
        return [loopback.collect(str(results), scenario.hosts) for results, _ in started]


def rates(jobs: Sequence[Ranks]) -> list[float]:
    """Steps a second of each job while all of them ran."""
    ends = [[max(moments) for moments in zip(*(rank["ends"] for rank in ranks), strict=True)] for ranks in jobs]
    begin, end = max(moments[0] for moments in ends), min(moments[-1] for moments in ends)
    return [(_steps_until(moments, end) - _steps_until(moments, begin)) / (end - begin) for moments in ends]


def _steps_until(ends: Sequence[float], moment: float) -> float:
    """How many steps were done at a moment, parts of a step included."""
    if moment >= ends[-1]:
        return float(len(ends) - 1)
    after = next(place for place, end in enumerate(ends) if end > moment)
    if after == 0:
        return 0.0
    return after - 1 + (moment - ends[after - 1]) / (ends[after] - ends[after - 1])


@dataclass
class Result:
    """One scenario's figures, one entry a repeat.

    Attributes:
        alone_s: seconds that a step of each job takes alone.
        rates: by way, steps a second of each job while all of them run.
        turns: what turns took and cost.
        compute_s: of each job, seconds a step with the turn in hand.
        place: hosts, links and shares of cores.
    """

    scenario: Scenario
    alone_s: list[list[float]] = field(default_factory=list)
    rates: dict[str, list[list[float]]] = field(default_factory=lambda: {way: [] for way in (AT_ONCE, TURNS)})
    turns: list[dict[str, float]] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    place: str = ""

    @property
    def step_s(self) -> list[float]:
        """Each job's step with the device to itself."""
        return [statistics.median(values) for values in zip(*self.alone_s, strict=True)]

    def gains(self, way: str) -> list[float]:
        """Work done, in what one after the other gets done in the same repeat."""
        if way == ALONE:
            return [1.0] * len(self.alone_s)
        return [
            sum(rate * step for rate, step in zip(steps, alone, strict=True))
            for steps, alone in zip(self.rates[way], self.alone_s, strict=True)
        ]


def measure(bed: Testbed, scenario: Scenario, repeats: int, seconds: float) -> Result:
    """All ways in turn."""
    result = Result(scenario)
    everyone = range(len(scenario.jobs))
    bed.set_rate(parse_rate(scenario.rate))
    steps = dict.fromkeys(everyone, 8)
    first = [run_jobs(bed, scenario, [number], steps, ALONE)[0] for number in everyone]
    each = [1 / rates([ranks])[0] for ranks in first]
    steps = {number: max(6, round(seconds / each[number])) for number in everyone}
    for repeat in range(repeats):
        weights: dict[str, list[str]] = {}
        for way in WAYS if repeat % 2 == 0 else WAYS[::-1]:
            began = time.monotonic()
            weights[way] = _measure_way(bed, result, way, steps)
            say(f"repeat {repeat + 1}/{repeats}: {scenario}, {way}: {time.monotonic() - began:.1f} s")
        if len({tuple(found) for found in weights.values()}) > 1:
            raise JobError(f"{scenario}: weights differ between the ways: {weights}", 1)
    result.place = str(bed)
    return result


def _measure_way(bed: Testbed, result: Result, way: str, steps: Mapping[int, int]) -> list[str]:
    scenario = result.scenario
    everyone = range(len(scenario.jobs))
    if way == ALONE:
        jobs = [run_jobs(bed, scenario, [number], steps, way)[0] for number in everyone]
        result.alone_s.append([1 / rates([ranks])[0] for ranks in jobs])
    else:
        jobs = run_jobs(bed, scenario, everyone, steps, way)
        result.rates[way].append(rates(jobs))
    if way == TURNS:
        ranks = [rank for job in jobs for rank in job]
        lost = sum(rank["alone"] for rank in ranks)
        if lost:
            raise JobError(f"{scenario}: {lost} turns were taken without an arbiter", 1)
        turns = sum(rank["turns"] for rank in ranks)
        result.turns.append(
            {
                "turn_s": sum(rank["computed_s"] for rank in ranks) / max(turns, 1),
                "waited_s": sum(rank["waited_s"] for rank in ranks) / max(turns, 1),
            }
        )
        result.compute_s = [
            statistics.mean(rank["computed_s"] / (WARM_UP_STEPS + steps[number]) for rank in jobs[number])
            for number in everyone
        ]
    return [job[0]["weights"] for job in jobs]


# -- tables ------------------------------------------------------------------------------------------------------------


def predicted(result: Result) -> Forecast:
    """The forecast from what a step computes with turns, how long it takes alone, and what the link has to carry."""
    scenario, rate = result.scenario, parse_rate(result.scenario.rate)
    profiles = []
    for number, (name, batch) in enumerate(scenario.jobs):
        compute, gradient_bytes = result.compute_s[number], workloads.get(name, batch).gradient_bytes
        network = coverage.all_reduce_s(gradient_bytes, rate, scenario.hosts)
        profiles.append(JobProfile(f"job{number}", compute, max(result.step_s[number] - compute, 0.0), network))
    return forecast(profiles, shared_link=True)


def section(result: Result) -> str:
    """One scenario's table."""
    rows, expected = [], predicted(result)
    serial = [sum(steps) for steps in result.alone_s]
    for way in WAYS:
        gains = result.gains(way)
        walls = [total / gain for total, gain in zip(serial, gains, strict=True)]
        row = [way, milliseconds(statistics.median(walls)), f"{milliseconds(min(walls))} to {milliseconds(max(walls))}"]
        row += [f"{statistics.median(gains):.2f}", "", "", ""]
        if way == TURNS:
            row[4] = f"{expected.gain:.2f}"
            row[5] = milliseconds(statistics.median(turn["turn_s"] for turn in result.turns))
            row[6] = milliseconds(statistics.median(turn["waited_s"] for turn in result.turns))
        rows.append(row)
    alone = ", ".join(milliseconds(step) for step in result.step_s)
    bound = f"forecast with turns: {milliseconds(expected.shared_s)} ms, bound by {expected.limit}"
    return "\n\n".join(
        [f"### {result.scenario}", notes.table(HEADER, rows), f"A step alone: {alone} ms; {bound}. {result.place}."]
    )


def as_data(result: Result) -> dict[str, Any]:
    """Everything that the table was made from."""
    return {
        "scenario": result.scenario.name,
        "hosts": result.scenario.hosts,
        "rate": result.scenario.rate,
        "jobs": result.scenario.jobs,
        "alone_s": result.alone_s,
        "rates": result.rates,
        "gains": {way: result.gains(way) for way in WAYS},
        "turns": result.turns,
        "compute_s": result.compute_s,
        "place": result.place,
    }


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=command.names_of(tuple(SCENARIOS)), help=f"({','.join(SCENARIOS)})")
    parser.add_argument("--repeats", type=int, help="times that every figure is taken (3)")
    parser.add_argument("--seconds", type=float, help="of training alone that a job is measured for (5)")
    parser.add_argument("--quick", action="store_true", help="a look: two jobs on two hosts, once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    options = parser.parse_args(words)
    options.scenarios = options.scenarios or (["two"] if options.quick else list(SCENARIOS))
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.seconds = options.seconds or (3.0 if options.quick else 5.0)
    return options


def run(options: argparse.Namespace) -> list[Result]:
    """All scenarios; those with the same number of hosts on one bed."""
    results = []
    for hosts in sorted({SCENARIOS[name].hosts for name in options.scenarios}):
        chosen = [SCENARIOS[name] for name in options.scenarios if SCENARIOS[name].hosts == hosts]
        with Testbed(hosts, chosen[0].rate) as bed:
            results += [measure(bed, scenario, options.repeats, options.seconds) for scenario in chosen]
    return results


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = options_of(words)

    def question() -> int:
        results = run(options)
        sections = [section(result) for result in results]
        data = [as_data(result) for result in results]
        command.conclude(options, "two-jobs", "Jobs that share their devices", sections, data)
        return 0

    return command.carry_out(question)


if __name__ == "__main__":
    sys.exit(main())
