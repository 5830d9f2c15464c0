"""The job that this process belongs to: started by ``horovodrun`` or ``torchrun``, or alone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from crossover import telemetry
from crossover.comm import EmulatedLink, LinkModel, Solo, TorchCommunicator, torch_start
from crossover.comm.board import Board, State, http_store
from crossover.comm.communicator import Communicator
from crossover.departure import Departure
from crossover.errors import CommunicationError
from crossover.launchers import Kind, Launcher, find_launcher
from crossover.variables import warn_of_misspelt

_log = logging.getLogger("crossover")
_DEFAULT_TIMEOUT = 600.0
_DEFAULT_STALL_WARNING = 60.0


@dataclass(frozen=True)
class Context:
    """The job as this rank sees it.

    Attributes:
        communicator: all ranks of the job.
        launcher: what carries the collectives: ``"horovod"``, ``"torch"``, or ``"solo"`` where there is one rank only.
        local_rank: place among the ranks on this node.
        local_size: number of ranks on this node.
        cross_rank: place among the nodes that have this local rank.
        cross_size: number of those nodes.
        homogeneous: whether all nodes have equally many ranks.
    """

    communicator: Communicator
    launcher: Kind
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool = True


@dataclass
class _Job:
    """A context and what ends it."""

    context: Context
    board: Board
    stall_warning: float
    release: Callable[[], object]
    departure: Departure | None = None


_job: _Job | None = None
_generation = 0
_callbacks: list[Callable[[], None]] = []


def init(
    comm: Any = None, process_sets: Any = None, *, backend: str | None = None, timeout: float | None = None
) -> None:
    """Join the job that the environment describes. Call it once, first, on every rank; a second call does nothing.

    A ``torch.distributed`` default group that is initialised already is used as it is, and left alone by
    :func:`shutdown`. A process that is alone starts no thread and no process group.

    Args:
        comm: Horovod's sub-communicator; only ``None``, all ranks, is offered: use ``process_sets`` for parts of a job.
        process_sets: process sets to add at once, as in Horovod; or ``"dynamic"``, which is always so here.
        backend: ``"torch"``, ``"gloo"``, ``"nccl"``, ``"horovod"`` or ``"solo"``, instead of what the environment says
            (``CROSSOVER_BACKEND``, else the launcher's own variables). ``"torch"`` is NCCL where there are GPUs, else
            Gloo.
        timeout: seconds until a wait on other ranks fails; ``CROSSOVER_TIMEOUT`` or 600 by default. A wait of
            ``CROSSOVER_STALL_WARNING`` (60) seconds is warned of. ``CROSSOVER_EMULATED_LINK="500mbit,1ms"`` slows all
            communication down as such a link would (:mod:`crossover.comm.emulated_link`).

    Raises:
        ValueError: an argument or the environment is wrong; the text says what to do.
        CommunicationError: not all ranks came within the time-out.

    Example:
        >>> import crossover as xo
        >>> xo.init()
        >>> xo.rank(), xo.size()
        (0, 1)
    """
    global _job, _generation
    if comm is not None:
        raise ValueError(f"comm: is {comm!r}; only None is offered, pass parts of the job as process_sets")
    if _job is not None:
        return
    seconds = _seconds("CROSSOVER_TIMEOUT", timeout, _DEFAULT_TIMEOUT, "timeout")
    stall_warning = _seconds("CROSSOVER_STALL_WARNING", None, _DEFAULT_STALL_WARNING)
    link = os.environ.get("CROSSOVER_EMULATED_LINK")
    model = LinkModel.parse(link) if link else None
    job = _start(backend or os.environ.get("CROSSOVER_BACKEND") or None, seconds, stall_warning)
    if model is not None:
        job.context = replace(job.context, communicator=EmulatedLink(job.context.communicator, model))
        _log.warning("communication runs on an emulated link of %s: all figures are emulated", link)
    if job.context.launcher != "solo":
        job.departure = Departure(job.board, shutdown)
    _job = job
    _generation += 1
    if rank() == 0:
        warn_of_misspelt()
    if process_sets is not None:
        # It stands on this module, so it can be imported no earlier.
        from crossover.collectives.process_sets import register_process_sets

        register_process_sets(process_sets)
    telemetry.start_from_environment(rank(), job.context.communicator)


def at_shutdown(callback: Callable[[], None]) -> None:
    """Have ``callback`` called whenever a job is left in order, before communication ends."""
    _callbacks.append(callback)


def shutdown() -> None:
    """Leave the job. Not a collective, but ranks that still communicate fail then.

    Only what :func:`init` started is ended. Does nothing where there is no job; ``init()`` may be called again.
    """
    global _job
    if _job is None:
        return
    try:
        for callback in _callbacks:
            callback()
    except CommunicationError as error:
        _log.warning("what was in flight at shutdown is lost: %s", error)
    telemetry.stop()
    job, _job = _job, None
    if job.departure is not None:
        job.departure.cancel()
        job.board.post(State.LEFT)
    job.release()


def is_initialized() -> bool:
    """Whether :func:`init` has been called, and not :func:`shutdown` since."""
    return _job is not None


def context() -> Context:
    """The job.

    Raises:
        ValueError: before :func:`init`.
    """
    return _current().context


def rank() -> int:
    """This process's number in the job, from 0. ``ValueError`` before :func:`init`."""
    return context().communicator.rank


def size() -> int:
    """Number of ranks in the job. ``ValueError`` before :func:`init`."""
    return context().communicator.size


def local_rank() -> int:
    """Place among the ranks on this node, from 0; the device to use. ``ValueError`` before :func:`init`."""
    return context().local_rank


def local_size() -> int:
    """Number of ranks on this node. ``ValueError`` before :func:`init`."""
    return context().local_size


def cross_rank() -> int:
    """Place of this node among those that have this local rank. ``ValueError`` before :func:`init`."""
    return context().cross_rank


def cross_size() -> int:
    """Number of nodes that have this local rank. ``ValueError`` before :func:`init`."""
    return context().cross_size


def is_homogeneous() -> bool:
    """Whether all nodes have equally many ranks. ``ValueError`` before :func:`init`."""
    return context().homogeneous


def communicator_of(process_group: dist.ProcessGroup) -> Communicator:
    """A torch process group as a communicator; the job's own one for the default group that carries it.

    Raises:
        ValueError: it is no process group, or this rank is not a member of it.
    """
    link = None
    if _job is not None:
        link = _job.context.communicator
        inner = link.inner if isinstance(link, EmulatedLink) else link
        if isinstance(inner, TorchCommunicator) and inner.group is process_group:
            return link
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            f"process_group: is {process_group!r}; pass a torch ProcessGroup of which this rank is a member, such as "
            "torch.distributed.new_group(...) returns there"
        )
    if _job is not None:
        seconds, stall_warning = _job.context.communicator.timeout, _job.stall_warning
    else:
        seconds = _seconds("CROSSOVER_TIMEOUT", None, _DEFAULT_TIMEOUT)
        stall_warning = _seconds("CROSSOVER_STALL_WARNING", None, _DEFAULT_STALL_WARNING)
    board = torch_start.board_of_existing(_generation)
    communicator = TorchCommunicator(process_group, timeout=seconds, stall_warning=stall_warning, board=board)
    return link.sharing_link(communicator) if isinstance(link, EmulatedLink) else communicator


def _current() -> _Job:
    if _job is None:
        raise ValueError("crossover is not initialised; call crossover.init() first, on every rank")
    return _job


def _seconds(variable: str, given: float | None, default: float, argument: str = "") -> float:
    text: Any = os.environ.get(variable, default) if given is None else given
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < 1e7:
        name = argument if given is not None else variable
        raise ValueError(f"{name}: is {text!r}; give a number of seconds above 0")
    return value


def _start(backend: str | None, timeout: float, stall_warning: float) -> _Job:
    if backend in (None, "torch") and dist.is_available() and dist.is_initialized():
        board = torch_start.board_of_existing(_generation)
        return _torch_job(board, timeout, stall_warning, release=lambda: None)
    launcher = find_launcher(os.environ, backend)
    if launcher.kind == "horovod":
        return _horovod_job(timeout, stall_warning)
    if launcher.kind == "torch":
        return _started_torch_job(launcher, timeout, stall_warning)
    context = Context(Solo(timeout), "solo", 0, 1, 0, 1)
    return _Job(context, Board(None, 0), stall_warning, release=lambda: None)


def _started_torch_job(launcher: Launcher, timeout: float, stall_warning: float) -> _Job:
    board = torch_start.start(launcher.torch_backend, timeout, _generation)
    try:
        return _torch_job(board, timeout, stall_warning, release=_destroy_process_groups, check_devices=True)
    except BaseException:
        _destroy_process_groups()
        raise


def _destroy_process_groups() -> None:
    if dist.is_initialized():  # the script may have done so itself
        dist.destroy_process_group()


def _torch_job(
    board: Board, timeout: float, stall_warning: float, release: Callable[[], object], check_devices: bool = False
) -> _Job:
    group = dist.group.WORLD
    assert group is not None
    communicator = TorchCommunicator(group, timeout=timeout, stall_warning=stall_warning, board=board)
    device = torch_start.device_identity() if check_devices else None
    mine = (os.environ.get("GROUP_RANK"), socket.gethostname(), os.environ.get("LOCAL_RANK"), device)
    places = communicator.all_gather_object(mine, name="crossover.init")
    torch_start.refuse_shared_devices([place[3] for place in places], communicator)
    return _Job(_placed(communicator, [place[:3] for place in places]), board, stall_warning, release)


def _placed(communicator: Communicator, places: Sequence[tuple[str | None, str, str | None]]) -> Context:
    """Find the nodes: by the launcher's numbers where every rank has them, else by host name and order of ranks."""
    numbered = all(group is not None for group, _, _ in places)
    nodes = [group if numbered else host for group, host, _ in places]
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)}
    local_ranks = [members[node].index(rank) for rank, node in enumerate(nodes)]
    if all(local is not None for _, _, local in places):
        local_ranks = [int(local or 0) for _, _, local in places]
    mine, me = nodes[communicator.rank], communicator.rank
    peers = [node for node in members if any(local_ranks[rank] == local_ranks[me] for rank in members[node])]
    return Context(
        communicator,
        "torch",
        local_rank=local_ranks[me],
        local_size=len(members[mine]),
        cross_rank=peers.index(mine),
        cross_size=len(peers),
        homogeneous=len({len(ranks) for ranks in members.values()}) == 1,
    )


def _horovod_job(timeout: float, stall_warning: float) -> _Job:
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    from crossover.comm import horovod as engine

    started_before = hvd.is_initialized()
    if not started_before:
        engine.start()
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    scope = engine.agreed_number(timeout)  # workers that joined later have started fewer jobs in their process
    connect = http_store(host, int(port), f"crossover-board-{scope}") if host and port else None
    board = Board(connect, hvd.rank(), "horovodrun")
    context = Context(
        engine.HorovodCommunicator(timeout=timeout, stall_warning=stall_warning, board=board),
        "horovod",
        local_rank=hvd.local_rank(),
        local_size=hvd.local_size(),
        cross_rank=hvd.cross_rank(),
        cross_size=hvd.cross_size(),
        homogeneous=mpi_ops.is_homogeneous(),
    )
    return _Job(context, board, stall_warning, release=(lambda: None) if started_before else hvd.shutdown)
