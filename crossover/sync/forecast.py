"""Whether it pays to let jobs share a device: a pure function of what each needs of it.

For job ``i``, ``C_i`` is the time a step needs the device, ``M_i`` the exposed communication: what a step waits for the
network beyond what hides under its own computing. One after the other, a step of each takes ``sum(C_i + M_i)``. With
turns it takes ``max(sum C_i, max(C_i + M_i))``, and no less than the network needs where all share one link. A job's
own step gets longer, never shorter: what grows is what the jobs get done together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HAND_OVER_S = 0.0001
"""One hand-over between two jobs, and some margin."""
WORTHWHILE_GAIN = 1.05


@dataclass(frozen=True, slots=True)
class JobProfile:
    """What a step of one job needs, with the device to itself.

    Attributes:
        name: of the job.
        compute_s: seconds of computing on the device.
        exposed_s: seconds that it waits for the network.
        network_s: seconds that its transfers occupy the link, hidden ones included; 0 if not known.
        peak_bytes: device memory that it needs; 0 if not known.
    """

    name: str
    compute_s: float
    exposed_s: float
    network_s: float = 0.0
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        values = (self.compute_s, self.exposed_s, self.network_s)
        if not self.compute_s > 0 or not all(0 <= value < float("inf") for value in values):
            raise ValueError(
                f"{self.name}: computes {self.compute_s} s, exposes {self.exposed_s} s, occupies the network for "
                f"{self.network_s} s; the first has to be above 0, the others not below"
            )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What sharing would bring.

    Attributes:
        serial_s: a step of each job, one job after the other.
        shared_s: the same with turns.
        gain: the first over the second: work done in the same time.
        slowdowns: by job, how many times longer its own step takes than with the device to itself.
        limit: what bounds ``shared_s``: ``"device"``, ``"network"``, or the name of the job with the longest step.
        pays: whether it is worth it.
        reason: why, or why not, in a sentence.
    """

    serial_s: float
    shared_s: float
    gain: float
    slowdowns: dict[str, float]
    limit: str
    pays: bool
    reason: str


def forecast(
    jobs: Sequence[JobProfile], *, capacity_bytes: int = 0, shared_link: bool = False, gpu_communication: bool = False
) -> Forecast:
    """What jobs gain by taking turns on one device in place of running one after the other.

    Args:
        jobs: two or more.
        capacity_bytes: the device's memory; 0 if not known.
        shared_link: whether their transfers go over one link, one at a time.
        gpu_communication: whether they communicate with kernels on the device itself without MPS (NCCL), in which case
            one job's communication holds up the other's computing.

    Raises:
        ValueError: fewer than two jobs, or two of one name.

    Example:
        >>> result = forecast([JobProfile("a", 0.2, 0.1), JobProfile("b", 0.2, 0.1)])
        >>> round(result.gain, 2), result.pays, result.limit
        (1.5, True, 'device')
        >>> forecast([JobProfile("a", 0.2, 0.002), JobProfile("b", 0.2, 0.0)]).pays
        False
    """
    if len(jobs) < 2 or len({job.name for job in jobs}) < len(jobs):
        raise ValueError(f"jobs: are {[job.name for job in jobs]}; give two or more, each with a name of its own")
    serial = sum(job.compute_s + job.exposed_s for job in jobs)
    longest = max(jobs, key=lambda job: job.compute_s + job.exposed_s)
    bounds = {
        "device": sum(job.compute_s + HAND_OVER_S for job in jobs),
        longest.name: longest.compute_s + longest.exposed_s,
        "network": sum(job.network_s for job in jobs) if shared_link else 0.0,
    }
    limit = max(bounds, key=lambda name: bounds[name])
    shared = serial if gpu_communication else bounds[limit]
    gain = serial / shared
    slowdowns = {job.name: max(shared / (job.compute_s + job.exposed_s), 1.0) for job in jobs}
    pays, reason = _judge(jobs, gain, limit, capacity_bytes, gpu_communication)
    return Forecast(serial, shared, gain, slowdowns, limit, pays, reason)


def _judge(
    jobs: Sequence[JobProfile], gain: float, limit: str, capacity_bytes: int, gpu_communication: bool
) -> tuple[bool, str]:
    needed = sum(job.peak_bytes for job in jobs)
    if capacity_bytes and needed > capacity_bytes:
        return False, (
            f"does not fit: the jobs need {needed / 2**30:.1f} GiB of device memory together, and there are "
            f"{capacity_bytes / 2**30:.1f} GiB"
        )
    if gpu_communication:
        return False, (
            "does not pay as things are: NCCL's kernels wait for the network on the GPU, and without MPS the other "
            "job's kernels wait with them; start MPS, or communicate over the CPU"
        )
    if gain < WORTHWHILE_GAIN:
        exposed = sum(job.exposed_s for job in jobs) / sum(job.compute_s for job in jobs)
        what = (
            "the link they share is what limits them"
            if limit == "network"
            else (f"they wait for the network for only {exposed:.1%} of their computing time")
        )
        return False, f"does not pay: {what}, so at most {gain - 1:.1%} more gets done; run them one after the other"
    limits = {
        "device": "the device is then busy all the time, and a further job adds nothing",
        "network": "the link limits",
    }
    return True, f"pays: {gain - 1:.0%} more gets done; {limits.get(limit, f'the step of {limit} limits')}"
