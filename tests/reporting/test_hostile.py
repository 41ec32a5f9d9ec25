"""A trace whose every text holds what moves a cursor, hides, reverses or begins a formula."""

from __future__ import annotations

import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hvd_autosync.api.results import Study
from hvd_autosync.commands import cli
from hvd_autosync.commands.page import page
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.engine.replay import play
from hvd_autosync.engine.study_options import tuning_key
from hvd_autosync.errors import AutosyncError
from hvd_autosync.reporting.explanation import explain
from hvd_autosync.reporting.markdown import markdown
from hvd_autosync.reporting.terminal import TerminalProgress
from hvd_autosync.reporting.widget import WidgetProgress
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord, export_study
from hvd_autosync.traces.records import DRIFT, FALLBACKS
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.traces.validity import strict_study, strict_trial
from hvd_autosync.util.printable import printable_output

#: Unicode's controls, formats and separators of lines and paragraphs, then a line.
EVIL = (
    "".join(
        chr(code)
        for code in (*range(0x10000), 0xE0041)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp")
    )
    + "\x1b[2J\x1b]0;t\x07\r\nFORGED\t<script>alert(1)</script><a href='//x'>[x](http://y)![](http://y/z)"
)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all texts in a JSON value."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, (dict, list)):
        inside = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in inside:
            yield from leaves(each, (*path, name))


def spoil(fields: dict[str, Any], accepts: Callable[[dict[str, Any]], object]) -> None:
    """Put ``EVIL`` behind each text of ``fields`` where ``accepts`` lets it pass."""
    for path in list(leaves(fields)):
        if _FIXED & set(path):
            continue
        inner: Any = fields
        for name in path[:-1]:
            inner = inner[name]
        before = inner[path[-1]]
        inner[path[-1]] += EVIL
        try:
            accepts(fields)
        except (ValueError, AutosyncError):
            inner[path[-1]] = before


#: Places of strategies and knobs: there the catalogue allows its own words only, so that a knob
#: added below, ``OWN``, holds the text.
_FIXED = {"space", "winner", "strategy"}
OWN = {
    "kind": "categorical",
    "name": f"own{EVIL}",
    "help": EVIL,
    "default": "a",
    "unit": "",
    "choices": ["a", f"=b{EVIL}"],
    "exact": True,
    "group": "",
    "condition": None,
}


#: So many trials are spoiled: their texts are the same in each, but for the reason of the third.
_SPOILED = 4


def hostile(
    study: StudyRecord, trials: list[TrialRecord], **changes: Any
) -> tuple[StudyRecord, list[TrialRecord]]:
    """The study with ``EVIL`` wherever an import lets it pass."""
    fields: dict[str, Any] = json.loads(json.dumps(study.to_json())) | changes
    spoil(fields, strict_study)
    template = next(k for k in fields["space"]["knobs"] if k["kind"] == OWN["kind"])
    fields["space"]["knobs"].append(template | OWN)
    fields["versions"] |= {EVIL: EVIL}
    outcome = fields["outcome"]
    verdict = Verdict(Strategy(fields["winner"]), Outcome.WORSE, 2.0, 1.0, 0.1, EVIL, 1.5, 4)
    outcome["verdicts"] = [{**verdict.to_json(), "strategy": fields["winner"]}]
    outcome[DRIFT] = [EVIL]
    ended = {"strategy": fields["winner"], "step": 7, "reason": EVIL, "at": EVIL}
    outcome[FALLBACKS] = [EVIL, {"strategy": EVIL}, {**ended, "step": EVIL}, ended]
    changed = strict_study(fields)
    records = []
    for trial in trials:
        own: dict[str, Any] = json.loads(json.dumps(trial.to_json()))
        if trial.number < _SPOILED:
            spoil(own, lambda each, number=trial.number: strict_trial(each, changed, number))
        if own["strategy"] == {"cycle_time_ms": 20.0}:
            own["strategy"][OWN["name"]] = OWN["choices"][1]
        own["info"] |= {"priors": [EVIL], "related": [[EVIL, 0.5]], "dropped": [[EVIL, 1.0]]}
        records.append(strict_trial(own, changed, trial.number))
    assert Conclusion.of(changed) is not None
    return changed, records


@dataclass(frozen=True)
class HostileStudy:
    """Files from an untrusted source."""

    folder: Path
    study: StudyRecord
    trials: list[TrialRecord]

    @property
    def trace(self) -> str:
        """The trace file."""
        return str(self.folder / f"{self.study.study_id}.jsonl")

    @property
    def store(self) -> str:
        """A store with it, and with a run of a recurring job."""
        return str(self.folder / "store.db")

    def file(self, name: str, text: str) -> str:
        """A file with ``text``."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8", newline="")
        return str(path)


@pytest.fixture
def hostile_study(
    finished: StudyRecord, store: TraceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> HostileStudy:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "20000")  # so that escapes stay whole
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(tmp_path / "store.db"))
    words = ["--autosync", *LINE]
    job, options = read_job(parse_words(words), words)
    key = tuning_key(job, options, {})
    study, trials = hostile(finished, store.trials(finished.study_id), job_key=key)
    with closing(TraceStore(tmp_path / "store.db")) as own:
        own.add([(study, trials)])
        own.keep_run(
            RunRecord(
                "job",
                0,
                ("python", EVIL),
                study.created_at,
                Strategy(),
                1.0,
                0.5,
                EVIL,
                2.0,
                10,
                EVIL,
            )
        )
        export_study(own, study.study_id, tmp_path / f"{study.study_id}.jsonl")
    return HostileStudy(tmp_path, study, trials)


#: A job that is tuned already.
LINE = ["-np", "2", "--gloo", "true"]
_ARGUMENT = EVIL.replace("\0", "")  # the system ends arguments there
#: Lines of each command; a new command must be put here.
LINES: dict[str, Callable[[HostileStudy], list[list[str]]]] = {
    "tune": lambda s: [["--autosync-reuse", "only", *LINE], ["-np", "2", "--gloo", _ARGUMENT]],
    "run": lambda s: [
        ["--strategy", s.file("bad.toml", f"[knobs]\n{json.dumps(EVIL)} = 1"), *LINE]
    ],
    "space": lambda s: [[], LINE],
    "show": lambda s: [[], ["--take", "winner"], ["--take", _ARGUMENT], [_ARGUMENT]],
    "watch": lambda s: [[], [s.study.study_id], [_ARGUMENT]],
    "traces list": lambda s: [[]],
    "traces show": lambda s: [["--format", each] for each in ("table", "csv", "json")],
    "traces export": lambda s: [["-o", f"{s.folder}/new\x1b\u202e"]],
    "traces contribute": lambda s: [["-o", f"{s.folder}/other\x1b\u202e"]],
    "traces import": lambda s: [
        [s.trace],
        [s.trace, "--store", f"{s.folder}/other\x1b.db"],
        [s.file("bad.jsonl", json.dumps({"type": EVIL}, ensure_ascii=False) + "\n")],
        ["--horovod-autotune", s.file("bad.csv", f"{EVIL},1\n{EVIL},2")],
    ],
    "traces delete": lambda s: [["--yes", _ARGUMENT], [s.study.study_id]],
    "replay": lambda s: [
        [s.trace, "--speed", "max"],
        [s.trace, "--verify"],
        [_ARGUMENT],
        [s.trace, "--learner", "random", "--trials", "3", "--seeds", "1"],
    ],
    "report": lambda s: [[s.trace, "-o", "-", "--format", each] for each in ("md", "json", "html")],
    "simulate": lambda s: [[], [s.study.study_id, "--bandwidth", _ARGUMENT]],
    "recurring": lambda s: [[], ["job"], [_ARGUMENT]],
    "doctor": lambda s: [["--store", s.file("no.db", EVIL)]],
    "testbed up": lambda s: [["--rate", _ARGUMENT]],
    "testbed run": lambda s: [[_ARGUMENT]],
    "testbed down": lambda s: [[]],
}


def commands(group: Any, before: str = "") -> Iterator[str]:
    """The names of all commands."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, f"{before}{name} ")
        else:
            yield f"{before}{name}"


ALL = sorted(commands(typer.main.get_command(cli.app)))


def test_no_command_is_forgotten() -> None:
    assert sorted(LINES) == ALL


#: What becomes of one of the characters, and that in a line for a shell.
_ESCAPED = ("\\u202e", "\\xe2\\x80\\xae")
#: Commands that show the texts of the study instead of refusing it.
_SHOW = {"space", "show", "traces list", "traces show", "replay", "report", "recurring"}


@pytest.mark.slow
def test_what_commands_print_is_printable(hostile_study: HostileStudy) -> None:
    for command, lines in LINES.items():
        escaped = False
        for line in lines(hostile_study):
            done = CliRunner().invoke(cli.app, [*command.split(), *line])
            ended = done.exception is None or isinstance(done.exception, SystemExit)
            assert ended, (command, line, done.exception)
            for shown in (done.stdout, done.stderr):
                bad = {c for c in shown if not c.isprintable()} - {"\n", "\t"}
                assert not bad, (command, line, bad)
                begun = {each.split()[0] for each in shown.splitlines() if each.strip()}
                assert "FORGED" not in begun or _ARGUMENT in line, (command, line)
            escaped |= done.exit_code == 0 and any(each in done.output for each in _ESCAPED)
        assert escaped or command not in _SHOW, (command, done.output)


def test_a_trace_that_is_exported_again_is_the_same(hostile_study: HostileStudy) -> None:
    again = hostile_study.folder / "again.jsonl"
    with closing(TraceStore(hostile_study.store)) as store:
        export_study(store, hostile_study.study.study_id, again)
        assert store.study(hostile_study.study.study_id) == hostile_study.study
    assert again.read_bytes() == Path(hostile_study.trace).read_bytes()


class Tags(HTMLParser):
    """The elements of a page: names with their attributes, and the texts outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, frozenset[str]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, frozenset(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] not in ("script", "style"):
            self.texts.append(data)


@pytest.mark.slow
def test_the_page_has_no_element_of_the_hostile_study(hostile_study: HostileStudy) -> None:
    found = page(Study.load(hostile_study.trace))
    elements = Tags(found).elements
    assert {tag for tag, _ in elements} == set(
        "html head meta title style script body header h1 h2 h3 p code section figure div table tr "
        "th td pre".split()
    )
    assert not any(name.startswith("on") for _, names in elements for name in names)
    for text in Tags(found).texts:
        assert not {c for c in text if not c.isprintable()} - {"\n"}
    # Plotly reads markup in the texts of figures, which their JSON writes so.
    figures = found[found.rindex("<h2>Figures</h2>") :]
    assert "\\u003ca href" not in figures and "\\u003cscript" not in figures
    assert "&lt;a href" in figures or "\\u0026lt;a href" in figures


def test_the_text_for_an_issue_has_no_link_of_the_hostile_study(
    hostile_study: HostileStudy,
) -> None:
    study = Study.load(hostile_study.trace)
    text = markdown(explain(study.store, study.study_id, None))
    prose = re.sub(r"^```\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert "\\[x\\](http://y)!\\[\\](http://y/z)" in prose
    assert not re.search(r"(?<!\\)[][<>]", re.sub(r"^> ", "", prose, flags=re.MULTILINE))


def test_the_widget_has_no_element_of_the_hostile_study(hostile_study: HostileStudy) -> None:
    shown: list[str] = []
    widget = WidgetProgress()
    for each in (widget._head, widget._activity, widget._best, widget._trials, widget._notices):
        each.observe(lambda change: shown.append(change["new"]), "value")
    play(hostile_study.study, hostile_study.trials, widget, math.inf)
    widget.on_notice(EVIL)
    widget.close()
    assert any("\\u202e" in value for value in shown)
    for value in shown:
        assert value.isprintable()
        for tag, names in Tags(value).elements:
            assert tag in {"b", "div", "span", "table", "td", "th", "tr"} and names <= {"style"}


class Terminal(io.StringIO):
    """A terminal that records what is written to it."""

    def isatty(self) -> bool:
        return True


def test_the_display_moves_the_cursor_itself_only(
    hostile_study: HostileStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20000")
    terminal = Terminal()
    display = TerminalProgress(terminal)
    with printable_output():
        play(hostile_study.study, hostile_study.trials, display, math.inf)
        display.on_notice(EVIL)
    display.close()
    shown = terminal.getvalue()
    assert "\\u202e" in shown and "\x1b[2J" not in shown
    rest = re.sub(r"\x1b\[[0-9;?]*[A-Kghlm]", "", shown)
    assert not {c for c in rest if not c.isprintable()} - {"\n", "\r"}
