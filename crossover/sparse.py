"""Averaging sparse gradients: indices and values are gathered, rows that meet are added."""

from __future__ import annotations

import torch
from torch import Tensor

from crossover.comm.communicator import Communicator
from crossover.reduction import Scaling


def is_sparse(gradient: Tensor | None) -> bool:
    """Whether it is a gradient that does not hold every element."""
    return gradient is not None and gradient.layout is not torch.strided


@torch.no_grad()
def reduce_sparse(communicator: Communicator, parameter: Tensor, scaling: Scaling, *, joined: bool, name: str) -> None:
    """Replace ``parameter.grad`` by the sparse average (or sum) over all ranks.

    A rank without a gradient counts as zero; where no rank has one it stays ``None``. Every rank gets the same
    entries in the same order. A dense gradient that is found here is sent as a sparse one.

    Args:
        communicator: the ranks that take part; all call this for the same parameters in the same order.
        parameter: the parameter, whose gradient has one sparse dimension unless it says otherwise.
        scaling: factors before and after the sum.
        joined: this rank has no data left and only stands in; the average is over the others.
        name: name of the collectives.
    """
    local = None if joined else parameter.grad
    if local is not None and local.layout is torch.strided:
        local = local.to_sparse(1)
    local = None if local is None else local.coalesce()
    entries = -1 if local is None else local._nnz()
    dimensions = 1 if local is None else local.sparse_dim()
    control = communicator.control_device
    facts = torch.tensor([entries, dimensions, int(joined)], dtype=torch.int64, device=control)
    gathered = torch.zeros(communicator.size, 3, dtype=torch.int64, device=control)
    communicator.all_gather(gathered, facts, name=f"{name}.entries").wait()
    counts, dimension_list, absent = (column.tolist() for column in gathered.unbind(1))
    if max(counts) < 0:
        return
    total = _gather_entries(communicator, parameter, local, counts, max(dimension_list), scaling.before, name)
    factor = scaling.after
    if scaling.average:
        factor *= communicator.size / max(communicator.size - sum(absent), 1)
    parameter.grad = total if factor == 1.0 else total * factor


def _gather_entries(
    communicator: Communicator,
    parameter: Tensor,
    local: Tensor | None,
    counts: list[int],
    dimensions: int,
    before: float,
    name: str,
) -> Tensor:
    most = max(counts)
    indices = torch.zeros(dimensions, most, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(most, *parameter.shape[dimensions:], dtype=parameter.dtype, device=parameter.device)
    if local is not None:
        indices[:, : local._nnz()] = local.indices()
        values[: local._nnz()] = local.values() * before
    all_indices = torch.zeros(communicator.size, *indices.shape, dtype=indices.dtype, device=indices.device)
    all_values = torch.zeros(communicator.size, *values.shape, dtype=values.dtype, device=values.device)
    works = [
        communicator.all_gather(all_indices, indices, name=f"{name}.indices"),
        communicator.all_gather(all_values, values, name=f"{name}.values"),
    ]
    for work in works:
        work.wait()
    held = [max(count, 0) for count in counts]
    return torch.sparse_coo_tensor(
        torch.cat([all_indices[rank, :, :count] for rank, count in enumerate(held)], dim=1),
        torch.cat([all_values[rank, :count] for rank, count in enumerate(held)]),
        size=parameter.shape,
    ).coalesce()
