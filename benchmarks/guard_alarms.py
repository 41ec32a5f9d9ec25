"""How often does the loss guard end a training that is as good, and when a worse one? Simulated.

Losses fall from 5 to 2.5 and on by the logarithm of the step, with noise of a batch of 0.2, as in
``examples/train_lm.py``. Four trials of 200 steps of a default predict them; then a training of
``--steps`` steps is guarded, which is above the default's by a planted multiple of the tolerance
(1 % of what the noiseless trial's loss falls by, as tuning measures it), reached within the first
100 steps. Noise is of one kind:

- ``normal``: each step's is a normal number of its own;
- ``heavy``: Student's t of 3 degrees;
- ``correlated``: steps follow each other, by 0.5 of the step before;
- ``seeds``: normal, and each training is off by a number of its own in all of its steps, of the
  deviation of a window of 32 steps.

The strategy was never judged (``forced``), or was admitted with four trials of its own, which are
above the default's likewise (``admitted``) or as good as these (``changed``: only the training is
worse). Trainings without a prediction (``unknown``) are judged
by themselves alone; there the planted rise begins in the middle, over 10 windows.

    python benchmarks/guard_alarms.py
    python benchmarks/guard_alarms.py --trainings 2000 --output guard_alarms.csv
    python benchmarks/guard_alarms.py --show guard_alarms.csv

No cluster.
"""

from __future__ import annotations

import csv
import math
import statistics

import numpy as np
import numpy.typing as npt
from command_line import add_table, new_parser, open_table, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.runtime.guard.loss_envelope import LossEnvelope
from hvd_autosync.search_space.trial import LOSS_WINDOW
from hvd_autosync.study.loss_prediction import predict_losses
from hvd_autosync.study.quality_trial import fall_of

KINDS = ("normal", "heavy", "correlated", "seeds")
TRIALS, TRIAL_STEPS, NOISE = 4, 200, 0.2
EXCESSES = {
    "forced": (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
    "admitted": (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
    "changed": (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
    "unknown": (0.0, 10.0, 20.0, 40.0),
}
COLUMNS = ("who", "kind", "excess", "trainings", "caught", "median_step")

Floats = npt.NDArray[np.float64]


def levels(steps: int) -> Floats:
    """The losses of a training without noise, shape ``(steps,)``."""
    step = np.arange(steps)
    return np.asarray(2.6 + 2.4 * np.exp(-step / 15) - 0.12 * np.log1p(step / 50))


TOLERANCE = 0.01 * fall_of(levels(TRIAL_STEPS).tolist()).mean


class Trainings:
    """Losses of simulated trainings.

    Args:
        kind: Of their noise.
        dice: Random numbers.
    """

    def __init__(self, kind: str, dice: np.random.Generator) -> None:
        self._kind, self._dice = kind, dice

    def losses(self, steps: int, excess: Floats | float = 0.0) -> Floats:
        """Of one training, shape ``(steps,)``."""
        noise = NOISE * self._noise(steps)
        losses: Floats = levels(steps) + np.broadcast_to(excess, steps) + noise
        return losses

    def _noise(self, steps: int) -> Floats:
        if self._kind == "heavy":
            return self._dice.standard_t(3, steps) / math.sqrt(3)
        own = self._dice.standard_normal(steps)
        if self._kind == "correlated":
            for step in range(1, steps):
                own[step] = 0.5 * own[step - 1] + np.sqrt(0.75) * own[step]
        if self._kind == "seeds":
            own += self._dice.standard_normal() / np.sqrt(LOSS_WINDOW)
        return own


def dice_of(who: str, kind: str, excess: float) -> np.random.Generator:
    """The random numbers of a cell of the table; those of no other."""
    return np.random.default_rng([*f"{who} {kind} {excess}".encode()])


def caught_at(who: str, trainings: Trainings, excess: float, steps: int) -> int | None:
    """The step at which the guard ends one training; ``None``: never."""
    planted = excess * TOLERANCE * np.minimum(np.arange(steps) / 100, 1.0)
    envelope = LossEnvelope()
    if who == "unknown":
        planted = excess * TOLERANCE * np.clip((np.arange(steps) - steps / 2) / 320, 0, 1)
    else:
        default = [trainings.losses(TRIAL_STEPS).tolist() for _ in range(TRIALS)]
        in_trials = planted if who == "admitted" else 0.0
        own = [
            trainings.losses(TRIAL_STEPS, in_trials).tolist()
            for _ in range(TRIALS * (who != "forced"))
        ]
        envelope = LossEnvelope(predict_losses(default, own))
    losses = trainings.losses(steps, planted)
    means = losses[: steps // LOSS_WINDOW * LOSS_WINDOW].reshape(-1, LOSS_WINDOW).mean(1)
    for window, mean in enumerate(means.tolist()):
        if envelope.accepts(mean, window):
            return (window + 2) * LOSS_WINDOW  # the sum arrives a window later
    return None


def show(output: str) -> None:
    """Print the table of a file of results."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="trainings that the loss guard ends, by what they are above the default")
    for column in ("strategy", "noise", "excess / tolerance", "ended", "95 % interval", "at step"):
        table.add_column(column, justify="right")
    for row in rows:
        count, caught = int(row["trainings"]), int(row["caught"])
        low, high = interval(caught, count)
        table.add_row(
            row["who"],
            row["kind"],
            row["excess"],
            f"{caught / count:.1%}",
            f"{low:.1%} to {high:.1%}",
            row["median_step"] or "-",
        )
    Console().print(table)


def interval(caught: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, z = caught / count, 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + (z / count) ** 2 / 4)
    return max(middle - half, 0.0), middle + half


def main() -> None:
    """Runs the benchmark."""
    parser = new_parser(__doc__)
    parser.add_argument("--trainings", type=int, default=1000, help="per cell (default: 1000)")
    parser.add_argument("--steps", type=int, default=10000, help="of each (default: 10000)")
    add_table(parser, "guard_alarms.csv", "one row per cell")
    arguments = parse(parser, show)
    output = open_table(parser, arguments, COLUMNS)
    for who, excesses in EXCESSES.items():
        for kind in KINDS:
            for excess in excesses:
                trainings = Trainings(kind, dice_of(who, kind, excess))
                # Where it is predicted, what comes after the prediction is that of "unknown".
                steps = arguments.steps if who == "unknown" else TRIAL_STEPS
                found = [
                    caught_at(who, trainings, excess, steps) for _ in range(arguments.trainings)
                ]
                steps_caught = [each for each in found if each is not None]
                median = round(statistics.median(steps_caught)) if steps_caught else ""
                row = who, kind, excess, len(found), len(steps_caught), median
                print(*row, sep=" | ", flush=True)
                with open(output, "a", newline="") as file:
                    csv.writer(file).writerow(row)
    show(output)


if __name__ == "__main__":
    main()
