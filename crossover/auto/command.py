"""``crossover profile``: runs a training command until the library in it has written a profile."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from crossover.auto.recorder import PROFILE_VARIABLE, STEPS_VARIABLE, steps_needed
from crossover.deft.profile import Profile

LOOK_S = 0.2
GRACE_S = 40.0
"""Seconds between asking the command to end and killing it; torchrun itself gives its workers 30."""


def take_profile(command: Sequence[str], output: Path, steps: int, keep: bool = False) -> Profile:
    """Run ``command`` with ``CROSSOVER_PROFILE`` set, and end it once the profile is there.

    Args:
        command: what starts the training, on this machine at least rank 0.
        output: where the profile goes; a file that is there is replaced.
        steps: to be timed.
        keep: let the training go on to its own end.

    Raises:
        ValueError: the command cannot be run, or ended without a profile.
    """
    output = output.absolute()
    if output.is_dir():
        raise ValueError(f"output: {str(output)!r} is a directory; give the name of a file")
    output.unlink(missing_ok=True)
    variables = {**os.environ, PROFILE_VARIABLE: str(output), STEPS_VARIABLE: str(steps)}
    try:
        # a session of its own, so that ending it ends the launcher's ranks too
        process = subprocess.Popen(list(command), env=variables, start_new_session=True)
    except OSError as error:
        raise ValueError(f"command: cannot run {command[0]!r} ({error}); give it as in a shell, after --") from error
    try:
        while process.poll() is None and not output.exists():
            time.sleep(LOOK_S)
        if keep:
            process.wait()
    finally:
        if process.poll() is None:
            print("crossover: ending the command; what its launcher says of that is no fault", file=sys.stderr)
        _end(process)
    if not output.exists():
        raise ValueError(
            f"command: ended with exit code {process.returncode} and wrote no profile; it has to train for "
            f"{steps_needed(steps)} steps or more ({steps_needed(0)} and twice --steps), on 2 ranks or more, with "
            "crossover.DistributedOptimizer"
        )
    return Profile.load(output)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def described(profile: Profile, output: Path) -> str:
    """What the command prints of a profile, and what to do next."""
    times = profile.times()
    noise = "not known" if profile.noise_scale is None else f"{profile.noise_scale:.3g} batches of one rank"
    watched = sum(any(value is not None for value in step) for step in zip(*profile.significance, strict=True))
    return "\n".join(
        [
            f"{output}: {profile.steps} steps on {profile.size} ranks, {sum(profile.nbytes) / 1e6:.1f} MB a step "
            f"in {len(profile.nbytes)} buckets over {profile.links[0]}",
            f"computing   {1e-3 * times.compute:.1f} ms a step",
            f"all-reduce  {1e-3 * sum(times.reduce[0]):.1f} ms a step, {profile.coverage_rate:.2f} times computing",
            f"noise scale {noise}",
            f"significance of {watched} steps",
            f"next: crossover advise {output}",
        ]
    )
