"""Which tried strategies are worth confirming."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.gp import Surrogate, fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.search_space import SearchSpace, Strategy


def best_tried(
    space: SearchSpace,
    observations: Sequence[Observation],
    count: int,
    surrogate: Surrogate | None = None,
) -> list[Strategy]:
    """The measured strategies that the model believes to be fastest.

    They are ranked by posterior mean: the luckiest observation is slower than it looked, and
    neighbours and repetitions tell by how much. The default has no privilege.

    Args:
        space: The space.
        observations: All that was learned so far.
        count: How many strategies are wanted.
        surrogate: The model fitted to these observations, where the caller has it.

    Returns:
        At most ``count`` distinct strategies, complete in the space, best first.
    """
    measured = dict.fromkeys(space.complete(s.strategy) for s in observations if s.measured)
    if not measured:
        return []
    surrogate = surrogate or fit(space, observations)
    strategies = list(measured)
    order = np.argsort(surrogate.predict(strategies)[0], kind="stable")
    return [strategies[index] for index in order[:count]]
