"""The store: the only place where studies and trials are written down.

The contract. Each method is one transaction: when it returns, what it wrote survives ``kill -9``;
when it raises, nothing was written. Several drivers, and several threads of one, may use a store
at once. Where the database is a server's that goes away, each method waits for it and begins anew
(:mod:`hvd_autosync.traces.outage`). A study changes only while it is running, and only its owner,
the process that created or claimed it, should change it; what later trainings say of it
(:meth:`TraceStore.keep_drift`, :meth:`TraceStore.keep_fallback`) is added later. Every method
raises ``StoreError`` when the database fails, and ``TraceFormatError`` when what it holds is
damaged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import Links, SearchSpace, Strategy, Task, TrialResult
from hvd_autosync.traces import rows, runs
from hvd_autosync.traces.database import Database
from hvd_autosync.traces.location import default_store_url
from hvd_autosync.traces.outage import LostTransactionError, repeated
from hvd_autosync.traces.owner import Owner
from hvd_autosync.traces.records import (
    DRIFT,
    FALLBACKS,
    LATER,
    Fallback,
    StudyRecord,
    StudyStatus,
    TrialRecord,
    timestamp,
)
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.traces.schema import CLUSTERS, STUDIES, TRIALS

__all__ = ["TraceStore", "default_store_url"]


class TraceStore:
    """Studies and trials in one database.

    Args:
        location: An SQLAlchemy URL, the path of an SQLite file, or ``None`` for the default.

    Raises:
        StoreError: It cannot be opened.
        TraceFormatError: It is not a trace store, damaged, or of a newer version; it was not
            changed.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None) -> None:
        self._database = Database(location)

    @property
    def name(self) -> str:
        """Where it is, for people; without secrets."""
        return self._database.name

    @property
    def files(self) -> tuple[str, ...]:
        """Files that it writes."""
        return self._database.files

    def close(self) -> None:
        """Let go of the database."""
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
        """Start a study that this process owns; the arguments are those of its record."""
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
            # Read back, so that everyone sees the settings as JSON leaves them.
            return rows.study_records(connection, STUDIES.c.study_id == study.study_id)[0]

    @repeated
    def describe_task(self, study_id: str, task: Task | None, space: SearchSpace) -> None:
        """Write down what is tuned, where that is known, and the space that is searched."""
        columns = {
            "task": None if task is None else task.to_json(),
            "fingerprint": None if task is None else task.fingerprint,
            "space": space.to_json(),
            "space_key": space.key,
        }
        with self._database.writing() as connection:
            rows.lock_running(connection, study_id)
            rows.update_study(connection, study_id, columns)

    @repeated
    def ask(self, study_id: str, strategy: Strategy, kind: str, info: Mapping[str, Any]) -> int:
        """Write down that a trial begins.

        Returns:
            Its number: 0, 1, 2 ... without gaps, also when several processes ask at once.
        """
        with self._database.writing() as connection:
            rows.lock_running(connection, study_id)
            number = rows.next_number(connection, study_id)
            trial = TrialRecord(
                study_id, number, kind, strategy, timestamp(), None, dict(info), None
            )
            rows.insert_trial(connection, trial)
            return number

    @repeated
    def tell(self, study_id: str, number: int, result: TrialResult) -> None:
        """Write down how a trial ended.

        Raises:
            StoreError: It was never asked, or told before.
        """
        key = (TRIALS.c.study_id == study_id) & (TRIALS.c.number == number)
        with self._database.writing() as connection:
            rows.lock_running(connection, study_id)
            row = connection.execute(select(TRIALS.c.told_at).where(key)).first()
            if row is None or row.told_at is not None:
                state = "was never asked" if row is None else "was told already"
                raise StoreError(
                    f"trial {number} of study {study_id} {state}",
                    hint="Tell each trial once, with the number that asking returned.",
                )
            told = {"told_at": timestamp(), "result": result.to_json()}
            connection.execute(TRIALS.update().where(key).values(**told))

    @repeated
    def finish(
        self,
        study_id: str,
        status: StudyStatus,
        outcome: Mapping[str, Any],
        winner: Strategy | None,
    ) -> None:
        """End a study; nothing of it can change afterwards but what later trainings say.

        Raises:
            StoreError: It ended before, or ``status`` is not an end.
        """
        if status is StudyStatus.RUNNING:
            raise StoreError(
                f"study {study_id} cannot end as {status.value}",
                hint="End it as finished or failed.",
            )
        columns = {
            "status": status.value,
            "owner": None,
            "heartbeat_s": None,
            "winner": None if winner is None else dict(winner),
        }
        with self._database.writing() as connection:
            rows.lock_running(connection, study_id)
            # A training may have run already, where the tuning was interrupted.
            (study,) = rows.study_records(connection, STUDIES.c.study_id == study_id, limit=1)
            kept = {name: value for name, value in (study.outcome or {}).items() if name in LATER}
            columns["outcome"] = {**kept, **outcome}
            rows.update_study(connection, study_id, columns)

    @repeated
    def keep_drift(self, study_id: str, said: Sequence[str]) -> None:
        """Write down that a training under a finished study's winner became slower for good.

        Args:
            study_id: The study.
            said: Sentences for people.

        Raises:
            StoreError: There is no such study.
        """
        self._add(study_id, DRIFT, lambda study: list(said))

    @repeated
    def keep_fallback(self, study_id: str, fallback: Fallback) -> None:
        """Write down that the loss guard has ended a study's strategy in a training.

        Args:
            study_id: The study, finished or not.
            fallback: What happened; its time is that of now.

        Raises:
            StoreError: There is no such study.
        """
        now = replace(fallback, at=timestamp())

        def add(study: StudyRecord) -> list[Any]:
            return [each.to_json() for each in (*study.fallbacks, now)]

        self._add(study_id, FALLBACKS, add)

    def _add(self, study_id: str, name: str, entry: Callable[[StudyRecord], list[Any]]) -> None:
        """Write an entry of a study's outcome, made of the study as it is."""
        with self._database.writing() as connection:
            rows.lock_study(connection, study_id)
            (study,) = rows.study_records(connection, STUDIES.c.study_id == study_id, limit=1)
            outcome = {**(study.outcome or {}), name: entry(study)}
            rows.update_study(connection, study_id, {"outcome": outcome})

    @repeated
    def delete(self, study_id: str) -> None:
        """Forget a study and its trials.

        Raises:
            StoreError: There is no such study, or another process is running it.
        """
        with self._database.writing() as connection:
            row = rows.lock_study(connection, study_id)
            if rows.has_living_owner(row) and Owner(**row["owner"]) != Owner.current():
                raise StoreError(
                    f"study {study_id} is being run by process {row['owner']['pid']} "
                    f"on {row['owner']['host']}",
                    hint="Stop that process first.",
                )
            connection.execute(TRIALS.delete().where(TRIALS.c.study_id == study_id))
            connection.execute(STUDIES.delete().where(STUDIES.c.study_id == study_id))

    @repeated
    def add(self, studies: Sequence[tuple[StudyRecord, Sequence[TrialRecord]]]) -> list[str]:
        """Write whole studies as they are, without an owner: all of them or none.

        Returns:
            The ids of those that were not there yet; identical ones are skipped.

        Raises:
            StoreError: A different study has the same id.
        """
        added = []
        with self._database.writing() as connection:
            for study, trials in studies:
                same_id = STUDIES.c.study_id == study.study_id
                stored = rows.study_records(connection, same_id)
                if not stored:
                    rows.insert_study(connection, study, trials, owner=None)
                    added.append(study.study_id)
                    continue
                known = stored[0], rows.trial_records(connection, study.study_id)
                if _content(*known) != _content(study, trials):
                    raise StoreError(
                        f"a different study {study.study_id} is in the store already",
                        hint=f"Forget it first: hvd-autosync traces delete {study.study_id}",
                    )
        return added

    @repeated
    def full_id(self, study_id: str, *, or_failed: bool = False) -> str:
        """The full id of a study, which may be too damaged to be read.

        Args:
            study_id: Its id, the beginning of one, or ``"last"`` for the newest study: of those
                that did not fail, if there is one.
            or_failed: Whether ``"last"`` is the newest, failed or not.

        Raises:
            StoreError: None fits, or several do.
        """
        with self._database.reading() as connection:
            return rows.full_id(connection, study_id, or_failed=or_failed)

    @repeated
    def study(self, study_id: str) -> StudyRecord:
        """One study; the id may be short as for :meth:`full_id`.

        Raises:
            StoreError: None fits, or several do.
        """
        with self._database.reading() as connection:
            same_id = STUDIES.c.study_id == rows.full_id(connection, study_id)
            found = rows.study_records(connection, same_id)
        if not found:  # deleted at this moment
            raise rows.no_study(study_id)
        return found[0]

    @repeated
    def studies(self) -> list[StudyRecord]:
        """All studies, newest first."""
        with self._database.reading() as connection:
            return rows.study_records(connection)

    @repeated
    def interrupted(self) -> frozenset[str]:
        """Ids of studies that have not ended, though nobody runs them any more."""
        with self._database.reading() as connection:
            return rows.interrupted(connection)

    @repeated
    def trials(self, study_id: str) -> list[TrialRecord]:
        """The trials of a study by number; the id may be short as for :meth:`full_id`."""
        with self._database.reading() as connection:
            return rows.trial_records(connection, rows.full_id(connection, study_id))

    @repeated
    def finished_tasks(self) -> list[tuple[str, Task]]:
        """Id and task of the finished study of each task and space that has measured most."""
        with self._database.reading() as connection:
            return list(rows.finished_tasks(connection))

    def find_finished(self, job_key: str) -> StudyRecord | None:
        """The newest finished study of the very same job, whatever its settings."""
        return self._newest_finished(job_key=job_key)

    def find_finished_task(self, fingerprint: str, space_key: str) -> StudyRecord | None:
        """The newest finished study of the same task in the same space."""
        return self._newest_finished(fingerprint=fingerprint, space_key=space_key)

    @repeated
    def _newest_finished(self, **columns: str) -> StudyRecord | None:
        wanted = {"status": StudyStatus.FINISHED.value, **columns}
        conditions = [STUDIES.c[name] == value for name, value in wanted.items()]
        conditions.append(STUDIES.c.winner.is_not(None))
        with self._database.reading() as connection:
            return next(iter(rows.study_records(connection, *conditions, limit=1)), None)

    @repeated
    def find_links(self, cluster_key: str) -> Links | None:
        """The links of a cluster as they were measured last, unless what was written is damaged."""
        query = select(CLUSTERS.c.links).where(CLUSTERS.c.cluster_key == cluster_key)
        with self._database.reading() as connection:
            links = connection.execute(query).scalar()
        try:
            return None if links is None else Links.from_json(links)
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            return None

    @repeated
    def keep_links(self, cluster_key: str, links: Links) -> None:
        """Write down what was measured between the ranks, in place of what was before."""
        same_key = CLUSTERS.c.cluster_key == cluster_key
        values = {"measured_at": timestamp(), "links": links.to_json()}
        with self._database.writing() as connection:
            if connection.execute(CLUSTERS.update().where(same_key).values(**values)).rowcount:
                return
            # Another driver may write the same at this moment; what it measured is as good.
            with contextlib.suppress(IntegrityError), connection.begin_nested():
                connection.execute(CLUSTERS.insert().values(cluster_key=cluster_key, **values))

    @repeated
    def keep_run(self, run: RunRecord) -> int:
        """Write down how a run of a recurring job ended.

        Returns:
            Its number: 0, 1, 2 ... without gaps; that of ``run`` is of no account.
        """
        with self._database.writing() as connection:
            return runs.insert_run(connection, run)

    @repeated
    def runs(self, job_key: str | None = None) -> list[RunRecord]:
        """The runs of a recurring job by number; of all jobs without a key."""
        with self._database.reading() as connection:
            return runs.run_records(connection, job_key)

    @repeated
    def forget_runs(self, job_key: str) -> int:
        """Forget the runs of a recurring job, for its search to begin anew; how many they were."""
        with self._database.writing() as connection:
            return runs.delete_runs(connection, job_key)

    def heartbeat(self, study_id: str) -> None:
        """Show other machines that this process is alive; call it well within 120 s.

        It is left out while the database cannot be reached: a trial may be running meanwhile.

        Raises:
            StoreError: The study does not belong to this process (any more).
        """
        lost = contextlib.suppress(LostTransactionError)
        with lost, self._database.writing(wait=False) as connection:
            if not rows.beat(connection, study_id):
                raise StoreError(
                    f"study {study_id} does not belong to this process",
                    hint="It has ended, or another driver has taken it over: stop this one.",
                )

    @repeated
    def let_go(self, study_id: str) -> None:
        """Leave a running study of this process to whoever claims it next, this process included.

        A driver that ends need not: the dead own nothing.

        Args:
            study_id: Its whole id; of a study that this process does not own nothing changes.
        """
        with self._database.writing() as connection:
            rows.let_go(connection, study_id)

    @repeated
    def claim_resumable(self, job_key: str) -> StudyRecord | None:
        """Take over the newest running study of this job whose owner is dead.

        An imported study has no owner and is never taken over: its driver may live elsewhere.

        Returns:
            The study, which this process now owns, or ``None`` when there is none.
        """
        with self._database.writing() as connection:
            return rows.claim_study(connection, job_key)


def _content(study: StudyRecord, trials: Sequence[TrialRecord]) -> list[dict[str, Any]]:
    """Everything, for comparing: as JSON, because there unknown times (NaN) equal each other.

    But for what later trainings said: a copy may have been made before.
    """
    outcome = study.outcome and {k: v for k, v in study.outcome.items() if k not in LATER}
    study = replace(study, outcome=outcome)
    return [study.to_json(), *(trial.to_json() for trial in trials)]
