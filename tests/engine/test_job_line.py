"""What is read of a job's line."""

from __future__ import annotations

import argparse

import pytest

from hvd_autosync.engine.job_line import _discovered
from hvd_autosync.errors import ConfigurationError


def test_a_discovery_script_may_print_what_is_not_utf_8() -> None:
    script = r"printf 'r\351serv\351\n' >&2; echo node1:4"
    (host,) = _discovered(argparse.Namespace(host_discovery_script=script, slots=None))
    assert (host.name, host.slots) == ("node1", 4)
    failing = argparse.Namespace(host_discovery_script=f"{script}; exit 3", slots=None)
    with pytest.raises(ConfigurationError, match="r\ufffdserv\ufffd"):
        _discovered(failing)
