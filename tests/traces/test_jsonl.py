from __future__ import annotations

import gzip
import io
import json
import logging
import os
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.search_space import Strategy
from hvd_autosync.traces import (
    Fallback,
    StudyRecord,
    StudyStatus,
    TraceStore,
    export_study,
    import_studies,
    jsonl,
)

Seal = Callable[[Path, list[Any]], None]


@pytest.fixture
def file(tmp_path: Path, store: TraceStore, finished: StudyRecord) -> Path:
    """The finished study as a file."""
    path = tmp_path / "study.jsonl"
    export_study(store, finished.study_id, path)
    return path


@pytest.fixture
def other() -> TraceStore:
    """An empty store."""
    return TraceStore("sqlite://")


def _objects(file: Path) -> list[Any]:
    """The lines of a file without its footer."""
    return [json.loads(line) for line in file.read_text().splitlines()[:-1]]


def _content(store: TraceStore, study_id: str) -> list[Any]:
    return [store.study(study_id).to_json(), *(t.to_json() for t in store.trials(study_id))]


def test_an_export_is_imported_without_loss(
    store: TraceStore, finished: StudyRecord, file: Path, other: TraceStore
) -> None:
    assert import_studies(other, file) == [finished.study_id]
    assert _content(other, finished.study_id) == _content(store, finished.study_id)
    assert finished.task is not None and finished.space is not None
    (found,) = other.finished_of_task(finished.task.fingerprint, finished.space.key)
    assert found.study_id == finished.study_id


def test_lines_are_plain_ascii_json_with_units(file: Path) -> None:
    assert file.read_bytes().isascii()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["type"] for line in lines] == [
        "header",
        "study",
        "trial",
        "trial",
        "trial",
        "trial",
        "footer",
    ]
    assert lines[0]["units"] == {"time": "s", "size": "B"}


def test_an_export_to_a_stream_is_the_same_text(
    store: TraceStore, finished: StudyRecord, file: Path
) -> None:
    stream = io.StringIO()
    export_study(store, "last", stream)
    assert stream.getvalue() == file.read_text()


def test_an_export_is_private_and_replaces_only_on_request(
    store: TraceStore, finished: StudyRecord, file: Path
) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        export_study(store, finished.study_id, file)
    assert file.read_text() == "mine"
    export_study(store, finished.study_id, file, overwrite=True)
    assert file.read_text().startswith('{"type":"header"')
    assert [f.name for f in file.parent.iterdir() if f.suffix == ".jsonl"] == [file.name]


def test_a_failed_export_leaves_nothing(
    store: TraceStore, finished: StudyRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="no/folder"):
        export_study(store, finished.study_id, tmp_path / "no" / "folder")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StoreError, match="No space left"):
        export_study(store, finished.study_id, tmp_path / "new.jsonl")
    assert sorted(tmp_path.iterdir()) == before


def test_importing_again_skips_and_says_so(
    file: Path, other: TraceStore, finished: StudyRecord, caplog: pytest.LogCaptureFixture
) -> None:
    import_studies(other, file)
    before = _content(other, finished.study_id)
    with caplog.at_level(logging.WARNING):
        assert import_studies(other, file) == []
    assert finished.study_id in caplog.text and "skipped" in caplog.text
    assert _content(other, finished.study_id) == before


def test_importing_again_takes_what_later_trainings_have_reported(
    store: TraceStore, other: TraceStore, finished: StudyRecord, tmp_path: Path
) -> None:
    """Each copy knows of other trainings."""
    study_id, paths = finished.study_id, [tmp_path / name for name in ("1.jsonl", "2.jsonl")]
    ended = [Fallback(Strategy({"buckets": count}), 64, "it has risen") for count in (2, 3)]
    export_study(store, study_id, paths[0])
    import_studies(other, paths[0])
    store.keep_fallback(study_id, ended[0])
    store.keep_drift(study_id, ["steps have become slower: 9 ms"])
    other.keep_fallback(study_id, ended[1])
    export_study(store, study_id, paths[1])
    for _ in range(2):
        assert import_studies(other, paths[1]) == []
    found = other.study(study_id)
    assert [each.strategy for each in found.fallbacks] == [e.strategy for e in reversed(ended)]
    assert found.drift == ("steps have become slower: 9 ms",)


def test_a_different_study_of_the_same_id_is_refused(
    file: Path, other: TraceStore, finished: StudyRecord, seal: Seal
) -> None:
    import_studies(other, file)
    before = _content(other, finished.study_id)
    lines = _objects(file)
    seal(file, lines[:-1])
    with pytest.raises(StoreError, match=f"different study {finished.study_id}"):
        import_studies(other, file)
    assert _content(other, finished.study_id) == before


def test_files_can_be_joined_and_are_imported_whole_or_not_at_all(
    store: TraceStore,
    create: Callable[..., StudyRecord],
    file: Path,
    other: TraceStore,
    finished: StudyRecord,
) -> None:
    running = create().study_id
    stream = io.StringIO()
    export_study(store, running, stream)
    file.write_text(file.read_text() + stream.getvalue()[:-1])
    with pytest.raises(TraceFormatError, match="line 10: the file is cut off"):
        import_studies(other, file)
    assert other.studies() == []
    file.write_text(file.read_text() + "\n")
    assert import_studies(other, file) == [finished.study_id, running]


def test_an_imported_running_study_is_not_resumed(
    store: TraceStore, create: Callable[..., StudyRecord], tmp_path: Path, other: TraceStore
) -> None:
    study_id = create("job").study_id
    export_study(store, study_id, tmp_path / "running.jsonl")
    import_studies(other, tmp_path / "running.jsonl")
    assert other.study(study_id).status is StudyStatus.RUNNING
    assert other.claim_resumable("job") is None


@pytest.mark.parametrize("limit", ["_LARGEST_BYTES", "LONGEST_LINE_BYTES"])
def test_what_could_not_be_imported_is_not_exported(
    store: TraceStore,
    finished: StudyRecord,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    fits = sum(map(len, lines)) if limit == "_LARGEST_BYTES" else max(map(len, lines))
    path, stream = file.with_name("again.jsonl"), io.StringIO()
    monkeypatch.setattr(jsonl, limit, fits - 1)
    for target in (path, stream):
        with pytest.raises(StoreError, match=f"{finished.study_id} is too large.* {fits:,} "):
            export_study(store, finished.study_id, target)
    assert not path.exists() and not stream.getvalue()
    monkeypatch.setattr(jsonl, limit, fits)
    export_study(store, finished.study_id, path)


def test_every_truncation_is_noticed(file: Path, other: TraceStore) -> None:
    content = file.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")][:-1]
    for end in [0, 1, *ends, *(end - 1 for end in ends), len(content) - 1]:
        file.write_bytes(content[:end])
        number = content[:end].count(b"\n") + 1
        with pytest.raises(TraceFormatError, match=f"line {number}: the file is cut off"):
            import_studies(other, file)
    assert other.studies() == []


def test_lost_changed_and_swapped_lines_are_noticed(file: Path, other: TraceStore) -> None:
    lines = file.read_text().splitlines(keepends=True)
    slower = lines[3].replace('"kind":"sobol"', '"kind":"model"')
    assert slower != lines[3]
    for changed, number in (
        (lines[:5] + lines[6:], 6),
        ([*lines[:3], slower, *lines[4:]], 7),
        ([*lines[:2], lines[3], lines[2], *lines[4:]], 3),
        (lines[1:], 1),
        (["\n", *lines], 1),
        ([*lines, "\n"], 8),
        ([*lines[:2], lines[1], *lines[2:]], 3),
    ):
        file.write_text("".join(changed))
        with pytest.raises(TraceFormatError, match=f"line {number}: "):
            import_studies(other, file)
    assert other.studies() == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"version": 2}, "newer"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"format": "another"}, "not the header of a trace"),
        ({"units": {"time": "ms", "size": "B"}}, "units"),
        ({"units": None}, "units"),
        ({"type": "study"}, "type"),
    ],
)
def test_headers_that_are_not_ours(
    file: Path, other: TraceStore, seal: Seal, change: dict[str, Any], what: str
) -> None:
    header, *rest = _objects(file)
    seal(file, [header | change, *rest])
    before = file.read_bytes()
    with pytest.raises(TraceFormatError, match=f"line 1: .*{what}") as caught:
        import_studies(other, file)
    assert file.read_bytes() == before
    assert ("Upgrade" in caught.value.hint) == (what == "newer")


@pytest.mark.parametrize("part", ["space", "strategy"])
def test_what_an_extension_may_have_added_is_named_with_its_variable(
    file: Path, other: TraceStore, seal: Seal, part: str
) -> None:
    header, study, trial, *rest = _objects(file)
    if part == "space":
        (knob,) = (each for each in study["space"]["knobs"] if each["name"] == "controller")
        knob["choices"].append("mine")
    else:
        trial["strategy"]["controller"] = "mine"
    seal(file, [header, study, trial, *rest])
    with pytest.raises(TraceFormatError, match=f"{part}: knob controller: 'mine'") as caught:
        import_studies(other, file)
    assert "HVD_AUTOSYNC_EXTENSIONS" in caught.value.hint and other.studies() == []


def test_a_field_of_a_newer_version_is_named_with_what_to_do(
    file: Path, other: TraceStore, seal: Seal
) -> None:
    header, study, trial, *rest = _objects(file)
    trial["result"]["energy_j"] = 12.0
    seal(file, [header, study, trial, *rest])
    with pytest.raises(TraceFormatError, match=r"line 3: .*newer.*'energy_j'") as caught:
        import_studies(other, file)
    assert "Upgrade" in caught.value.hint and other.studies() == []


def test_wrong_content_under_a_right_checksum_names_the_line(
    file: Path, other: TraceStore, seal: Seal
) -> None:
    lines = _objects(file)
    lines[3]["strategy"]["controller"] = "gloo --start-timeout 1"
    seal(file, lines)
    with pytest.raises(TraceFormatError, match=r"line 4: .*controller"):
        import_studies(other, file)


def test_files_that_cannot_be_read(tmp_path: Path, other: TraceStore) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(StoreError, match="cannot read") as caught:
            import_studies(other, path)
        assert str(path) in caught.value.message


# Hostile files are in tests/test_fuzz.py; here: not one byte may change unnoticed.


def _accepted(other: TraceStore, file: Path) -> bool:
    """Whether the file is imported; leaves the store empty."""
    try:
        ids = import_studies(other, file)
    except TraceFormatError:
        assert other.studies() == []
        return False
    for study_id in ids:
        other.delete(study_id)
    return True


@settings(max_examples=120)
@given(data=st.data())
def test_changed_bytes_are_refused(
    data: st.DataObject, file: Path, other: TraceStore, tmp_path: Path
) -> None:
    content = file.read_bytes()
    begin = data.draw(st.integers(0, len(content)))
    end = min(len(content), begin + data.draw(st.integers(0, 40)))
    inserted = data.draw(st.binary(max_size=10) | st.sampled_from([b"\n", b"{}", b"1e999", b"["]))
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(content[:begin] + inserted + content[end:])
    accepted = _accepted(other, changed)
    assert accepted or changed.read_bytes() != content
    # Only the footer is not under the checksum: blanks between its tokens mean nothing.
    same = changed.read_bytes().replace(b" ", b"") == content.replace(b" ", b"")
    assert not accepted or same or begin > content.rindex(b"\n", 0, -1)


def test_a_compressed_file_is_imported_too(
    store: TraceStore, finished: StudyRecord, other: TraceStore, tmp_path: Path
) -> None:
    path, again = tmp_path / "study.jsonl.gz", tmp_path / "again.jsonl.gz"
    for each in (path, again):
        export_study(store, finished.study_id, each)
    assert path.read_bytes() == again.read_bytes()
    assert import_studies(other, path) == [finished.study_id]
    assert _content(other, finished.study_id) == _content(store, finished.study_id)


@pytest.mark.parametrize("damage", ["cut", "plain", "middle"])
def test_a_damaged_compressed_file_is_refused(
    store: TraceStore, finished: StudyRecord, other: TraceStore, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "study.jsonl.gz"
    export_study(store, finished.study_id, path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:middle],
        "plain": b"not compressed",
        "middle": whole[:middle] + bytes(20) + whole[middle + 20 :],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(TraceFormatError, match=r"decompressed|line"):
        import_studies(other, path)
    assert other.studies() == []


@pytest.mark.parametrize("content", [bytes(2**24), b" " * 80 + b"\n", b"[]\n" * 2**22])
def test_a_file_that_unpacks_to_gigabytes_is_refused_in_little_memory(
    tmp_path: Path, other: TraceStore, content: bytes
) -> None:
    member = gzip.compress(content * (2**24 // len(content)))  # 16 MiB each
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(member * 256)
    tracemalloc.start()
    try:
        with pytest.raises(
            TraceFormatError, match=r"bomb.jsonl.gz .* the limit of 256 MiB"
        ) as caught:
            import_studies(other, path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()
    assert f"{len(member) * 256:,} bytes" in caught.value.message
    assert "nothing was imported" in caught.value.hint and other.studies() == []


def test_a_line_that_unpacks_to_much_is_refused_before_the_next(
    tmp_path: Path, other: TraceStore
) -> None:
    path = tmp_path / "line.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(2**24)) * 3)
    tracemalloc.start()
    try:
        with pytest.raises(TraceFormatError, match="line 1: the line is too long"):
            import_studies(other, path)
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_files_are_refused(tmp_path: Path, kind: str) -> None:
    """A pipe gives its content once, and maybe never; a device may have no end."""
    file = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(file)
    with pytest.raises(StoreError, match=f"{file} is a pipe or another special file") as caught:
        import_studies(TraceStore("sqlite://"), file)
    assert "Write its content to a file" in caught.value.hint
