"""What a trial writes is its own, and is gone with it.

All ranks of a trial on one host run in one mount namespace, in which every place that can be
written is an overlay (:mod:`..launch.mounts`): they exchange files, and nobody else sees these.
The first of them makes it; a small process (:mod:`..launch.files_daemon`) hands it to the others
and tells the driver in the end what was written. Its name is that of an abstract socket, so hosts
with network namespaces of their own are hosts of their own.

Whether there can be overlays is found out by making them. Where there cannot, the rank says so and
ends before the script has started.
"""

from __future__ import annotations

import array
import base64
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

#: Says in a rank's environment that its files are to be private, and how.
FILES_VARIABLE = "HVD_AUTOSYNC_FILES"
_PATIENCE_S = 30.0
_RETRY_S = 0.01
_MIB = 1 << 20


class NotPrivateError(Exception):
    """The files of a trial cannot be made private here."""


@dataclass(frozen=True)
class FilesOrder:
    """How the files of one run of a trial are kept apart.

    Attributes:
        name: Of the run, equal on all ranks.
        key: Of the messages of the trial.
        keep: Folder in which what it wrote stays; "": nowhere.
        limit_bytes: Most that it may write, where nothing is kept; 0: a quarter of the memory that
            is free, and 4 GiB at most.
    """

    name: str
    key: str
    keep: str = ""
    limit_bytes: int = 0

    def to_text(self) -> str:
        """As the value of a variable, which any launcher passes on unchanged."""
        return base64.b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> FilesOrder | None:
        """What the variables of a rank say."""
        text = environment.get(FILES_VARIABLE)
        return cls(**json.loads(base64.b64decode(text))) if text else None


def make_private(order: FilesOrder, rank: int) -> None:
    """From here on this process sees the trial's own files. It must have no threads.

    Args:
        order: How.
        rank: Of this process.

    Raises:
        NotPrivateError: It cannot be done; says why.
    """
    address = f"\0hvd-autosync-{order.name}"
    folder = os.getcwd()
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                try:
                    listener.bind(address)
                except OSError:  # another rank makes it
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
    """Make the namespace, enter it, and leave it to a keeper."""
    limit = order.limit_bytes or _share_of_memory()
    stage = make_stage(os.environ[TRIAL_ID_VARIABLE])
    parent = os.open(os.path.dirname(stage), os.O_RDONLY | os.O_DIRECTORY)
    try:
        kept = _kept_folder(order)
        shared = shared_paths(os.environ, _text("/proc/net/unix"))
        mounts = read_mounts(_text("/proc/self/mountinfo"))
        foreign = namespaces.unshare_mounts()
        namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)
        namespaces.mount("hvd-autosync", stage, "tmpfs", options=f"size={limit},mode=700")
        userxattr = not namespaces.in_first_user_namespace()
        if userxattr:
            _check_overlays(stage)
        os.mkdir(f"{stage}/root")
        layers = kept or stage
        root = PrivateRoot(
            mounts,
            shared,
            os.path.dirname(os.path.dirname(kept)),
            f"{stage}/root",
            layers,
            foreign=userxattr,
            locked=foreign,
            places=_places(),
        )
        root.build()
        written = os.open(layers, os.O_RDONLY | os.O_DIRECTORY)
        namespaces.change_root(f"{stage}/root")
    finally:
        os.rmdir(os.path.basename(stage), dir_fd=parent)
        os.close(parent)
    spaces = [os.open("/proc/self/ns/mnt", os.O_RDONLY)]
    if foreign:
        spaces.append(os.open("/proc/self/ns/user", os.O_RDONLY))
        if os.geteuid():
            namespaces.drop_capabilities()
    _stay_known(address)
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
    """Whether this process has entered the namespace that another one has made."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_PATIENCE_S)
        try:
            peer.connect(address)
        except ConnectionRefusedError:  # not yet, or no more
            return False
        if not namespaces.is_of_this_user(peer):
            raise OSError(f"another user holds the socket {address[1:]}")
        spaces = array.array("i")
        try:
            _, extra, *_ = peer.recvmsg(1, socket.CMSG_SPACE(2 * spaces.itemsize))
        except ConnectionResetError:  # it could not make it, and knows why: so will this rank
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


def _stay_known(address: str) -> None:
    """Connect to the keeper: while that lasts, this process and its children are in the trial."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(address)
        _leave_open(peer)


def _leave_open(peer: socket.socket) -> None:
    os.set_inheritable(peer.detach(), True)


def _check_overlays(stage: str) -> None:
    """Overlays of users need a kernel that lets a new folder take the place of a removed one."""
    for name in ("lower", "lower/folder", "upper", "work", "both"):
        os.mkdir(f"{stage}/{name}")
    names = (f"{stage}/{name}" for name in ("lower", "upper", "work", "both"))
    mount_overlay(*names, foreign=True)
    os.rmdir(f"{stage}/both/folder")
    os.mkdir(f"{stage}/both/folder")
    namespaces.unmount(f"{stage}/both")


def _kept_folder(order: FilesOrder) -> str:
    """This host's folder among those that are kept, made now; "" where nothing is kept."""
    if not order.keep:
        return ""
    path = Path(order.keep).absolute() / order.name / socket.gethostname()
    path.mkdir(parents=True)
    return str(path.resolve())


def _places() -> list[str]:
    """Folders in which scripts write most likely."""
    return [os.getcwd(), os.environ.get("HOME", ""), tempfile.gettempdir()]


def _share_of_memory() -> int:
    """Bytes that a trial may write into memory."""
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return min(max(int(line.split()[1]) * 1024 // 4, 64 * _MIB), 4096 * _MIB)
    return 64 * _MIB


def _text(path: str) -> str:
    return Path(path).read_text(errors="surrogateescape")
