"""One rank's part in live tuning: what happens at the ends of the training's own steps.

Every rank counts the same steps, so all meet at the same boundaries. There rank 0 tells the others
what the helper asks for: a trial, the link, or the strategy to go on with::

    | default | boundary | trial | boundary | best known | boundary | trial | ...
                 trial: attach        result, thinking        attach

Rank 0 never waits for the helper: while that thinks, the training goes on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import NotOnAllError, agree_steps, gather_texts
from hvd_autosync.runtime.collectives.operations import of_some_ranks, rank
from hvd_autosync.runtime.collectives.reinitialize import CannotReinitializeError, NotNowError
from hvd_autosync.runtime.collectives.standstill import signals_wait
from hvd_autosync.runtime.live.after_study import AfterStudy
from hvd_autosync.runtime.live.attach import (
    Attacher,
    has_begun,
    refused,
    switchable,
    switchable_on_all,
    why_not,
    with_remedy,
)
from hvd_autosync.runtime.live.boundary import Agreement, meet
from hvd_autosync.runtime.live.helper import Helper, Message, begin_message, strategy_of
from hvd_autosync.runtime.live.helper_line import HelperLine
from hvd_autosync.runtime.live.live_trial import LiveTrial
from hvd_autosync.runtime.live.notes import leave_note
from hvd_autosync.runtime.live.refusal import hand_over
from hvd_autosync.runtime.live.step_clock import StepClock
from hvd_autosync.runtime.live.vanished import Vanished
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.runtime.patches.exits import call_at_exit
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook
from hvd_autosync.runtime.trial.ending import leave
from hvd_autosync.runtime.trial.optimizers import Optimizers
from hvd_autosync.runtime.trial.probe import probe_in_place
from hvd_autosync.runtime.trial.profiling import Profiling, device_name, gradient_device
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.horovod_settings import is_elastic
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.trial import TrialSpec, TrialStatus
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.variables import ENDED_NOTE, RESUMED_NOTE, TUNING_ENDED_NOTE

#: Aimed seconds between two boundaries at which rank 0 asks for messages, and the most steps.
_ASK_EVERY_S, _MOST_STEPS = 0.25, 16
#: Steps between two boundaries once the study has ended.
_WATCH_EVERY = 64
#: So many boundaries in a row at which no switch was possible end the tuning, fewer if launched
#: trials can follow.
_PATIENCE, _PATIENCE_TO_REFUSE = 200, 20
_OTHER_MODEL = "the script trains another model now; the job's next start goes on with the first"


class LiveTuning(JoinHook):
    """Handles the events of the training, and meets the other ranks at boundaries.

    Args:
        helper: The helper process, on rank 0; elsewhere ``None``.
        refusal: The file for the reason why the training cannot be tuned so; all ranks end then.
            Empty: it goes on untuned.

    Attributes:
        profiling: Profiles the model in the first trial.
        losses: Losses of the training; they are not needed.
        own_because: Why an optimizer is Horovod's own, on all ranks; empty: none has to be.
        barred: Why this rank is not to be tuned; empty: it is.
        vanished: Trials of an elastic job in which ranks have vanished.
        failed: Whether the last step has failed.
        watch: Watches the steps after a tuning without a result; ``None``: their time is unknown.
    """

    def __init__(self, helper: Helper | None, refusal: str = "") -> None:
        self.profiling, self.losses = Profiling(), Losses()
        self._refusal = refusal
        self._optimizers = Optimizers(self.unlike_others, self._load_checkpoint)
        self.vanished = Vanished()
        self.own_because, self.barred, self.watch = "", "", current.watch
        self.profiling.epochs.call_on_begin(self._epoch_begins)
        register_join_hook(self)
        call_at_exit(self._script_ended)
        self.start_over(helper)

    def start_over(self, helper: Helper | None) -> None:
        """Count and tune from here on."""
        self._helper, self._line = helper, HelperLine(helper, self.vanished)
        self.profiling.close()
        self._optimizers.watch_saves()
        self._classifier = StepClassifier()
        self._steps, self._boundary_at, self._last_end = 0, 1, 0
        self._begun = self._ended = False
        self._trial: LiveTrial | None = None
        #: What all optimizers follow, once those that are `late` do; `None`: some may differ.
        self._strategy: Strategy | None = Strategy()
        self._classes: Classes = {}
        self._late = False
        self._attacher = Attacher()
        #: What could not be done at the last boundary, because operations were under way.
        self._postponed: Message | None = None
        self._busy = ""
        #: What the ranks go on with if the helper ends.
        self._best: tuple[Strategy, Classes] = (Strategy(), {})
        self._impossible = 0
        #: The thread that trains; strategies change in no other one. 0: no step was made yet.
        self._thread = 0
        self._clock = StepClock(perf_counter())
        self._untypical = self.failed = False
        self._after_study = AfterStudy(self._send)

    def optimizer_created(self, optimizer: Any, owned: frozenset[str]) -> None:
        """The script has wrapped an optimizer; its call fixes the knobs ``owned``."""
        if of_some_ranks(optimizer):
            return
        self._optimizers.add(optimizer, owned)
        self._late = True
        self.unlike_others()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step."""
        if self._classifier.is_step(optimizer):
            self._end_step()

    def step_failed(self) -> None:
        """A step or an operation has raised an exception, which the script may catch."""
        self.failed = True

    def mark(self) -> None:
        """The script marks the end of a step; from the first mark on only marks are counted."""
        first, self._classifier.marked = not self._classifier.marked, True
        # The step that the first mark ends may have been counted at its optimizer's step.
        if not first or not self._steps:
            self._end_step()

    def waited(self, seconds: float) -> None:
        """Add seconds of the current step that were spent waiting for other ranks."""
        if self._trial is not None:
            self._trial.recorder.blocked += seconds

    def _load_checkpoint(self) -> None:
        """The script loads one; before the first step it goes on from there."""
        if not self._steps:
            leave_note(RESUMED_NOTE)

    def unlike_others(self) -> None:
        """The current step contains what others do not, such as a checkpoint."""
        self._untypical = True

    def _epoch_begins(self, loader: Any, iterator: Any) -> None:
        """A loader begins an epoch, of the training or of an evaluation."""
        self.unlike_others()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective.

        A rank with less data has made fewer steps, and takes over the others' count.
        """
        if self._ended:
            return
        least = -agree_steps(-self._steps, "live.least")
        most = agree_steps(self._steps, "live")
        self._boundary_at = max(agree_steps(self._boundary_at, "live.boundary"), most + 1)
        if self._trial is not None:
            if self._trial.all_joined(most - self._steps, most - least):
                self.profiling.close()
            self._trial.recorder.restart_clock()
        self._clock.restart(perf_counter())
        self._steps = most

    def _end_step(self) -> None:
        typical, self._untypical = not self._untypical, False
        self._after_study.end_step(typical=typical)
        if self._ended:
            return
        self._steps += 1
        self.failed = False
        self._thread = self._thread or threading.get_ident()
        now = perf_counter()
        self._clock.end_step(now, typical=typical)
        if self._trial is not None:
            self._trial.end_step(typical=typical)
            self._line.report_step(self._trial, now)
            self.profiling.step_ends()
            self._trial.profile_when_due(self.profiling, self.living)
        if self._steps >= self._boundary_at:
            self._pass_boundary()
        self._clock.end_boundary(perf_counter())
        if self._trial is not None:
            self._trial.recorder.restart_clock()

    # Boundaries

    @signals_wait()
    def _pass_boundary(self) -> None:
        """Do what ranks agree on; a handler that raises an error would leave this rank behind."""
        self._act(self._meet())

    def _meet(self) -> Agreement:
        trial, moved = self._trial, threading.get_ident() != self._thread
        begun = any(has_begun(each) for each in switchable(self.living()))
        return meet(
            ready=not (moved or begun),
            over=trial is not None and trial.over,
            slow=trial is not None and trial.slow(),
            clear=trial is not None and (trial.clear() or trial.out_of_time),
            wait_steps=self._wait_steps(),
            moved=moved,
            other_model=self._classifier.other_model,
            receive=self._receive if rank() == 0 else None,
        )

    def _act(self, agreed: Agreement) -> None:
        trial = self._trial
        if agreed.complete:  # a rank that waits in join() does not count, and would fall behind
            stuck = self._postponed is not None or not agreed.possible
            self._impossible = self._impossible + 1 if stuck else 0
            if not (self._begun or agreed.possible or agreed.moved):
                self._classifier.count_next()
        may_refuse = bool(self._refusal) and not self._begun
        if self._impossible > (_PATIENCE_TO_REFUSE if may_refuse else _PATIENCE):
            reason = self._busy or agreed.obstacle
            self._refuse(reason) if may_refuse else self._give_up(with_remedy(reason))
            return
        if agreed.complete and agreed.other_model:  # beside join() ranks would end apart
            self._classifier.other_model = False
            if self._after_study.now:
                self._after_study.watch_no_longer()
            elif self._begun:
                self._give_up(_OTHER_MODEL)
                return
        if agreed.possible:
            if not self._begun:
                self._begin()
            elif trial is not None and (agreed.all_over or agreed.all_slow or agreed.clear):
                ending = trial.ending(over=agreed.all_over, slow=agreed.all_slow)
                self._finish(trial, *ending)
            # The default they follow from their creation.
            if self._late and self._strategy and not self._ended:
                self._include_late(self._strategy)
            if message := self._postponed or agreed.message:
                self._try_to_obey(message)
        if not self._ended:
            wait = min(agreed.wait_steps, _WATCH_EVERY if self._after_study.now else _MOST_STEPS)
            if self._trial is not None:
                wait = self._trial.next_boundary(wait)
            self._boundary_at = self._steps + wait

    def _receive(self) -> Message | None:
        if self._trial is not None or self._postponed is not None:
            return None  # a trial has to end before the next message counts
        return self._line.next(self._strategy, self._best)

    def _wait_steps(self) -> int:
        """Steps until rank 0 asks for messages again."""
        if self._after_study.now:
            return _WATCH_EVERY
        return self._clock.steps_in(_ASK_EVERY_S, most=_MOST_STEPS) if self._begun else 1

    def _give_up(self, reason: str) -> None:
        """End the tuning, as soon as the training is under the best strategy."""
        if self._strategy == self._best[0]:
            self._end(reason)
            return
        self._trial, self._impossible = None, 0
        self.vanished.trial_ends(measured=False)
        self.profiling.close()
        if rank() == 0 and (self._postponed or {}).get("type") != "stop":
            print_line(f"the strategy of the last trial stays until it can be switched: {reason}")
        self._postponed = {"type": "stop", "reason": reason}
        self._boundary_at = self._steps + 1

    def _begin(self) -> None:
        """Tell the helper about the job, once all ranks are there."""
        self._begun = True
        if is_elastic(os.environ):
            self._optimizers.forget_dropped()
        hosts = gather_texts(socket.gethostname(), "live.hosts")
        helps = self._helper is not None
        own = why_not(self.living(), self.barred, self.own_because, has_helper=helps)
        if reason := refused(own, self.living()):
            self._refuse(reason)
            return
        abilities = self._attacher.abilities()
        self._send(lambda: begin_message(hosts, abilities))
        self._clock.begin_tuning(perf_counter())

    def _try_to_obey(self, message: Message) -> None:
        try:
            self._obey(message)
        except NotNowError as error:  # on all ranks
            self._postponed, self._busy = message, f"after each step {error.message}"
            self.vanished.trial_ends(measured=False)
            self._send(lambda: {"type": "postponed"})
        else:
            self._postponed, self._busy = None, ""

    def _obey(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("trial", "probe") and self._after_study.now:  # the first after drift
            self._after_study.end()
            self._clock.begin_tuning(perf_counter())
        if kind == "trial":
            self._best = strategy_of(message["best"])
            self._begin_trial(message)
        elif kind == "probe":
            link = probe_in_place(message["hosts"], gradient_device(self.living()))
            self._send(lambda: {"type": "link", "link": link and vars(link)})
        elif kind == "use":
            self._go_on(*strategy_of(message))
        elif kind == "train":
            if self._go_on(*strategy_of(message)):
                self._train(message["expected_step_s"])
        elif self._go_on(*self._best):  # the helper has ended, with a word or without
            stays = self._best[0] and not message.get("lossy_ended")
            kept = "; the best strategy that is known stays" if stays else ""
            self._end(message.get("reason", "the process that tunes has ended") + kept)

    def _begin_trial(self, message: Message) -> None:
        began, spec = perf_counter(), TrialSpec.from_json(json.dumps(message["spec"]))
        self.vanished.trial_begins(spec.strategy)
        self._send(lambda: {"type": "begun"})
        problem = self._use(spec.strategy, spec.classes)
        since = self._steps - self._last_end
        self._trial = trial = LiveTrial(spec, began, message["left_s"], since)
        if problem:
            self._finish(trial, TrialStatus.CRASHED, problem)

    def _finish(self, trial: LiveTrial, status: TrialStatus, reason: str) -> None:
        device = device_name(gradient_device(self.living()))
        result = trial.result(status, reason, device=device, owned=self._optimizers.fixed)
        self._trial, self._last_end = None, self._steps
        self.profiling.close()
        self.vanished.trial_ends(measured=status.measured)
        if result is not None:
            self._send(lambda: {"type": "result", "result": result.to_json()})
            self._line.result_sent()

    def _use(self, strategy: Strategy, classes: Classes) -> str:
        """Go on under a strategy; returns why that is impossible, empty if it was done."""
        if strategy == self._strategy:
            return ""
        try:
            common = switchable_on_all(self._optimizers.all)
            self._attacher.attach(common, strategy, classes)
        except (ConfigurationError, CannotReinitializeError, NotOnAllError) as error:
            self._strategy = None  # some optimizers may have switched
            return error.message  # alike on all ranks
        self._strategy, self._classes, self._late = strategy, classes, False
        return ""

    def _go_on(self, strategy: Strategy, classes: Classes) -> bool:
        """Go on under the best strategy, or else under the default; then the tuning has ended."""
        self._best = strategy, classes  # also if it has to wait
        if problem := self._use(strategy, classes):
            kept = self._use(Strategy(), {}) and ", nor can the default"
            self._end(f"the best strategy cannot be attached{kept}: {problem}")
        return not problem

    def _include_late(self, strategy: Strategy) -> None:
        """Let optimizers that the script has created since follow the strategy, too."""
        self._late, self._strategy = False, None
        try:
            problem = self._use(strategy, self._classes)
            if problem and self._trial is not None:
                self._finish(self._trial, TrialStatus.CRASHED, problem)
            elif problem:
                self._go_on(*self._best)
        except NotNowError:  # on all ranks; the next boundary tries it again
            self._late, self._strategy = True, strategy

    def _train(self, expected_step_s: float) -> None:
        """The study has ended: only watch the steps from now on."""
        spent_s, steps = self._clock.spent_s(perf_counter()), self._clock.steps
        switched = {"type": "switched", "step": self._steps, "steps": steps, "spent_s": spent_s}
        self._send(lambda: switched)
        self._after_study.begin(expected_step_s)

    def lossy_ended(self) -> None:
        """The loss guard has ended what is lossy; on all ranks in the same step.

        The tuning ends at the next boundary.
        """
        reason = "the loss guard has ended its lossy strategy"
        self._postponed = {"type": "stop", "reason": reason, "lossy_ended": True}
        self._boundary_at = self._steps + 1

    def _script_ended(self) -> None:
        """The script has ended by itself or by Ctrl-C, not by another exception or after one."""
        raised = getattr(sys, "last_value", None)
        failed = self.failed or not isinstance(raised, KeyboardInterrupt | None)
        if self._helper is not None and current.live is self and not failed:
            if raised is None:
                leave_note(ENDED_NOTE)
            self._close({"type": "end", "steps": self._steps})

    def _refuse(self, reason: str) -> None:
        """Train on untuned, or end on all ranks, so that launched trials follow; a collective."""
        if hand_over(self._refusal, reason):
            self._close({"type": "refused", "reason": reason})
            leave()
        self._end(with_remedy(reason))

    def _end(self, reason: str) -> None:
        """End the tuning without a conclusion."""
        self._ended, self._trial = True, None
        self.profiling.close()
        if self._strategy in (Strategy(), current.strategy):  # its step time may be known
            self._after_study.end()
            current.watch = self.watch
        if not self._after_study.now:  # else steps are still watched for drift
            self._optimizers.ignore_saves()
        if rank() == 0:
            what = "live tuning has ended" if self._clock.tuned else "this training is not tuned"
            print_line(f"{what}: {reason}")
            leave_note(TUNING_ENDED_NOTE, f"{what}: {reason}")
        self._close({"type": "refused", "reason": reason})

    def ranks_change(self) -> None:
        """Let the study be."""
        self._close({"type": "reset", "vanished": self.vanished.ranks_change(failed=self.failed)})

    def _close(self, message: Message) -> None:
        """Let the helper end, with its last message."""
        self._send(lambda: message)
        if self._helper is not None:
            self._helper.close()

    def _send(self, compose: Callable[[], Message]) -> None:
        if self._helper is not None:
            self._helper.send(compose())

    def living(self) -> list[Any]:
        """Return the optimizers that the script still holds."""
        return self._optimizers.living
