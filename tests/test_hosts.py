"""``horovodrun --autosync`` over several hosts: layouts, both controllers, links of a rate."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvd_autosync.search_space import Links, Task
from hvd_autosync.testing import Testbed, testbed_missing
from hvd_autosync.traces import StudyStatus, TraceStore

SCRIPT = Path(__file__).parent / "scripts" / "train_tiny.py"
RATE_MBIT = 100.0
#: Ranks that spin while they wait starve each other where they outnumber the processors; and what
#: Open MPI takes for an allreduce of three ranks by itself sends three times what a ring sends.
MPI_ARGUMENTS = (
    "--mca mpi_yield_when_idle 1 "
    "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4"
)
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing())),
    pytest.mark.timeout(1200),
]


#: Hosts, ranks on each, and the controller: four ranks at most, for there are two processors.
LAYOUTS = [
    (2, 2, "gloo"),
    pytest.param(3, 1, "gloo", marks=pytest.mark.wide),
    pytest.param(2, 2, "mpi", marks=[pytest.mark.mpi, pytest.mark.wide]),
    pytest.param(3, 1, "mpi", marks=[pytest.mark.mpi, pytest.mark.wide]),
]


@pytest.mark.parametrize(("hosts", "slots", "controller"), LAYOUTS)
def test_a_job_over_several_hosts(
    hosts: int, slots: int, controller: str, tmp_path: Path, horovodrun: str
) -> None:
    # Every launch under MPI is cold: one trial is enough to see that they work.
    trials = 1 if controller == "mpi" else 3
    store_path = tmp_path / "traces.db"
    options = [f"--{controller}"]
    if controller == "mpi":
        options.append(f"--mpi-args={MPI_ARGUMENTS}")
    with Testbed(hosts, RATE_MBIT) as bed:
        command = [
            horovodrun,
            *bed.horovodrun_options(slots),
            *options,
            "--autosync",
            "--autosync-mode",
            "launched",
            "--autosync-trials",
            str(trials),
            "--autosync-steps",
            "8",
            "--autosync-warmup",
            "3",
            "--autosync-store",
            str(store_path),
            sys.executable,
            str(SCRIPT),
        ]
        done = bed.run(command, capture_output=True, text=True, timeout=560, env={**os.environ})
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("trained 60 steps") == 1
        links = task_of(store_path).resources.links
        if not has_rate(links, RATE_MBIT):
            options = [*bed.horovodrun_options(slots), *options]
            links = tune(bed, horovodrun, options, tmp_path / "again.db").resources.links
    store = TraceStore(store_path)
    (study,) = store.studies()
    assert study.status is StudyStatus.FINISHED and study.task is not None
    for trial in store.trials(study.study_id):
        assert trial.result is not None and trial.result.step_time is not None, trial
        where = [rank.host for rank in trial.result.ranks]
        assert where == [f"testhost{rank // slots}" for rank in range(hosts * slots)]
    assert has_rate(links, RATE_MBIT), links
    assert links.across is not None and links.across.ranks == hosts
    assert links.overall is not None and links.overall.ranks == hosts * slots
    if slots == 1:
        assert (links.within, links.overall) == (None, links.across)
    else:
        assert links.within is not None and links.within.ranks == slots
        assert links.within.bandwidth_bytes_per_s > 2 * links.across.bandwidth_bytes_per_s


def test_links_that_differ(tmp_path: Path, horovodrun: str) -> None:
    """The slowest cable decides, and another store measures the same class again."""
    found = []
    for name in ("first.db", "second.db"):
        with Testbed(2, [400, 60]) as bed:
            options = [*bed.horovodrun_options(), "--gloo"]
            task = tune(bed, horovodrun, options, tmp_path / name)
            if not has_rate(task.resources.links, 60):
                task = tune(bed, horovodrun, options, tmp_path / f"again-{name}")
        assert has_rate(task.resources.links, 60), task
        found.append(task)
    assert found[0].fingerprint == found[1].fingerprint


def tune(bed: Testbed, horovodrun: str, options: list[str], store_path: Path) -> Task:
    """The task of a study of one trial in a store that knows no links yet."""
    command = [
        horovodrun,
        *options,
        "--autosync",
        "--autosync-trials",
        "1",
        "--autosync-tune-only",
        "--autosync-steps",
        "8",
        "--autosync-store",
        str(store_path),
        sys.executable,
        str(SCRIPT),
    ]
    done = bed.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr
    return task_of(store_path)


def task_of(store_path: Path) -> Task:
    (study,) = TraceStore(store_path).studies()
    assert study.task is not None
    return study.task


def has_rate(links: Links, rate_mbit: float) -> bool:
    """Whether the link across hosts was found to have its rate.

    Where it was not, it is measured a second time: ranks outnumber the processors here.
    """
    across = links.across
    return across is not None and across.bus_bytes_per_s * 8 / 1e6 == pytest.approx(
        rate_mbit, rel=0.2
    )
