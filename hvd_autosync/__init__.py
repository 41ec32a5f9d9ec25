"""hvd_autosync finds the fastest synchronization strategy of a Horovod job, unchanged script.

The flag ``horovodrun --autosync`` needs no import at all. From Python, as in a notebook, there is
:func:`tune`; for people with an own launcher :class:`Study`, for scripts that reduce gradients by
hand :func:`step`, for those that evaluate or save at places of their own :func:`average`, for those
with losses of their own :func:`report`, for jobs that recur :func:`outcome`, and to know a trial
from the real training :func:`in_trial`. Names load when they are first used, so that a worker never
pays for the driver's libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.api.notebook import tune
    from hvd_autosync.api.results import Study
    from hvd_autosync.errors import AutosyncError
    from hvd_autosync.runtime import average, in_trial, outcome, report
    from hvd_autosync.runtime import mark_step as step
    from hvd_autosync.search_space import SearchSpace, Strategy
    from hvd_autosync.study.values import StudySettings
    from hvd_autosync.traces import TraceStore

__version__ = "0.1.0"

_HOME = {
    "AutosyncError": ("hvd_autosync.errors", "AutosyncError"),
    "SearchSpace": ("hvd_autosync.search_space", "SearchSpace"),
    "Strategy": ("hvd_autosync.search_space", "Strategy"),
    "Study": ("hvd_autosync.api.results", "Study"),
    "StudySettings": ("hvd_autosync.study.values", "StudySettings"),
    "average": ("hvd_autosync.runtime", "average"),
    "in_trial": ("hvd_autosync.runtime", "in_trial"),
    "TraceStore": ("hvd_autosync.traces", "TraceStore"),
    "outcome": ("hvd_autosync.runtime", "outcome"),
    "report": ("hvd_autosync.runtime", "report"),
    "step": ("hvd_autosync.runtime", "mark_step"),
    "tune": ("hvd_autosync.api.notebook", "tune"),
}

__all__ = [
    "AutosyncError",
    "SearchSpace",
    "Strategy",
    "Study",
    "StudySettings",
    "TraceStore",
    "average",
    "in_trial",
    "outcome",
    "report",
    "step",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
