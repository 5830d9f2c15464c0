"""What the question scripts share: cells, the worker on each rank, jobs, and systems in turn.

A script is driver and worker in one: the driver runs ``python -m SCRIPT --worker TASK`` on every host, and the worker
answers through :func:`work`. One job measures one cell (a workload at a link rate), all systems of a launcher in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import crossover as xo

from . import loopback, peers, workloads
from .peers import NotRunnable, Settings, System, tuning
from .sites import Site
from .testbed import BandwidthError, JobError
from .workloads import Workload, coverage
from .workloads.measure import ComputeTime

BASE, CEILING = "ddp", "alone"
REASON_CHARACTERS = 200


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


# -- cells -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One workload at one coverage rate, and the link rate that gives it here."""

    workload: str
    cr: float
    compute: ComputeTime
    hosts: int

    @property
    def rate(self) -> float:
        """Bits a second."""
        return coverage.rate_for(self.cr, self.compute.forward_backward_s, self.compute.gradient_bytes, self.hosts)

    @property
    def all_reduce_s(self) -> float:
        """Seconds of one step's all-reduce with the links full."""
        return coverage.all_reduce_s(self.compute.gradient_bytes, self.rate, self.hosts)

    def limit_s(self, compute_s: float | None = None) -> float:
        """The shortest step that shares every gradient; with a step's computing as measured beside the systems."""
        return max(self.compute.step_s if compute_s is None else compute_s, self.all_reduce_s)

    def __str__(self) -> str:
        return f"{self.workload}, coverage rate {self.cr:g}, {self.hosts} hosts"


def make_cells(site: Site, names: Sequence[str], crs: Sequence[float], batch_size: int | None = None) -> list[Cell]:
    """Measure each workload's computing here and now, and make a cell of it for each coverage rate.

    The worker has to be told of another ``batch_size`` than the workload's own, as the task's ``"batch_size"``.
    """
    cells = []
    for name in names:
        compute = site.compute(workloads.get(name, batch_size))
        say(f"{name}: computing {1e3 * compute.step_s:.1f} ms, {compute.gradient_bytes / 1e6:.2f} MB of gradients")
        cells += [Cell(name, cr, compute, site.hosts) for cr in crs]
    return cells


# -- on the ranks ------------------------------------------------------------------------------------------------------

Measure = Callable[[System, Workload, Settings, dict[str, Any]], dict[str, Any]]
"""``measure(system, workload, settings, task)`` on one rank; what it returns is this rank's answer. Collective."""


def work(text: str, measure: Measure) -> None:
    """One rank of a job: measure the task's systems one after the other, and report."""

    def one_by_one(workload: Workload, task: dict[str, Any]) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        for name in task["systems"]:
            try:
                system = peers.get(name)
                settings, tried = chosen(system, workload, task)
                answer = measure(system, workload, settings, task)
                answers[name] = {**answer, "choice": dict(settings), "tried": tried}
            except NotRunnable as reason:
                answers[name] = {"reason": str(reason)}
            tuning.clean_up()
        return answers

    on_rank(text, one_by_one)


def on_rank(text: str, answers: Callable[[Workload, dict[str, Any]], dict[str, Any]]) -> None:
    """One rank of a job: start, report ``answers(workload, task)`` by system, and end."""
    task = json.loads(text)
    torch.set_num_threads(1)
    xo.init()
    workload = workloads.get(task["workload"], task.get("batch_size"), task["seed"])
    workload.training_set()
    loopback.report(answers(workload, task))
    xo.barrier()
    xo.shutdown()


def chosen(system: System, workload: Workload, task: dict[str, Any]) -> tuple[Settings, dict[str, float]]:
    """The system's settings, by the task's choices or by a search now, and what the search tried. Collective."""
    choices, key = task["choices"], system.tuned_as or system.name
    tried: dict[str, float] = {}
    if key not in choices and task["tune"]:
        choices[key], tried = tuning.tune(system, workload)
    return choices.get(key, {}), tried


# -- jobs, and systems in turn -----------------------------------------------------------------------------------------

Answers = dict[str, list[dict[str, Any]]]
"""By system, what each rank answered: figures, or ``{"reason": ...}``."""


def ask(site: Site, module: str, systems: Sequence[str], task: Mapping[str, Any], timeout: float) -> Answers:
    """Measure the systems of one cell: one job a launcher, in the order of the systems.

    When a job fails, each of its systems gets a job of its own, so that one that fails is found and takes none along.
    """
    answers: Answers = {}
    groups: dict[str, list[str]] = {}
    for name in systems:
        reason = site.refuses(peers.get(name))
        if reason is not None:
            answers[name] = [{"reason": reason}]
        else:
            groups.setdefault(peers.get(name).launcher, []).append(name)
    for launcher, group in groups.items():
        answers |= _ask_group(site, module, launcher, group, task, timeout)
    return answers


def _ask_group(
    site: Site, module: str, launcher: str, group: Sequence[str], task: Mapping[str, Any], timeout: float
) -> Answers:
    words = ["--worker", json.dumps({**task, "systems": list(group)})]
    try:
        ranks = site.run(module, words, launcher, timeout)
    except JobError as error:
        if len(group) == 1:
            return {group[0]: [{"reason": f"failed: {_last_line(str(error))}"}]}
        say(f"a job of {len(group)} systems failed; each gets one of its own: {_last_line(str(error))}")
        return {k: v for name in group for k, v in _ask_group(site, module, launcher, [name], task, timeout).items()}
    return {name: [rank[name] for rank in ranks] for name in group}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines or ["no message"])[-1][:REASON_CHARACTERS]


@dataclass
class Measured:
    """One system in one cell.

    Attributes:
        runs: what each repeat gave, one answer a rank.
        reason: why it cannot run here, if so; then ``runs`` may be incomplete.
        choice: the settings that it ran with.
        tried: seconds a step of each setting that the search tried.
    """

    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    reason: str | None = None
    choice: dict[str, Any] = field(default_factory=dict)
    tried: dict[str, float] = field(default_factory=dict)

    def add(self, ranks: list[dict[str, Any]]) -> None:
        """Take the ranks' answers of one more repeat."""
        reasons = [answer["reason"] for answer in ranks if "reason" in answer]
        if reasons:
            self.reason = reasons[0]
            return
        self.runs.append(ranks)
        self.choice = ranks[0]["choice"]
        self.tried = ranks[0]["tried"] or self.tried

    @property
    def ran(self) -> bool:
        """Whether there are figures for every repeat."""
        return self.reason is None and bool(self.runs)


Results = dict[str, Measured]


@dataclass
class Outcome:
    """One cell's results.

    Attributes:
        systems: by name, in the order of tables.
        place: hosts, cores and shares, for a table.
        sentence: the same with the links at the time.
        site: the same as facts.
        refused: why nothing was measured, if so.
    """

    cell: Cell
    systems: Results
    place: str = ""
    sentence: str = ""
    site: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    choices: dict[str, Settings] = field(default_factory=dict)

    def take(self, site: Site, answers: Answers) -> None:
        """Add one more repeat."""
        self.place, self.site = site.place(), site.describe()
        self.sentence = f"{self.place}; {site.links()}"
        for name, ranks in answers.items():
            measured = self.systems[name]
            measured.add(ranks)
            if measured.ran:
                self.choices.setdefault(peers.get(name).tuned_as or name, measured.choice)


def in_turn(
    site: Site,
    module: str,
    cells: Sequence[Cell],
    systems: Sequence[str],
    repeats: int,
    steps: Callable[[Cell], int],
    task: Mapping[str, Any],
) -> list[Outcome]:
    """Measure every cell ``repeats`` times, all systems in turn within each, in alternating order.

    The first repeat searches for settings, the others take its choices. Repeats are the outermost loop, so that slow
    drift of the machine meets all cells. The seed counts up with the repeats.

    Args:
        site: where.
        module: the script, whose worker is :func:`work`.
        cells: what; see :func:`make_cells`.
        systems: in the order of tables.
        repeats: how often.
        steps: of training in a cell, for the task.
        task: what the worker is told besides.
    """
    outcomes = [Outcome(cell, {name: Measured() for name in systems}) for cell in cells]
    for repeat in range(repeats):
        for outcome in (outcome for outcome in outcomes if outcome.refused is None):
            began = time.monotonic()
            _repeat(site, module, outcome, repeat, {**task, "steps": steps(outcome.cell), "seed": repeat})
            seconds, cell = time.monotonic() - began, outcome.cell
            say(f"repeat {repeat + 1}/{repeats}: {cell}, {cell.rate / 1e6:.4g} Mbit/s: {seconds:.1f} s")
    return outcomes


def _repeat(site: Site, module: str, outcome: Outcome, repeat: int, task: Mapping[str, Any]) -> None:
    cell = outcome.cell
    turn = [name for name, measured in outcome.systems.items() if measured.reason is None]
    asked = {**task, "workload": cell.workload, "choices": outcome.choices}
    try:
        site.set_rate(cell.rate)
        timeout = _timeout(cell, len(turn), task)
        answers = ask(site, module, turn if repeat % 2 == 0 else turn[::-1], asked, timeout)
    except (BandwidthError, ValueError) as error:
        outcome.refused = str(error)
        say(f"{cell}: refused: {error}")
        return
    outcome.take(site, answers)


def _timeout(cell: Cell, systems: int, task: Mapping[str, Any]) -> float:
    """Many times what the job should take, so that only a hang meets it."""
    steps: int = task["steps"] + (60 if task["tune"] else 10)
    return 60.0 + systems * (20.0 + 10 * steps * cell.limit_s())
