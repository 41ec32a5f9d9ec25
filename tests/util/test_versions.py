from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hvd_autosync.util import versions


def test_a_trace_names_the_sources_that_decide() -> None:
    here = versions.deciding_versions()
    assert re.fullmatch("[0-9a-f]{8}", here["hvd-autosync's sources"])
    assert {**here, **versions.versions()} == here
    libraries = {"torch", "botorch", "gpytorch", "linear-operator", "numpy", "scipy"}
    assert libraries <= here.keys()  # a fit follows from each
    assert list(versions.other_deciding_versions(here)) == []
    (line,) = versions.other_deciding_versions(versions.versions())
    assert line.startswith("hvd-autosync's sources that choose trials were not recorded, here ")


def test_other_sources_are_no_reason_to_expect_another_step_time() -> None:
    recorded = {**versions.versions(), "hvd-autosync's sources": "00000000"}
    assert list(versions.other_versions(recorded)) == []
    assert list(versions.other_versions({**recorded, "horovod": "0.27"})) == [
        "horovod was 0.27, here it is 0.28.1"
    ]


def test_what_decides_changes_the_digest_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "hvd_autosync"
    shutil.copytree(Path(versions.__file__).parents[1], copy)

    def digest() -> str:
        return versions.digest(copy, versions._DECIDING)

    before = digest()
    assert before == versions._digest()
    (copy / "commands" / "cli.py").write_text("pass\n")
    assert digest() == before
    deciding = sorted(
        path
        for room in versions._DECIDING
        for path in (copy / room).rglob("*")
        if path.suffix in (".py", ".json")
    )
    names = {each.name for each in deciding}
    assert {"decision.py", "related_studies.py", "gp.py", "knobs.py", "hyperprior.json"} <= names
    for path in deciding:
        with open(path, "a") as file:
            file.write("\n")
        assert digest() != before
        before = digest()


def test_a_room_that_is_missing_is_no_room_without_changes(tmp_path: Path) -> None:
    for room in versions._DECIDING:
        with pytest.raises(FileNotFoundError, match=room):
            versions.digest(tmp_path, [room])
