"""Runs a command, prints its output, and draws it as a picture of a terminal.

python tools/record_run.py docs/run.svg make demo
"""

from __future__ import annotations

import inspect
import io
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 118
#: Lines with this text are what it is about.
GAIN = "faster than the default"


def main(picture: str, *command: str) -> int:
    """Draw the run of ``command``; return its exit status."""
    lines = [Text(f"$ {shlex.join(command)}", style="bold")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(Text(line.rstrip(), style="green" if GAIN in line else ""))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for text in lines:
        console.print(text, no_wrap=True, overflow="ellipsis", crop=True)
    svg = console.export_svg(title="hvd-autosync", code_format=_format())
    Path(picture).write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    return process.returncode


def _format() -> str:
    """Return rich's format with fonts of the reader's machine instead of ones from the network."""
    default: str = inspect.signature(Console.export_svg).parameters["code_format"].default
    start, end = default.index("@font-face"), default.index(".{unique_id}-matrix")
    text = default[:start] + default[end:]
    return text.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
