"""What a rank's process has installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hvd_autosync.search_space.trial import ENDED_FILE

_SCRIPT = """
import sys
from multiprocessing import get_context
from pathlib import Path
from hvd_autosync.runtime.install.activation import _report_end

_report_end(sys.argv[1])
if __name__ == "__main__":
    child = get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print(child.exitcode, len(list(Path(sys.argv[1]).iterdir())))
"""


def test_a_process_that_a_rank_spawns_does_not_say_that_the_rank_has_ended(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "driver"
    script.write_text(_SCRIPT)
    folder.mkdir()
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0"]
    assert (folder / ENDED_FILE).exists()
