"""``python -m benchmarks.testbed run|check``: run a job between slow links, or measure the links themselves."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import bandwidth
from .bed import Testbed
from .errors import BandwidthError, TestbedError
from .launchers import LAUNCHERS
from .rates import format_rate, parse_rate
from .requirements import advice, missing

UNAVAILABLE = 69
"""Exit code where no testbed can be built (``EX_UNAVAILABLE``)."""
OFF = 3
"""Exit code when a link is more than 5 % off."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run a script on every host: run [options] -- SCRIPT ARGS")
    run.add_argument("--rate", default="500mbit", help="each host's link in both directions, as TCP goodput (500mbit)")
    run.add_argument("--second-rate", help="give each host a second link, of this rate")
    run.add_argument("--launcher", choices=LAUNCHERS, default="torchrun", help="whose variables the ranks find")
    run.add_argument("--timeout", type=float, default=3600.0, help="seconds for the whole job (3600)")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- SCRIPT ARGS")
    check = actions.add_parser("check", help="measure achieved bandwidth; exit code 3 when more than 5 %% off")
    check.add_argument("--rate", action="append", help="rate to check; may be repeated (100mbit to 1.5gbit)")
    check.add_argument("--seconds", type=float, default=1.0, help="seconds of traffic at each rate (1)")
    for action in (run, check):
        action.add_argument("--hosts", type=int, default=2, help="2, 3, 4, ... (2)")
        action.add_argument("--json", type=Path, metavar="FILE", help="write measurements and core shares")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    with Testbed(arguments.hosts, arguments.rate, arguments.second_rate) as bed:
        measured = bed.verify()
        print(f"testbed: {bed}", file=sys.stderr)
        for entry in measured:
            print(f"testbed: link {entry['link']} measured, {entry['worst']:+.1%} off at worst", file=sys.stderr)
        result = bed.run(command, timeout=arguments.timeout, launcher=arguments.launcher, echo=True, check=False)
        _write(arguments.json, {**bed.describe(), "exit_codes": result.exit_codes, "seconds": result.seconds})
    if result.timed_out:
        print(f"testbed: ranks {list(result.timed_out)} still ran after {arguments.timeout:g} s", file=sys.stderr)
    elif result.first_failed is not None:
        codes = list(result.exit_codes)
        print(f"testbed: rank {result.first_failed} failed first, exit codes {codes}", file=sys.stderr)
    return result.exit_code


def _check(arguments: argparse.Namespace) -> int:
    rates = arguments.rate or list(bandwidth.CHECK_RATES)
    with Testbed(arguments.hosts, rates[0], check_bandwidth=False) as bed:
        print(f"testbed: {bed}", file=sys.stderr)
        rows = bandwidth.check_rates(bed, rates, arguments.seconds)
        print(bandwidth.table(rows))
        _write(arguments.json, {**bed.describe(), "rows": rows})
    off = [format_rate(row["asked"]) for row in rows if abs(row["worst"]) > bandwidth.TOLERANCE]
    if off:
        print(f"testbed: more than {bandwidth.TOLERANCE:.0%} off at {', '.join(off)}", file=sys.stderr)
    return OFF if off else 0


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


def _terminated(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main(words: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.action == "run" and not [word for word in arguments.command if word != "--"]:
        parser.error("run: no script given; put it after --, for example: run --rate 500mbit -- train.py --steps 20")
    # So that SIGTERM leaves through the with block too: the ranks are ended before the hosts.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        lacking = missing()
        if lacking:
            rates = arguments.rate if arguments.action == "check" else [arguments.rate]
            rate = parse_rate((rates or bandwidth.CHECK_RATES)[0])
            print(advice(lacking, arguments.hosts, rate, _script(arguments)), file=sys.stderr)
            return UNAVAILABLE
        return _run(arguments) if arguments.action == "run" else _check(arguments)
    except ValueError as error:
        parser.error(str(error))
    except BandwidthError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return OFF
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _script(arguments: argparse.Namespace) -> list[str]:
    return [word for word in getattr(arguments, "command", []) if word != "--"]


if __name__ == "__main__":
    sys.exit(main())
