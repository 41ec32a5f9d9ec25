"""What makes text printable, wherever it comes from."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import AutosyncError
from hvd_autosync.util.printable import (
    printable,
    printable_cell,
    printable_html,
    printable_lines,
    printable_output,
    raw,
    shell_line,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: All of Unicode, halves of surrogate pairs and controls more often than by chance.
TEXTS = st.text(st.characters() | st.characters(categories=("Cc", "Cf", "Cs", "Zl", "Zp")))


@given(TEXTS)
def test_what_is_shown_is_visible_and_on_one_line(text: str) -> None:
    assert printable(text).isprintable()
    assert printable_html(text).isprintable() and not set("<>") & set(printable_html(text))
    assert all(line.isprintable() for line in printable_lines(text).replace("\t", "").split("\n"))


@given(st.text(st.characters(categories=("L", "N", "P", "S")) | st.just(" ")))
def test_visible_text_stays_as_it_is(text: str) -> None:
    assert printable(text) == printable_lines(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\u001b[2J"),
        ("\x9b31m", "\\u009b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("\ud800", "\\ud800"),
        ("a\r\n\tb", "a\\r\\n\\tb"),
        ("\U000e0041", "\\U000e0041"),
        ("\u200b\ufeff\u2028", "\\u200b\\ufeff\\u2028"),
        ("12 µs ± 3 %, é, 語", "12 µs ± 3 %, é, 語"),
    ],
)
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_keep_their_ends_and_tabs() -> None:
    assert printable_lines("a\n\tb\r\nc\rd\x1b") == "a\n\tb\nc\\rd\\u001b"


@given(st.text(st.characters(max_codepoint=0xD7FF)))
def test_json_and_toml_stay_what_they_are(text: str) -> None:
    """Some of their writers leave the controls from 127 on as they are."""
    line = printable(json.dumps({"name": text}, ensure_ascii=False))
    assert json.loads(line) == {"name": text}
    assert tomllib.loads(line.replace('"name": ', "name = ").strip("{}")) == {"name": text}


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_begins_a_formula(cell: str) -> None:
    assert printable_cell(cell)[0] in "'\\"


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))))
def test_a_line_is_printable_and_means_the_same_words(words: list[str]) -> None:
    line = shell_line(words)
    assert line.isprintable()
    if all(word.isprintable() for word in words):
        assert shlex.split(line) == words


def test_a_shell_reads_the_same_words() -> None:
    words = ["a b", "it's\n\x1b[2J1", "\\'\t\u202e", "é\x7f"]
    program = "import sys, json; print(json.dumps(sys.argv[1:]))"
    line = f"{shell_line([sys.executable, '-c', program])} {shell_line(words)}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == words


def test_whatever_is_printed_within_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with printable_output(), printable_output():
        print("one\x1b[31m\ntwo")
        print("three\u202e", file=sys.stderr)
        sys.stdout.writelines(["four\x07\n"])
        raw(sys.stdout).write("\x1b[0m")
    print("\x1b")
    out, err = capsys.readouterr()
    assert (out, err) == ("one\\u001b[31m\ntwo\nfour\\u0007\n\x1b[0m\x1b\n", "three\\u202e\n")


def test_a_process_without_a_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with printable_output():
        print("nobody reads it", file=sys.stderr)
    assert sys.stderr is None


def test_the_streams_are_given_back_after_an_error() -> None:
    before = sys.stdout
    with pytest.raises(ZeroDivisionError), printable_output():
        raise ZeroDivisionError
    assert sys.stdout is before


def test_an_error_says_what_a_script_wrote_in_its_lines() -> None:
    error = AutosyncError("it fails:\nTraceback\x1b[2J\n\tline\u202e", hint="Fix it\x07.")
    assert str(error) == "it fails:\nTraceback\\u001b[2J\n\tline\\u202e\n  Fix it\\u0007."


def test_texts_of_a_console_are_printable_in_tables_and_lines() -> None:
    from rich.table import Table
    from rich.text import Text

    from hvd_autosync.reporting.console import PrintableConsole

    stream = io.StringIO()
    console = PrintableConsole(stream)
    table = Table("a\x1b\n", "b\u202e", title="t\x07")
    table.add_row("c\nd", Text("[b]e\u2066"))
    for each in ("one\ntwo", Text("f\ng\x9b"), table, ":smile:"):
        console.print(each)
    shown = stream.getvalue()
    assert all(line.isprintable() for line in shown.split("\n"))
    assert "one\\ntwo" in shown and "f\ng\\u009b" in shown and "c\\nd" in shown
    assert "[b]e" in shown and ":smile:" in shown
