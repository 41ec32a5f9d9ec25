"""Trace files, in JSON Lines.

A file contains one study, or several one after the other::

    {"type": "header", "format": "hvd-autosync-trace", "version": 1, "units": {...}}
    {"type": "study", ...}            the fields of a StudyRecord
    {"type": "trial", ...}            the fields of a TrialRecord, in order of their numbers
    {"type": "footer", "trials": 1, "sha256": ...}     over the lines of this study before it
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.traces.anonymous import anonymous
from hvd_autosync.traces.files import check_regular, write_file
from hvd_autosync.traces.json_lines import LONGEST_LINE_BYTES, LineReader
from hvd_autosync.traces.records import StudyRecord, TrialRecord
from hvd_autosync.traces.store import TraceStore
from hvd_autosync.traces.validity import UnknownValueError, strict_study, strict_trial

FORMAT_VERSION = 1
_GZIP = ".gz"
#: Limit of an uncompressed file. A study of 60 trials with 200 steps on 256 ranks has about 120 MB.
_LARGEST_BYTES = 256 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_HEADER = {
    "type": "header",
    "format": "hvd-autosync-trace",
    "version": FORMAT_VERSION,
    "units": {"time": "s", "size": "B"},
}
_log = logging.getLogger(__name__)


def export_study(
    store: TraceStore,
    study_id: str,
    path_or_stream: str | os.PathLike[str] | TextIO,
    *,
    overwrite: bool = False,
    anonymously: bool = False,
    others: Sequence[str] = (),
    if_exists: str = "Name another file, or give overwrite=True.",
) -> None:
    """Write a study to a file that only the user can read, or to an open text stream.

    Args:
        store: The store that contains the study.
        study_id: Its id, the beginning of one, or ``"last"``.
        path_or_stream: The file, which is written atomically and compressed if its name ends in
            ``.gz``; or the stream.
        overwrite: Whether an existing file may be replaced.
        anonymously: Whether to remove identifying data (:mod:`hvd_autosync.traces.anonymous`).
        others: Ids of further studies for the same file, such as those that it learned from.
        if_exists: Hint of the error for an existing file that may not be replaced.

    Raises:
        StoreError: There is no such study, the file exists or cannot be written, or it would be
            larger than files that can be imported, or hold a study that cannot.
    """
    lines: list[str] = []
    for each in (study_id, *others):
        study = store.study(each)
        trials = store.trials(study.study_id)
        if anonymously:
            study, trials = anonymous(study, trials)
        _check_readable(study)
        lines += _lines(study, trials)
    size, longest = sum(map(len, lines)), max(map(len, lines))
    if size > _LARGEST_BYTES or longest > LONGEST_LINE_BYTES:
        raise StoreError(
            f"study {study_id} is too large for a trace file: {size:,} bytes of at most "
            f"{_LARGEST_BYTES:,}, {longest:,} in one line of at most {LONGEST_LINE_BYTES:,}",
            hint="Leave out the studies that it learned from, or copy the store instead.",
        )
    text = "".join(lines)
    if isinstance(path_or_stream, (str, os.PathLike)):
        data = text.encode()
        path = Path(path_or_stream)
        # Without the time, so that equal studies give equal files.
        zipped = gzip.compress(data, mtime=0) if path.suffix == _GZIP else data
        write_file(path, zipped, overwrite=overwrite, if_exists=if_exists)
    else:
        path_or_stream.write(text)


def _check_readable(study: StudyRecord) -> None:
    """Check that a file with a study can be imported.

    Raises:
        StoreError: It cannot, as one whose space a program has made with wider knobs.
    """
    try:
        strict_study(study.to_json())
    except ValueError as error:
        hint = "Keep its store, or copy that."
        if isinstance(error, UnknownValueError):
            hint = f"{error.hint} Otherwise: {hint}"
        raise StoreError(
            f"study {study.study_id} cannot be written to a trace file, of which no value may lie "
            f"outside its knob's domain: {error}",
            hint=hint,
        ) from None


def _lines(study: StudyRecord, trials: list[TrialRecord]) -> Iterator[str]:
    digest = hashlib.sha256()
    records = [{"type": "study", **study.to_json()}]
    records += [{"type": "trial", **trial.to_json()} for trial in trials]
    for record in [_HEADER, *records]:
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        digest.update(line.encode())
        yield line
    footer = {"type": "footer", "trials": len(trials), "sha256": digest.hexdigest()}
    yield json.dumps(footer, separators=(",", ":")) + "\n"


def import_studies(store: TraceStore, path: str | os.PathLike[str]) -> list[str]:
    """Read the studies of a file into ``store``: all of them, or none if anything is wrong.

    A file with a name in ``.gz`` is decompressed.

    Returns:
        The ids of the studies that are new. Studies that the store has already are skipped, with a
        warning in the log, except for reports of later trainings.

    Raises:
        TraceFormatError: The file is damaged, of a newer version, or not a trace; the message
            names the line.
        StoreError: The file cannot be read, or the store has a different study of the same id.
    """
    studies: list[tuple[StudyRecord, list[TrialRecord]]] = []
    try:
        check_regular(path)
        _check_size(path)
        with _opened(path) as stream:
            reader = LineReader(stream, os.fspath(path))
            while not studies or not reader.at_end():
                studies.append(_read_study(reader))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise TraceFormatError(
            f"{os.fspath(path)} cannot be decompressed: {error}",
            hint="Get the file again; nothing was imported.",
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot read {os.fspath(path)}: {error.strerror}", hint="Name a trace file."
        ) from error
    added = store.add(studies)
    for study, _ in studies:
        if study.study_id not in added:
            what = "skipped, except for reports of later trainings"
            _log.warning("study %s is in the store already: %s", study.study_id, what)
    return added


def _check_size(path: str | os.PathLike[str]) -> None:
    """Check that a file fits into memory, before its content is kept there.

    Raises:
        TraceFormatError: The file is too large, as it is or after decompression.
    """
    size = 0
    with _opened(path) as stream:
        while size <= _LARGEST_BYTES and (chunk := stream.read(_CHUNK_BYTES)):
            size += len(chunk)
    if size > _LARGEST_BYTES:
        packed = Path(path).stat().st_size
        what = f"unpacks from {packed:,} bytes to" if _is_packed(path) else "has"
        raise TraceFormatError(
            f"{os.fspath(path)} {what} more than the limit of {_LARGEST_BYTES >> 20} MiB",
            hint="Get the file again, or export fewer studies into one file; nothing was imported.",
        )


def _is_packed(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix == _GZIP


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    if _is_packed(path):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return open(path, "rb")


def _read_study(reader: LineReader) -> tuple[StudyRecord, list[TrialRecord]]:
    """Return the next study of a file, from its header to its footer."""
    reader.start_digest()
    _check_header(reader, reader.next_object())
    study = reader.checked(strict_study, _fields_of("study", reader, reader.next_object()))
    trials: list[TrialRecord] = []
    while True:
        digest = reader.digest()
        line = reader.next_object()
        if line.get("type") == "footer":
            break
        fields = _fields_of("trial", reader, line)
        trials.append(reader.checked(strict_trial, fields, study, len(trials)))
    if line != {"type": "footer", "trials": len(trials), "sha256": digest}:
        raise reader.error("the count or the checksum is wrong: the file was damaged or changed")
    return study, trials


def _check_header(reader: LineReader, header: dict[str, Any]) -> None:
    if header.get("format") != _HEADER["format"]:
        raise reader.error("this is not the header of a trace")
    version = header.get("version")
    if type(version) is int and version > FORMAT_VERSION:
        raise reader.error(
            f"written by a newer hvd-autosync (format version {version}; this one reads "
            f"{FORMAT_VERSION})",
            hint="Upgrade hvd-autosync.",
        )
    for name, value in _HEADER.items():
        if header.get(name) != value or type(header[name]) is not type(value):
            raise reader.error(f"{name} is {header.get(name)!r:.60} instead of {value!r}")


def _fields_of(kind: str, reader: LineReader, line: dict[str, Any]) -> dict[str, Any]:
    if line.pop("type", None) != kind:
        raise reader.error(f"this is not a {kind}")
    return line
