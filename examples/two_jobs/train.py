"""One of several trainings that share their devices: a plain script, and one argument more.

Two ranks:   torchrun --standalone --nproc-per-node 2 examples/two_jobs/train.py --job a
Horovod:     horovodrun -np 2 -H localhost:2 python examples/two_jobs/train.py --job a
Start it again as --job b in another terminal, and watch both with: crossover top

A fully connected network learns the 1,797 handwritten digits that come with scikit-learn; nothing is downloaded.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import crossover as xo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--job", help="name of this job among those that share the device; without: take no turns")
parser.add_argument("--weight", type=float, default=1.0)  # share of the device against other jobs
parser.add_argument("--priority", type=int, default=0)  # class; a higher one goes first
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=128)  # images a step on each rank; more is more computing
parser.add_argument("--width", type=int, default=1024)  # of the seven hidden layers; more is more communication
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

xo.init()
gpus = torch.cuda.device_count()
device = torch.device("cuda", xo.local_rank() % gpus) if gpus else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
else:  # a core is the device: the ranks of different jobs that have the same local rank share it
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[xo.local_rank() % len(cores)]})
torch.manual_seed(args.seed)

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, kept = order[:360], order[360:]
train_set = TensorDataset(images[kept], labels[kept])
sampler = DistributedSampler(train_set, num_replicas=xo.size(), rank=xo.rank(), seed=args.seed)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)

layers = [torch.nn.Linear(64, args.width), torch.nn.ReLU()]
for _ in range(6):
    layers += [torch.nn.Linear(args.width, args.width), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.Linear(args.width, 10)).to(device)
optimizer = xo.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
    named_parameters=model.named_parameters(),
    # The same from outside, for any script: CROSSOVER_SHARING=timeshare:job=a
    sharing=xo.sync.TimeShare(args.job, args.weight, args.priority) if args.job else None,
)
xo.broadcast_parameters(model.state_dict(), root_rank=0)

began, steps = time.perf_counter(), 0
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.to(device)), target.to(device)).backward()
        optimizer.step()
        steps += 1
    model.eval()
    with torch.no_grad():  # each of these batches takes a turn of its own
        right = (model(images[held_out].to(device)).argmax(1).cpu() == labels[held_out]).float().mean()
    model.train()
    if xo.rank() == 0:
        rate = steps / (time.perf_counter() - began)
        print(
            f"job {args.job or '-'}: epoch {epoch + 1}/{args.epochs}, {right:.1%} right, {rate:.2f} steps/s", flush=True
        )
