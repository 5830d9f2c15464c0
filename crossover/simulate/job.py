"""A job: what a step computes, part by part, and how many bytes of gradients each part brings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossover.bucket_plan import Item, plan_buckets
from crossover.deft.profile import Profile
from crossover.simulate.assumptions import Assumption
from crossover.simulate.layers import BACKWARD_FACTOR, ModelShape
from crossover.simulate.network import Network
from crossover.simulate.processors import UPDATE_BYTES, Processor

ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Layers whose gradients are ready at one moment and travel together; seconds and bytes."""

    forward_s: float
    backward_s: float
    nbytes: int


@dataclass(frozen=True)
class Job:
    """One step's computing.

    Attributes:
        name: for tables.
        parts: in forward order, the input side first.
        between_s: from the end of backward to the next forward: the update, loading data.
        load_s: the part of that in which nothing is updated.
        batch: examples a rank and step; 0 if not known.
        notes: what it rests on.
    """

    name: str
    parts: tuple[Part, ...]
    between_s: float = 0.0
    load_s: float = 0.0
    batch: int = 0
    notes: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError(f"{self.name}: has no parts; give one layer or bucket at least")
        times = [time for part in self.parts for time in (part.forward_s, part.backward_s)]
        if min(*times, self.load_s, self.update_s) < 0 or min(part.nbytes for part in self.parts) < 0:
            raise ValueError(f"{self.name}: has a time or a size below 0; give seconds and bytes of 0 or more")

    @property
    def nbytes(self) -> int:
        """Gradients of a step."""
        return sum(part.nbytes for part in self.parts)

    @property
    def update_s(self) -> float:
        """Of all parameters."""
        return self.between_s - self.load_s

    @property
    def forward_s(self) -> float:
        """Of all parts."""
        return sum(part.forward_s for part in self.parts)

    @property
    def backward_s(self) -> float:
        """Of all parts."""
        return sum(part.backward_s for part in self.parts)

    @property
    def compute_s(self) -> float:
        """A step without communication."""
        return self.forward_s + self.backward_s + self.between_s

    def ready_s(self) -> list[float]:
        """For each part, seconds from the start of backward until its gradients are there."""
        times, clock = [0.0] * len(self.parts), 0.0
        for number in range(len(self.parts) - 1, -1, -1):
            clock += self.parts[number].backward_s
            times[number] = clock
        return times

    def coverage_rate(self, network: Network) -> float:
        """All-reduce of a step's gradients in one, over its computing."""
        return network.all_reduce_s(self.nbytes) / self.compute_s

    def in_buckets(self, cap_bytes: int, first_cap_bytes: int | None = None) -> Job:
        """The same with neighbours joined as the library (and DDP) joins parameters to buckets."""
        first = cap_bytes if first_cap_bytes is None else first_cap_bytes
        carrying = [number for number, part in enumerate(self.parts) if part.nbytes]
        items = [Item(self.parts[number].nbytes, "gradient") for number in carrying]
        order = range(len(items) - 1, -1, -1)
        buckets = plan_buckets(items, list(order), cap_bytes, first)
        starts = sorted(carrying[min(members)] for members in buckets)
        bounds = [0, *starts[1:], len(self.parts)]
        return replace(self, parts=tuple(_joined(self.parts[a:b]) for a, b in itertools.pairwise(bounds)))

    def in_groups(self, cap_bytes: int) -> Job:
        """The same with neighbours joined from the input side on."""
        flipped = replace(self, parts=self.parts[::-1]).in_buckets(cap_bytes)
        return replace(flipped, parts=flipped.parts[::-1])

    def cut(self, counts: Sequence[int]) -> Job:
        """Each part cut into so many pieces, which are ready together: the first sent has all the computing."""
        pieces = []
        for part, count in zip(self.parts, counts, strict=True):
            share = -(-part.nbytes // count)
            pieces += [Part(0.0, 0.0, share)] * (count - 1)
            pieces.append(Part(part.forward_s, part.backward_s, part.nbytes - share * (count - 1)))
        return replace(self, parts=tuple(pieces))

    def profile(self, links: Sequence[Network], ranks: int) -> Profile:
        """What DeFT would have measured of it: whole microseconds."""

        def whole(seconds: float) -> int:
            return round(1e6 * seconds)

        return Profile(
            forward_us=tuple(whole(part.forward_s) for part in self.parts),
            backward_us=tuple(whole(part.backward_s) for part in self.parts),
            between_us=whole(self.between_s),
            reduce_us=tuple(tuple(max(whole(net.all_reduce_s(p.nbytes)), 1) for p in self.parts) for net in links),
            nbytes=tuple(part.nbytes for part in self.parts),
            links=tuple(f"link {number}" for number in range(len(links))),
            size=ranks,
        )


def _joined(parts: Sequence[Part]) -> Part:
    return Part(
        sum(part.forward_s for part in parts),
        sum(part.backward_s for part in parts),
        sum(part.nbytes for part in parts),
    )


def from_profile(profile: Profile, name: str = "profile", batch: int = 0) -> Job:
    """The job of a measured profile; its buckets are the parts.

    Example:
        >>> from_profile(Profile((10,), (20,), 5, ((8,),), (100,), ("gloo",), size=2)).compute_s
        3.5e-05
    """
    rows = zip(profile.forward_us, profile.backward_us, profile.nbytes, strict=True)
    parts = tuple(Part(1e-6 * forward, 1e-6 * backward, nbytes) for forward, backward, nbytes in rows)
    note = Assumption(name, f"computing times of {len(parts)} buckets", f"measured over {profile.steps} steps")
    return Job(name, parts, 1e-6 * profile.between_us, batch=batch, notes=(note,))


def from_shape(shape: ModelShape, device: Processor, batch: int | None = None) -> Job:
    """A published model on a processor: arithmetic at its rate, and the weights read once for each pass.

    Args:
        shape: of the model.
        device: whose rates hold.
        batch: examples a rank and step, the model's own by default.

    Raises:
        ValueError: the batch is not positive.
    """
    examples = shape.batch if batch is None else batch
    if examples < 1:
        raise ValueError(f"batch: is {batch}; give 1 or more examples a rank and step")
    parts = []
    for layer in shape.layers:
        nbytes = layer.parameters * ELEMENT_BYTES
        forward = layer.flops * examples / device.rates[shape.kind] + nbytes / device.memory_bytes_s
        parts.append(Part(forward, BACKWARD_FACTOR * forward, nbytes))
    update = UPDATE_BYTES * shape.parameters / device.memory_bytes_s
    notes = (
        *shape.assumptions(),
        *device.assumptions(shape.kind),
        Assumption("batch", f"{examples} a rank", "asked for, or the model's usual one"),
        Assumption("gradients", f"{ELEMENT_BYTES} bytes each", "32-bit, as autograd leaves them, also under AMP"),
    )
    return Job(shape.name, tuple(parts), update, batch=examples, notes=notes)
