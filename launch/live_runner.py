"""Runs trials in the steps of a training that is running already.

The training's rank 0 has started this process, and talks with it over standard input and output
(:mod:`hvd_autosync.runtime.live.helper`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import IO, Any, NoReturn

from hvd_autosync.errors import LiveTuningError
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.search_space import (
    Link,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.exchange_plan import Classes, ExchangePlan
from hvd_autosync.search_space.sync_plan import exchange_plan
from hvd_autosync.search_space.trial import PRUNED, VANISHED
from hvd_autosync.util.awake_clock import AwakeClock

#: Warm-up steps of a trial after the default's: the first steps under a plan gather what it needs.
WARMUP_STEPS = 3
#: Ends the reason of a trial in which the training itself was lost.
LOST_IN_TRIAL = "in this trial"
#: Shortest wait of rank 0 in an exchange that counts as hung, seconds: another rank may evaluate
#: or wait for its data. A hang costs this once; what is taken for one costs a training.
_LEAST_SILENCE_S = 180.0
#: Interval of the reports of progress.
_REPORT_S = 0.2
#: Longest time between the end of rank 0 and the word that the job was stopped, seconds.
_STOPPED_S = 0.6
#: Longest wait for the last word of a rank 0 that has ended, seconds.
_LAST_WORD_S = 0.5
#: Time for a hanging rank to end after a signal, seconds.
_GRACE_S = 5.0


class TrainingEnded(LiveTuningError):
    """The script has ended by itself."""


class TrainingLost(LiveTuningError):
    """Rank 0 has ended without a word: by a signal, by an exception, or with its host."""


class RanksChanged(LiveTuningError):
    """The ranks of an elastic job change: its training goes on with another helper."""


class RanksVanished(RanksChanged):
    """Likewise, and an operation has failed in a trial beyond Horovod's own exchange."""


class TrainingHung(TrainingLost):
    """The training made no step for so long that it was ended."""


class Training:
    """The training as its helper sees it: messages in both directions.

    Args:
        received: Lines from rank 0.
        sent: Takes lines for rank 0.
        on_end: Called in another thread once rank 0 has hung up, or says that ranks change; maybe
            twice. Not where :meth:`kill` has ended it.
        stopped: Whether the job is known to be stopped from outside, as by Ctrl-C.

    Attributes:
        process: Process id of rank 0, once it has begun; 0 before.
        steps: Steps of the training, once its script has ended by itself; 0 before.
        results: Trials that have had a result.
        elastic: Whether its ranks may change.
    """

    def __init__(
        self,
        received: IO[bytes],
        sent: IO[bytes],
        on_end: Callable[[], None] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.process = self.steps = self.results = 0
        self.elastic = False
        self._stopped = stopped
        self._on_end = on_end
        self._parent = os.getppid()
        self._sent = sent
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(received,), daemon=True)
        self._reader.start()

    def _read(self, received: IO[bytes]) -> None:
        with contextlib.suppress(ValueError):  # rank 0 was killed in the midst of a line
            for line in received:
                self._queue.put(message := json.loads(line))
                if message["type"] == "reset":  # its children may hold the pipe open
                    self._on_end()
        self._queue.put(None)
        self._on_end()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to rank 0.

        Raises:
            LiveTuningError: Rank 0 has ended, as :meth:`wait` says.
        """
        try:
            self._sent.write(json.dumps(message).encode() + b"\n")
            self._sent.flush()
        except OSError:
            self.wait()  # for its last word

    def tell_self(self, kind: str) -> None:
        """Let :meth:`wait` return a message of this type, as if rank 0 had sent it."""
        self._queue.put({"type": kind})

    @property
    def stopped(self) -> bool:
        """Whether the job is stopped from outside; known a moment after the end of rank 0."""
        until = time.monotonic() + _STOPPED_S
        while not self._stopped():
            if time.monotonic() > until:
                return False
            time.sleep(_REPORT_S)
        return True

    def stop(self, reason: str) -> None:
        """Let the training go on as it is, without further trials."""
        with contextlib.suppress(LiveTuningError):
            self.send({"type": "stop", "reason": reason})

    def kill(self) -> None:
        """End rank 0, which hangs: its launcher ends all ranks then, or goes on without it."""
        self._on_end = lambda: None  # this takes its time, and is to be recorded
        for number in (signal.SIGTERM, signal.SIGKILL):
            if os.getppid() != self._parent:  # its number may be another process's by now
                return
            with contextlib.suppress(ProcessLookupError):
                if self.process:  # 0 would be this process's own group
                    os.kill(self.process, number)
            until = time.monotonic() + _GRACE_S
            while os.getppid() == self._parent and time.monotonic() < until:
                time.sleep(min(_REPORT_S, _GRACE_S))

    def wait(self, *kinds: str, waiting: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Return the next message of these types.

        Args:
            kinds: The types.
            waiting: Called several times a second while there is none.

        Raises:
            TrainingEnded: The script has ended by itself.
            TrainingLost: Rank 0 has ended otherwise.
            RanksChanged: The job is elastic, and begins again with other ranks: rank 0 says so, or
                has ended otherwise. ``RanksVanished`` where it says so of a trial.
            LiveTuningError: The training cannot be tuned.
        """
        while True:
            try:
                message = self._queue.get(timeout=_REPORT_S)
            except queue.Empty:
                # Children of a rank that was killed may hold its end of the pipe open. But its last
                # word may still be in there, where this process was stopped meanwhile.
                if os.getppid() != self._parent:
                    self._reader.join(_LAST_WORD_S)
                    self._queue.put(None)
                waiting()
                continue
            if message is None and not self.elastic:
                raise TrainingLost("the training ended unexpectedly")
            if message is None or message["type"] == "reset":
                vanished = message is not None and message.get("vanished", False)
                kind = RanksVanished if vanished else RanksChanged
                raise kind("the ranks of the job have changed")
            if message["type"] == "end":
                self.steps = message.get("steps", 0)
                raise TrainingEnded("the training has ended")
            if message["type"] == "refused":
                raise LiveTuningError(message["reason"])
            if message["type"] == "begin":
                self.process, self.elastic = message["process"], message.get("elastic", False)
            self.results += message["type"] == "result"
            if message["type"] in kinds:
                return message


class LiveRunner:
    """Runs trials in the steps of a training; see :class:`hvd_autosync.launch.runner.TrialRunner`.

    Args:
        training: The training.
        begun: The strategy under which it has begun, which the empty one stands for; ``None``: as
            the job says.
        confirmed: The winner of an earlier tuning, with its parameter classes. It is the best that
            is known until it is measured again.
    """

    def __init__(
        self,
        training: Training,
        begun: Strategy | None = None,
        confirmed: tuple[Strategy, Classes] | None = None,
    ) -> None:
        self._training = training
        self._begun = begun or Strategy()
        self._confirmed = confirmed
        #: Of each strategy its last step time, seconds, how it is attached, and its classes.
        self._times: dict[Strategy, tuple[float, Strategy, Classes]] = {}
        self._end: LiveTuningError | None = None
        #: Whether the ranks have begun the last trial.
        self._begun_trial = False

    @property
    def lost(self) -> bool:
        """Whether the training, or a rank of it, was lost in a trial that has failed so."""
        return self._end is not None

    def check(self) -> None:
        """Check that the training goes on with these ranks, as far as the last trial has shown.

        Raises:
            LiveTuningError: It does not.
        """
        if self._end is not None:
            raise self._end

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial; the training then goes on under the best strategy so far.

        A training that is lost in the trial of another strategy than its own is the result of that
        trial, if the ranks had begun it: what is lost before has failed for another reason. So are
        ranks of an elastic job that vanish in it, as Horovod goes on without their hosts: a
        strategy that is left out for nothing costs less than a host.

        Raises:
            TrainingEnded: The script has ended by itself, or was stopped from outside. The trial
                has no result, and can be run again.
            RanksChanged: The ranks of an elastic job change otherwise, likewise.
            LiveTuningError: The training has ended otherwise, or refuses.
        """
        self.check()
        if spec.probe:
            return self._probe(spec, progress)
        if not spec.profile:
            spec = replace(spec, warmup_steps=min(spec.warmup_steps, WARMUP_STEPS))
        fields = json.loads(spec.to_json())
        going_on = {"best": _named(*self._best), "left_s": limits.total_s}
        self._begun_trial = False
        self._training.send({"type": "trial", "spec": fields, **going_on})
        began = time.monotonic()
        try:
            result = self._result(spec, limits, progress)
        except TrainingLost as end:
            if self._training.stopped:
                raise TrainingEnded("the training was stopped") from None
            if not self._begun_trial or self._is_untouched(spec.strategy):
                raise
            # It is known before anything else happens that this strategy was tried then.
            hung = isinstance(end, TrainingHung)
            status = TrialStatus.HUNG if hung else TrialStatus.CRASHED
            total_s = time.monotonic() - began
            result = TrialResult(status, f"{end.message} {LOST_IN_TRIAL}", total_s=total_s)
            self._end = TrainingLost("the training has ended")
        except RanksVanished as end:
            if self._is_untouched(spec.strategy):
                raise
            result = TrialResult(TrialStatus.CRASHED, VANISHED, total_s=time.monotonic() - began)
            self._end = end
        self._keep_best(spec, result)
        return result

    def _result(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Wait for the result of a trial, or kill the job if it hangs.

        As it has begun, and under Horovod's own exchange, it waits as long as it would without us.
        """
        clock = AwakeClock()
        last_s = 0.0
        steps, total = 0, spec.warmup_steps + spec.measured_steps
        kinds = ("begun", "postponed", "step", "alive", "result")
        silence_s = max(limits.silence_s, _LEAST_SILENCE_S)
        if self._is_untouched(spec.strategy) or _is_horovods(spec.strategy):
            silence_s = math.inf

        def report() -> None:
            now_s = clock.now()
            phase = "measuring" if steps >= spec.warmup_steps else "warming up"
            progress(TrialProgress(phase, steps, total, now_s))
            if now_s - last_s > silence_s:
                self._kill(f"no step for {silence_s:.0f} s")

        while True:
            message = self._training.wait(*kinds, waiting=report)
            if message["type"] in ("begun", "postponed"):
                self._begun_trial = message["type"] == "begun"
            if message["type"] == "result":
                return TrialResult.from_json(message["result"])
            steps = message.get("steps", steps)
            report()
            last_s = clock.now()

    def _kill(self, reason: str) -> NoReturn:
        self._training.kill()
        raise TrainingHung(f"the training was ended, because it hung ({reason}),")

    def _probe(self, spec: TrialSpec, progress: Callable[[TrialProgress], None]) -> TrialResult:
        began = time.monotonic()

        def report() -> None:
            progress(TrialProgress("measuring", 0, 0, time.monotonic() - began))

        hosts = [[host.name, host.slots] for host in spec.probe]
        self._training.send({"type": "probe", "hosts": hosts})
        link = self._training.wait("link", waiting=report)["link"]
        reason = "" if link else "a running job has no process set of these ranks alone"
        link = None if link is None else Link.from_json(link)
        return TrialResult(TrialStatus.COMPLETED, reason, link=link)

    @property
    def _best(self) -> tuple[Strategy, Classes]:
        """The strategy with the shortest step time that is known; else that of the beginning.

        Step times from before a drift are not compared with those after it.
        """
        if self._confirmed is not None:
            return self._confirmed
        nothing: tuple[float, Strategy, Classes] = (math.inf, Strategy(), {})
        return min(self._times.values(), key=lambda each: each[0], default=nothing)[1:]

    def remember(self, strategy: Strategy, classes: Classes, result: TrialResult) -> None:
        """Take in what a trial of this study has measured.

        The last measurement of a strategy counts, not its shortest, which may have been luck. A
        trial that was cut short has too few steps to count, and a strategy that fails is no best.
        One that was confirmed before a drift, and now pruned, is slower than another.

        Args:
            strategy: Its strategy.
            classes: Which parameters are in which class.
            result: Its result.
        """
        changed = self._changed(strategy)
        if result.status is TrialStatus.CUT_SHORT and result.reason != PRUNED:
            return
        if self._confirmed is not None and changed == self._changed(self._confirmed[0]):
            self._confirmed = None
        if result.status is TrialStatus.CUT_SHORT:
            return
        self._times.pop(changed, None)
        if result.step_time is not None:
            kept = (strategy, classes) if changed else (Strategy(), {})
            self._times[changed] = result.step_time.mean_s, *kept

    def _keep_best(self, spec: TrialSpec, result: TrialResult) -> None:
        """Let the training go on under the best strategy while the next one is chosen.

        Also where the trial was that of the best: from then on the ranks know it, and keep it if
        this process ends.
        """
        self.remember(spec.strategy, spec.classes, result)
        if not self.lost:
            go_on_under(self._training, *self._best)

    def _is_untouched(self, strategy: Strategy) -> bool:
        """Return whether the training is under it as its script and its launcher have begun it."""
        return not self._changed(strategy)

    def _changed(self, strategy: Strategy) -> Strategy:
        """Return the knobs that are not as in the beginning of the training."""
        return Strategy(
            {
                name: value
                for name, value in strategy.items()
                if value != self._begun.get(name, catalogue_knob(name).default)
            }
        )

    def close(self) -> None:
        """Do nothing; the training goes on."""


def go_on_under(training: Training, strategy: Strategy, classes: Classes) -> None:
    """Let the training go on under a strategy for the time being, and know it as the best.

    Args:
        training: The training.
        strategy: The strategy.
        classes: Which parameters are in which class.

    Raises:
        LiveTuningError: The training has ended.
    """
    training.send({"type": "use", **_named(strategy, classes)})


def train_under(
    training: Training, strategy: Strategy, classes: Classes, expected_step_s: float
) -> None:
    """Let the training go on under a strategy from now on.

    Args:
        training: The training.
        strategy: The strategy.
        classes: Which parameters are in which class.
        expected_step_s: Step time as tuning measured it, seconds; 0: unknown.

    Raises:
        LiveTuningError: The training has ended.
    """
    fields = _named(strategy, classes)
    training.send({"type": "train", "expected_step_s": expected_step_s, **fields})


def _named(strategy: Strategy, classes: Classes) -> dict[str, Any]:
    return {"strategy": dict(strategy), "classes": classes}


def _is_horovods(strategy: Strategy) -> bool:
    """Return whether gradients are exchanged under it as Horovod does by itself."""
    return exchange_plan(strategy) in (None, ExchangePlan())
