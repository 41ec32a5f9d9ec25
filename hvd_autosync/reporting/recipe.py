"""How to run a strategy without tuning: environment and ``horovodrun`` line, or strategy file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from hvd_autosync.errors import StudyError
from hvd_autosync.launch.command import launcher_options
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import HIDDEN
from hvd_autosync.reporting.strategy_export import strategy_file
from hvd_autosync.search_space import HorovodSettings, Value, horovod_settings
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.traces import StudyRecord
from hvd_autosync.util.printable import shell_line

_PROGRAM = "horovodrun"
_NO_COMMAND = "YOUR-OPTIONS YOUR-COMMAND"
_RUN_FILE = "hvd-autosync run --strategy strategy.toml"


@dataclass(frozen=True)
class Recipe:
    """Shell lines that run a job under a strategy.

    Attributes:
        exports: Shell lines that set environment variables.
        line: The shell line that runs the job; empty if the job is not a ``horovodrun`` line, or
            the strategy cannot be written.
        file: The strategy file, if the strategy needs the exchanges of this project; ``line`` then
            runs it, and ``exports`` is empty.
        notes: Further instructions.
    """

    exports: tuple[str, ...]
    line: str
    file: str
    notes: tuple[str, ...]


def recipe(study: StudyRecord, strategy: Mapping[str, Value]) -> Recipe:
    """Return how to run the job of ``study`` under ``strategy`` without tuning it again."""
    try:
        text = strategy_file(study, strategy)
    except StudyError as error:
        return Recipe((), "", "", (f"There is no file and no line: {error.message}. {error.hint}",))
    if beyond_horovod(strategy):
        return Recipe((), _file_line(study), text, _notes(study, HorovodSettings()))
    settings = horovod_settings(strategy)
    return Recipe(
        exports=tuple(
            f"export {name}={shlex.quote(value)}" for name, value in settings.environment
        ),
        line=_line(study, settings, strategy),
        file="",
        notes=_notes(study, settings),
    )


def _file_line(study: StudyRecord) -> str:
    words = study.command
    if words[:1] != (_PROGRAM,) or not words[1:]:
        return f"{_RUN_FILE} {_NO_COMMAND}"
    return f"{_RUN_FILE} {shell_line(words[1:])}"


def _line(study: StudyRecord, settings: HorovodSettings, strategy: Mapping[str, Value]) -> str:
    words = study.command
    if words in ((), (_PROGRAM,)):  # the latter in a shared trace
        return f"{shell_line([_PROGRAM, *settings.options])} {_NO_COMMAND}"
    if words[0] != _PROGRAM:
        return ""
    # Options must precede the command, so they are put first.
    job = Job(options=words[1:], command=(), hosts=(), controller=_controller(words))
    added = launcher_options(job, strategy)[len(job.options) :]
    return shell_line([_PROGRAM, *added, *job.options])


def _controller(words: tuple[str, ...]) -> str | None:
    """Return the controller that the user's line asks for."""
    return next((name for name in ("gloo", "mpi") if f"--{name}" in words), None)


def _notes(study: StudyRecord, settings: HorovodSettings) -> tuple[str, ...]:
    notes = []
    if HIDDEN in " ".join(study.command):
        notes.append(f"Replace each {HIDDEN} by the hidden value.")
    if study.command and study.command[0] != _PROGRAM and settings.options:
        options = " ".join(settings.options)
        notes.append(
            f"The strategy needs {options} of {_PROGRAM}, or the equivalent of your launcher."
        )
    if study.space is not None and study.space.fixed:
        fixed = ", ".join(f"{name} = {value}" for name, value in study.space.fixed)
        notes.append(f"Keep these values, which your options and environment fixed: {fixed}.")
    return tuple(notes)
