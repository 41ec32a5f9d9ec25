"""The trials of a study in memory."""

from __future__ import annotations

from hvd_autosync.traces.records import TrialRecord
from hvd_autosync.traces.store import TraceStore


class LoadedTrials:
    """The trials of one study; those with results are read from the store once.

    A result never changes. Trials without one are read each time, and so are new ones: another
    driver may have taken the study over. Threads may share it.

    Args:
        store: The store.
        study_id: Full id of the study.
    """

    def __init__(self, store: TraceStore, study_id: str) -> None:
        self._store, self._study_id = store, study_id
        self._told: dict[int, TrialRecord] = {}

    def read(self) -> list[TrialRecord]:
        """Return all trials, by number.

        Raises:
            StoreError: The store cannot be read, or the study was deleted.
        """
        known = self._told
        found = {trial.number: trial for trial in self._store.trials(self._study_id, known)}
        self._told = {**known, **{n: t for n, t in found.items() if t.result is not None}}
        found = {**found, **known}
        return [found[number] for number in sorted(found)]
