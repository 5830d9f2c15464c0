"""Train a small GPT on real English text with data parallelism, byte by byte.

Two ranks on this machine:  torchrun --standalone --nproc-per-node 2 examples/language_model/train.py
The same under Horovod:     horovodrun -np 2 -H localhost:2 python examples/language_model/train.py
Share only what matters:    add --gate selsync:0.3
One process, to compare:    python examples/language_model/train.py

The text is the reference of the Python language that every Python installation carries; --text FILE takes any other.
Written to --out: model.pt and history.json at the end.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import crossover as xo

COMPRESSIONS = {"none": xo.Compression.none, "fp16": xo.Compression.fp16, "bf16": xo.Compression.bf16}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", type=Path, nargs="+", metavar="FILE")  # instead of Python's reference
parser.add_argument("--steps", type=int, default=600)  # of the optimizer
parser.add_argument("--batch-size", type=int, default=16)  # windows a backward pass on each rank
parser.add_argument("--context", type=int, default=64)  # bytes in a window
parser.add_argument("--width", type=int, default=128)  # of the model; a multiple of --heads
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-3)  # at its highest, after a twentieth of the steps
parser.add_argument("--clip", type=float, default=1.0)  # the gradient's norm; 0 leaves it
parser.add_argument("--eval-every", type=int, default=100)  # steps
parser.add_argument("--sample", type=int, default=200)  # bytes of text to write at the end
parser.add_argument("--seed", type=int, default=0)  # weights, order of windows, sample
parser.add_argument("--out", type=Path, default=Path("out/language_model"))
crossover = parser.add_argument_group("crossover", "CROSSOVER_* variables work too")
crossover.add_argument("--schedule")  # when gradients travel: overlapped, priority, ...
crossover.add_argument("--gate")  # which steps are shared: selsync:DELTA, periodic:EVERY, ...
crossover.add_argument("--sharing")  # of a device with other jobs: timeshare:job=NAME
crossover.add_argument("--compression", choices=COMPRESSIONS, default="none")  # how gradients travel
crossover.add_argument("--passes", type=int, default=1)  # backward passes added up for one step
crossover.add_argument("--bucket-cap-mb", type=float, default=25.0)
args = parser.parse_args()
for name in ("steps", "batch_size", "context", "heads", "layers", "eval_every", "passes"):
    if getattr(args, name) < 1:
        parser.error(f"--{name.replace('_', '-')}: is {getattr(args, name)}; it has to be at least 1")
if args.width < args.heads or args.width % args.heads:
    parser.error(f"--width: is {args.width}; it has to be a multiple of --heads, {args.heads}")
if args.clip and args.schedule not in (None, "overlapped"):
    parser.error(f"--schedule {args.schedule}: averages may arrive after step(), too late for clipping; add --clip 0")

xo.init()  # finds torchrun, horovodrun or neither
main_rank, size = xo.rank() == 0, xo.size()
gpus = torch.cuda.device_count()
device = torch.device("cuda", xo.local_rank() % gpus) if gpus else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
else:
    torch.set_num_threads(1)  # the ranks of a host share its cores
torch.manual_seed(args.seed)


def read_text() -> bytes:
    """The files one after the other, or Python's reference."""
    if args.text:
        return b"\n".join(path.read_bytes() for path in args.text)
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


# Data: windows of bytes, and the same a byte later; every tenth stretch of 16 windows is held out.
text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
count = (len(text) - 1) // args.context
inputs = text[: count * args.context].view(count, args.context)
targets = text[1 : count * args.context + 1].view(count, args.context)
held_out = torch.arange(count) // 16 % 10 == 9
train_set = TensorDataset(inputs[~held_out], targets[~held_out])
if len(train_set) // size < args.batch_size or held_out.sum() < size:
    parser.error(f"--text: {len(text)} bytes are too few for {size} rank(s) with batches of {args.batch_size} windows")
mine = held_out.nonzero().flatten()[xo.rank() :: size]  # each held-out window is on one rank
test_inputs, test_targets = inputs[mine].to(device), targets[mine].to(device)
# Every rank comes to see the whole text, and no two are in the same part of it: what local steps (--gate) need.
sampler = xo.selsync.SelSyncSampler(train_set, args.batch_size, seed=args.seed, chunks_per_epoch=1)
loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)


class Layer(nn.Module):
    """Causal self-attention and a feed-forward part, each normalised in front."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(args.width), nn.LayerNorm(args.width)
        self.attend, self.project = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        self.feed = nn.Sequential(
            nn.Linear(args.width, 4 * args.width), nn.GELU(), nn.Linear(4 * args.width, args.width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.attend(self.attention_norm(hidden)).view(batch, length, 3, args.heads, width // args.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.feed(self.feed_norm(hidden))


class GPT(nn.Module):
    """Logits of the next byte at every place; the outputs share the byte embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, args.width), nn.Embedding(args.context, args.width)
        self.layers = nn.Sequential(*(Layer() for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.bytes(numbers) + self.places(torch.arange(numbers.shape[1], device=numbers.device))
        return F.linear(self.norm(self.layers(hidden)), self.bytes.weight)


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
rise = max(1, args.steps // 20)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / rise, 0.5 * (1 + math.cos(math.pi * step / args.steps)))
)

# Crossover: the optimizer shares gradients (or with a gate, parameters); all ranks start from what rank 0 has.
gate = xo.selsync.gate_of(args.gate)
xo.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = xo.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=COMPRESSIONS[args.compression],
    backward_passes_per_step=args.passes,
    schedule=args.schedule,
    gate=gate,
    sharing=args.sharing,
    bucket_cap_mb=args.bucket_cap_mb,
)
recorder = xo.telemetry.active() or xo.telemetry.start(rank=xo.rank())


def loss_of(batch: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(batch).flatten(0, 1), target.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate() -> float:
    """Bits for each held-out byte, over all ranks, of the one model they have after a flush. Collective."""
    with optimizer.flushed():  # ranks differ between the shared steps of a gate
        model.eval()
        parts = zip(test_inputs.split(64), test_targets.split(64), strict=True)
        nats = sum((loss_of(*part, reduction="sum").double() for part in parts), start=torch.zeros((), device=device))
        model.train()
    sums = torch.stack([nats.double(), torch.tensor(float(test_targets.numel()), device=device).double()])
    total_nats, total_bytes = xo.allreduce(sums, name="evaluate", op=xo.Sum).tolist()
    return total_nats / total_bytes / math.log(2)


@torch.no_grad()
def write(length: int) -> str:
    """Text that the model continues by itself, on this rank alone."""
    generator = torch.Generator().manual_seed(args.seed)
    written = torch.tensor([[ord("\n")]], device=device)
    for _ in range(length):
        chances = model(written[:, -args.context :])[0, -1].softmax(dim=0).cpu()
        following = torch.multinomial(chances, 1, generator=generator).to(device)
        written = torch.cat([written, following[None]], dim=1)
    return bytes(written[0, 1:].tolist()).decode(errors="replace")


def batches():
    """This rank's batches without end."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


say = tqdm.write if main_rank else lambda line: None  # rank 0 alone talks; a bar only where there is a terminal
bar = tqdm(total=args.steps, unit="step", disable=not (main_rank and sys.stderr.isatty()))
parameters = sum(parameter.numel() for parameter in model.parameters())
say(f"{size} rank(s) on {device.type}, {parameters:,} parameters, {len(text):,} bytes of text, a tenth held out")

history = []
stream = batches()
for step in range(1, args.steps + 1):
    optimizer.zero_grad()
    for _ in range(args.passes):
        batch, target = next(stream)
        loss = loss_of(batch.to(device), target.to(device)) / args.passes
        loss.backward()
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)  # of the averages; with a gate, of this rank's
    optimizer.step()
    scheduler.step()
    bar.update()
    if step % args.eval_every == 0 or step == args.steps:
        history.append({"step": step, "bits_per_byte": evaluate()})
        shared = f"  LSSR {gate.lssr:.3f}" if gate and size > 1 else ""
        say(f"step {step:5d}/{args.steps}  {history[-1]['bits_per_byte']:.4f} bits a held-out byte{shared}")
bar.close()

optimizer.flush()  # all ranks have the one model now
total = recorder.summary()
xo.shutdown()
if not main_rank:
    sys.exit()

# Rank 0 alone from here on.
args.out.mkdir(parents=True, exist_ok=True)
torch.save(model.state_dict(), args.out / "model.pt")
result = {"ranks": size, "lssr": gate.lssr if gate else 0.0, "history": history}
(args.out / "history.json").write_text(json.dumps(result, indent=1) + "\n")
if total.steps:
    print(f"median step             {1e3 * (total.median_step_s or 0):.2f} ms in {total.steps} steps")
    if total.seen:
        print(f"communication exposed   {1e3 * (total.median_exposed_s or 0):.2f} ms a step (waited for; median)")
    print(f"sent                    {total.bytes_sent / total.steps / 1e6:.2f} MB a step")
if gate and size > 1:
    print(f"shared steps            {gate.shared_steps} of {gate.steps} (LSSR {gate.lssr:.3f})")
print(f"model and history       {args.out}")
if args.sample:
    print(f"\nit writes:\n{write(args.sample)}")
