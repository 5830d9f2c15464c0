"""A job for ``horovodrun --host-discovery-script``: grows from two ranks to three, loses one, and goes on with two.

Run with a folder; hosts are found by what is in it. Each rank writes what it saw to a file there at its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import crossover as xo


def _adapt_to_another_number_of_ranks(folder: Path, state: Any) -> None:
    if state.batch == 2 and xo.rank() == 0:
        (folder / "more").touch()
    if xo.size() == 3 and state.batch >= state.grown + 2 and xo.rank() == 2 and not (folder / "killed").exists():
        (folder / "killed").touch()
        os._exit(5)


def main(folder: Path) -> None:
    xo.init()
    torch.manual_seed(xo.rank())
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = xo.elastic.ElasticSampler(range(600))
    sizes: list[int] = []

    @xo.elastic.run
    def train(state: Any) -> None:
        last = state.batch + 3 if (folder / "killed").exists() else 1000
        while state.batch < last:
            sizes.append(xo.size())
            if xo.size() == 3 and state.grown == 1000:
                state.grown = state.batch
            _adapt_to_another_number_of_ranks(folder, state)
            optimizer.zero_grad()
            model(torch.full((3, 2), xo.rank() + 1.0)).sum().backward()
            for number, parameter in enumerate(model.parameters()):
                xo.allreduce_(parameter.grad, name=f"gradient {number}")
            optimizer.step()
            sampler.record_batch(state.batch, 2)
            state.batch += 1
            time.sleep(0.2)
            state.commit()

    state = xo.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0, grown=1000)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(xo.size())])
    train(state)
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    everyone = xo.allgather_object([model.weight.tolist(), momentum.tolist(), state.batch, sampler.state_dict()])
    seen = {
        "sizes": sizes,
        "resets": resets,
        "equal": all(row == everyone[0] for row in everyone),
        "left": len(sampler),
    }
    (folder / f"rank{xo.rank()}.json").write_text(json.dumps(seen))
    xo.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
