"""What a fork server does before its first trial."""

from types import SimpleNamespace
from typing import Any

import pytest

from hvd_autosync.launch import fork_server
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
