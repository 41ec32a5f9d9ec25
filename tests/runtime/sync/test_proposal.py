"""What ranks agree on before a round of local steps."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.sync.proposal import Proposal, RoundAverage


@pytest.mark.parametrize(
    ("lengths", "ends_epoch", "sends_set", "agreed"),
    [
        ((4, 4, 4), (), (), (4, RoundAverage.PARAMETERS)),
        ((4, 2, 4), (), (), (1, RoundAverage.PARAMETERS)),
        ((2, 2, 2), (1,), (), (2, RoundAverage.ALL)),
        ((1, 4, 4), (), (0,), (1, RoundAverage.ALL_AND_SET)),
        ((1, 1, 1), (0, 1, 2), (2,), (1, RoundAverage.ALL_AND_SET)),
    ],
)
def test_the_average_of_a_round_is_exact_if_one_rank_needs_it(
    lengths: tuple[int, ...],
    ends_epoch: tuple[int, ...],
    sends_set: tuple[int, ...],
    agreed: tuple[int, RoundAverage],
) -> None:
    def body() -> tuple[int, RoundAverage]:
        own = rank()
        proposal = Proposal(
            "round", lengths[own], ends_epoch=own in ends_epoch, sends_set=own in sends_set
        )
        return proposal.agreed()

    assert ThreadRanks(3, seed=1).run(body) == [agreed] * 3
