"""One host, or the switch between the hosts: a nameless set of Linux namespaces that lives as long as its holder.

The holder is a shell that is process 1 of a process namespace and waits on a pipe from the driver. When the driver
closes the pipe, or dies in whatever way, the shell ends, the kernel kills every process in there, and with the last of
them go the network namespace, its interfaces, queues and the private ``/etc/hosts``. Nothing has a name outside, so
nothing can be left behind: ``ip netns list``, ``ip link`` and ``tc qdisc`` show the same before, during and after.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
from collections.abc import Sequence

from .errors import TestbedError

START_SECONDS = 20.0
STOP_SECONDS = 10.0
COMMAND_SECONDS = 20.0

UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

# The tmpfs only carries the hosts file to its place: mounted and gone again within this mount namespace.
# Reno is the one congestion control that every kernel lets a new network namespace choose. BBR, some kernels' default,
# stops a flow for 0.2 s every 10 s to probe the path, which would show up in step times.
# A receive buffer that starts large: one that has to grow drops segments when its reader waits for a core.
_HOLDER = """
set -e
hostname "$1"
mount -t tmpfs tmpfs /mnt
printf '%s' "$2" > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
umount -l /mnt
ip link set lo up
echo reno > /proc/sys/net/ipv4/tcp_congestion_control
echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle
echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save
echo "4096 4194304 33554432" > /proc/sys/net/ipv4/tcp_rmem
echo ready
read -r _ || exit 0
"""

# $1: working directory, $2: cgroup.procs to join or empty, $3: cores, rest: the command.
_ENTER = 'cd "$1" && { [ -z "$2" ] || echo 0 > "$2"; } && shift 2 && exec taskset -c "$@"'


class Namespace:
    """A host's own network, mount, process and host-name namespaces.

    Args:
        hostname: what ``gethostname()`` says inside.
        hosts_file: the text of ``/etc/hosts`` inside, by which all hosts of the bed find each other.

    Raises:
        TestbedError: the kernel refused; the message carries what was said.
    """

    def __init__(self, hostname: str, hosts_file: str) -> None:
        self.hostname = hostname
        self._holder = subprocess.Popen(
            [*UNSHARE, "sh", "-c", _HOLDER, "holder", hostname, hosts_file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at the terminal goes to the driver, which ends the jobs before the hosts
        )

    @property
    def pid(self) -> int:
        """The holder's process id, as the driver sees it."""
        return self._holder.pid

    def wait_ready(self) -> None:
        """Return when the namespaces are set up, so that they can be entered."""
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._holder.stdout, selectors.EVENT_READ)
            answered = bool(selector.select(START_SECONDS))
        if answered and self._holder.stdout.readline() == b"ready\n":
            return
        self._holder.kill()
        said = self._holder.stderr.read().decode(errors="replace").strip()
        raise TestbedError(f"host {self.hostname} did not come up within {START_SECONDS:g} s: {said or 'no message'}")

    def enter(
        self, command: Sequence[str], *, cores: Sequence[int], cwd: str | None = None, cgroup_procs: str = ""
    ) -> list[str]:
        """The command line that runs ``command`` inside, pinned to ``cores`` and in the cgroup, from ``cwd``."""
        inside = [f"--target={self.pid}", "--net", "--uts", "--mount", f"--pid=/proc/{self.pid}/ns/pid_for_children"]
        pinned = [cwd or os.getcwd(), cgroup_procs, ",".join(map(str, cores)), *command]
        return ["nsenter", *inside, "--", "sh", "-c", _ENTER, "enter", *pinned]

    def configure(self, tool: str, lines: Sequence[str]) -> None:
        """Feed ``lines`` to ``ip -batch`` or ``tc -batch`` inside the network namespace.

        Process ids in the lines are those the driver sees.
        """
        done = subprocess.run(
            ["nsenter", f"--target={self.pid}", "--net", "--", tool, "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        if done.returncode != 0:
            raise TestbedError(f"{tool} failed on {self.hostname}: {done.stderr.strip()} (of: {'; '.join(lines)})")

    def close(self) -> None:
        """End everything inside and wait until it is gone."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            self._holder.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.kill(self._holder.pid, signal.SIGKILL)
            self._holder.wait(STOP_SECONDS)
