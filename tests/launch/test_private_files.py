"""What a trial writes is seen by its ranks on this host, and by nobody else."""

import errno
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.launch import files_daemon, mounts, namespaces, private_files
from hvd_autosync.launch.files_daemon import DaemonTask
from hvd_autosync.launch.mounts import PrivateRoot, read_mounts
from hvd_autosync.launch.private_files import FILES_VARIABLE, FilesOrder
from hvd_autosync.launch.shared_paths import shared_paths
from hvd_autosync.launch.stage import LAYERS, make_stage
from hvd_autosync.launch.sweep import sweep
from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.environment import TRIAL_ID_VARIABLE
from hvd_autosync.runtime.driver.messages import Files, Refused
from hvd_autosync.search_space.records import Record

PACKAGE = Path(__file__).parents[2] / "hvd_autosync"
ENCLOSED = [sys.executable, "-I", "-S", str(PACKAGE / "launch" / "enclosed.py")]
#: As somebody who may not mount: what follows needs a user namespace.
UNPRIVILEGED = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
KEY = "0f" * 16
ROOT = os.geteuid() == 0
WAYS = [pytest.param([], id="as I am")]
if ROOT and shutil.which("setpriv"):
    WAYS.append(pytest.param(UNPRIVILEGED, id="without privileges"))


class Trial:
    """Starts commands as ranks of one trial."""

    def __init__(self, way: list[str], folder: Path) -> None:
        self.way, self.folder, self.name = way, folder, uuid.uuid4().hex

    def start(self, rank: int, *command: str, **order: object) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "HOROVOD_RANK": str(rank),
            TRIAL_ID_VARIABLE: self.name,
            FILES_VARIABLE: FilesOrder(self.name, KEY, **order).to_text(),  # type: ignore[arg-type]
        }
        return subprocess.Popen(
            [*self.way, *ENCLOSED, *command],
            cwd=self.folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *command: str, **order: object) -> tuple[str, str, Any]:
        """Output, error output, and the report on the files."""
        process = self.start(0, *command, **order)
        out, err = process.communicate(timeout=120)
        return out, err, *[m for m in messages(err) if isinstance(m, (Files, Refused))]


def messages(text: str) -> list[Record]:
    decoder = MessageDecoder(KEY, 8)
    found = [decoder.feed(line)[1] for line in text.encode().splitlines()]
    return [each[1] for each in found if each is not None]


@pytest.fixture(scope="session")
def _overlays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Why there are none, by the way they are asked for."""
    reasons = {}
    for way in WAYS:
        trial = Trial(way.values[0], tmp_path_factory.mktemp("try"))
        *_, message = trial.run("true")
        reasons[str(way.values[0])] = getattr(message, "reason", "")
    return reasons


@pytest.fixture(params=WAYS)
def trial(
    request: pytest.FixtureRequest, _overlays: dict[str, str], tmp_path: Path
) -> Callable[[], Trial]:
    """Makes trials in an empty folder."""
    if reason := _overlays[str(request.param)]:
        pytest.skip(f"no overlays here: {reason}")
    return lambda: Trial(request.param, tmp_path)


def snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything that a changed file would change, and all bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (about.st_ino, about.st_mode, about.st_ctime_ns, content)
    return found


SHELL = """
set -e
echo more >> log.txt
rm -r old; mkdir old; test -z "$(ls old)"; echo new > old/new
mv kept moved; cat moved/deep/file; echo changed > moved/deep/file
cat log.txt; pwd
"""


def test_what_a_script_does_to_files_is_gone_with_it(
    trial: Callable[[], Trial], tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "file").write_text("old")
    (tmp_path / "kept" / "deep").mkdir(parents=True)
    (tmp_path / "kept" / "deep" / "file").write_text("deep\n")
    (tmp_path / "log.txt").write_text("first\n")
    before = snapshot(tmp_path)
    for _ in range(2):  # nor does the next trial see anything of it
        out, err, report = trial().run("sh", "-c", SHELL)
        assert out == f"deep\nfirst\nmore\n{tmp_path}\n", err
        assert report.files >= 3 and not report.full
    assert snapshot(tmp_path) == before


def test_a_script_without_interpreter_is_a_shells(
    trial: Callable[[], Trial], tmp_path: Path
) -> None:
    """As with ``env``, by which Horovod starts ranks without us."""
    script = tmp_path / "run"
    script.write_text('echo "$0 $1 $WORD"')
    script.chmod(0o755)
    out, err, _ = trial().run("WORD=2", "./run", "1")
    assert out == "./run 1 2\n", err


def test_ranks_of_one_trial_exchange_files(trial: Callable[[], Trial], tmp_path: Path) -> None:
    until = "i=0; until [ -e {} ] || [ $i = 2000 ]; do sleep 0.05; i=$((i+1)); done; "
    line = "echo $0 > $0; " + until.format("$1") + "echo both; " + until.format("end") + "ls"
    one, other = trial(), trial()
    ranks = [one.start(r, "sh", "-c", line, f"f{r}", f"f{1 - r}") for r in (0, 1)]
    assert [rank.stdout and rank.stdout.readline() for rank in ranks] == ["both\n"] * 2
    beside = other.start(0, "ls")
    assert (beside.communicate(timeout=120)[0], beside.returncode) == ("", 0)
    assert one.start(2, "touch", "end").wait(120) == 0
    assert [each.communicate(timeout=120)[0] for each in ranks] == ["end\nf0\nf1\n"] * 2
    assert list(tmp_path.iterdir()) == []


LIBRARIES = """
import os, sqlite3, sys
import h5py, numpy, torch
from safetensors.torch import load_file, save_file
from torch.utils.tensorboard import SummaryWriter

value = float(sys.argv[1])
if os.path.exists("a.safetensors"):
    assert load_file("a.safetensors")["x"].item() == 1
    assert torch.load("a.pt").item() == 1
save_file({"x": torch.tensor(value)}, "a.safetensors")
torch.save(torch.tensor(value), "a.pt")
with h5py.File("a.h5", "a") as file:
    if "x" in file:
        assert file["x"][0] == 1
        file["x"][0] = value
    else:
        file["x"] = numpy.array([value])
with sqlite3.connect("a.db") as db:
    db.execute("pragma journal_mode=wal")
    db.execute("create table if not exists t (x)")
    assert db.execute("select count(*) from t").fetchone()[0] <= 1
    db.execute("insert into t values (?)", (value,))
db.close()
writer = SummaryWriter("events")
writer.add_scalar("x", value)
writer.close()
with numpy.memmap("a.mm", mode="r+" if os.path.exists("a.mm") else "w+", shape=8) as data:
    data[:] = value
""".replace("with numpy.memmap(", "data = numpy.memmap(").replace(
    " as data:\n    data[:] = value", "\ndata[:] = value; data.flush()"
)


@pytest.mark.slow
def test_what_libraries_write_is_gone_too(trial: Callable[[], Trial], tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("h5py")
    script = tmp_path / "libraries.py"
    script.write_text(LIBRARIES)
    subprocess.run([sys.executable, script, "1"], cwd=tmp_path, check=True)
    before = snapshot(tmp_path)
    for value in "23":
        process = trial().start(0, sys.executable, str(script), value)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert snapshot(tmp_path) == before


def test_caches_are_shared(
    trial: Callable[[], Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    (tmp_path / "__pycache__").mkdir()
    trial().run("sh", "-c", "touch cache/a compiled/b __pycache__/c d")
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {"cache/a", "compiled/b", "__pycache__/c"}


def test_what_is_to_be_kept_is_kept(trial: Callable[[], Trial], tmp_path: Path) -> None:
    (tmp_path / "log").write_text("1\n")
    keep, one = tmp_path / "keep", trial()
    line = "echo 2 >> log; mkdir -p a/b; echo x > a/b/c; ls keep"
    out, err, _ = one.run("sh", "-c", line, keep=str(keep))
    assert out == "", f"no trial sees what others have left: {err}"
    host = keep / one.name / os.uname().nodename
    deadline = time.monotonic() + 120
    while (host / LAYERS).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    files = {str(path.relative_to(host)) for path in host.rglob("*") if path.is_file()}
    within = str(tmp_path).lstrip("/")
    assert files == {f"{within}/log", f"{within}/a/b/c"}
    assert (host / within / "log").read_text() == "1\n2\n"
    assert (tmp_path / "log").read_text() == "1\n"


def test_each_host_of_one_name_keeps_its_files_in_its_own_folder(tmp_path: Path) -> None:
    order, name = FilesOrder("one", KEY, keep=str(tmp_path / "keep")), os.uname().nodename
    kept = [private_files._kept_folder(order) for _ in range(3)]
    folder = (tmp_path / "keep" / "one").resolve()
    assert kept == [str(folder / each) for each in (name, f"{name}-2", f"{name}-3")]


@pytest.mark.parametrize("name", ["work", "upper"])
def test_kept_files_may_lie_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    written = tmp_path / LAYERS / "upper" / "0" / name / "run"
    written.mkdir(parents=True)
    (tmp_path / LAYERS / "work" / "0").mkdir(parents=True)
    (written / "model").write_text("x")
    folder = os.open(tmp_path, os.O_RDONLY)
    files_daemon._restore_paths(
        DaemonTask(0, "one", "key", -1, (), folder, ("/",), limit_bytes=0, kept=True)
    )
    os.close(folder)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [
        tmp_path / name / "run" / "model"
    ]


def test_a_mount_that_takes_no_overlay_does_not_stand_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a FAT file system, or on some network file systems."""
    first, second, layers = (tmp_path / name for name in ("first", "second", "layers"))
    for each in (first, second, layers):
        each.mkdir()

    def mount(path: str, *_: object, foreign: bool) -> None:
        if path == str(first):
            raise OSError(errno.EINVAL, "wrong fs type")

    monkeypatch.setattr(mounts, "mount_overlay", mount)
    root = PrivateRoot({}, (), "", "/root", str(layers), foreign=False, locked=False)
    assert not root._overlay(str(first)) and root._overlay(str(second))
    assert root.folders == [str(second)]


def test_what_does_not_fit_is_reported(trial: Callable[[], Trial], tmp_path: Path) -> None:
    line = "dd if=/dev/zero of=data bs=1M count=20 2>&1"
    out, _, report = trial().run("sh", "-c", line, limit_bytes=8 << 20)
    assert "No space left on device" in out
    assert report.full and report.limit_bytes == 8 << 20
    assert not (tmp_path / "data").exists()


def test_a_file_that_is_copied_to_be_written_is_named(
    trial: Callable[[], Trial], tmp_path: Path
) -> None:
    (tmp_path / "data").write_bytes(bytes(3 << 20))
    *_, report = trial().run("sh", "-c", "cat data > new; printf x >> data")
    assert (report.copied, report.copied_bytes) == (str(tmp_path / "data"), (3 << 20) + 1)


def test_a_rank_that_is_killed_leaves_nothing(trial: Callable[[], Trial], tmp_path: Path) -> None:
    one = trial()
    process = one.start(0, "sh", "-c", "touch here; echo there; exec sleep 600")
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    process.kill()
    _, err = process.communicate(timeout=120)
    assert [report.files for report in messages(err)] == [1]
    assert list(tmp_path.iterdir()) == []
    # Whoever held it has closed its error output, and is closing the rest.
    deadline = time.monotonic() + 120
    while one.name in Path("/proc/net/unix").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.name not in Path("/proc/net/unix").read_text()


#: Of this process alone: other tests may run beside it.
USER = f"autosync-test-{os.getpid()}"
#: Becomes a user for whom folders that are closed to others (root's home, where Python may be) have
#: been opened, in a mount namespace of its own.
AS_USER = """
set -e
user=$1 home=$2 layers=$3 needed=$4
shift 4
mount -t tmpfs tmpfs "$layers"
for path in $needed; do
    folder=
    for name in $(echo "$path" | tr / ' '); do
        folder=$folder/$name
        if [ $((0$(stat -L -c %a "$folder") & 1)) = 0 ]; then
            mkdir -m 755 "$layers/upper" "$layers/work"
            mount -t overlay -o "lowerdir=$folder,upperdir=$layers/upper,workdir=$layers/work" \\
                overlay "$folder"
        fi
    done
done
exec setpriv --reuid="$user" --regid="$user" --init-groups \\
    env HOME="$home" USER="$user" LOGNAME="$user" TMPDIR=/tmp "$@"
"""


@pytest.fixture
def users_trial(tmp_path: Path) -> Iterator[Callable[..., Trial]]:
    """Makes trials of a user of this machine, in a folder below one of root's.

    Its arguments are words before the command.
    """
    tools = ("useradd", "userdel", "setpriv", "unshare")
    if not ROOT or not all(map(shutil.which, tools)):
        pytest.skip(f"needs root and {', '.join(tools)}")
    place = Path(tempfile.mkdtemp(prefix="autosync-test-"))
    made = subprocess.run(["useradd", "-M", "-d", str(place / "home"), USER], capture_output=True)
    try:
        if made.returncode:
            pytest.skip(f"useradd: {made.stderr.decode()}")
        place.chmod(0o755)
        for name in ("home", "run"):
            (place / name).mkdir()
            shutil.chown(place / name, USER, USER)
        needed = " ".join({sys.base_prefix, sys.prefix, str(PACKAGE)})
        way = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            AS_USER,
            "sh",
            USER,
            str(place / "home"),
            str(tmp_path),
            needed,
        ]
        *_, message = Trial(way, place / "run").run("true")
        if isinstance(message, Refused):
            pytest.skip(f"no overlays for this user: {message.reason}")
        yield lambda *words: Trial([*way, *words], place / "run")
    finally:
        if made.returncode == 0:
            subprocess.run(["userdel", USER], capture_output=True)
        shutil.rmtree(place)


def test_what_another_users_script_does_to_files_is_gone_with_it(
    users_trial: Callable[[], Trial],
) -> None:
    """That user may not copy root's folder above its own, nor files of other groups."""
    folder = users_trial().folder
    for name in ("old/file", "kept/deep/file", "log.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text({"file": "deep\n"}.get(Path(name).name, "first\n"))
    for path in folder.rglob("*"):
        shutil.chown(path, USER, USER)
    before = snapshot(folder)
    for _ in range(2):
        out, err, report = users_trial().run("sh", "-c", SHELL)
        assert out == f"deep\nfirst\nmore\n{folder}\n", err
        assert report.files >= 3
    assert snapshot(folder) == before
    keep = folder.parent / "home" / "keep"
    users_trial().run("sh", "-c", "echo more >> log.txt", keep=str(keep))
    deadline = time.monotonic() + 120
    while not (logs := list(keep.glob(f"*/*{folder}/log.txt"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [log.read_text() for log in logs] == ["first\nmore\n"]

    shutil.chown(folder, "root", "root")
    folder.chmod(0o777)
    (folder / "others").write_text("")
    (folder / "others").chmod(0o666)
    out, err, _ = users_trial().run("sh", "-c", "id -un; echo x > new; ls; echo x >> others")
    assert out.split() == [USER, "kept", "log.txt", "new", "old", "others"]
    assert "Value too large for defined data type" in err, "by which the driver knows it"
    assert not (folder / "new").exists() and (folder / "others").read_text() == ""


def test_files_are_private_where_a_user_counts_as_root(users_trial: Callable[..., Trial]) -> None:
    """Other users' folders have no owner there, and mounts from outside cannot be taken apart."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    one = users_trial(*namespace)
    (one.folder / "kept" / "deep").mkdir(parents=True)
    (one.folder / "old").mkdir()
    (one.folder / "kept" / "deep" / "file").write_text("deep\n")
    (one.folder / "log.txt").write_text("first\n")
    for path in one.folder.rglob("*"):
        shutil.chown(path, USER, USER)
    before = snapshot(one.folder)
    out, err, report = one.run("sh", "-c", f"id -u; {SHELL}")
    assert out == f"0\ndeep\nfirst\nmore\n{one.folder}\n", err
    assert isinstance(report, Files)
    assert snapshot(one.folder) == before

    two_ranks = ["sh", "-c", 'HOROVOD_RANK=1 "$@" & "$@"; wait', "sh"]
    both = users_trial(*namespace, *two_ranks)
    wait = "echo x >> both; until [ $(wc -l < both) = 2 ]; do sleep 0.1; done; wc -l < both"
    out, err, report = both.run("timeout", "100", "sh", "-c", wait)
    assert out == "2\n2\n", err
    assert isinstance(report, Files)


@pytest.mark.skipif(not ROOT or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_another_user_gets_nothing(trial: Callable[[], Trial], tmp_path: Path) -> None:
    one = trial()
    process = one.start(0, "sh", "-c", "echo there; exec sleep 600")
    assert process.stdout is not None and process.stdout.readline() == "there\n"
    ask = (
        "s = socket.socket(socket.AF_UNIX); s.settimeout(120); "
        f"s.connect('\\0hvd-autosync-{one.name}'); print(s.recv(1))"
    )
    for user, answer in ((65534, "b''\n"), (0, "b'0'\n")):
        code = f"import os, socket; os.setuid({user}); {ask}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout == answer, done.stderr
    process.kill()
    process.communicate(timeout=120)


def test_a_command_that_is_not_there_fails_as_in_a_shell(trial: Callable[[], Trial]) -> None:
    process = trial().start(0, "no-such-command")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 127 and "no-such-command: No such file" in err


def test_variables_may_be_assigned_in_front_of_a_command(trial: Callable[[], Trial]) -> None:
    out, _, _ = trial().run("A=1=2", "B=", "sh", "-c", 'echo "$A-$B-${HOROVOD_RANK}"')
    assert out == "1=2--0\n"


def test_the_reason_of_a_refusal_is_that_of_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder in which files were to be mounted cannot be removed then."""
    (tmp_path / "stage" / "mounted").mkdir(parents=True)

    def refuse() -> bool:
        raise OSError("no user may have a namespace")

    monkeypatch.setenv(TRIAL_ID_VARIABLE, "t")
    monkeypatch.setattr(private_files, "make_stage", lambda _: str(tmp_path / "stage"))
    monkeypatch.setattr(namespaces, "unshare_mounts", refuse)
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError, match="no user may"):
        private_files._make(FilesOrder("t", KEY), 0, listener, "")


@pytest.mark.skipif(not ROOT or not shutil.which("unshare"), reason="needs root and unshare")
def test_where_no_namespace_can_be_had_the_command_does_not_start(tmp_path: Path) -> None:
    """Also where another rank was about to make it: that this has ended tells nobody why."""
    forbid = 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec "$@"'
    trial = Trial(["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"], tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"\0hvd-autosync-{trial.name}")
        other.listen()
        process = trial.start(3, "touch", "here")
        assert select.select([other], [], [], 120)[0], "it asks there"
    _, err = process.communicate(timeout=120)
    (message,) = messages(err)
    assert process.returncode == 69 and list(tmp_path.iterdir()) == []
    assert isinstance(message, Refused) and "max_*_namespaces" in message.reason


def test_mounts_are_read_as_the_kernel_writes_them() -> None:
    mounts = read_mounts(
        textwrap.dedent(
            r"""
            22 27 0:21 / /proc rw,relatime - proc proc rw
            27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
            28 27 0:25 / /data\040set rw,nosuid - nfs4 server:/x ro,vers=4
            29 27 0:26 / /scratch ro - xfs /dev/vdb rw
            30 27 0:27 / /home rw,nosuid,nodev - xfs /dev/vdc rw
            """
        ).strip()
    )
    assert {path for path, mount in mounts.items() if mount.written} == {"/", "/home"}
    assert mounts["/data set"].kind == "nfs4" and mounts["/home"].options == "rw,nosuid,nodev"


def test_mount_points_may_be_any_bytes(tmp_path: Path) -> None:
    """Only spaces, tabs, ends of lines and backslashes are written as octal numbers."""
    (tmp_path / "mountinfo").write_bytes(
        b"27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        b"28 27 0:25 / /caf\xe9\\040\\134x\\011\xc3\xa9\x0b\r\xe2\x80\xa8 rw - cifs //\xe9/x rw\n"
    )
    mounts = read_mounts(private_files._text(str(tmp_path / "mountinfo")))
    there = b"/caf\xe9 \\x\t\xc3\xa9\x0b\r\xe2\x80\xa8"
    assert [os.fsencode(path) for path in mounts] == [b"/", there]
    assert mounts[os.fsdecode(there)].kind == "cifs"


@pytest.mark.skipif(not ROOT or not shutil.which("unshare"), reason="needs root and unshare")
def test_files_are_private_at_a_mount_point_that_is_not_utf_8(trial: Callable[[], Trial]) -> None:
    one = trial()
    line = 'mount -t tmpfs none "$1" && echo before > "$1/file" && shift && "$@"; cat caf*/file'
    # Entries beside a mount count, and pytest has a folder for each test of a process.
    with tempfile.TemporaryDirectory(prefix="autosync-test-") as folder:
        place = os.fsencode(folder) + b"/caf\xe9 x"
        os.mkdir(place)
        one.folder = Path(folder)
        one.way = ["unshare", "--mount", "sh", "-c", line, "sh", os.fsdecode(place), *one.way]
        out, err, report = one.run("sh", "-c", "cd caf*; echo in the trial > file; cat file")
    assert out == "in the trial\nbefore\n", err
    assert isinstance(report, Files)


@pytest.mark.parametrize("place", ["working", "temporary"])
def test_no_cache_shares_what_is_more_than_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HF_HOME=/workspace, with the project below it, or MPLCONFIGDIR=/tmp in many images."""
    for name in ("home", "project/working", "temporary", "cache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project" / "working")
    environment = {
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "temporary"),
        "TORCH_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / ("link" if place == "working" else place)),
    }
    paths = shared_paths(environment, "")
    assert str(tmp_path / "cache") in paths
    assert not {str(tmp_path / "project"), str(tmp_path / "temporary")} & {*paths}


def test_trials_write_no_more_into_memory_than_a_container_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_files, "host_free_bytes", lambda: 1 << 30)
    assert private_files._share_of_memory() == 1 << 28


def test_no_home_and_no_root_is_shared(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "/", "TMPDIR": str(tmp_path)}
    paths = shared_paths({**environment, "TORCH_HOME": str(tmp_path)}, "")
    assert "/" not in paths and str(tmp_path) not in paths and "/dev" in paths


def test_what_a_killed_rank_has_left_goes_with_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, other, foreign = make_stage("one"), make_stage("another"), tmp_path / "one"
    foreign.mkdir()
    sweep("one", launcher=os.getpid())  # its launcher may start ranks yet
    assert Path(left).is_dir()
    sweep("one")
    assert sorted(tmp_path.iterdir()) == sorted([Path(other), foreign])


def test_without_a_temporary_folder_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert sweep(uuid.uuid4().hex) == 0
