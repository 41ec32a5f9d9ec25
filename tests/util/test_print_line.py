"""A line for the user is printed, or it is not: it never ends what goes on."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_autosync.util.print_line import print_error, print_line


class _Odd:
    """What a script may have put in the place of the error output."""

    def write(self, text: str) -> int:
        raise RuntimeError(text)


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.fixture
def full() -> Iterator[io.TextIOWrapper]:
    """A stream on a full disk."""
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as stream:
        yield stream


@pytest.mark.parametrize("say", [print_line, print_error])
def test_a_line_on_a_full_disk_is_no_error(
    say: Callable[[str], None], full: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    say("steps have become slower")


@pytest.mark.parametrize("stream", [_Odd(), _closed()])
def test_nor_is_one_in_a_stream_of_the_scripts(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    print_line("steps have become slower")


def test_a_line_has_the_name_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    print_line("steps have become slower")
    assert capsys.readouterr().err == "hvd-autosync: steps have become slower\n"
