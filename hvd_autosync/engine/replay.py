"""Replay of recorded studies without a cluster: play, verify, or run other learners on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvd_autosync.engine.tuning import Listener
from hvd_autosync.errors import StudyError
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.replay import ReplayRunner, distances
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.learner import BayesianLearner, Observation
from hvd_autosync.learner.registry import learner_spec
from hvd_autosync.search_space import SearchSpace, Strategy, TrialResult, TrialSpec
from hvd_autosync.study.decision import Decision, TrialRequest
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.study.study import AskTellStudy, counted, problem_of
from hvd_autosync.study.values import Conclusion, StudySettings, Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, TrialRecord, default_result

#: Wall-clock interval between progress reports of a played trial, seconds.
_TICK_S = 0.1
#: Longer ones are no durations of trials, but of traces that were edited.
_LONGEST_S = 7 * 86_400.0
#: Kinds of trials that the study itself or our learner asks for.
_ASKED_BY_US = ("default", "sobol", "model", "quality", "confirm")


def play(
    study: StudyRecord,
    trials: Sequence[TrialRecord],
    listener: Listener,
    speed: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Play a study to ``listener`` as if it ran now.

    Args:
        study: The study, with its space.
        trials: Its trials.
        listener: Receives the events.
        speed: Speed relative to the recording; infinite: without waiting.
        sleep: Waits for the given seconds.

    Raises:
        StudyError: The study has no space, or no trial with a result.
    """
    if study.space is None or all(trial.result is None for trial in trials):
        raise StudyError(
            f"study {study.study_id} has no trials to replay",
            hint="Choose another study; hvd-autosync traces list shows them.",
        )
    store = TraceStore("sqlite://")
    running = replace(study, status=StudyStatus.RUNNING, outcome=None, winner=None)
    store.add([(running, [])])
    again = AskTellStudy(store, running)
    listener.on_study_start(again, resumed=False)
    for record in trials:
        if record.result is None:  # lost with its driver; the others keep their numbers
            store.ask(study.study_id, record.strategy, record.kind, record.info)
            continue
        listener.on_ask_start(again)
        sleep(_duration(record.info_number("ask_s")) / speed)
        number = store.ask(study.study_id, record.strategy, record.kind, record.info)
        trial = Trial(number, record.kind, record.strategy)
        listener.on_trial_start(again, trial)
        _play_trial(again, trial, record.result, listener, speed, sleep)
        store.tell(study.study_id, number, record.result)
        listener.on_trial_end(again, trial, record.result)
    conclusion = Conclusion.of(study)
    if conclusion is not None:
        again.finish(conclusion)
        listener.on_study_end(again, conclusion)


def _play_trial(
    study: AskTellStudy,
    trial: Trial,
    result: TrialResult,
    listener: Listener,
    speed: float,
    sleep: Callable[[float], None],
) -> None:
    """Report the progress of a trial at the recorded times of its steps."""
    steps = [sum(row) / len(row) for row in zip(*(r.step_s for r in result.ranks), strict=False)]
    ends = _duration(result.setup_s) + np.cumsum(steps)
    steps_s = float(ends[-1]) if len(ends) else 0.0
    total_s = max(_duration(result.total_s), _duration(steps_s))
    tick_s = _TICK_S * speed
    for tick in range(math.ceil(total_s / tick_s)):
        at = tick * tick_s
        done = int(np.searchsorted(ends, at, side="right"))
        phase = (
            "starting"
            if done == 0
            else "warming up"
            if done <= result.warmup_steps
            else "measuring"
            if done < len(ends)
            else "ending"
        )
        progress = TrialProgress(phase, done, len(ends), at)
        listener.on_trial_progress(study, trial, progress)
        sleep(min(_TICK_S, (total_s - at) / speed))


def _duration(seconds: float) -> float:
    """Return a recorded duration; 0 for what is none, as in a trace that was edited."""
    return seconds if 0 <= seconds <= _LONGEST_S else 0.0


@dataclass(frozen=True)
class Check:
    """One decision of a recorded study, repeated.

    Attributes:
        number: Number of the trial; for the end of the study, the number of trials.
        kind: Kind of the recorded trial; ``"end"`` for the end of the study.
        recorded: The recorded strategy, or the recorded winner.
        again: The repeated decision; ``None`` if there is no strategy to compare.
        same: Whether both are equal, including the kind of trial, seed and steps of a quality
            trial, and the numbers of the conclusion.
        distance: Distance of both: each categorical knob that differs counts 1, each numeric knob
            the difference as a share of its range.
        note: A note on the difference; else empty.
    """

    number: int
    kind: str
    recorded: Strategy
    again: Strategy | None
    same: bool
    distance: float = 0.0
    note: str = ""


def verify(store: TraceStore, study: StudyRecord, trials: Sequence[TrialRecord]) -> Iterator[Check]:
    """Repeat each decision of a recorded study with the results that were known at that time.

    Args:
        store: The store with the study and the studies that it learned from.
        study: The study, with its space.
        trials: Its trials, in order.

    Yields:
        One check per trial, and one for the end of the study.

    Raises:
        StudyError: The study has no space.
        StoreError: The store cannot be read.
    """
    if study.space is None:
        raise StudyError(
            f"study {study.study_id} has no search space, so it cannot be verified",
            hint="Choose a study that --autosync has recorded.",
        )
    space, settings = study.space, StudySettings.from_json(study.settings)
    problem, learner = problem_of(store, study, trials), BayesianLearner()

    def asked_at(number: int, moment: str | None) -> TrialRequest | Conclusion:
        told = counted(space, trials[:number], live=settings.mode == "live")
        known = [_as_of(trial, moment) for trial in told]
        seen = [trial for trial in known if trial is not None]
        if all(trial.kind != "default" for trial in seen):  # it was lost with its driver
            return TrialRequest(Strategy(), "default")
        return Decision(problem, settings, learner, seen).next()

    repeated = repeated_defaults(trials)
    for index, trial in enumerate(trials):
        recorded = space.complete(trial.strategy)
        if trial.kind not in _ASKED_BY_US:
            note = f"{trial.kind!r} is a trial of another learner"
            yield Check(trial.number, trial.kind, recorded, None, True, note=note)
            continue
        if trial.number in repeated:
            note = "the default was measured again, because the study had rested"
            yield Check(trial.number, trial.kind, recorded, None, True, note=note)
            continue
        again = asked_at(index, trial.asked_at)
        if isinstance(again, Conclusion):
            note = "the study ends before this trial now"
            yield Check(trial.number, trial.kind, recorded, None, False, note=note)
            continue
        now = space.complete(again.strategy)
        note = _difference(trial, again)
        same = now == recorded and not note
        yield Check(
            trial.number, trial.kind, recorded, now, same, distance(space, now, recorded), note
        )
    ended = Conclusion.of(study)
    if ended is not None and trials and not ended.source:  # else it took over another's winner
        yield _check_end(space, ended, asked_at(len(trials), None), len(trials))


def _difference(trial: TrialRecord, again: TrialRequest) -> str:
    """Return what differs between two trials besides their strategies; empty if nothing does."""
    if again.kind != trial.kind:
        return f"{again.kind} instead of {trial.kind}"
    names = ("seed", "steps") if trial.kind == "quality" else ()
    return _other(names, trial.info, again.info)


def _other(names: Sequence[str], recorded: Mapping[str, object], now: Mapping[str, object]) -> str:
    other = [name for name in names if recorded.get(name) != now.get(name)]
    return f"different {', '.join(other)}" if other else ""


def _numbers(conclusion: Conclusion) -> dict[str, Any]:
    """Return a conclusion without its texts, as JSON, in which unknown numbers are equal."""
    verdicts = tuple(replace(verdict, reason="") for verdict in conclusion.verdicts)
    return replace(conclusion, verdicts=verdicts).to_json()


def _check_end(
    space: SearchSpace, ended: Conclusion, again: TrialRequest | Conclusion, number: int
) -> Check:
    winner = space.complete(ended.winner)
    if isinstance(again, TrialRequest):
        note = f"the study continues now: {again.kind}"
        return Check(number, "end", winner, None, False, note=note)
    now = space.complete(again.winner)
    names = ("comparisons", "verdicts", "default_s")
    note = _other(names, _numbers(ended), _numbers(again))
    same = now == winner and not note
    return Check(number, "end", winner, now, same, distance(space, now, winner), note)


def _as_of(trial: TrialRecord, moment: str | None) -> TrialRecord | None:
    """``trial`` without its result if it came after ``moment``; ``None`` if it has no result.

    If a time is missing, the trial is assumed to have ended before ``moment``.
    """
    if trial.result is None:
        return None
    if not moment or not trial.told_at or trial.told_at <= moment:
        return trial
    return replace(trial, result=None, told_at=None)


def distance(space: SearchSpace, one: Strategy, other: Strategy) -> float:
    """Distance of two strategies; see :func:`hvd_autosync.launch.replay.distances`."""
    return float(distances(space, space.encode(one)[np.newaxis], space.encode(other))[0])


@dataclass(frozen=True)
class Rerun:
    """The result of a learner on recorded measurements.

    Attributes:
        learner: Name of the learner.
        best_ms: Fastest step so far after each trial, milliseconds.
        exact: Number of trials with a recorded measurement of exactly their strategy.
        distance: Mean distance of the other trials from the measurement that was used.
        best: The fastest strategy.
    """

    learner: str
    best_ms: tuple[float, ...]
    exact: int
    distance: float
    best: Strategy


def rerun(
    store: TraceStore,
    study: StudyRecord,
    trials: Sequence[TrialRecord],
    learner: str,
    count: int,
    seed: int,
    progress: Callable[[int], None] = lambda number: None,
) -> Rerun:
    """Run a learner for up to ``count`` trials, each with the nearest recorded measurement.

    Args:
        store: The store with the study and the studies that it learned from.
        study: The study, with its space.
        trials: Its trials.
        learner: Name of the learner (:mod:`hvd_autosync.learner.registry`).
        count: Maximum number of trials, including the default's.
        seed: Seed of the learner.
        progress: Called with the number of each trial.

    Raises:
        ConfigurationError: No learner has that name, or its library is not installed.
        StudyError: No trial was measured.
    """
    chosen = learner_spec(learner)
    asked = chosen.make()
    explored = [t for t in trials if t.kind != "confirm"]
    runner = ReplayRunner(study, explored)
    settings = StudySettings.from_json(study.settings)
    steps = sum(settings.steps_after(default_result(trials)))
    problem = replace(problem_of(store, study, trials), steps=steps)
    problem = chosen.restrict_problem(problem)
    seen: list[Observation] = []
    best, apart = [], []
    strategy: Strategy | None = problem.space.default
    while strategy is not None and len(seen) < count:
        progress(len(seen))
        result = runner.run(TrialSpec("replay", strategy), Limits(), lambda progress: None)
        time_s = result.step_time
        values = (time_s.mean_s, time_s.standard_error_s) if time_s is not None else (None, 0.0)
        seen.append(Observation(problem.space.complete(strategy), *values))
        apart.append(runner.distance)
        fastest = min((o.step_s for o in seen if o.step_s is not None), default=math.nan)
        best.append(1e3 * fastest)
        suggestion = asked.suggest(problem, seen, seed=seed)
        strategy = None if suggestion is None else suggestion.strategy
    far = [each for each in apart if each > 0]
    measured = [o for o in seen if o.measured]
    if not measured:
        raise StudyError(
            f"study {study.study_id} has no measured trial", hint="Choose another study."
        )
    winner = min(measured, key=lambda o: o.log_step).strategy
    mean = sum(far) / len(far) if far else 0.0
    return Rerun(learner, tuple(best), len(apart) - len(far), mean, winner)


def default_ms(trials: Sequence[TrialRecord]) -> float:
    """Milliseconds of a step of the default; NaN if unknown."""
    result = default_result(trials)
    return 1e3 * result.step_time.mean_s if result and result.step_time else math.nan
