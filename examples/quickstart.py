"""Train a small CNN on real handwritten digits with data parallelism: the shortest complete script.

Two ranks on this machine:   torchrun --standalone --nproc-per-node 2 examples/quickstart.py
The same under Horovod:      horovodrun -np 2 -H localhost:2 python examples/quickstart.py
One process, to compare:     python examples/quickstart.py
Train on from a checkpoint:  add --resume --epochs 60

The data are the 1,797 images of 8x8 pixels that come with scikit-learn; nothing is downloaded.
Written to --out: checkpoint.pt after every epoch, quickstart.png at the end.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import crossover as xo

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=25)  # passes over the training images
parser.add_argument("--batch-size", type=int, default=32)  # images a step on each rank
parser.add_argument("--lr", type=float, default=0.05)  # for one rank; multiplied by the number of ranks
parser.add_argument("--width", type=int, default=32)  # channels of the first layer; more is more computing
parser.add_argument("--seed", type=int, default=0)  # weights, order of images, and which are held out
parser.add_argument("--out", type=Path, default=Path("out/quickstart"))  # where results go
parser.add_argument("--resume", action="store_true")  # go on from the checkpoint in --out, if there is one
args = parser.parse_args()
if args.epochs < 1 or args.batch_size < 1 or args.width < 1:
    parser.error("--epochs, --batch-size and --width have to be at least 1")

xo.init()  # finds torchrun, horovodrun or neither
main_rank, size = xo.rank() == 0, xo.size()
gpus = torch.cuda.device_count()
device = torch.device("cuda", xo.local_rank() % gpus) if gpus else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
else:
    torch.set_num_threads(1)  # the ranks of a host share its cores, and a model this small gains nothing from more
torch.manual_seed(args.seed)

# Data: one image in five is held out, the same ones on every rank.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
held_out, kept = order[: len(order) // 5], order[len(order) // 5 :]
train_set = TensorDataset(images[kept], labels[kept])
sampler = DistributedSampler(train_set, num_replicas=size, rank=xo.rank(), seed=args.seed)
loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
mine = held_out[xo.rank() :: size]  # each held-out image is on one rank
test_images, test_labels = images[mine].to(device), labels[mine].to(device)

model = torch.nn.Sequential(
    torch.nn.Conv2d(1, args.width, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.Conv2d(args.width, 2 * args.width, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(2 * args.width * 4 * 4, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * size, momentum=0.9, weight_decay=1e-4)
peak_lr = optimizer.param_groups[0]["lr"]

checkpoint_path = args.out / "checkpoint.pt"
first_epoch = 0
history: list[dict[str, float]] = []  # one entry an epoch; kept on rank 0
if main_rank:
    args.out.mkdir(parents=True, exist_ok=True)
    if args.resume and checkpoint_path.exists():
        checkpoint = torch.load(checkpoint_path, map_location=device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        history = checkpoint["history"]
        first_epoch = len(history)

# Crossover: the optimizer averages gradients over the ranks; all ranks start from what rank 0 has.
optimizer = xo.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
xo.broadcast_parameters(model.state_dict(), root_rank=0)
xo.broadcast_optimizer_state(optimizer, root_rank=0)
first_epoch = xo.broadcast_object(first_epoch, root_rank=0)
recorder = xo.telemetry.active()  # a record a step: time, bytes, communication waited for and hidden
if recorder is None:  # else the environment asked for it (CROSSOVER_TIMELINE, CROSSOVER_RECORDS, ...)
    recorder = xo.telemetry.start(rank=xo.rank())


def learning_rate(epoch: int) -> float:
    """Rises over three epochs, then falls along a cosine. A function of the epoch alone, so resuming needs no more."""
    return peak_lr * min((epoch + 1) / 3, 0.5 * (1 + math.cos(math.pi * epoch / args.epochs)))


@torch.no_grad()
def evaluate() -> tuple[float, float]:
    """Accuracy and mean loss on the held-out images, over all ranks. Collective."""
    model.eval()
    logits = model(test_images)
    correct = (logits.argmax(dim=1) == test_labels).sum().double()
    loss = F.cross_entropy(logits, test_labels, reduction="sum").double()
    sums = torch.stack([correct, loss, torch.tensor(len(test_labels), dtype=torch.float64, device=device)])
    correct, loss, count = xo.allreduce(sums, name="evaluate", op=xo.Sum).tolist()
    return correct / count, loss / count


def save() -> None:
    """Rank 0: write the checkpoint so that a kill leaves the old one or the new one, never half of one."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    torch.save(state, checkpoint_path.with_suffix(".tmp"))
    os.replace(checkpoint_path.with_suffix(".tmp"), checkpoint_path)


def plot(path: Path) -> None:
    """Rank 0: accuracy, loss, and where the time of a step went, by epoch."""
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot as plt

    epochs = range(1, len(history) + 1)
    column = {key: [entry[key] for entry in history] for key in history[0]}
    computing, exposed, hidden = (
        [1e3 * seconds for seconds in column[key]] for key in ("computing_s", "exposed_s", "hidden_s")
    )
    blue, orange, grey = "#0072b2", "#e69f00", "#444444"
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.plot(epochs, [100 * value for value in column["accuracy"]], color=blue)
    left.set(title=f"Test accuracy: {column['accuracy'][-1]:.1%} at the end", ylabel="% of the held-out images")
    middle.semilogy(epochs, column["train_loss"], color=grey, label="training")
    middle.semilogy(epochs, column["test_loss"], color=blue, label="held out")
    middle.set(title="Loss", ylabel="cross-entropy")
    right.bar(epochs, computing, color=blue, label="computing")
    right.bar(epochs, exposed, bottom=computing, color=orange, label="waiting for other ranks (exposed)")
    right.plot(epochs, hidden, color=grey, marker=".", label="communication under computing (hidden)")
    right.set(title="Where a step's time goes (rank 0)", ylabel="ms, median of the epoch's steps")
    right.set_ylim(top=1.45 * max(map(sum, zip(computing, exposed, strict=True))) or None)
    for axes in (left, middle, right):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    middle.legend(frameon=False)
    right.legend(frameon=False, loc="upper left", fontsize="small")
    figure.suptitle(f"Crossover quickstart: digits, {size} rank(s), {device.type}")
    figure.savefig(path, dpi=120)


say = tqdm.write if main_rank else lambda line: None  # rank 0 alone talks; a bar only where there is a terminal
bar = tqdm(
    total=args.epochs * len(loader),
    initial=first_epoch * len(loader),
    unit="step",
    disable=not (main_rank and sys.stderr.isatty()),
)
say(f"{size} rank(s) on {device.type}, {len(train_set)} training images, {len(held_out)} held out")

for epoch in range(first_epoch, args.epochs):
    sampler.set_epoch(epoch)  # a new order, the same on every rank
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(epoch)
    model.train()
    loss_sum = torch.zeros((), device=device)
    for batch, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.to(device)), target.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the averaged gradients
        optimizer.step()
        loss_sum += loss.detach()
        bar.update()
    train_loss = xo.allreduce(loss_sum / len(loader), name="train_loss").item()
    accuracy, test_loss = evaluate()
    if main_rank:
        steps = xo.telemetry.summarise(list(recorder)[-len(loader) :])
        history.append(
            {
                "train_loss": train_loss,
                "test_loss": test_loss,
                "accuracy": accuracy,
                "computing_s": steps.median_busy_s or steps.median_step_s or 0.0,
                "exposed_s": steps.median_exposed_s or 0.0,
                "hidden_s": steps.total_hidden_s / max(steps.steps, 1),
            }
        )
        save()
    say(f"epoch {epoch + 1:3d}/{args.epochs}  loss {train_loss:6.4f}  test accuracy {accuracy:7.2%}")
bar.close()
accuracy, _ = evaluate()

total = recorder.summary()
xo.shutdown()
if not main_rank:
    sys.exit()

# Rank 0 alone from here on.
print(f"\ntest accuracy           {accuracy:.2%} of {len(held_out)} images, evaluated over {size} rank(s)")
if total.steps:
    print(f"median step             {1e3 * (total.median_step_s or 0):.2f} ms in {total.steps} steps")
    if total.seen:
        print(f"communication exposed   {1e3 * (total.median_exposed_s or 0):.2f} ms a step (waited for; median)")
        hidden_ms = 1e3 * total.total_hidden_s / total.steps
        print(f"communication hidden    {hidden_ms:.2f} ms a step (under computing; mean)")
    else:
        print("communication           not timed: the device waits for it, and not the host")
    print(f"sent                    {total.bytes_sent / total.steps / 1e6:.2f} MB a step")
plot(args.out / "quickstart.png")
print(f"checkpoint              {checkpoint_path}")
print(f"plot                    {args.out / 'quickstart.png'}")
