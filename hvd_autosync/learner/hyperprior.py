"""The hyperprior: what is believed of a task before its first trial, learned from other tasks.

Noise, spread and the weights of prior functions differ between tasks, but not without limits. The
shipped values (``hyperprior.json``) are learned from the tables of measured strategies in the
repository (:mod:`hvd_autosync.learner.hyperprior_learning`); their provenance is in the file.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from hvd_autosync.search_space.records import Real, Record


@dataclass(frozen=True)
class Provenance(Record):
    """What a hyperprior was learned from.

    Attributes:
        learned_at: The day, ISO 8601.
        tasks: Names of the tasks.
        trials: Number of their measured trials.
        note: Where they were measured.
    """

    learned_at: str
    tasks: tuple[str, ...]
    trials: int
    note: str


@dataclass(frozen=True)
class Hyperprior(Record):
    """Parameters of the priors of the multi-task GP, in logarithms of the step time.

    Attributes:
        launch_noise: Median of the standard deviation between launches of one strategy.
        launch_noise_deviation: Standard deviation of the logarithm of its square.
        spread: Standard deviation over strategies, without prior functions.
        unexplained_spread: That of what prior functions do not explain.
        cost_deviation: Standard deviation of the weight of the cost model, whose mean is 1.
        source_deviation: Standard deviation of the weight of a related task, whose mean is its
            similarity.
        provenance: What the numbers were learned from.
    """

    launch_noise: Real
    launch_noise_deviation: Real
    spread: Real
    unexplained_spread: Real
    cost_deviation: Real
    source_deviation: Real
    provenance: Provenance

    def launch_variance_mode(self) -> float:
        """Return the most likely variance between launches: the mode of its log-normal prior."""
        return self.launch_noise**2 * math.exp(-(self.launch_noise_deviation**2))


#: The hyperprior of every study.
SHIPPED = Hyperprior.from_json(
    json.loads(Path(__file__).with_name("hyperprior.json").read_text(encoding="utf-8"))
)
