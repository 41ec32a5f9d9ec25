"""Encodes parts of optimizer states for other ranks, as JSON and raw memory, without pickle.

length of the header (8 bytes) | header (JSON) | memory of every tensor, in sequence
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_autosync.errors import AutosyncError

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Entry:
    """The state of a part of one parameter.

    Attributes:
        place: The parameter's place among those of the optimizer.
        begin: The part's first element of the parameter, flattened.
        state: Name -> tensor (of one dimension if it has a number for each element), number, or
            other JSON value.
    """

    place: int
    begin: int
    state: dict[str, Any]


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
        header.append((entry.place, entry.begin, values, tensors))
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
        raise ValueError(f"cannot decode optimizer states: {error}") from error
    return entries


def flat_state(state: Mapping[str, Any], part: torch.Tensor) -> dict[str, Any]:
    """A part's state as that of an :class:`Entry`.

    Args:
        state: Its state.
        part: The part; state tensors of its shape are flattened.
    """
    return {
        name: value.detach().reshape(-1).clone()
        if isinstance(value, torch.Tensor) and value.shape == part.shape
        else value
        for name, value in state.items()
    }


def put_together(
    entries: Iterable[Entry], parameters: Sequence[torch.nn.Parameter]
) -> dict[int, dict[str, Any]]:
    """Merge the states of parts: place of the parameter -> its whole state.

    Args:
        entries: Those of all ranks.
        parameters: Those of the optimizer.

    Raises:
        AutosyncError: Parts are missing.
    """
    states: dict[int, dict[str, Any]] = {}
    found: dict[tuple[int, str], int] = {}
    for entry in entries:
        whole = parameters[entry.place]
        state = states.setdefault(entry.place, {})
        for name, value in entry.state.items():
            if not (isinstance(value, torch.Tensor) and value.dim() == 1):
                state.setdefault(name, copy.deepcopy(value))
                continue
            if name not in state:
                state[name] = torch.empty(whole.shape, dtype=value.dtype, device=whole.device)
            end = entry.begin + value.numel()
            state[name].view(-1)[entry.begin : end].copy_(value)
            found[entry.place, name] = found.get((entry.place, name), 0) + value.numel()
    for (place, name), count in found.items():
        if count != parameters[place].numel():
            raise AutosyncError(
                f"only {count} of {parameters[place].numel()} elements of {name} are known, "
                "because ranks have taken different steps",
                hint="Save the optimizer on a rank that has taken all of them.",
            )
    return states


def take_states(optimizer: Any, states: Mapping[int, Mapping[str, Any]]) -> None:
    """Set states of an optimizer by the place of their parameter; others stay unchanged."""
    parameters = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    for place, state in states.items():
        parameter, group = parameters[place]
        # Fused and capturable optimizers keep step counts on the device.
        there = bool(group.get("fused") or group.get("capturable"))
        optimizer.state[parameter] = {
            name: value.to(parameter.device) if there and isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }


def _memory(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
