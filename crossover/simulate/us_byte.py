"""US-Byte's order of transfers: unequal groups of blocks, an order found by a search over modelled steps.

Source: Gao, Ran and others, *US-Byte: An Efficient Communication Framework for Scheduling Unequal-Sized Tensor Blocks*
(IEEE TPDS 2024, DOI 10.1109/TPDS.2023.3331372); the rules are those of its abstract and of its public code. Written
anew as pure functions; where the code reads stored constants, times come from the job and the network here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Groups = list[tuple[int, int]]
"""``(layer, bytes)`` in the order in which they enter the link."""


@dataclass(frozen=True)
class Times:
    """What the search models.

    Attributes:
        ready: seconds from the start of backward until each layer's gradients are there; layer 0 is the input side.
        forward: seconds of each layer.
        nbytes: of each layer's gradients.
        block: bytes of a block.
        cost: seconds of one transfer of so many bytes.
    """

    ready: Sequence[float]
    forward: Sequence[float]
    nbytes: Sequence[int]
    block: int
    cost: Callable[[float], float]

    @property
    def start_up_s(self) -> float:
        """What a transfer costs beyond its bytes."""
        return max(2 * self.cost(self.block) - self.cost(2 * self.block), 0.0)

    @property
    def block_s(self) -> float:
        """What one more block costs in a transfer."""
        return self.cost(2 * self.block) - self.cost(self.block)


def us_byte_groups(times: Times) -> Groups:
    """The order that the search ends with.

    Example:
        >>> us_byte_groups(Times([3.0, 1.0], [1.0, 1.0], [4, 4], block=2, cost=lambda n: n * 0.25))
        [(1, 4), (0, 4)]
    """
    order = list(range(len(times.nbytes)))  # by priority, the input side first
    groups = _groups(times, order)
    best = step_s(times, groups)
    for layer in range(len(order) - 1, 0, -1):
        place = _covering(times, times.ready[layer] + times.cost(times.nbytes[layer]))
        if place >= layer:
            continue
        tried = [other for other in order if other != layer]
        tried.insert(tried.index(place), layer)
        found = _groups(times, tried)
        if step_s(times, found) < best:
            order, groups, best = tried, found, step_s(times, found)
    return groups


def step_s(times: Times, groups: Groups) -> float:
    """Seconds from the start of backward to the end of the next forward."""
    free, landed = 0.0, [0.0] * len(times.nbytes)
    for layer, nbytes in groups:
        free = max(free, times.ready[layer]) + times.cost(nbytes)
        landed[layer] = free
    clock = times.ready[0]
    for layer, seconds in enumerate(times.forward):
        clock = max(clock, landed[layer]) + seconds
    return clock


def _covering(times: Times, moment: float) -> int:
    """The layer whose backward goes on at ``moment``; 0 after all of it."""
    return next((layer for layer in range(len(times.ready) - 1, -1, -1) if times.ready[layer] > moment), 0)


def _groups(times: Times, order: Sequence[int]) -> Groups:
    priority = {layer: place for place, layer in enumerate(order)}
    left = list(times.nbytes)
    groups: Groups = []
    waiting: list[tuple[int, int]] = []
    free = 0.0
    for layer in range(len(left) - 1, -1, -1):
        heapq.heappush(waiting, (priority[layer], layer))
        free = max(free, times.ready[layer])
        next_ready = times.ready[layer - 1] if layer else free
        while waiting and free < next_ready:
            chosen = waiting[0][1]
            nbytes = min(_blocks(times, next_ready - free, left[chosen]) * times.block, left[chosen])
            if nbytes:
                groups.append((chosen, nbytes))
                free += times.cost(nbytes)
            left[chosen] -= nbytes
            if not left[chosen]:
                heapq.heappop(waiting)
    # after backward: what is left of each layer in one, in the order of the next forward
    return _fused([*groups, *((layer, nbytes) for layer, nbytes in enumerate(left) if nbytes)])


def _blocks(times: Times, gap: float, left: int) -> int:
    """How many blocks go into a gap before the next layer is ready."""
    every = math.ceil(left / times.block)
    if gap < times.start_up_s:
        return 1
    if gap < times.cost(left):
        return max(1, math.ceil((gap - times.start_up_s) / max(times.block_s, 1e-12)))
    return every


def _fused(groups: Groups) -> Groups:
    joined: Groups = []
    for layer, nbytes in groups:
        if joined and joined[-1][0] == layer:
            joined[-1] = (layer, joined[-1][1] + nbytes)
        else:
            joined.append((layer, nbytes))
    return joined
