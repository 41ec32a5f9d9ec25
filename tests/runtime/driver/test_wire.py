"""Messages between workers and the driver."""

import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.driver.wire import MessageDecoder, encode_message

KEY = "k" * 32
MESSAGE = {
    "type": "steps",
    "first": 0,
    "step_s": [0.001 * i for i in range(2000)],
    "blocked_s": [],
    "losses": [],
}
HELLO = {"type": "hello", "host": "a", "device": "cpu"}


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
    assert answers[-1][1] == (3, MESSAGE)


def test_parts_of_ranks_may_interleave_and_come_in_any_order() -> None:
    decoder = MessageDecoder(KEY, 8)
    one = [line + b"\n" for line in encode_message(KEY, 0, 1, MESSAGE).split(b"\n") if line]
    two = [line + b"\n" for line in encode_message(KEY, 1, 1, MESSAGE).split(b"\n") if line]
    mixed = [line for pair in zip(reversed(one), two, strict=True) for line in pair]
    complete = [answer for line in mixed if (answer := decoder.feed(line)[1]) is not None]
    assert sorted(complete) == [(0, MESSAGE), (1, MESSAGE)]


def test_the_scripts_own_lines_are_no_messages() -> None:
    assert MessageDecoder(KEY, 8).feed(b"loss 0.5\n") == (False, None)


def test_a_damaged_line_costs_its_message_and_nothing_else() -> None:
    decoder = MessageDecoder(KEY, 8)
    first = lines_of(HELLO)[0]
    damaged = first.replace(first[-10:-8], b"!!")
    assert decoder.feed(damaged) == (True, None)
    assert decoder.feed(first) == (True, (3, HELLO))


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
    assert decoder.feed(line) == (True, (3, HELLO))
    assert decoder.feed(line) == (True, None)


def test_messages_of_a_rank_beyond_the_job_are_dropped() -> None:
    (line,) = lines_of(HELLO)
    assert MessageDecoder(KEY, 4).feed(line) == (True, (3, HELLO))
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
    assert decoder.feed(encode_message(KEY, 3, 8, HELLO))[1] == (3, HELLO)


def test_a_large_model_fits() -> None:
    names = [f"model.layers.{i}.attention.heads.{j}.weight" for i in range(400) for j in range(100)]
    parameters = [
        {"name": name, "shape": [4096, 128], "ready_s": 1 / (n + 1)} for n, name in enumerate(names)
    ]
    profile = {"type": "profile", "profile": {"parameters": parameters}, "owned": []}
    decoder = MessageDecoder(KEY, 8)
    assert [decoder.feed(line) for line in lines_of(profile)][-1][1] == (3, profile)


def test_of_each_rank_one_message_is_unfinished_at_most() -> None:
    decoder = MessageDecoder(KEY, 2)
    with memory_below(3_000_000):
        for number in range(3000):
            lines = encode_message(KEY, number % 3, number, MESSAGE).split(b"\n")
            for line in list(filter(None, lines))[:-1]:
                assert decoder.feed(line) == (True, None)
