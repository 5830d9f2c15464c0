"""The command ``crossover``. Needs the extra ``cli``."""

from __future__ import annotations

import json
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
