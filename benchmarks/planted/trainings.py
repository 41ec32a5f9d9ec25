"""Four trainings on real data, and one that has nothing to learn; each with its held-out loss."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_digits
import train_lm
import train_ncf

_CPU = torch.device("cpu")
#: Steps of a whole training: one pass, so that no round of local steps is cut short by its end.
STEPS = 600


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        model: The model, the same on all ranks.
        optimizer: Its optimizer, at the peak learning rate.
        batches: Those of this rank, for all steps.
        loss: The loss of a batch.
        held_out: The loss on data that it was not trained with, the same on all ranks; a
            collective.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: DataLoader[Any]
    loss: Callable[[Any], Tensor]
    held_out: Callable[[], float]


def _loader(data: TensorDataset, batch: int, seed: int) -> DataLoader[Any]:
    """Batches that each rank draws for itself."""
    dice = torch.Generator().manual_seed(seed * hvd.size() + hvd.rank())
    sampler = RandomSampler(data, True, STEPS * batch, dice)
    return DataLoader(data, batch, sampler=sampler)


@functools.cache
def _digits_data() -> tuple[TensorDataset, TensorDataset]:
    return train_digits.load_data(0.3, seed=1)  # one split: seeds differ in all else


def digits(seed: int) -> Training:
    """A small convolutional network with batch normalization on handwritten digits, by SGD."""
    torch.manual_seed(seed)
    train, test = _digits_data()
    batches = _loader(train, 8, seed)
    model = train_digits.DigitNet(8, 256)

    def loss(batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def held_out() -> float:
        model.eval()
        images, labels = test.tensors
        found = F.cross_entropy(model(images), labels)
        model.train()
        return _mean(found)

    optimizer = torch.optim.SGD(model.parameters(), 0.01 * hvd.size(), 0.9, weight_decay=5e-4)
    return Training(model, optimizer, batches, loss, held_out)


def random_labels(seed: int) -> Training:
    """The same network, with random labels for each batch: nothing can be learnt."""
    training = digits(seed)
    dice = torch.Generator().manual_seed(2 * seed + hvd.rank())

    def loss(batch: Any) -> Tensor:
        images, labels = batch
        drawn = torch.randint(train_digits.CLASSES, labels.shape, generator=dice)
        return F.cross_entropy(training.model(images), drawn)

    return replace(training, loss=loss)


@functools.cache
def _text() -> tuple[Tensor, Tensor]:
    return train_lm.load_text(2_000_000)


def _transformer(
    seed: int, *, width: int, depth: int, autocast: Callable[[], AbstractContextManager[Any]]
) -> Training:
    """A transformer on the bytes of Python's standard library, by AdamW."""
    torch.manual_seed(seed)
    context = 32
    args = Namespace(lr=2e-3, weight_decay=0.1, batch_size=4, steps_per_epoch=STEPS, seed=seed)
    train, held = _text()
    model = train_lm.LanguageModel(context, width, depth, 2)

    def loss(starts: Tensor) -> Tensor:
        with autocast():
            found: Tensor = model(train_lm.windows_at(train, starts, context, _CPU))
        return found

    def held_out() -> float:
        return float(train_lm.bits_per_byte(model, held, context, _CPU))

    optimizer = train_lm.make_optimizer(model, args)
    batches = train_lm.random_starts(len(train) - context, args)
    return Training(model, optimizer, batches, loss, held_out)


def lm(seed: int) -> Training:
    """A language model, in bits per byte."""
    return _transformer(seed, width=64, depth=2, autocast=nullcontext)


def autocast(seed: int) -> Training:
    """A wider one of one block under ``torch.autocast`` in bfloat16."""
    bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    return _transformer(seed, width=96, depth=1, autocast=bfloat16)


@functools.cache
def _interactions() -> train_ncf.Interactions:
    return train_ncf.load_data(1)


def ncf(seed: int) -> Training:
    """Neural collaborative filtering, nearly all of it embeddings, by Adam."""
    torch.manual_seed(seed)
    data = _interactions()
    batches = _loader(TensorDataset(data.train), 256, seed)
    model = train_ncf.NeuralFilter(data.users, data.items, 8, sparse=False)

    def loss(batch: Any) -> Tensor:
        return train_ncf.batch_loss(model, batch[0], data.items, 4)

    @torch.no_grad()
    def held_out() -> float:
        """Of each user's held-out item and four others."""
        items = data.candidates[:, :5]
        users = torch.arange(data.users).unsqueeze(1).expand_as(items)
        labels = (torch.arange(5) == 0).float().expand(len(items), 5)
        return _mean(F.binary_cross_entropy_with_logits(model(users, items), labels))

    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    torch.manual_seed(seed * hvd.size() + hvd.rank())  # ranks draw their own negatives
    return Training(model, optimizer, batches, loss, held_out)


def _mean(loss: Tensor) -> float:
    return float(hvd.allreduce(loss, name="held_out"))


TRAININGS = {
    "digits": digits,
    "lm": lm,
    "ncf": ncf,
    "autocast": autocast,
    "random labels": random_labels,
}
