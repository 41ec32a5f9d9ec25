"""Every code block of the documentation: shell lines and Python are run, all others are data.

A page is read from top to bottom, as by somebody with one shell and one interpreter. What cannot be
run here says so in a comment above its fence, and its command lines are parsed with the real
parsers instead::

    <!-- not run: needs four hosts -->
    <!-- says: a text that the block has to print -->
    <!-- setup: Python that makes what a fragment of a script begins with -->

A fence with a title is a file of the reader's: it is written, and run by whoever names it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

import hvd_autosync
from hvd_autosync.engine.job_line import parse_words
from hvd_autosync.search_space.strategy_file import read_strategy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SHELL, PYTHON = ("bash", "sh", "console"), ("python",)
DATA = ("text", "toml", "yaml", "json", "diff", "html", "bibtex", "mermaid")
#: What a line of a shell may begin with; in a block of text it would be one that nobody ran.
COMMANDS = re.compile(
    r"^\s*(\$ |horovodrun |hvd-autosync [a-z]|pip install|python |make [a-z])", re.M
)
_TITLE = re.compile(r'title="([^"]+)"')
_INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.M)
_NOTE = re.compile(r"<!--\s*(not run|says|setup):\s*(.*?)\s*-->", re.S)
#: Runs blocks of Python in one namespace, that of a main module, as scripts and notebooks have.
_INTERPRETER = """
import json, sys, traceback
answers = open(3, "w", buffering=1)
for line in sys.stdin:
    code, name = json.loads(line)
    try:
        exec(compile(code, name, "exec"), globals())
        print("", file=answers)
    except BaseException:
        print(json.dumps(traceback.format_exc()), file=answers)
    sys.stdout.flush()
"""


@dataclass(frozen=True)
class Block:
    """One fence, with the notes in the comment above it."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    notes: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    found: list[Block] = []
    notes: dict[str, str] = {}
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "html_block":
            notes = dict(_NOTE.findall(token.content))
        elif token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            title = _TITLE.search(rest)
            text = title[1] if title else ""
            content = _INCLUDED.sub(lambda m: (ROOT / m[1]).read_text(), token.content)
            found.append(Block(page, line, language, text, content, notes))
            notes = {}
        elif token.type == "code_block":
            found.append(Block(page, line, "indented", "", token.content, {}))
        elif token.nesting == 0:
            notes = {}
    return found


ALL = {page: blocks_of(page) for page in PAGES}


def _names(pages: list[Path], wide: Collection[str] = ()) -> list[Any]:
    """Parameters for pages; those with one of these names are part of a matrix."""
    return [
        pytest.param(
            page,
            id=page.relative_to(ROOT).as_posix(),
            marks=[pytest.mark.wide] * (page.stem in wide),
        )
        for page in pages
    ]


@pytest.mark.parametrize("page", _names(PAGES))
def test_every_block_says_what_it_is(page: Path) -> None:
    for block in ALL[page]:
        assert block.language in (*SHELL, *PYTHON, *DATA), f"{block}: {block.language!r}"
        if block.language == "text":
            assert not COMMANDS.search(block.text), f"{block} is a shell's, and says text"
        assert block.notes.get("not run", "reason"), f"{block} does not say why it is not run"


def test_notes_are_read_and_a_wrong_command_line_is_noticed(tmp_path: Path) -> None:
    page = ROOT / "docs" / "never-written.md"
    text = "<!-- not run: no\nhosts -->\n```bash\nhorovodrun -np 2 --autosync python t.py\n```\n"
    written = tmp_path / "page.md"
    written.write_text(f'{text}\nwords\n\n```toml title="a.toml"\nx = 1\n```\n')
    one, two = blocks_of(written)
    assert one.notes == {"not run": "no\nhosts"} and one.language == "bash" and one.line == 3
    assert (two.title, two.notes) == ("a.toml", {})
    wrong = [
        "horovodrun -np 2 --autosync --autosync-trails 3 python t.py",
        "horovodrun -np 2 --autosync-trials 3 python t.py",
        "hvd-autosync shwo",
        "hvd-autosync traces list --sore x",
        "FAST=1 hvd-autosync tune -np two python t.py",
    ]
    for line in wrong:
        with pytest.raises(AssertionError, match="does not parse"):
            check_line(Block(page, 1, "bash", "", line, {}), line)
    for line in lines_of(one.text):
        check_line(one, line)


@pytest.mark.parametrize("page", _names(PAGES))
def test_what_is_not_run_parses(page: Path) -> None:
    for block in ALL[page]:
        if block.language in SHELL and "not run" in block.notes:
            for line in lines_of(block.text):
                check_line(block, line)
        elif block.language in PYTHON:
            compile(block.text, str(block), "exec")


def test_strategies_that_no_block_runs_are_read() -> None:
    blocks = [block for page in PAGES for block in ALL[page]]
    run = " ".join(block.text for block in blocks if block.language in SHELL)
    files = [b for b in blocks if b.language == "toml" and (not b.title or b.title not in run)]
    assert files, "the page of exchanges has one"
    for block in files:
        strategy, classes = read_strategy(tomllib.loads(block.text))
        assert strategy and classes, str(block)


def lines_of(text: str) -> Iterator[str]:
    """The command lines of a block, continued ones in one piece, without prompts and comments."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.removeprefix("$ ").strip()
        if line and not line.startswith("#"):
            yield line


def check_line(block: Block, line: str) -> None:
    """Parse the commands of ours, and those of Horovod, in a line of a shell."""
    given = shlex.split(line, comments=True)
    words = [re.sub(r"\$\{?\w+\}?|\$\(.*?\)", "4", word) for word in given]
    for index, word in enumerate(words):
        rest = words[index + 1 :]
        try:
            if word == "horovodrun":
                _check_horovodrun(rest)
                return
            if word == "hvd-autosync":
                _check_ours(rest)
                return
        except (SystemExit, ValueError) as error:
            raise AssertionError(f"{block} does not parse: {line}: {error}") from None


def _check_horovodrun(words: list[str]) -> None:
    from horovod.runner import launch

    if "--autosync" in words:
        parse_words([word for word in words if word != "--autosync"])
        return
    before, sys.argv = sys.argv, ["horovodrun", *words]
    try:
        launch.parse_args()
    finally:
        sys.argv = before


def _check_ours(words: list[str]) -> None:
    import typer
    from typer.main import get_command

    from hvd_autosync.commands.cli import app

    command: Any = get_command(app)
    try:
        name, rest = "hvd-autosync", words
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            if rest[0] not in command.commands:
                raise ValueError(f"no command {rest[0]}")
            command, name, rest = command.commands[rest[0]], rest[0], rest[1:]
        if "--help" in rest:
            return
        given = command.make_context(name, list(rest)).params
    except (typer.Exit, typer.BadParameter) as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # of typer's parser, whichever it has inside
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if name in ("tune", "run", "space") and given.get("words"):
        parse_words(given["words"])


# --- running them ---------------------------------------------------------------------------------

#: What makes a training of a minute one of a second; the last of equal options counts.
TRAIN = f"""\
import runpy, sys
sys.argv += ["--epochs", "1", "--channels", "4", "--hidden", "512"]
runpy.run_path({str(ROOT / "examples" / "train_digits.py")!r}, run_name="__main__")
"""
#: Whatever a page tunes, beyond what was tuned before.
BRIEF = {
    "HVD_AUTOSYNC_TRIALS": "2",
    "HVD_AUTOSYNC_STEPS": "6",
    "HVD_AUTOSYNC_WARMUP": "2",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}
TUNE = """
import sys
sys.path.insert(0, "examples")
import mlflow, hvd_autosync
from mlflow_callback import log_trial
from tensorboard_callback import TensorBoard

show = TensorBoard("runs/live")

def log(study, trial):
    show(study, trial)
    log_trial(study, trial)

with mlflow.start_run():
    study = hvd_autosync.tune(
        "python train.py", np=2, options=["--gloo"], trials=3, on_trial_end=log
    )
print("STUDY", study.study_id, len(study.history))
"""


class Reader:
    """Somebody who reads pages: a folder, a shell whose variables stay, an interpreter."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self._environment = {
            **os.environ,
            **BRIEF,
            "XDG_DATA_HOME": str(data),
            "COLUMNS": "100",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        }
        self._where = folder
        self._python: subprocess.Popen[str] | None = None
        self._answers: Any = None
        self._said = folder / "said.txt"

    def read(self, block: Block) -> None:
        """Do what a block says."""
        if "setup" in block.notes:
            self._execute(block.notes["setup"], f"setup of {block}")
        if block.title:
            (self.folder / block.title).write_text(block.text)
        elif block.language in SHELL:
            said = self._shell(block)
            assert block.notes.get("says", "") in said, f"{block} did not say it:\n{said}"
        elif block.language in PYTHON:
            said = self._execute(block.text, str(block))
            assert block.notes.get("says", "") in said, f"{block} did not say it:\n{said}"

    def _shell(self, block: Block) -> str:
        """Run lines in a shell, which leaves its variables and its folder to the next one."""
        state = self.folder / "state"
        text = "\n".join(lines_of(block.text)) if block.language == "console" else block.text
        script = f"set -e\n{text}\nenv -0 > {shlex.quote(str(state))}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self._where,
            env=self._environment,
            text=True,
            timeout=240,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{block} ended with {done.returncode}:\n{done.stdout}"
        pairs = state.read_text().rstrip("\0").split("\0")
        self._environment = dict(pair.split("=", 1) for pair in pairs)
        self._where = Path(self._environment["PWD"])
        return done.stdout

    def _execute(self, code: str, name: str) -> str:
        if self._python is None:
            answers, writing = os.pipe()
            # Workers' standard output is theirs; what the block prints is read from a file.
            with self._said.open("w") as said:
                self._python = subprocess.Popen(
                    [
                        "bash",
                        "-c",
                        f'exec "$0" -u -c "$1" 3>&{writing}',
                        sys.executable,
                        _INTERPRETER,
                    ],
                    cwd=self._where,
                    env=self._environment,
                    text=True,
                    pass_fds=[writing],
                    stdin=subprocess.PIPE,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            os.close(writing)
            self._answers = os.fdopen(answers)
        begin = self._said.stat().st_size
        assert self._python.stdin is not None
        print(json.dumps([code, name]), file=self._python.stdin, flush=True)
        answer = self._answers.readline()
        said = self._said.read_bytes()[begin:].decode()
        assert answer.strip() == "", f"{name}:\n{json.loads(answer)}\n{said}"
        assert answer, f"{name} ended the interpreter:\n{said}"
        return said

    def close(self) -> None:
        """End the interpreter."""
        if self._python is not None:
            assert self._python.stdin is not None
            self._python.stdin.close()
            self._python.wait(timeout=120)
            self._answers.close()


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory, horovodrun: str) -> tuple[Path, Path]:
    """The folder of a reader who has tuned ``train.py`` once, and the data that this left.

    A study is found again by the command, the script's text and the folder, so all pages are read
    in the same one.
    """
    folder, data = tmp_path_factory.mktemp("reader"), tmp_path_factory.mktemp("kept")
    (folder / "train.py").write_text(TRAIN)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    reader = Reader(folder, data)
    said = reader._execute(TUNE, "the first tuning")
    reader.close()
    assert re.search(r"STUDY \w+ \d+", said), said
    return folder, data


@pytest.fixture
def reader(tuned: tuple[Path, Path], tmp_path: Path) -> Iterator[Reader]:
    """A reader of one page, whose store is as it was after the first tuning."""
    folder, data = tuned
    reader = Reader(folder, shutil.copytree(data, tmp_path / "data"))
    yield reader
    reader.close()


def _is_run(block: Block) -> bool:
    return block.language in (*SHELL, *PYTHON) and "not run" not in block.notes


RUN = [page for page in PAGES if any(map(_is_run, ALL[page]))]
#: Pages that tune or train for a minute each; what they show is tested elsewhere, too, and the
#: README's blocks are those that a new user runs first.
LONG = ("extending", "five-minutes", "local-steps", "notebooks", "protocols", "traces")


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("page", _names(RUN, LONG))
def test_blocks_run(page: Path, reader: Reader) -> None:
    for block in ALL[page]:
        if block.title or _is_run(block):
            reader.read(block)


@pytest.mark.cluster
@pytest.mark.slow
def test_trials_reached_tensorboard_and_mlflow_while_they_ran(tuned: tuple[Path, Path]) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    mlflow = pytest.importorskip("mlflow")
    folder, data = tuned
    study = hvd_autosync.Study.load("last", str(data / "hvd-autosync" / "traces.db"))
    measured = [t for t in study.history if t.result is not None and t.result.step_time is not None]
    events = accumulator.EventAccumulator(str(folder / "runs" / "live"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("autosync/step_ms")}
    wanted = {t.number: 1e3 * t.result.step_time.mean_s for t in measured}
    assert shown == pytest.approx(wanted)
    client = mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    (run,) = client.search_runs(["0"], "tags.`autosync.study` = '" + study.study_id + "'")
    kept = {each.step: each.value for each in client.get_metric_history(run.info.run_id, "step_ms")}
    assert kept == pytest.approx(wanted)
