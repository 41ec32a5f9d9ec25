"""Fits of related studies' models, kept in the store: a study starts without fitting them again.

A fit is kept under a digest of all that it follows from: trials, space, task, the versions of
the libraries and of the modules that choose trials, and the processor with what makes libraries
choose its instructions, on which the last bits depend. So it is the one that fitting again would
give. Replay does fit again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace

from hvd_autosync.errors import AutosyncError
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.traces import TraceStore
from hvd_autosync.util.versions import deciding_versions


def with_known_fits(store: TraceStore, problem: Problem) -> Problem:
    """Return ``problem`` with the fits of its sources that the store has.

    Raises:
        StoreError: The store cannot be read.
    """
    from hvd_autosync.learner.gp import as_fitted

    sources = [
        replace(source, hyperparameters=store.find_source_fit(source.study_id, _key(source)) or ())
        for source in (as_fitted(each, problem.task) for each in problem.sources)
    ]
    return replace(problem, sources=tuple(sources))


def keep_fits(store: TraceStore, problem: Problem) -> None:
    """Store the fits that the store lacks or has damaged, once the learner has made them.

    A source that cannot be fitted has none. A store that cannot be written keeps none: the next
    study fits again.
    """
    from hvd_autosync.learner.gp import source_hyperparameters

    for source in problem.sources:
        with contextlib.suppress(AutosyncError):
            found = source_hyperparameters(source)
            if found != source.hyperparameters:
                store.keep_source_fit(source.study_id, _key(source), found)


def _key(source: Source) -> str:
    """Digest of what a source's fit follows from."""
    from hvd_autosync.runtime.measure.arithmetic import processor_arithmetic

    seen = [[o.strategy.to_json(), o.step_s, o.standard_error_s] for o in source.observations]
    task = None if source.task is None else source.task.to_json()
    content = [deciding_versions(), processor_arithmetic(), source.space.to_json(), task, seen]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
