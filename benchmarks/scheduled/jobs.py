"""Two trainings on real data, with a cosine learning rate and an evaluation after each pass."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_digits
import train_lm

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        model: The model, the same on all ranks.
        optimizer: Its optimizer, at the peak learning rate.
        passes: How often its data are gone through.
        loader: A pass of this rank's data.
        begin_pass: Called with its number before each pass.
        loss: The loss of what the loader gives, whatever that is.
        quality: What the model is worth on held-out data, larger is better; a collective.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    passes: int
    loader: DataLoader[Any]
    begin_pass: Callable[[int], None]
    loss: Callable[[Any], Tensor]
    quality: Callable[[], float]


def digits(seed: int) -> Job:
    """A small convolutional network with batch normalization on handwritten digits, by SGD."""
    torch.manual_seed(seed)
    train, test = train_digits.load_data(0.3, seed=1)  # one split: seeds differ in all else
    sampler = DistributedSampler[int](train, hvd.size(), hvd.rank(), seed=seed)
    loader = DataLoader(train, 8, sampler=sampler, drop_last=True)
    model = train_digits.DigitNet(8, 512)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.02 * hvd.size(), momentum=0.9, weight_decay=5e-4
    )

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def quality() -> float:
        accuracy: float = train_digits.test(model, test, _CPU)
        model.train()
        return accuracy

    return Job(model, optimizer, 16, loader, sampler.set_epoch, loss, quality)


def text(seed: int) -> Job:
    """A small transformer on the bytes of Python's standard library, by AdamW."""
    torch.manual_seed(seed)
    args = Namespace(
        lr=3e-3, weight_decay=0.01, batch_size=8, steps_per_epoch=40, context=64, seed=seed
    )
    train, held_out = train_lm.load_text(2_000_000)
    model = train_lm.LanguageModel(args.context, 64, 2, 4)
    loader = train_lm.random_starts(len(train) - args.context, args)

    def loss(starts: Tensor) -> Tensor:
        found: Tensor = model(train_lm.windows_at(train, starts, args.context, _CPU))
        return found

    def quality() -> float:
        return -float(train_lm.bits_per_byte(model, held_out, args.context, _CPU))

    optimizer = train_lm.make_optimizer(model, args)
    return Job(model, optimizer, 12, loader, lambda _: None, loss, quality)


JOBS = {"digits": digits, "text": text}


def rate_factor(step: int, steps: int) -> float:
    """Share of the peak learning rate: 5 % of linear warm-up, then half a cosine to almost 0."""
    warmup = steps // 20
    if step < warmup:
        return (step + 1) / warmup
    return 1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
