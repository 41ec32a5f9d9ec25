"""Sections on strategies that lost, failed trials, and samples of Horovod's own tuner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from hvd_autosync.reporting.listing import plain_table, strategy_text
from hvd_autosync.reporting.runner_ups import RunnerUp, runner_ups
from hvd_autosync.reporting.words import (
    LEVEL,
    first_line,
    interval_text,
    seconds_text,
    speedup_text,
)
from hvd_autosync.search_space import SearchSpace
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TrialRecord
from hvd_autosync.util.amounts import amount

_SHOWN = 5


def lost_strategies(
    space: SearchSpace,
    trials: Sequence[TrialRecord],
    conclusion: Conclusion,
    how_to_list: Iterable[RenderableType],
    goal: str = "steps",
) -> Iterator[RenderableType]:
    """Yield the best strategies that lost, each followed by its evidence and the reason.

    Args:
        space: The space of the study.
        trials: All of its trials.
        conclusion: Its conclusion.
        how_to_list: Follows where more have lost than are shown.
        goal: The goal of the study.
    """
    found = runner_ups(space, trials, conclusion, goal)
    for each in found[:_SHOWN]:
        yield space.describe(each.strategy)
        yield _below(_evidence(each))
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more"
        yield from how_to_list


def _evidence(lost: RunnerUp) -> str:
    predicted = f" (predicted {seconds_text(lost.predicted_s)})"
    return (
        f"{speedup_text(lost.speedup)} ({LEVEL} interval {interval_text(lost.low, lost.high)}), "
        f"{seconds_text(lost.step_s)} per step"
        f"{predicted if math.isfinite(lost.predicted_s) else ''}: {lost.why}"
    )


def failed_trials(study: StudyRecord, trials: Sequence[TrialRecord]) -> Iterator[str | Padding]:
    """Yield the trials without a step time, each with its status and the job's last line."""
    for trial in trials:
        result = trial.result
        if result is not None and result.step_time is None:
            output = result.stderr_tail.strip().rpartition("\n")[2]
            reasons = filter(None, [result.status.value, first_line(result.reason), output])
            yield f"trial {trial.number}: {strategy_text(study, trial.strategy)}"
            yield _below(": ".join(reasons))


def parts_text(trials: Sequence[TrialRecord]) -> str:
    """Mean duration of a trial by phase, over the completed trials; empty if unknown.

    For live trials also what the training did between them.
    """
    ended = [t.result for t in trials if t.result and math.isfinite(t.result.total_s)]
    ended = [result for result in ended if result.step_time is not None]
    if not ended:
        return ""
    sums: dict[str, float] = {}
    for result in ended:
        for name, seconds in result.parts_s().items():
            sums[name] = sums.get(name, 0.0) + seconds
    parts = ", ".join(f"{name} {seconds / len(ended):.1f} s" for name, seconds in sums.items())
    total_s = sum(result.total_s for result in ended) / len(ended)
    between = sum(t.result.steps_before for t in trials if t.result)
    went_on = f" Between trials the training made {amount(between, 'step')}." if between else ""
    return f"A trial took {total_s:.1f} s on average: {parts}.{went_on}"


def _below(text: str) -> Padding:
    return Padding(text, (0, 0, 0, 2), style="dim")


def sample_table(study: StudyRecord, trials: Sequence[TrialRecord]) -> Table:
    """Return the best samples of Horovod's own tuner by its score."""
    table = plain_table("sample", "score in B/µs", "strategy")
    scores = {trial.number: trial.info_number("score_bytes_per_us") for trial in trials}
    scored = [trial for trial in trials if math.isfinite(scores[trial.number])]
    for trial in sorted(scored, key=lambda t: -scores[t.number])[:_SHOWN]:
        score = f"{scores[trial.number]:.4g}"
        table.add_row(str(trial.number), score, strategy_text(study, trial.strategy))
    return table
