"""Several jobs at once on the same hosts: begun together, taking turns."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import crossover as xo

from . import peers
from .sites import Site

MEETING_SECONDS = 180.0


def run(
    place: Site, module: str, system: str, task: Mapping[str, Any], seeds: Sequence[int], timeout: float
) -> list[list[Any]]:
    """Train with a system once a seed, several seeds at the same time and with turns; for each seed the ranks' answers.

    The worker has to call :func:`meet` before it trains.

    Raises:
        JobError: a rank of one of the jobs failed.
    """
    with tempfile.TemporaryDirectory(prefix="xo-") as folder:
        meeting = Path(folder, "meeting")
        meeting.mkdir()
        shared = {**task, "systems": [system], "meeting": str(meeting), "jobs": len(seeds)}

        def job(seed: int) -> list[Any]:
            words = ["--worker", json.dumps({**shared, "seed": seed})]
            variables = {"CROSSOVER_RUN_DIR": folder}
            if len(seeds) > 1:
                variables["CROSSOVER_SHARING"] = f"timeshare:job=job{seed}"
            ranks = place.run(module, words, peers.get(system).launcher, timeout, variables)
            return [rank[system] for rank in ranks]

        with ThreadPoolExecutor(len(seeds)) as jobs:
            return list(jobs.map(job, seeds))


def meet(task: Mapping[str, Any], at: str) -> None:
    """On a rank: return when all ranks of all jobs are ``at`` this point. At once for a job on its own. Collective.

    Raises:
        TimeoutError: another job did not come.
    """
    if not task.get("meeting"):
        return
    place = Path(task["meeting"], at)
    place.mkdir(exist_ok=True)
    (place / f"{task['seed']}.{xo.rank()}").touch()
    deadline = time.monotonic() + MEETING_SECONDS
    while len(list(place.iterdir())) < task["jobs"] * xo.size():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other jobs did not come to the {at} within {MEETING_SECONDS:g} s")
        time.sleep(0.005)
