"""Memory of freed gradients stays with the process, unless the user says otherwise."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys

import pytest

CHURN = """
import os, resource, torch
from crossover.memory import keep_freed_memory
kept = keep_freed_memory([torch.empty(8, 1024, 1024)])
def churn():
    for _ in range(8):
        torch.ones(1024, 1024).add_(1.0)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    churn()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def churn(**variables: str) -> tuple[int, int]:
    """Bytes that may be kept, and page faults of 80 gradients of 4 MiB that come and go."""
    command = [sys.executable, "-c", CHURN]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return int(kept), int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")
def test_freed_gradients_are_not_given_back_to_the_kernel() -> None:
    kept, faults = churn()
    assert kept == 64 * 2**20
    assert faults < 80 * 2**22 / resource.getpagesize() / 10


@pytest.mark.parametrize("variable", ["CROSSOVER_KEEP_MEMORY", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_set_stays(variable: str) -> None:
    value = {"CROSSOVER_KEEP_MEMORY": "0", "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}
    assert churn(**{variable: value.get(variable, "131072")})[0] == 0
