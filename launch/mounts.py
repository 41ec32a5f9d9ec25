"""A view of the file system in which writes do not reach the original files.

Each writable mount becomes an overlay: reads come from the mount, writes go into an upper folder.
Caches, sockets and the kernel's own file systems are shared. A mount that does not support an
overlay, as some network file systems, is shown read-only.

In a new user namespace two operations are impossible:

- Looking under a mount. A folder that has mounts below it is therefore rebuilt entry by entry, with
  an overlay for each of its folders.
- Copying files of other users or groups, which an overlay does with each folder above a written
  file. The folders above the working directory and similar places are therefore created beforehand,
  owned by this user.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from hvd_autosync.launch import namespaces
from hvd_autosync.launch.stage import LAYERS

#: File systems of the kernel, which hold no user files.
_KERNEL = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl "
    "hugetlbfs mqueue nsfs proc pstore rpc_pipefs securityfs selinuxfs sysfs tracefs".split()
)
#: Largest number of entries of a folder that is rebuilt.
_MOST_ENTRIES = 2000


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        path: Mount point.
        kind: Type of the file system.
        options: Options of this mount.
        written: Whether user files can be written there.
    """

    path: str
    kind: str
    options: str
    written: bool


def read_mounts(text: str) -> dict[str, Mount]:
    """Return the topmost mount at each path, from the text of ``/proc/self/mountinfo``."""
    mounts = {}
    for line in filter(None, text.split("\n")):  # other ends of lines may be in a path
        head, _, tail = line.partition(" - ")
        path, options = head.split(" ")[4:6]
        kind, _, whole = tail.split(" ", 2)
        # Spaces and the like are octal numbers; other bytes are as they are, in any encoding.
        written_bytes = path.encode(errors="surrogateescape").decode("unicode_escape")
        path = os.fsdecode(written_bytes.encode("latin-1"))
        options_of_both = {*options.split(","), *whole.split(" ")[-1].split(",")}
        written = kind not in _KERNEL and "ro" not in options_of_both
        mounts[path] = Mount(path, kind, options, written)
    return mounts


def below(path: str, folder: str) -> bool:
    """Return whether ``path`` lies strictly below ``folder``."""
    return path != folder and path.startswith(folder.rstrip("/") + "/")


class PrivateRoot:
    """Builds the root folder of the private view.

    Args:
        mounts: The mounts of this namespace, by path.
        shared: Folders and sockets that are shown as they are.
        hidden: A folder that is shown empty, or "".
        root: An empty folder, in which the view is built.
        layers: Folder for the upper folders, on a file system that supports them.
        foreign: Whether this is not the initial user namespace; overlays then use other attributes.
        locked: Whether the user namespace has one user, and mounts from outside, which hide what is
            below.
        places: Folders in which files will probably be written.
    """

    def __init__(
        self,
        mounts: dict[str, Mount],
        shared: Iterable[str],
        hidden: str,
        root: str,
        layers: str,
        *,
        foreign: bool,
        locked: bool,
        places: Iterable[str] = (),
    ) -> None:
        self._mounts = mounts
        self._shared = set(shared)
        self._hidden = hidden
        self._root = root
        self._layers = layers
        self._foreign = foreign
        self._locked = locked
        self._places = [os.path.realpath(place) for place in places if os.path.isdir(place)]
        #: The original folder of each upper folder, by number.
        self.folders: list[str] = []

    def build(self) -> None:
        """Build the view.

        Raises:
            OSError: The kernel refuses a mount.
        """
        self._show("/")
        if self._hidden:
            namespaces.mount("hvd-autosync", self._target(self._hidden), "tmpfs")

    def _target(self, path: str) -> str:
        return self._root + path.rstrip("/")

    def _mount_of(self, path: str) -> Mount:
        found = path
        while found not in self._mounts:
            found = os.path.dirname(found)
        return self._mounts[found]

    def _show(self, path: str) -> None:
        """Show a folder and all mounts below it."""
        mount = self._mount_of(path)
        within = [each for each in (*self._mounts, *self._shared) if below(each, path)]
        mounted = [each for each in within if each in self._mounts]
        if not os.path.isdir(path) or path in self._shared:
            return namespaces.bind(path, self._target(path))
        if not mount.written and not any(self._mounts[each].written for each in mounted):
            return namespaces.bind(path, self._target(path))
        if self._locked and mounted:
            return self._show_entries(path)
        if not mount.written or not self._overlay(path):
            namespaces.bind(path, self._target(path))
            if mount.written:
                namespaces.make_read_only(self._target(path), mount.options)
        for each in within:
            if not any(below(each, other) for other in within) and os.path.lexists(each):
                self._show(each)
        return None

    def _overlay(self, path: str) -> bool:
        """Mount an overlay of ``path``; return whether that is possible."""
        number = len(self.folders)
        upper, work = (f"{self._layers}/{LAYERS}/{kind}/{number}" for kind in ("upper", "work"))
        os.makedirs(upper)
        os.makedirs(work, exist_ok=True)  # of a mount before that takes no overlay
        about = os.stat(path)
        os.chmod(upper, stat.S_IMODE(about.st_mode))
        if self._locked:
            self._make_own(path, upper)
        else:
            os.chown(upper, about.st_uid, about.st_gid)
        try:
            mount_overlay(path, upper, work, self._target(path), foreign=self._foreign)
        except OSError:
            if path == "/":
                raise
            os.rmdir(upper)
            return False
        self.folders.append(path)
        return True

    def _make_own(self, path: str, upper: str) -> None:
        """Create other users' folders at and above the places in an upper folder, as own ones."""
        for place in self._places:
            chain = [f for f in (place, *map(str, PurePath(place).parents)) if below(f, path)]
            while chain and _is_own(chain[0]):  # an overlay can copy it
                del chain[0]
            for folder in reversed(chain):
                made = os.path.join(upper, os.path.relpath(folder, path))
                if not os.path.exists(made):
                    os.mkdir(made)
                    os.chmod(made, stat.S_IMODE(os.stat(folder).st_mode) | 0o700)

    def _show_entries(self, path: str) -> None:
        """Rebuild a folder, entry by entry."""
        if path == "/":
            namespaces.mount("hvd-autosync", self._root, "tmpfs", options="mode=755")
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        if len(entries) > _MOST_ENTRIES:
            raise OSError(
                f"{path} has mounts below it and {len(entries)} entries, above the limit of "
                f"{_MOST_ENTRIES}"
            )
        for entry in entries:
            target = self._target(entry.path)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), target)
            elif entry.is_dir():
                os.mkdir(target, stat.S_IMODE(entry.stat().st_mode) | 0o700)
                if os.access(entry.path, os.R_OK | os.X_OK):
                    self._show(entry.path)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
                namespaces.bind(entry.path, target)
                if entry.is_file() and os.access(entry.path, os.W_OK):
                    namespaces.make_read_only(target, self._mount_of(entry.path).options)


def _is_own(path: str) -> bool:
    """Return whether ``path`` has this user's effective user and group."""
    about = os.stat(path)
    return (about.st_uid, about.st_gid) == (os.geteuid(), os.getegid())


def mount_overlay(lower: str, upper: str, work: str, target: str, *, foreign: bool) -> None:
    """Mount an overlay at ``target``.

    Raises:
        OSError: These folders do not support an overlay.
    """
    folders = (
        f"{name}={_escaped(path)}"
        for name, path in (("lowerdir", lower), ("upperdir", upper), ("workdir", work))
    )
    kind = "userxattr" if foreign else "redirect_dir=on"
    namespaces.mount("hvd-autosync", target, "overlay", options=",".join([*folders, kind]))


def _escaped(path: str) -> str:
    for character in "\\,:":
        path = path.replace(character, "\\" + character)
    return path
