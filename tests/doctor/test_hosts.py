from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from hvd_autosync.doctor import hosts as doctor_hosts
from hvd_autosync.doctor.finding import Finding, Severity
from hvd_autosync.doctor.hosts import check_hosts

ADDRESSES = {
    "driver": ["10.0.0.1"],
    "loop": ["127.0.1.1"],
    "node": ["10.0.0.2"],
    "gone": [],
    "bare": ["10.0.0.3"],
    "latin": ["10.0.0.4"],
    "latin-gone": ["10.0.0.5"],
}


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver, and other hosts behind an ssh that answers for them."""
    monkeypatch.setattr(socket, "gethostname", lambda: "driver")
    monkeypatch.setattr(doctor_hosts, "_resolve", lambda name: ADDRESSES[name])
    from horovod.runner.util import network

    monkeypatch.setattr(
        network, "filter_local_addresses", lambda names: [n for n in names if n != "driver"]
    )
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$(dirname "$0")/asked"\n'
        'case "$*" in\n'
        "  *latin*) printf 'r\\351serv\\351\\n' >&2; printf 'r\\351serv\\351\\n' ;;\n"
        "esac\n"
        'case "$*" in\n'
        '  *gone*) echo "ssh: no route to host" >&2; exit 255 ;;\n'
        "  *bare*import*)\n"
        "    echo \"ModuleNotFoundError: No module named 'hvd_autosync'\" >&2; exit 1 ;;\n"
        '  *loop*getent*) echo "127.0.1.1 STREAM loop" ;;\n'
        '  *getent*) echo "10.0.0.2 STREAM node"; echo "10.0.0.2 DGRAM" ;;\n'
        "esac\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def found(*names: str) -> dict[str, Finding]:
    return {check.subject: check for check in check_hosts(names)}


def test_without_hosts_only_this_machine_is_looked_at() -> None:
    checks = found()
    assert list(checks) == ["name driver"]
    assert checks["name driver"].text == "resolves to 10.0.0.1"


def test_hosts_that_answer_and_have_addresses_are_fine() -> None:
    checks = found("driver", "node")
    assert {subject: check.severity.value for subject, check in checks.items()} == {
        "name driver": "ok",
        "name node": "ok",
        "ssh node": "ok",
        "name on node": "ok",
    }


def test_an_own_name_on_loopback_is_a_warning_until_there_are_several_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "loop")
    alone = found()["name loop"]
    assert alone.severity is Severity.WARN
    assert "127.0.1.1: other hosts cannot connect to that" in alone.text
    assert alone.remedy == (
        "Give loop the address of its network card in /etc/hosts of this machine."
    )
    assert found("loop", "node")["name loop"].severity is Severity.FAIL
    # It launches ranks on others, which do not connect to it.
    assert found("bare", "node")["name loop"].severity is Severity.WARN


def test_a_host_that_resolves_itself_to_loopback_is_found_by_asking_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ADDRESSES, "loop", ["10.0.0.3"])  # right here, wrong there
    checks = found("driver", "loop")
    assert checks["name loop"].severity is Severity.OK
    assert checks["name on loop"].severity is Severity.FAIL
    assert "/etc/hosts of loop" in checks["name on loop"].remedy


def test_banners_need_not_be_utf_8() -> None:
    checks = found("latin", "latin-gone")
    assert checks["ssh latin"].severity is Severity.OK
    failed = checks["ssh latin-gone"]
    assert failed.severity is Severity.FAIL and "no route to host" in failed.text


def test_a_host_that_ssh_does_not_reach_fails_with_the_message_of_ssh() -> None:
    checks = found("driver", "gone")
    assert checks["ssh gone"].text == "ssh: no route to host"
    assert checks["ssh gone"].severity is Severity.FAIL
    assert "name on gone" not in checks
    assert checks["name gone"].text == "does not resolve to an address"


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("/bin/sh: 1: ssh: not found", "apt-get install openssh-client"),
        ("bash: line 1: ssh: command not found", "apt-get install openssh-client"),
        ("ssh: connect to host gone port 22: Connection refused", "Start sshd on gone"),
        ("ssh: Could not resolve hostname gone: Name or service not known", "Check the name"),
        ("Host key verification failed.", "ssh-keygen -R gone"),
        ("me@gone: Permission denied (publickey,password).", "ssh-copy-id gone"),
        ("ssh: connect to host gone port 22: Connection timed out", "gone is up"),
        ("ssh: connect to host gone port 22: No route to host", "gone is up"),
        ("kex_exchange_identification: read: Connection reset by peer", "`ssh gone true`"),
    ],
)
def test_each_reason_of_ssh_has_its_own_remedy(tmp_path: Path, said: str, remedy: str) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho '{said}' >&2; exit 255\n")
    check = found("driver", "gone")["ssh gone"]
    assert (check.severity, check.text) == (Severity.FAIL, said)
    assert remedy in check.remedy
    assert ("ssh-copy-id" in check.remedy) == ("denied" in said)


def test_localhost_among_several_hosts_has_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDRESSES, "localhost", ["127.0.0.1"])
    check = found("localhost", "node")["name localhost"]
    assert check.severity is Severity.FAIL
    assert "write this machine's own name" in check.remedy


def test_the_hint_for_a_host_without_this_package_is_to_install_it() -> None:
    check = found("driver", "bare")["package on bare"]
    assert (check.severity, check.text) == (
        Severity.FAIL,
        "ModuleNotFoundError: No module named 'hvd_autosync'",
    )
    assert sys.executable in check.remedy


def test_ssh_gets_port_and_key(tmp_path: Path) -> None:
    list(check_hosts(["driver", "node"], (2222, "some-key")))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3
    assert all("-p 2222" in line and "-i some-key" in line for line in asked)


def test_names_are_resolved_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert doctor_hosts._resolve("localhost") == ["127.0.0.1"]
    assert doctor_hosts._resolve("no-such-host.invalid") == []
