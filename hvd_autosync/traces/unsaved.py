"""Results that the store could not take: each is a file of the user's until the store can."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from pathlib import Path

from hvd_autosync.errors import AutosyncError, StoreError
from hvd_autosync.search_space import TrialResult
from hvd_autosync.traces.files import write_file
from hvd_autosync.traces.location import data_folder
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.store import TraceStore

_log = logging.getLogger(__name__)


def keep_unsaved(study_id: str, number: int, result: TrialResult) -> Path:
    """Write the result of a trial to a file of the user's data folder, and return the file.

    Raises:
        StoreError: It cannot be written, as where a number is not finite.
    """
    path = _file(study_id, number)
    try:
        text = json.dumps(result.to_json(), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"it cannot be written as JSON: {error}") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {path.parent}: {error.strerror}") from error
    write_file(path, text.encode(), overwrite=True)
    return path


def take_unsaved(store: TraceStore, study_id: str) -> list[int]:
    """Store the results of a study that are in files, and delete those.

    A file that cannot be read stays, and a warning in the log says so.

    Returns:
        Numbers of the trials.

    Raises:
        StoreError: The store cannot be read or written.
    """
    taken = []
    for trial in store.trials(study_id):
        path = _file(study_id, trial.number)
        if not path.exists():
            continue
        if trial.result is None:
            try:
                result = TrialResult.from_json(json.loads(path.read_bytes()))
            except (OSError, ValueError, AutosyncError) as error:
                _log.warning("%s cannot be read, so its trial runs again: %s", path, error)
                continue
            # Long ago, perhaps; the clock of a file server may differ.
            at = max(_written_at(path), trial.asked_at)
            store.tell(study_id, trial.number, result, at=at)
            taken.append(trial.number)
        path.unlink(missing_ok=True)
    return taken


def _written_at(path: Path) -> str:
    return timestamp(datetime.fromtimestamp(path.stat().st_mtime, timezone.utc))


def _file(study_id: str, number: int) -> Path:
    return data_folder() / "unsaved" / f"{study_id}-{number}.json"
