"""The command ``crossover``. Needs the extra ``cli``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as _missing:
    raise SystemExit(
        f"crossover: the command line needs {_missing.name}, which is not installed; pip install 'crossover[cli]'"
    ) from _missing

from crossover import doctor as examination
from crossover import selftest
from crossover.auto.command import described, take_profile
from crossover.auto.recorder import DEFAULT_STEPS
from crossover.simulate import cluster_names, model_names, processor_names
from crossover.simulate.advise import advise as advice_for
from crossover.simulate.command import Request, advise_command, read_profile, simulate_command
from crossover.simulate.network import parse_rate
from crossover.sync import top as sharing_table
from crossover.sync.arbiter import places
from crossover.sync.device import host_name
from crossover.sync.link import command as arbiter_command
from crossover.telemetry import timeline as timelines
from crossover.telemetry.display import show
from crossover.telemetry.picture import draw
from crossover.telemetry.report import analyse
from crossover.telemetry.run import load_run

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Crossover's tools.")
timeline_app = typer.Typer(no_args_is_help=True, help="Chrome traces written with CROSSOVER_TIMELINE.")
app.add_typer(timeline_app, name="timeline")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _root() -> None:
    """Tools for training with Crossover."""


@app.command()
def doctor(
    as_json: AsJson = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each self test.")] = selftest.TIMEOUT_S,
) -> None:
    """Look at this machine and run a real all-reduce on two ranks; exits with 1 if something is broken."""
    diagnosis = examination.examine(timeout)
    if as_json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    else:
        _show_diagnosis(diagnosis)
    raise typer.Exit(0 if diagnosis.ok else 1)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What CROSSOVER_RECORDS named in the job.")],
    as_json: AsJson = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw the run into this file (png, svg, pdf).")] = None,
) -> None:
    """Sum up a run: step time, exposed communication, the slowest rank, and what to try."""
    try:
        run = load_run(directory)
        result = analyse(run)
        if picture is not None:
            draw(run, result, picture)
    except (ValueError, ImportError) as error:
        raise _refusal(error) from error
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(result)


@timeline_app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="One file a rank, for example run.rank*.json.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The joined file.")],
) -> None:
    """Join the timelines of all ranks, also of a killed run, into one file for https://ui.perfetto.dev."""
    try:
        merged = timelines.merge(files, out)
    except ValueError as error:
        raise _refusal(error) from error
    print(f"{out}: {merged.events} events of {merged.files} file(s)")
    if merged.damaged:
        print(f"note: {merged.damaged} line(s) cut short: left out", file=sys.stderr)
    for name in merged.not_aligned:
        print(f"note: {name} is not on rank 0's clock; on another host its place in time is wrong", file=sys.stderr)


@app.command()
def top(
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who computes on which device of this machine, who waits for it, and what sharing gains."""
    try:
        sharing_table.run(places.directory(os.environ), every, once, as_json)
    except ValueError as error:
        raise _refusal(error) from error


@app.command()
def arbiter(
    device: Annotated[str, typer.Argument(help="A GPU's UUID, or the name of a CPU slot, such as cpu0.")],
    idle: Annotated[float, typer.Option(help="End after this many seconds without jobs; 0: never.", min=0.0)] = 0.0,
    lease: Annotated[float, typer.Option(help="Least seconds that a holder may keep others waiting.", min=0.0)] = 5.0,
) -> None:
    """Hand out turns on one device, as a service. Jobs start an arbiter by themselves where there is none."""
    try:
        place = places.Place(places.directory(os.environ), host_name(), device)
        _ = place.socket
    except ValueError as error:
        raise _refusal(error) from error
    line = arbiter_command(place, "--idle", str(idle), "--lease", str(lease))
    os.execv(line[0], line)  # without torch, which this process has in memory for nothing


@app.command()
def simulate(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(model_names())}.")] = "vgg19",
    profile: Annotated[Path | None, typer.Option(help="A profile that DeFT measured, in place of a model.")] = None,
    cluster: Annotated[str, typer.Option(help=f"One of {', '.join(cluster_names())}.")] = "16-10g",
    ranks: Annotated[int | None, typer.Option(help="In place of the cluster's.")] = None,
    rate: Annotated[str | None, typer.Option(help="Of each node's link, like 25gbit.")] = None,
    device: Annotated[str | None, typer.Option(help=f"One of {', '.join(processor_names())}.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples a rank and step.")] = None,
    systems: Annotated[str, typer.Option(help="With commas.")] = Request().systems,
    jobs: Annotated[int, typer.Option(help="Equal jobs that take turns on the same devices.")] = 1,
    lssr: Annotated[float, typer.Option(help="Share of local steps, for SelSync.")] = 0.8,
    steps: Annotated[int, typer.Option(help="Steps of each.")] = 60,
    as_json: AsJson = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the timelines into this file (png, svg, pdf).")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a Chrome trace.")] = None,
) -> None:
    """Predict a step of each system on a cluster, from a published model or a profile."""
    request = Request(model, profile, cluster, ranks, rate, device, batch, systems, jobs, lssr, steps)
    try:
        said = simulate_command(request, as_json, picture, timeline)
    except (ValueError, ImportError) as error:
        raise _refusal(error) from error
    print(json.dumps(said, indent=2) if as_json else said)


@app.command()
def advise(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="What crossover profile wrote.")],
    ranks: Annotated[int | None, typer.Option(help="Of the job to come; default: the profile's.")] = None,
    rate: Annotated[str | None, typer.Option(help="Of the links to come, like 25gbit.")] = None,
    lssr: Annotated[float, typer.Option(help="Share of local steps to assume for SelSync.", min=0.0, max=1.0)] = 0.8,
    second: Annotated[Path | None, typer.Option(help="Profile of a job to share with; default: its like.")] = None,
    noise_scale: Annotated[float | None, typer.Option(help="In batches of one rank; default: the profile's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what each way to train would bring for a measured job, and say what to write in its script."""
    try:
        bit_s = None if rate is None else parse_rate(rate)
        other = None if second is None else read_profile(second)
        job = read_profile(profile)
        advice = advice_for(job, ranks=ranks, bit_s=bit_s, lssr=lssr, second=other, noise_scale=noise_scale)
    except ValueError as error:
        raise _refusal(error) from error
    said = advise_command(advice, as_json)
    print(json.dumps(said, indent=2) if as_json else said)


@app.command(context_settings={"ignore_unknown_options": True})
def profile(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Starts the training.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile.")] = Path("profile.json"),
    steps: Annotated[int, typer.Option(help="Training steps to time.", min=1)] = DEFAULT_STEPS,
    keep: Annotated[bool, typer.Option("--keep", help="Let the training go on when the profile is there.")] = False,
) -> None:
    """Run a training command, such as `-- torchrun ... train.py`, unchanged until it has measured itself."""
    try:
        print(described(take_profile(command, output, steps, keep), output))
    except ValueError as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> typer.Exit:
    print(f"crossover: {error}", file=sys.stderr)
    return typer.Exit(2)


def _show_diagnosis(diagnosis: examination.Diagnosis) -> None:
    if sys.stdout.isatty():
        table = Table.grid(padding=(0, 2))
        for finding in diagnosis.findings:
            mark = "[green]ok[/]" if finding.ok else "[red]broken[/]"
            table.add_row(mark, f"[bold]{finding.name}[/]", _plain(finding.value))
        Console().print(table)
    else:
        width = max(len(finding.name) for finding in diagnosis.findings)
        for finding in diagnosis.findings:
            print(f"{'ok' if finding.ok else 'BROKEN':6}  {finding.name:{width}}  {finding.value}")
    for finding in diagnosis.findings:
        if not finding.ok:
            print(f"to do, {finding.name}: {finding.remedy}")


def _plain(text: str) -> str:
    """``text`` with nothing in it that rich would take for markup."""
    from rich.markup import escape

    return escape(text)


def main() -> None:
    """Entry point of the command and of ``python -m crossover``."""
    app(prog_name="crossover")


if __name__ == "__main__":
    main()
