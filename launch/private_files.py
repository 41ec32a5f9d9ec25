"""Private files of trials: nobody else sees what a trial writes, and it is discarded afterwards.

All ranks of a trial on one host run in one mount namespace, in which every writable place is an
overlay (:mod:`hvd_autosync.launch.mounts`): the ranks see each other's files, and no other process
does. The first rank creates the namespace; a small process
(:mod:`hvd_autosync.launch.files_daemon`) passes it to the others and reports the written files to
the driver at the end. The namespace is found by the name of an abstract socket, so that hosts with
network namespaces of their own count as separate hosts.

Overlays are tested by mounting them. If they are not possible, the rank reports the reason and ends
before the script starts.
"""

from __future__ import annotations

import array
import base64
import contextlib
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hvd_autosync.launch import files_daemon, namespaces
from hvd_autosync.launch.mounts import PrivateRoot, mount_overlay, read_mounts
from hvd_autosync.launch.shared_paths import shared_paths
from hvd_autosync.launch.stage import make_stage
from hvd_autosync.runtime.driver.environment import TRIAL_ID_VARIABLE
from hvd_autosync.util.host_memory import host_free_bytes

#: Variable of a rank whose files are to be private; its value is a :class:`FilesOrder`.
FILES_VARIABLE = "HVD_AUTOSYNC_FILES"
_PATIENCE_S = 30.0
_RETRY_S = 0.01
_MIB = 1 << 20


class NotPrivateError(Exception):
    """The files of a trial cannot be private here."""


@dataclass(frozen=True)
class FilesOrder:
    """The settings of the private files of one run of a trial.

    Attributes:
        name: Name of the run, equal on all ranks.
        key: Key of the trial's messages.
        keep: Folder that keeps the written files; "": they are discarded.
        limit_bytes: Most bytes that the run may write if they are discarded; 0: a quarter of the
            free memory, at least 64 MiB and at most 4 GiB.
    """

    name: str
    key: str
    keep: str = ""
    limit_bytes: int = 0

    def to_text(self) -> str:
        """Return the value of the variable, in characters that every launcher passes on."""
        return base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> FilesOrder | None:
        """Read the settings from a rank's environment; ``None`` if there are none.

        Without msgspec: the interpreter of ``enclosed.py`` sees no installed packages.

        Raises:
            NotPrivateError: The variable holds nothing that :meth:`to_text` wrote.
        """
        text = environment.get(FILES_VARIABLE)
        if not text:
            return None
        try:
            order = cls(**json.loads(base64.b64decode(text, validate=True)))
        except (ValueError, TypeError, RecursionError) as error:
            raise _malformed(f"{text!r:.60} is no order: {error!s:.200}") from None
        for name in ("name", "key", "keep"):
            if not isinstance(value := getattr(order, name), str):
                raise _malformed(f"{name}: {value!r:.60} is wrong: expected `str`")
        if not isinstance(order.limit_bytes, int) or order.limit_bytes < 0:
            raise _malformed(f"limit_bytes: {order.limit_bytes!r:.60} is wrong: expected `int`")
        return order


def _malformed(problem: str) -> NotPrivateError:
    return NotPrivateError(
        f"{FILES_VARIABLE}: {problem}; unset it, because hvd-autosync sets it for each trial"
    )


def make_private(order: FilesOrder, rank: int) -> None:
    """Move this process, which must have no threads, to the trial's private files.

    Args:
        order: The settings.
        rank: The rank of this process.

    Raises:
        NotPrivateError: The files cannot be private; the message gives the reason.
    """
    address = f"\0hvd-autosync-{order.name}"
    folder = os.getcwd()
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                try:
                    listener.bind(address)
                except OSError:  # another rank creates it
                    pass
                else:
                    listener.listen(1024)
                    _make(order, rank, listener, address)
                    break
            if _join(address):
                break
            if time.monotonic() > deadline:
                raise OSError(f"the first rank on this host does not answer for {_PATIENCE_S} s")
            time.sleep(_RETRY_S)
        os.chdir(folder)
    except OSError as error:
        raise NotPrivateError(f"{socket.gethostname()}: {error}") from None


def _make(order: FilesOrder, rank: int, listener: socket.socket, address: str) -> None:
    """Create the namespace, enter it, and start its daemon."""
    limit = order.limit_bytes or _share_of_memory()
    stage = make_stage(os.environ[TRIAL_ID_VARIABLE])
    parent = os.open(os.path.dirname(stage), os.O_RDONLY | os.O_DIRECTORY)
    try:
        kept = _kept_folder(order)
        shared = shared_paths(os.environ, _text("/proc/net/unix"))
        mounts = read_mounts(_text("/proc/self/mountinfo"))
        entered = namespaces.unshare_mounts()
        locked = entered or namespaces.has_one_user()
        namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
        namespaces.mount("hvd-autosync", stage, "tmpfs", options=f"size={limit},mode=700")
        foreign = not namespaces.in_first_user_namespace()
        if foreign:
            _check_overlays(stage)
        os.mkdir(f"{stage}/root")
        layers = kept or stage
        root = PrivateRoot(
            mounts,
            shared,
            os.path.dirname(os.path.dirname(kept)),
            f"{stage}/root",
            layers,
            foreign=foreign,
            locked=locked,
            places=_places(),
        )
        root.build()
        written = os.open(layers, os.O_RDONLY | os.O_DIRECTORY)
        namespaces.change_root(f"{stage}/root")
    finally:
        # After a failure it is mounted still; what is left is removed after the trial.
        with contextlib.suppress(OSError):
            os.rmdir(os.path.basename(stage), dir_fd=parent)
        os.close(parent)
    spaces = [os.open("/proc/self/ns/mnt", os.O_RDONLY)]
    if entered:  # else the other ranks are in it already
        spaces.append(os.open("/proc/self/ns/user", os.O_RDONLY))
    if foreign and os.geteuid():
        namespaces.drop_capabilities()
    _connect_to_daemon(address)
    task = files_daemon.DaemonTask(
        rank,
        order.name,
        order.key,
        listener.fileno(),
        tuple(spaces),
        written,
        tuple(root.folders),
        limit,
        kept=bool(kept),
    )
    files_daemon.start(task)
    for descriptor in (*spaces, written):
        os.close(descriptor)


def _join(address: str) -> bool:
    """Try to enter the namespace of another rank; return whether that succeeded."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_PATIENCE_S)
        try:
            peer.connect(address)
        except ConnectionRefusedError:  # not listening yet, or no longer
            return False
        if not namespaces.is_of_this_user(peer):
            raise OSError(f"another user holds the socket {address[1:]}")
        spaces = array.array("i")
        try:
            _, extra, *_ = peer.recvmsg(1, socket.CMSG_SPACE(2 * spaces.itemsize))
        except ConnectionResetError:  # the other rank failed; this one tries, too
            return False
        for _, _, data in extra:
            spaces.frombytes(data)
        if not spaces:
            return False
        kinds = (namespaces.CLONE_NEWNS, namespaces.CLONE_NEWUSER)
        for space, kind in reversed(list(zip(spaces, kinds, strict=False))):
            namespaces.join_namespace(space, kind)
            os.close(space)
        if len(spaces) > 1 and os.geteuid():
            namespaces.drop_capabilities()
        _leave_open(peer)
    return True


def _connect_to_daemon(address: str) -> None:
    """Connect to the daemon, which serves until this process and its children have ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(address)
        _leave_open(peer)


def _leave_open(peer: socket.socket) -> None:
    os.set_inheritable(peer.detach(), True)


def _check_overlays(stage: str) -> None:
    """Check that the kernel's overlays for users can replace a removed folder by a new one."""
    for name in ("lower", "lower/folder", "upper", "work", "both"):
        os.mkdir(f"{stage}/{name}")
    names = (f"{stage}/{name}" for name in ("lower", "upper", "work", "both"))
    mount_overlay(*names, foreign=True)
    os.rmdir(f"{stage}/both/folder")
    os.mkdir(f"{stage}/both/folder")
    namespaces.unmount(f"{stage}/both")


def _kept_folder(order: FilesOrder) -> str:
    """Create and return this host's folder for kept files; "" if none are kept.

    It gets a number if there is one of that name: of another host, as containers may have one name,
    or of a rank that has failed after this, whose reason counts.
    """
    if not order.keep:
        return ""
    path = host = Path(order.keep).absolute() / order.name / socket.gethostname()
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
        path = host.with_name(f"{host.name}-{number}")
    return str(path.resolve())


def _places() -> list[str]:
    """Return the folders in which scripts write most often."""
    return [os.getcwd(), os.environ.get("HOME", ""), tempfile.gettempdir()]


def _share_of_memory() -> int:
    """Return the number of bytes that a trial may write into memory."""
    return min(max(host_free_bytes() // 4, 64 * _MIB), 4096 * _MIB)


def _text(path: str) -> str:
    return Path(path).read_bytes().decode(errors="surrogateescape")
