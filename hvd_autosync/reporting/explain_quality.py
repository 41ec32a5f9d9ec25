"""Lossy strategies that were judged by their losses: speed against quality."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from hvd_autosync.reporting.words import speedup_text
from hvd_autosync.search_space import SearchSpace, Strategy, TrialStatus
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.resumed import at_one_speed
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import TrialRecord

#: The outcomes of judging as text.
WORDS = {Outcome.ADMITTED: "admitted", Outcome.WORSE: "worse", Outcome.NOT_SHOWN: "not shown"}


@dataclass(frozen=True)
class TradeOff:
    """A lossy strategy that was judged.

    Attributes:
        verdict: The verdict on it.
        speedup: Its speed-up over the default in the quality trials; NaN if unknown.
        on_front: Whether it is on the Pareto front of the judged strategies and the default.
    """

    verdict: Verdict
    speedup: float
    on_front: bool


def trade_offs(
    space: SearchSpace, trials: Sequence[TrialRecord], conclusion: Conclusion
) -> list[TradeOff]:
    """Return the lossy strategies that were judged, fastest first."""
    seconds = _step_s(space, at_one_speed(trials))
    default_s = seconds.get(space.default, {})
    points = [
        (_speedup(default_s, seconds.get(v.strategy, {})), v.gap) for v in conclusion.verdicts
    ]
    found = [
        TradeOff(verdict, point[0], _on_front(point, [*points, (1.0, 0.0)]))
        for verdict, point in zip(conclusion.verdicts, points, strict=True)
    ]
    return sorted(found, key=lambda each: -each.speedup if each.speedup > 0 else math.inf)


def _on_front(point: tuple[float, float], points: Sequence[tuple[float, float]]) -> bool:
    """Return whether no other point (speed-up, gap of the loss) is as good or better in both."""
    speedup, gap = point
    if not math.isfinite(speedup) or not math.isfinite(gap):
        return False
    return not any(s >= speedup and g <= gap and (s, g) != point for s, g in points)


def quality_lines(
    space: SearchSpace, trials: Sequence[TrialRecord], conclusion: Conclusion
) -> Iterator[str]:
    """Numbered lines for each lossy strategy that was judged, fastest first."""
    for row, each in enumerate(trade_offs(space, trials, conclusion), start=1):
        verdict = each.verdict
        measured = f"{speedup_text(each.speedup)} in its quality trials"
        speedup = measured if math.isfinite(each.speedup) else "not measured"
        reason = f": {verdict.reason}" if verdict.reason else ""  # shared traces have none
        front = ", on the Pareto front" if each.on_front else ""
        yield f"{row}  {space.describe(verdict.strategy)}"
        yield f"   {speedup}{front}; {WORDS[verdict.outcome]}{reason}"
        if math.isfinite(verdict.loss):
            yield (
                f"   loss {verdict.loss:.4g}, the default's {verdict.default_loss:.4g}, tolerated "
                f"increase {verdict.allowed:.2g}"
            )


def _step_s(
    space: SearchSpace, trials: Sequence[TrialRecord]
) -> dict[Strategy, dict[float, float]]:
    """Seconds of a step of each strategy in its whole quality trials, by their seed."""
    seconds: dict[Strategy, dict[float, float]] = {}
    for trial in trials:
        time = trial.step_time
        whole = trial.result is not None and trial.result.status is not TrialStatus.CUT_SHORT
        if trial.kind == "quality" and time is not None and whole:
            seed = trial.info_number("seed")
            key = seed if math.isfinite(seed) else -1.0 - trial.number  # it equals no other
            seconds.setdefault(space.complete(trial.strategy), {})[key] = time.mean_s
    return seconds


def _speedup(default_s: Mapping[float, float], own_s: Mapping[float, float]) -> float:
    """Speed-up over the seeds that both were measured with, or else over all; NaN without any."""
    if not default_s or not own_s:
        return math.nan
    shared = default_s.keys() & own_s.keys()
    default, own = (
        geometric_mean(each[seed] for seed in shared or each) for each in (default_s, own_s)
    )
    return default / own
