"""The names that training scripts use of ``horovod.torch``: collectives, process sets, state, SyncBatchNorm.

They work on torch.distributed, under Horovod and alone, with Horovod's argument names and meanings. All ranks make
the same calls in the same order: torch.distributed matches them by that, and only Horovod could match them by name.

Where Horovod 0.28 fails, these do not: bfloat16, bool and complex tensors, tensors of any strides, splits of any
integer dtype, optimizer state without a step being taken, SyncBatchNorm on CPUs. What differs otherwise: an unknown
handle is an error, a mismatch that is found names the ranks (:class:`~crossover.errors.RankMismatchError`), and
Adasum is not offered. ``join`` and ``DistributedOptimizer`` stand above this package.
"""

from crossover.collectives.all_gather import (
    allgather,
    allgather_async,
    grouped_allgather,
    grouped_allgather_async,
    sparse_allreduce_async,
)
from crossover.collectives.all_reduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from crossover.collectives.all_to_all import alltoall, alltoall_async
from crossover.collectives.broadcasts import barrier, broadcast, broadcast_, broadcast_async, broadcast_async_
from crossover.collectives.compression import Compression
from crossover.collectives.handles import poll, synchronize
from crossover.collectives.model_state import broadcast_parameters
from crossover.collectives.objects import allgather_object, broadcast_object
from crossover.collectives.optimizer_state import broadcast_optimizer_state
from crossover.collectives.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    register_process_sets,
    remove_process_set,
)
from crossover.collectives.queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    start_timeline,
    stop_timeline,
)
from crossover.collectives.reduce_ops import Adasum, Average, Max, Min, Product, Sum
from crossover.collectives.reduce_scatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from crossover.collectives.sync_batch_norm import SyncBatchNorm
from crossover.errors import CommunicationError as HorovodInternalError  # what scripts catch

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "register_process_sets",
    "remove_process_set",
    "rocm_built",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
