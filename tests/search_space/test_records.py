"""Records: what is read is checked, what is written has one entry for each field."""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import Link, Strategy
from hvd_autosync.search_space.records import (
    LEFT_OUT,
    NOT_STORED,
    OrInf,
    OrNan,
    Real,
    Record,
    read,
    stored_as,
)


class Kind(str, enum.Enum):
    ONE = "one"


class Own:
    """Reads and writes itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def to_json(self) -> list[int]:
        return [self.number]

    @classmethod
    def from_json(cls, values: list[int]) -> Own:
        return cls(values[0])


OwnField: Any = stored_as(Own, Own.from_json)


@dataclass(frozen=True)
class Inner(Record):
    name: str
    sizes_bytes: tuple[int, ...] = ()
    times_s: tuple[OrNan, ...] = ()


@dataclass(frozen=True)
class Outer(Record):
    inner: tuple[Inner, ...]
    kind: Kind
    strategy: Strategy
    number: Real = 0.0
    unknown_s: OrNan = math.nan
    high: OrInf = math.inf
    own: OwnField | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    later: int = field(default=1, metadata=LEFT_OUT)
    later_s: OrNan = field(default=math.nan, metadata=LEFT_OUT)
    here: Link | None = field(default=None, metadata=NOT_STORED)


FIELDS: dict[str, Any] = {
    "inner": [{"name": "a", "sizes_bytes": [1, 2], "times_s": [0.5, None, 1]}],
    "kind": "one",
    "strategy": {"x": 1},
    "number": 3,
    "unknown_s": None,
    "high": None,
    "own": [7],
    "plain": {"any": [None, {"thing": 1.0}]},
}


def test_what_is_read_is_written_again() -> None:
    record = Outer.from_json(FIELDS)
    assert json.dumps(record.to_json()) == json.dumps(FIELDS)
    assert (record.kind, record.strategy) == (Kind.ONE, Strategy({"x": 1}))
    assert type(record.number) is int and record.high == math.inf
    assert math.isnan(record.unknown_s) and math.isnan(record.inner[0].times_s[1])
    assert record.own is not None and record.own.number == 7
    assert hash(record.inner[0]) == hash(Inner("a", (1, 2), record.inner[0].times_s))


def test_fields_at_their_default_are_left_out_where_they_say_so() -> None:
    record = Outer.from_json({**FIELDS, "later": 2, "later_s": 0.25})
    assert list(record.to_json())[-2:] == ["later", "later_s"]
    assert record.to_json() == {**FIELDS, "later": 2, "later_s": 0.25}
    link = Link(2, 0.0, 1.0)
    assert "here" not in Outer((), Kind.ONE, Strategy(), here=link).to_json()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_json_does_not_have_stay_where_none_is_expected(number: float) -> None:
    written = Outer((), Kind.ONE, Strategy(), number=number, unknown_s=number).to_json()
    assert written["unknown_s"] is None
    with pytest.raises(ValueError, match="JSON compliant"):
        json.dumps(written, allow_nan=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "two"}, r"kind: .*two"),
        ({"number": "3"}, r"number: '3' is wrong: expected .*got `str`"),
        ({"number": True}, r"number: True is wrong: expected .*got `bool`"),
        ({"number": None}, r"number: None is wrong"),
        ({"later": 1.5}, r"later: 1.5 is wrong"),
        ({"plain": []}, r"plain: \[\] is wrong: expected `object`, got `array`"),
        ({"inner": [{}]}, r"inner\[0\]: .*missing required field `name`"),
        ({"inner": [{"name": 5}]}, r"inner\[0\].name: 5 is wrong: expected `str`, got `int`"),
        ({"inner": [{"name": "a", "sizes_bytes": "12"}]}, r"inner\[0\].sizes_bytes: '12' is wrong"),
        ({"inner": [{"name": "a", "sizes_bytes": [1, "2"]}]}, r"sizes_bytes\[1\]: '2' is wrong"),
        ({"inner": [{"name": "a", "sizes_bytes": [1, -2]}]}, r"sizes_bytes: -2 is impossible"),
        ({"inner": [{"name": "a", "more": 1}]}, r"Inner has no field 'more'"),
        ({"more": 1}, r"Outer has no field 'more'"),
        ({"unknown_s": -0.5}, r"unknown_s: -0.5 is impossible"),
        ({"strategy": ["x"]}, r"strategy: .*no dictionary of knobs"),
        ({"own": []}, r"own: .*not a Own: IndexError"),
    ],
)
def test_what_is_wrong_is_named_with_its_value(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Outer.from_json({**FIELDS, **changed})


def test_a_strategy_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpaceError, match="knob x"):
        Outer.from_json({**FIELDS, "strategy": {"x": [1]}})


def test_checks_of_the_class_are_part_of_reading() -> None:
    with pytest.raises(ValueError, match="impossible"):
        Link.from_json({"ranks": 1, "latency_s": 0.1, "bandwidth_bytes_per_s": 1.0})


@pytest.mark.parametrize("values", [[], None, "text", 5])
def test_only_a_dictionary_is_a_record(values: Any) -> None:
    with pytest.raises(ValueError, match="Outer"):
        Outer.from_json(values)
    with pytest.raises(ValueError, match="Outer"):
        Outer.known(values)


def test_another_versions_fields_can_be_left_out() -> None:
    known = Outer.known({**FIELDS, "more": 1})
    assert known == FIELDS


def test_types_other_than_records_are_read() -> None:
    assert read(bool, True) is True
    with pytest.raises(ValueError, match="bool"):
        read(bool, 1)


def test_a_worker_that_starts_does_not_load_the_library() -> None:
    code = """
import sys
from hvd_autosync.runtime.driver.environment import spec_from_environment, worker_environment
from hvd_autosync.runtime.install import hooks
from hvd_autosync.search_space import Strategy, TrialSpec
spec = TrialSpec("t", Strategy({"cycle_time_ms": 1.0}))
assert spec_from_environment(worker_environment(spec)) == spec
hooks.install(spec)
assert "msgspec" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_can_read_a_new_type_at_once() -> None:
    code = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hvd_autosync.search_space.records import read

describing = threading.Event()

def slow():
    describing.set()
    time.sleep(0.5)
    return int

@dataclass(frozen=True)
class Inner:
    number: "slow()"

@dataclass(frozen=True)
class Outer:
    inner: Inner

with ThreadPoolExecutor(2) as threads:
    first = threads.submit(read, Outer, {"inner": {"number": 1}})
    assert describing.wait(60)
    second = threads.submit(read, Outer, {"inner": {"number": 1}})
    assert first.result() == second.result() == Outer(Inner(1))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
