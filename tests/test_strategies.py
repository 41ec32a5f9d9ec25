"""Strategies of exchanges on real jobs: found by the flag, written to a file, run from it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from hvd_autosync.reporting.recipe import recipe
from hvd_autosync.testing import Testbed, testbed_missing
from hvd_autosync.traces import TraceStore

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPT = Path(__file__).parent / "scripts" / "train_table.py"
PASSES = SCRIPT.with_name("train_passes.py")
SAVE_LATE = SCRIPT.with_name("save_late.py")
LOCAL = "[knobs]\nlocal_steps = 4\n"
#: The last three passes and a part of the third have no barrier.
SWITCHING = '[knobs]\nprotocol = "{kind}"\nsync_share = 0.4\ntotal_samples = 2112\n'
GROWING = LOCAL + "local_power = 2\nlocal_alpha = 0.04\nlocal_cap = 16\n"
BY_ROWS = """\
[knobs]
embedding_exchange = "rows"
[classes]
embedding = ["table.*"]
"""
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
Done = subprocess.CompletedProcess[str]
RunFile = Callable[..., Done]


@pytest.fixture(scope="module")
def run_file(fork_rank: Callable[[], list[str]]) -> RunFile:
    """``run_file(folder, text, *options, script=(), path=SCRIPT)``: its ranks are forked."""
    return partial(_run_file, fork_rank)


def _run_file(
    python: Callable[[], list[str]],
    folder: Path,
    text: str,
    *options: str,
    script: tuple[str, ...] = (),
    path: Path = SCRIPT,
) -> Done:
    """``hvd-autosync run`` with a strategy file."""
    strategy = folder / "strategy.toml"
    strategy.write_text(text)
    command = [
        sys.executable,
        "-m",
        "hvd_autosync.commands.cli",
        "run",
        "--strategy",
        str(strategy),
        "-np",
        "2",
        "--gloo",
        "--autosync-store",
        str(folder / "traces.db"),
        *options,
        "--",
        *python(),
        str(path),
        *script,
    ]
    return subprocess.run(command, text=True, capture_output=True, timeout=280)


def trained_to(done: Done) -> str:
    found = re.search(r"trained to (\S+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return found[1]


def test_a_file_is_run_exactly_and_changes_nothing_that_is_trained(
    tmp_path: Path, run_file: RunFile
) -> None:
    by_rows = run_file(tmp_path, BY_ROWS)
    assert by_rows.returncode == 0, by_rows.stderr
    assert "ClassPlan(exchange='rows'" in by_rows.stdout and "table.*" in by_rows.stdout
    plain = run_file(tmp_path, "[knobs]\ncycle_time_ms = 2.0\n")
    assert "plan None" in plain.stdout
    assert float(trained_to(by_rows)) == pytest.approx(float(trained_to(plain)), rel=1e-7)


@pytest.mark.wide
def test_rank_0_saves_when_others_have_ended(tmp_path: Path, run_file: RunFile) -> None:
    saved = []
    for number, knobs in enumerate(
        ("buckets = 1", 'large_exchange = "sharded"', 'order = "priority"')
    ):
        text = f'[knobs]\n{knobs}\n[classes]\nlarge = ["weight"]\n'
        path = tmp_path / str(number)
        done = run_file(tmp_path, text, script=(str(path),), path=SAVE_LATE)
        assert done.returncode == 0, done.stdout + done.stderr
        saved.append(torch.load(path, weights_only=True))
    for model, states in saved[1:]:
        torch.testing.assert_close(model, saved[0][0])
        assert states.keys() == saved[0][1].keys()
        for place, state in states.items():
            torch.testing.assert_close(state, saved[0][1][place])


@pytest.mark.parametrize(
    ("text", "options", "named"),
    [
        ('[knobs]\nrest_exchange = "hierarchical"', (), "does not fit the hosts localhost:2"),
        ('[knobs]\nembedding_exchange = "rows"', (), "no parameter is of class embedding"),
        ("[knobs]\ncycle_time_ms = 2.0", ("--cycle-time-ms", "5"), "your options or environment"),
        ('[knobs]\ncontroller = "mpi"', (), "your options or environment"),  # under --gloo
        ("[knobs", (), "is not TOML"),
    ],
)
def test_what_cannot_work_starts_nothing(
    text: str, options: tuple[str, ...], named: str, tmp_path: Path, run_file: RunFile
) -> None:
    done = run_file(tmp_path, text, *options)
    assert done.returncode == 2
    assert named in done.stderr and "Traceback" not in done.stderr
    assert "trained" not in done.stdout


@pytest.fixture(scope="module")
def run_passes(run_file: RunFile) -> RunFile:
    """``run_passes(folder, text, *words of the script)``."""

    def run(folder: Path, text: str, *script: str) -> Done:
        return run_file(folder, text, script=(str(folder / "checkpoint"), *script), path=PASSES)

    return run


def passes(done: Done) -> dict[int, float]:
    """Number of each pass -> its loss; replicas are equal after each, statistics included."""
    found = re.findall(r"pass (\d+) loss (\S+) apart (\S+)", done.stdout)
    assert all(float(apart) == 0 for _, _, apart in found), done.stdout + done.stderr
    return {int(number): float(loss) for number, loss, _ in found}


def passes_apart(done: Done) -> dict[int, float]:
    """Number of each pass -> how far apart replicas are after it."""
    found = re.findall(r"pass (\d+) loss \S+ apart (\S+)", done.stdout)
    return {int(number): float(apart) for number, apart in found}


def phases(folder: Path) -> dict[str, int]:
    """What the checkpoint says of phases."""
    saved = torch.load(folder / "checkpoint", weights_only=True)["optimizer"]
    return dict(saved["hvd_autosync_phases"])


def place(folder: Path) -> tuple[int, int, bool]:
    """Step, steps in an open round, and whether steps are local, in the checkpoint."""
    saved = torch.load(folder / "checkpoint", weights_only=True)["optimizer"]
    rounds = saved["hvd_autosync_rounds"]
    return rounds["step"], rounds["done"], rounds["running"]


@pytest.mark.wide
def test_a_killed_training_goes_on_with_its_schedule(tmp_path: Path, run_passes: RunFile) -> None:
    """In the middle of a round, with parameters apart and moments of each rank's own."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    expected = run_passes(whole, GROWING)
    assert expected.returncode == 0, expected.stderr
    assert list(passes(expected)) == [1, 2, 3, 4, 5, 6]
    assert place(whole) == (132, 0, True)
    killed = run_passes(broken, GROWING, "--die-at", "72")
    assert killed.returncode != 0 and list(passes(killed)) == [1, 2, 3]
    assert place(broken) == (66, 0, True)
    resumed = run_passes(broken, GROWING)
    assert resumed.returncode == 0, resumed.stderr
    assert list(passes(resumed)) == [4, 5, 6]
    assert place(broken) == (132, 0, True)
    assert passes(resumed)[6] == pytest.approx(passes(expected)[6], rel=0.02)


@pytest.mark.parametrize(
    ("kind", "die_at", "passed"),
    [
        ("asp", 40, 1),
        pytest.param("ssp", 60, 2, marks=pytest.mark.wide),
        pytest.param("asp", 100, 4, marks=pytest.mark.wide),
    ],
)
def test_a_training_that_is_killed_goes_on_in_its_phase(
    kind: str, die_at: int, passed: int, tmp_path: Path, run_passes: RunFile
) -> None:
    """Under BSP, in the pass with the switch, and without a barrier."""
    text = SWITCHING.format(kind=kind)
    # Rank 0, which tells of passes: without a barrier another may be ahead of it.
    killed = run_passes(tmp_path, text, "--die-at", str(die_at), "--die-rank", "0")
    assert killed.returncode != 0 and list(passes_apart(killed)) == [*range(1, passed + 1)]
    assert phases(tmp_path) == {"step": 22 * passed, "samples": 352 * passed}
    resumed = run_passes(tmp_path, text)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"average staleness without a barrier: \d+\.\d steps", resumed.stderr)
    apart = passes_apart(killed) | passes_apart(resumed)
    assert list(apart) == [1, 2, 3, 4, 5, 6]
    # Of Horovod's own steps the statistics of batches differ, after those without a barrier not.
    assert [value > 0 for value in apart.values()] == [True] * 2 + [False] * 4
    assert phases(tmp_path) == {"step": 132, "samples": 2112}


@pytest.mark.wide
def test_a_rank_that_is_killed_without_a_barrier_ends_the_job(
    tmp_path: Path, run_passes: RunFile
) -> None:
    text = SWITCHING.format(kind="asp")
    # How many steps of a pass are rank 1's depends on which rank is faster.
    killed = run_passes(tmp_path, text, "--die-at", "100", "--die-rank", "1")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)["passes"]
    assert killed.returncode != 0 and 2 <= saved < 6
    assert list(passes_apart(killed)) in ([*range(1, saved)], [*range(1, saved + 1)])
    resumed = run_passes(tmp_path, text)
    assert resumed.returncode == 0, resumed.stderr
    assert list(passes_apart(resumed)) == [*range(saved + 1, 7)]


def test_a_training_that_breaks_goes_on_exactly(tmp_path: Path, run_passes: RunFile) -> None:
    done = run_passes(tmp_path, LOCAL, "--fault-at", "20")
    assert done.returncode == 0, done.stderr
    assert re.search(r"hvd-autosync: loss guard: .* is not finite at step \d+", done.stderr)
    assert place(tmp_path)[2] is False
    exact = tmp_path / "exact"
    exact.mkdir()
    expected = run_passes(exact, "[knobs]\nbuckets = 1")
    last = [float(re.findall(r"pass 6 loss (\S+)", each.stdout)[0]) for each in (done, expected)]
    assert last[0] == pytest.approx(last[1], rel=0.2)


@pytest.mark.root
@pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing()))
def test_tuning_finds_the_rows_of_a_table(tmp_path: Path, horovodrun: str) -> None:
    """1.9 MB on a link of 50 Mbit/s, of which a batch touches 4 KB."""
    store_path = tmp_path / "traces.db"
    with Testbed(2, 50.0) as bed:
        command = [
            horovodrun,
            *bed.horovodrun_options(),
            "--gloo",
            "--autosync",
            "--autosync-tune-only",
            "--autosync-trials",
            "10",
            "--autosync-steps",
            "12",  # of eight no stall would be trimmed
            "--autosync-warmup",
            "4",
            "--autosync-store",
            str(store_path),
            sys.executable,
            str(SCRIPT),
            "--steps",
            "1000",
        ]
        done = bed.run(command, capture_output=True, text=True, timeout=280, env={**os.environ})
    assert done.returncode == 0, done.stderr
    store = TraceStore(store_path)
    (study,) = store.studies()
    assert study.winner is not None and study.winner["embedding_exchange"] == "rows", done.stderr
    (best,) = [c for c in study.outcome["comparisons"] if c["strategy"] == dict(study.winner)]
    assert best["speedup"] > 3
    # Known from now on: a file that does not fit the model is refused before it is launched.
    file = tomllib.loads(recipe(study, study.winner).file)
    assert file["classes"] == {"embedding": ["table.weight"]}
    misspelt = BY_ROWS.replace("table", "tabel")
    refused = _run_file(lambda: [sys.executable], tmp_path, misspelt, script=("--steps", "1000"))
    assert refused.returncode == 2 and "matches no parameter of the model" in refused.stderr
