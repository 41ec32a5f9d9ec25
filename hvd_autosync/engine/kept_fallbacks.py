"""Fallbacks of the loss guard in a training, for the store."""

from __future__ import annotations

from hvd_autosync.engine.options import Options
from hvd_autosync.errors import StoreError
from hvd_autosync.launch import remote
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.sync_plan import sync_plan
from hvd_autosync.traces import Fallback, StudyRecord, TraceStore


class KeptFallbacks:
    """Records fallbacks of the loss guard of a training in the study that has judged its strategy.

    Args:
        study: The study under whose winner the training begins. Another one may have judged that.
        options: The options, with the store.
    """

    def __init__(self, study: StudyRecord, options: Options) -> None:
        self._study, self._options = study, options
        self._strategy = study.winner or Strategy()
        self._lines: list[str] = []

    def keep(self, step: int, reason: str) -> None:
        """Record a fallback."""
        study_id = self._study.settings.get("judged_by") or self._study.study_id
        line = f"the loss guard has ended this strategy at step {step}"
        fallback = Fallback(self._strategy, step, reason)
        try:
            TraceStore(self._options.store).keep_fallback(study_id, fallback)
            line += (
                ": from now on only --autosync-replay uses it, or a tuning with another space file "
                "or build of Horovod"
            )
        except StoreError as error:
            line += f"; this could not be recorded in the store: {error}"
        self._lines.append(line)

    def lines(self, job: Job) -> list[str]:
        """Return what became of them, for people, after the training of ``job``."""
        plan = sync_plan(self._strategy)
        if plan is None or not plan.lossy or len(remote.remote_hosts(job)) < len(job.hosts):
            return self._lines
        return [
            *self._lines,
            "no rank ran on this host, so it is not known here whether the loss guard has "
            "ended this strategy, as rank 0 prints then: the next run uses it again",
        ]
