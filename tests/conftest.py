"""What all tests share: a clean environment, a Horovod to run, and a look for stray processes.

The markers are declared in ``setup.cfg``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import psutil
import pytest
import sqlalchemy

from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
)
from hvd_autosync.traces import TraceStore

#: Names this run in every process that it starts, so that runs beside it are left alone.
_SESSION_VARIABLE = "AUTOSYNC_TEST_SESSION"
_TRIAL_ID_VARIABLE = "HVD_AUTOSYNC_TRIAL_ID"
_PATIENCE_S = 120.0
_STRAYS = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long to look for what does harm."""
    parser.addoption("--fuzz-inputs", type=int, default=300, help="changed inputs of each kind")


def pytest_configure(config: pytest.Config) -> None:
    """Sets what must hold before the first test module imports torch."""
    os.environ[_SESSION_VARIABLE] = uuid.uuid4().hex
    # Tests send it; whoever starts pytest in the background lets it be ignored.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Ranks under Open MPI that wait leave processors to others.
    os.environ.update(OMPI_MCA_mpi_yield_when_idle="1")
    # A busy machine is no fault of what is tested; fixtures here serve all examples of a test.
    unchecked = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    hypothesis.settings.register_profile(
        "any machine", deadline=None, suppress_health_check=unchecked
    )
    hypothesis.settings.load_profile("any machine")
    scripts = sysconfig.get_path("scripts")
    os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No test sees the user's settings, or writes where the user's traces are."""
    for name in os.environ:
        if name.startswith("HVD_AUTOSYNC_") and name != _SESSION_VARIABLE:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def horovodrun() -> str:
    """Path of ``horovodrun``; tests that ask for it are skipped where there is no Horovod."""
    path, found = shutil.which("horovodrun"), importlib.util.find_spec("horovod")
    if path is None or found is None or found.origin is None:
        pytest.skip("Horovod is not installed: make setup builds it")
    if not [*Path(found.origin).parent.glob("torch/mpi_lib*.so")]:
        pytest.skip("Horovod was built without PyTorch: make setup builds it")
    return path


#: Becomes a user without rights; what is in root's home, where Python may be, is shown in another
#: one, in a mount namespace of its own. Arguments: that home, then folders up to "--".
_AS_NOBODY = """
set -e
home=$1; shift
mount --rbind "$HOME" "$home"
mount -t tmpfs -o mode=755 tmpfs "$HOME"
while [ "$1" != -- ]; do
    case $1 in "$HOME/"*) mkdir -p "$1"; mount --rbind "$home${1#"$HOME"}" "$1" ;; esac
    shift
done
shift
umount -l "$home"
exec setpriv --reuid=65534 --regid=65534 --clear-groups env HOME="$home" "$@"
"""


@pytest.fixture
def as_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The beginning of a command that a user without rights runs.

    Tests that ask for it are skipped where they are not root's.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        pytest.skip("needs root, setpriv and unshare")
    home = Path(tempfile.mkdtemp(prefix="autosync-test-"))
    shutil.chown(home, 65534, 65534)
    shown = {sys.base_prefix, sys.prefix, str(Path(__file__).parents[1])}
    way = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _AS_NOBODY, "sh"]
    # Files that this user would write beside the sources are not its own to write.
    environment = ["env", "PYTHONDONTWRITEBYTECODE=1", f"XDG_DATA_HOME={home}"]
    yield [*way, str(home), *shown, "--", *environment]
    shutil.rmtree(home)


@pytest.fixture
def model() -> ModelProfile:
    """A table of which a batch touches a hundredth, a large matrix, and twenty small tensors."""
    parameters = [
        ParameterProfile("table", (100_000, 16), "float32", False, 21, 0.020, touched_rows=0.01),
        ParameterProfile("matrix", (1024, 1024), "float32", False, 10, 0.010),
        *(
            ParameterProfile(f"small{i}", (256,), "float32", False, i + (i >= 10), (i + 1) * 9e-4)
            for i in range(20)
        ),
    ]
    return ModelProfile(tuple(parameters), forward_s=0.010, backward_s=0.021)


@pytest.fixture
def add_damaged() -> Callable[[TraceStore], str]:
    """Add a running study of another job to a store, which cannot be read; returns its id."""

    def add(store: TraceStore) -> str:
        study_id = store.create_study(
            job_key="damaged", command=("python", "other.py"), settings={}, versions={}
        ).study_id
        damage = "UPDATE hvd_autosync_studies SET settings = '{', owner = '[]' WHERE study_id = :id"
        with store._database.writing() as connection:
            connection.execute(sqlalchemy.text(damage), {"id": study_id})
        return study_id

    return add


@pytest.fixture
def slow_network() -> Resources:
    """Two hosts of two ranks, 100 Mbit/s between them."""
    within, across = Link(2, 2e-4, 2e9), Link(2, 1e-3, 12.5e6)
    overall = Link(4, 2e-3, 12.5e6 / 1.5)
    build = HorovodBuild("0.28.1", gloo=True, mpi=False, nccl=False)
    return Resources((Host("a", 2), Host("b", 2)), "cpu", build, Links(overall, within, across))


@pytest.fixture(scope="session")
def keep_links() -> Callable[[Path, list[str]], None]:
    """``keep_links(store, words)``: links for a job of ``horovodrun`` with these words.

    To measure them keeps both ranks busy for seconds, which tests of something else spare.
    """

    def keep(store: Path, words: list[str]) -> None:
        from hvd_autosync.engine.cluster import cluster_key
        from hvd_autosync.engine.job_line import parse_words, read_job

        job, _ = read_job(parse_words(words), words)
        link = Link(job.world_size, 5e-4, 5e8)
        TraceStore(store).keep_links(cluster_key(job), Links(overall=link, within=link))

    return keep


@pytest.fixture
def crowd() -> Iterator[Callable[..., list[socket.socket]]]:
    """``crowd(address, manner, count)``: unauthenticated connections to a port until the test ends.

    By ``manner``: ``silent`` ones send nothing, ``garbage`` ones send random bytes, and ``drip``
    ones send a byte now and then.
    """
    connections: list[socket.socket] = []
    over = threading.Event()
    drips: list[threading.Thread] = []

    def say(connection: socket.socket, text: bytes) -> None:
        with contextlib.suppress(OSError):  # not connected yet, or not any more
            connection.send(text)

    def drip(those: list[socket.socket]) -> None:
        while not over.wait(0.05):
            for connection in those:
                say(connection, b"x")

    def come(address: tuple[str, int], manner: str, count: int) -> list[socket.socket]:
        those = [socket.socket() for _ in range(count)]
        connections.extend(those)
        for connection in those:
            connection.setblocking(False)
            connection.connect_ex(address)
            if manner == "garbage":
                say(connection, os.urandom(4096))
        if manner == "drip":
            drips.append(threading.Thread(target=drip, args=(those,), daemon=True))
            drips[-1].start()
        return those

    yield come
    over.set()
    for thread in drips:
        thread.join()
    for connection in connections:
        connection.close()


class _ForkServers:
    """Two processes with torch and Horovod loaded, which start when ranks are first needed.

    A rank that is started as a program imports both for four seconds of a processor.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._command: list[str] | None = None

    def command(self) -> list[str]:
        """The beginning of a command that runs a Python program in a fork of one of them."""
        if self._command is None:
            here = Path(__file__).parent / "runtime"
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            for number in ("0", "1"):
                self._start(str(here / "forking.py"), str(Path(folder, number)))
            # Without ``site`` it starts in some milliseconds.
            self._command = [sys.executable, "-IS", str(here / "forked.py"), folder]
        return self._command

    def _start(self, program: str, path: str) -> None:
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(path)
            listening.listen()
            server = subprocess.Popen(
                [sys.executable, program, str(listening.fileno()), str(os.getpid())],
                env=environment,
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        self._stack.callback(server.wait)
        self._stack.callback(server.kill)

    def end(self) -> None:
        """End both; they start again when ranks are needed again."""
        self._stack.close()
        self._command = None


_FORK_SERVERS = _ForkServers()


@pytest.fixture(scope="session")
def fork_rank() -> Callable[[], list[str]]:
    """``fork_rank()``: what takes the place of ``python`` in a job whose ranks are forked."""
    return _FORK_SERVERS.command


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends the servers with the tests of a folder, or file, that lies here.

    Others look for processes that were left.
    """
    here = Path(__file__).parent / item.path.relative_to(Path(__file__).parent).parts[0]
    if nextitem is None or not nextitem.path.is_relative_to(here):
        _FORK_SERVERS.end()


@dataclass
class ProcessesSeen:
    """What processes of this run of the tests have shown to who looks into ``/proc``."""

    variables: dict[str, set[bytes]] = field(default_factory=dict)
    lines: set[bytes] = field(default_factory=set)

    def look(self) -> None:
        """Take what there is now, but for this process."""
        mark = f"{_SESSION_VARIABLE}={os.environ[_SESSION_VARIABLE]}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):  # gone meanwhile, or another user's
                environment = (process / "environ").read_bytes()
                if mark not in environment:
                    continue
                self.lines.add((process / "cmdline").read_bytes())
                for entry in environment.split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    self.variables.setdefault(name.decode(errors="replace"), set()).add(value)

    def variables_with(self, text: str) -> set[str]:
        """Names of the variables in whose values ``text`` is."""
        return {
            name
            for name, values in self.variables.items()
            if any(text.encode() in value for value in values)
        }

    def lines_with(self, text: str) -> set[bytes]:
        """The command lines in which ``text`` is."""
        return {line for line in self.lines if text.encode() in line}


@pytest.fixture
def processes_seen() -> Callable[[], contextlib.AbstractContextManager[ProcessesSeen]]:
    """Look at all processes until the block of the context manager ends."""

    @contextlib.contextmanager
    def watched() -> Iterator[ProcessesSeen]:
        seen, over = ProcessesSeen(), threading.Event()

        def watch() -> None:
            while not over.wait(0.1):
                seen.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()

    return watched


#: Read by every Python at its start: however late the helper of a training gets a processor
#: on a busy machine, it ends by what it knows.
_PATIENT = """
import sys
if "commands.live_study import main" in " ".join(sys.orig_argv):
    from hvd_autosync.commands import live_study
    live_study._LONGEST_S = 200
"""


@pytest.fixture
def patient_helper(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helpers say all that they know before they end with their trainings."""
    folder = tmp_path_factory.mktemp("patient")
    (folder / "sitecustomize.py").write_text(_PATIENT)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def _strays_of(session_mark: str) -> dict[psutil.Process, str]:
    """Workers that tests of this run started and that still live, each with a description."""
    found = {}
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            trial = environment.get(_TRIAL_ID_VARIABLE)
            if environment.get(_SESSION_VARIABLE) != session_mark or trial is None:
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                command = " ".join(process.cmdline())[:200]
                found[process] = f"process {process.pid} of trial {trial}: {command}"
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker that outlives the tests fails the run; it is killed, so that CI can end."""
    mark = os.environ[_SESSION_VARIABLE]
    deadline = time.monotonic() + _PATIENCE_S
    while (strays := _strays_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    session.config.stash[_STRAYS] = list(strays.values())
    if strays:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    for process in strays:
        with contextlib.suppress(psutil.Error):
            process.kill()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the workers that were left."""
    if strays := terminalreporter.config.stash.get(_STRAYS, []):
        terminalreporter.section("workers that outlived the tests (killed now)", red=True)
        for line in strays:
            terminalreporter.line(line)
