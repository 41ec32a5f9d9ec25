"""What the options of a job say of its study: settings, space file, and key in the store."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from hvd_autosync import extensions
from hvd_autosync.engine.options import Options
from hvd_autosync.launch.facts import horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy, check_restrictions
from hvd_autosync.search_space.documents import read_toml
from hvd_autosync.search_space.knobs import LOSSY_GROUPS
from hvd_autosync.search_space.restrictions import check_allowed
from hvd_autosync.study import defaults
from hvd_autosync.study.fallbacks import excluded_strategies
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TraceStore


def load_restrictions(path: str | None, allow: Collection[str] = LOSSY_GROUPS) -> dict[str, Any]:
    """Return the space file, parsed and checked; empty without one.

    Args:
        path: The file; ``None``: there is none.
        allow: The allowed groups of lossy knobs.

    Raises:
        ConfigurationError: The file cannot be read, is not TOML, has unknown content, or needs a
            group that is not allowed.
    """
    if path is None:
        return {}
    document = read_toml(path, "the space file")
    check_restrictions(document)
    check_allowed(document, allow)
    return document


def settings_of(options: Options) -> StudySettings:
    """Return the settings of a study, from the options."""
    return StudySettings(
        trials=options.trials,
        minutes=options.minutes,
        steps=options.steps or defaults.STEPS,
        warmup=options.warmup or defaults.WARMUP,
        adaptive_steps=options.steps is None and options.warmup is None,
        quality_steps=options.quality_steps,
        quality_minutes=options.quality_minutes,
        loss_tolerance=options.loss_tolerance,
        goal=options.goal,
        allow=options.allow,
        seed=options.seed,
        transfer=options.transfer == "auto",
        expected_hours=options.expected_hours or defaults.EXPECTED_HOURS,
        mode="live" if options.mode == "live" else "launched",
    )


def tuning_key(
    job: Job, options: Options, restrictions: dict[str, Any], begins: Strategy | None = None
) -> str:
    """Return the key of a job with its tunable knobs and its Horovod build.

    Trials, minutes, steps, warm-up and seed are not part of it, so a study is reused whatever they
    were.

    Args:
        job: The job.
        options: The options of its tuning.
        restrictions: Their space file.
        begins: The strategy under which the training begins that is tuned live, with its lossy
            knobs; ``None``: as the job says.
    """
    build = asdict(horovod_build())
    begun = [] if begins is None else [{"begins": dict(begins)}]
    text = json.dumps(
        [job.key, list(options.allow), restrictions, build, *extensions.names(), *begun],
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def tuning_keys(job: Job, restrictions: Mapping[str, Any] = MappingProxyType({})) -> set[str]:
    """Return the keys that ``job`` may have in the store, whatever groups were allowed.

    Args:
        job: The job.
        restrictions: Its space file; keys without one are returned, too.
    """
    files = [{}, dict(restrictions)] if restrictions else [{}]
    subsets = itertools.chain.from_iterable(
        itertools.permutations(LOSSY_GROUPS, count) for count in range(len(LOSSY_GROUPS) + 1)
    )
    pairs = itertools.product(subsets, files)
    return {tuning_key(job, Options(allow=allow), file) for allow, file in pairs}


def excluded_for(
    store: TraceStore, job: Job, options: Options, restrictions: dict[str, Any]
) -> tuple[Strategy, ...]:
    """Return the strategies that the loss guard ended in trainings of a job.

    They do not depend on the allowed groups, nor on whether a space file is given.

    Args:
        store: The store of the studies.
        job: The job.
        options: The options of its tuning.
        restrictions: Their space file.
    """
    keys = {tuning_key(job, options, restrictions), *tuning_keys(job, restrictions)}
    return excluded_strategies(store, keys)
