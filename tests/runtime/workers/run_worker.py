"""Runs a script as a worker of a trial: ``run_worker.py SPECIFICATION SCRIPT [ARGUMENT ...]``."""

import runpy
import sys
from pathlib import Path

from hvd_autosync.runtime.install.hooks import install
from hvd_autosync.search_space import TrialSpec

if __name__ == "__main__":
    install(TrialSpec.from_json(sys.argv[1]))
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
