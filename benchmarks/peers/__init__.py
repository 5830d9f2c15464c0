"""The systems that are measured side by side, each set up as its own documentation recommends.

Every system trains the same model with the same optimizer on the same batches. A new one is a function that prepares it
and a call of :func:`register`.

Example::

    from benchmarks import peers, workloads

    workload, system = workloads.get("resnet"), peers.get("ddp")
    training = system.prepare(workload.model(), workload.optimizer, workload, workload.steps)
    for step in range(workload.steps):
        training(*workload.batch(rank, step, size))
    training.finish()
"""

from __future__ import annotations

from . import decoupled, horovod, ours, torch_ddp
from .system import HORIZON, NotRunnable, Settings, System, Training, get, names, register
from .tuning import tune

__all__ = ["HORIZON", "NotRunnable", "Settings", "System", "Training", "get", "names", "register", "tune"]

for _module in (torch_ddp, horovod, decoupled, ours):
    register(*_module.SYSTEMS)
