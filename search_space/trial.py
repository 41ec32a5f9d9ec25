"""The specification and the result of a trial: one short run of the job under one strategy.

The driver sends a :class:`TrialSpec` to the workers and gets a :class:`TrialResult` back. The
states of a trial::

    requested -> running -> COMPLETED      all steps measured
                         -> CUT_SHORT      pruned, because its steps so far are too slow to beat the
                                           best, or stopped at the tuning's time limit
                         -> ENDED_EARLY    the script finished first; measured steps count
                         -> CRASHED        a rank exited with a status other than 0, or was killed
                         -> HUNG           no progress within the limit derived from the default
                         -> DIVERGED       the loss became infinite or NaN, unlike the default's
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.records import LEFT_OUT, NOT_STORED, OrNan, Real, Record
from hvd_autosync.search_space.resources import Host, Link
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.sync_plan import schedule_of

# numpy is imported in functions, because Horovod's launcher loads this module only for options.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Fewest measured steps for a step time.
MIN_MEASURED_STEPS = 5
#: Reason of a trial that was pruned.
PRUNED = "pruned: its steps so far are too slow to beat the best"
#: Reason of a trial that was still running at the tuning's time limit.
OUT_OF_TIME = "its time limit was reached (--autosync-minutes, --autosync-quality-minutes)"
#: Reason of a trial in which an elastic job has lost ranks.
VANISHED = "ranks have vanished in this trial, by it or not"
#: If steps are long: the total seconds of the measured steps, and their least number.
_MEASURED_S, _FEWEST_STEPS = 15.0, 10
#: The trial id of a training, which is no trial.
TRAINING = "training"
#: File in the driver's folder in which rank 0 reports drift of the step time.
DRIFT_FILE = "drift"
#: File in the driver's folder with rank 0's report of a run of a recurring job.
OUTCOME_FILE = "outcome"
#: File in the driver's folder in which a rank on that host reports a fallback of the loss guard.
FALLBACK_FILE = "fallback"
#: File in the driver's folder that exists once a rank on that host has ended by itself.
ENDED_FILE = "ended"
#: Number of steps over which the loss guard averages losses.
LOSS_WINDOW = 32
_TRIM = 0.1


class TrialStatus(str, enum.Enum):
    """How a trial ended; see the module's diagram."""

    COMPLETED = "completed"
    CUT_SHORT = "cut short"
    ENDED_EARLY = "ended early"
    CRASHED = "crashed"
    HUNG = "hung"
    DIVERGED = "diverged"

    @property
    def measured(self) -> bool:
        """Whether the trial can have a step time."""
        return self in (TrialStatus.COMPLETED, TrialStatus.CUT_SHORT, TrialStatus.ENDED_EARLY)


def enough_steps(step_s: float, most: int) -> int:
    """Return how many steps of ``step_s`` seconds to measure, at most ``most``.

    If steps are long, fewer are enough: the noise of a step is proportional to its length, and
    launches differ by 2 % anyway. The confirmation resolves the remaining uncertainty.
    """
    return round(min(max(_MEASURED_S / max(step_s, 1e-9), _FEWEST_STEPS), most))


def left_out(measured: Collection[int], untypical: Iterable[int]) -> frozenset[int]:
    """Return which of the measured steps are left out: the untypical ones, unless most are.

    Args:
        measured: Indices of steps.
        untypical: Indices of those that are not like the others: an epoch begins, the model is
            evaluated, a checkpoint is written.
    """
    unlike = frozenset(untypical).intersection(measured)
    return unlike if 2 * len(unlike) <= len(measured) else frozenset()


@dataclass(frozen=True)
class LossPrediction:
    """The predicted mean losses of a guarded training's first windows.

    Attributes:
        levels: Highest expected mean loss of each window of ``LOSS_WINDOW`` steps.
        deviations: Standard deviation of each mean about its level, above 0.
    """

    levels: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrialSpec:
    """The specification of a trial, or of a real training, for every rank.

    Attributes:
        trial_id: Unique name, by which left-over processes of the trial are found.
        strategy: The strategy to run under.
        warmup_steps: Number of steps before the measured ones.
        measured_steps: Number of measured steps, after which the run ends. 0: run to the script's
            own end without measuring (the real training).
        profile: Whether to record the model's profile during warm-up.
        prune_above_s: End the run if the step time is confidently above this, seconds.
        classes: Class of parameters -> names of its parameters
            (:mod:`hvd_autosync.search_space.exchange_plan`).
        probe: Hosts between whose ranks to measure the link, instead of running the script.
        seed: Seed of all random numbers (:mod:`hvd_autosync.runtime.patches.seeds`); 0: the
            script's own.
        loss_prediction: Predicted losses of the first windows of a real training.
        expected_step_s: Step time of a real training, as tuning measured it, seconds; 0: unknown.
        driver_folder: The driver's folder. If it exists on a rank's host, rank 0 reports there that
            steps have drifted, and any rank reports a fallback of the loss guard.
        summarized: Whether rank 0 also writes the run report of a real training there.
        adaptive_steps: Whether to measure fewer steps if those of the warm-up are long.
        key: Key that authenticates the trial's messages (:mod:`hvd_autosync.runtime.driver.wire`).
    """

    trial_id: str
    strategy: Strategy
    warmup_steps: int = 10
    measured_steps: int = 40
    profile: bool = False
    prune_above_s: float = math.inf
    classes: Classes = field(default_factory=dict)
    probe: tuple[Host, ...] = ()
    seed: int = 0
    loss_prediction: LossPrediction = LossPrediction()
    expected_step_s: float = 0.0
    driver_folder: str = ""
    summarized: bool = False
    adaptive_steps: bool = False
    key: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)

    @property
    def watched(self) -> bool:
        """Whether a real training's steps are compared with the step time of the tuning.

        Those of one that is tuned live are not meanwhile.
        """
        return self.measured_steps == 0 and self.expected_step_s > 0

    @property
    def round_steps(self) -> int:
        """Number of steps of a round under the strategy."""
        schedule = schedule_of(self.strategy)
        return 1 if schedule is None else schedule.base

    def to_json(self) -> str:
        """Return compact JSON."""
        probe = [asdict(host) for host in self.probe]
        fields = {
            **vars(self),
            "strategy": dict(self.strategy),
            "probe": probe,
            "loss_prediction": asdict(self.loss_prediction),
        }
        if math.isinf(self.prune_above_s):
            fields["prune_above_s"] = None
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TrialSpec:
        """Return the specification that :meth:`to_json` has written.

        The driver has written and signed it. A worker reads it before its script begins, without
        msgspec.
        """
        fields = json.loads(text)
        fields["strategy"] = Strategy(fields["strategy"])
        fields["classes"] = {name: tuple(names) for name, names in fields["classes"].items()}
        fields["probe"] = tuple(Host(**host) for host in fields["probe"])
        fields["loss_prediction"] = LossPrediction(
            **{name: tuple(values) for name, values in fields["loss_prediction"].items()}
        )
        if fields["prune_above_s"] is None:
            fields["prune_above_s"] = math.inf
        return cls(**fields)


@dataclass(frozen=True)
class StepTime:
    """The step time of a trial.

    Attributes:
        mean_s: 10 %-trimmed mean of the measured steps, seconds.
        standard_error_s: Standard error of the mean, from the spread of the steps, seconds.
        steps: Number of measured steps.
    """

    mean_s: float
    standard_error_s: float
    steps: int

    @classmethod
    def from_steps(cls, durations_s: npt.ArrayLike) -> StepTime:
        """Estimate the step time from durations of single steps, shape ``(n,)`` with n >= 1.

        The standard error is the larger of two: the trimmed mean's, from the winsorized variance,
        and that of means over five neighbouring steps, because neighbouring steps are correlated.
        """
        import numpy as np

        steps = np.sort(np.asarray(durations_s, dtype=np.float64))
        cut = int(_TRIM * len(steps))
        kept = steps[cut : len(steps) - cut]
        winsorized = np.clip(steps, kept[0], kept[-1])
        error = float(winsorized.std(ddof=1)) / math.sqrt(len(steps)) if len(steps) > 1 else 0.0
        error /= 1 - 2 * cut / len(steps)
        in_order = np.asarray(durations_s, dtype=np.float64)
        blocks = np.clip(in_order, kept[0], kept[-1])[: len(steps) // 5 * 5].reshape(-1, 5)
        if len(blocks) >= 4:
            error = max(error, float(blocks.mean(axis=1).std(ddof=1)) / math.sqrt(len(blocks)))
        return cls(float(kept.mean()), error, len(steps))


@dataclass(frozen=True)
class RankReport(Record):
    """The measurements of one rank.

    Attributes:
        rank: The rank.
        host: Name of its host.
        step_s: Seconds of each step, warm-up included, in order.
        blocked_s: Seconds of each step spent waiting for communication, in order.
        losses: Loss of each step with a loss, in order.
        peak_memory_bytes: Peak resident memory (plus the accelerator's, where there is one).
        in_round: Positions in ``losses`` of those at which replicas differed, in a round of local
            steps; the others are losses of the average.
        several_losses: Whether optimizers of the script have losses of their own, and it reports
            none: then ``losses`` mean nothing.
        untypical: Indices in ``step_s`` of steps that are not like the others: with an evaluation,
            a checkpoint or the beginning of an epoch.
    """

    rank: int
    host: str
    step_s: tuple[Real, ...] = ()
    blocked_s: tuple[Real, ...] = ()
    losses: tuple[OrNan, ...] = ()
    peak_memory_bytes: int = 0
    in_round: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    several_losses: bool = field(default=False, metadata=LEFT_OUT)
    untypical: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)


@dataclass(frozen=True)
class TrialResult(Record):
    """The outcome of one trial.

    Attributes:
        status: How it ended.
        reason: One sentence for users; "" if completed.
        ranks: Reports in rank order, without ranks that never reported.
        warmup_steps: Number of warm-up steps at the start of each report.
        setup_s: Seconds from launch to the end of the first step; NaN if no step ended.
        total_s: Seconds from launch to the end of the last process.
        launch_s: Part of ``setup_s`` before the script began on all ranks; NaN if unknown.
        exit_status: Exit status of the launcher.
        stderr_tail: Last lines of the job's error output.
        profile: The model's profile, if it was recorded.
        owned: Knobs that the script itself fixes.
        device: Device of the ranks; "" if unknown.
        cores: Least number of cores that a rank has to itself; 0: unknown.
        link: The link that a probe measured; not in the JSON, because it belongs to the cluster.
        round_steps: Number of steps of a round; a measured step is the mean over a round.
        discarded_s: Seconds of other runs of the trial, whose results were discarded.
        steps_before: Steps of a live training since the trial before or, of its first trial, since
            it began: under the best strategy that was known, once the tuning had said so.
    """

    status: TrialStatus
    reason: str = ""
    ranks: tuple[RankReport, ...] = ()
    warmup_steps: int = 0
    setup_s: OrNan = math.nan
    total_s: OrNan = math.nan
    exit_status: int = 0
    stderr_tail: str = ""
    profile: ModelProfile | None = None
    owned: tuple[str, ...] = ()
    device: str = ""
    link: Link | None = field(default=None, metadata=NOT_STORED)
    round_steps: int = field(default=1, metadata=LEFT_OUT)
    launch_s: OrNan = field(default=math.nan, metadata=LEFT_OUT)
    cores: int = field(default=0, metadata=LEFT_OUT)
    discarded_s: Real = field(default=0.0, metadata=LEFT_OUT)
    steps_before: int = field(default=0, metadata=LEFT_OUT)

    def parts_s(self) -> dict[str, float]:
        """Return the parts of the trial's time, seconds, without unknown ones.

        The script's set-up ends with its first step.
        """
        rows = [rank.step_s for rank in self.ranks]
        steps = [sum(each) / len(each) for each in zip(*rows, strict=False)]
        launch_s = 0.0 if math.isnan(self.launch_s) else self.launch_s
        parts = {
            "launch": self.launch_s,
            "set-up": self.setup_s - launch_s,
            "warm-up": sum(steps[1 : self.warmup_steps]),
            "measured steps": sum(steps[self.warmup_steps :]),
        }
        known_s = sum(seconds for seconds in parts.values() if math.isfinite(seconds))
        known = bool(rows) and math.isfinite(self.setup_s)  # else this may have been the set-up
        parts["end"] = max(self.total_s - known_s, 0.0) if known else math.nan
        return {name: seconds for name, seconds in parts.items() if math.isfinite(seconds)}

    @property
    def _left_out(self) -> frozenset[int]:
        """Indices of measured steps that some rank found unlike the others.

        None if these are the most, or too few rounds would be left for a step time.
        """
        steps = min((len(rank.step_s) for rank in self.ranks), default=0)
        measured = range(self.warmup_steps, steps)
        unlike = left_out(measured, {i for rank in self.ranks for i in rank.untypical})
        rounds = (len(measured) - len(unlike)) // max(self.round_steps, 1)
        return unlike if rounds >= MIN_MEASURED_STEPS else frozenset()

    def measured_durations(self) -> npt.NDArray[np.float64]:
        """Return the step durations, each a mean over a round and all ranks, seconds, ``(n,)``.

        Steps that are not like the others are in none, unless they are the most.
        """
        import numpy as np

        out = self._left_out
        rows = [
            [s for i, s in enumerate(rank.step_s) if i >= self.warmup_steps and i not in out]
            for rank in self.ranks
        ]
        length = max(self.round_steps, 1)
        rounds = min((len(row) for row in rows), default=0) // length
        if rounds == 0:
            return np.empty(0)
        steps = np.array([row[: rounds * length] for row in rows]).mean(axis=0)
        durations: npt.NDArray[np.float64] = steps.reshape(rounds, -1).mean(axis=1)
        return durations

    @property
    def step_time(self) -> StepTime | None:
        """The step time, or ``None`` if too few steps were measured, or their mean is no duration.

        An imported trace can have steps of 0 s.
        """
        durations = self.measured_durations()
        if not self.status.measured or len(durations) < MIN_MEASURED_STEPS:
            return None
        time = StepTime.from_steps(durations)
        return time if 0 < time.mean_s < math.inf else None

    @property
    def diverged(self) -> bool:
        """Whether a rank had an infinite or NaN loss."""
        return not all(math.isfinite(loss) for rank in self.ranks for loss in rank.losses)

    @property
    def blocked_share(self) -> float:
        """Share of the measured time in which ranks waited for communication; NaN if unknown."""
        out = self._left_out | set(range(self.warmup_steps))
        blocked, total = (
            sum(sum(s for i, s in enumerate(row) if i not in out) for row in rows)
            for rows in ([r.blocked_s for r in self.ranks], [r.step_s for r in self.ranks])
        )
        return blocked / total if total > 0 else math.nan
