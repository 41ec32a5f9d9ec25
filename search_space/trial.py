"""A trial: one timed run of the user's script under one strategy, as plain values.

The driver sends a :class:`TrialSpec` to the workers and gets a :class:`TrialResult` back. The
life of a trial::

    asked -> running -> COMPLETED      all steps measured
                     -> CUT_SHORT      its steps so far exclude beating the best, or the minutes
                                       of the tuning were used
                     -> ENDED_EARLY    the script finished first; what was measured counts
                     -> CRASHED        a rank exited with a status other than 0, or was killed
                     -> HUNG           no progress within the limit derived from the default
                     -> DIVERGED       its loss is no number any more, unlike the default's
"""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.resources import Host, Link
from hvd_autosync.search_space.schedule import schedule_of
from hvd_autosync.search_space.strategy import Strategy

# numpy is imported where it is used: Horovod's launcher loads this module for its options alone.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Fewest measured steps from which a step time is believed.
MIN_MEASURED_STEPS = 5
#: Where steps are long, measured ones take so many seconds in all, but are so many at least.
_MEASURED_S, _FEWEST_STEPS = 15.0, 10
#: Where rank 0 writes that steps have become slower, in the folder of the driver.
DRIFT_FILE = "drift"
#: Where it writes what a run of a recurring job came to, there too.
OUTCOME_FILE = "outcome"
#: Where any rank on its host writes that the loss guard has ended the strategy, there too.
FALLBACK_FILE = "fallback"
#: Steps over which the losses of a guarded training are averaged.
LOSS_WINDOW = 32
_TRIM = 0.1


class TrialStatus(str, enum.Enum):
    """How a trial ended; see the module's drawing."""

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
    """How many steps of ``step_s`` seconds to measure, of ``most``.

    The noise of a step is relative to its length, and launches differ by 2 % anyway: where
    steps are long, some of them tell as much, and what they leave open the confirmation tells.
    """
    return round(min(max(_MEASURED_S / max(step_s, 1e-9), _FEWEST_STEPS), most))


@dataclass(frozen=True)
class LossPrediction:
    """What the mean losses of a guarded training's first windows are, if it is as good as it was.

    Attributes:
        levels: The highest expected mean of each window of ``LOSS_WINDOW`` steps.
        deviations: Standard deviation of such a mean about its level, as many, above 0.
    """

    levels: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrialSpec:
    """What every rank of a trial must know.

    Attributes:
        trial_id: Unique name, used to find processes that a trial left behind.
        strategy: The strategy to run under.
        warmup_steps: Steps that are run and not measured.
        measured_steps: Steps that are measured; the run ends after them. 0: run to the script's
            own end without measuring (the real training).
        profile: Whether to record the model's profile during warm-up.
        prune_above_s: End the run when the step time is above this with confidence.
        classes: Class of parameters -> names of its parameters (:mod:`exchange_plan`).
        probe: Measure the link between the ranks of these hosts, instead of running the script.
        seed: Of all random numbers (:mod:`hvd_autosync.runtime.patches.seeds`); 0: the script's
            own.
        loss_prediction: Of the first windows of a real training.
        expected_step_s: Seconds of a step of a real training, as tuning measured it; 0: unknown.
        drift_folder: Where this is on its host, rank 0 writes there that steps are slower, and any
            rank that the loss guard has ended the strategy.
        summarized: Whether rank 0 also writes there the summary of a real training and its samples.
        adaptive_steps: Whether fewer steps are measured where those of the warm-up are long.
        key: What its messages are signed with (:mod:`hvd_autosync.runtime.driver.wire`); drawn for
            it.
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
    drift_folder: str = ""
    summarized: bool = False
    adaptive_steps: bool = False
    key: str = field(default_factory=lambda: os.urandom(16).hex(), repr=False)

    @property
    def watched(self) -> bool:
        """Whether a real training's steps are compared with what tuning measured."""
        return self.measured_steps == 0 and self.expected_step_s > 0

    @property
    def round_steps(self) -> int:
        """Steps of a round under its strategy."""
        schedule = schedule_of(self.strategy)
        return 1 if schedule is None else schedule.base

    def to_json(self) -> str:
        """Compact JSON."""
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
        """The specification that :meth:`to_json` wrote."""
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
        standard_error_s: Its standard error from the spread of the steps, seconds.
        steps: Number of measured steps.
    """

    mean_s: float
    standard_error_s: float
    steps: int

    @classmethod
    def from_steps(cls, durations_s: npt.ArrayLike) -> StepTime:
        """Estimate from the durations of single steps, shape ``(n,)`` with n >= 1.

        The standard error is the larger of the trimmed mean's (from the winsorized variance) and
        that of means over five neighbouring steps, because neighbouring steps resemble each other.
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
class RankReport:
    """What one rank measured.

    Attributes:
        rank: Its rank.
        host: Its host's name.
        step_s: Seconds of each step, warm-up included, in order.
        blocked_s: Seconds of each step spent waiting for communication, in order.
        losses: Last scalar loss of each step that had one, in order.
        peak_memory_bytes: Peak resident memory (plus the accelerator's, where there is one).
    """

    rank: int
    host: str
    step_s: tuple[float, ...] = ()
    blocked_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_memory_bytes: int = 0


@dataclass(frozen=True)
class TrialResult:
    """The outcome of one trial.

    Attributes:
        status: How it ended.
        reason: One sentence for people; empty when completed.
        ranks: Reports in rank order; ranks that never reported are missing.
        warmup_steps: Steps at the start of each report that are not measured.
        setup_s: Seconds from launch to the end of the first step; NaN when none ended.
        total_s: Seconds from launch to the last process gone.
        launch_s: Seconds of ``setup_s`` before the script began on all ranks; NaN when unknown.
        exit_status: Of the launcher.
        stderr_tail: Last lines that the job wrote to its error output.
        profile: The model's profile, where it was asked for.
        owned: Knobs that the script decides itself.
        device: Device that the ranks computed on; empty when unknown.
        link: What a probe measured; not in the JSON, for it belongs to the cluster.
        round_steps: Steps of a round, after which ranks average; the time of one is the mean over
            a round.
    """

    status: TrialStatus
    reason: str = ""
    ranks: tuple[RankReport, ...] = ()
    warmup_steps: int = 0
    setup_s: float = math.nan
    total_s: float = math.nan
    exit_status: int = 0
    stderr_tail: str = ""
    profile: ModelProfile | None = None
    owned: tuple[str, ...] = ()
    device: str = ""
    link: Link | None = None
    round_steps: int = 1
    launch_s: float = math.nan

    def parts_s(self) -> dict[str, float]:
        """What the trial's time went into, seconds; without what is not known.

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
        parts["end"] = max(self.total_s - known_s, 0.0) if rows else math.nan
        return {name: seconds for name, seconds in parts.items() if math.isfinite(seconds)}

    def measured_durations(self) -> npt.NDArray[np.float64]:
        """Duration of a measured step, the mean of each round and all ranks, seconds, ``(n,)``."""
        import numpy as np

        rows = [rank.step_s[self.warmup_steps :] for rank in self.ranks]
        length = max(self.round_steps, 1)
        rounds = min((len(row) for row in rows), default=0) // length
        if rounds == 0:
            return np.empty(0)
        steps = np.array([row[: rounds * length] for row in rows]).mean(axis=0)
        durations: npt.NDArray[np.float64] = steps.reshape(rounds, -1).mean(axis=1)
        return durations

    @property
    def step_time(self) -> StepTime | None:
        """The step time, or ``None`` when too few steps were measured to believe it."""
        durations = self.measured_durations()
        if not self.status.measured or len(durations) < MIN_MEASURED_STEPS:
            return None
        return StepTime.from_steps(durations)

    @property
    def diverged(self) -> bool:
        """Whether a rank saw a loss that is infinite or not a number."""
        return not all(math.isfinite(loss) for rank in self.ranks for loss in rank.losses)

    @property
    def blocked_share(self) -> float:
        """Share of the measured time that ranks waited for communication; NaN when unknown."""
        blocked = [sum(rank.blocked_s[self.warmup_steps :]) for rank in self.ranks]
        total = [sum(rank.step_s[self.warmup_steps :]) for rank in self.ranks]
        return sum(blocked) / sum(total) if sum(total) > 0 else math.nan

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary without NaN."""
        fields = asdict(replace(self, profile=None))
        del fields["link"]
        if self.round_steps == 1:  # nor do traces of earlier versions have it
            del fields["round_steps"]
        if math.isnan(self.launch_s):
            del fields["launch_s"]
        fields["status"] = self.status.value
        fields["profile"] = self.profile.to_json() if self.profile else None
        for name in ("setup_s", "total_s"):
            fields[name] = None if math.isnan(fields[name]) else fields[name]
        for rank in fields["ranks"]:
            rank["losses"] = [x if math.isfinite(x) else None for x in rank["losses"]]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TrialResult:
        """The result that :meth:`to_json` wrote."""
        rest = dict(fields)
        rest["status"] = TrialStatus(rest["status"])
        rest["ranks"] = tuple(
            RankReport(
                rank["rank"],
                rank["host"],
                tuple(rank["step_s"]),
                tuple(rank["blocked_s"]),
                tuple(math.nan if x is None else x for x in rank["losses"]),
                rank["peak_memory_bytes"],
            )
            for rank in rest["ranks"]
        )
        rest["profile"] = ModelProfile.from_json(rest["profile"]) if rest["profile"] else None
        rest["owned"] = tuple(rest["owned"])
        for name in ("setup_s", "total_s"):
            rest[name] = math.nan if rest[name] is None else rest[name]
        return cls(**rest)
