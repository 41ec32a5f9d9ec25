"""Messages of all ranks reach all ranks; in two levels fewer of them leave a host."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.runtime.collectives.operations import ProcessSet, rank, synchronize
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange import gathering
from hvd_autosync.runtime.exchange.gathering import Gathering, LevelsGathering

#: Host and slot of each rank: host by host, as under Gloo, and by turns, as MPI may place them.
_LAYOUTS = [
    [(0, 0), (0, 1), (1, 0), (1, 1)],
    [(0, 0), (1, 0), (0, 1), (1, 1)],
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)],
    [(0, 1), (1, 0), (0, 0), (0, 2), (1, 2), (1, 1)],
]


def message(of_rank: int) -> torch.Tensor:
    """Its length differs from those of other ranks."""
    return torch.full((3 + of_rank,), of_rank, dtype=torch.uint8)


def gathered(by: Gathering) -> list[int]:
    """The ranks whose messages were gathered, in the order in which they lie there."""
    steps, output = by.gather(message(rank()), "here"), None
    while True:
        try:
            handle = steps.send(output)
        except StopIteration as stop:
            whole, found = stop.value.tolist(), []
            while whole:
                found.append(whole[0])
                assert whole[: 3 + whole[0]] == message(whole[0]).tolist()
                del whole[: 3 + whole[0]]
            return found
        output = synchronize(handle)


def test_one_allgather() -> None:
    def body() -> list[int]:
        by = Gathering(3)
        found = gathered(by)
        return [found[place] for place in by.places]

    assert ThreadRanks(3).run(body) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_two_levels(layout: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    send, left = gathering.send_pieces, [0] * len(layout)

    def count(pieces: Sequence[torch.Tensor | None], name: str, among: ProcessSet) -> int:
        own, _ = layout[rank()]
        for piece, (host, _) in zip(pieces, layout, strict=True):
            if piece is not None and host != own:
                left[rank()] += len(piece)
        return send(pieces, name, among)

    monkeypatch.setattr(gathering, "send_pieces", count)

    def body() -> list[int]:
        by = LevelsGathering(layout, rank())
        found = gathered(by)
        return [found[place] for place in by.places]

    ranks = len(layout)
    assert ThreadRanks(ranks).run(body) == [[*range(ranks)]] * ranks
    hosts = 1 + max(host for host, _ in layout)
    assert left == [(hosts - 1) * len(message(each)) for each in range(ranks)]
