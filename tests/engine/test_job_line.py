"""What is read of a job's line."""

from __future__ import annotations

import argparse

import pytest

from hvd_autosync.engine.job_line import _discovered, parse_words, read_job
from hvd_autosync.errors import ConfigurationError


def test_a_discovery_script_may_print_what_is_not_utf_8() -> None:
    script = r"printf 'r\351serv\351\n' >&2; echo node1:4"
    (host,) = _discovered(argparse.Namespace(host_discovery_script=script, slots=None))
    assert (host.name, host.slots) == ("node1", 4)
    failing = argparse.Namespace(host_discovery_script=f"{script}; exit 3", slots=None)
    with pytest.raises(ConfigurationError, match="r\ufffdserv\ufffd"):
        _discovered(failing)


@pytest.mark.parametrize("words", [["-H", "a:4"], ["-np", "4"]])
def test_under_lsf_ranks_and_hosts_are_to_be_given(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSB_JOBID", "1")
    words = [*words, "--mpi", "python", "train.py"]
    with pytest.raises(ConfigurationError, match="from LSF") as caught:
        read_job(parse_words(words), words)
    assert "Give -np and the hosts with -H" in caught.value.hint


def test_under_lsf_a_discovery_script_names_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_JOBID", "1")
    words = ["-np", "4", "--host-discovery-script", "echo a:4", "python", "train.py"]
    job, _ = read_job(parse_words(words), words)
    assert job.world_size == 4


@pytest.mark.parametrize("line", ["node1 4", "a..b:4", ":4"])
def test_a_discovery_script_that_names_no_host_fails(line: str) -> None:
    words = ["-np", "4", "--host-discovery-script", f"echo '{line}'", "python", "train.py"]
    with pytest.raises(ConfigurationError, match="is no host name"):
        read_job(parse_words(words), words)


@pytest.mark.parametrize(
    "option", [[], ["--autosync-tune-only"], ["--autosync-strategy", "f.toml"]]
)
def test_a_job_whose_ranks_would_ignore_us_is_refused(
    option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*option, "-np", "2", "python", "train.py"]
    monkeypatch.setenv("HVD_AUTOSYNC_DISABLE", "off")
    read_job(parse_words(words), words)
    monkeypatch.setenv("HVD_AUTOSYNC_DISABLE", "1")
    with pytest.raises(ConfigurationError, match="HVD_AUTOSYNC_DISABLE is on"):
        read_job(parse_words(words), words)


def test_a_plan_needs_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_AUTOSYNC_DISABLE", "1")
    words = ["--autosync-dry-run", "-np", "2", "python", "train.py"]
    assert read_job(parse_words(words), words)[1].dry_run
