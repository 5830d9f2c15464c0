"""DeAR's scheduling, in our own words: each all-reduce is split, and its second half hides under the next forward pass.

Source: Zhang et al., DeAR (ICDCS 2023). Gradients are fused into groups. In the backward pass a full group is
reduce-scattered; ``step()`` waits for all of these, the one barrier of a step, and starts the first all-gather. Before
the first module of a group runs forward, the group's all-gather is awaited, the next group's is started, and the user's
optimizer updates the group's parameters. Theirs re-implements SGD and runs on NCCL; group sizes are tuned there too.

Gloo's own reduce-scatter sends as much as an all-reduce (measured: 2 (N-1)/N of the tensor instead of (N-1)/N), which
would make the baseline look slow. Here it is an all-to-all of shards, summed by the receiver: (N-1)/N, as it should be.
Both halves are sent in pieces: one large exchange on Gloo often uses a link first in one direction, then in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossover.schedulers.deferred import step_subset

from ..workloads import Workload
from .system import MakeOptimizer, Settings, System, Training

DEFAULT_GROUP_BYTES = 25 * (1 << 20)
PIECE_BYTES = 256 * 1024
"""Of a buffer; measured between two hosts at 146 Mbit/s: 0.25 to 0.5 MB reach the full rate both ways at once."""


def group_sizes(workload: Workload) -> Sequence[Settings]:
    """DeAR's default of 25 MB, and a third and an eighth of the gradients; DeAR tunes it at run time."""
    whole = workload.gradient_bytes
    return ({"group_bytes": DEFAULT_GROUP_BYTES}, *({"group_bytes": whole // parts} for parts in (3, 8)))


class Group:
    """Parameters whose gradients travel together, in a buffer cut into pieces of as many equal shards as ranks.

    Rank ``r`` averages the ``r``-th shard of every piece.

    Args:
        parameters: of one dtype.
        size: number of ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], size: int) -> None:
        self.parameters = parameters
        elements = -(-sum(parameter.numel() for parameter in parameters) // size) * size
        self.buffer = torch.zeros(elements, dtype=parameters[0].dtype)
        self.received = torch.empty_like(self.buffer)
        self.shards = self.buffer.new_empty(elements // size)
        step = max(PIECE_BYTES // self.buffer.element_size() // size, 1) * size
        bounds = [(start, min(start + step, elements)) for start in range(0, elements, step)]
        self.pieces = [slice(start, stop) for start, stop in bounds]
        self.own = [slice(start // size, stop // size) for start, stop in bounds]
        self.views = []
        start = 0
        for parameter in parameters:
            self.views.append(self.buffer[start : start + parameter.numel()].view_as(parameter))
            start += parameter.numel()
        self.missing = len(parameters)
        self.works: list[Any] = []

    def scatter(self) -> None:
        """Start sending every other rank its shards of this rank's gradients."""
        for piece in self.pieces:
            self.works.append(dist.all_to_all_single(self.received[piece], self.buffer[piece], async_op=True))

    def average(self) -> None:
        """Wait for all ranks' gradients of this rank's shards, and average them."""
        self._wait()
        for piece, own in zip(self.pieces, self.own, strict=True):
            torch.mean(self.received[piece].view(-1, own.stop - own.start), 0, out=self.shards[own])

    def gather(self) -> None:
        """Start collecting the averaged shards."""
        for piece, own in zip(self.pieces, self.own, strict=True):
            self.works.append(dist.all_gather_into_tensor(self.buffer[piece], self.shards[own], async_op=True))

    def collect(self) -> None:
        """Wait for the averaged shards and leave them in the parameters' gradients."""
        self._wait()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view

    def _wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()

    def clear(self) -> None:
        """Leave the parameters without gradients, and wait for new ones."""
        for parameter in self.parameters:
            parameter.grad = None
        self.missing = len(self.parameters)


class Decoupled:
    """Drives an optimizer by DeAR's schedule; a training loop calls its ``zero_grad()`` and ``step()``.

    Across ranks: same groups, same order of collectives, the order of the parameters and its reverse.

    Args:
        model: each parameter is used by calling the module that owns it.
        optimizer: any whose update of a parameter looks at no other.
        group_bytes: size at which a group is closed.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, group_bytes: int) -> None:
        self.optimizer = optimizer
        self.groups = [Group(members, dist.get_world_size()) for members in grouped(model, group_bytes)]
        self._group_of: dict[int, int] = {}
        self._next_scatter = len(self.groups) - 1
        self._next_gather = 0
        self._next_update = len(self.groups)
        self._options: list[dict[str, Any]] = []
        for index, group in enumerate(self.groups):
            for place, parameter in enumerate(group.parameters):
                self._group_of[id(parameter)] = index
                parameter.register_post_accumulate_grad_hook(self._arrival(index, place))
        for module in model.modules():
            owned = [self._group_of[id(p)] for p in module._parameters.values() if id(p) in self._group_of]
            if owned:
                module.register_forward_pre_hook(self._update_hook(max(owned)))

    # -- backward ----------------------------------------------------------------------------------------------------

    def _arrival(self, index: int, place: int) -> Any:
        group = self.groups[index]

        def arrived(parameter: Tensor) -> None:
            if index >= self._next_update:
                raise RuntimeError("a parameter was used without calling the module that owns it; DeAR cannot serve it")
            assert parameter.grad is not None
            group.views[place].copy_(parameter.grad)
            parameter.grad = None
            group.missing -= 1
            self._scatter_full()

        return arrived

    def _scatter_full(self) -> None:
        """Start full groups in the one order that all ranks keep: from the output side."""
        while self._next_scatter >= 0 and not self.groups[self._next_scatter].missing:
            self.groups[self._next_scatter].scatter()
            self._next_scatter -= 1

    # -- step --------------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Gradients are cleared as they leave for their group."""

    def step(self) -> None:
        """Wait for all reduce-scatters; the update is due, with the options the parameter groups have now."""
        assert self._next_scatter < 0, "every group is full once backward has ended"
        for group in reversed(self.groups):
            group.average()
        self._options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self._next_scatter = len(self.groups) - 1
        self._next_gather = self._next_update = 0
        self._gather_next()
        self.optimizer.step()  # without gradients: for learning-rate schedulers, which count it

    # -- the next forward --------------------------------------------------------------------------------------------

    def _update_hook(self, last: int) -> Any:
        def before_forward(module: nn.Module, arguments: Any) -> None:
            self._update_through(last)

        return before_forward

    def _update_through(self, last: int) -> None:
        while self._next_update <= last and self._next_update < len(self.groups):
            group = self.groups[self._next_update]
            group.collect()
            self._gather_next()
            step_subset(self.optimizer, group.parameters, self._options)
            group.clear()
            self._next_update += 1

    def _gather_next(self) -> None:
        if self._next_gather < len(self.groups):
            self.groups[self._next_gather].gather()
            self._next_gather += 1

    def flush(self) -> None:
        """Apply every update that is due. Collective."""
        self._update_through(len(self.groups) - 1)


def grouped(model: nn.Module, group_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in order, closed into a group once it holds ``group_bytes`` or the dtype changes."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in (p for p in model.parameters() if p.requires_grad):
        if room <= 0 or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            room = group_bytes
        groups[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return groups


def dear(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    workload: Workload,
    horizon: int,
    group_bytes: int = DEFAULT_GROUP_BYTES,
) -> Training:
    """Our own small version of DeAR, to compare schedules; not DeAR's code."""
    optimizer = make_optimizer(model.parameters())
    driver = Decoupled(model, optimizer, group_bytes)
    facts = {"group_bytes": group_bytes, "groups": len(driver.groups)}
    return Training(model, driver, optimizer, workload.loss, driver.flush, facts)


SYSTEMS = (System("dear", "DeAR-style, ours", dear, candidates=group_sizes),)
