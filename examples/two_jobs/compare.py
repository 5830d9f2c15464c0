"""Two trainings one after the other, at once, and taking turns, on this machine: which is done first?

    python examples/two_jobs/compare.py [--launcher horovodrun] [--link 500mbit] [--epochs 5]

One machine has no network to wait for, so the link is Crossover's emulated one: the seconds show how the three ways
compare on such a link, and are no measurement of a network. benchmarks/two_jobs.py measures on real, shaped links.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRAIN = str(Path(__file__).with_name("train.py"))

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--launcher", choices=["torchrun", "horovodrun"], default="torchrun")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--link", default="500mbit")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

launch = {
    # --standalone: each job finds a free port of its own
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"],
    "horovodrun": ["horovodrun", "-np", str(args.ranks), "-H", f"localhost:{args.ranks}", sys.executable],
}[args.launcher]
environment = {**os.environ, "CROSSOVER_EMULATED_LINK": f"{args.link},0.1ms", "OMP_NUM_THREADS": "1"}


def start(seed: int, *more: str) -> subprocess.Popen[bytes]:
    """One job."""
    words = [*launch, TRAIN, "--seed", str(seed), "--epochs", str(args.epochs), *more]
    return subprocess.Popen(words, env=environment)


def finish(*jobs: subprocess.Popen[bytes]) -> None:
    """Wait for jobs; the first failure ends this script."""
    for job in jobs:
        if job.wait():
            sys.exit(job.returncode)


def timed(way: str, run: Callable[[], object]) -> None:
    """Print how long a way takes, the start of its processes included."""
    began = time.perf_counter()
    run()
    seconds[way] = time.perf_counter() - began


seconds: dict[str, float] = {}
timed("one after the other", lambda: [finish(start(seed)) for seed in range(2)])
timed("at once, uncoordinated", lambda: finish(start(0), start(1)))
timed("at once, with turns", lambda: finish(start(0, "--job", "a"), start(1, "--job", "b")))
for way, taken in seconds.items():
    print(f"{way:24} {taken:6.1f} s")
