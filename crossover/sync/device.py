"""The device that jobs share: what it is called, and when it has finished what was launched on it."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

HOST_VARIABLE = "CROSSOVER_HOST"
DEVICE_VARIABLE = "CROSSOVER_DEVICE"


class Marker(ABC):
    """A point in the work that was launched on a device."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether the device is beyond it."""

    @abstractmethod
    def wait(self) -> None:
        """Return once it is."""


class Device(ABC):
    """Something that one job at a time should compute on.

    Attributes:
        name: the same in every process that uses it, whatever number it has there.
    """

    name: str

    @abstractmethod
    def mark(self) -> Marker:
        """The end of what the calling thread has launched so far."""

    def capacity_bytes(self) -> int:
        """Its memory; 0 where that is not limited, or not known."""
        return 0

    def peak_bytes(self) -> int:
        """The most memory that this process has taken of it; 0 where not known."""
        return 0


class _Passed(Marker):
    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


_PASSED = _Passed()


class CpuSlot(Device):
    """A share of the processor under a name, for jobs that were pinned to the same cores.

    Computing on it is done when the call returns.

    Example:
        >>> CpuSlot("cpu0").mark().passed()
        True
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def mark(self) -> Marker:
        """See :meth:`Device.mark`."""
        return _PASSED


class _CudaMarker(Marker):
    def __init__(self, device: torch.device) -> None:
        # Blocking: whoever waits sleeps, where spinning would take a core from the job.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice(Device):
    """A GPU or a MIG slice of one, named by its UUID: its number differs between processes.

    Args:
        device: as torch numbers it in this process.
        name: instead of the UUID.
    """

    def __init__(self, device: torch.device, name: str | None = None) -> None:
        self._device = device
        self.name = name or _uuid(device)
        self._context_bytes: int | None = None

    def mark(self) -> Marker:
        """See :meth:`Device.mark`. Of the current stream, on which autograd and torch.distributed order their work."""
        if torch.cuda.is_current_stream_capturing():  # into a CUDA graph: nothing runs, and waiting is not allowed
            return _PASSED
        return _CudaMarker(self._device)

    def capacity_bytes(self) -> int:
        """See :meth:`Device.capacity_bytes`. Of the slice where it is one."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def peak_bytes(self) -> int:
        """See :meth:`Device.peak_bytes`. With what the CUDA context takes besides torch's own pools, where known."""
        if self._context_bytes is None:  # once: it does not change, and asking takes milliseconds
            from crossover.sync import gpu

            reserved = int(torch.cuda.memory_reserved(self._device))
            self._context_bytes = max(gpu.process_bytes(self.name, os.getpid()) - reserved, 0)
        return int(torch.cuda.max_memory_reserved(self._device)) + self._context_bytes


def _uuid(device: torch.device) -> str:
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    from crossover.sync import gpu

    return gpu.uuid_of(device.index if device.index is not None else torch.cuda.current_device())


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """This machine's name for its arbiters: ``CROSSOVER_HOST``, else what ``gethostname()`` says.

    Containers on one machine that share its devices share the directory of the sockets and have to agree on a name.
    """
    return environ.get(HOST_VARIABLE) or socket.gethostname()


def find_device(
    used: torch.device, local_rank: int, declared: str | None = None, environ: Mapping[str, str] = os.environ
) -> Device:
    """The device on which parameters on ``used`` are trained.

    Args:
        used: where the parameters are.
        local_rank: place among the ranks on this node: names the CPU slot if nothing else does.
        declared: a name from the job itself; ``CROSSOVER_DEVICE`` otherwise, else a GPU's UUID, or ``"cpu"`` and
            ``local_rank``.
        environ: the environment.

    Example:
        >>> find_device(torch.device("cpu"), local_rank=1, environ={}).name
        'cpu1'
    """
    name = declared or environ.get(DEVICE_VARIABLE)
    if used.type == "cuda":
        return CudaDevice(used, name)
    return CpuSlot(name or f"cpu{local_rank}")
