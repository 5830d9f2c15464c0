"""Memory of gradients on CPUs: kept by the process instead of going back to the kernel after every bucket.

A gradient is copied into its bucket and freed at once, so that the next one finds warm memory. glibc hands freed
memory at the top of its heap back to the kernel, which then zeroes page after page for the next gradient: a fifth of a
backward pass of large layers. Raising its thresholds for the whole process keeps the memory; nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 * 1024 * 1024  # what glibc itself rises to
SWITCH = "CROSSOVER_KEEP_MEMORY"
_kept = 0


def keep_freed_memory(parameters: Iterable[Tensor]) -> int:
    """Let glibc keep freed memory for twice the gradients of ``parameters`` that are on the CPU.

    Does nothing where the C library is another one, where ``$MALLOC_TRIM_THRESHOLD_``, ``$MALLOC_MMAP_THRESHOLD_`` or
    ``$GLIBC_TUNABLES`` says what the user wants, or with ``CROSSOVER_KEEP_MEMORY=0``. Each rank for itself.

    Args:
        parameters: whose gradients come and go.

    Returns:
        Bytes of free memory that the process may keep at the top of its heap by this and earlier calls.
    """
    global _kept
    if os.environ.get(SWITCH) == "0" or any(
        os.environ.get(name) for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    ):
        return _kept
    nbytes = sum(p.numel() * p.element_size() for p in parameters if p.device.type == "cpu")
    wanted = min(max(2 * nbytes, 2 * LARGEST_MMAP_THRESHOLD), 2**31 - 1)
    if not nbytes or wanted <= _kept or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return _kept
    if library.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD) and library.mallopt(M_TRIM_THRESHOLD, wanted):
        _kept = wanted
    return _kept
