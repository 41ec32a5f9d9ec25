"""Related tasks in a store: which of them may help with a new one, and what they have taught."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from hvd_autosync.errors import AutosyncError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Source
from hvd_autosync.learner.similarity import similarity
from hvd_autosync.search_space import SearchSpace, Task
from hvd_autosync.traces import TraceStore, TrialRecord

#: Entry of a trial's information: the studies that were learned from, with their similarity.
RELATED = "related"
#: Most studies that are learned from, and what they must have in common with the task.
MOST_RELATED, LEAST_SIMILAR = 5, 0.1
#: Of one task, in different spaces.
_MOST_OF_ONE_TASK = 2
#: Most observations of each.
_MOST_OBSERVATIONS = 60


def related_studies(store: TraceStore, task: Task) -> list[tuple[str, float]]:
    """The most similar finished studies with their similarity, the most similar first.

    Of several studies of one task in one space the one that has measured most speaks for all, and
    at most two of one task in different spaces are heard.

    Raises:
        StoreError: The store cannot be read.
    """
    related = []
    heard: Counter[str] = Counter()
    for study_id, known in store.finished_tasks():
        with contextlib.suppress(ArithmeticError, ValueError):  # a stranger's impossible numbers
            alike = similarity(known, task)
            if alike >= LEAST_SIMILAR and heard[known.fingerprint] < _MOST_OF_ONE_TASK:
                heard[known.fingerprint] += 1
                related.append((study_id, round(alike, 3)))
    return sorted(related, key=lambda each: -each[1])[:MOST_RELATED]


def named_sources(trials: Iterable[TrialRecord]) -> list[str]:
    """Ids of the studies that a study learned from, as its trials say."""
    entries = [trial.info.get(RELATED) for trial in trials]
    lists = [entry for entry in entries if isinstance(entry, list)]
    return list(
        dict.fromkeys(str(e[0]) for each in lists for e in each if isinstance(e, list) and e)
    )


def load_sources(store: TraceStore, related: Iterable[Sequence[Any]]) -> tuple[Source, ...]:
    """What related studies have taught; those that are gone or damaged are left out.

    Args:
        store: Where they are.
        related: Their ids and similarities.
    """
    sources: dict[str, Source] = {}
    for entry in related:
        try:  # a stranger's trace may name anything, also twice
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
    """At most 60 of the measured ones, fast and slow alike."""
    measured = sorted((o for o in observations if o.measured), key=lambda o: o.log_step)
    count = min(len(measured), _MOST_OBSERVATIONS)
    return [measured[index * len(measured) // count] for index in range(count)]


def observations_of(space: SearchSpace, trials: Sequence[TrialRecord]) -> list[Observation]:
    """What a learner is told of ``trials``: those that ended, failed ones without a time.

    The job as it is is left out where restrictions exclude it from the space.
    """
    observations = []
    for trial in trials:
        strategy = space.complete(trial.strategy)
        if trial.result is not None and (strategy or not space.dimension):
            time_s = trial.result.step_time
            values = (time_s.mean_s, time_s.standard_error_s) if time_s else (None, 0.0)
            observations.append(Observation(strategy, *values))
    return observations
