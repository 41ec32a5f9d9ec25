"""What a fork server does before its first trial."""

import os
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
