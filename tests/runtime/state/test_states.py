from __future__ import annotations

from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.state.states import (
    Entry,
    check_states,
    decode_entries,
    encode_entries,
    take_states,
    to_device,
)


def test_everything_comes_back() -> None:
    entries = [
        Entry(0, 7, {"step": torch.tensor(3.0), "exp_avg": torch.randn(5), "lr": 0.1}),
        Entry(2, 0, {"buffer": torch.randn(4).to(torch.bfloat16), "nothing": None}),
        Entry(3, 1, {"buffer": torch.empty(0, dtype=torch.float64), "flag": True}),
        Entry(4, 0, {}),
    ]
    for before, after in zip(entries, decode_entries(encode_entries(entries)), strict=True):
        assert (after.place, after.begin) == (before.place, before.begin)
        assert after.state.keys() == before.state.keys()
        for name, value in before.state.items():
            if isinstance(value, torch.Tensor):
                assert after.state[name].dtype is value.dtype
                assert torch.equal(after.state[name], value)
            else:
                assert after.state[name] == value
    assert decode_entries(encode_entries([])) == []


def test_lists_tuples_and_dictionaries_come_back() -> None:
    """As in the states of Shampoo and SOAP."""
    tensors = [torch.randn(2, 3), torch.tensor(7, dtype=torch.uint8), torch.empty(0)]
    state = {
        "factors": [tensors[0], None, {"roots": (tensors[1], [tensors[2]]), 3: False}],
        "tensor": {"tensor": 1},
        "count": np.int64(5),
        "rate": np.float32(0.5),
    }
    entries = decode_entries(encode_entries([Entry(0, 0, state), Entry(1, 0, {"a": tensors[0]})]))
    found = entries[0].state
    first, nothing, inner = found["factors"]
    second, (third,) = inner["roots"]
    for own, wanted in zip((first, second, third), tensors, strict=True):
        assert own.dtype is wanted.dtype and torch.equal(own, wanted)
    assert nothing is None and inner[3] is False and isinstance(inner["roots"], tuple)
    assert (found["tensor"], found["count"], found["rate"]) == ({"tensor": 1}, 5, 0.5)
    assert torch.equal(entries[1].state["a"], tensors[0])


@pytest.mark.parametrize(
    "value",
    [object(), 1j, {(1, 2): 3}, torch.eye(2).to_sparse()],
    ids=["object", "complex", "tuple as key", "sparse"],
)
def test_what_cannot_be_sent_is_named(value: Any) -> None:
    state = {"step": 1, "inner": [{"value": value}]}
    wanted = r"at state\['inner'\]\[0\]\['value'\]"
    with pytest.raises(ConfigurationError, match=wanted):
        encode_entries([Entry(0, 0, state)])
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = SimpleNamespace(param_groups=[{"params": parameters}], state={})
    optimizer.state[parameters[1]] = {"step": 1}
    check_states(optimizer)
    optimizer.state[parameters[2]] = state
    with pytest.raises(ConfigurationError, match=wanted):
        check_states(optimizer)


GOOD = encode_entries([Entry(0, 0, {"a": torch.ones(3)})])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        GOOD[:-1],
        GOOD.replace(b"float32", b"floatXX"),
        GOOD.replace(b"[[0,", b"{[0,"),
        GOOD.replace(b"[3]", b"[9]"),
        GOOD.replace(b"float32", b"FloatTe"),
    ],
    ids=["nothing", "short", "cut", "no such type", "no JSON", "too large", "no type"],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_entries(data)


@pytest.mark.parametrize("option", ["", "fused", "capturable"])
def test_states_are_where_load_state_dict_would_have_them(option: str) -> None:
    """Those of other shapes than the parameter's, too, as Adafactor's."""
    parameter = torch.nn.Parameter(torch.empty(3, 4, device="meta"))
    optimizer = SimpleNamespace(param_groups=[{"params": [parameter], option: True}], state={})
    received = {
        "step": torch.tensor(3.0),
        "row_var": torch.ones(3, 1),
        "rate": 0.1,
        "factors": [torch.ones(3), {"root": (torch.ones(4),)}],
    }
    take_states(optimizer, {0: received})
    state = optimizer.state[parameter]
    assert state["row_var"].device.type == "meta"
    assert state["step"].device.type == ("meta" if option else "cpu")
    assert state["rate"] == 0.1
    left, right = state["factors"]
    assert left.device.type == right["root"][0].device.type == "meta"


class _Factors(NamedTuple):
    left: torch.Tensor
    right: list[torch.Tensor]


class _Values(list[torch.Tensor]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=torch.ones(2), a=torch.ones(1)),
        defaultdict(dict, a=torch.ones(2)),
        _Values([torch.ones(2)]),
        _Factors(torch.ones(2), [torch.ones(1)]),
        torch.Size([3]),
    ],
    ids=["ordered", "default", "list", "named", "size"],
)
def test_containers_of_other_types_are_moved_too(value: Any) -> None:
    def tensors(of: Any) -> list[torch.Tensor]:
        if isinstance(of, torch.Tensor):
            return [of]
        parts = of.values() if isinstance(of, dict) else of if isinstance(of, (list, tuple)) else ()
        return [tensor for part in parts for tensor in tensors(part)]

    before = tensors(value)
    moved = to_device(value, "meta")
    assert type(moved) is type(value) and len(moved) == len(value)
    assert [each.shape for each in tensors(moved)] == [each.shape for each in before]
    assert all(each.device.type == "meta" for each in tensors(moved))
    assert all(each.device.type == "cpu" for each in tensors(value)), "the state is not changed"
