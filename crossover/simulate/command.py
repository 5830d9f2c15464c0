"""What ``crossover simulate`` and ``crossover advise`` print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossover.deft.profile import Profile
from crossover.simulate.advise import Advice, cluster_of
from crossover.simulate.assumptions import listed
from crossover.simulate.cluster import Cluster, cluster, resized
from crossover.simulate.gated import Fused, Local
from crossover.simulate.job import Job, from_profile, from_shape
from crossover.simulate.layerwise import Decoupled, Priority, USByte
from crossover.simulate.models import model
from crossover.simulate.network import parse_rate
from crossover.simulate.picture import draw_timelines, write_trace
from crossover.simulate.processors import processor
from crossover.simulate.run import Result, gain, share, simulate
from crossover.simulate.systems import Alone, DeFT, FifoDelayed, Plain, System

SYSTEMS: dict[str, Callable[[], System]] = {
    "alone": Alone,
    "plain": Plain,
    "horovod": Fused,
    "priority": Priority,
    "us-byte": USByte,
    "dear": Decoupled,
    "deft": DeFT,
    "fifo-delayed": FifoDelayed,
    "selsync": Local,
}


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be simulated; text as typed.

    Attributes:
        model: a published one.
        profile: a file, in its place.
        cluster: a preset.
        ranks: in place of the preset's or the profile's.
        rate: of the links, in place of theirs.
        device: in place of the preset's.
        batch: examples a rank and step.
        systems: with commas; all by default.
        jobs: equal ones that take turns on the same devices.
        lssr: share of local steps for SelSync.
        steps: of each.
    """

    model: str = "vgg19"
    profile: Path | None = None
    cluster: str = "16-10g"
    ranks: int | None = None
    rate: str | None = None
    device: str | None = None
    batch: int | None = None
    systems: str = ",".join(SYSTEMS)
    jobs: int = 1
    lssr: float = 0.8
    steps: int = 60


def setting(request: Request) -> tuple[Job, Cluster]:
    """The job and the cluster that are asked for.

    Raises:
        ValueError: there is no such model, cluster, processor or profile.
    """
    bit_s = None if request.rate is None else parse_rate(request.rate)
    if request.profile is not None:
        measured = read_profile(request.profile)
        return from_profile(measured, batch=request.batch or 0), cluster_of(measured, request.ranks, bit_s)
    place = cluster(request.cluster)
    if request.ranks is not None:
        place = resized(place, request.ranks)
    if bit_s is not None:
        place = replace(place, network=replace(place.network, bit_s=bit_s))
    if request.device is not None:
        place = replace(place, device=processor(request.device))
    assert place.device is not None, "presets have processors"
    return from_shape(model(request.model), place.device, request.batch), place


def read_profile(path: Path) -> Profile:
    """A profile; ``ValueError`` also where the file cannot be read."""
    try:
        return Profile.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"profile: cannot read {str(path)!r} ({error}); write one with crossover profile") from error


def chosen(request: Request) -> list[System]:
    """The systems that are asked for.

    Raises:
        ValueError: one is not known.
    """
    names = [name.strip() for name in request.systems.split(",") if name.strip()]
    unknown = [name for name in names if name not in SYSTEMS]
    if unknown or not names:
        raise ValueError(f"systems: is {request.systems!r}; give some of {','.join(SYSTEMS)}")
    return [Local(request.lssr) if name == "selsync" else SYSTEMS[name]() for name in names]


def predict(request: Request) -> tuple[Job, Cluster, list[Result], list[float]]:
    """Run it; with several jobs also what they get done together in one job's time, by system.

    Raises:
        ValueError: something asked for is not to be had.
    """
    job, place = setting(request)
    if request.jobs < 1:
        raise ValueError(f"jobs: is {request.jobs}; give 1 or more")
    results, gains = [], []
    for system in chosen(request):
        alone = simulate(job, system, place, request.steps)
        if request.jobs == 1:
            results.append(alone)
            continue
        twins = [(replace(job, name=f"{job.name} {number + 1}"), system) for number in range(request.jobs)]
        together = share(twins, place, request.steps)
        results += together
        gains.append(gain([alone] * request.jobs, together))
    return job, place, results, gains


def simulate_command(request: Request, as_json: bool, picture: Path | None, timeline: Path | None) -> Any:
    """What the command prints: text, or an object for JSON."""
    job, place, results, gains = predict(request)
    if picture is not None:
        draw_timelines(results, picture)
    if timeline is not None:
        write_trace(results, timeline)
    notes = listed(assumption for result in results for assumption in result.assumptions)
    if as_json:
        keys = ("job", "system", "step_s", "exposed_s", "compute_s", "updates_per_step", "busy")
        rows = [{key: getattr(result, key) for key in keys} for result in results]
        return {
            "coverage_rate": job.coverage_rate(place.network),
            "results": rows,
            "gains": gains,
            "assumptions": notes,
        }
    head = f"{job.name} on {place.ranks} ranks, coverage rate {job.coverage_rate(place.network):.2f}: SIMULATED"
    sharing = [f"{request.jobs} jobs together get {work:.2f} times one's work done" for work in gains]
    return "\n".join([head, "", _table(_HEADER, _rows(results)), *sharing, "", *_noted(notes)])


_HEADER = ("system", "step, ms", "waiting, ms", "computing", "updates a step", "x plain")


def _rows(results: Sequence[Result]) -> list[list[str]]:
    base = next((result.step_s for result in results if result.system == Plain().label), None)
    several = len({result.job for result in results}) > 1
    return [
        [
            f"{result.system}, {result.job}" if several else result.system,
            f"{1e3 * result.step_s:.1f}",
            f"{1e3 * result.exposed_s:.1f}",
            f"{result.busy:.0%}",
            f"{result.updates_per_step:.2f}",
            "" if base is None else f"{base / result.step_s:.2f}",
        ]
        for result in results
    ]


def advise_command(advice: Advice, as_json: bool) -> Any:
    """What ``crossover advise`` prints: text, or an object for JSON."""
    if as_json:
        return advice.as_dict()
    rows = [
        [
            option.name,
            f"{1e3 * option.step_s:.1f}",
            f"{option.updates_per_step:.2f}",
            f"{option.busy:.0%}",
            "not known" if option.efficiency is None else f"{option.efficiency:.3f}",
            f"{option.speed_up:.2f}",
        ]
        for option in advice.options
    ]
    header = ("option", "step, ms", "updates a step", "computing", "progress a sample", "speed-up")
    write = [f"{option.name}:\n    {option.script}" + _remark(option.remark) for option in advice.options]
    head = f"{advice.ranks} ranks, coverage rate {advice.coverage_rate:.2f}: PREDICTED"
    said = [f"advice: {advice.sentence}", "", *_deltas(advice), "to write:", *write]
    return "\n".join([head, "", _table(header, rows), "", *said, "", *_noted(advice.assumptions)])


def _deltas(advice: Advice) -> list[str]:
    if not advice.deltas:
        return []
    found = ", ".join(f"{delta:.3g} for {share:.0%}" for share, delta in advice.deltas)
    return [f"SelSync's delta, by the share of local steps that is wanted: {found} (of the steps watched)", ""]


def _remark(text: str) -> str:
    return f"\n    # {text}" if text else ""


def _noted(notes: Sequence[str]) -> list[str]:
    return ["assumptions:", *(f"- {note}" for note in notes)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
