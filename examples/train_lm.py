"""Trains a small GPT-like language model on Python source code with Horovod.

The text is Python's own standard library, read as bytes, so nothing is downloaded. Every rank
draws its own random windows from the training files. Gradients are clipped after they were
averaged, which takes ``optimizer.synchronize()`` and ``optimizer.skip_synchronize()``.

    horovodrun -np 2 --gloo python examples/train_lm.py
"""

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

VOCABULARY = 256  # bytes
HELD_OUT_EVERY = 10  # every tenth file is kept for the evaluation


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level transformer on the standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--epochs", type=int, default=6, help="number of evaluations")
    add("--steps-per-epoch", type=int, default=100, help="optimizer steps between evaluations")
    add("--batch-size", type=int, default=8, help="windows per rank and step")
    add("--context", type=int, default=64, help="bytes in a window")
    add("--lr", type=float, default=1.5e-3, help="peak rate of one rank, times sqrt(ranks)")
    add("--warmup", type=int, default=40, help="steps until the learning rate peaks")
    add("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    add("--clip", type=float, default=1.0, help="largest norm of the averaged gradient")
    add("--width", type=int, default=128, help="size of a byte's hidden state")
    add("--depth", type=int, default=3, help="number of transformer blocks")
    add("--heads", type=int, default=4, help="attention heads, a divisor of the width")
    add("--autocast", action="store_true", help="compute in bfloat16 where torch.autocast does")
    add("--max-mb", type=float, default=4.0, help="stop reading sources after this many MB")
    add("--seed", type=int, default=1, help="seed of model and windows")
    return parser.parse_args()


def set_up(seed: int) -> torch.device:
    """Joins the Horovod job, seeds torch and returns the device of this rank."""
    hvd.init()
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        number = hvd.local_rank() % torch.cuda.device_count()  # ranks may share a device
        torch.cuda.set_device(number)
        return torch.device("cuda", number)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the ranks of a host share its cores
    return torch.device("cpu")


def load_text(max_bytes: int) -> tuple[Tensor, Tensor]:
    """Reads the top-level modules of the standard library in the order of their names.

    Returns:
        Training and held-out text, each a vector of byte values.
    """
    train, held_out = bytearray(), bytearray()
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        text = held_out if number % HELD_OUT_EVERY == 0 else train
        text += path.read_bytes()
        if len(train) + len(held_out) >= max_bytes:
            break
    return torch.tensor(train, dtype=torch.uint8), torch.tensor(held_out, dtype=torch.uint8)


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps hidden states ``n x context x width`` to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return x


class LanguageModel(nn.Module):
    """Predicts each next byte of a window; input and output share the embedding."""

    def __init__(self, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        """Maps windows ``n x (context + 1)`` of bytes to the mean loss in nats per byte."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.norm(self.blocks(self.token(inputs) + self.position(places)))
        logits = hidden @ self.token.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_starts(last: int, args: argparse.Namespace) -> DataLoader[int]:
    """Gives places in a text, other ones on each rank, for the steps of an epoch."""
    generator = torch.Generator().manual_seed(args.seed * hvd.size() + hvd.rank())
    count = args.steps_per_epoch * args.batch_size
    sampler = RandomSampler(range(last), replacement=True, num_samples=count, generator=generator)
    return DataLoader(range(last), args.batch_size, sampler=sampler)  # type: ignore[arg-type]


def windows_at(text: Tensor, starts: Tensor, context: int, device: torch.device) -> Tensor:
    """Cuts the windows ``n x (context + 1)`` that begin at ``starts`` out of a text."""
    return text[starts.unsqueeze(1) + torch.arange(context + 1)].long().to(device)


@torch.no_grad()
def bits_per_byte(model: nn.Module, text: Tensor, context: int, device: torch.device) -> float:
    """Evaluates 128 windows spread evenly over the text, shared out among the ranks."""
    model.eval()
    starts = torch.linspace(0, len(text) - context - 1, 128).long()[hvd.rank() :: hvd.size()]
    loss = model(windows_at(text, starts, context, device)) * len(starts)
    model.train()
    return float(hvd.allreduce(loss, name="held_out_loss", op=hvd.Sum)) / 128 / math.log(2)


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW which decays matrices, but neither biases nor norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr * math.sqrt(hvd.size()), betas=(0.9, 0.95))


def rate_factor(step: int, warmup: int, steps: int) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def main() -> None:
    """Trains and reports once per epoch."""
    args = parse_args()
    device = set_up(args.seed)
    train_text, held_out = load_text(int(args.max_mb * 1e6))
    model = LanguageModel(args.context, args.width, args.depth, args.heads).to(device)
    optimizer = make_optimizer(model, args)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    steps = args.epochs * args.steps_per_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, args.warmup, steps)
    )
    loader = random_starts(len(train_text) - args.context, args)
    for epoch in range(1, args.epochs + 1):
        start = time.perf_counter()
        for starts in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=args.autocast):
                loss = model(windows_at(train_text, starts, args.context, device))
            loss.backward()
            optimizer.synchronize()  # clip the average, not each rank's own gradient
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            with optimizer.skip_synchronize():
                optimizer.step()
            scheduler.step()
        seconds = time.perf_counter() - start
        bits = bits_per_byte(model, held_out, args.context, device)
        if hvd.rank() == 0:
            speed = args.steps_per_epoch * args.batch_size * args.context * hvd.size() / seconds
            print(
                f"epoch {epoch:3d}  held-out {bits:.3f} bits/byte  {speed:7.0f} bytes/s", flush=True
            )


if __name__ == "__main__":
    main()
