"""Optimizer states of parts of parameters, as JSON and raw memory for other ranks, without pickle.

length of the header (8 bytes) | header (JSON) | memory of every tensor, in sequence
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
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
        state: Name -> tensor, number, or other JSON value.
        by_element: Names of the tensors with one number for each element of the part, of one
            dimension.
    """

    place: int
    begin: int
    state: dict[str, Any]
    by_element: frozenset[str] = frozenset()


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Encode ``entries``."""
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
        header.append((entry.place, entry.begin, values, tensors, sorted(entry.by_element)))
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *memory])


def decode_entries(data: bytes) -> list[Entry]:
    """Decode what :func:`encode_entries` returned; tensors are on the CPU.

    Raises:
        ValueError: ``data`` is something else.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        position = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : position])
        entries = []
        for place, begin, values, tensors, by_element in header:
            state = dict(values)
            for name, dtype_name, shape in tensors:
                dtype = getattr(torch, dtype_name)
                count = int(np.prod(shape, dtype=np.int64))
                size = count * dtype.itemsize
                block = bytearray(data[position : position + size])
                if len(block) != size:
                    raise ValueError("memory is missing")
                # frombuffer takes no empty buffer
                nothing = torch.empty(0, device="cpu")
                tensor = torch.frombuffer(block, dtype=dtype) if count else nothing
                state[name] = tensor.to(dtype).view(shape)
                position += size
            entries.append(Entry(place, begin, state, frozenset(by_element)))
    except (struct.error, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"cannot decode optimizer states: {error}") from error
    return entries


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def take_states(optimizer: Any, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Set states of an optimizer by the place of their parameter; others stay unchanged.

    Tensors are on the device of their parameter afterwards, as after ``load_state_dict()``.
    """
    parameters = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    for place, state in states.items():
        parameter, group = parameters[place]
        # Step counts are on the host, except those of fused and capturable optimizers.
        there = bool(group.get("fused") or group.get("capturable"))
        optimizer.state[parameter] = {
            name: value.to(parameter.device)
            if isinstance(value, torch.Tensor) and (there or name != "step")
            else value
            for name, value in state.items()
        }


def _memory(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
