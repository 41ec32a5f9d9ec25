"""Choices in whose live trials trainings have failed, which later trainings do not try live.

A failure says something of the job that has failed: its script may have raised an exception of its
own in that trial. Other jobs leave a choice out only once it has failed in two jobs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from hvd_autosync.errors import SpaceError
from hvd_autosync.launch.live_runner import LOST_IN_TRIAL
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.catalogue import catalogue_knob
from hvd_autosync.search_space.knobs import CategoricalKnob, Value
from hvd_autosync.traces import TraceStore, TrialRecord

#: So many jobs have to fail under a choice before all jobs leave it out.
_FEWEST_JOBS = 2


def failed_choices(store: TraceStore, own: Collection[str] = ()) -> dict[str, set[Value]]:
    """Choices of categorical knobs that a job does not try live.

    They have failed in a live trial of this job, or of two others. A mechanism that fails in place
    may work from the start, in a launched trial. Damaged studies are left out.

    Args:
        store: The store of all studies.
        own: The keys of this job's studies.

    Returns:
        Name of a knob -> choices that are not the knob's default, nor had from the start.
    """
    jobs: defaultdict[tuple[str, Value], set[str]] = defaultdict(set)
    for study, trials in store.trials_by_reason(LOST_IN_TRIAL):
        if study.settings.get("mode") != "live":
            continue
        begun = Strategy()
        if study.space is not None and study.settings.get("judged_by"):
            begun = study.space.default
        for trial in trials:
            for name, value in trial.strategy.items():
                with suppress(SpaceError):  # of an extension that is not loaded now
                    knob = catalogue_knob(name)
                    if isinstance(knob, CategoricalKnob) and value not in (
                        knob.default,
                        begun.get(name),
                    ):
                        jobs[name, value].add(study.job_key)
    failed: dict[str, set[Value]] = {}
    for (name, value), keys in jobs.items():
        if len(keys) >= _FEWEST_JOBS or not keys.isdisjoint(own):
            failed.setdefault(name, set()).add(value)
    return failed


def has_lost_training(trial: TrialRecord) -> bool:
    """Return whether a training has failed in this trial."""
    return trial.result is not None and trial.result.reason.endswith(LOST_IN_TRIAL)
