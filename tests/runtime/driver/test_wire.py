"""Messages between workers and the driver."""

import json
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.messages import RECORDS, End, Hello, Profile, Steps, read_message
from hvd_autosync.runtime.driver.wire import encode_message
from hvd_autosync.search_space import Link, ModelProfile, ParameterProfile

KEY = "k" * 32
MESSAGE = {
    "type": "steps",
    "first": 0,
    "step_s": [0.001 * i for i in range(2000)],
    "blocked_s": [],
    "losses": [],
}
HELLO = {"type": "hello", "host": "a", "device": "cpu"}
HELLO_READ = Hello("a", "cpu")


def lines_of(message: dict[str, object], prefix: bytes = b"") -> list[bytes]:
    encoded = encode_message(KEY, 3, 7, message)
    return [prefix + line + b"\n" for line in encoded.split(b"\n") if line]


def test_long_messages_travel_in_short_lines_behind_any_prefix() -> None:
    lines = lines_of(MESSAGE, b"[1,3]<stderr>: ")
    assert len(lines) > 3 and max(map(len, lines)) < 1000
    decoder = MessageDecoder(KEY, 8)
    answers = [decoder.feed(line) for line in lines]
    assert all(ours for ours, _ in answers)
    assert [complete for _, complete in answers[:-1]] == [None] * (len(lines) - 1)
    assert answers[-1][1] == (3, read_message(json.dumps(MESSAGE).encode()))


def test_parts_of_ranks_may_interleave_and_come_in_any_order() -> None:
    decoder = MessageDecoder(KEY, 8)
    one = [line + b"\n" for line in encode_message(KEY, 0, 1, MESSAGE).split(b"\n") if line]
    two = [line + b"\n" for line in encode_message(KEY, 1, 1, MESSAGE).split(b"\n") if line]
    mixed = [line for pair in zip(reversed(one), two, strict=True) for line in pair]
    complete = [answer for line in mixed if (answer := decoder.feed(line)[1]) is not None]
    assert sorted(rank for rank, _ in complete) == [0, 1]
    assert complete[0][1] == complete[1][1] == Steps(0, tuple(MESSAGE["step_s"]), (), ())


def test_text_of_any_bytes_arrives() -> None:
    """As the name of a file in an exception's text, which may be no UTF-8."""
    decoder = MessageDecoder(KEY, 8)
    hello = {**HELLO, "host": "caf\udce9 é \U0001f600"}
    assert [decoder.feed(line)[1] for line in lines_of(hello)] == [
        (3, Hello("caf? é \U0001f600", "cpu"))
    ]


def test_the_scripts_own_lines_are_no_messages() -> None:
    assert MessageDecoder(KEY, 8).feed(b"loss 0.5\n") == (False, None)


def test_a_damaged_line_costs_its_message_and_nothing_else() -> None:
    decoder = MessageDecoder(KEY, 8)
    first = lines_of(HELLO)[0]
    damaged = first.replace(first[-10:-8], b"!!")
    assert decoder.feed(damaged) == (True, None)
    assert decoder.feed(first) == (True, (3, HELLO_READ))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello"},
        {"type": "hello", "host": 5, "device": "cpu"},
        {"type": "unheard of"},
        {"host": "a"},
        {"type": ["hello"]},
        [],
        5,
        {"type": "steps", "first": 0, "step_s": ["1"], "blocked_s": [], "losses": []},
        {"type": "steps", "first": 0, "step_s": [-1], "blocked_s": [], "losses": []},
        {"type": "steps", "first": 0, "step_s": [], "blocked_s": [], "losses": ["low"]},
        {"type": "steps", "first": 0, "step_s": [math.inf], "blocked_s": [], "losses": []},
        {"type": "end", "cause": "steps", "peak_memory_bytes": 10**30},
        {"type": "link", "ranks": 2, "latency_s": math.nan, "bandwidth_bytes_per_s": 1.0},
    ],
)
def test_a_message_that_lacks_what_it_must_have_is_dropped(message: Any) -> None:
    assert MessageDecoder(KEY, 8).feed(lines_of(message)[0]) == (True, None)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"type": "unheard of"}, "type: 'unheard of' is wrong: expected one of hello, steps"),
        ({"host": "a"}, "type: None is wrong"),
        ([], "type: None is wrong"),
        ({"type": "hello", "device": "cpu"}, "missing required field `host`"),
        ({**HELLO, "host": 5}, "host: 5 is wrong: expected `str`"),
        ({**HELLO, "cores": "many"}, "cores: 'many' is wrong: expected `array`"),
        ({**HELLO, "host": "a" * 5000}, "host: 5000 characters are too many"),
        ({**MESSAGE, "step_s": [0.1, "x"]}, "a value is wrong: expected `int | float`"),
        ({**MESSAGE, "step_s": [0.1, -1]}, "step_s: -1 is impossible"),
        ({**MESSAGE, "first": 2**63}, "first: 9223372036854775808 is too large"),
        ({"type": "end", "cause": "steps", "peak_memory_bytes": -1}, "peak_memory_bytes: -1 is"),
        ({"type": "link", "ranks": 1, "latency_s": 1, "bandwidth_bytes_per_s": 1}, "impossible"),
        (
            {"type": "profile", "profile": {"parameters": 5}, "owned": []},
            "profile.parameters: 5 is",
        ),
        ({**MESSAGE, "losses": [math.nan]}, "no JSON: .*invalid character"),
    ],
)
def test_an_error_names_the_field_and_the_value(message: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_message(json.dumps(message).encode())


def test_a_dropped_message_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = lines_of({**HELLO, "host": 5})
    with caplog.at_level("INFO", logger="hvd_autosync"):
        assert MessageDecoder(KEY, 8).feed(line) == (True, None)
    assert "a message of rank 3 is dropped: host: 5 is wrong" in caplog.text


def test_a_field_of_a_newer_worker_is_left_out() -> None:
    assert read_message(json.dumps({**HELLO, "mood": "good"}).encode()) == HELLO_READ


def test_every_type_is_read() -> None:
    link = {"type": "link", "ranks": 2, "latency_s": 0.1, "bandwidth_bytes_per_s": 5}
    assert read_message(json.dumps(link).encode()) == Link(2, 0.1, 5)
    lost = read_message(json.dumps({**MESSAGE, "losses": [0.5, None, 1]}).encode())
    assert isinstance(lost, Steps) and lost.losses[::2] == (0.5, 1) and math.isnan(lost.losses[1])
    end = {"type": "end", "cause": "steps", "peak_memory_bytes": 5}
    assert read_message(json.dumps(end).encode()) == End("steps", 5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)


@given(st.sampled_from(sorted(RECORDS)), st.data())
def test_any_values_are_a_record_or_an_error(kind: str, data: Any) -> None:
    names = [each.name for each in fields(RECORDS[kind])]
    values = {name: data.draw(JSON) for name in names}
    text = json.dumps({"type": kind, **values}).encode()
    try:
        record = read_message(text)
    except ValueError:
        return
    assert isinstance(record, RECORDS[kind])


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 10**6, b"9" * 10**6, b"1e999"])
def test_hostile_text_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_message(text)


@given(noise=st.binary(max_size=200))
def test_no_input_raises(noise: bytes) -> None:
    decoder = MessageDecoder(KEY, 8)
    decoder.feed(noise)
    decoder.feed(b"@hvd-autosync@ " + noise)
    decoder.feed(b"@hvd-autosync@ 0 0 0/1 " + b"0" * 32 + b" " + noise)


def test_a_message_counts_once_and_under_its_own_key_only() -> None:
    (line,) = lines_of(HELLO)
    assert MessageDecoder("another", 8).feed(line) == (True, None)
    for change in ((b" 3 7 ", b" 2 7 "), (b" 3 7 ", b" 3 8 "), (b" 0/1 ", b" 0/2 ")):
        assert MessageDecoder(KEY, 8).feed(line.replace(*change)) == (True, None)
    decoder = MessageDecoder(KEY, 8)
    assert decoder.feed(line) == (True, (3, HELLO_READ))
    assert decoder.feed(line) == (True, None)


def test_messages_of_a_rank_beyond_the_job_are_dropped() -> None:
    (line,) = lines_of(HELLO)
    assert MessageDecoder(KEY, 4).feed(line) == (True, (3, HELLO_READ))
    assert MessageDecoder(KEY, 3).feed(line) == (True, None)


@contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    """Python may allocate no more meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


def test_a_message_unpacks_to_no_more_than_the_longest_may_have() -> None:
    """Some hundred kilobytes of lines would be a hundred megabytes of spaces."""
    lines = lines_of({**HELLO, "host": " " * 10**8})
    decoder = MessageDecoder(KEY, 8)
    with memory_below(30_000_000):
        assert [decoder.feed(line)[1] for line in lines] == [None] * len(lines)
    assert decoder.feed(encode_message(KEY, 3, 8, HELLO))[1] == (3, HELLO_READ)


def test_a_large_model_fits() -> None:
    names = [f"model.layers.{i}.attention.heads.{j}.weight" for i in range(400) for j in range(100)]
    model = ModelProfile(
        tuple(
            ParameterProfile(name, (4096, 128), "float32", ready_order=n, ready_s=1 / (n + 1))
            for n, name in enumerate(names)
        )
    )
    message = {"type": "profile", "profile": model.to_json(), "owned": ["compression"]}
    decoder = MessageDecoder(KEY, 8)
    assert [decoder.feed(line) for line in lines_of(message)][-1][1] == (
        3,
        Profile(model, ("compression",)),
    )


def test_of_each_rank_one_message_is_unfinished_at_most() -> None:
    decoder = MessageDecoder(KEY, 2)
    messages = [encode_message(KEY, n % 3, n, MESSAGE).split(b"\n") for n in range(1000)]
    with memory_below(1_000_000):
        for lines in messages:
            for line in list(filter(None, lines))[:-1]:
                assert decoder.feed(line) == (True, None)
