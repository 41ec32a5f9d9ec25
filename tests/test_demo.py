"""``make demo``: which hosts it takes, what it prints, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from hvd_autosync.testing import testbed_missing

PROGRAM = Path(__file__).parents[1] / "tools" / "demo.py"
#: Of twelve steps a single stall is trimmed, of eight none would be.
SHORT = ["--autosync-trials", "2", "--autosync-warmup", "2", "--autosync-steps", "12"]
GAIN = re.compile(r"hvd-autosync: (\S+)x faster than the default \(90 % interval (\S+)x to (\S+)x")
EPOCH = re.compile(r"test accuracy ([0-9.]+)% +([0-9]+) images/s")
#: Tuning takes nine of them at most.
EPOCHS = 20
NEEDS_ROOT = pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing()))
NEEDS_USERS = pytest.mark.skipif(
    testbed_missing(ssh=False) is not None, reason=str(testbed_missing(ssh=False))
)


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The program, as a module."""
    found = util.spec_from_file_location("demo", PROGRAM)
    assert found is not None and found.loader is not None
    module = util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("root_missing", "user_missing", "way"),
    [
        (None, None, "ROOT"),
        ("network namespaces need root", None, "USER"),
        ("not installed: sshd (packages openssh-server)", None, "USER"),
        ("network namespaces need root", "the kernel refuses: no", "LOOPBACK"),
    ],
)
def test_hosts_are_made_as_root_else_as_a_user_else_not(
    demo: ModuleType, root_missing: str | None, user_missing: str | None, way: str
) -> None:
    assert demo.choose(root_missing, user_missing) is demo.Way[way]


@pytest.mark.parametrize("way", ["ROOT", "USER"])
def test_it_says_what_it_emulates(demo: ModuleType, way: str) -> None:
    text = demo.introduction(demo.Way[way], None, None)
    assert text.startswith("two hosts on this machine") and "joined at 100 Mbit/s" in text


def test_without_hosts_it_says_why_and_what_to_install(demo: ModuleType) -> None:
    loopback, root = demo.Way.LOOPBACK, "network namespaces need root"
    refused = demo.introduction(loopback, root, "the kernel refuses: not permitted")
    assert refused.startswith("two ranks on this machine, because it cannot emulate hosts")
    assert "the kernel refuses: not permitted; network namespaces need root" in refused
    assert "little or nothing to gain" in refused and "test-deps" not in refused
    absent = demo.introduction(loopback, root, "not installed: tc (packages iproute2)")
    assert "not installed: tc" in absent and "make test-deps" in absent


def test_options_of_the_user_take_precedence(demo: ModuleType) -> None:
    words = demo.command_line(["-np", "2"], ["--autosync-trials", "3"])
    assert words[1:4] == ["-np", "2", "--gloo"]
    trials = [words[i + 1] for i, word in enumerate(words) if word == "--autosync-trials"]
    assert trials[-1] == "3" and len(trials) == 2
    assert words.index("--autosync-trials") < words.index("python")


@pytest.mark.parametrize(
    ("missing", "called"),
    [
        ({True: None}, ("testbed", True)),
        ({True: "network namespaces need root", False: None}, ("namespace", "--in-user-namespace")),
        ({True: "network namespaces need root", False: "the kernel refuses"}, ("here",)),
    ],
)
def test_the_job_runs_where_it_can(
    demo: ModuleType,
    missing: dict[bool, str | None],
    called: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[tuple[object, ...]] = []

    def say(*call: object) -> int:
        calls.append(call)
        return 0

    monkeypatch.setenv("PATH", os.environ["PATH"])  # restored after main()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo, "testbed_missing", lambda *, ssh=True: missing[ssh])
    monkeypatch.setattr(demo, "run_on_testbed", lambda extra, ssh: say("testbed", ssh))
    monkeypatch.setattr(demo, "run_as_namespace_root", lambda words: say("namespace", words[2]))
    monkeypatch.setattr(demo, "run_here", lambda extra: say("here"))
    assert demo.main([]) == 0
    assert calls == [called]
    assert capsys.readouterr().out.endswith(f"{demo.REAL}\n")


_MARKS = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.root]
#: As root stands for both; what is a user's alone about it is in ``testing/test_unprivileged.py``.
WAYS = [
    pytest.param("as root", marks=[*_MARKS, NEEDS_ROOT]),
    pytest.param("in a user namespace", marks=[*_MARKS, NEEDS_USERS, pytest.mark.wide]),
]


@pytest.fixture
def start(
    request: pytest.FixtureRequest, tmp_path: Path, horovodrun: str
) -> Callable[..., subprocess.Popen[str]]:
    """Starts the demonstration the way that the test names, in a session of its own."""
    way = request.getfixturevalue("way")
    prefix = request.getfixturevalue("as_nobody") if way != "as root" else ["env"]

    def begin(*options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM), *SHORT, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # pytest may ignore it, if it runs in the background
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return begin


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_in_a_gain(
    way: str, start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_EPOCHS", str(EPOCHS))
    if not gains(whole_output(way, start)):  # one round of two may stall on a busy machine
        output = whole_output(way, start)
        assert gains(output), output
    await_end()


def whole_output(way: str, start: Callable[..., subprocess.Popen[str]]) -> str:
    """What a run says that goes well, whatever its gain."""
    process = start()
    output, _ = process.communicate(timeout=550)
    assert process.returncode == 0, output
    assert output.startswith(f"demo: two hosts on this machine ({way}), joined at 100 Mbit/s\n")
    assert "tuned in its own steps" in output
    epochs = EPOCH.findall(output)
    assert len(epochs) == EPOCHS, "the training ran once"
    assert float(epochs[-1][0]) > 95
    assert output.splitlines()[-1].endswith(
        "horovodrun -np 2 -H a:1,b:1 --autosync python train.py"
    )
    return output


def gains(output: str) -> bool:
    """Whether factors were found and used, and how much faster that is."""
    found = [tuple(map(float, gain.groups())) for gain in GAIN.finditer(output)]
    speeds = [int(speed) for _, speed in EPOCH.findall(output)]
    return (
        bool(found)
        and found[-1][0] > 1.2
        and found[-1][1] > 1
        and "large_exchange=factors" in output
        # the default, then the winner
        and statistics.median(speeds[-5:]) > 1.2 * speeds[0]
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_ctrl_c_leaves_nothing(
    way: str, presses: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start("--autosync-steps", "1000")
    await_tuning(process)
    for _ in range(presses):
        # What a terminal does: everything of the foreground receives it.
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
    rest = process.communicate(timeout=120)[0]
    assert process.returncode not in (0, None), rest
    assert f'File "{PROGRAM}"' not in rest  # Horovod's own traceback may be there
    await_end()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.wide
def test_when_it_is_killed_nothing_stays(
    way: str, number: int, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start()
    await_tuning(process)
    process.send_signal(number)
    process.communicate(timeout=120)
    await_end()


def await_tuning(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "measuring the links" in line:
            assert len(started_here()) > 1
            return
    pytest.fail("".join(seen))


def await_end() -> None:
    """Wait until nothing runs that this run of the tests has started."""
    deadline = time.monotonic() + 120
    while left := started_here():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def started_here() -> list[str]:
    """Processes with the mark of this run, on all hosts; that of pytest itself is set later."""
    mark, found = "AUTOSYNC_TEST_SESSION", []
    for process in psutil.process_iter():
        try:
            if process.environ().get(mark) != os.environ[mark]:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        except (psutil.Error, OSError):  # gone meanwhile
            continue
    return found
