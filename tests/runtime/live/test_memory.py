"""Free memory of a host, under the limits of batch systems and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.live import memory
from hvd_autosync.runtime.live.memory import free_bytes
from hvd_autosync.util import host_memory
from hvd_autosync.util.host_memory import host_free_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def group(place: str, names: tuple[str, str, str], limit: object, used: int) -> dict[str, object]:
    most, now, droppable = names
    stat = f"anon {used}\n{droppable} {GIB}"
    return {f"{place}/{most}": limit, f"{place}/{now}": used, f"{place}/memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "place", "names"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/step", host_memory._SECOND),
        ("0::/job/step", "sys/fs/cgroup/job", host_memory._SECOND),
        ("0::/seen/only/outside", "sys/fs/cgroup", host_memory._SECOND),
        ("5:cpu:/\n4:memory:/job", "sys/fs/cgroup/memory/job", host_memory._FIRST),
    ],
)
def test_the_limit_of_a_group(
    membership: str, place: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    write(
        tmp_path, {"proc/meminfo": f"MemAvailable: {64 << 20} kB", "proc/self/cgroup": membership}
    )
    assert host_free_bytes(tmp_path) == 64 * GIB
    write(tmp_path, group(place, names, 10 * GIB, 8 * GIB))
    assert host_free_bytes(tmp_path) == 3 * GIB
    write(tmp_path, group(place, names, 4 * GIB, 8 * GIB))
    assert host_free_bytes(tmp_path) == 0


def test_without_a_limit_the_host_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": f"MemAvailable: {1 << 20} kB", "proc/self/cgroup": "0::/"})
    write(tmp_path, group("sys/fs/cgroup", host_memory._SECOND, "max", GIB))
    assert host_free_bytes(tmp_path) == GIB
    assert host_free_bytes(tmp_path / "nothing") > 0


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 12 * GIB)
    found = ThreadRanks(3, seed=0).run(lambda: free_bytes(torch.device("cpu")))
    assert found == [4 * GIB] * 3
