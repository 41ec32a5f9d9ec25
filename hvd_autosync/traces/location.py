"""Location of a store: from the user's text to a database URL, and a private file for SQLite."""

from __future__ import annotations

import errno
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_plus

import psutil
from sqlalchemy import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.util.variables import STORE_VARIABLE

_SMALLEST_DATABASE_BYTES = 512
_LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs"}
_CREDENTIALS = re.compile(r"(?<=://).*@")
_QUERY = re.compile(r"\?.*", re.DOTALL)
#: Parameters of database URLs that are not secret; all others are masked.
_HARMLESS = frozenset(
    "application_name cache charset check_same_thread client_encoding collation connect_timeout "
    "driver gssencmode host hostaddr immutable keepalives keepalives_count keepalives_idle "
    "keepalives_interval mode nolock passfile port read_timeout service ssl ssl_ca ssl_cert "
    "ssl_key ssl_mode sslcert sslcrl sslkey sslmode sslrootcert target_session_attrs "
    "tcp_user_timeout timeout unix_socket uri vfs write_timeout".split()
)
_MASK = "***"
#: Values of parameters that are shorter are not looked for in messages.
_SHORTEST_SECRET = 3


@dataclass(frozen=True)
class Location:
    """The location of a store.

    Attributes:
        url: URL of the database.
        file: The SQLite file, as it was named; ``None`` for a server or a database in memory.
        is_default: Whether nobody has named it: it is the user's own store.
    """

    url: URL
    file: Path | None
    is_default: bool = False

    @property
    def is_sqlite(self) -> bool:
        """Whether the database is SQLite's."""
        return self.url.get_backend_name() == "sqlite"

    @property
    def name(self) -> str:
        """The location for messages: the file, or the URL without possible secrets."""
        if self.file is not None:
            return str(self.file)
        return self.address

    @property
    def address(self) -> str:
        """The location for ``--store``; possible secrets are masked."""
        if self.file is not None and not self.url.query:
            return str(self.file)
        shown = {k: v if k in _HARMLESS else _MASK for k, v in self.url.query.items()}
        url = self.url.set(database=str(self.file) if self.file else self.url.database, query=shown)
        return url.render_as_string(hide_password=True).replace(quote_plus(_MASK), _MASK)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The password, and the values of parameters that may be secret; the longest first."""
        found = [] if self.url.password is None else [str(self.url.password)]
        for name, value in self.url.query.items():
            if name not in _HARMLESS:
                found += [value] if isinstance(value, str) else value
        return tuple(sorted(filter(None, found), key=len, reverse=True))

    def without_secrets(self, text: str) -> str:
        """Mask secrets of this location in a text, such as a database driver's message."""
        for secret in self.secrets:
            if len(secret) >= _SHORTEST_SECRET or secret == self.url.password:
                for written in (secret, quote_plus(secret)):
                    text = text.replace(written, _MASK)
        return text

    @property
    def allows_wal(self) -> bool:
        """Whether SQLite may use a write-ahead log: only on a local disk.

        The log needs memory that is shared between all processes that use the file. On a network
        file system, as of a cluster's home folders, drivers on two hosts would damage the store.
        """
        if self.file is None:
            return False
        path, best = Path(os.path.realpath(self.file)), ("", "")
        for mount in psutil.disk_partitions(all=True):
            if path.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= len(best[0]):
                best = (mount.mountpoint, mount.fstype)
        return best[1] in _LOCAL_FILE_SYSTEMS


def default_store_url() -> str:
    """Return the user's own store: ``traces.db`` in :func:`data_folder`.

    Raises:
        StoreError: There is no home folder.
    """
    return f"sqlite:///{_default_file()}"


def _default_file() -> Path:
    return data_folder() / "traces.db"


def data_folder() -> Path:
    """Return the user's data folder: ``hvd-autosync`` under ``$XDG_DATA_HOME``.

    Raises:
        StoreError: There is no home folder.
    """
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data.is_absolute():  # the specification says to ignore a relative one
        data = Path(os.path.expanduser("~/.local/share"))  # noqa: PTH111 (it never fails)
    if not data.is_absolute():
        raise StoreError(
            "there is no home folder for the trace store",
            hint="Set HOME or XDG_DATA_HOME, or name a store.",
        )
    return data / "hvd-autosync"


def resolve_location(location: str | os.PathLike[str] | None) -> Location:
    """Return the location that the user has named.

    Args:
        location: An SQLAlchemy URL, the path of an SQLite file, or ``None`` for what
            ``HVD_AUTOSYNC_STORE`` names; without that variable, the default.

    Raises:
        StoreError: The URL cannot be parsed, or is no text.
    """
    if location is None:
        location = os.environ.get(STORE_VARIABLE)
        if not location:
            file = _default_file()
            return Location(URL.create("sqlite", database=str(file)), file, is_default=True)
    if not isinstance(location, (str, os.PathLike)):
        raise StoreError(
            f"{location!r:.200} is not the location of a store", hint="Give a path or a URL."
        )
    text = os.fspath(location)
    if "://" not in text:
        file = Path(os.path.expanduser(text)).absolute()  # noqa: PTH111 (it never fails)
        return Location(URL.create("sqlite", database=str(file)), file)
    try:
        url = make_url(text)
    except (SQLAlchemyError, ValueError):
        raise StoreError(
            f"not a database URL: {_QUERY.sub(f'?{_MASK}', _CREDENTIALS.sub('***@', text))}",
            hint="Write DIALECT://USER:PASSWORD@HOST:PORT/DATABASE, or the path of a file.",
        ) from None
    database = url.database
    in_file = url.get_backend_name() == "sqlite" and database not in (None, "", ":memory:")
    if not in_file or database is None or "uri" in url.query:
        return Location(url, None)
    return Location(url, Path(database).absolute())


def has_secrets(location: str | None) -> bool:
    """Return whether the location of a store has a password, or a parameter that may be secret."""
    try:
        return location is not None and bool(resolve_location(location).secrets)
    except StoreError:  # it is refused where it is opened
        return False


def store_option(store: str | None) -> str:
    """Return the option by which a printed command finds a store, with a space before it.

    Possible secrets are masked. With a masked password the command finds nothing: where the
    environment names the same store, there is no option.

    Args:
        store: The store as named by the user; ``None`` for the default store, which needs none.
    """
    if store is None or (has_secrets(store) and store == os.environ.get(STORE_VARIABLE)):
        return ""
    return f" --store {shlex.quote(resolve_location(store).address)}"


def is_there(file: Path) -> bool:
    """Return whether ``file`` exists, or may exist where this user cannot look."""
    try:
        file.stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def prepare_file(file: Path) -> None:
    """Create ``file``, readable by the user only, if it does not exist; a link is followed.

    An existing file is not opened: closing it would release the locks that SQLite has on it in
    another thread of this process.

    Raises:
        StoreError: The file cannot be created, or is not a regular file.
        TraceFormatError: The file is too small for a database.
    """
    real = Path(os.path.realpath(file))
    try:
        real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.close(os.open(real, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            if not real.is_file():
                raise OSError(errno.EINVAL, "it is not a regular file") from None
            # SQLite treats a file of a few bytes as empty and would overwrite it.
            if 0 < real.stat().st_size < _SMALLEST_DATABASE_BYTES:
                raise TraceFormatError(
                    f"{file} is not a trace store: it is not an SQLite database",
                    hint="Name another file, or none to use the default store.",
                ) from None
    except OSError as error:
        raise _unusable(file, error) from error


def check_creatable(location: str | os.PathLike[str] | None) -> None:
    """Check that the file of a store that does not exist could be created, and create nothing.

    Args:
        location: As for :func:`resolve_location`.

    Raises:
        StoreError: It could not.
    """
    file = resolve_location(location).file
    if file is None or is_there(file):
        return
    folder = Path(os.path.realpath(file)).parent
    while not is_there(folder):
        folder = folder.parent
    try:
        tempfile.TemporaryFile(dir=folder).close()  # where possible one that never has a name
    except OSError as error:
        raise _unusable(file, error) from error


def _unusable(file: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot use {file} as a trace store: {error.strerror}",
        hint="Name a file in a folder that you may write to.",
    )
