"""The phases of a training: which may follow which."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.sync.phase import Phase, TrainingPhase

#: Phase -> all that may follow it.
_FOLLOWERS = {
    "EXCHANGE": "RESTORED ROUNDS NO_BARRIER EXACT",
    "RESTORED": "EXCHANGE ROUNDS EXACT",
    "ROUNDS": "EXCHANGE RESTORED EXACT",
    # Ranks meet before the loss guard ends a lossy strategy, or a checkpoint is loaded.
    "NO_BARRIER": "EXCHANGE",
    # Nothing lossy begins after a fallback.
    "EXACT": "",
}


@pytest.mark.parametrize(
    ("before", "after"), list(itertools.product(Phase, Phase)), ids=lambda phase: phase.name
)
def test_a_phase_follows_another_only_as_the_table_says(before: Phase, after: Phase) -> None:
    phase = TrainingPhase()
    phase.enter(before)  # all may follow the first
    if after is before or after.name in _FOLLOWERS[before.name].split():
        phase.enter(after)
        assert phase.now is after
    else:
        with pytest.raises(AutosyncError, match=f"{after.name} .* not follow {before.name}"):
            phase.enter(after)
        assert phase.now is before
