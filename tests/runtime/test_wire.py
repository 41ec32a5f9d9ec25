"""Messages between workers and the driver."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.wire import MessageDecoder, encode_message

MESSAGE = {
    "type": "steps", "first": 0, "step_s": [0.001 * i for i in range(2000)],
    "blocked_s": [], "losses": [],
}  # fmt: skip
HELLO = {"type": "hello", "host": "a", "device": "cpu"}


def lines_of(message: dict[str, object], prefix: bytes = b"") -> list[bytes]:
    encoded = encode_message(3, 7, message)
    return [prefix + line + b"\n" for line in encoded.split(b"\n") if line]


def test_long_messages_travel_in_short_lines_behind_any_prefix() -> None:
    lines = lines_of(MESSAGE, b"[1,3]<stderr>: ")
    assert len(lines) > 3 and max(map(len, lines)) < 1000
    decoder = MessageDecoder()
    answers = [decoder.feed(line) for line in lines]
    assert all(ours for ours, _ in answers)
    assert [complete for _, complete in answers[:-1]] == [None] * (len(lines) - 1)
    assert answers[-1][1] == (3, MESSAGE)


def test_parts_of_ranks_may_interleave_and_come_in_any_order() -> None:
    decoder = MessageDecoder()
    one = [line + b"\n" for line in encode_message(0, 1, MESSAGE).split(b"\n") if line]
    two = [line + b"\n" for line in encode_message(1, 1, MESSAGE).split(b"\n") if line]
    mixed = [line for pair in zip(reversed(one), two, strict=True) for line in pair]
    complete = [answer for line in mixed if (answer := decoder.feed(line)[1]) is not None]
    assert sorted(complete) == [(0, MESSAGE), (1, MESSAGE)]


def test_the_scripts_own_lines_are_told_apart() -> None:
    assert MessageDecoder().feed(b"loss 0.5\n") == (False, None)


def test_a_damaged_line_costs_its_message_and_nothing_else() -> None:
    decoder = MessageDecoder()
    first = lines_of(HELLO)[0]
    damaged = first.replace(first[-10:-8], b"!!")
    assert decoder.feed(damaged) == (True, None)
    assert decoder.feed(first) == (True, (3, HELLO))


@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello"}, {"type": "hello", "host": 5, "device": "cpu"}, {"type": "unheard of"},
        {"host": "a"}, {"type": ["hello"]}, [], 5,
        {"type": "steps", "first": 0, "step_s": ["1"], "blocked_s": [], "losses": []},
        {"type": "steps", "first": 0, "step_s": [-1], "blocked_s": [], "losses": []},
        {"type": "steps", "first": 0, "step_s": [], "blocked_s": [], "losses": ["low"]},
        {"type": "steps", "first": 0, "step_s": [math.inf], "blocked_s": [], "losses": []},
        {"type": "end", "cause": "steps", "peak_memory_bytes": 10**30},
        {"type": "link", "ranks": 2, "latency_s": math.nan, "bandwidth_bytes_per_s": 1.0},
    ],
)  # fmt: skip
def test_a_message_that_lacks_what_it_must_have_is_dropped(message: Any) -> None:
    assert MessageDecoder().feed(lines_of(message)[0]) == (True, None)


@given(noise=st.binary(max_size=200))
def test_no_input_raises(noise: bytes) -> None:
    decoder = MessageDecoder()
    decoder.feed(noise)
    decoder.feed(b"@hvd-autosync@ " + noise)
    decoder.feed(b"@hvd-autosync@ 0 0 0/1 00000000 " + noise)
