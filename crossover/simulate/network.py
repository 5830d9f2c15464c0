"""What an all-reduce costs: ring and tree, from latency, bandwidth and the number of nodes; fitted to a profile.

Sources: the ring's ``2 (N-1) a + 2 (N-1)/N n b`` is Thakur, Rabenseifner and Gropp, *Optimization of Collective
Communication Operations in MPICH* (2005), and Patarasuk and Yuan (2009); the pair of binary trees that keeps the full
bandwidth at logarithmic latency is Sanders, Speck and Traeff (2009), as in NCCL since 2.4.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from crossover.deft.cost import LinkCost, fit_link
from crossover.deft.profile import Profile
from crossover.simulate.assumptions import Assumption

ALGORITHMS = ("ring", "tree")


@dataclass(frozen=True, slots=True)
class Network:
    """The links between nodes, and what is lost on them.

    A node has one link, shared by its ranks; within a node transfers are much faster, so that each byte of a gradient
    crosses a node's link only once in and once out.

    Attributes:
        nodes: that a collective crosses; 1 where it stays within one.
        bit_s: rate of each node's link, in each direction.
        latency_s: of one message from node to node, software included.
        goodput: share of the rate that a gradient's bytes get.
        algorithm: ``"ring"``, ``"tree"``, or ``"best"``, the faster of the two for each size.
        local_bytes_s: all-reduce bandwidth within a node.
        launch_s: fixed cost of starting a collective.
        source: of rate, goodput and latency.

    Raises:
        ValueError: a number is out of range, or there is no such algorithm.

    Example:
        >>> Network(nodes=2, bit_s=500e6, latency_s=0.0, goodput=1.0).all_reduce_s(33_600_000)
        0.5376
    """

    nodes: int
    bit_s: float
    latency_s: float = 20e-6
    goodput: float = 0.9
    algorithm: str = "ring"
    local_bytes_s: float = math.inf
    launch_s: float = 0.0
    source: str = "asked for, or our choice"

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes: is {self.nodes}; give 1 or more")
        for name in ("bit_s", "goodput", "local_bytes_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: is {getattr(self, name)}; give more than 0")
        for name in ("latency_s", "launch_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: is {getattr(self, name)}; give seconds, 0 or more")
        if self.algorithm not in (*ALGORITHMS, "best"):
            raise ValueError(f"algorithm: is {self.algorithm!r}; give one of {', '.join(ALGORITHMS)}, best")

    @property
    def bytes_s(self) -> float:
        """What a gradient gets of a link."""
        return self.bit_s / 8 * self.goodput

    def all_reduce_s(self, nbytes: float) -> float:
        """Seconds of one all-reduce of ``nbytes`` by itself."""
        return self.launch_s + nbytes / self.local_bytes_s + self._between_nodes(nbytes)

    def half_s(self, nbytes: float) -> float:
        """Seconds of a reduce-scatter, or of an all-gather: half an all-reduce on a ring."""
        return self.launch_s + (self.all_reduce_s(nbytes) - self.launch_s) / 2

    def vote_s(self) -> float:
        """Seconds until every rank knows what any rank says: an all-reduce of one number."""
        return replace(self, algorithm="best").all_reduce_s(4)

    def _between_nodes(self, nbytes: float) -> float:
        if self.nodes == 1:
            return 0.0
        chosen = ALGORITHMS if self.algorithm == "best" else (self.algorithm,)
        return min(self._by(algorithm, nbytes) for algorithm in chosen)

    def _by(self, algorithm: str, nbytes: float) -> float:
        if algorithm == "ring":
            messages, share = 2 * (self.nodes - 1), 2 * (self.nodes - 1) / self.nodes
        else:
            messages, share = 2 * math.ceil(math.log2(self.nodes)), 2.0
        return messages * self.latency_s + share * nbytes / self.bytes_s

    def link_cost(self) -> LinkCost:
        """The same for the planner: a straight line through the times of a small and a large bucket."""
        sizes = (1 << 12, 1 << 26)
        return fit_link([(size, 1e6 * self.all_reduce_s(size)) for size in sizes])

    def assumptions(self) -> list[Assumption]:
        """What it rests on."""
        latency = f"{1e6 * self.latency_s:.3g} us a message, {1e6 * self.launch_s:.3g} us a collective"
        within = "free" if math.isinf(self.local_bytes_s) else f"{self.local_bytes_s / 1e9:.3g} GB/s"
        return [
            Assumption("links", f"{self.nodes} nodes, {self.bit_s / 1e9:.4g} Gbit/s each way a node", self.source),
            Assumption("goodput", f"{self.goodput:.1%} of the rate, the rest is headers and pauses", self.source),
            Assumption("latency", latency, self.source),
            Assumption("within a node", within, "NVLink against Ethernet; our choice"),
            Assumption(f"all-reduce by {self.algorithm}", _FORMULAS[self.algorithm], "Thakur et al. 2005; NCCL 2.4"),
            Assumption("link", "one collective at a time, in launch order", "as NCCL and Gloo groups do; our model"),
        ]


_FORMULAS = {
    "ring": "2 (N-1) latency + 2 (N-1)/N bytes / rate",
    "tree": "2 log2(N) latency + 2 bytes / rate",
    "best": "the faster of ring and tree for each size",
}


def parse_rate(text: str) -> float:
    """Bits a second, from ``"25gbit"`` or ``"500mbit"``.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_rate("25gbit")
        25000000000.0
    """
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt])bit(?:/s)?", text.strip().lower())
    try:
        value = float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"rate: is {text!r}; give bits a second, like 25gbit or 500mbit")
    return value


def calibrate(profile: Profile, link: int = 0) -> Network:
    """The network whose ring all-reduce takes what ``profile`` measured, as closely as a straight line can.

    Args:
        profile: of a job on 2 ranks or more, one rank a node.
        link: which of its links.

    Raises:
        ValueError: the profile is of one rank, or has no such link.

    Example:
        >>> profile = Profile((9, 9), (9, 9), 0, ((1200, 2200),), (1_000_000, 2_000_000), ("gloo",), size=2)
        >>> network = calibrate(profile)
        >>> round(network.latency_s * 1e6), round(network.bit_s / 1e9)
        (100, 8)
    """
    if profile.size < 2:
        raise ValueError(f"profile: is of {profile.size} rank; measure it on the job's ranks, 2 or more")
    if not 0 <= link < len(profile.links):
        raise ValueError(f"link: is {link}; the profile has links 0 to {len(profile.links) - 1}")
    cost = fit_link([(n, float(us)) for n, us in zip(profile.nbytes, profile.reduce_us[link], strict=True)])
    return ring(cost, profile.size, "fitted to the profile's all-reduces")


def ring(cost: LinkCost, ranks: int, source: str) -> Network:
    """The network whose ring all-reduce over ``ranks``, 2 or more, costs ``cost``.

    Example:
        >>> round(ring(LinkCost(latency_us=100.0, us_per_byte=0.001), 4, "measured").all_reduce_s(10**6) * 1e6)
        1100
    """
    hops, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    bytes_s = share / max(cost.us_per_byte, 1e-9) * 1e6
    return Network(ranks, bytes_s * 8, cost.latency_us * 1e-6 / hops, goodput=1.0, source=source)
