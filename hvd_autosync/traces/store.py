"""The store of studies and trials.

Each method is one transaction: after it returns, its data survive ``kill -9``; if it raises,
nothing was written. Several drivers, and several threads of a driver, may use a store at once. If
the database is on a server and the connection is lost, each method waits for the server and repeats
its transaction (:mod:`hvd_autosync.traces.outage`).

A study changes only while it runs. While its owner runs, the process that created or claimed it,
only that process and its forks may change it, with the store that it has opened; other processes
get a ``NotOwnerError``. If its owner is dead, the first process that changes it becomes its owner.
An exception are reports of later trainings (:meth:`TraceStore.keep_drift`,
:meth:`TraceStore.keep_fallback`). Every method raises ``StoreError`` if the database fails, and
``TraceFormatError`` if its content is damaged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import select

from hvd_autosync.errors import NotOwnerError, StoreError, TraceFormatError
from hvd_autosync.search_space import Links, SearchSpace, Strategy, Task, TrialResult
from hvd_autosync.traces import links, outcomes, rows, runs, source_fits
from hvd_autosync.traces.database import Database
from hvd_autosync.traces.location import default_store_url
from hvd_autosync.traces.outage import repeated
from hvd_autosync.traces.owner import Owner
from hvd_autosync.traces.records import Fallback, StudyRecord, StudyStatus, TrialRecord, timestamp
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.traces.schema import STUDIES, TRIALS
from hvd_autosync.traces.state import StudyState, study_state

__all__ = ["TraceStore", "default_store_url"]

_LOG = logging.getLogger(__name__)


class TraceStore:
    """Studies and trials in one database.

    Args:
        location: A path, an SQLAlchemy URL, or ``None``: ``HVD_AUTOSYNC_STORE``, else the default.
        create: Whether to create a store that does not exist. Otherwise one that was named is an
            error, and the default store is empty.
        or_empty: Whether, where it is not created, one that was named is empty, too.

    Raises:
        StoreError: The database cannot be opened, or there is none and that is an error.
        TraceFormatError: The database is not a trace store, is damaged, or is of a newer version;
            it was not changed.
    """

    def __init__(
        self,
        location: str | os.PathLike[str] | None = None,
        *,
        create: bool = True,
        or_empty: bool = False,
    ) -> None:
        self._database = Database(location, create=create, or_empty=or_empty)
        self._opener = Owner.current()

    @property
    def name(self) -> str:
        """Its location for people, without secrets."""
        return self._database.name

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it writes."""
        return self._database.files

    def stop_waiting(self) -> None:
        """Wait for a lost server no more: from now on it is an error at once."""
        self._database.stop_waiting()

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    @repeated
    def create_study(
        self,
        *,
        job_key: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> StudyRecord:
        """Create a study that this process owns; the arguments are fields of its record."""
        study = StudyRecord(
            secrets.token_hex(6),
            timestamp(),
            job_key,
            tuple(command),
            dict(settings),
            dict(versions),
            StudyStatus.RUNNING,
            None,
            None,
            None,
            None,
        )
        with self._database.writing() as connection:
            rows.insert_study(connection, study, (), Owner.current())
            # Read back, so that the settings are as JSON stores them.
            return rows.study_records(connection, STUDIES.c.study_id == study.study_id)[0]

    @repeated
    def describe_task(self, study_id: str, task: Task | None, space: SearchSpace) -> None:
        """Store the task, if it is known, and the search space."""
        columns = {
            "task": None if task is None else task.to_json(),
            "fingerprint": None if task is None else task.fingerprint,
            "space": space.to_json(),
            "space_key": space.key,
        }
        with self._database.writing() as connection:
            rows.lock_own(connection, study_id, self._opener)
            rows.update_study(connection, study_id, columns)

    @repeated
    def ask(self, study_id: str, strategy: Strategy, kind: str, info: Mapping[str, Any]) -> int:
        """Store the beginning of a trial; it is a heartbeat of the owner, too.

        Returns:
            Its number: 0, 1, 2 ... without gaps, even if several processes ask at once.
        """
        with self._database.writing() as connection:
            rows.lock_own(connection, study_id, self._opener)
            number = rows.next_number(connection, study_id)
            trial = TrialRecord(
                study_id, number, kind, strategy, timestamp(), None, dict(info), None
            )
            rows.insert_trial(connection, trial)
            rows.beat(connection, study_id)
            return number

    @repeated
    def tell(
        self, study_id: str, number: int, result: TrialResult, *, at: str | None = None
    ) -> None:
        """Store the result of a trial that ended ``at``, by default now; a heartbeat of its owner.

        Raises:
            StoreError: There is no such trial, or it has a result already.
        """
        key = (TRIALS.c.study_id == study_id) & (TRIALS.c.number == number)
        with self._database.writing() as connection:
            rows.lock_own(connection, study_id, self._opener)
            row = connection.execute(select(TRIALS.c.told_at).where(key)).first()
            if row is None or row.told_at is not None:
                state = "was never asked for" if row is None else "has a result already"
                raise StoreError(
                    f"trial {number} of study {study_id} {state}",
                    hint="Call tell() once per trial, with the number that ask() returned.",
                )
            told = {"told_at": at or timestamp(), "result": result.to_json()}
            connection.execute(TRIALS.update().where(key).values(**told))
            rows.beat(connection, study_id)

    @repeated
    def finish(
        self,
        study_id: str,
        status: StudyStatus,
        outcome: Mapping[str, Any],
        winner: Strategy | None,
    ) -> None:
        """End a study; afterwards only reports of later trainings can be added.

        Raises:
            StoreError: The study has ended already, or ``status`` is not a final one.
        """
        with self._database.writing() as connection:
            outcomes.finish_study(connection, study_id, self._opener, status, outcome, winner)

    @repeated
    def keep_drift(self, study_id: str, reports: Sequence[str]) -> None:
        """Store the drift of a training under a finished study's winner.

        Args:
            study_id: The study.
            reports: Sentences for people.

        Raises:
            StoreError: There is no such study.
        """
        with self._database.writing() as connection:
            outcomes.add_drift(connection, study_id, reports)

    @repeated
    def keep_fallback(self, study_id: str, fallback: Fallback) -> None:
        """Store a fallback of the loss guard in a training under a study's strategy.

        Args:
            study_id: The study, finished or not.
            fallback: The fallback; its time is set to now.

        Raises:
            StoreError: There is no such study.
        """
        with self._database.writing() as connection:
            outcomes.add_fallback(connection, study_id, fallback)

    @repeated
    def delete(self, study_id: str) -> None:
        """Delete a study and its trials.

        Raises:
            StoreError: There is no such study, or another process is running it.
        """
        with self._database.writing() as connection:
            row = rows.lock_study(connection, study_id)
            with contextlib.suppress(TraceFormatError):  # nobody runs a damaged study
                owner = rows.living_owner(row)
                if owner is not None and owner != Owner.current():
                    raise StoreError(
                        f"study {study_id} is being run by process {owner.pid} on {owner.host}",
                        hint="Stop that process first.",
                    )
            connection.execute(TRIALS.delete().where(TRIALS.c.study_id == study_id))
            connection.execute(STUDIES.delete().where(STUDIES.c.study_id == study_id))
            source_fits.delete_fit(connection, study_id)

    @repeated
    def add(self, studies: Sequence[tuple[StudyRecord, Sequence[TrialRecord]]]) -> list[str]:
        """Store complete studies without an owner: all of them or none.

        Returns:
            The ids of the new studies; studies that are stored already are skipped, except for
            reports of later trainings.

        Raises:
            StoreError: A different study has the same id.
        """
        with self._database.writing() as connection:
            return rows.add_studies(connection, studies)

    @repeated
    def full_id(self, study_id: str, *, or_failed: bool = False) -> str:
        """Return the full id of a study; the study itself may be damaged.

        Args:
            study_id: Its id, the beginning of one, or ``"last"`` for the newest study that did not
                fail; if all failed, the newest one.
            or_failed: Whether ``"last"`` is the newest study, failed or not.

        Raises:
            StoreError: No study or several studies match.
        """
        with self._database.reading() as connection:
            return rows.full_id(connection, study_id, or_failed=or_failed)

    @repeated
    def study(self, study_id: str) -> StudyRecord:
        """One study; the id may be abbreviated as for :meth:`full_id`.

        Raises:
            StoreError: No study or several studies match.
        """
        with self._database.reading() as connection:
            same_id = STUDIES.c.study_id == rows.full_id(connection, study_id)
            found = rows.study_records(connection, same_id)
        if not found:  # deleted at this moment
            raise rows.no_study(connection, study_id)
        return found[0]

    @repeated
    def ids(self) -> list[str]:
        """Return the ids of all studies, newest first; the studies themselves may be damaged."""
        with self._database.reading() as connection:
            return rows.study_ids(connection)

    @repeated
    def studies(
        self,
        *,
        job_key: str | None = None,
        status: StudyStatus | None = None,
        skip_damaged: bool = False,
    ) -> list[StudyRecord]:
        """Return studies, newest first.

        Args:
            job_key: Key of their job; ``None``: of all jobs.
            status: Their state; ``None``: any.
            skip_damaged: Whether studies that are damaged, or of a newer version, are left out.
                Otherwise the first of them is an error.
        """
        conditions = []
        if job_key is not None:
            conditions.append(STUDIES.c.job_key == job_key)
        if status is not None:
            conditions.append(STUDIES.c.status == status.value)
        with self._database.reading() as connection:
            return rows.study_records(connection, *conditions, skip_damaged=skip_damaged)

    @repeated
    def interrupted(self, study_id: str | None = None, *, imported: bool = False) -> frozenset[str]:
        """Ids of studies that can be resumed, or all that none runs; with an id, of that alone."""
        with self._database.reading() as connection:
            return rows.interrupted(connection, study_id, imported)

    @repeated
    def state(self, study_id: str) -> StudyState:
        """Return how far a study has come, from its full id; cheap, for who waits for news.

        Raises:
            StoreError: There is no such study.
        """
        with self._database.reading() as connection:
            return study_state(connection, study_id)

    @repeated
    def trials(self, study_id: str, known: Collection[int] = ()) -> list[TrialRecord]:
        """Return a study's trials by number; the id may be abbreviated as for :meth:`full_id`.

        Args:
            study_id: The study.
            known: Numbers of trials that are left out, except perhaps some of many.
        """
        with self._database.reading() as connection:
            study_id = rows.full_id(connection, study_id)
            return rows.trial_records(connection, study_id, known)

    @repeated
    def trials_by_reason(self, ending: str) -> list[tuple[StudyRecord, list[TrialRecord]]]:
        """Studies and those of their trials whose reason ends so; damaged ones are left out."""
        with self._database.reading() as connection:
            return rows.trials_by_reason(connection, ending)

    @repeated
    def finished_tasks(self) -> list[tuple[str, Task]]:
        """Id and task of the largest finished study of each task and space."""
        with self._database.reading() as connection:
            return list(rows.finished_tasks(connection))

    @repeated
    def find_finished(self, job_key: str) -> StudyRecord | None:
        """Return the newest finished study of a job that has a winner, whatever its settings."""
        with self._database.reading() as connection:
            return next(iter(rows.finished(connection, {"job_key": job_key}, limit=1)), None)

    @repeated
    def finished_of_task(self, fingerprint: str, space_key: str) -> list[StudyRecord]:
        """Return the finished studies of a task and space that have a winner, newest first.

        Damaged studies are left out, because they may be of other jobs.
        """
        columns = {"fingerprint": fingerprint, "space_key": space_key}
        with self._database.reading() as connection:
            return rows.finished(connection, columns, skip_damaged=True)

    @repeated
    def find_links(self, cluster_key: str) -> Links | None:
        """Return a cluster's last measured links; ``None`` if there are none, or damaged ones."""
        with self._database.reading() as connection:
            return links.find_links(connection, cluster_key)

    @repeated
    def keep_links(self, cluster_key: str, measured: Links) -> None:
        """Store the measured links of a cluster, in place of earlier ones."""
        with self._database.writing() as connection:
            links.keep_links(connection, cluster_key, measured)

    @repeated
    def find_source_fit(self, study_id: str, key: str) -> tuple[float, ...] | None:
        """Return the hyperparameters of a model under this key; ``None``: it must be fitted."""
        with self._database.reading() as connection:
            return source_fits.find_fit(connection, study_id, key)

    @repeated
    def keep_source_fit(self, study_id: str, key: str, hyperparameters: Sequence[float]) -> None:
        """Store the hyperparameters of a study's model, in place of earlier ones."""
        with self._database.writing() as connection:
            source_fits.keep_fit(connection, study_id, key, tuple(hyperparameters))

    @repeated
    def keep_run(self, run: RunRecord) -> int:
        """Store a run of a recurring job.

        Returns:
            Its number: 0, 1, 2 ... without gaps; the number of ``run`` is ignored.
        """
        with self._database.writing() as connection:
            return runs.insert_run(connection, run)

    @repeated
    def runs(self, job_key: str | None = None) -> list[RunRecord]:
        """Return the runs of a recurring job by number; without a key those of all jobs."""
        with self._database.reading() as connection:
            return runs.run_records(connection, job_key)

    @repeated
    def forget_runs(self, job_key: str) -> int:
        """Delete the runs of a recurring job, so that its search restarts; return their number."""
        with self._database.writing() as connection:
            return runs.delete_runs(connection, job_key)

    def heartbeat(self, study_id: str) -> None:
        """Record for other machines that this process is alive; call it well within every 120 s.

        If the database fails (it is locked, full or gone), the call does nothing: a trial may run,
        and the next call may succeed. What needs the database then says so.

        Raises:
            NotOwnerError: The study does not belong to this process (any more).
        """
        try:
            with self._database.writing(wait=False) as connection:
                if not rows.beat(connection, study_id):
                    raise rows.not_owner(connection, study_id)
        except NotOwnerError:
            raise
        except StoreError as error:
            _LOG.info("no heartbeat of study %s: %s", study_id, error.message)

    @repeated
    def let_go(self, study_id: str) -> None:
        """Release a running study of this process, so that any driver can claim it.

        A driver that exits need not call this, as studies of dead owners can be claimed.

        Args:
            study_id: Its full id; nothing changes if this process does not own the study.
        """
        with self._database.writing() as connection:
            rows.let_go(connection, study_id)

    @repeated
    def claim_resumable(self, job_key: str) -> StudyRecord | None:
        """Take over the newest running study of this job that has a dead owner.

        An imported study has no owner and is never taken over: its driver may run elsewhere.

        Returns:
            The study, which this process now owns; ``None`` if there is none.
        """
        with self._database.writing() as connection:
            return rows.claim_study(connection, job_key)
