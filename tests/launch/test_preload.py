"""Modules that a fork server imports before it forks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: Reads a variable when it is imported, as settings of many libraries do, and sets another.
_LIBRARY = """
import os
seen = os.environ.get("LIBRARY_MODE", "usual"), os.environ.get("LIBRARY_HOME", "nowhere")
os.environ.setdefault("LIBRARY_OWN", "set by it")
"""
_SERVER = """
import json, os, sys
from hvd_autosync.launch import preload

preload._is_installed = lambda name, origin: name == "read_at_import"
loader = preload.Preloader(sys.argv[2] if len(sys.argv) > 2 else "")
if not os.fork():
    loader.record()
    os.environ["LIBRARY_MODE"] = "offline"
    del os.environ["LIBRARY_HOME"]
    import read_at_import
    os._exit(0)
os.wait()
if sys.argv[1] == "cut":
    size = os.fstat(loader._memory).st_size
    os.ftruncate(loader._memory, size - 9)
loader.load_what_was_imported()
names = "LIBRARY_MODE", "LIBRARY_HOME", "LIBRARY_OWN"
module = sys.modules.get("read_at_import")
print(json.dumps([module and module.seen, [os.environ.get(name) for name in names]]))
"""


def served(folder: Path, *arguments: str) -> list[object]:
    (folder / "read_at_import.py").write_text(_LIBRARY)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(folder)!r})\n{_SERVER}",
            *arguments,
        ],
        env={"PATH": "", "LIBRARY_HOME": "here"},
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


def test_a_module_sees_the_variables_that_the_script_had_set_before_it(tmp_path: Path) -> None:
    """They are gone afterwards: other scripts of the server's children set them themselves."""
    seen, after = served(tmp_path, "whole")
    assert seen == ["offline", "nowhere"]
    assert after == [None, "here", "set by it"]


def test_what_a_killed_child_has_not_recorded_is_not_imported(tmp_path: Path) -> None:
    seen, after = served(tmp_path, "cut")
    assert seen is None and after == [None, "here", None]


def test_a_module_that_is_the_script_is_not_imported(tmp_path: Path) -> None:
    """Its import may be the training, and it may not bear to be executed twice."""
    seen, after = served(tmp_path, "whole", "read_at_import")
    assert seen is None and after == [None, "here", None]


def test_a_path_may_have_any_character(tmp_path: Path) -> None:
    folder = tmp_path / "a tab\tand a\nnewline"
    folder.mkdir()
    assert served(folder, "whole")[0] == ["offline", "nowhere"]
