"""The environment that a launcher gives each rank, set by hand so that a run starts in the time of one import.

One process a host, host ``h`` being rank ``h``, as every table here has it.
"""

from __future__ import annotations

import os
from pathlib import Path

from .topology import INTERFACES

LAUNCHERS = ("torchrun", "horovod")
PROJECT = Path(__file__).resolve().parents[2]
_FOREIGN = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "TORCHELASTIC_", "CROSSOVER_EMULATED_LINK", "OMP_", "MKL_")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


def common(host: int, second: bool) -> dict[str, str]:
    """What every rank gets, whichever the launcher: the driver's environment without its own job, one torch thread."""
    kept = {k: v for k, v in os.environ.items() if k not in _FOREIGN_NAMES and not k.startswith(_FOREIGN)}
    path = os.pathsep.join(filter(None, [str(PROJECT), kept.get("PYTHONPATH", "")]))
    kept |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    kept |= {f"{library}_SOCKET_IFNAME": INTERFACES[0] for library in ("GLOO", "TP", "NCCL")}
    kept["CUDA_VISIBLE_DEVICES"] = ""  # hosts are cores here
    kept["CROSSOVER_TESTBED_HOST"] = str(host)
    if second:
        kept["CROSSOVER_SECOND_IFACE"] = INTERFACES[1]
    return kept


def torchrun(host: int, hosts: int, master_address: str, master_port: int) -> dict[str, str]:
    """The variables of ``torchrun --nnodes HOSTS --nproc-per-node 1``."""
    rank, size = str(host), str(hosts)
    return {
        "RANK": rank,
        "LOCAL_RANK": "0",
        "GROUP_RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
        "MASTER_ADDR": master_address,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RUN_ID": f"testbed-{master_port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def horovod(host: int, hosts: int, hostname: str, rendezvous_address: str, rendezvous_port: int) -> dict[str, str]:
    """The variables of ``horovodrun --gloo -H host0:1,host1:1,...``."""
    return {
        "HOROVOD_HOSTNAME": hostname,
        "HOROVOD_RANK": str(host),
        "HOROVOD_SIZE": str(hosts),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(host),
        "HOROVOD_CROSS_SIZE": str(hosts),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous_address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous_port),
        "HOROVOD_GLOO_IFACE": INTERFACES[0],
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
