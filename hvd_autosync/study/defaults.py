"""Defaults of the settings of a study; the options state them too, and import nothing heavy."""

from __future__ import annotations

TRIALS = 20
#: Of a job whose steps are not so long that trials have fewer.
STEPS, WARMUP = 40, 10
QUALITY_STEPS = 200
QUALITY_MINUTES = 30.0
LOSS_TOLERANCE = 0.01
GOAL = "steps"
GOALS = (GOAL, "time-to-loss")
MODES = ("launched", "live")
SEED = 0
#: Smallest values of the numbers of trials and steps.
LEAST = {"trials": 1, "steps": 5, "warmup": 1, "quality_steps": 40}
#: Number of seeds that every generator takes.
SEEDS = 2**32
#: Assumed hours of training where the user does not give them.
EXPECTED_HOURS = 10.0
