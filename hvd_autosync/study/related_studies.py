"""Related studies in a store: selection of the most similar ones, and their observations."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_autosync.errors import AutosyncError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.similarity import similarity
from hvd_autosync.search_space import SearchSpace, Task, TrialStatus
from hvd_autosync.study.resumed import at_one_speed, superseded_defaults
from hvd_autosync.traces import TraceStore, TrialRecord

#: Key in a trial's info: the related studies that were used, with their similarities.
RELATED = "related"
#: Largest number of related studies, and least similarity.
MOST_RELATED, LEAST_SIMILAR = 5, 0.1
#: Largest number of studies of one task, in different spaces.
_MOST_OF_ONE_TASK = 2
#: Largest number of observations of each study.
_MOST_OBSERVATIONS = 60


def related_studies(store: TraceStore, task: Task, first: str = "") -> list[tuple[str, float]]:
    """Return ids and similarities of the most similar finished studies, most similar first.

    Of several studies of one task in one space only the one with most measurements is used, and at
    most two of one task in different spaces.

    Args:
        store: The store.
        task: The task.
        first: Id of a study of the task itself that comes first; empty: there is none.

    Raises:
        StoreError: The store cannot be read.
    """
    related = []
    used: Counter[str] = Counter()
    finished = [each for each in store.finished_tasks() if each[0] != first]
    for study_id, known in [*[(first, task)] * bool(first), *finished]:
        with contextlib.suppress(
            ArithmeticError, ValueError
        ):  # impossible numbers in an imported trace
            alike = similarity(known, task)
            few = study_id == first or used[known.fingerprint] < _MOST_OF_ONE_TASK
            if alike >= LEAST_SIMILAR and few:
                used[known.fingerprint] += 1
                related.append((study_id, round(alike, 3)))
    return sorted(related, key=lambda each: (each[0] != first, -each[1]))[:MOST_RELATED]


def named_sources(trials: Iterable[TrialRecord]) -> list[str]:
    """Return the ids of the related studies that a study used, from the info of its trials."""
    entries = [trial.info.get(RELATED) for trial in trials]
    lists = [entry for entry in entries if isinstance(entry, list)]
    return list(
        dict.fromkeys(str(e[0]) for each in lists for e in each if isinstance(e, list) and e)
    )


def load_sources(store: TraceStore, related: Iterable[Sequence[Any]]) -> tuple[Source, ...]:
    """Load related studies as sources; those that are missing or damaged are left out.

    Args:
        store: The store of the studies.
        related: Their ids and similarities.
    """
    sources: dict[str, Source] = {}
    for entry in related:
        try:  # an imported trace may contain anything here, also duplicates
            study_id, alike = str(entry[0]), min(max(float(entry[1]), 0.0), 1.0)
            study, trials = store.study(study_id), store.trials(study_id)
            if study.space is None:
                continue
            seen = subsample(observations_of(study.space, trials))
        except (AutosyncError, LookupError, TypeError, ValueError, ArithmeticError):
            continue
        known = Source(study.study_id, study.task, study.space, tuple(seen), alike)
        sources.setdefault(study.study_id, known)
    return tuple(sources.values())


def subsample(observations: Sequence[Observation]) -> list[Observation]:
    """Return at most 60 of the measured observations, evenly spaced by step time."""
    measured = sorted((o for o in observations if o.measured), key=lambda o: o.log_step)
    count = min(len(measured), _MOST_OBSERVATIONS)
    return [measured[index * len(measured) // count] for index in range(count)]


def is_unknown(trial: TrialRecord) -> bool:
    """Return whether a trial runs, or was cut short before it had a step time."""
    result = trial.result
    if result is None:
        return True
    return result.status is TrialStatus.CUT_SHORT and result.step_time is None


def observations_of(space: SearchSpace, trials: Sequence[TrialRecord]) -> list[Observation]:
    """Return the observations of the finished ``trials``; failed ones have no step time.

    Those that were cut short before they had a step time are left out: they have not failed.

    All step times are as of the last default trial; of its repetitions only the last measured one
    counts, and failures of a default that was measured do not: it works. The unchanged job is left
    out if restrictions exclude it from the space.
    """
    observations, default = [], space.default
    superseded = superseded_defaults(trials)
    for trial in at_one_speed(trials):
        strategy = space.complete(trial.strategy)
        if trial.number in superseded:
            continue
        if trial.result is not None and (strategy or not space.dimension):
            time_s = trial.result.step_time
            if is_unknown(trial):
                continue
            values = (time_s.mean_s, time_s.standard_error_s) if time_s else (None, 0.0)
            observations.append(Observation(strategy, *values))
    works = any(each.measured and each.strategy == default for each in observations)
    return [o for o in observations if o.measured or not (works and o.strategy == default)]
