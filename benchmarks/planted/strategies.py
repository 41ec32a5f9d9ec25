"""Strategies that are planted, twenty that should be as good and twenty that should not.

What they are by their final metrics is measured; the names say only what was intended.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from hvd_autosync.runtime import codecs
from hvd_autosync.search_space import Value


@dataclass(frozen=True)
class Planted:
    """A strategy with what is known of it.

    Attributes:
        knobs: Its knobs; the class ``large`` is all parameters.
        flaw: Of its codecs: ``forget`` what they leave out, ``tiny``: that, and a tenth of the
            ratio; ``clip``: scales of ``int8`` are a 16th, ``coarse``: it has three levels towards
            zero, ``scale``: what arrives is four times as large.
    """

    knobs: dict[str, Value]
    flaw: str = ""


def _large(codec: str, **more: Value) -> dict[str, Value]:
    return {"large_codec": codec, **{f"large_{name}": value for name, value in more.items()}}


_TINY = _large("topk", ratio=0.001)
GOOD = {
    "fp16": Planted(_large("fp16")),
    "fp16 in 3 buckets": Planted({"buckets": 3, **_large("fp16")}),
    "bf16": Planted(_large("bf16")),
    "bf16 in 4 slices": Planted(_large("bf16", slices=4)),
    "int8": Planted(_large("int8")),
    "int8 in 4 buckets": Planted({"buckets": 4, **_large("int8")}),
    "fp16 in 4 slices": Planted(_large("fp16", slices=4)),
    "PowerSGD 32": Planted(_large("powersgd", rank=32)),
    "PowerSGD 16": Planted(_large("powersgd", rank=16)),
    "PowerSGD 8": Planted(_large("powersgd", rank=8)),
    "PowerSGD 4": Planted(_large("powersgd", rank=4)),
    "top-k 25 %": Planted(_large("topk", ratio=0.25)),
    "top-k 15 %": Planted(_large("topk", ratio=0.15)),
    "top-k 10 %": Planted(_large("topk", ratio=0.1)),
    "top-k 5 %": Planted(_large("topk", ratio=0.05)),
    "H = 2": Planted({"local_steps": 2}),
    "H = 4": Planted({"local_steps": 4}),
    "H = 2, bf16": Planted({"local_steps": 2, **_large("bf16")}),
    "H = 2 from step 100": Planted({"local_steps": 2, "local_start": 100}),
    "H = 4 from step 100": Planted({"local_steps": 4, "local_start": 100}),
}
BAD = {
    "top-k 0.01 %, no feedback": Planted(_TINY, "tiny"),
    "top-k 0.1 %, no feedback": Planted(_TINY, "forget"),
    "top-k 0.5 %, no feedback": Planted(_large("topk", ratio=0.005), "forget"),
    "top-k 1 %, no feedback": Planted(_large("topk", ratio=0.01), "forget"),
    "top-k 0.1 %": Planted(_TINY),
    "PowerSGD 1, no feedback": Planted(_large("powersgd", rank=1), "forget"),
    "PowerSGD 2, no feedback": Planted(_large("powersgd", rank=2), "forget"),
    "PowerSGD 1": Planted(_large("powersgd", rank=1)),
    "int8 of clipped scales": Planted(_large("int8"), "clip"),
    "int8 of three levels, biased": Planted(_large("int8"), "coarse"),
    "int8 four times as large": Planted(_large("int8"), "scale"),
    "H = 16": Planted({"local_steps": 16}),
    "H = 32": Planted({"local_steps": 32}),
    "H = 64": Planted({"local_steps": 64}),
    "H = 250": Planted({"local_steps": 250}),
    "H = 500": Planted({"local_steps": 500}),
    "H = 500, top-k 0.1 %": Planted({"local_steps": 500, **_TINY}),
    "H = 16, top-k 0.01 %, no feedback": Planted({"local_steps": 16, **_TINY}, "tiny"),
    "H = 8, PowerSGD 1, no feedback": Planted(
        {"local_steps": 8, **_large("powersgd", rank=1)}, "forget"
    ),
    "H = 8, int8 of clipped scales": Planted({"local_steps": 8, **_large("int8")}, "clip"),
}
KINDS = {"good": GOOD, "bad": BAD}
#: One of each in turn, so that what is measured first tells of both.
ALL = dict(itertools.chain(*zip(GOOD.items(), BAD.items(), strict=True)))


@contextlib.contextmanager
def flawed(flaw: str) -> Iterator[None]:
    """Codecs have a flaw meanwhile."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in _patches(flaw):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _patches(flaw: str) -> list[tuple[type, str, Any]]:
    if flaw in ("forget", "tiny"):
        patches: list[tuple[type, str, Any]] = [
            (each, "__call__", _forgetting(each.__call__))
            for each in (codecs.TopK, codecs.PowerSGD)
        ]
        if flaw == "tiny":
            make = codecs.TopK.__init__

            def make_tiny(self: Any, size: int, like: Any, ranks: int, ratio: float) -> None:
                make(self, size, like, ranks, ratio / 10)

            patches.append((codecs.TopK, "__init__", make_tiny))
        return patches
    changes = {"clip": _clipped, "coarse": _coarse, "scale": _doubled}
    if flaw not in changes:
        return []
    decode = codecs.Integer.decode

    def decode_wrongly(self: Any, codes: torch.Tensor) -> torch.Tensor:
        return changes[flaw](decode(self, codes))

    return [(codecs.Integer, "decode", decode_wrongly)]


def _forgetting(call: Any) -> Any:
    def without(self: Any, *args: Any) -> Any:
        self._left_out.zero_()
        return call(self, *args)

    return without


def _blocks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = rows.view(len(rows), -1, codecs._BLOCK)
    return blocks, blocks.abs().amax(dim=2, keepdim=True)


def _clipped(rows: torch.Tensor) -> torch.Tensor:
    blocks, most = _blocks(rows)
    return blocks.clamp(-most / 16, most / 16).view_as(rows)


def _coarse(rows: torch.Tensor) -> torch.Tensor:
    blocks, most = _blocks(rows)
    return (torch.trunc(1.5 * blocks / most.clamp_min(1e-38)) * most).view_as(rows)


def _doubled(rows: torch.Tensor) -> torch.Tensor:  # both ways
    return rows * 2
