"""Finds, on a sample, the form in which the bits of float32 numbers take the fewest bytes.

Gradients hold less than their 32 bits. Under autocast most elements are numbers of 16 bits; the
gradients of dead units and of untouched rows are zeros; and exponents are few, so that the upper
bytes repeat. A sample shows which of that pays, at a cost that does not grow with the gradient:
0.2 to 0.6 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard

#: Bit patterns of float32 numbers.
Bits: TypeAlias = npt.NDArray[np.uint32]
#: What stands for an element: its 32 bits, their upper half, or the bits of an equal float16.
Words: TypeAlias = Literal["whole", "bfloat16", "float16"]

#: Elements of the sample, in this many blocks that are spread evenly.
_SAMPLE, _BLOCKS = 16_384, 32
#: Bytes of an exception: its place, and its lower half or all of it.
_EXCEPTION_BYTES = {"bfloat16": 6, "float16": 8}
#: A form pays if it has at most this share of the bytes. Copies would eat up less.
PAYS = 0.95
#: Above this share of upper bytes, their entropy coding is not worth its time.
_PLANE_PAYS = 0.8


@dataclass(frozen=True)
class Form:
    """What a code leaves out; nothing by default: the bits as they are.

    Attributes:
        zeros: Zeros, except for one bit each.
        words: ``bfloat16``: lower halves that are zero; ``float16``: whatever an equal number of
            16 bits does without. Elements that do not fit are exceptions.
        planes: What entropy coding saves in the plane of the words' upper bytes.
    """

    zeros: bool = False
    words: Words = "whole"
    planes: bool = False


AS_IS = Form()


@dataclass(frozen=True)
class FactorBytes:
    """Bytes of a layer's factors.

    Attributes:
        whole: Their bytes.
        coded: Expected bytes of their codes.
    """

    whole: int = 0
    coded: float = 0.0

    def __add__(self, other: FactorBytes) -> FactorBytes:
        return FactorBytes(self.whole + other.whole, self.coded + other.coded)

    @property
    def coded_share(self) -> float:
        """Share of the bytes that codes have; 1 without any."""
        return self.coded / self.whole if self.whole else 1.0


def find_form(bits: Bits) -> tuple[Form, float]:
    """Return the form with the fewest bytes, and its expected share of the bytes.

    Args:
        bits: All elements, shape ``(n,)``; at most 16,384 of them are looked at.
    """
    sample = _sample(bits)
    if not len(sample):
        return AS_IS, 1.0
    there = sample != 0
    nonzero = sample[there]
    found = _forms(sample, zeros=False)
    if len(nonzero) < len(sample):
        kept, bitmap = len(nonzero) / len(sample), np.packbits(there)
        coded = len(packed(bitmap)) / len(bitmap)
        for form, share in _forms(nonzero, zeros=True).items():
            bits_each = min(coded, 1.0) if form.planes else 1.0
            found[form] = bits_each / 32 + kept * share
    form = min(found, key=found.__getitem__)
    return (form, found[form]) if found[form] <= PAYS else (AS_IS, 1.0)


def coded_share(gradient: torch.Tensor) -> tuple[float, float]:
    """Return the expected shares of the bytes of a gradient, and of the ranks' sum, when coded.

    A sum has the exponents of its summands, but all of its bits: a third of the gradient stands
    for it.

    Args:
        gradient: Dense, of any shape; types that do not travel as float32 have a share of 1.
    """
    if gradient.dtype not in (torch.float32, torch.bfloat16):
        return 1.0, 1.0
    chosen = sample_of(gradient)
    return find_form(bits_of(chosen))[1], find_form(bits_of(chosen / 3))[1]


def coded_bytes(tensor: torch.Tensor) -> float:
    """Return the expected bytes of a code of a tensor's memory, four bytes a number of float32.

    Args:
        tensor: Dense, of any type and shape.
    """
    own = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    numbers = own[: len(own) // 4 * 4].view(torch.float32)
    return len(own) * find_form(bits_of(sample_of(numbers)))[1]


def sample_of(tensor: torch.Tensor, size: int = _SAMPLE, blocks: int = _BLOCKS) -> torch.Tensor:
    """Return elements of a tensor as float32 numbers on the host, shape ``(n,)``.

    Args:
        tensor: Dense, of any shape.
        size: The most elements of the sample; all of a tensor that has fewer.
        blocks: In how many blocks, which are spread evenly.
    """
    flat = tensor.detach().reshape(-1)
    places = torch.from_numpy(_places(len(flat), size, blocks)).to(flat.device)
    return flat[places].to("cpu", torch.float32)


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the bit patterns of a contiguous float32 tensor on the host; they share its memory."""
    bits: Bits = tensor.detach().view(torch.int32).numpy().view(np.uint32)
    return bits


def float16_words(bits: Bits) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
    """Return the nearest float16 numbers, as bit patterns, and which elements do not equal them.

    NaN and infinities count as unequal: processors differ in what they make of NaN.
    """
    finite = bits & 0x7F800000 != 0x7F800000
    narrow = torch.from_numpy(bits.view(np.float32)).to(torch.float16)
    words: npt.NDArray[np.uint16] = narrow.view(torch.int16).numpy().view(np.uint16)
    return words, ~finite | (bits_of(narrow.to(torch.float32)) != bits)


def upper_bytes(words: npt.NDArray[np.uint32] | npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """Return the plane of the most significant bytes."""
    shifted = words >> np.array(8 * (words.itemsize - 1), words.dtype)
    plane: npt.NDArray[np.uint8] = shifted.astype(np.uint8)
    return plane


def packed(data: npt.NDArray[Any]) -> bytes:
    """Return ``data``, entropy-coded. Level 1 is the fastest that still codes literals."""
    return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(data).data)


def _forms(sample: Bits, *, zeros: bool) -> dict[Form, float]:
    """Return the shares of the bytes of ``sample`` itself in all forms that may pay."""
    if not len(sample):
        return {Form(zeros=zeros, planes=True): 0.0}
    unfit: dict[Words, float] = {"bfloat16": float(np.mean(sample & 0xFFFF != 0))}
    upper: dict[Words, npt.NDArray[np.uint8]] = {"bfloat16": upper_bytes(sample)}
    if unfit["bfloat16"] > 0.05:
        halves, bad = float16_words(sample)
        unfit["float16"], upper["float16"] = float(np.mean(bad)), upper_bytes(halves)
    shares: dict[Form, float] = {}
    for words, share in (("whole", 1.0), *((w, 0.5) for w in unfit)):
        share += unfit[words] * _EXCEPTION_BYTES[words] / 4 if words != "whole" else 0.0
        shares[Form(zeros, words)] = share
        if share <= 1:
            plane = upper["float16" if words == "float16" else "bfloat16"]
            coded = len(packed(plane)) / len(plane)
            if coded < _PLANE_PAYS:
                shares[Form(zeros, words, planes=True)] = share - (1 - coded) / 4
    return shares


def _sample(bits: Bits) -> Bits:
    chosen: Bits = bits[_places(len(bits), _SAMPLE, _BLOCKS)]
    return chosen


def _places(count: int, size: int, blocks: int) -> npt.NDArray[np.intp]:
    """Return the places of a sample among ``count`` elements; all if there are few."""
    if count <= size:
        return np.arange(count)
    each = size // blocks
    begins = np.linspace(0, count - each, blocks).astype(np.intp)
    return (begins[:, None] + np.arange(each)).reshape(-1)
