"""A study as one page, as text, and as JSON."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.api.results import Study
from hvd_autosync.commands.cli import app
from hvd_autosync.commands.page import page
from hvd_autosync.search_space import SearchSpace, catalogue_knob
from hvd_autosync.search_space.knobs import integer_knob
from hvd_autosync.study.values import StudySettings

TABLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "vgg-100mbit-codec.jsonl.gz"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``report(format)``: what the command writes of the table."""
    out = tmp_path_factory.mktemp("report")

    @functools.cache
    def written(kind: str) -> str:
        words = ["report", str(TABLE), "-o", f"{out}.{kind}", "--format", kind]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and done.stdout.strip() == f"{out}.{kind}"
        return Path(f"{out}.{kind}").read_text()

    return written


@pytest.fixture(scope="module")
def html(report: Callable[[str], str]) -> str:
    return report("html")


def test_the_answer_comes_first_and_everything_is_there(html: str) -> None:
    body = html[html.index("<body>") :]
    order = [
        body.index(words)
        for words in (
            ">Result<",
            "10.28x faster",
            ">Figures<",
            "Step time, trial by trial",
            ">Task<",
            ">Without tuning<",
            ">Versions<",
            ">Every trial<",
        )
    ]
    assert order == sorted(order)
    assert body.count('class="plotly-graph-div"') == body.count("<figure>") >= 8
    assert len(re.findall(r"<td>confirm</td>", body)) == 6


def test_nothing_is_fetched(html: str) -> None:
    head = html[: html.index("<body>")]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", head + html[len(head) :])


def test_a_report_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "report.json"
    file.write_text("old")
    words = ["report", str(TABLE), "-o", str(file), "--format", "json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and f"cannot write {file}: No space left" in done.stderr
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_what_a_study_says_is_text_and_no_markup(tmp_path: Path) -> None:
    """A command line may hold anything."""
    space = SearchSpace((catalogue_knob("buckets"),))
    store, evil = str(tmp_path / "t.db"), "<script>alert(1)</script>"
    study = Study.create(space, store=store, command=("horovodrun", "python", evil))
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.1] * 20)
    assert evil not in page(Study.load(study.study_id, store))


def test_a_study_of_a_knob_of_its_own_has_a_report(tmp_path: Path) -> None:
    """A script with a launcher of its own may tune what it likes."""
    own = integer_knob("own_size", 0, 8, 0, help="A size of a launcher's own.")
    store = str(tmp_path / "t.db")
    study = Study.create(SearchSpace((own,)), store=store, settings=StudySettings(trials=4, seed=1))
    while (trial := study.ask()) is not None:
        study.tell(trial, [0.2 - 0.01 * float(trial.strategy.get("own_size", 0))] * 20)
    assert study.record.winner is not None and "own_size" in study.record.winner
    for kind in ("html", "md", "json"):
        words = ["report", "--store", store, "-o", f"{tmp_path}/r.{kind}", "--format", kind]
        assert CliRunner().invoke(app, words).exit_code == 0
    assert "set HVD_AUTOSYNC_EXTENSIONS" in (tmp_path / "r.html").read_text()
    shown = CliRunner().invoke(app, ["show", "--store", store])
    assert shown.exit_code == 0 and "unknown knob 'own_size'" in shown.output


def test_the_command_writes_each_format(report: Callable[[str], str], tmp_path: Path) -> None:
    assert report("html").startswith("<!doctype html>")
    text = report("md")
    assert "## Result\n\n10.28x faster" in text and "| large\\_codec | none | topk |" in text
    everything = json.loads(report("json"))
    assert everything["best"]["confirmed"] and len(everything["trials"]) == 174
    assert everything["study"]["winner"] == everything["best"]["strategy"]
    words = ["report", str(TABLE), "-o", str(tmp_path / "no" / "where"), "--format", "md"]
    assert CliRunner().invoke(app, words).exit_code != 0


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_shows_it(html: str, tmp_path: Path, width: int) -> None:
    """Without errors, without requests, and no wider than the window."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "report.html"
    path.write_text(html)
    wrong: list[str] = []
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": width, "height": 900})
        shown.on("pageerror", lambda error: wrong.append(str(error)))
        shown.on("console", lambda said: said.type == "error" and wrong.append(said.text))
        shown.on("request", lambda asked: asked.url.startswith("http") and wrong.append(asked.url))
        shown.goto(path.as_uri())
        shown.wait_for_selector(".main-svg", timeout=120_000)
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
    assert not wrong
