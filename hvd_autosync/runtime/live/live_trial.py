"""One live trial: some steps of the training, measured in place."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable, Collection, Sequence
from statistics import fmean
from time import perf_counter
from typing import Any

from hvd_autosync.runtime.collectives.agreement import gather_bytes
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.measure.recorder import Recorder
from hvd_autosync.runtime.measure.settling import settled_after
from hvd_autosync.runtime.trial.ending import peak_memory_bytes, should_prune
from hvd_autosync.runtime.trial.profiling import (
    Profiling,
    gradient_device,
    profiled_steps,
    wait_for_device,
)
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.trial import (
    MIN_MEASURED_STEPS,
    OUT_OF_TIME,
    PRUNED,
    RankReport,
    StepTime,
    TrialResult,
    TrialSpec,
    TrialStatus,
    enough_steps,
    left_out,
)

#: Steps between two looks at what is measured.
_LOOK_EVERY = 8
#: A step time is clear if so many steps give it with a standard error of at most this share.
_CLEAR_STEPS, _CLEAR = 10, 0.01
#: So often a trial begins again because some rank has missed the begin or the end of profiling.
_MOST_RESTARTS = 5


class LiveTrial:
    """The steps of one trial on this rank.

    Args:
        spec: The trial. Its strategy is attached already.
        began: Clock reading before the strategy was attached.
        left_s: Seconds after which rank 0 ends it; infinite: never. If there is a limit, ranks meet
            more often.
        steps_before: Steps of the training since the trial before.

    Attributes:
        profile: The profile of the model, on rank 0, once it was profiled.
    """

    def __init__(self, spec: TrialSpec, began: float, left_s: float, steps_before: int = 0) -> None:
        self.spec, self._steps_before = spec, steps_before
        self._left_s = left_s
        self.profile: ModelProfile | None = None
        self.recorder = Recorder()
        self._began, self._setup_s = began, math.nan
        self._last = spec.warmup_steps + spec.measured_steps
        #: Indices of steps that some rank has not made.
        self._partial: set[int] = set()
        self._restarts = 0

    @property
    def steps(self) -> int:
        """Steps so far."""
        return len(self.recorder.step_s)

    @property
    def measured(self) -> Sequence[float]:
        """This rank's measured steps, seconds, without untypical ones, once it has settled."""
        warmup = self.spec.warmup_steps
        steps = _typical(self.recorder.step_s, self.recorder.untypical, self._partial, warmup)
        return steps[settled_after(steps, warmup) :]

    @property
    def over(self) -> bool:
        """Whether all steps were made; a trial that lacks typical ones goes on for as many more."""
        enough = len(self.measured) >= MIN_MEASURED_STEPS
        made_by_all = self.steps - len(self._partial)
        return made_by_all >= (self._last if enough else 2 * self._last)

    @property
    def out_of_time(self) -> bool:
        """Whether the time of the tuning is used up, by this rank's clock.

        The warm-up in which the model is profiled, under the default strategy, is not broken off.
        """
        if self.spec.profile and self.steps < self.spec.warmup_steps:
            return False
        return perf_counter() - self._began > self._left_s

    def next_boundary(self, wait_steps: int) -> int:
        """Steps until the trial needs a boundary.

        Args:
            wait_steps: Steps after which rank 0 looks at the clock, if the time is limited.
        """
        steps = self.spec.warmup_steps - self.steps
        if steps <= 0:
            steps = max(min(_LOOK_EVERY, self._last - self.steps), 1)
        return steps if math.isinf(self._left_s) else min(steps, wait_steps)

    def end_step(self, *, typical: bool) -> None:
        """End the current step.

        Args:
            typical: Whether it is like the others: no evaluation, no checkpoint, no new epoch.
        """
        if self.steps + 1 in (self.spec.warmup_steps, self._last):
            wait_for_device()
        self.recorder.end_step(typical=typical)
        if math.isnan(self._setup_s):
            self._setup_s = perf_counter() - self._began

    @property
    def _profile_steps(self) -> tuple[int, ...]:
        """The steps after which profiling begins and ends, if the model is profiled."""
        if not self.spec.profile:
            return ()
        return profiled_steps(self.spec.warmup_steps, earliest=1) or ()

    def profile_when_due(self, profiling: Profiling, optimizers: Callable[[], list[Any]]) -> None:
        """Profile in the warm-up, and end before the measured steps.

        Args:
            profiling: Profiles the model.
            optimizers: Returns the wrapped optimizers of the script.
        """
        if self.steps not in self._profile_steps:
            return
        if self.steps == self._profile_steps[0]:
            if rank() == 0:
                profiling.begin(optimizers())
        else:
            profiling.compare_arithmetic(gradient_device(optimizers()))
            self.profile = profiling.end()

    def slow(self) -> bool:
        """Return whether this rank's steps exclude that the strategy is among the best."""
        return should_prune(self.measured, self.spec.prune_above_s)

    def clear(self) -> bool:
        """Return whether the step time is known well enough, or steps are long enough."""
        steps = self.measured
        if len(steps) < _CLEAR_STEPS:
            return False
        time_s = StepTime.from_steps(steps)
        if self.spec.adaptive_steps and len(steps) >= enough_steps(
            time_s.mean_s, self.spec.measured_steps
        ):
            return True
        return not self.spec.profile and time_s.standard_error_s <= _CLEAR * time_s.mean_s

    def ending(self, *, over: bool, slow: bool) -> tuple[TrialStatus, str]:
        """Return how the trial ends, with the reason; that of rank 0 counts.

        Args:
            over: Whether all ranks have made all steps.
            slow: Whether all ranks find the strategy too slow.
        """
        if not over and (slow or self.out_of_time):
            return TrialStatus.CUT_SHORT, PRUNED if slow else OUT_OF_TIME
        return TrialStatus.COMPLETED, ""

    def all_joined(self, waited: int, apart: int) -> bool:
        """Leave out the steps that some rank has not made, now that all have left ``join()``.

        If profiling begins or ends with one of them, the trial begins again, on all ranks; not for
        ever, as epochs may all be so short.

        Args:
            waited: How many steps others have made while this rank waited there.
            apart: How many of the last steps some rank has not made.

        Returns:
            Whether it begins again.
        """
        self.recorder.step_s += [0.0] * waited
        self.recorder.blocked_s += [0.0] * waited
        missed = any(self.steps - apart < each <= self.steps for each in self._profile_steps)
        if missed and self._restarts < _MOST_RESTARTS:
            self._restarts += 1
            self.recorder, self.profile = Recorder(), None
            self._partial.clear()
            return True
        self._partial |= set(range(max(self.steps - apart, 0), self.steps))
        return False

    def result(self, status: TrialStatus, reason: str, **fields: Any) -> TrialResult | None:
        """Gather the measurements of all ranks, on rank 0; a collective.

        Args:
            status: How the trial ended.
            reason: Why.
            fields: Further fields of the result.
        """
        recorder = self.recorder
        measured = [recorder.step_s, recorder.blocked_s, recorder.untypical]
        own = [socket.gethostname(), *measured, peak_memory_bytes()]
        reports = [json.loads(each) for each in gather_bytes(json.dumps(own).encode(), "live.end")]
        if rank() != 0:
            return None
        by_any = {index for report in reports for index in report[3]}
        warmup = self.spec.warmup_steps
        ranks = tuple(
            RankReport(
                place,
                host,
                _typical(step_s, by_any, self._partial, warmup),
                _typical(blocked_s, by_any, self._partial, warmup),
                (),
                memory,
            )
            for place, (host, step_s, blocked_s, _, memory) in enumerate(reports)
        )
        of_all = [fmean(each) for each in zip(*(report.step_s for report in ranks), strict=True)]
        return TrialResult(
            status,
            reason,
            ranks,
            warmup_steps=settled_after(of_all, warmup),
            setup_s=self._setup_s,
            total_s=perf_counter() - self._began,
            profile=self.profile,
            steps_before=self._steps_before,
            **fields,
        )


def _typical(
    steps: list[float], untypical: Collection[int], partial: set[int], warmup: int
) -> tuple[float, ...]:
    """Return the steps without partial ones and those that trials leave out (:func:`left_out`).

    Args:
        steps: Of each step a duration, seconds.
        untypical: Indices of those that are not like the others.
        partial: Indices of those that some rank has not made.
        warmup: Number of the first steps, which are not measured and all stay.
    """
    made = [index for index in range(len(steps)) if index < warmup or index not in partial]
    out = left_out([index for index in made if index >= warmup], untypical)
    return tuple(steps[index] for index in made if index not in out)
