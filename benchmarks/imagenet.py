"""How many images a second does each system train? torchvision models on synthetic ImageNet batches.

    python -m benchmarks.imagenet --model resnet18 --image-size 64 --batch-size 16     starts 2 ranks on this host
    torchrun --standalone --nproc-per-node 8 benchmarks/imagenet.py --amp bf16 --channels-last        GPUs: 8 ranks
    horovodrun -np 8 -H localhost:8 python benchmarks/imagenet.py --amp bf16 --channels-last

Without a launcher, every system gets fresh ranks on loopback, each pinned to a core with one thread: for CPUs. Under a
launcher its ranks are used, and systems that it cannot carry are shown as such. Systems take turns, `--repeats` times,
in alternating order; a ratio is the median over the repeats, of images a second beside DDP's in the same repeat.

DDP is set up as its documentation recommends, with `gradient_as_bucket_view`; it does not broadcast BatchNorm's
buffers, as no other system here does. Data come from memory, so that loading is not measured.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, as launchers do
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import crossover as xo
from benchmarks import loopback, notes
from benchmarks.imagenet_systems import SYSTEMS, Options
from benchmarks.testbed import parse_rate

CLASSES = 1000
LAUNCHED = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
AMPS = {"none": None, "bf16": torch.bfloat16}


# -- on the ranks ------------------------------------------------------------------------------------------------------


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", xo.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    return device


def seconds_per_step(system: str, options: Options) -> float:
    """Time this rank's steps of one system from a common start. Collective.

    The clock runs over all steps together: a step's communication may end under the next step's computing.
    """
    import torchvision

    device = pick_device()
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    torch.manual_seed(0)
    model = torchvision.models.get_model(options.model, num_classes=CLASSES)
    model, optimizer = SYSTEMS[system].build(model.to(device, memory_format=memory_format), options)
    torch.manual_seed(xo.rank())
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randn(shape, device=device).contiguous(memory_format=memory_format)
    targets = torch.randint(CLASSES, (options.batch_size,), device=device)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            torch.autograd.backward(loss(model, images, targets, AMPS[options.amp]))
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    steps(options.warmup)
    xo.barrier()
    begin = time.perf_counter()
    steps(options.steps)
    seconds: float = (time.perf_counter() - begin) / options.steps
    return seconds


def loss(model: nn.Module, images: Tensor, targets: Tensor, precision: torch.dtype | None) -> Tensor:
    with torch.autocast(images.device.type, dtype=precision, enabled=precision is not None):
        logits = model(images)
    return nn.functional.cross_entropy(logits.float(), targets)


def worker(options: Options) -> None:
    """One rank of one system, started by :func:`on_loopback`."""
    xo.init()
    loopback.report(seconds_per_step(options.worker, options))
    xo.barrier()
    xo.shutdown()


# -- systems in turn ---------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Seconds a step in each repeat (of the slowest rank), or why there are none."""

    seconds: list[float] = field(default_factory=list)
    reason: str | None = None


Runner = Callable[[str], float]


class CannotRun(Exception):  # noqa: N818 - says what it is
    """A system cannot run here; the text is the reason."""


def in_turn(systems: list[str], repeats: int, run: Runner) -> dict[str, Measured]:
    """Measure each system ``repeats`` times, in alternating order; one that cannot run is not tried again."""
    results = {system: Measured() for system in systems}
    for repeat in range(repeats):
        for system in systems if repeat % 2 == 0 else reversed(systems):
            result = results[system]
            if result.reason is None:
                try:
                    result.seconds.append(run(system))
                except CannotRun as reason:
                    result.reason = str(reason)
    return results


def on_loopback(options: Options, arguments: list[str]) -> Runner:
    """Fresh ranks on this host for every measurement."""

    def run(system: str) -> float:
        launcher = SYSTEMS[system].needs or "torch"
        if launcher == "horovod":
            _check_horovod()
        try:
            ranks = loopback.run(
                "benchmarks.imagenet", [*arguments, "--worker", system], options.ranks, launcher, options.timeout
            )
        except subprocess.TimeoutExpired:
            raise CannotRun(f"did not end within {options.timeout:.0f} s (--timeout)") from None
        except RuntimeError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise CannotRun(f"failed: {lines[-1][:160]}") from error
        return float(max(ranks))

    return run


def on_given_ranks(options: Options) -> Runner:
    """The ranks of the launcher that started this process, one system after the other. Collective."""
    launcher = xo.runtime.context().launcher

    def run(system: str) -> float:
        needs = SYSTEMS[system].needs
        if needs not in (None, launcher):
            raise CannotRun(f"needs {'horovodrun' if needs == 'horovod' else 'torchrun and 2 ranks'}")
        mine = seconds_per_step(system, options)
        slowest = max(xo.allgather_object(mine))
        gc.collect()  # this system's model and hooks, before the next one's
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return float(slowest)

    return run


def _check_horovod() -> None:
    try:
        importlib.import_module("horovod.torch")
    except Exception as error:  # a build for another torch fails in several ways, none of them ImportError
        raise CannotRun(f"horovod.torch cannot be imported ({type(error).__name__})") from None


# -- the table ---------------------------------------------------------------------------------------------------------


def gradient_bytes(options: Options) -> int:
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.get_model(options.model, num_classes=CLASSES)
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def rows_of(results: dict[str, Measured], images: int) -> list[list[str]]:
    """Images a second (median, lowest and highest of the repeats), step time and ratio to DDP for each system."""
    rows = []
    for system, result in results.items():
        if not result.seconds or result.reason is not None:
            rows.append([SYSTEMS[system].label, "cannot run", "", "", ""])
            continue
        rates = [images / seconds for seconds in result.seconds]
        base = results.get("ddp", Measured()).seconds
        ratio = "" if not base else f"{statistics.median(b / s for s, b in zip(result.seconds, base, strict=True)):.3f}"
        step = 1e3 * statistics.median(result.seconds)
        spread = f"{min(rates):.1f} to {max(rates):.1f}"
        rows.append([SYSTEMS[system].label, f"{statistics.median(rates):.1f}", spread, f"{step:.1f}", ratio])
    return rows


def limit_row(results: dict[str, Measured], images: int, ranks: int, nbytes: int, link: str) -> list[str]:
    """The step that hides all communication it can: the longer of computing and a ring all-reduce on ``link``."""
    computing = results.get("plain", Measured()).seconds
    if not computing:
        return [f"limit at {link}: plain is missing", "", "", "", ""]
    communicating = 2 * (ranks - 1) / ranks * nbytes * 8 / parse_rate(link)
    step = max(statistics.median(computing), communicating)
    what = "computing" if step > communicating else "all-reduce"
    return [f"max(computing, all-reduce) at {link}: {what}", f"{images / step:.1f}", "", f"{1e3 * step:.1f}", ""]


def summary(results: dict[str, Measured], options: Options, ranks: int) -> tuple[str, dict[str, Any]]:
    """The table as text, and what it was made from."""
    images = ranks * options.batch_size
    nbytes = gradient_bytes(options)
    rows = rows_of(results, images)
    if options.link:
        rows.append(limit_row(results, images, ranks, nbytes, options.link))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    title = (
        f"{options.model}, {nbytes / 1e6:.1f} MB of gradients, {ranks} ranks x {options.batch_size} images of "
        f"{options.image_size} x {options.image_size}, {device}, {options.repeats} repeats of {options.steps} steps"
    )
    table = notes.table(["system", "images/s", "lowest to highest", "step, ms", "x DDP"], rows)
    reasons = [f"- {SYSTEMS[s].label} cannot run: {r.reason}" for s, r in results.items() if r.reason is not None]
    text = "\n\n".join([title, table, *(["\n".join(reasons)] if reasons else [])])
    data = {
        "options": {k: v if isinstance(v, int | float | str | list) else str(v) for k, v in vars(options).items()},
        "ranks": ranks,
        "device": device,
        "gradient_bytes": nbytes,
        "systems": {system: vars(result) for system, result in results.items()},
    }
    return text, data


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="resnet50", help="of torchvision.models (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images a step on each rank (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224, help="width and height (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps in a repeat (%(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=6, help="steps before them; Priority plans in the 4th (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2, help="without a launcher: how many to start (%(default)s)")
    parser.add_argument("--amp", choices=list(AMPS), default="none")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0, help="of DDP and Crossover (%(default)s)")
    parser.add_argument("--link", help="adds the limit for this rate between ranks, such as 500mbit or 10gbit")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds a measurement on loopback may take (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurements")
    parser.add_argument("--save", action="store_true", help="leave a dated note in benchmarks/results/")
    parser.add_argument(
        "--quick", action="store_true", help="a look: resnet18, 8 images of 64 x 64, 3 steps, 2 repeats"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.model, options.image_size, options.batch_size = "resnet18", 64, 8
        options.steps, options.repeats = 3, 2
    for name in ("batch_size", "image_size", "steps", "warmup", "repeats", "ranks"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: is {getattr(options, name)}; it has to be at least 1")
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # a build for another torch fails in several ways, not all of them ImportError
        parser.error(
            f"torchvision cannot be imported here ({error}); make imagenet-test sets up an environment that has it"
        )
    if options.link:
        parse_rate(options.link)
    return options


def main() -> None:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.worker:
        worker(options)
        return
    if any(name in os.environ for name in LAUNCHED):
        xo.init()
        ranks, speaks = xo.size(), xo.rank() == 0
        results = in_turn(options.systems, options.repeats, on_given_ranks(options))
        xo.barrier()
        xo.shutdown()
    else:
        ranks, speaks = options.ranks, True
        results = in_turn(options.systems, options.repeats, on_loopback(options, arguments))
    if not speaks:
        return
    text, data = summary(results, options, ranks)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.save:
        print(notes.save("imagenet", "Images a second on synthetic ImageNet batches", [text], data))


if __name__ == "__main__":
    main()
