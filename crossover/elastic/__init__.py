"""Training that goes on when ranks come and go, with the names of ``horovod.torch.elastic``.

    @xo.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 90):
            ...
            state.commit()

    state = xo.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    train(state)

What a lost rank means depends on the launcher:

* ``horovodrun --host-discovery-script ...`` keeps the processes that are left. They go back to the last ``commit()``,
  meet anew with the ranks that there are now, take rank 0's state and go on. A change of hosts without a loss loses
  nothing.
* ``torchrun --max-restarts N`` (with ``--nnodes MIN:MAX`` for a varying number of nodes) ends all processes and
  starts them again: what was in memory is gone, and communication cannot be set up anew within a process whose peers
  are gone. ``run`` therefore lets the error end the process. Set ``CROSSOVER_ELASTIC_DIR`` to a directory that all
  nodes see: ``commit()`` then also writes there, and the restarted job begins at the last commit.
* ``horovodrun`` without host discovery, or alone: ``run`` takes rank 0's state once and calls the function.
"""

from crossover.elastic.running import run
from crossover.elastic.sampler import ElasticSampler
from crossover.elastic.state import HostsUpdatedInterrupt, ObjectState, State
from crossover.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run"]
