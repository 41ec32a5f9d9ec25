"""One rank's part in a trial: the actions at the ends of steps.

The steps of a trial, with the actions at their ends, outside of any measured time::

    | warm-up                    | measured                                  |
    |            | profiled  |   |       8       16       24      ...        |
    hello                profile |      vote    vote    vote     end, exit
                                 how many
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_steps
from hvd_autosync.runtime.collectives.operations import of_some_ranks, rank
from hvd_autosync.runtime.driver.sender import Sender
from hvd_autosync.runtime.measure.recorder import Recorder
from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.runtime.trial import ending
from hvd_autosync.runtime.trial.optimizers import Optimizers
from hvd_autosync.runtime.trial.profiling import (
    Profiling,
    device_name,
    gradient_device,
    profiled_steps,
    wait_for_device,
)
from hvd_autosync.runtime.trial.threads import ScriptThreads
from hvd_autosync.search_space.families.transport import THREADS_PER_RANK
from hvd_autosync.search_space.trial import TrialSpec, left_out

#: Measured steps between two votes on pruning the trial.
_VOTE_EVERY = 8


class TrialRun:
    """Handles the events of the training and runs the actions that are due.

    The decisions depend only on the number of steps and on votes, so all ranks take the same.

    Args:
        spec: The trial.
        sender: Sends messages to the driver.

    Attributes:
        recorder: Records the steps.
        profiling: Profiles the model.
    """

    def __init__(self, spec: TrialSpec, sender: Sender) -> None:
        self.recorder = Recorder(self._in_round)
        self.profiling = Profiling()
        self.profiling.epochs.call_on_begin(self._epoch_begins)
        self._spec = spec
        self._sender = sender
        self._optimizers = Optimizers(self.unlike_others)
        #: Seconds of averages before the current step, and before untypical ones, which are to
        #: count in a step that is measured.
        self._averaging_s = self._uncounted_s = 0.0
        self._threads = ScriptThreads()
        self._classifier = StepClassifier()
        self._begun = False
        self._steps = 0
        self._last_step = spec.warmup_steps + spec.measured_steps
        self._due = self._schedule()

    def _schedule(self) -> dict[int, list[Callable[[], None]]]:
        """Number of steps -> actions that are due after them."""
        due: dict[int, list[Callable[[], None]]] = {}
        warmup, measured = self._spec.warmup_steps, self._spec.measured_steps
        if self._spec.profile and (profiled := profiled_steps(warmup, earliest=0)):
            begin, end = profiled
            due.setdefault(begin, []).append(self._begin_profile)
            due.setdefault(end, []).extend([self._compare_arithmetic, self._end_profile])
        if math.isfinite(self._spec.prune_above_s):
            for steps in range(_VOTE_EVERY, measured, _VOTE_EVERY):
                due.setdefault(warmup + steps, []).append(self._vote)
        if self._spec.adaptive_steps and warmup > 1:
            due.setdefault(warmup, []).append(self._shorten)
        due.setdefault(self._last_step, []).append(lambda: self.leave("steps"))
        return due

    # Events of the training

    def optimizer_created(self, optimizer: Any, owned: frozenset[str]) -> None:
        """The script has wrapped an optimizer; its call fixes the knobs ``owned``."""
        if of_some_ranks(optimizer):
            return
        self._optimizers.add(optimizer, owned)
        if not self._begun:
            self._begin()
            self.recorder.restart_clock()
        elif self.profiling.profiler is not None and not self._steps:
            # With a short warm-up it has begun with the first optimizer.
            self.profiling.close()
            self.profiling.begin(self._optimizers.living)

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step."""
        if self._classifier.is_step(optimizer):
            self._end_step()

    def mark(self) -> None:
        """The script marks the end of a step; from the first mark on only marks are counted."""
        if not self._begun:
            self._begin()
        first, self._classifier.marked = not self._classifier.marked, True
        # The step that the first mark ends may have been counted at its optimizer's step.
        if not first or not self.recorder.step_s:
            self._end_step()

    def unlike_others(self) -> None:
        """The current step contains what others do not, such as an evaluation or a checkpoint."""
        self.recorder.unlike += 1

    def averaged_between_steps(self, seconds: float) -> None:
        """Replicas were synchronized before the current step: that is part of the strategy."""
        self._averaging_s += seconds

    def _epoch_begins(self, loader: Any, iterator: Any) -> None:
        """A loader begins an epoch, of the training or of an evaluation."""
        self.unlike_others()

    def _end_step(self) -> None:
        recorder = self.recorder
        typical = not recorder.unlike
        if typical:  # it contains its own
            more_s, self._uncounted_s = self._uncounted_s, 0.0
        else:
            more_s, self._uncounted_s = 0.0, self._uncounted_s + self._averaging_s
        self._averaging_s = 0.0
        self._steps = steps = self._steps + 1
        if steps == self._spec.warmup_steps or steps == self._last_step:
            wait_for_device()
        recorder.end_step(typical=typical, more_s=more_s)
        self.profiling.step_ends()
        due = self._due.get(steps)
        if due is not None:
            for action in due:
                action()
            recorder.restart_clock()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective.

        A rank with less data has made fewer steps. It takes over the others' count, so that from
        then on all act after the same step.
        """
        agreed = agree_steps(self._steps, "trial")
        for steps in range(self._steps + 1, agreed + 1):
            for action in self._due.get(steps, []):
                # The others have agreed meanwhile; join() took part for this rank.
                if action not in (self._vote, self._shorten, self._compare_arithmetic):
                    action()
        self._steps = agreed
        if self._spec.adaptive_steps:
            self._end_after(-agree_steps(-self._last_step, "trial.last"))
        self.recorder.restart_clock()

    # Actions

    def _begin(self) -> None:
        self._begun = True
        self._threads.follow()
        self._sender.start(rank(), lambda: self.recorder.take_news(wait_for_device=False))
        device = device_name(gradient_device(self._optimizers.living))
        hello: dict[str, Any] = {"type": "hello", "host": socket.gethostname(), "device": device}
        hello["cores"] = sorted(os.sched_getaffinity(0))
        if current.began_at is not None:
            hello["script_s"] = time.monotonic() - current.began_at
        self._sender.send(lambda: hello)
        # Registered after Horovod's own, so called before it: Horovod's may hang.
        atexit.register(self._script_ended)
        for action in self._due.get(0, []):
            action()

    def _begin_profile(self) -> None:
        if rank() == 0:
            self.profiling.begin(self._optimizers.living)

    def _compare_arithmetic(self) -> None:
        self.profiling.compare_arithmetic(gradient_device(self._optimizers.living))

    def _end_profile(self) -> None:
        profile = self.profiling.end()
        if profile is None:
            return
        owned = set(self._optimizers.fixed)
        if self._threads.chosen():
            owned.add(THREADS_PER_RANK.name)
        message = {"type": "profile", "profile": profile.to_json(), "owned": sorted(owned)}
        self._sender.send(lambda: message)

    def _vote(self) -> None:
        step_s = self.recorder.step_s
        measured = range(self._spec.warmup_steps, len(step_s))
        out = left_out(measured, self.recorder.untypical)
        kept = [step_s[index] for index in measured if index not in out]
        if ending.vote_prune(kept, self._spec.prune_above_s):
            self.leave("pruned")

    def _shorten(self) -> None:
        """Measure fewer steps if they are long.

        The first step, which includes the set-up, is ignored.
        """
        enough = ending.agree_enough(self.recorder.step_s[1:], self._spec.measured_steps)
        self._end_after(self._spec.warmup_steps + enough)

    def _end_after(self, steps: int) -> None:
        """End after this many steps, if that is earlier than planned."""
        if steps < self._last_step:
            self._due.setdefault(steps, []).extend(self._due.pop(self._last_step))
            self._last_step = steps

    def leave(self, cause: str, *, shut_down: bool = False) -> NoReturn:
        """Report, then end the process; all ranks do so after the same step.

        Args:
            cause: Of the end, for the driver.
            shut_down: Whether the others have shut Horovod down already.
        """
        self._report_end(cause)
        ending.leave(shut_down=shut_down)

    def _script_ended(self) -> None:
        if current.run is self:  # not in a forked child
            self._report_end("script")

    def _report_end(self, cause: str) -> None:
        self._sender.stop()
        self._sender.send(lambda: self.recorder.take_news(wait_for_device=True))
        end = {"type": "end", "cause": cause, "peak_memory_bytes": ending.peak_memory_bytes()}
        self._sender.send(lambda: end)

    def _in_round(self) -> bool:
        """Return whether replicas of an optimizer differ, in a round of local steps."""
        for each in self._optimizers.living:
            sync = getattr(each, "_sync", None)
            if sync is not None and sync.method.in_round:
                return True
        return False
