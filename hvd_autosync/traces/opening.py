"""Opening of a study that the user names: a trace file, or a study in the store."""

from __future__ import annotations

import os

from hvd_autosync.errors import StoreError
from hvd_autosync.traces.jsonl import import_studies
from hvd_autosync.traces.records import StudyRecord
from hvd_autosync.traces.store import TraceStore


def open_trace(trace: str, location: str | None) -> tuple[TraceStore, StudyRecord]:
    """Return the study that ``trace`` names, and a store that contains it.

    Args:
        trace: Path of a trace file, of which the first study is used; or a study's id, the
            beginning of one, or ``"last"``.
        location: The user's store, unless ``trace`` is a file; a file is not imported into it.

    Raises:
        StoreError: There is no such study, or the store cannot be read.
        TraceFormatError: The file is damaged, of a newer version, or not a trace.
    """
    if is_file(trace):
        store = TraceStore("sqlite://")
        return store, store.study(import_studies(store, trace)[0])
    if "." in trace or os.sep in trace:  # no id has one
        raise StoreError(f"there is no file {trace}", hint="Check the path of the trace.")
    store = TraceStore(location, create=False)
    return store, store.study(trace)


def is_file(trace: str) -> bool:
    """Return whether ``trace`` of :func:`open_trace` is the path of a file, and not of a folder."""
    return os.path.exists(trace) and not os.path.isdir(trace)  # noqa: PTH110, PTH112 (any text)
