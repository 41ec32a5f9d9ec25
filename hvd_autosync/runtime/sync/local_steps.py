"""Local steps: ranks train separately for the steps of a round, then average their parameters.

A round never extends beyond the end of an epoch, so that whatever a script evaluates or saves
between epochs is the same on all ranks. While no epoch end has been seen, and before the schedule's
start, gradients are exchanged in every step as without a schedule::

    parallel ... | vote | H steps, average | H steps, average | ...
                          ^     ^ in the backward of the last step ranks agree that the round ends,
                          |       or after it, where an epoch ends
                          in that of the first step they agree on the length
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from hvd_autosync.runtime.collectives.agreement import agree_steps, same_on_all, tell_all
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, size
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook, remove_join_hook
from hvd_autosync.runtime.patches.scalers import equalize_loss_scale
from hvd_autosync.runtime.state.normalization import RunningStatistics
from hvd_autosync.runtime.state.progress import EpochProgress
from hvd_autosync.runtime.state.rank_states import RankStates, States
from hvd_autosync.runtime.sync.averaging import Averaging
from hvd_autosync.runtime.sync.equal_states import equalize_states
from hvd_autosync.runtime.sync.nested import Nested
from hvd_autosync.runtime.sync.phase import Phase, TrainingPhase, Votes
from hvd_autosync.runtime.sync.proposal import Proposal, RoundAverage, RoundEnd
from hvd_autosync.search_space.schedule import Schedule

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
#: Key of an entry of checkpoints; it is part of their format.
_ROUNDS = "hvd_autosync_rounds"
#: In a round of H steps, the first H / this are near the average that it began with.
_NEAR = 32


class LocalSteps(Nested, JoinHook):
    """The rounds of one optimizer; creating it attaches it, which is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        inner: Exchanges the gradients before the first round, and whenever there are no rounds.
        schedule: Lengths of the rounds.
        averaging: Averages the parameters.
        phase: The phase of the training.
        progress: Counts its steps.

    Attributes:
        states: The optimizer state of each rank.
        owed: Whether gradients were synchronized without a step being made of them.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        inner: SyncMethod,
        schedule: Schedule,
        averaging: Averaging,
        phase: TrainingPhase,
        progress: EpochProgress,
    ) -> None:
        super().__init__(inner)
        self.states = RankStates(name, optimizer)
        self._name = f"hvd_autosync.rounds.{name}"
        # Weak, so that an optimizer dropped in an open round is collected on all ranks at once.
        self._optimizer = weakref.ref(optimizer)
        self._schedule = schedule
        self._averaging = averaging
        self._phase = phase
        self._progress = progress
        register_join_hook(self)
        self._proposal: Proposal | None = None
        #: The end of the round, if others have been told of it.
        self._end: RoundEnd | None = None
        self._length = self._done = 0
        #: The average at the end of this round; between two rounds, that of the last.
        self._average = RoundAverage.ALL
        self._votes = Votes(
            "local steps have not begun: no epoch end seen yet. Use a torch.utils.data.DataLoader "
            "with a length, or call hvd_autosync.average(optimizer) where parameters must be the "
            "same on all ranks"
        )
        self.owed = False
        #: Whether ranks have left ``join()`` since parameters were last equal.
        self._joined = False
        self._lock = threading.Lock()
        self._statistics = RunningStatistics(f"rounds.{name}", lambda: averaging.parameters)

    @property
    def running(self) -> bool:
        """Whether steps are local now, so that gradients are not exchanged."""
        return self._phase.now is Phase.ROUNDS

    @property
    def _apart(self) -> bool:
        """Whether ranks have states of their own."""
        return self._phase.now in (Phase.ROUNDS, Phase.RESTORED)

    @property
    def step(self) -> int:
        """Steps so far."""
        return self._progress.step

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete, in a local step for this rank's own use."""
        if self.running:
            self._gradient_arrived()
        else:
            self.inner.on_gradient_ready(parameter)

    def settle_skipped(self) -> None:
        """Count the skipped step whose gradients were synchronized, with all that counts steps."""
        if self.running and self.owed:
            self._owner._sync.end_skipped()

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        """The optimizer or the script is about to use the gradients of a local step.

        A script may make no step of them, for example if those of its own rank alone have
        overflowed. The step counts nevertheless: otherwise this rank would reach the end of its
        epoch a step before the others.
        """
        if not self.running:
            with self.states.waiting():
                self.inner.on_synchronize(in_step=in_step, fresh=fresh)
        elif fresh:
            if self._done == 0:
                self._begin_after_join()
            self.owed = True

    def run_step(self, step: Callable[[], _T]) -> _T:
        """Run the optimizer's own step; other ranks do not read its states meanwhile."""
        if not self._apart:
            return self.inner.run_step(step)
        with self.states.changing():
            return self.inner.run_step(step)

    def on_step_end(self) -> None:
        """A step was made; a collective at the end of a round."""
        if not self.running:
            self.inner.on_step_end()
            restored = self._phase.now is Phase.RESTORED
            if restored:
                equalize_loss_scale(self._owner, self._name)
            begins = restored or self._votes.due(self.step, max(self._schedule.start, 1))
            if begins and self._phase.now is not Phase.EXACT:
                self._vote()
            return
        self.owed = False
        self.states.forget_loaded()
        self._gradient_arrived()  # if none has
        if self._done == 0:
            self._begin_round()
        self._progress.stepped()
        self._done += 1
        if self._done == self._length:
            self._end_round(early=False)

    def on_skip(self) -> None:
        """A gradient scaler may have skipped the step, in a local step that of this rank alone."""
        if self.running:
            self.settle_skipped()
        else:
            self.inner.on_skip()

    def about_to_join(self) -> None:
        """Finish what this rank has begun with the others: a new round's agreement, or its end."""
        self._end_as_told()
        if self._proposal is not None:
            self._proposal.agreed()
        self._proposal = None

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective."""
        alike = same_on_all([self.step, self._done], f"{self._name}.joined")
        self._progress.step = agree_steps(self.step, self._name)
        self._votes.last = self.step
        if self.running and self._done and alike:
            self._end_round(early=True)
            return
        self._joined = self.running
        self._forget_round()

    def at_sync_point(self, why: SyncPoint) -> None:
        """Make parameters and statistics equal now; a collective."""
        if why is SyncPoint.SCRIPT:
            self._progress.script_averages = True
        self.average()

    def average(self) -> None:
        """Make parameters and statistics equal now, exactly; a collective."""
        self.settle_skipped()
        if self._phase.now is Phase.RESTORED:
            self._average_parameters()
            return
        told = self._end is not None
        self._end_as_told()
        if self._done:
            self._end_round(early=True)
        elif (told or not self.average_is_exact) and self._proposal is None:
            # A rank that trains on instead would wait here for this one, not at the round's end.
            Proposal(self._name, 0).agreed()
            self._end_round(early=True)

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks."""
        if self.running:
            return self._done == 0 and not self.owed
        return self._phase.now is not Phase.RESTORED

    @property
    def average_is_exact(self) -> bool:
        """As of :class:`SyncMethod`."""
        if not self.running or self._average is not RoundAverage.PARAMETERS:
            return True
        return not (self._averaging.dispatcher.left_outs or self._statistics.tensors)

    @property
    def in_round(self) -> bool:
        """As of :class:`SyncMethod`."""
        return self._done > 0 if self.running else self._phase.now is Phase.RESTORED

    @property
    def round_steps(self) -> int:
        """Steps of the current round; 0 if there is none."""
        return self._length if self.running else 0

    @property
    def near_average(self) -> bool:
        """Whether parameters are equal, or so few steps old that they are near the average.

        These are the first steps of a long round: the one loss at its beginning, among hundreds,
        would tell too little of the average.
        """
        return self.replicas_in_sync or (self.running and self._done * _NEAR < self._length)

    def make_whole(self) -> None:
        """Leave the rounds, now that parameters are equal; a collective.

        Optimizer states become equal (:func:`equalize_states`), and the loss scale its minimum.
        """
        if self._apart:
            equalize_states(self._name, self._owner, self._averaging)
            equalize_loss_scale(self._owner, self._name)
            self._phase.enter(Phase.EXCHANGE)
        self._forget_round()
        super().make_whole()

    def make_exact(self, *, together: bool) -> None:
        """Exchange gradients uncompressed in every step; parameters are equal on all ranks now."""
        self.make_whole()
        self._end_rounds()
        super().make_exact(together=together)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs for the schedule to go on, with all ranks' states."""
        saved = {
            **self._place(),
            "codecs": self._averaging.dispatcher.codec_states(),
            "codecs_rank": self.states.rank,
            "ranks": self.states.save() if self._apart else {},
        }
        return {**super().state_dict(), _ROUNDS: saved}

    def load_state_dict(self, entries: dict[str, Any]) -> States | None:
        """Continue where :meth:`state_dict` was called; an open round starts over.

        Returns:
            This rank's optimizer state by place of the parameter, if it had one of its own.
        """
        super().load_state_dict(entries)
        saved = entries.get(_ROUNDS)
        if not saved:
            return None
        self._go_to(saved)
        if self._phase.now is Phase.EXACT:
            return None  # replicas with states of their own would drift apart
        self._averaging.dispatcher.load_codec_states(saved["codecs"], saved.get("codecs_rank"))
        return self.states.load(saved["ranks"])

    def share(self, root: int) -> None:
        """Let all ranks continue where rank ``root`` is; a collective."""
        text = tell_all(json.dumps(self._place()).encode(), f"{self._name}.place", root)
        self._go_to(json.loads(text))
        self.states.share(root)
        equalize_loss_scale(self._owner, self._name)
        super().share(root)

    def detach(self) -> dict[str, Any]:
        """End the rounds with an exact average, which has what error feedback has kept.

        A collective. Optimizer states are equal afterwards.

        Returns:
            As of :meth:`SyncMethod.detach`.
        """
        self.settle_skipped()
        if self._phase.now is Phase.RESTORED:
            self._average_parameters()
        elif self.running:
            self._begin_after_join()
            self._end_as_told()
            self._end_round(early=True)
        self.make_whole()
        self.states.close()
        remove_join_hook(self)
        self._averaging.close()
        return super().detach()

    def _place(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "highest": self._progress.highest,
            "samples": self._progress.epochs.samples,
            "length": self._length,
            "done": self._done,
            "running": self._apart,
            "stopped": self._phase.now is Phase.EXACT,
        }

    def _go_to(self, place: dict[str, Any]) -> None:
        self._progress.step, self._progress.highest = place["step"], place["highest"]
        self._progress.epochs.samples = place["samples"]
        if place["stopped"]:
            self._end_rounds()
        elif self._phase.now is not Phase.EXACT:
            self._phase.enter(Phase.RESTORED if place["running"] else Phase.EXCHANGE)
        self._votes.last = self.step - Votes.EVERY
        self._forget_round()

    def _forget_round(self) -> None:
        """Begin the next round, if there is one, as the first."""
        self._length = self._done = 0
        self._proposal = self._end = None
        self._average = RoundAverage.ALL

    def _end_rounds(self) -> None:
        """There is no round any more."""
        self._phase.enter(Phase.EXACT)
        self._averaging.close()

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _vote(self) -> None:
        """Begin local steps if the schedule has some, and every rank can make and save them.

        A collective. Rounds of one step do not count: with exchanged gradients moments stay equal
        on all ranks. They do for replicas restored from the middle of rounds, which differ.
        """
        self._votes.last = self.step
        progress = self._progress
        known = progress.epochs.seen or progress.script_averages
        length = self._schedule.length(self.step, progress.rate, progress.highest)
        wanted = length > 1 or self._phase.now is Phase.RESTORED
        own = known and wanted and self.states.can_be_sent()
        ready = torch.tensor([int(own)], device="cpu")
        in_favour = allreduce(ready, op=Sum, name=f"{self._name}.vote").item()
        if self._votes.passed(in_favour, self.step, wanted=wanted, known=known):
            if self._phase.now is Phase.RESTORED:
                self._average_parameters()
            self._phase.enter(Phase.ROUNDS)
            self._averaging.begin()

    def _begin_after_join(self) -> None:
        """Begin the round from what is equal on all ranks again, as after a broadcast."""
        if self._joined:
            self._averaging.begin()
            self._joined = False

    def _gradient_arrived(self) -> None:
        with self._lock:  # backward runs hooks in one thread for each device
            if self._done == 0:
                if self._proposal is None:
                    self._propose()
            elif self._ends_told and self._done == self._length - 1 and self._end is None:
                self._end = RoundEnd(self._name, early=False)

    @property
    def _ends_told(self) -> bool:
        """Whether others are told of the end of this round in its last backward.

        Not where an epoch ends with it: others may be in the script's next operation when a rank
        that fails after that backward leaves its loader, and would wait for it.
        """
        return self._average is RoundAverage.PARAMETERS

    def _average_parameters(self) -> None:
        """Make replicas equal that have diverged since a resume.

        They diverge because each rank has its own moments.
        """
        self._averaging.average_tensors("parameters", self._averaging.parameters, size())

    def _propose(self) -> None:
        progress = self._progress
        known = progress.epochs.remaining()
        most = 1 if known is None and not self._progress.script_averages else known
        highest = max(progress.highest, progress.rate)
        length = self._schedule.length(self.step, progress.rate, highest, most)
        # What the script has set since an exact average is no change for a codec to send in part.
        sends_set = self._average is RoundAverage.ALL and self._averaging.touched
        length = 1 if sends_set else length
        self._proposal = Proposal(
            self._name, length, ends_epoch=known == length, sends_set=sends_set
        )

    def _begin_round(self) -> None:
        assert self._proposal is not None
        self._length, self._average = self._proposal.agreed()
        _LOG.debug("step %d: a round of %d steps begins", self.step, self._length)
        self._proposal = None

    def _end_as_told(self) -> None:
        """End the round between the last backward and its step, if there is one that ends there.

        Others have been told that it ends as agreed, and may make the step before.
        """
        if self._end is not None:
            self._end_round(early=False)

    def _end_round(self, *, early: bool) -> None:
        self._done = 0
        end = self._end or RoundEnd(self._name, early=early)
        self._end = None
        ranks = end.agreed()
        if early and self._average is RoundAverage.PARAMETERS:
            self._average = RoundAverage.ALL
        exact = self._average is not RoundAverage.PARAMETERS
        self._averaging.exchange(exact=exact)
        self._averaging.take(ranks)
        if exact:
            self._statistics.average(ranks)
