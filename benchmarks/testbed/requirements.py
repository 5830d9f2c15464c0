"""What the testbed needs of this machine, and what to do where it is not there."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from .namespace import UNSHARE
from .rates import format_rate, shaper

_PACKAGES = {"iproute2": ("ip", "tc"), "util-linux": ("unshare", "nsenter", "taskset")}
PROBE_SECONDS = 20.0

# Makes a bridge, a veth pair and a shaped link in namespaces of their own, which end with the command.
_PROBE = f"""
set -e
mount -t tmpfs tmpfs /mnt
ip link add bridge0 type bridge
ip link add link0 type veth peer name link1
tc qdisc add dev link0 root {shaper(10**8)}
"""


def missing() -> list[str]:
    """Everything that keeps the testbed from being built here, one sentence each; empty if nothing does.

    Example:
        >>> isinstance(missing(), list)
        True
    """
    lacking = []
    if os.geteuid() != 0:
        lacking.append(f"root is needed to make network namespaces (this is user id {os.geteuid()}; try sudo)")
    for package, tool in ((package, tool) for package, tools in _PACKAGES.items() for tool in tools):
        if shutil.which(tool) is None:
            lacking.append(f"the command `{tool}` is not there (Debian and Ubuntu: apt install {package})")
    if not lacking:
        lacking.extend(_refused())
    return lacking


def _refused() -> list[str]:
    """What the kernel says to a trial of everything that the testbed does."""
    done = subprocess.run([*UNSHARE, "sh", "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS)
    if done.returncode == 0:
        return []
    return [
        "the kernel refuses namespaces, a bridge, veth pairs or `tc tbf` "
        f"(in a container: run it with --privileged): {done.stderr.strip()}"
    ]


def advice(lacking: Sequence[str], hosts: int, rate: int, command: Sequence[str] = ()) -> str:
    """The message for a machine without a testbed: what is missing, and the emulated link as the way out."""
    script = shlex.join(command) if command else "SCRIPT ARGS"
    lines = ["No testbed can be built here:", *(f"  - {reason}" for reason in lacking)]
    lines += [
        "An emulated link needs none of this; label figures from it as emulated:",
        f'  CROSSOVER_EMULATED_LINK="{format_rate(rate)},0.1ms" torchrun --nproc-per-node {hosts} {script}',
    ]
    return "\n".join(lines)
