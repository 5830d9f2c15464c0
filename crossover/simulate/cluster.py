"""Clusters: ranks, nodes, processors and what makes ranks uneven. Presets say where their numbers come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from crossover.simulate.assumptions import Assumption
from crossover.simulate.network import Network
from crossover.simulate.processors import Processor, processor

Floats = npt.NDArray[np.float64]
NVLINK_BYTES_S = 230e9
"""All-reduce bandwidth of eight A100 over NVSwitch: what nccl-tests reports as bus bandwidth, rounded."""


@dataclass(frozen=True)
class Cluster:
    """Where a job runs.

    Attributes:
        name: of the preset, for tables.
        ranks: processes, one a device.
        network: between its nodes.
        device: of each rank; ``None`` where computing times were measured.
        jitter: standard deviation of a step's computing on one rank, as a share of it; all wait for the slowest.
        slow: factors on the computing of the first ranks, for stragglers that stay.
        contention: share of computing lost while a transfer is under way: communication takes processors too.
        second: a further link that may carry gradients, ``None`` for none.
        source: of the preset.
        seed: of the jitter.

    Raises:
        ValueError: a number is out of range.
    """

    name: str
    ranks: int
    network: Network
    device: Processor | None = None
    jitter: float = 0.0
    slow: tuple[float, ...] = ()
    contention: float = 0.0
    second: Network | None = None
    source: str = "asked for"
    seed: int = 0
    notes: tuple[Assumption, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"ranks: is {self.ranks}; give 1 or more")
        if self.jitter < 0 or not 0 <= self.contention < 1:
            raise ValueError(f"jitter, contention: are {self.jitter}, {self.contention}; give 0 or more, 0 to below 1")
        if len(self.slow) > self.ranks or any(factor <= 0 for factor in self.slow):
            raise ValueError(f"slow: is {self.slow}; give factors above 0 for at most {self.ranks} ranks")

    @property
    def links(self) -> tuple[Network, ...]:
        """The fast one first."""
        return (self.network,) if self.second is None else (self.network, self.second)

    def pace(self, step: int) -> Floats:
        """How many times longer each rank computes in this step; the same for the same seed."""
        factors = np.ones(self.ranks)
        factors[: len(self.slow)] = self.slow
        if self.jitter:
            noise = np.random.default_rng([self.seed, step]).standard_normal(self.ranks)
            factors *= np.maximum(1.0 + self.jitter * noise, 0.5)
        return factors

    def assumptions(self, kind: str | None = None) -> list[Assumption]:
        """All that a prediction on it rests on."""
        uneven = f"computing varies by {self.jitter:.1%} from rank to rank and step to step"
        if self.slow:
            uneven += f"; the first ranks are {', '.join(f'{factor:g}' for factor in self.slow)} times as slow"
        made = [Assumption("cluster", f"{self.name}: {self.ranks} ranks", self.source), *self.network.assumptions()]
        made.append(Assumption("stragglers", uneven, "our choice"))
        made.append(Assumption("contention", f"{self.contention:.1%} of computing lost under transfers", "our choice"))
        if self.device is not None and kind is not None:
            made += self.device.assumptions(kind)
        return [*made, *self.notes]


def gpus(
    ranks: int,
    bit_s: float,
    device: str = "a100",
    ranks_per_node: int = 8,
    name: str = "gpus",
    source: str = "asked for",
) -> Cluster:
    """Nodes of GPUs joined by NVLink, with one network link a node.

    Example:
        >>> gpus(16, 10e9).network.nodes
        2
    """
    if ranks_per_node < 1 or ranks < 1:
        raise ValueError(f"ranks, ranks_per_node: are {ranks}, {ranks_per_node}; give 1 or more")
    nodes = math.ceil(ranks / ranks_per_node)
    local = NVLINK_BYTES_S / 2 if ranks_per_node > 1 and ranks > 1 else math.inf
    network = Network(nodes, bit_s, 15e-6, 0.9, "best", local, launch_s=20e-6, source="NCCL over Ethernet; our choice")
    return Cluster(name, ranks, network, processor(device), jitter=0.01, contention=0.05, source=source)


_DEFT = "DeFT's abstract: 16 A100; nodes and network are not known, these are our choice"
_SELSYNC = "SelSync, section IV: 16 workers behind 5 Gbit/s; A100 rates instead of V100's"
_REGULAR = "8 A100 a node; our choice"
_PRESETS = {
    "deft-16-10g": gpus(16, 10e9, name="deft-16-10g", source=_DEFT),
    "deft-16-25g": gpus(16, 25e9, name="deft-16-25g", source=_DEFT),
    "deft-16-40g": gpus(16, 40e9, name="deft-16-40g", source=_DEFT),
    "selsync-16-5g": gpus(16, 5e9, ranks_per_node=4, name="selsync-16-5g", source=_SELSYNC),
    **{
        f"{ranks}-{gigabits}g": gpus(ranks, gigabits * 1e9, name=f"{ranks}-{gigabits}g", source=_REGULAR)
        for ranks in (16, 64, 256, 1024)
        for gigabits in (10, 25, 100, 400)
    },
}


def cluster_names() -> tuple[str, ...]:
    """What :func:`cluster` knows."""
    return tuple(_PRESETS)


def cluster(name: str) -> Cluster:
    """A preset.

    Raises:
        ValueError: none of that name.

    Example:
        >>> cluster("1024-100g").network.nodes
        128
    """
    if name not in _PRESETS:
        raise ValueError(f"cluster: is {name!r}; give one of {', '.join(_PRESETS)}")
    return _PRESETS[name]


def resized(base: Cluster, ranks: int) -> Cluster:
    """The same with another number of ranks, as many on a node as before."""
    per_node = max(round(base.ranks / base.network.nodes), 1)
    nodes = math.ceil(ranks / per_node)
    return replace(base, ranks=ranks, network=replace(base.network, nodes=nodes), slow=base.slow[:ranks])
