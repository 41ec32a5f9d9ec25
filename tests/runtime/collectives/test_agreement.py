"""Bytes of any length between ranks, in operations that Horovod can count."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives import agreement
from hvd_autosync.runtime.collectives.agreement import gather_bytes, same_by_sums, tell_all
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks

RANKS, MOST = 3, 32
LENGTH_BYTES = 8


def of_length(length: int, of_rank: int = 0) -> bytes:
    return bytes((7 * of_rank + place) % 256 for place in range(length))


@pytest.mark.parametrize("length", [0, 1, MOST - 1, MOST, MOST + 1, 2 * MOST, 5 * MOST + 3])
def test_a_long_text_is_broadcast_in_pieces(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_GATHERED_BYTES", MOST)
    ranks = ThreadRanks(RANKS, seed=length)
    texts = ranks.run(lambda: tell_all(of_length(length) if rank() == 1 else b"", "text", root=1))
    assert texts == [of_length(length)] * RANKS
    pieces = -(-length // MOST)
    assert ranks.calls["broadcast"] == RANKS * (1 + pieces)  # the first one tells the length


# A third of 32 bytes, for each of three ranks, is 10.
@pytest.mark.parametrize(
    ("lengths", "rounds"),
    [((1, 1, 1), 1), ((10, 10, 10), 1), ((11, 1, 10), 2), ((1, 20, 21), 3), ((95, 10, 30), 10)],
)
def test_long_texts_are_gathered_in_pieces(
    lengths: tuple[int, ...], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "MOST_GATHERED_BYTES", MOST)
    ranks = ThreadRanks(RANKS, seed=rounds)
    own = [of_length(length, place) for place, length in enumerate(lengths)]
    texts = ranks.run(lambda: gather_bytes(own[rank()], "texts"))
    assert texts == [own] * RANKS
    assert ranks.calls["allgather"] == RANKS * (1 + rounds)
    assert ranks.sent_bytes["allgather"] <= RANKS * LENGTH_BYTES + rounds * MOST


@pytest.mark.parametrize("count", [2, 33, 64])
def test_equal_values_have_equal_sums_on_any_number_of_ranks(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the largest: 24 bits of a digest, whose squares have 48."""
    monkeypatch.setattr(agreement, "_digest", lambda described: described[0])
    for own in (b"\xff\xff\xfe", b"\xff\xff\xff", b"\xd3\x5a\x01"):
        ranks = ThreadRanks(count, turns=False)
        assert ranks.run(lambda own=own: same_by_sums([own], "values")) == [True] * count
    different = ThreadRanks(count).run(lambda: same_by_sums([bytes((255, 255, rank()))], "values"))
    assert different == [False] * count
