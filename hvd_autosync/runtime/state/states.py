"""Optimizer states of parts of parameters, as JSON and raw memory for other ranks, without pickle.

length of the header (8 bytes) | header (JSON) | memory of every tensor, in sequence

States hold tensors, numbers, texts and ``None``, and lists, tuples and dictionaries of these. In
the header an object of JSON has one entry, which names what JSON lacks::

    {"tensor": [type, shape]}    {"tuple": [value, ...]}    {"dict": [[key, value], ...]}
"""

from __future__ import annotations

import copy
import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvd_autosync.errors import ConfigurationError

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Entry:
    """The state of a part of one parameter.

    Attributes:
        place: The parameter's place among those of the optimizer.
        begin: The part's first element of the parameter, flattened.
        state: Name -> tensor, or other value that can be sent.
        by_element: Names of the tensors with one number for each element of the part, of one
            dimension.
    """

    place: int
    begin: int
    state: dict[str, Any]
    by_element: frozenset[str] = frozenset()


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Encode ``entries``.

    Raises:
        ConfigurationError: A state holds a value of a type that cannot be sent; the message has its
            key.
    """
    header: list[Any] = []
    tensors: list[torch.Tensor] = []
    for entry in entries:
        state = _pack(entry.state, tensors)
        header.append((entry.place, entry.begin, state, sorted(entry.by_element)))
    text = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *map(_memory, tensors)])


def decode_entries(data: bytes) -> list[Entry]:
    """Decode what :func:`encode_entries` returned; tensors are on the CPU.

    Raises:
        ValueError: ``data`` is something else.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        position = _LENGTH.size + length
        header = json.loads(data[_LENGTH.size : position])

        def tensor(dtype_name: str, shape: list[int]) -> torch.Tensor:
            nonlocal position
            dtype = getattr(torch, dtype_name)
            count = int(np.prod(shape, dtype=np.int64))
            size = count * dtype.itemsize
            block = bytearray(data[position : position + size])
            if len(block) != size:
                raise ValueError("memory is missing")
            position += size
            # frombuffer takes no empty buffer
            nothing = torch.empty(0, device="cpu")
            flat = torch.frombuffer(block, dtype=dtype) if count else nothing
            return flat.to(dtype).view(shape)

        return [
            Entry(place, begin, _unpack(state, tensor), frozenset(by_element))
            for place, begin, state, by_element in header
        ]
    except (struct.error, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"cannot decode optimizer states: {error}") from error


def parameters_of(optimizer: Any) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def check_states(optimizer: Any) -> None:
    """Check that the states of an optimizer can be sent to other ranks; copies none.

    Raises:
        ConfigurationError: As of :func:`encode_entries`.
    """
    for parameter in parameters_of(optimizer):
        _pack(optimizer.state.get(parameter), [])


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
            name: to_device(value, parameter.device) if there or name != "step" else value
            for name, value in state.items()
        }


def to_device(value: Any, device: torch.device | str) -> Any:
    """Return a value of a state with all its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, (dict, list)):
        moved = copy.copy(value)  # of its type, whatever that is created from
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            moved[key] = to_device(each, device)
        return moved
    if isinstance(value, tuple):
        moved = [to_device(each, device) for each in value]
        if all(map(operator.is_, moved, value)):  # as in torch.Size, which cannot be made so
            return value
        return tuple.__new__(type(value), moved)
    return value


def _pack(value: Any, tensors: list[torch.Tensor], key: str = "") -> Any:
    """Return a value as JSON, and add its tensors to ``tensors``, in sequence.

    Args:
        value: A state, or a value of one.
        tensors: Those so far.
        key: Where the value is in its state, for messages.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if _is_plain(value):
        return value
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict) and all(map(_is_plain, value)):
        pairs = [[name, _pack(each, tensors, f"{key}[{name!r}]")] for name, each in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        values = [_pack(each, tensors, f"{key}[{i}]") for i, each in enumerate(value)]
        return {"tuple": values} if isinstance(value, tuple) else values
    raise ConfigurationError(
        f"the state of the optimizer holds a value of type {type(value).__name__} at state{key}, "
        "which cannot be sent to other ranks",
        hint="Leave local steps and protocols out of the strategy of this script, or let the "
        "optimizer keep tensors, numbers, texts, and lists, tuples and dictionaries of these.",
    )


def _unpack(packed: Any, tensor: Callable[..., torch.Tensor]) -> Any:
    """Return what :func:`_pack` was given; ``tensor(type, shape)`` returns the next tensor."""
    if isinstance(packed, list):
        return [_unpack(each, tensor) for each in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensor(*content)
    if kind == "tuple":
        return tuple(_unpack(each, tensor) for each in content)
    if kind == "dict":
        return {key: _unpack(each, tensor) for key, each in content}
    raise ValueError(f"unknown kind of value {kind!r}")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _memory(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
