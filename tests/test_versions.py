from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hvd_autosync import versions


def test_ours_names_the_sources_that_decide() -> None:
    here = versions.versions()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\+[0-9a-f]{8}", here["hvd-autosync"])
    assert list(versions.other_versions(here)) == []
    assert list(versions.other_versions({**here, "hvd-autosync": "0.1.0"})) == [
        f"hvd-autosync was 0.1.0, here it is {here['hvd-autosync']}"
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
    for decides in ("decision.py", "learner/gp.py", "search_space/knobs.py"):
        with open(copy / decides, "a") as file:
            file.write("\n")
        assert digest() != before
        before = digest()
