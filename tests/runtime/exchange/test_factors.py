"""Which layers are exchanged by factors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from torch import nn

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.factors import (
    FactorsBucket,
    Message,
    Status,
    agree_linear,
    decode_messages,
    encode_message,
)
from hvd_autosync.runtime.exchange.gathering import Gathering
from hvd_autosync.runtime.exchange.lossless import encode
from hvd_autosync.runtime.measure.repeated_bits import AS_IS, Form
from hvd_autosync.runtime.patches.linear import LinearPass, watch_linear

RANKS = 2


def chosen(rows: tuple[int, int]) -> list[list[int]]:
    """The layers that each rank chooses, by number, after a batch of so many rows on each."""

    def body() -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 64))
        numbers = {model[0].weight: 0, model[2].weight: 1}
        layers = watch_linear(numbers)
        model(torch.randn(rows[rank()], 8)).sum().backward()
        found = agree_linear(list(model.parameters()), layers, "here")
        return [numbers[layer.weight] for layer in found if layer.weight is not None]

    return ThreadRanks(RANKS, seed=0).run(body)


def test_layers_whose_factors_pay_on_rank_0_are_chosen() -> None:
    """Of 8 x 16 up to 5 rows of each rank (5.3), of 16 x 64 up to 12 (12.8)."""
    assert chosen((5, 5)) == [[0, 1]] * RANKS
    assert chosen((6, 5)) == [[1]] * RANKS
    assert chosen((12, 1)) == [[1]] * RANKS
    assert chosen((13, 1)) == [[]] * RANKS
    assert chosen((1, 13)) == [[0, 1]] * RANKS


def test_a_weight_may_lie_anywhere_in_other_memory() -> None:
    """As a part of one vector of all parameters, behind an odd number of elements."""

    def checksum(offset: int) -> int:
        memory = torch.arange(60.0)
        with torch.no_grad():
            memory[offset : offset + 12] = torch.linspace(-1, 1, 12)
        weight = nn.Parameter(memory[offset : offset + 12].view(3, 4))
        bucket = FactorsBucket(
            "w", watch_linear([weight])[weight], [weight], Scaling(), 0, Gathering(RANKS)
        )
        return bucket._checksum()

    assert checksum(1) == checksum(0) != 0


def message(
    rows: int, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """An encoded message of a layer of 96 x 40."""
    generator = torch.Generator().manual_seed(rows)
    inputs, gradients = (
        change(torch.randn(rows, columns, generator=generator)).to(dtype) for columns in (40, 96)
    )
    return Message(Status.SENT, (LinearPass(inputs, gradients),)).encode(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_coded_messages_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    special = torch.tensor([-0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
    odd = special.repeat(40 * 96)[: 3 * 96]
    messages = [
        message(33, torch.relu, dtype),
        Message(Status.MORE).encode(torch.device("cpu")),
        message(3, lambda t: odd[: t.numel()].view(t.shape), dtype),
        message(1, torch.zeros_like, dtype),
    ]
    codes = [encode_message(each) for each in messages]
    coded, whole = torch.cat(codes), torch.cat(messages)
    assert torch.equal(decode_messages(coded, {}), whole)
    for place, own in enumerate(messages):  # what is known is not decoded
        other = torch.zeros_like(own)
        assert torch.equal(decode_messages(coded, {place: own}), whole)
        assert not torch.equal(decode_messages(coded, {place: other}), whole)
    assert len(codes[0]) < 0.8 * len(messages[0])


@pytest.mark.parametrize("form", [None, AS_IS, Form(zeros=True), Form(words="bfloat16")])
def test_a_code_is_longer_by_no_more_than_its_header(form: Form | None) -> None:
    """Also in a form that no longer fits: exceptions would take more than the bits as they are."""
    random = message(50, lambda t: t)
    code = encode_message(random, form)
    assert len(code) <= len(random) + 64
    assert torch.equal(decode_messages(torch.cat([code, code]), {}), torch.cat([random, random]))


def test_lengths_of_codes_repeat() -> None:
    def batch(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        inputs, gradients = (torch.randn(64, n, generator=generator) for n in (40, 96))
        factors = LinearPass(torch.relu(inputs), torch.relu(gradients))
        return Message(Status.SENT, (factors,)).encode(torch.device("cpu"))

    form = Form(zeros=True)
    unpadded = {len(encode(batch(seed).view(torch.float32), form)) for seed in range(20)}
    lengths = [0]
    for seed in range(20):
        code = encode_message(batch(seed), form, lengths[-1])
        assert torch.equal(decode_messages(torch.cat([code, code]), {}), batch(seed).repeat(2))
        lengths.append(len(code))
    changes = sum(one != other for one, other in itertools.pairwise(lengths))
    assert len(unpadded) > 15 and changes <= 3
    # What is far too long does not stay.
    assert len(encode_message(batch(0), form, 2 * lengths[-1])) <= 1.1 * lengths[-1]


def test_a_message_without_factors_is_no_evidence_for_codes() -> None:
    weight = nn.Parameter(torch.zeros(16, 8))
    layer = watch_linear([weight])[weight]
    bucket = FactorsBucket("w", layer, [weight], Scaling(), 0, Gathering(RANKS), lossless=True)
    backoff = bucket._coding
    assert backoff is not None
    for _ in range(2):
        backoff.tried(paid=False)
    empty = Message(Status.MORE).encode(torch.device("cpu"))
    assert torch.equal(decode_messages(bucket._coded(empty, backoff), {}), empty)
    assert bucket._form is None and backoff.skips()
