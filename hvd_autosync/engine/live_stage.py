"""The live stage of a tuning with lossy groups: what launched trials have judged stays as it is.

The training begins under the winner of the launched trials, and its exact knobs are tuned in its
own steps: as a study of its own, whose default is that winner, and which holds what determines the
trained model.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace

from hvd_autosync.engine.mode import OF_PROCESS_SETS, usable_study, why_not_live
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import load_restrictions
from hvd_autosync.launch.job import Job
from hvd_autosync.runtime.driver.environment import spec_from_environment
from hvd_autosync.search_space import SearchSpace, Strategy, Task, catalogue_knob
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.restrictions import space_under, without_choices
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.util.variables import JUDGED_VARIABLE

#: The group of lossy knobs under which a training can be tuned live: replicas never differ, and the
#: loss guard goes on from one exchange to the next.
_HELD_GROUP = "codec"
#: What :func:`why_kept` will find of a winner that is not known yet, as a condition for people.
UNLESS_KEPT = "unless that has lossy knobs other than codecs, or the exchange hierarchical"


def has_live_stage(job: Job, options: Options) -> bool:
    """Return whether the training of a job is tuned live after launched trials, if they allow it.

    Args:
        job: The job.
        options: The options of its tuning, with the mode that the user chose.

    Raises:
        ConfigurationError: The space file is invalid.
    """
    if options.mode != "auto" or not options.allow or options.tune_only:
        return False
    restrictions = load_restrictions(options.space, options.allow)
    return why_not_live(job, replace(options, allow=()), restrictions) is None


def why_kept(judged: StudyRecord) -> str:
    """Return why a training keeps the winner of launched trials; empty if it is tuned live.

    Args:
        judged: The finished study of these trials.
    """
    if judged.space is None or judged.task is None or judged.winner is None:
        return f"study {judged.study_id} does not tell its search space"
    for name, value in judged.winner.items():
        knob = catalogue_knob(name)
        if not knob.exact and knob.group != _HELD_GROUP and value != knob.default:
            return f"{name}={knob.format(value)} is lossy and no codec"
        if value == OF_PROCESS_SETS:
            return f"{name}={value} needs process sets, which slow all other exchanges down"
    return ""


def live_study(job: Job, options: Options, judged: StudyRecord) -> StudyRecord | None:
    """Return the earlier study of the live stage under whose winner a job trains; ``None``: none.

    Args:
        job: The job.
        options: The options of its tuning.
        judged: The study of launched trials.

    Raises:
        ConfigurationError: The space file is invalid.
        StoreError: The store cannot be read.
    """
    if options.reuse == "never":
        return None
    with closing(TraceStore(options.store)) as store:
        return usable_study(store, job, options, judged.winner)


def judged_study(options: Options) -> StudyRecord | None:
    """Return the study of launched trials under whose winner the helper's training has begun.

    It is that of the environment; ``None``: the training has begun as the job says.

    Args:
        options: The options of the tuning.

    Raises:
        StoreError: The store does not have it.
    """
    study_id, spec = os.environ.get(JUDGED_VARIABLE), spec_from_environment()
    if not study_id or spec is None:
        return None
    with closing(TraceStore(options.store)) as store:
        # A fallback of the loss guard may have left another one to the training.
        return replace(store.study(study_id), winner=spec.strategy)


def keep_drift(study: StudyRecord, options: Options, drift: str, *, in_place: bool = False) -> bool:
    """Record a drift of steps; return whether the next run of the job tunes again.

    After a live stage the study of launched trials has the report, too: codecs are judged again. A
    study that was itself a re-tuning gets none, which avoids endless searches.

    Args:
        study: The study under whose winner they drifted.
        options: The options, with the store.
        drift: The report, for people.
        in_place: Whether the training is tuned again at once, which has a limit of its own.

    Raises:
        StoreError: The store cannot be used.
    """
    with closing(TraceStore(options.store)) as store:
        kept = [study.study_id] if in_place or not study.settings.get("retune") else []
        launched = study.settings.get("judged_by")
        # It may have been deleted.
        if launched in store.ids() and not store.study(launched).settings.get("retune"):
            kept = [study.study_id, launched]
        for study_id in kept:
            store.keep_drift(study_id, [drift])
    return bool(kept)


def task_and_space_under(
    judged: StudyRecord, fixed: Collection[str], unwanted: Mapping[str, Collection[Value]]
) -> tuple[Task, SearchSpace]:
    """Return task and space of the live stage.

    Args:
        judged: The study of launched trials.
        fixed: Knobs that the training cannot change.
        unwanted: Choices of knobs that shall not be tried.
    """
    assert judged.space is not None and judged.task is not None, "why_kept has checked"
    winner = judged.winner or Strategy()
    held = {*judged.space.lossy_part(winner), *fixed}
    return judged.task, without_choices(space_under(judged.space, winner, held), unwanted)
