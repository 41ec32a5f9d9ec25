"""Options of horovodrun are found however they are written."""

from __future__ import annotations

import argparse

import pytest

from hvd_autosync.engine.job_line import parse_words
from hvd_autosync.launch.horovodrun_options import _SHORTEST, OUTPUT, is_option, without_option


def test_an_option_is_left_out_wherever_it_is() -> None:
    options = ("--output-filename", "a", "--verbose", "--output=b", "--mpi-args", "-x", "--o", "c")
    assert without_option(options, OUTPUT) == ("--verbose", "--mpi-args", "-x")


#: Without those that name one option twice: older versions of argparse take no abbreviation then.
@pytest.mark.parametrize("option", [each for each in _SHORTEST if not each.startswith("--min")])
def test_the_shortest_word_is_that_of_the_parser(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A longer one is taken; a shorter one is not, or is another option's."""
    found: list[str] = []

    def note(parser: object, namespace: object, values: object, used: str | None) -> None:
        found.append(str(used))

    shortest = _SHORTEST[option]
    for action in (argparse._StoreAction, argparse._AppendAction):
        monkeypatch.setattr(action, "__call__", lambda self, *given: note(*given))
    parse_words([shortest, "1", "-np", "1", "python", "train.py"])
    assert is_option(shortest, option) and is_option(f"{shortest}=1", option)
    assert not is_option(shortest[:-1], option)
