"""Jobs that share devices: what their ranks run."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import crossover as xo
from crossover.sync import TimeShare
from crossover.sync.holding import Tally
from crossover.sync.registry import present
from tests.sync.arbiters import place_in, turn_of
from tests.training import Recipe, batch, flat, make_model, micro_batches, sgd

Result = tuple[str, Tally]
"""A digest of the final parameters' bits, and what turns cost."""


def digest(model: nn.Module) -> str:
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def tally() -> Tally:
    """Of this process's turn so far; taken before the optimizer goes, and the turn with it."""
    turns = present()
    return replace(turns[0].tally) if turns else Tally()


def train(steps: int, options: dict[str, Any], recipe: Recipe, model: nn.Module) -> Tally:
    optimizer: Any = xo.DistributedOptimizer(
        recipe.optimizer(model), model.named_parameters(), backward_passes_per_step=recipe.passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for features, targets in micro_batches(recipe, [xo.rank()], step):
            nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    optimizer.flush()
    return tally()


def job_alone(steps: int, options: dict[str, Any], passes: int = 1) -> Result:
    xo.init()
    model = make_model()
    cost = train(steps, options, Recipe(sgd, passes=passes), model)
    return digest(model), cost


def with_ddp(steps: int, shared: bool) -> Result:
    xo.init()
    model = make_model()
    parallel = DistributedDataParallel(model)
    if shared:
        xo.sync.share_ddp(parallel)
    optimizer = sgd(model)
    for step in range(steps):
        features, targets = batch(xo.rank(), step)
        with xo.sync.turn():
            optimizer.zero_grad()
            nn.functional.mse_loss(parallel(features), targets).backward()
        optimizer.step()
    return digest(model), tally()


def with_sync_batch_norm(steps: int, options: dict[str, Any]) -> Result:
    xo.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), xo.SyncBatchNorm(16), nn.Linear(16, 3)).double()
    cost = train(steps, options, Recipe(sgd), model)
    return digest(model), cost


class Clinging(TimeShare):
    """Holds its turn while it waits for other ranks: what must not be done."""

    def communicating(self) -> None:
        pass

    def _aside(self) -> Any:
        return ExitStack()


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def two_jobs_on_two_nodes(ports: list[int], steps: int, unsafe: bool) -> Result:
    """Four processes are two jobs of two ranks. Rank ``r`` of each is on node ``r``; the nodes' first jobs differ."""
    job, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    os.environ.update(MASTER_PORT=str(ports[job]), CROSSOVER_HOST=f"node{rank}")
    xo.init()
    kind = Clinging if unsafe else TimeShare
    model = make_model(seed=job)
    optimizer: Any = xo.DistributedOptimizer(sgd(model), model.named_parameters(), sharing=kind(job=f"job{job}"))
    if job != rank:
        time.sleep(0.5)
    for step in range(steps):
        optimizer.zero_grad()
        features, targets = batch(10 * job + rank, step % 50)
        nn.functional.mse_loss(model(features), targets).backward()
        optimizer.step()
    return digest(model), tally()


@contextmanager
def rivals(directory: Path, *devices: str) -> Iterator[list[int]]:
    """Other jobs that ask for the devices all the time; yields a list with an entry for each turn that one had."""
    stop, turns = Event(), []

    def compete(device: str) -> None:
        with turn_of(place_in(directory, device), "rival") as turn:
            while not stop.is_set():
                turn.take()
                time.sleep(0.001)
                turn.rest()
                turns.append(1)

    threads = [Thread(target=compete, args=(device,)) for device in devices]
    for thread in threads:
        thread.start()
    try:
        yield turns
    finally:
        stop.set()
        for thread in threads:
            thread.join()
