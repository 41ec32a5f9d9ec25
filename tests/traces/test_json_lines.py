from __future__ import annotations

import hashlib
import io

import pytest

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.traces import json_lines
from hvd_autosync.traces.json_lines import LineReader


def _reader(content: bytes) -> LineReader:
    return LineReader(io.BytesIO(content), "a.jsonl")


def test_objects_come_in_order_with_a_checksum() -> None:
    reader = _reader(b'{"a": 1}\n{"b": "\xc3\xa9"}\n')
    assert reader.next_object() == {"a": 1}
    reader.start_digest()
    assert not reader.at_end()
    assert reader.next_object() == {"b": "é"}
    assert reader.at_end()
    assert reader.digest() == hashlib.sha256(b'{"b": "\xc3\xa9"}\n').hexdigest()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"", "cut off"),
        (b'{"a": 1}', "cut off"),
        (b"\n", "Expecting value"),
        (b"[1]\n", "not a JSON object"),
        (b"{'a': 1}\n", "property name"),
        (b'{"a": "\xff"}\n', "decode"),
        (b'\xef\xbb\xbf{"a": 1}\n', "BOM"),
        (b'{"a": NaN}\n', "NaN is not a number"),
        (b'{"a": -Infinity}\n', "-Infinity is not a number"),
        (b'{"a": 1e999}\n', "1e999 is not a number"),
        (b'{"a": 9223372036854775808}\n', "is not a number that a trace can contain"),
        (b'{"a": ' + b"9" * 10_000 + b"}\n", "is not a number that a trace can contain"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}\n", "nested too deeply"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "nested too deeply"),
        (b'{"a": ' + b'{"b":' * 70 + b"0" + b"}" * 70 + b"}\n", "nested too deeply"),
    ],
)
def test_bad_lines_are_named(line: bytes, what: str) -> None:
    reader = _reader(b"{}\n" + line)
    reader.next_object()
    with pytest.raises(TraceFormatError, match=r"a.jsonl, line 2: ") as caught:
        reader.next_object()
    assert what in caught.value.message and len(caught.value.message) < 200


def test_ordinary_nesting_and_numbers_are_fine() -> None:
    content = b'{"a": ' + b"[" * 60 + b"]" * 60 + b', "b": [-9223372036854775807, 1e-300]}\n'
    assert _reader(content).next_object()["b"] == [-9223372036854775807, 1e-300]


def test_a_line_without_end_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "LONGEST_LINE_BYTES", 100)
    with pytest.raises(TraceFormatError, match="line 1: the line is too long"):
        _reader(b" " * 1000).next_object()


def test_checked_names_the_line_and_lets_results_pass() -> None:
    reader = _reader(b'{"a": 1}\n')
    reader.next_object()
    assert reader.checked(int, "12") == 12
    with pytest.raises(TraceFormatError, match="line 1: invalid literal"):
        reader.checked(int, "twelve")
