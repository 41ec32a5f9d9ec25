from __future__ import annotations

import stat
from collections import namedtuple
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_autosync.api.results import Study
from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.traces.location import (
    check_creatable,
    default_store_url,
    has_secrets,
    prepare_file,
    resolve_location,
)
from hvd_autosync.traces.store import TraceStore

_Mount = namedtuple("_Mount", "mountpoint fstype")


def test_the_default_follows_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert default_store_url() == "sqlite:////data/hvd-autosync/traces.db"
    assert resolve_location(None).file == Path("/data/hvd-autosync/traces.db")


def test_without_a_location_the_variable_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(tmp_path / "own.db"))
    assert resolve_location(None).file == tmp_path / "own.db"
    assert resolve_location("/x.db").file == Path("/x.db")
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", "")
    assert resolve_location(None).file == Path("/data/hvd-autosync/traces.db")


@pytest.mark.parametrize("data_home", ["", "relative/folder"])
def test_the_default_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, data_home: str) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", data_home)
    monkeypatch.setenv("HOME", "/home/someone")
    expected = "/home/someone/.local/share/hvd-autosync/traces.db"
    assert default_store_url() == f"sqlite:///{expected}"


def test_no_home_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(StoreError, match="XDG_DATA_HOME"):
        resolve_location(None)


def test_a_path_is_taken_literally(tmp_path: Path) -> None:
    odd = tmp_path / "a?b#c d%20.db"
    location = resolve_location(odd)
    assert (location.file, location.url.database) == (odd, str(odd))


def test_urls_of_files_and_of_memory() -> None:
    assert resolve_location("sqlite:////x/y.db").file == Path("/x/y.db")
    assert resolve_location("sqlite:///y.db").file == Path("y.db").absolute()
    for memory in ("sqlite://", "sqlite:///:memory:"):
        assert resolve_location(memory).file is None
    server = resolve_location("postgresql://host/db")
    assert server.file is None and not server.is_sqlite


def test_names_hide_passwords_and_options() -> None:
    name = resolve_location("postgresql://me:s3cret@host/db?password=s3cret").name
    assert "s3cret" not in name and "host/db" in name


@pytest.mark.parametrize("query", ["", "?password=s3cr%2Fet@"])
def test_a_url_that_cannot_be_read_hides_its_password(query: str) -> None:
    with pytest.raises(StoreError) as caught:
        resolve_location(f"postgresql://me:s3cr/et@host:port/db{query}")
    assert "s3cr" not in str(caught.value) and "et@" not in str(caught.value)
    with pytest.raises(StoreError, match="not a database URL") as caught:
        resolve_location("postgresql://host:port/db?sslpassword=s3cret")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("query", "secrets"),
    [
        ("", ()),
        ("sslmode=verify-full&sslkey=/k.pem&connect_timeout=3&keepalives=1", ()),
        ("password=p%2Fw+d", ("p/w d",)),
        ("sslpassword=s3cret&host=a", ("s3cret",)),
        ("options=-cmy.key%3Ds3cret", ("-cmy.key=s3cret",)),
        ("password=one&password=three", ("three", "one")),
        ("unknown=value", ("value",)),
    ],
)
def test_parameters_that_may_be_secret(query: str, secrets: tuple[str, ...]) -> None:
    for credentials, more in (("", ()), ("me:of-the-user@", ("of-the-user",))):
        url = f"postgresql://{credentials}host/db?{query}"
        location = resolve_location(url)
        assert {*location.secrets} == {*secrets, *more} and has_secrets(url) is bool(secrets + more)
        masked = location.without_secrets(f"cannot open {' '.join(secrets + more)}: {url}")
        for secret in (*secrets, *more, *[each for each in query.split("=") if each in secrets]):
            assert secret not in masked and secret not in location.name
        assert masked.startswith("cannot open ")
    assert not has_secrets(None) and not has_secrets("a/path?password=x.db")
    assert not has_secrets("no://:url:"), "it is refused where it is opened"


@pytest.mark.parametrize("location", [5, b"t.db", []])
def test_a_location_is_a_text(location: Any) -> None:
    with pytest.raises(StoreError, match="is not the location of a store"):
        resolve_location(location)
    with pytest.raises(StoreError, match="names no study"):
        Study.load(location)


def test_new_files_and_folders_are_private(tmp_path: Path) -> None:
    file = tmp_path / "new" / "traces.db"
    prepare_file(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_existing_files_keep_mode_and_content(tmp_path: Path) -> None:
    file = tmp_path / "traces.db"
    file.write_bytes(b"x" * 4096)
    file.chmod(0o640)
    prepare_file(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert file.read_bytes() == b"x" * 4096


def test_a_file_of_a_few_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_bytes(b"x")
    with pytest.raises(TraceFormatError, match=r"note.txt"):
        prepare_file(file)


@pytest.mark.parametrize("place", ["folder", "file/traces.db", "link"])
def test_places_that_cannot_be_files(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(StoreError, match="folder that you may write to") as caught:
        prepare_file(tmp_path / place)
    assert str(tmp_path / place) in caught.value.message


@pytest.mark.parametrize("place", ["/proc/traces.db", "/proc/new/folder/traces.db"])
def test_where_no_store_can_be_created_that_is_known_before(place: str) -> None:
    """Also to root, whom the modes of a folder do not stop."""
    with pytest.raises(StoreError, match="folder that you may write to") as caught:
        check_creatable(place)
    assert f"cannot use {place} as a trace store: " in caught.value.message


def test_to_ask_whether_a_store_can_be_created_leaves_nothing(tmp_path: Path) -> None:
    for location in (tmp_path / "traces.db", tmp_path / "new" / "folder" / "traces.db"):
        check_creatable(location)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "traces.db").write_bytes(b"x")
    check_creatable(tmp_path / "traces.db")  # whoever opens it says more
    for location in ("sqlite://", "postgresql://user@host/traces"):
        check_creatable(location)


@pytest.mark.parametrize(
    ("kind", "allowed"), [("ext4", True), ("nfs4", False), ("fuse.sshfs", False)]
)
def test_a_write_ahead_log_only_on_local_disks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, allowed: bool
) -> None:
    mounts = [_Mount("/", "ext4" if not allowed else "nfs4"), _Mount(str(tmp_path), kind)]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert resolve_location(tmp_path / "traces.db").allows_wal is allowed
    assert resolve_location("/traces.db").allows_wal is not allowed
    assert not resolve_location("sqlite://").allows_wal


def test_a_store_is_created_where_links_lead(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "traces.db").symlink_to("elsewhere/own.db")
    (tmp_path / "folder").symlink_to("not/yet")
    with closing(TraceStore(tmp_path / "traces.db")) as store:
        assert store.name == str(tmp_path / "traces.db")
    with closing(TraceStore(f"sqlite:///{tmp_path}/folder/traces.db")) as store:
        assert store.studies() == []
    created = [tmp_path / "elsewhere" / "own.db", tmp_path / "not" / "yet" / "traces.db"]
    assert [file.stat().st_mode & 0o777 for file in created] == [0o600, 0o600]
