"""The examples' models on random data, each asking something else of the network."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import synthetic_benchmark
import train_digits
import train_lm
import train_ncf

from hvd_autosync.search_space.exchange_plan import Classes


@dataclass(frozen=True)
class Workload:
    """One model.

    Attributes:
        make: The model and the losses of its steps, without end.
        classes: Its parameters by class, as a profile finds them.
    """

    make: Callable[[], tuple[nn.Module, Iterator[Tensor]]]
    classes: Classes


def _synthetic(
    model: str, width: int, depth: int, size: int
) -> Callable[[], tuple[nn.Module, Iterator[Tensor]]]:
    def make() -> tuple[nn.Module, Iterator[Tensor]]:
        torch.manual_seed(1)
        arguments = Namespace(model=model, width=width, depth=depth, size=size, batch_size=8)
        network, inputs, labels = synthetic_benchmark.make_job(arguments, torch.device("cpu"))

        def losses() -> Iterator[Tensor]:
            while True:
                yield F.cross_entropy(network(inputs), labels)

        return network, losses()

    return make


def _ncf(users: int, items: int, factors: int) -> tuple[nn.Module, Iterator[Tensor]]:
    torch.manual_seed(1)
    network = train_ncf.NeuralFilter(users, items, factors, sparse=False)
    generator = torch.Generator().manual_seed(hvd.rank())

    def losses() -> Iterator[Tensor]:
        while True:
            # Popular items are used more often, as in real data.
            chosen = torch.rand(512, generator=generator).pow(3).mul(items).long()
            logits = network(torch.randint(users, (512,), generator=generator), chosen)
            yield F.binary_cross_entropy_with_logits(logits, (chosen % 2).float())

    return network, losses()


def _digits() -> tuple[nn.Module, Iterator[Tensor]]:
    torch.manual_seed(1)
    network = train_digits.DigitNet(32, 256)
    images, labels = torch.rand(32, 1, 8, 8), torch.randint(train_digits.CLASSES, (32,))

    def losses() -> Iterator[Tensor]:
        while True:
            yield F.cross_entropy(network(images), labels)

    return network, losses()


def _lm() -> tuple[nn.Module, Iterator[Tensor]]:
    torch.manual_seed(1)
    network = train_lm.LanguageModel(context=32, width=64, depth=2, heads=2)
    windows = torch.randint(train_lm.VOCABULARY, (4, 33))

    def losses() -> Iterator[Tensor]:
        while True:
            yield network(windows)

    return network, losses()


MODELS = {
    "ncf": Workload(
        lambda: _ncf(20_000, 10_000, 16), {"embedding": ("gmf_*", "mlp_user*", "mlp_item*")}
    ),
    "vgg": Workload(_synthetic("vgg", 12, 3, 16), {"large": ("*",)}),
    "resnet": Workload(_synthetic("resnet", 8, 15, 16), {}),
    "bert": Workload(_synthetic("bert", 96, 2, 16), {"large": ("*weight",)}),
    "lm": Workload(_lm, {"large": ("blocks.*weight",)}),
    "digits": Workload(_digits, {"large": ("classifier.*weight",)}),
}
