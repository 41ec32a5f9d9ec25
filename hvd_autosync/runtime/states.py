"""Parts of optimizer states as bytes, for other ranks: numbers and plain memory, no pickles.

    length of the header (8 bytes) | header (JSON) | memory of every tensor, one after the other
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Entry:
    """The state of a part of one parameter.

    Attributes:
        place: The parameter's place among those of the optimizer.
        begin: The part's first element of the parameter, flattened.
        state: Name -> tensor (of one dimension if it has a number for each element), number, or
            other value that JSON knows.
    """

    place: int
    begin: int
    state: dict[str, Any]


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """``entries`` as bytes."""
    header: list[Any] = []
    memory: list[bytes] = []
    for entry in entries:
        values: dict[str, Any] = {}
        tensors: list[tuple[str, str, list[int]]] = []
        for name, value in entry.state.items():
            if isinstance(value, torch.Tensor):
                tensors.append((name, str(value.dtype).removeprefix("torch."), list(value.shape)))
                memory.append(_memory(value))
            else:
                values[name] = value
        header.append((entry.place, entry.begin, values, tensors))
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *memory])


def decode_entries(data: bytes) -> list[Entry]:
    """What :func:`encode_entries` was given; tensors are on the CPU.

    Raises:
        ValueError: ``data`` is something else.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        position = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : position])
        entries = []
        for place, begin, values, tensors in header:
            state = dict(values)
            for name, dtype_name, shape in tensors:
                dtype = getattr(torch, dtype_name)
                count = int(np.prod(shape, dtype=np.int64))
                size = count * dtype.itemsize
                block = bytearray(data[position : position + size])
                if len(block) != size:
                    raise ValueError("memory is missing")
                # frombuffer takes no empty buffer
                tensor = torch.frombuffer(block, dtype=dtype) if count else torch.empty(0)
                state[name] = tensor.to(dtype).view(shape)
                position += size
            entries.append(Entry(place, begin, state))
    except (struct.error, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"no states of an optimizer: {error}") from error
    return entries


def _memory(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
