"""Advice for a measured job: what each way of training would bring on its cluster, and what to write for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from crossover.deft.pilot import Preserver
from crossover.deft.preserver import efficiency
from crossover.deft.profile import Profile
from crossover.selsync.calibrate import suggest_delta
from crossover.simulate.assumptions import Assumption, listed
from crossover.simulate.cluster import Cluster
from crossover.simulate.gated import Local
from crossover.simulate.job import Job, from_profile
from crossover.simulate.layerwise import Priority
from crossover.simulate.network import calibrate
from crossover.simulate.run import Result, gain, share, simulate
from crossover.simulate.systems import DeFT, Plain, System

WANTED_SHARES = (0.5, 0.8, 0.9)
WORTHWHILE = 1.03
"""Speed-up below which nothing is advised: a prediction is not that exact."""

SHORT_STEP_S = 0.01
"""Steps shorter than this are ruled by what each bucket and hook costs the processor, which is in no model here."""

_CAUTION = {
    "Priority (ByteScheduler)": "equal to plain; refuses clipping by the global norm and GradScaler",
    "DeFT": "updates come one late, and merged where the network is slow: compare accuracy",
    "SelSync": "replicas differ between shares; the LSSR depends on delta and the data: calibrate it",
}
_IDLE = "stays synchronous here: the preserver finds nothing to gain, or that merging would lose too much"


@dataclass(frozen=True, slots=True)
class Option:
    """One way to train.

    Attributes:
        name: for tables.
        step_s: predicted seconds a step.
        updates_per_step: of the weights.
        busy: computing over the whole step.
        efficiency: progress a sample, 1 for an update a step; ``None`` where it is not known.
        speed_up: over the plain step, in steps; for sharing, in the work that both jobs get done.
        script: what to write.
        remark: what to know.
    """

    name: str
    step_s: float
    updates_per_step: float
    busy: float
    efficiency: float | None
    speed_up: float
    script: str
    remark: str = ""

    @property
    def gain(self) -> float:
        """Speed-up in progress: what is known to be lost a sample is taken off."""
        return self.speed_up * (1.0 if self.efficiency is None else self.efficiency)


@dataclass(frozen=True, slots=True)
class Advice:
    """All options for a job.

    Attributes:
        coverage_rate: all-reduce over computing.
        ranks: of the job.
        options: plain first.
        sentence: what is advised.
        assumptions: what it rests on.
        deltas: shares of local steps with SelSync's threshold for each; empty where the profile has no significance.
    """

    coverage_rate: float
    ranks: int
    options: tuple[Option, ...]
    sentence: str
    assumptions: tuple[str, ...]
    deltas: tuple[tuple[float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def cluster_of(profile: Profile, ranks: int | None = None, bit_s: float | None = None) -> Cluster:
    """The cluster that ``profile`` was measured on, or the same with other ranks or another rate.

    Raises:
        ValueError: the profile is of one rank, or fewer than 2 ranks are asked for.
    """
    size = profile.size if ranks is None else ranks
    if size < 2:
        raise ValueError(f"ranks: is {size}; give 2 or more, with one rank nothing travels")
    networks = [replace(calibrate(profile, link), nodes=size) for link in range(len(profile.links))]
    if bit_s is not None:
        factor = bit_s / networks[0].bit_s
        networks = [replace(network, bit_s=network.bit_s * factor) for network in networks]
    source = f"all-reduce times of {len(profile.nbytes)} buckets on {profile.size} ranks, fitted"
    return Cluster("profile", size, networks[0], second=networks[1] if len(networks) > 1 else None, source=source)


def advise(
    profile: Profile,
    *,
    ranks: int | None = None,
    bit_s: float | None = None,
    lssr: float = 0.8,
    second: Profile | None = None,
    noise_scale: float | None = None,
) -> Advice:
    """Predict each option for the job of ``profile``.

    Args:
        profile: measured on 2 ranks or more.
        ranks: of the job, if not those of the profile; one on each node.
        bit_s: rate of the links, if not what was measured.
        lssr: share of local steps to assume for SelSync.
        second: profile of a job to share devices with; another job like this one by default.
        noise_scale: gradient noise scale in batches of one rank, as DeFT's decisions give it; ``None``: the profile's,
            and where it has none, nothing is held against merging.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> profile = Profile((9000,) * 4, (18000,) * 4, 2000, ((20000,) * 4,), (10**6,) * 4, ("gloo",), size=4)
        >>> advice = advise(profile)
        >>> [option.name for option in advice.options][:3]
        ['plain (DDP-like)', 'Priority (ByteScheduler)', 'DeFT']
    """
    cluster, job = cluster_of(profile, ranks, bit_s), from_profile(profile, "this job")
    noise_scale = profile.noise_scale if noise_scale is None else noise_scale
    held = Preserver(prior=math.inf) if noise_scale is None else Preserver()
    delayed = DeFT(capacity=None, noise_scale=noise_scale, preserver=held)
    plain, *others = (Plain(), Priority(), delayed, Local(lssr))
    base = simulate(job, plain, cluster)
    options = [_option(base, plain, base, 1.0)]
    for system in others:
        known = _efficiency(system, job, cluster, noise_scale)
        idle = isinstance(system, DeFT) and system.stays_synchronous(job, cluster)
        options.append(_option(simulate(job, system, cluster), system, base, known, _IDLE if idle else ""))
    twin = from_profile(second, "second job") if second is not None else replace(job, name="second job")
    options.append(_shared(job, twin, cluster, base))
    made = [*base.assumptions, *(a for system in others for a in system.assumptions()), *_own(noise_scale)]
    rate = job.coverage_rate(cluster.network)
    return Advice(rate, cluster.ranks, tuple(options), _sentence(options), tuple(listed(made)), deltas_of(profile))


def deltas_of(profile: Profile) -> tuple[tuple[float, float], ...]:
    """For some shares of local steps the ``delta`` with which so many of the watched steps would have been local.

    Example:
        >>> seen = ((None, 0.1, 0.2, 0.3, 0.4),)
        >>> profile = Profile((9,), (9,), 0, ((9,),), (9,), ("gloo",), size=2, significance=seen * 2)
        >>> [(share, round(delta, 3)) for share, delta in deltas_of(profile)]
        [(0.5, 0.25), (0.8, 0.35), (0.9, 0.4)]
    """
    if not any(value is not None for values in profile.significance for value in values):
        return ()
    return tuple((share, suggest_delta(profile.significance, share).delta) for share in WANTED_SHARES)


def _option(result: Result, system: System, base: Result, known: float | None, remark: str = "") -> Option:
    updates, busy = result.updates_per_step, result.busy
    up, remark = base.step_s / result.step_s, remark or _CAUTION.get(system.label, "")
    return Option(system.label, result.step_s, updates, busy, known, up, system.script, remark)


def _efficiency(system: System, job: Job, cluster: Cluster, noise_scale: float | None) -> float | None:
    """Progress a sample: from the noise scale where steps are merged, not known for local steps."""
    if isinstance(system, Local):
        return None
    merged = system.merged(job, cluster)
    if max(merged) == 1:
        return 1.0
    return None if noise_scale is None else efficiency(merged, cluster.ranks, noise_scale)


def _shared(job: Job, twin: Job, cluster: Cluster, base: Result) -> Option:
    alone = [base, simulate(twin, Plain(), cluster)]
    together = share([(job, Plain()), (twin, Plain())], cluster)
    work = gain(alone, together)
    script = 'xo.DistributedOptimizer(optimizer, model.named_parameters(), sharing=xo.sync.TimeShare(job="..."))'
    remark = "in both jobs' scripts; each job by itself gets slower, together they get more done; both need memory"
    busy = sum(result.compute_s / shared.step_s for result, shared in zip(alone, together, strict=True))
    return Option("sharing with a second job", together[0].step_s, 1.0, min(busy, 1.0), 1.0, work, script, remark)


def _own(noise_scale: float | None) -> list[Assumption]:
    known = (
        "not known: nothing is taken off for merged steps" if noise_scale is None else f"{noise_scale:g} rank batches"
    )
    return [
        Assumption("noise scale", known, "asked for; DeFT measures it while it trains"),
        Assumption(
            "efficiency", "one late update costs nothing, merged ones by the noise scale", "McCandlish et al. 2018"
        ),
    ]


def _sentence(options: Sequence[Option]) -> str:
    plain, *others = options
    best = max(others, key=lambda option: option.gain)
    if best.gain < WORTHWHILE:
        return (
            f"stay with plain: nothing gains {WORTHWHILE - 1:.0%}, and {plain.busy:.0%} of a step is computing already"
        )
    exact = next((option for option in others if option.name.startswith("Priority")), None)
    said = f"{best.name} gains most: {best.gain - 1:.0%}"
    if best.remark:
        said += f" ({best.remark})"
    if exact is not None and exact is not best and exact.gain >= WORTHWHILE:
        said += f"; with updates exactly as in plain, {exact.name} gains {exact.gain - 1:.0%}"
    if plain.step_s < SHORT_STEP_S:
        said += (
            f"; but a step takes {1e3 * plain.step_s:.1f} ms, of which fixed costs that are not in this model are a "
            "large part: compare real runs before you believe it"
        )
    return said
