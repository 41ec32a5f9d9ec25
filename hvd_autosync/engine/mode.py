"""Whether a job is tuned at all, and in its own steps or by launched trials."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

from hvd_autosync import extensions
from hvd_autosync.engine.compatibility import why_again
from hvd_autosync.engine.option_conflicts import not_elastic, not_live
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import excluded_for, load_restrictions, tuning_key
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.remote import remote_hosts
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.exchange_plan import (
    HIERARCHICAL_FACTORS,
    PARAMETER_CLASSES,
    class_knob,
)
from hvd_autosync.search_space.horovod_settings import launch_knobs
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.fallbacks import without_excluded
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.traces.location import has_secrets, resolve_location

#: It needs process sets, so Horovod is initialized again before it and after it: Horovod negotiates
#: in each set in every cycle, which would delay all operations under other strategies.
OF_PROCESS_SETS = "hierarchical"
#: Choices that an elastic job cannot have, as its ranks change without notice: a part of the states
#: is on each rank, steps are made later, or hosts need equally many ranks.
_OF_OWNERS, _DEFERRED = "sharded", "priority"
#: Of the address of a store.
_SHOWS = (
    "has a password, or a parameter that may be one, which the command lines of ranks would show"
)
_WHY_NOT_LIVE: dict[Value, str] = {
    OF_PROCESS_SETS: "needs process sets, which not every training can add",
    _OF_OWNERS: "would lose states with a rank",
    HIERARCHICAL_FACTORS: "needs equally many ranks on each host",
    _DEFERRED: "would lose steps with a rank",
}


def why_launched(job: Job, options: Options) -> str | None:
    """Return why the trials of a job have to be launched.

    Returns:
        The reason; empty if it need not be told, because nothing is tried, or no training follows;
        ``None`` if the training can be tuned in its own steps, as far as is known before it begins.

    Raises:
        ConfigurationError: The space file is invalid.
        StoreError: The store cannot be read.
    """
    if options.tune_only or options.reuse == "only":
        return ""
    restrictions = load_restrictions(options.space, options.allow)
    # Lossy groups alone leave the live stage.
    reason = why_not_live(job, replace(options, allow=()), restrictions) or not_live(options)
    if options.reuse == "never":
        return reason or None
    with closing(TraceStore(options.store, create=False, or_empty=True)) as store:
        if usable_study(store, job, options) is not None:
            return ""
        return reason or _interrupted(store, tuning_key(job, options, restrictions))


def is_tuned(job: Job, options: Options) -> bool:
    """Return whether a job runs under the result of an earlier study: nothing is tried.

    Raises:
        ConfigurationError: The space file is invalid.
        StoreError: The store cannot be read.
    """
    return known_study(job, options) is not None


def known_study(job: Job, options: Options) -> StudyRecord | None:
    """Return the earlier study under whose result a job runs; ``None``: it has to be tuned.

    Raises:
        ConfigurationError: The space file is invalid.
        StoreError: The store cannot be read.
    """
    if options.reuse == "never":
        return None
    with closing(TraceStore(options.store)) as store:
        return usable_study(store, job, options)


def only_trains(job: Job, options: Options) -> bool:
    """Return whether a job starts under an earlier study's winner, instead of being tuned live.

    So it has also what Horovod reads at its start.

    Raises:
        ConfigurationError: The space file is invalid.
        StoreError: The store cannot be read.
    """
    if job.hosts[0] in remote_hosts(job):
        return False  # the store is that of the other host
    return options.reuse == "only" or is_tuned(job, options)


def check_what_is_read(job: Job, options: Options, *, create: bool = True) -> None:
    """Check what the helper of a training reads only once that has begun.

    Args:
        job: The job.
        options: The options of its tuning.
        create: Whether to create a store that does not exist.

    Raises:
        ConfigurationError: The space file is invalid, the store's address has a password, or the
            job is elastic and cannot be tuned.
        StoreError: The store, which is used from this host, cannot be.
    """
    restrictions = load_restrictions(options.space, options.allow)
    if job.elastic and (reason := why_not_live(job, options, restrictions)):
        raise not_elastic(reason)
    if has_secrets(options.store):
        raise ConfigurationError(
            f"a job cannot be tuned live with the store {resolve_location(options.store).address}: "
            f"its address {_SHOWS}",
            hint="Keep the password elsewhere (~/.pgpass), or use --autosync-mode launched.",
        )
    if job.hosts[0] not in remote_hosts(job):
        TraceStore(options.store, create=create, or_empty=True).close()


def why_not_live(job: Job, options: Options, restrictions: dict[str, Any]) -> str | None:
    """Return the first reason against live tuning that is known without the store, if any.

    Args:
        job: The job.
        options: The options of its tuning.
        restrictions: Their space file.
    """
    if reason := not_live(options):
        return reason
    if options.runner == "cold":
        return "--autosync-runner cold says how trials are launched"
    if not job.elastic:  # else both may change
        if job.world_size == 1:
            return "the job has a single rank, which synchronizes with no other"
        if job.hosts[0] in remote_hosts(job):
            return f"rank 0 and the process that tunes run on {job.hosts[0].name}, not on this host"
    if has_secrets(options.store):
        return f"the address of the store {_SHOWS}"
    at_start = launch_knobs(reinitializes=not job.elastic)
    if knobs := at_start & set(restrictions.get("knobs", ())):
        return f"Horovod reads {', '.join(sorted(knobs))} of the space file at its start"
    unwanted = choices_not_live(elastic=job.elastic, adds_levels=not job.elastic)
    for name, choices in unwanted.items():
        table = restrictions.get("knobs", {}).get(name, {})
        wanted = {table["fixed"]} if "fixed" in table else {*table.get("choices", ())}
        if wanted == {OF_PROCESS_SETS}:  # some trainings cannot add process sets
            choices.add(OF_PROCESS_SETS)
        if asked := choices & wanted:
            return f"{', '.join(map(str, asked))} of the space file {_WHY_NOT_LIVE[asked.pop()]}"
    if knobs := at_start & extensions.ADDED.knobs:
        return f"ranks read {', '.join(sorted(knobs))} of your extensions at their start"
    return None


def choices_not_live(*, elastic: bool, adds_levels: bool) -> dict[str, set[Value]]:
    """Return the choices of each knob that no live trial tries.

    Args:
        elastic: Whether the ranks of the job may change.
        adds_levels: Whether Horovod can have process sets of two levels.
    """
    choices: set[Value] = set() if adds_levels else {OF_PROCESS_SETS}
    if elastic:
        choices |= {_OF_OWNERS, HIERARCHICAL_FACTORS}
    unwanted = {class_knob(name, "exchange"): set(choices) for name in PARAMETER_CLASSES}
    return unwanted | ({"order": {_DEFERRED}} if elastic else {})


def usable_study(
    store: TraceStore, job: Job, options: Options, begins: Strategy | None = None
) -> StudyRecord | None:
    """Return the earlier study of a job that can be used, without abandoned strategies.

    Args:
        store: The store.
        job: The job.
        options: The options of now.
        begins: As of :func:`hvd_autosync.engine.study_options.tuning_key`.
    """
    known, again = last_study(store, job, options, begins)
    return None if again else known


def last_study(
    store: TraceStore, job: Job, options: Options, begins: Strategy | None = None
) -> tuple[StudyRecord | None, str]:
    """Return the last finished study of a job, and why it has to be tuned again all the same.

    Args:
        store: The store.
        job: The job.
        options: The options of now.
        begins: As of :func:`hvd_autosync.engine.study_options.tuning_key`.

    Returns:
        The study without abandoned strategies, ``None`` if there is none; and the reason, empty if
        the study can be used.
    """
    restrictions = load_restrictions(options.space, options.allow)
    known = store.find_finished(tuning_key(job, options, restrictions, begins))
    if known is None:
        return None, ""
    feasible = without_excluded(known, excluded_for(store, job, options, restrictions))
    return feasible, why_again(known, feasible, options)


def _interrupted(store: TraceStore, key: str) -> str | None:
    """Return a reason if a study of launched trials will be resumed."""
    for study in store.studies(job_key=key, status=StudyStatus.RUNNING):  # newest first
        if store.interrupted(study.study_id):
            if study.settings.get("mode") == "live":
                return None
            return f"study {study.study_id} of this job was interrupted in launched trials"
    return None
