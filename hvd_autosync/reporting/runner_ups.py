"""The measured strategies that lost, with their speed-ups and reasons, as plain values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean

from hvd_autosync.reporting.words import STANDARD_ERRORS, first_line
from hvd_autosync.search_space import SearchSpace, StepTime, Strategy, TrialStatus
from hvd_autosync.study.candidate_selection import judged_part
from hvd_autosync.study.confirm import MAX_ROUNDS, usual_rounds
from hvd_autosync.study.resumed import at_one_speed, superseded_defaults
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import TrialRecord
from hvd_autosync.util.amounts import amount


@dataclass(frozen=True)
class RunnerUp:
    """A measured strategy that was not chosen.

    Attributes:
        strategy: The strategy, complete in its space.
        step_s: Its step time in seconds; from the confirmation if it was confirmed.
        predicted_s: The learner's prediction in seconds; NaN without one.
        speedup: Speed-up over the default.
        low: Lower end of the interval of the speed-up.
        high: Upper end of the interval of the speed-up.
        why: Reason why it lost.
    """

    strategy: Strategy
    step_s: float
    predicted_s: float
    speedup: float
    low: float
    high: float
    why: str


def confirmed_step_s(space: SearchSpace, trials: Sequence[TrialRecord]) -> dict[Strategy, float]:
    """Geometric mean of each strategy's step times in the confirmation, seconds.

    As in its comparison with the default, rounds that stand apart are left out.
    """
    times: dict[Strategy, list[StepTime]] = {}
    for trial in trials:
        time = trial.step_time
        if trial.kind == "confirm" and time is not None:
            times.setdefault(space.complete(trial.strategy), []).append(time)
    default = times.get(space.default, [])
    return {
        strategy: geometric_mean(own[number].mean_s for number in _counted(default, own))
        for strategy, own in times.items()
    }


def _counted(default: Sequence[StepTime], own: Sequence[StepTime]) -> Sequence[int]:
    rounds = min(len(default), len(own), MAX_ROUNDS)
    return usual_rounds(default[:rounds], own[:rounds]) if rounds else range(len(own))


def runner_ups(
    space: SearchSpace, trials: Sequence[TrialRecord], conclusion: Conclusion, goal: str = "steps"
) -> list[RunnerUp]:
    """Return the measured strategies other than the default and the winner.

    Strategies that were confirmed come first; within each group the fastest comes first. All step
    times are as of the last default trial; of its repetitions only the last counts.
    """
    superseded = superseded_defaults(trials)
    trials = [trial for trial in at_one_speed(trials) if trial.number not in superseded]
    explored: dict[Strategy, tuple[TrialRecord, StepTime]] = {}
    for trial in trials:
        time = trial.step_time
        if trial.kind != "confirm" and time is not None:
            explored.setdefault(space.complete(trial.strategy), (trial, time))
    if space.default not in explored:
        return []
    default = explored.pop(space.default)[1]
    explored.pop(conclusion.winner, None)
    explored.pop(Strategy(), None)  # the unchanged job, if restrictions exclude it
    confirmed, spread = confirmed_step_s(space, trials), launch_spread(space, trials)
    failed = _failed_confirmations(space, trials)
    found = []
    for strategy, (trial, time) in explored.items():
        lost = _confirmed(strategy, conclusion) or _explored(
            trial, time, default, spread, conclusion, failed.get(strategy, "")
        )
        speedup, low, high, why = lost
        predicted_s = trial.info_number("predicted_step_s")
        step_s = confirmed.get(strategy, time.mean_s)
        refusal = _refused(space, strategy, conclusion, goal) if high >= 1 else ""
        found.append(RunnerUp(strategy, step_s, predicted_s, speedup, low, high, refusal or why))
    return sorted(found, key=lambda each: (each.strategy not in confirmed, -each.speedup))


def _refused(space: SearchSpace, strategy: Strategy, conclusion: Conclusion, goal: str) -> str:
    """Return why a lossy strategy could not be confirmed; empty if it could."""
    if space.is_exact(strategy):
        return ""
    verdicts = {judged_part(space, each.strategy, goal): each for each in conclusion.verdicts}
    if verdict := verdicts.get(judged_part(space, strategy, goal)):
        because = f", because {verdict.reason}" if verdict.reason else ""  # shared traces have none
        return "" if verdict.admissible else f"refused{because}"
    why = ": too similar to other strategies, or not fast enough" if verdicts else ""
    return f"its losses were not judged{why}"


def _failed_confirmations(space: SearchSpace, trials: Sequence[TrialRecord]) -> dict[Strategy, str]:
    """Return how each strategy failed in the confirmation, of those that did."""
    return {
        space.complete(trial.strategy): (
            first_line(trial.result.reason) or trial.result.status.value
        )
        for trial in trials
        if trial.kind == "confirm" and trial.result and not trial.result.status.measured
    }


def launch_spread(space: SearchSpace, trials: Sequence[TrialRecord]) -> float:
    """Standard deviation of the log step time between launches of the same strategy.

    Pooled over the strategies that were measured more than once; 0 if there are none.
    """
    logs: dict[Strategy, list[float]] = {}
    for trial in trials:
        if trial.result is not None and trial.result.step_time is not None:
            log_s = math.log(trial.result.step_time.mean_s)
            logs.setdefault(space.complete(trial.strategy), []).append(log_s)
    repeated = [values for values in logs.values() if len(values) > 1]
    squares = sum((v - fmean(values)) ** 2 for values in repeated for v in values)
    return math.sqrt(squares / sum(len(v) - 1 for v in repeated)) if repeated else 0.0


def _confirmed(
    strategy: Strategy, conclusion: Conclusion
) -> tuple[float, float, float, str] | None:
    """Speed-up, its interval, and the reason why a confirmed strategy lost."""
    for each in conclusion.comparisons:
        if each.strategy == strategy:
            why = (
                "faster than the default, but slower than the winner"
                if each.proven
                else "confirmation did not show a significant gain over the default"
            )
            return each.speedup, each.low, each.high, why
    return None


def _explored(
    trial: TrialRecord,
    own: StepTime,
    default: StepTime,
    spread: float,
    conclusion: Conclusion,
    failed: str,
) -> tuple[float, float, float, str]:
    """Speed-up, its interval, and the reason why a strategy was not confirmed.

    The interval includes the spread of steps and the spread of launches. ``failed`` is how the
    strategy failed in the confirmation, if it did.
    """
    speedup = default.mean_s / own.mean_s
    error = math.hypot(
        default.standard_error_s / default.mean_s, own.standard_error_s / own.mean_s, spread, spread
    )
    factor = math.exp(STANDARD_ERRORS * error)
    best, high = conclusion.best, speedup * factor
    if failed:
        why = f"failed when measured again: {failed}"
    elif trial.result is not None and trial.result.status is TrialStatus.CUT_SHORT:
        steps = amount(own.steps, "measured step")
        why = f"cut short after {steps}: {trial.result.reason}"
    elif high < 1:
        why = "slower than the default"
    elif best is None and not conclusion.comparisons:
        why = f"not confirmed: {conclusion.reason or 'it was not measured again'}"
    elif best is None:
        why = "the model predicted no gain beyond noise"
    elif high < best.low:
        why = "slower than the winner"
    else:
        why = "within the noise of one trial of the winner, for which the model predicted more"
    return speedup, speedup / factor, high, why
