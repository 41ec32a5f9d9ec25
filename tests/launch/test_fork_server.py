"""What a fork server does before its first trial."""

import errno
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_autosync.launch import fork_server, preload
from hvd_autosync.launch.channel import ChannelError
from hvd_autosync.launch.fork_servers import START_S


class Late:
    """A receiver whose driver comes after some seconds, by a clock of its own."""

    def __init__(self, comes_after_s: float) -> None:
        self.now = 0.0
        self.comes_after_s = comes_after_s

    def accept(self, timeout_s: float) -> dict[str, Any]:
        self.now += timeout_s
        if self.now < self.comes_after_s:
            raise ChannelError("nobody yet")
        return {"type": "end"}


@pytest.mark.parametrize(("comes_after_s", "waits"), [(START_S + 5, True), (1e9, False)])
def test_the_first_server_waits_until_the_last_may_be_there(
    comes_after_s: float, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: Any = Late(comes_after_s)
    monkeypatch.setattr(fork_server, "time", SimpleNamespace(monotonic=lambda: late.now))
    if waits:
        assert fork_server._first_message(late) == {"type": "end"}
    else:
        with pytest.raises(ChannelError):
            fork_server._first_message(late)


@pytest.mark.parametrize(("own", "expected"), [(None, "1"), ("0", "0")])
def test_imports_count_gpus_without_the_runtime_that_children_could_not_use(
    own: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", own or "")  # restored afterwards
    if own is None:
        monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK")
    seen = []

    def look(name: str) -> None:
        seen.append(os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"])

    monkeypatch.setattr(preload, "importlib", SimpleNamespace(import_module=look))
    preload.Preloader().load_frameworks()
    assert {*seen} == {expected}


class Orders:
    """A receiver whose driver has connected."""

    def __init__(self) -> None:
        self.driver, self._own = socket.socketpair()

    def fileno(self) -> int:
        return self._own.fileno()

    def receive(self) -> dict[str, Any]:
        return {"type": self._own.recv(100).decode()}

    def close(self) -> None:
        self.driver.close()
        self._own.close()


@pytest.mark.parametrize("error", [None, errno.ENOSYS, errno.EPERM])
def test_the_end_of_a_child_is_seen_with_any_kernel(
    error: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels before 5.3, and filters of containers, give no descriptor of a process."""

    def refuse(pid: int) -> int:
        raise OSError(error, "refused")

    if error is not None:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    for name, value in {"RANK": "0", "SIZE": "1"}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.setenv("HVD_AUTOSYNC_KEY", "00" * 16)
    server, orders = fork_server._Server(""), Orders()
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(server, "_send", sent.append)
    for name in ("end_descendants", "await_daemons"):  # those of this process are others' children
        monkeypatch.setattr(fork_server, name, lambda: None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the test has looked
        os._exit(3)
    os.close(reader)
    server._child, server._child_fd = child, fork_server._pidfd(child)
    assert (server._child_fd is None) is (error is not None)
    receiver: Any = orders
    orders.driver.send(b"end")
    assert server._next(receiver) == {"type": "end"}, "the child is still there"
    os.close(writer)
    assert server._next(receiver) is None
    assert [(each["type"], each["status"]) for each in sent] == [("exit", 3)]
    orders.driver.send(b"run")
    assert server._next(receiver) == {"type": "run"}
    orders.close()
