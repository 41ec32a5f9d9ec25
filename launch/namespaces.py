"""The calls for Linux's mount and user namespaces that trials need: ``unshare(2)``, ``mount(2)``.

Python has ``os.unshare`` and ``os.setns`` only since 3.12, and no ``mount``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
#: Options of a mount by their names in ``/proc/self/mountinfo``. In a user namespace a remount must
#: keep those that are set.
_FLAGS = {
    "nosuid": 2,
    "nodev": 4,
    "noexec": 8,
    "noatime": 1024,
    "nodiratime": 2048,
    "relatime": 1 << 21,
}
CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
_MNT_DETACH = 2
_PR_SET_NAME = 15
#: ``struct ucred``: process, user, group.
_CREDENTIALS = struct.Struct("3i")
_CAPABILITY_VERSION_3 = 0x2008_0522
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare_mounts() -> bool:
    """Move this process into a new mount namespace, and into a new user namespace if required.

    Returns:
        Whether there is a new user namespace. In it this process keeps its user, and may mount.

    Raises:
        OSError: The system allows neither, or this process has threads.
    """
    if _libc.unshare(CLONE_NEWNS) == 0:
        return False
    user, group = os.geteuid(), os.getegid()
    try:
        _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
    except OSError as error:
        if error.errno == errno.ENOSPC:  # not a full disk
            reason = "unshare: more namespaces than /proc/sys/user/max_*_namespaces allow"
            raise OSError(error.errno, reason) from None
        raise
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def join_namespace(descriptor: int, kind: int) -> None:
    """Enter the namespace of an open file of ``/proc/PID/ns``.

    Raises:
        OSError: The system refuses.
    """
    _check(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call ``mount(2)``.

    Raises:
        OSError: The system refuses; the message names the target.
    """
    words = (os.fsencode(source), os.fsencode(target), kind.encode() or None)
    data = os.fsencode(options) or None
    _check(
        _libc.mount(*words, ctypes.c_ulong(flags), data), f"mounting {kind or source} on {target}"
    )


def bind(source: str, target: str) -> None:
    """Mount ``source``, with all mounts below it, at ``target``, too."""
    mount(source, target, flags=MS_BIND | MS_REC)


def make_read_only(target: str, options: str) -> None:
    """Remount ``target`` read-only.

    Args:
        target: The mount point.
        options: The mount's present options, as in ``/proc/self/mountinfo``.
    """
    flags = sum(_FLAGS.get(each, 0) for each in options.split(","))
    mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def change_root(root: str) -> None:
    """Make ``root``, a mount, this namespace's root, and detach the previous root."""
    os.chdir(root)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")


def unmount(target: str) -> None:
    """Call ``umount(2)``; a mount in use is detached, too."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"unmounting {target}")


def is_of_this_user(peer: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this user, by the kernel's record."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def drop_capabilities() -> None:
    """Drop the capabilities of a new user namespace, so that a script has no more than without."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    with contextlib.suppress(OSError):
        _check(_libc.capset(header, none), "capset")


def name_process(name: str) -> None:
    """Set the name of this process, at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def in_first_user_namespace() -> bool:
    """Return whether this process is in the initial user namespace."""
    with open("/proc/self/uid_map") as file:
        return file.read().split() == ["0", "0", str(2**32 - 1)]


def has_one_user() -> bool:
    """Return whether this user namespace has a single user, as one of ``unshare --map-root-user``.

    Files of all others cannot be given their owner there.
    """
    with open("/proc/self/uid_map") as file:
        return [line.split()[2] for line in file] == ["1"]
