"""Codes of float32 tensors, from which each bit comes back.

A code says itself what it holds. It has a header of eight 64-bit numbers and these sections, each
padded to eight bytes, on little-endian machines:

1. without the zeros: one bit for each element, 1 if it is not a zero (all bits 0: -0.0 is none);
2. with words of 16 bits: the places of the exceptions, as differences;
3. the exceptions' lower halves, or all of their 32 bits;
4. with planes: the upper bytes of the words, then the lower bytes; without: the words.

With planes, sections 1, 2 and the upper bytes are entropy-coded by Zstandard, if that is shorter.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from hvd_autosync.runtime.measure.repeated_bits import (
    AS_IS,
    PAYS,
    Bits,
    Form,
    Words,
    bits_of,
    find_form,
    float16_words,
    packed,
    sample_of,
    upper_bytes,
)

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Array: TypeAlias = npt.NDArray[Any]

_WORDS: tuple[Words, ...] = ("whole", "bfloat16", "float16")
_HEADER = np.dtype(np.int64)
HEADER_BYTES = 8 * _HEADER.itemsize
_ALIGNED = 8
#: Elements of the part of a tensor that is timed, and in how many blocks, and how often.
_TIMED, _TIMED_BLOCKS, _TIMES = 2**18, 4, 2


@dataclass(frozen=True)
class Header:
    """The header of a code.

    Attributes:
        form: What the code leaves out.
        elements: Elements of the tensor.
        values: Elements of which there is a word: all, or those that are not zeros.
        exceptions: Elements whose word is not enough.
        stored: Bytes of the sections that may be entropy-coded: bitmap, places, upper bytes.
        mark: A number of the sender's own.
    """

    form: Form
    elements: int
    values: int
    exceptions: int
    stored: tuple[int, int, int]
    mark: int = 0

    @property
    def sections(self) -> tuple[int, ...]:
        """Bytes of all sections, without padding."""
        form, bitmap, places, upper = self.form, *self.stored
        each = {"whole": 4, "bfloat16": 2, "float16": 2}[form.words]
        exception = {"whole": 0, "bfloat16": 2, "float16": 4}[form.words]
        planes = (upper, (each - 1) * self.values) if form.planes else (0, each * self.values)
        return (bitmap, places, exception * self.exceptions, *planes)

    @property
    def code_bytes(self) -> int:
        """Bytes of the whole code."""
        return HEADER_BYTES + sum(map(_padded, self.sections))


def encode(tensor: torch.Tensor, form: Form | None = None, mark: int = 0) -> torch.Tensor:
    """Return a code of ``tensor``, of type uint8 and shape ``(code bytes,)``, on the host.

    Args:
        tensor: Contiguous, of type float32 and shape ``(n,)``.
        form: What to leave out; ``None``: what pays, by a sample. If that turns out not to pay,
            the code has the bits as they are.
        mark: A number for the receivers (:func:`header_of`).
    """
    bits = bits_of(tensor.cpu())
    chosen = find_form(bits)[0] if form is None else form
    if len(bits) >= 2**32:
        chosen = AS_IS  # places have 32 bits
    code = _encode(bits, chosen, mark)
    if form is None and chosen != AS_IS and len(code) > HEADER_BYTES + PAYS * bits.nbytes:
        code = _encode(bits, AS_IS, mark)
    return torch.from_numpy(code)


def decode(code: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a code; it may share the code's memory.

    Args:
        code: Shape ``(code bytes,)``, on the host, from an address that is a multiple of eight.
    """
    raw: _Bytes = code.numpy()
    header = header_of(code)
    bitmap, places, exceptions, upper, words = _split(raw, header.sections)
    values = _words(header, upper, words)
    if header.exceptions:
        gaps = _unpacked(places, np.dtype(np.uint32), header.exceptions)
        where = np.cumsum(gaps, dtype=np.int64)
        if header.form.words == "bfloat16":
            values[where] |= exceptions.view(np.uint16)
        else:
            values[where] = exceptions.view(np.uint32)
    if header.form.zeros:
        packed_bits = _unpacked(bitmap, np.dtype(np.uint8), -(-header.elements // 8))
        there = np.unpackbits(packed_bits, count=header.elements).view(np.bool_)
        nonzero, values = values, np.zeros(header.elements, np.uint32)
        values[there] = nonzero
    return torch.from_numpy(values.view(np.float32))


def seconds_to_code(tensor: torch.Tensor) -> float:
    """Return the processor time in which this thread makes a code of ``tensor`` and decodes it.

    Blocks of it stand for a tensor of more than 262,144 elements, which takes a few milliseconds.

    Args:
        tensor: Dense, of any shape, of a type that float32 holds.
    """
    part = sample_of(tensor, _TIMED, _TIMED_BLOCKS)
    return min(_timed(part) for _ in range(_TIMES)) * tensor.numel() / max(len(part), 1)


def _timed(tensor: torch.Tensor) -> float:
    begin = time.thread_time()
    decode(encode(tensor))
    return time.thread_time() - begin


def header_of(code: torch.Tensor) -> Header:
    """Return the header of a code, which may be followed by anything."""
    flags, *counts = code[:HEADER_BYTES].numpy().view(_HEADER).tolist()
    form = Form(bool(flags & 1), _WORDS[flags >> 2], bool(flags & 2))
    elements, values, exceptions, bitmap, places, upper, mark = counts
    return Header(form, elements, values, exceptions, (bitmap, places, upper), mark)


def set_mark(code: torch.Tensor, mark: int) -> None:
    """Change the mark of a code."""
    code[:HEADER_BYTES].view(torch.int64)[-1] = mark


def split_codes(codes: torch.Tensor) -> list[torch.Tensor]:
    """Return the codes that were concatenated, in order.

    Args:
        codes: Shape ``(bytes,)``, on the host.
    """
    found, begin = [], 0
    while begin < len(codes):
        end = begin + header_of(codes[begin:]).code_bytes
        found.append(codes[begin:end])
        begin = end
    return found


def _encode(bits: Bits, form: Form, mark: int) -> _Bytes:
    bitmap: _Array = np.empty(0, np.uint8)
    values = bits
    if form.zeros:
        there = bits != 0
        bitmap, values = np.packbits(there), bits[there]
    words: _Array = values
    places: _Array = np.empty(0, np.uint32)
    exceptions: _Array = places
    if form.words == "bfloat16":
        halves = values.view(np.uint16)
        words = halves[1::2]
        at = np.flatnonzero((values & 0xFFFF) != 0)  # several times as fast as on integers
        places, exceptions = _gaps(at), halves[::2][at]
    elif form.words == "float16":
        words, bad = float16_words(values)
        at = np.flatnonzero(bad)
        places, exceptions = _gaps(at), values[at]
    upper: _Array = np.empty(0, np.uint8)
    if form.planes:
        wide = values if form.words in ("whole", "bfloat16") else words
        bitmap, places, upper = (_shorter(each) for each in (bitmap, places, upper_bytes(wide)))
    header = Header(
        form,
        len(bits),
        len(values),
        len(exceptions),
        (bitmap.nbytes, places.nbytes, upper.nbytes),
        mark,
    )
    code = np.empty(header.code_bytes, np.uint8)
    flags = form.zeros | form.planes << 1 | _WORDS.index(form.words) << 2
    counts = (header.elements, header.values, header.exceptions, *header.stored, mark)
    code[:HEADER_BYTES].view(_HEADER)[:] = (flags, *counts)
    *parts, last = _split(code, header.sections)
    for part, array in zip(parts, (bitmap, places, exceptions, upper), strict=True):
        part.view(array.dtype)[:] = array
    if not form.planes:
        last.view(words.dtype)[:] = words
    elif form.words == "whole":
        _put_lower_bytes(values, last)
    else:
        last[:] = words.astype(np.uint8)
    return code


def _words(header: Header, upper: _Bytes, words: _Bytes) -> Bits:
    """Return the values, before exceptions are put in."""
    form, count = header.form, header.values
    if not form.planes and form.words == "whole":
        whole: Bits = words.view(np.uint32)
        return whole
    if not form.planes:
        halves = words.view(np.uint16)
    else:
        # The byte below the upper one is the last one of what follows.
        halves = _unpacked(upper, np.dtype(np.uint8), count).astype(np.uint16)
        halves <<= 8
        halves |= words[-count:] if count else words
    if form.words == "float16":
        narrow = torch.from_numpy(halves.view(np.int16)).view(torch.float16)
        return bits_of(narrow.to(torch.float32))
    values: Bits = halves.astype(np.uint32)
    values <<= 16
    if form.words == "whole":
        values |= words[: 2 * count].view(np.uint16)
    return values


def _put_lower_bytes(values: Bits, into: _Bytes) -> None:
    """Write the lower halves of ``values``, then the bytes above them, without the upper bytes."""
    count = len(values)
    into[: 2 * count].view(np.uint16)[:] = values.view(np.uint16)[::2]
    into[2 * count :] = (values >> 16).astype(np.uint8)


def _gaps(places: npt.NDArray[np.intp]) -> npt.NDArray[np.uint32]:
    """Return the first place, and the differences of the others: neighbours repeat."""
    return np.diff(places, prepend=0).astype(np.uint32)


def _shorter(data: _Array) -> _Bytes:
    """Return ``data`` entropy-coded if that is shorter, else its own bytes."""
    own: _Bytes = np.ascontiguousarray(data).view(np.uint8)
    if not len(own):
        return own
    coded = packed(own)
    return np.frombuffer(coded, np.uint8) if len(coded) < len(own) else own


def _unpacked(stored: _Bytes, dtype: np.dtype[Any], count: int) -> _Array:
    """Return the ``count`` numbers of a section that may be entropy-coded."""
    size = count * dtype.itemsize
    if len(stored) == size:
        return stored.view(dtype)
    data = zstandard.ZstdDecompressor().decompress(stored.data, max_output_size=size)
    return np.frombuffer(data, dtype)


def _split(code: _Bytes, sections: tuple[int, ...]) -> list[_Bytes]:
    parts, begin = [], HEADER_BYTES
    for size in sections:
        parts.append(code[begin : begin + size])
        begin += _padded(size)
    return parts


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
