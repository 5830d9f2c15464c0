"""Communicators: one interface to torch.distributed, Horovod, a lone process and an emulated slow link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossover.comm.communicator import Communicator, ReduceOp, Work
from crossover.comm.emulated_link import Clock, EmulatedLink, LinkModel, RealClock, VirtualClock
from crossover.comm.solo import CompletedWork, Solo
from crossover.comm.torch_dist import TorchCommunicator

if TYPE_CHECKING:
    from crossover.comm.horovod import HorovodCommunicator

__all__ = [
    "Clock",
    "Communicator",
    "CompletedWork",
    "EmulatedLink",
    "HorovodCommunicator",
    "LinkModel",
    "RealClock",
    "ReduceOp",
    "Solo",
    "TorchCommunicator",
    "VirtualClock",
    "Work",
]


def __getattr__(name: str) -> Any:
    """``HorovodCommunicator`` is imported on first use: Horovod need not be installed."""
    if name == "HorovodCommunicator":
        from crossover.comm.horovod import HorovodCommunicator

        return HorovodCommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
