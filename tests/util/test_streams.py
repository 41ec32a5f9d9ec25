"""Commands that are started without standard streams."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hvd_autosync.traces import TraceStore

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"

#: What a program finds and opens, and what its child finds, written to a file.
LOOK = """
import os, subprocess, sys
from hvd_autosync.util.streams import open_standard_streams
open_standard_streams()
opened = open(os.devnull, "rb").fileno()
print("said", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    subprocess.run([sys.executable, "-c", "import json, os; open(os.environ['TO'], 'w').write("
                    "json.dumps([os.readlink(f'/proc/self/fd/{n}') for n in range(3)]))"],
                   env={**os.environ, "TO": sys.argv[1] + ".child"}, check=True)
    file.write(repr((opened > 2, sys.stdin.read(), sys.stdout is None, sys.stderr is None)))
"""


def without(streams: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with the redirections ``streams`` of a shell."""
    line = ["/bin/sh", "-c", f'exec "$@" {streams}', "sh", *words]
    return subprocess.run(line, capture_output=True, stdin=subprocess.DEVNULL, timeout=280)


@pytest.mark.parametrize(
    ("streams", "closed"), [("2>&-", {2}), (">&-", {1}), ("<&-", {0}), ("<&- >&- 2>&-", {0, 1, 2})]
)
def test_nothing_else_gets_the_number_of_a_closed_stream(
    tmp_path: Path, streams: str, closed: set[int]
) -> None:
    found = tmp_path / "found"
    done = without(streams, sys.executable, "-c", LOOK, str(found))
    assert done.returncode == 0, done.stderr
    assert found.read_text() == "(True, '', False, False)"
    seen = json.loads(Path(f"{found}.child").read_text())
    assert {n for n, path in enumerate(seen) if path == os.devnull} == closed | {0}
    assert done.stderr == (b"" if 2 in closed else b"said\n")


def test_an_error_without_standard_error_is_not_printed_elsewhere(tmp_path: Path) -> None:
    command = str(Path(sys.executable).with_name("hvd-autosync"))
    done = without("2>&-", command, "show", "nope", "--store", str(tmp_path / "traces.db"))
    assert (done.returncode, done.stdout) == (1, b"")


def test_the_plan_without_standard_error_is_printed(horovodrun: str, tmp_path: Path) -> None:
    line = [horovodrun, "-np", "2", "--gloo", "--autosync", "--autosync-dry-run", "true"]
    done = without("2>&- <&-", *line)
    assert done.returncode == 0 and b"fusion_threshold_bytes" in done.stdout
    refused = without("2>&- <&-", *line[:-1], "--autosync-trials", "0", "true")
    assert (refused.returncode, refused.stdout) == (2, b"")


@pytest.mark.cluster
@pytest.mark.slow
def test_a_job_without_standard_error_is_tuned_and_trained(
    horovodrun: str, tmp_path: Path, keep_links: Callable[[Path, list[str]], None]
) -> None:
    store = tmp_path / "traces.db"
    line = [
        "-np",
        "2",
        "--gloo",
        "--autosync",
        "--autosync-mode",
        "launched",
        "--autosync-trials",
        "1",
        "--autosync-steps",
        "8",
        "--autosync-warmup",
        "3",
        "--autosync-store",
        str(store),
        sys.executable,
        str(SCRIPT),
    ]
    keep_links(store, line)
    done = without("2>&- <&-", horovodrun, *line)
    assert done.returncode == 0
    assert b"trained 60 steps" in done.stdout
    with closing(TraceStore(store)) as traces:
        (study,) = traces.studies()
    assert study.winner is not None
