"""Every collective, on every backend, against what plain torch makes of all ranks' tensors in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from crossover import runtime
from crossover.comm import Communicator, ReduceOp
from tests.comm.jobs import BOTH, joined, values
from tests.harness import run_ranks

REDUCED = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]
MOVED = [*REDUCED, torch.int16, torch.float8_e4m3fn]
SHAPES = [(), (1,), (7,), (3, 4), (2, 0)]


def reduced(stacked: Tensor, op: ReduceOp) -> Tensor:
    """All ranks' tensors, stacked, reduced by plain torch: bool as torch's own ``any`` and ``all``."""
    if stacked.dtype is torch.bool:
        return stacked.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX) else stacked.all(0)
    wide = stacked if stacked.is_complex() else stacked.double()
    result = {
        ReduceOp.SUM: lambda: wide.sum(0),
        ReduceOp.MAX: lambda: wide.amax(0),
        ReduceOp.MIN: lambda: wide.amin(0),
        ReduceOp.PRODUCT: lambda: wide.prod(0),
    }[op]()
    return result.to(stacked.dtype)


def everyone(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack([values(rank, shape, dtype) for rank in range(size)])


def compare(name: str, seen: Tensor, wanted: Tensor) -> None:
    if wanted.element_size() == 1:  # assert_close knows no float8
        seen, wanted = seen.view(torch.uint8), wanted.view(torch.uint8)
    torch.testing.assert_close(seen, wanted, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")


def all_reduce_all() -> int:
    comm = joined()
    checked = 0
    for dtype in REDUCED:
        for op in ReduceOp if not dtype.is_complex else [ReduceOp.SUM]:
            for shape in SHAPES:
                tensor = values(comm.rank, shape, dtype)
                name = f"{dtype}.{op.value}.{shape}"
                comm.all_reduce(tensor, op, name=name).wait()
                compare(name, tensor, reduced(everyone(comm.size, shape, dtype), op))
                checked += 1
    return checked


def move_all() -> None:
    comm = joined()
    for dtype in MOVED:
        for shape in SHAPES:
            mine, name = values(comm.rank, shape, dtype), f"{dtype}.{shape}"
            output = torch.zeros(comm.size, *shape, dtype=dtype)
            comm.all_gather(output, mine, name=f"gather.{name}").wait()
            compare(f"all_gather {name}", output, everyone(comm.size, shape, dtype))
            for root in range(comm.size):
                tensor = mine.clone()
                comm.broadcast(tensor, root, name=f"broadcast.{name}.{root}").wait()
                compare(f"broadcast {name}", tensor, values(root, shape, dtype))


def reduce_scatter_all() -> None:
    comm = joined()
    for dtype in REDUCED:
        for op in ReduceOp if not dtype.is_complex else [ReduceOp.SUM]:
            for shape in SHAPES:
                whole = (comm.size, *shape)
                output, name = torch.zeros(shape, dtype=dtype), f"{dtype}.{op.value}.{shape}"
                given = values(comm.rank, whole, dtype)
                before = given.clone()
                comm.reduce_scatter(output, given, op, name=name).wait()
                compare(f"reduce_scatter {name}", output, reduced(everyone(comm.size, whole, dtype), op)[comm.rank])
                compare(f"input of {name}", given, before)


def all_to_all_all() -> None:
    comm = joined()
    for dtype in MOVED:
        for columns in [(), (3,), (2, 2)]:
            # Rank s sends (s + r) % 3 rows to rank r: unequal, some of them none.
            sends = [[(source + target) % 3 for target in range(comm.size)] for source in range(comm.size)]
            inputs = [values(source, (sum(sends[source]), *columns), dtype) for source in range(comm.size)]
            blocks = [inputs[source].split(sends[source])[comm.rank] for source in range(comm.size)]
            wanted = torch.cat(blocks)
            output = torch.zeros_like(wanted)
            received = [sends[source][comm.rank] for source in range(comm.size)]
            comm.all_to_all(output, inputs[comm.rank], received, sends[comm.rank], name=f"{dtype}.{columns}").wait()
            compare(f"all_to_all {dtype} {columns}", output, wanted)


def objects() -> tuple[list[Any], Any]:
    comm = joined()
    gathered = comm.all_gather_object({"rank": comm.rank, "text": "x" * comm.rank * 1000}, name="facts")
    told = comm.broadcast_object(("from", comm.rank), comm.size - 1, name="told")
    comm.barrier()
    return [fact["rank"] * 10000 + len(fact["text"]) for fact in gathered], told


def many_in_flight() -> None:
    """Repeated names, and two communicators with the same names, waited for in another order than started."""
    comm = joined()
    twin = comm.duplicate(name="twin")
    works, tensors = [], []
    for step in range(3):
        for group in (comm, twin):
            tensors.append(torch.full((5,), float(step * 2 + (group is twin)) * (comm.rank + 1)))
            works.append(group.all_reduce(tensors[-1], name="same"))
    for work in reversed(works):
        work.wait()
        work.wait()  # harmless
        assert work.is_completed()
        assert work.name == "same"
    total = comm.size * (comm.size + 1) / 2
    for number, tensor in enumerate(tensors):
        compare(f"number {number}", tensor, torch.full((5,), number * total))


def sub_groups() -> list[Any]:
    comm = joined()
    seen: list[Any] = []
    for number, ranks in enumerate([[0], [2, 0], [1, 2], [0, 1, 2], [2, 0]]):
        group = comm.new_group(ranks, name=f"part{number}")
        assert (group is None) == (comm.rank not in ranks)
        if group is not None:
            assert group.ranks == tuple(sorted(ranks))
            assert group.ranks[group.rank] == comm.rank
            seen.append(_sum_of_ranks(group))
            # A duplicate of a part, on ranks that are in unequally many groups by now.
            seen.append(_sum_of_ranks(group.duplicate(name="twin")))
            group.close()
    comm.barrier()
    return seen


def _sum_of_ranks(group: Communicator) -> float:
    tensor = torch.tensor([float(group.ranks[group.rank])])
    group.all_reduce(tensor, name="sum").wait()
    root = torch.tensor([float(group.ranks[group.rank])])
    group.broadcast(root, group.size - 1, name="last").wait()
    assert root.item() == group.ranks[-1]
    return tensor.item()


def refusals() -> list[str]:
    comm = joined()
    texts = []
    for call in (
        lambda: comm.broadcast(torch.zeros(1), comm.size, name="b"),
        lambda: comm.new_group([0, 0], name="g"),
        lambda: comm.new_group([comm.size], name="g"),
        lambda: comm.all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn), name="tiny"),
        lambda: comm.all_reduce(torch.zeros(2, dtype=torch.complex64), ReduceOp.MAX, name="c"),
        lambda: comm.all_reduce(torch.zeros(4, 4).t()[:2], name="transposed"),
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    comm.barrier()
    return texts


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("job", [move_all, reduce_scatter_all, all_to_all_all, many_in_flight])
def test_collective_equals_plain_torch(job: Any, size: int, launcher: str) -> None:
    run_ranks(job, size, launcher=launcher)


@pytest.mark.parametrize("launcher", BOTH)
@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_of_every_dtype_and_op(size: int, launcher: str) -> None:
    assert run_ranks(all_reduce_all, size, launcher=launcher) == [(9 * 4 + 1) * len(SHAPES)] * size


@pytest.mark.parametrize("launcher", BOTH)
def test_objects(launcher: str) -> None:
    assert run_ranks(objects, 3, launcher=launcher) == [([0, 11000, 22000], ("from", 2))] * 3


@pytest.mark.parametrize("launcher", BOTH)
def test_sub_groups_and_duplicates_of_them(launcher: str) -> None:
    first, second, third = run_ranks(sub_groups, 3, launcher=launcher)
    assert first == [0, 0, 2, 2, 3, 3, 2, 2]
    assert second == [3, 3, 3, 3]
    assert third == [2, 2, 3, 3, 3, 3, 2, 2]


@pytest.mark.parametrize("launcher", BOTH)
def test_bad_arguments_are_refused_with_a_way_out(launcher: str) -> None:
    for texts in run_ranks(refusals, 2, launcher=launcher):
        assert len(texts) == 6
        assert "root" in texts[0]
        assert "0 to 1" in texts[0]
        assert all("ranks" in text for text in texts[1:3])
        assert "'tiny'" in texts[3]
        assert "cast to" in texts[3]
        assert "SUM" in texts[4]
        assert "'transposed'" in texts[5]
        assert "contiguous" in texts[5]


def int16_reason() -> tuple[str | None, str | None]:
    comm = joined()
    return (
        comm.unsupported_reason(torch.int16, torch.device("cpu")),
        comm.unsupported_reason(torch.float32, torch.device("cpu")),
    )


def test_gloo_names_what_it_cannot_reduce() -> None:
    for int16, float32 in run_ranks(int16_reason, 2):
        assert int16 is not None
        assert "int32" in int16
        assert float32 is None


@pytest.mark.horovod
def test_horovod_carries_int16() -> None:
    assert run_ranks(int16_sum, 2, launcher="horovod") == [[3000, -3]] * 2


def int16_sum() -> list[int]:
    comm = joined()
    tensor = torch.tensor([1000, -1], dtype=torch.int16) * (comm.rank + 1)
    comm.all_reduce(tensor, name="short").wait()
    return tensor.tolist()


def part_of_a_part() -> str:
    comm = joined()
    part = comm.new_group([0, 1], name="part")
    text = ""
    if part is not None:
        with pytest.raises(ValueError, match="communicator of all ranks") as caught:
            part.new_group([0], name="less")
        text = str(caught.value)
    comm.barrier()
    return text


@pytest.mark.horovod
def test_horovod_refuses_a_new_part_of_a_part() -> None:
    assert all(
        "process sets" in text or "groups" in text for text in run_ranks(part_of_a_part, 3, launcher="horovod")[:2]
    )


def names_in_profile() -> list[str]:
    comm = joined()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        comm.all_reduce(torch.ones(3), name="bucket 7").wait()
        comm.broadcast(torch.ones(3), 0, name="state").wait()
    return [event.key for event in profile.key_averages()]


@pytest.mark.parametrize("launcher", BOTH)
def test_collectives_are_named_in_a_profile(launcher: str) -> None:
    for names in run_ranks(names_in_profile, 2, launcher=launcher):
        assert {"crossover::bucket 7", "crossover::state"} <= set(names)


def group_of_the_script() -> tuple[tuple[int, ...], float, str]:
    joined()
    import torch.distributed as dist

    group = dist.new_group([0, 2])
    if runtime.rank() == 1:
        with pytest.raises(ValueError, match="process_group"):
            runtime.communicator_of(group)
        return (), 0.0, ""
    part = runtime.communicator_of(group)
    assert runtime.communicator_of(dist.group.WORLD) is runtime.context().communicator
    return part.ranks, _sum_of_ranks(part), part.backend


def test_process_groups_of_the_script_are_wrapped() -> None:
    assert run_ranks(group_of_the_script, 3) == [((0, 2), 2.0, "gloo"), ((), 0.0, ""), ((0, 2), 2.0, "gloo")]
