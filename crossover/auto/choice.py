"""What to do about the network, decided from what was seen: pure functions of numbers that all ranks share.

The times are predicted by the simulator that ``crossover advise`` uses, on the links as they were measured; what
merging steps costs, by the Preserver. How the share of local steps is chosen is ours: as many as make what is waited
for a small part of computing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from crossover.deft.cost import LinkCost
from crossover.deft.pilot import Preserver
from crossover.deft.preserver import efficiency
from crossover.deft.profile import Profile
from crossover.selsync.calibrate import suggest_delta
from crossover.simulate.cluster import Cluster
from crossover.simulate.gated import Local
from crossover.simulate.job import Job, from_profile
from crossover.simulate.network import ring
from crossover.simulate.run import Result, simulate
from crossover.simulate.systems import DeFT, Plain

EXPOSED_SHARE = 0.2
"""What may be waited for, as a part of computing, before local steps are worth it; and what they are to leave."""
MOST_LOCAL = 0.9
"""Share of local steps at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        action: in a few words.
        changes: whether anything but plain synchronous training was chosen.
        numbers: from which; by name.
        delta: threshold of the gate, if there is to be one.
    """

    action: str
    changes: bool = False
    numbers: dict[str, Any] = field(default_factory=dict)
    delta: float | None = None

    def __str__(self) -> str:
        numbers = ", ".join(f"{key} {_text(value)}" for key, value in self.numbers.items())
        return f"{self.action} ({numbers})" if numbers else self.action


def _text(value: Any) -> str:
    if value is None:
        return "not known"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def milliseconds(seconds: float) -> str:
    """For the log.

    Example:
        >>> milliseconds(0.01234)
        '12.3 ms'
    """
    return f"{1e3 * seconds:.1f} ms"


def measured_cluster(profile: Profile, link: LinkCost) -> Cluster:
    """The cluster of a job: latency as on the idle link, and all that was sent takes as long as it took in training.

    Example:
        >>> profile = Profile((9,), (9,), 0, ((2100,),), (1_000_000,), ("gloo",), size=2)
        >>> cluster = measured_cluster(profile, LinkCost(latency_us=100.0, us_per_byte=0.001))
        >>> round(1e6 * cluster.network.all_reduce_s(1_000_000)), round(1e6 * cluster.network.all_reduce_s(0))
        (2100, 100)
    """
    total, nbytes, count = sum(profile.reduce_us[0]), sum(profile.nbytes), len(profile.nbytes)
    latency_us = min(link.latency_us, 0.5 * total / count)
    cost = LinkCost(latency_us, max(total - count * latency_us, 0.0) / max(nbytes, 1))
    source = f"all-reduces of {count} buckets in training, latency on the idle link"
    return Cluster("this job's", profile.size, ring(cost, profile.size, source), source=source)


def _plain(job: Job, cluster: Cluster) -> Result:
    return simulate(job, Plain(1, 1), cluster)  # the buckets as they are


def _numbers(profile: Profile, plain: Result) -> dict[str, Any]:
    return {
        "coverage rate": profile.coverage_rate,
        "plain": milliseconds(plain.step_s) + " a step",
        "computing": milliseconds(plain.compute_s),
    }


def choose_schedule(profile: Profile, link: LinkCost, preserver: Preserver | None = None) -> Choice:
    """Whether delayed updates are worth a try: the fastest schedule whose efficiency the Preserver lets pass.

    Args:
        profile: measured with the plain schedule on 2 ranks or more, and equal on all of them.
        link: cost of an all-reduce on the idle link.
        preserver: what may be lost in convergence.

    Example:
        >>> slow = Profile((9000,) * 4, (18000,) * 4, 2000, ((20000,) * 4,), (10**6,) * 4, ("gloo",), size=2)
        >>> choose_schedule(slow, LinkCost(100.0, 0.02)).changes
        True
        >>> fast = Profile((9000,) * 4, (18000,) * 4, 2000, ((2000,) * 4,), (10**6,) * 4, ("gloo",), size=2)
        >>> choose_schedule(fast, LinkCost(100.0, 0.002)).action
        'plain: nothing to gain, communication hides under computing'
    """
    allowed = preserver or Preserver()
    job, cluster = from_profile(profile, "this job"), measured_cluster(profile, link)
    plain = _plain(job, cluster)
    numbers = _numbers(profile, plain)
    if plain.compute_s > 0 and plain.exposed_s <= allowed.least_gain * plain.step_s:
        return Choice("plain: nothing to gain, communication hides under computing", numbers=numbers)
    system = DeFT(capacity=None, noise_scale=profile.noise_scale, preserver=allowed)
    if system.stays_synchronous(job, cluster):
        numbers["noise scale"] = profile.noise_scale
        return Choice("plain: no delay gains enough within what the preserver allows", numbers=numbers)
    delayed, merged = simulate(job, system, cluster), system.merged(job, cluster)
    kept = 1.0 if max(merged) == 1 else None
    if kept is None and profile.noise_scale is not None:
        kept = efficiency(merged, profile.size, profile.noise_scale)
    gain = plain.step_s / delayed.step_s * (1.0 if kept is None else kept)
    numbers |= {
        "deft": milliseconds(delayed.step_s) + " a step",
        "updates a step": delayed.updates_per_step,
        "efficiency": kept,
        "noise scale": profile.noise_scale,
    }
    if gain < 1.0 + allowed.least_gain:
        return Choice(f"plain: deft would gain {gain - 1:.0%} only", numbers=numbers)
    return Choice(f"deft: gains {gain - 1:.0%}", changes=True, numbers=numbers)


def wanted_local_share(compute_s: float, all_reduce_s: float, exposed_share: float = EXPOSED_SHARE) -> float:
    """Share of local steps with which what is waited for is that part of computing; every share is waited for.

    Example:
        >>> [round(wanted_local_share(1.0, rate), 2) for rate in (0.1, 0.5, 1.0, 4.0)]
        [0.0, 0.6, 0.8, 0.9]
    """
    if all_reduce_s <= 0:
        return 0.0
    return min(max(1.0 - exposed_share * compute_s / all_reduce_s, 0.0), MOST_LOCAL)


def choose_gate(profile: Profile, link: LinkCost, quorum: float | None = None) -> Choice:
    """Whether steps are to be local, and with which ``delta``.

    Args:
        profile: measured with the plain schedule, with significance; equal on all ranks.
        link: cost of an all-reduce on the idle link.
        quorum: of the gate.

    Example:
        >>> times = (9000,) * 4, (18000,) * 4, 2000
        >>> noise = ((0.1, 0.3, 0.2, 0.4, 0.2),) * 2
        >>> slow = Profile(*times, ((20000,) * 4,), (10**6,) * 4, ("gloo",), size=2, significance=noise)
        >>> choice = choose_gate(slow, LinkCost(100.0, 0.02))
        >>> choice.changes, choice.delta
        (True, 0.35)
    """
    job, cluster = from_profile(profile, "this job"), measured_cluster(profile, link)
    plain = _plain(job, cluster)
    numbers = {**_numbers(profile, plain), "waited for": milliseconds(plain.exposed_s)}
    if plain.exposed_s <= EXPOSED_SHARE * plain.compute_s:
        return Choice("shared: communication is hidden already", numbers=numbers)
    wanted = wanted_local_share(plain.compute_s, cluster.network.all_reduce_s(job.nbytes))
    if not any(value is not None for values in profile.significance for value in values):
        return Choice("shared: no gradient's norm was finite for long enough", numbers=numbers)
    found = suggest_delta(profile.significance, wanted, quorum)
    local = simulate(job, Local(found.local_share), cluster)
    gain = plain.step_s / local.step_s
    numbers |= {
        "delta": found.delta,
        "watched": f"{found.steps} steps",
        "local": f"{found.local_share:.0%} of them, wanted {wanted:.0%}",
        "with the gate": milliseconds(local.step_s) + " a step",
    }
    if found.delta == 0.0 or gain < 1.0 + Preserver().least_gain:
        return Choice(f"shared: local steps would gain {gain - 1:.0%} only", numbers=numbers)
    return Choice(f"local steps: gains {gain - 1:.0%}", changes=True, numbers=numbers, delta=found.delta)
