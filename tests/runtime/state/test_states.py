from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hvd_autosync.runtime.state.states import Entry, decode_entries, encode_entries, take_states


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
    received = {"step": torch.tensor(3.0), "row_var": torch.ones(3, 1), "rate": 0.1}
    take_states(optimizer, {0: received})
    state = optimizer.state[parameter]
    assert state["row_var"].device.type == "meta"
    assert state["step"].device.type == ("meta" if option else "cpu")
    assert state["rate"] == 0.1
