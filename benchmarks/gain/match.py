"""One match: a workload in a setting, all tuners, then all of their finds in turn.

A match runs in a process of its own, on the first host of its setting, because ``horovodrun``
has to start there. It gets its plan as JSON, and appends its measurements to a CSV file.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from command_line import commit_now, read_table
from exchanged.interface import sent_bytes

from gain.tuners import (
    RECIPE,
    Contender,
    Found,
    Length,
    Say,
    autosync,
    contender_name,
    horovod_autotune,
    random_search,
    run_trial,
    steps_of,
)
from gain.workloads import WORKLOADS
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy, TrialResult


@dataclass(frozen=True)
class Plan:
    """What one match needs to know.

    Attributes:
        setting: Name of the setting.
        workload: Name of the workload.
        options: Of ``horovodrun``.
        trials: Most trials of our tuner before it confirms.
        steps: Steps measured in each trial.
        warmup: Steps before those.
        rounds: Rounds of the final measurement.
        seed: Of the tuners.
        allow: Lossy groups that a second run of our tuner may use; empty: no second run.
        output: CSV file that measurements are appended to.
        folder: Where stores and logs go.
    """

    setting: str
    workload: str
    options: tuple[str, ...]
    trials: int
    steps: int
    warmup: int
    rounds: int
    seed: int
    allow: str
    output: str
    folder: str

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "options": tuple(fields["options"])})

    @property
    def length(self) -> Length:
        """How long a trial is."""
        return Length(self.warmup, self.steps)


@dataclass(frozen=True)
class Run:
    """One run of the final measurement; a row of the CSV file.

    Attributes:
        commit: What was measured, as git names it.
        match: Distinguishes this match from an earlier one that was broken off.
        setting: Where.
        workload: What.
        contender: Whose find.
        round: Counted from 1.
        strategy: Compact JSON.
        status: How the run ended.
        median_s: Median step time, seconds; empty text when there is none.
        mean_s: Trimmed mean of the step times, seconds; likewise.
        standard_error_s: Of that mean, seconds; likewise.
        blocked_s: What ranks have waited for communication in a step, seconds; likewise.
        sent_bytes: What has left the first host in the whole run; 0 where there is one host.
        sent_steps: Steps of the whole run, those before the measured ones included.
        tuning_trials: What finding it cost: trials ...
        tuning_steps: ... steps ...
        tuning_minutes: ... and wall time.
        step_ms: All measured steps in order, milliseconds, with blanks between them.
    """

    commit: str
    match: str
    setting: str
    workload: str
    contender: str
    round: int
    strategy: str
    status: str
    median_s: float | str
    mean_s: float | str
    standard_error_s: float | str
    blocked_s: float | str
    sent_bytes: int
    sent_steps: int
    tuning_trials: int
    tuning_steps: int
    tuning_minutes: float
    step_ms: str


def play(plan: Plan, say: Say) -> None:
    """Tune, then measure; see the module."""
    options = list(plan.options)
    words = [*options, *WORKLOADS[plan.workload].command]
    job, _ = read_job(parse_words(words), words)
    contenders, ours = _tune(plan, job, say)
    measure(plan, job, contenders, ours, say)


def measure(plan: Plan, job: Job, contenders: Sequence[Contender], ours: Found, say: Say) -> None:
    """Measure all contenders in turn, round by round, every time with a fresh launch.

    Args:
        plan: How long, how often, and where to write.
        job: What is run.
        contenders: Under which strategies.
        ours: What our tuner knows of the job.
        say: Takes a line for people.
    """
    say("final measurement of " + ", ".join(c.name for c in contenders))
    commit, match = commit_now(), f"{time.time():.0f}-{os.getpid()}"
    for number in range(1, plan.rounds + 1):
        for contender in contenders:
            before = sent_bytes()
            result = run_trial(job, contender.strategy, plan.length, ours)
            sent = 0 if plan.setting == "loopback" else sent_bytes() - before
            row = _row(plan, commit, match, contender, number, result, sent)
            append(plan.output, row)
            shown = (
                f"{1e3 * row.median_s:.1f} ms"
                if isinstance(row.median_s, float)
                else f"{result.status.value}: {result.reason}"
            )
            say(f"round {number} of {plan.rounds}, {contender.name}: {shown}")


def _tune(plan: Plan, job: Job, say: Say) -> tuple[list[Contender], Found]:
    """All contenders, and what ours found.

    Without ours there is no match; Horovod's autotune may fail, which is said.
    """
    length, folder = plan.length, Path(plan.folder)
    say("tuning by horovodrun --autosync")
    ours = autosync(job, length, plan.trials, plan.seed, "", folder)
    found = [Contender("default", Strategy()), Contender("docs recipe", RECIPE)]
    say(f"tuning by horovodrun --autotune, {ours.contender.cost.steps} steps")
    try:
        found.append(horovod_autotune(job, ours, length, folder))
    except AutosyncError as error:
        say(f"horovod autotune found nothing: {error}")
    if ours.space.dimension:
        found.append(random_search(job, ours, length, plan.seed, say))
    found.append(ours.contender)
    if plan.allow:
        say(f"tuning by horovodrun --autosync --autosync-allow {plan.allow}")
        lossy = autosync(job, length, plan.trials, plan.seed, plan.allow, folder)
        found.append(lossy.contender)
    return found, ours


def _row(
    plan: Plan,
    commit: str,
    match: str,
    contender: Contender,
    number: int,
    result: TrialResult,
    sent: int,
) -> Run:
    steps = [float(s) for s in result.measured_durations()]
    time_s = result.step_time
    cost = contender.cost
    return Run(
        commit,
        match,
        plan.setting,
        plan.workload,
        contender.name,
        number,
        contender.strategy.to_json(),
        result.status.value,
        statistics.median(steps) if time_s else "",
        time_s.mean_s if time_s else "",
        time_s.standard_error_s if time_s else "",
        result.blocked_share * time_s.mean_s if time_s else "",
        sent,
        steps_of(result),
        cost.trials,
        cost.steps,
        round(cost.minutes, 2),
        " ".join(f"{1e3 * s:.2f}" for s in steps),
    )


def append(path: str, row: Run) -> None:
    """Add a row to the CSV file ``path``, which is made when it is not there."""
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [each.name for each in fields(Run)])
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(asdict(row))


def clock(began: float, prefix: str) -> Say:
    """Prints lines that begin with the time since ``began`` and ``prefix``."""

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        print(f"[{minutes:3d}:{seconds:02d}] {prefix}: {text}", flush=True)

    return say


def read(path: str) -> list[dict[str, str]]:
    """The rows of the CSV file ``path``."""
    return read_table(path, "match")


def matches(rows: Sequence[dict[str, str]]) -> dict[tuple[str, str], list[dict[str, str]]]:
    """(setting, workload) -> rows of the last match of it, in the order of their first row."""
    last = {(row["setting"], row["workload"]): row["match"] for row in rows}
    found: dict[tuple[str, str], list[dict[str, str]]] = {each: [] for each in last}
    for row in rows:
        place = row["setting"], row["workload"]
        if row["match"] == last[place]:
            found[place].append(row)
    return found


def is_finished(rows: Sequence[dict[str, str]], plan: Plan) -> bool:
    """Whether the rows of a match go up to the last contender of the last round."""
    last = contender_name(plan.allow), str(plan.rounds)
    return any((row["contender"], row["round"]) == last for row in rows)
