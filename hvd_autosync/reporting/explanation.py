"""``hvd-autosync show``: the explanation of a study, starting with its result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hvd_autosync.launch.facts import default_controller
from hvd_autosync.reporting.explain_knobs import knob_table
from hvd_autosync.reporting.explain_priors import priors_table
from hvd_autosync.reporting.explain_quality import quality_lines
from hvd_autosync.reporting.explain_task import task_table
from hvd_autosync.reporting.explain_trials import (
    failed_trials,
    lost_strategies,
    parts_text,
    sample_table,
)
from hvd_autosync.reporting.recipe import Recipe, recipe
from hvd_autosync.reporting.strategy_export import WINNER
from hvd_autosync.reporting.words import (
    default_text,
    evidence_text,
    gain_text,
    judged_by,
    seconds_text,
    speedup_text,
)
from hvd_autosync.search_space import SearchSpace, Strategy, Value, every_knob
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.study.fallbacks import fallback_line
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.resumed import at_one_speed
from hvd_autosync.study.study import problem_of
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, TrialRecord
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable, printable_lines, shell_line


class Verbatim(Text):
    """A line to be copied: it is never wrapped, truncated or indented."""

    def __init__(self, line: str) -> None:
        super().__init__(printable_lines(line), style="cyan", no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class Section:
    """A section of an explanation; rich prints its content indented under the title.

    Attributes:
        title: The title; empty for the first section.
        content: Paragraphs, tables, and lines to be copied.
    """

    title: str
    content: tuple[RenderableType, ...]

    def __rich__(self) -> RenderableType:
        """Return the section on a terminal."""
        if not self.title:
            return Group(*self.content)
        body = [c if isinstance(c, Verbatim) else Padding(c, (0, 0, 0, 2)) for c in self.content]
        return Group("", Text(self.title, style="bold"), *body)


def explain(store: TraceStore, study_id: str, store_option: str | None = "") -> Iterator[Section]:
    """Yield the explanation of a study section by section, each computed on demand.

    Print the sections with ``crop=False``, so that lines to be copied are not truncated.

    Args:
        store: The store that contains the study.
        study_id: Its id, the beginning of one, or ``"last"``.
        store_option: What printed commands need to find the study, as
            :func:`hvd_autosync.traces.location.store_option` returns it; ``None``: the study is
            in a trace file, which these commands do not read.

    Raises:
        StoreError: There is no such study.
    """
    study = store.study(study_id)
    trials = store.trials(study.study_id)
    study = with_knob_order(study, trials)
    conclusion = Conclusion.of(study)
    yield _head(study)
    yield from _result(store, study, at_one_speed(trials), conclusion)
    if study.task is not None:
        yield Section("Task", (task_table(study.task, trials),))
    if study.space is not None and conclusion is not None:
        if conclusion.winner != study.space.default:
            effects = knob_table(problem_of(store, study, trials), trials, conclusion.winner)
            yield Section("Effect of each knob", (effects,))
        listing = _list_trials(study.study_id, store_option)
        goal = StudySettings.from_json(study.settings).goal
        if lost := list(lost_strategies(study.space, trials, conclusion, listing, goal)):
            yield Section("Other strategies", tuple(lost))
        if conclusion.verdicts:
            lines = quality_lines(study.space, trials, conclusion)
            take = _take_row(study.study_id, store_option)
            yield Section("Quality of lossy strategies", (*lines, *take))
    if (priors := priors_table(trials)) is not None:
        yield Section("Priors", (priors,))
    if parts := parts_text(trials):
        yield Section("Duration of trials", (parts,))
    if failed := list(failed_trials(study, trials)):
        yield Section("Failed trials", tuple(failed))
    yield from _recipe(study, conclusion, store_option)


def _take_row(study_id: str, store_option: str | None) -> Iterator[RenderableType]:
    """Return how to write one of the judged strategies to a file."""
    front = "For a strategy on the Pareto front, no other one is both as fast and as good."
    what = f"{front} To write one of these strategies to a file"
    return _command(what, _take(study_id, "ROW", store_option or ""), store_option)


def _list_trials(study_id: str, store_option: str | None) -> Iterator[RenderableType]:
    """Return how to list every trial of a study."""
    line = f"hvd-autosync traces show {study_id}{store_option or ''}"
    return _command("To list every trial", line, store_option)


def _command(what: str, line: str, store_option: str | None) -> Iterator[RenderableType]:
    """Yield what a command does, and the lines to be copied.

    Args:
        what: The beginning of a sentence.
        line: The command, with the option for the store.
        store_option: As of :func:`explain`.
    """
    if store_option is None:
        yield f"{what}, import this trace file first:"
        yield Verbatim("hvd-autosync traces import FILE")
    else:
        yield f"{what}:"
    yield Verbatim(line)


def _take(study_id: str, which: str, store_option: str) -> str:
    return f"hvd-autosync show {study_id} --take {which}{store_option} > strategy.toml"


def _head(study: StudyRecord) -> Section:
    begun = study.created_at[:16].replace("T", " ")
    lines = [Text(f"Study {study.study_id}, begun {begun} UTC, {study.status.value}")]
    if study.command:
        lines.append(Text(shell_line(study.command), style="dim"))
    return Section("", tuple(lines))


def _result(
    store: TraceStore, study: StudyRecord, trials: list[TrialRecord], conclusion: Conclusion | None
) -> Iterator[Section]:
    if conclusion is not None and study.space is not None:
        yield Section("Result", tuple(_concluded(study, trials, conclusion)))
    elif study.status is StudyStatus.RUNNING:
        yield Section("Result", (_without_end(store, study, trials),))
    elif study.status is StudyStatus.FAILED:
        yield Section("Result", (f"None: the study failed: {study.failure}",))
    else:
        text = "The best samples by Horovod's own score (which is not a step time):"
        yield Section("Result", (text, sample_table(study, trials)))


def _without_end(store: TraceStore, study: StudyRecord, trials: list[TrialRecord]) -> str:
    """Return that a study has not ended, and what can be done if no driver is running it."""
    ended = amount(sum(trial.result is not None for trial in trials), "trial")
    if study.study_id not in store.interrupted(study.study_id, imported=True):
        return f"None yet after {ended}."
    if study.study_id not in store.interrupted(study.study_id):
        return f"None: its trace was written before its end, after {ended}."
    again = " Run its command again to resume it, unless that has --autosync-reuse never."
    return f"None: it was interrupted after {ended}.{again if study.command else ''}"


def _concluded(
    study: StudyRecord, trials: list[TrialRecord], conclusion: Conclusion
) -> Iterator[RenderableType]:
    assert study.space is not None
    best = conclusion.best
    if best is not None:
        yield Text(gain_text(best, study.space, judged_by(study)), style="bold green")
        yield Text(printable(study.space.describe(conclusion.winner)), style="bold green")
        before, after = seconds_text(conclusion.default_s), seconds_text(conclusion.winner_s)
        yield f"{before} per step became {after}."
    else:
        kept = default_text(study.space, judged_by(study))
        yield Text(f"No gain found: use {kept}.", style="bold")
        for closest in conclusion.comparisons[:1]:
            name = study.space.describe(closest.strategy)
            evidence = f"{speedup_text(closest.speedup)} ({evidence_text(closest)})"
            yield f"The best candidate was {name}: {evidence}."
    if not study.space.holds_job:
        yield _restricted(study, study.space, trials)
    if judged := judged_by(study):
        yield _held(study, study.space, judged)
    why = f"Reason: {conclusion.reason}. " if conclusion.reason else ""  # shared traces have none
    yield f"{why}Exploring ended because {conclusion.stopped}."
    for line in study.drift:
        yield Text(printable(f"Since then: {line}."), style="bold yellow")
    if fallback := fallback_line(study):
        yield Text(printable(f"Since then: {fallback}."), style="bold yellow")


def _restricted(study: StudyRecord, space: SearchSpace, trials: list[TrialRecord]) -> str:
    """Return what the restrictions moved, and what was measured of the job that they exclude."""
    usual, default = _usual(study), space.default
    moved = [
        f"{knob.name}={knob.format(default[knob.name])}"
        for knob in space.knobs
        if knob.name in default and default[knob.name] != usual.get(knob.name, default[knob.name])
    ]
    measured = next((t for t in trials if not t.strategy and t.result), None)
    time = measured.step_time if measured else None
    job_s = seconds_text(time.mean_s if time else math.nan)
    values = f" with {', '.join(moved)}" if moved else ""
    return f"Your restricted default is the job{values}. The unchanged job: {job_s} per step."


def _usual(study: StudyRecord) -> dict[str, Value]:
    """Return the values of all knobs in the unchanged job."""
    usual = {knob.name: knob.default for knob in every_knob()}
    if study.task is not None:
        usual["controller"] = default_controller(study.task.resources.build)
    return usual


def _held(study: StudyRecord, space: SearchSpace, judged: str) -> str:
    """Return with what a training began that was then tuned live."""
    usual = _usual(study)
    begun = [
        f"{name}={space[name].format(value)}"
        for name, value in space.default.items()
        if name in usual and value != usual[name]
    ]
    return (
        f"The training began under the winner of study {judged}, whose trials were launched: "
        f"{', '.join(begun) or 'the job unchanged'}. Its lossy knobs stayed as they were judged."
    )


def _recipe(
    study: StudyRecord, conclusion: Conclusion | None, store_option: str | None
) -> Iterator[Section]:
    if study.winner is None:
        return
    if conclusion is not None and conclusion.best is None and _is_job(study, study.winner):
        yield Section("Without hvd_autosync", ("Run the job unchanged.",))
        return
    found = recipe(study, study.winner)
    title = "Without tuning" if beyond_horovod(study.winner) else "Without hvd_autosync"
    take = ""
    if found.file and store_option is not None:
        take = _take(study.study_id, WINNER, store_option)
    yield Section(title, tuple(_recipe_lines(found, take)))


def _is_job(study: StudyRecord, strategy: Strategy) -> bool:
    """Return whether ``strategy`` is the unchanged job."""
    space = study.space
    if space is None or not space.holds_job or judged_by(study):
        return False
    return space.complete(strategy) == space.default


def _recipe_lines(found: Recipe, take: str) -> Iterator[RenderableType]:
    for line in (*found.exports, take, found.line):
        if line:
            yield Verbatim(line)
    if found.file:
        yield "with strategy.toml:"
        yield Verbatim(found.file)
    yield from found.notes
