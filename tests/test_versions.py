from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hvd_autosync import versions


def test_a_trace_names_the_sources_that_decide() -> None:
    here = versions.deciding_versions()
    assert re.fullmatch("[0-9a-f]{8}", here["hvd-autosync's sources"])
    assert {**here, **versions.versions()} == here
    assert list(versions.other_deciding_versions(here)) == []
    (line,) = versions.other_deciding_versions(versions.versions())
    assert line.startswith("hvd-autosync's sources that decide were not written down, here they ")


def test_other_sources_are_no_reason_to_expect_another_step_time() -> None:
    recorded = {**versions.versions(), "hvd-autosync's sources": "00000000"}
    assert list(versions.other_versions(recorded)) == []
    assert list(versions.other_versions({**recorded, "horovod": "0.27"})) == [
        "horovod was 0.27, here it is 0.28.1"
    ]


def test_what_decides_changes_the_digest_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "hvd_autosync"
    shutil.copytree(Path(versions.__file__).parent, copy)
    monkeypatch.setattr(versions, "__file__", str(copy / "versions.py"))

    def digest() -> str:
        return versions._digest.__wrapped__()

    before = digest()
    assert before == versions._digest()
    (copy / "cli.py").write_text("pass\n")
    assert digest() == before
    for decides in ("decision.py", "relatives.py", "learner/gp.py", "search_space/knobs.py"):
        with open(copy / decides, "a") as file:
            file.write("\n")
        assert digest() != before
        before = digest()
