"""Local steps: ranks train separately for the steps of a round, then average their parameters.

A round never extends beyond the end of an epoch, so that whatever a script evaluates or saves
between epochs is the same on all ranks. While no epoch end has been seen, and before the schedule's
start, gradients are exchanged in every step as without a schedule::

    parallel ... | vote | H steps, average | H steps, average | ...
                          ^ ranks agree on the length in the first step of each round
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import agree_steps, same_on_all, tell_all
from hvd_autosync.runtime.collectives.operations import (
    Sum,
    allreduce,
    allreduce_async_,
    size,
    synchronize,
)
from hvd_autosync.runtime.collectives.warn_once import WarnOnce
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook
from hvd_autosync.runtime.state.normalization import running_statistics
from hvd_autosync.runtime.state.rank_states import RankStates, States
from hvd_autosync.runtime.sync.averaging import Averaging, moments
from hvd_autosync.search_space.schedule import Schedule

_LOG = logging.getLogger(__name__)
#: Parallel steps between two votes on whether local steps can begin.
_VOTE_EVERY = 8
#: In a round of H steps, the first H / this are near the average that it began with.
_NEAR = 32


class LocalSteps(JoinHook):
    """The rounds of one optimizer.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        schedule: Lengths of the rounds.
        averaging: Averages the parameters.

    Attributes:
        states: The optimizer state of each rank.
        running: Whether steps are local now, so that gradients are not exchanged.
        owed: Whether gradients were synchronized without a step being made of them.
        step: Steps so far.
        averages: Collectives of all parameters or gradients so far.
        highest: The highest learning rate of any step so far.
    """

    def __init__(self, name: str, optimizer: Any, schedule: Schedule, averaging: Averaging) -> None:
        self.states = RankStates(name, optimizer)
        self.running = False
        self.step = self.averages = 0
        self.highest = 0.0
        self._name = f"hvd_autosync.rounds.{name}"
        # Weak, so that an optimizer dropped in an open round is collected on all ranks at once.
        self._optimizer = weakref.ref(optimizer)
        self._schedule = schedule
        self._averaging = averaging
        self._epochs = Epochs(self)
        register_join_hook(self)
        self._proposal: _Proposal | None = None
        self._length = self._done = 0
        self._ends_epoch = False
        #: Whether the script itself calls average().
        self._script_averages = False
        self._restored = self._stopped = self._paused = False
        self._no_epoch_end = WarnOnce(
            "local steps have not begun: no epoch end seen yet. Use a torch.utils.data.DataLoader "
            "with a length, or call hvd_autosync.average(optimizer) where parameters must be the "
            "same on all ranks"
        )
        self.owed = False
        #: Whether ranks have left ``join()`` since parameters were last equal.
        self._joined = False
        self._lock = threading.Lock()
        self._statistics: list[torch.Tensor] | None = None

    @property
    def samples(self) -> int:
        """Samples of this rank so far, where the batch size is known."""
        return self._epochs.samples

    def gradient_arrived(self) -> None:
        """A gradient of a local step is complete."""
        with self._lock:  # backward runs hooks in one thread for each device
            if self._done == 0 and self._proposal is None:
                self._propose()

    def stepped(self) -> None:
        """The optimizer has made a step."""
        if not self.running:
            self._count()
            self.averages += 1
            begun = self.step - max(self._schedule.start, 1)
            if self._stopped or self._paused:
                return
            if self._restored or (begun >= 0 and begun % _VOTE_EVERY == 0):
                self._vote()
            return
        self.owed = False
        self.states.forget_loaded()
        self.gradient_arrived()  # if none has
        if self._done == 0:
            self._begin_round()
        self._count()
        self._done += 1
        if self._done == self._length:
            self._end_round(early=False)

    def synchronized(self) -> None:
        """The optimizer or the script is about to use the gradients of a local step.

        A script may make no step of them, for example if those of its own rank alone have
        overflowed. The step counts nevertheless: otherwise this rank would reach the end of its
        epoch a step before the others.
        """
        assert not self.owed, "the skipped step was counted"
        if self._joined and self._done == 0:
            # The round begins from what is equal on all ranks again, as after a broadcast.
            self._averaging.begin()
            self._joined = False
        self.owed = True

    def about_to_join(self) -> None:
        """Wait for the agreement on the length of a round that has just begun."""
        if self._proposal is not None:
            self._proposal.agreed()
        self._proposal = None

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective."""
        self.step = agree_steps(self.step, self._name)
        self._joined = self.running
        self._length = self._done = 0

    def settle(self) -> None:
        """Count the skipped step whose gradients were synchronized.

        The components that count steps, protocols and guard, count it too.
        """
        if self.owed:
            self._owner._hvd_autosync_after_skip()

    def average(self) -> None:
        """Make parameters and statistics equal now, in the middle of a round; a collective."""
        self.settle()
        if self._restored:
            self._average_parameters()
        elif self._done:
            self._end_round(early=True)

    def sync_for_eval(self) -> None:
        """Make parameters equal before another loader's epoch, as for evaluation; a collective."""
        self.average()

    def average_for_script(self) -> None:
        """The script calls for an average; its epochs need not be visible."""
        self._script_averages = True
        self.average()

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks."""
        if self.running:
            return self._done == 0 and not self.owed
        return not self._restored

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

    def stop(self) -> None:
        """Exchange gradients in every step from now on; parameters are equal on all ranks now.

        A collective.
        """
        self.pause()
        self._stopped = True

    def pause(self) -> None:
        """Make no rounds until :meth:`resume`; parameters are equal on all ranks now.

        A collective that makes the moments equal too.
        """
        if self.running:
            found = moments(self._owner)
            described = [(name, list(value.shape)) for name, value in found]
            if same_on_all(described, f"{self._name}.moments"):
                tensors = [value for _, value in found]
                self._averaging.average_tensors("moments", tensors, size())
            else:  # for example if some rank had no gradient
                self._owner.state.clear()
        self.running, self._restored, self._paused = False, False, True
        self._length = self._done = 0
        self._proposal = None

    def resume(self) -> None:
        """Make rounds again, now that all ranks make steps together; a collective."""
        self.step = agree_steps(self.step, self._name)
        self._paused = False

    def save(self) -> dict[str, Any]:
        """What a checkpoint needs for the schedule to continue, with the states of all ranks."""
        return {
            **self._place(),
            "codecs": self._averaging.dispatcher.codec_states(),
            "ranks": self.states.save() if self.running or self._restored else {},
        }

    def load(self, saved: dict[str, Any]) -> States | None:
        """Continue where :meth:`save` was called; an open round starts over.

        Returns:
            This rank's optimizer state by place of the parameter, if it had one of its own.
        """
        self._go_to(saved)
        self._averaging.dispatcher.load_codec_states(saved["codecs"])
        return self.states.load(saved["ranks"])

    def share(self, root: int) -> None:
        """Let all ranks continue where rank ``root`` is; a collective."""
        text = tell_all(json.dumps(self._place()).encode(), f"{self._name}.place", root)
        self._go_to(json.loads(text))
        self.states.share(root)

    def _place(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "highest": self.highest,
            "samples": self.samples,
            "length": self._length,
            "done": self._done,
            "running": self.running or self._restored,
            "stopped": self._stopped,
        }

    def _go_to(self, place: dict[str, Any]) -> None:
        self.step, self.highest = place["step"], place["highest"]
        self._epochs.samples = place["samples"]
        self.running, self._restored = False, place["running"]
        self._stopped = place["stopped"]
        self._length = self._done = 0
        self._proposal = None

    def _count(self) -> None:
        self.highest = max(self.highest, self._rate())
        self.step += 1
        self._epochs.stepped()

    def _rate(self) -> float:
        rates = [group["lr"] for group in self._owner.param_groups]
        return max((float(rate) for rate in rates if rate is not None), default=0.0)

    @property
    def _owner(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    def _vote(self) -> None:
        """Begin local steps if the schedule has some and every rank sees its epochs end.

        A collective. Rounds of one step do not count: with exchanged gradients moments stay equal
        on all ranks.
        """
        known = self._script_averages or self._epochs.seen
        wanted = self._schedule.length(self.step, self._rate(), self.highest) > 1
        ready = torch.tensor([float(known and wanted)])
        if allreduce(ready, op=Sum, name=f"{self._name}.vote").item() == size():
            self.running = True
            if self._restored:
                self._average_parameters()
            self._averaging.begin()
            self._restored = False
        elif wanted and not known:
            self._no_epoch_end.seen(self.step)
        if known:
            self._no_epoch_end.gone()

    def _average_parameters(self) -> None:
        """Make replicas equal that have diverged since a resume.

        They diverge because each rank has its own moments.
        """
        self._averaging.average_tensors("parameters", self._averaging.parameters, size())

    def _propose(self) -> None:
        known = self._epochs.remaining()
        most = 1 if known is None and not self._script_averages else known
        highest = max(self.highest, self._rate())
        length = self._schedule.length(self.step, self._rate(), highest, most)
        self._proposal = _Proposal(self._name, length, known == length)

    def _begin_round(self) -> None:
        assert self._proposal is not None
        self._length, self._ends_epoch = self._proposal.agreed()
        _LOG.debug("step %d: a round of %d steps begins", self.step, self._length)
        self._proposal = None

    def _end_round(self, *, early: bool) -> None:
        self._done = 0
        self.averages += 1
        here = torch.tensor([1, early], dtype=torch.int32)
        # Known first: ranks that end a round for different reasons would wait for each other.
        synchronize(allreduce_async_(here, name=f"{self._name}.end", op=Sum))
        ranks, ended_early = here.tolist()
        if ended_early not in (0, ranks):
            raise ConfigurationError(
                f"{ended_early} of {ranks} ranks have ended a round of local steps early, the "
                "others have not; or one of them has failed, then see its error",
                hint="Evaluate on all ranks or between epochs, where parameters are equal, or "
                "leave the schedule knobs out of the strategy.",
            )
        self._averaging.exchange(exact=early or self._ends_epoch)
        self._averaging.take(ranks)
        if early or self._ends_epoch:
            if self._statistics is None:
                self._statistics = running_statistics(self._averaging.parameters)
            self._averaging.average_tensors("statistics", self._statistics, ranks)


class _Proposal:
    """This rank's proposal for the length of the round that begins.

    It uses sums only, where Horovod substitutes zeros for a rank that waits in ``hvd.join()``: n
    numbers are equal if n times the sum of their squares is the square of their sum.

    Args:
        name: Name of the operation.
        length: Length of the round.
        ends_epoch: Whether an epoch ends with it.
    """

    def __init__(self, name: str, length: int, ends_epoch: bool) -> None:
        numbers = [1, length, length**2, ends_epoch]
        self._sums = torch.tensor(numbers, dtype=torch.float64)
        self._handle = allreduce_async_(self._sums, name=f"{name}.length", op=Sum)

    def agreed(self) -> tuple[int, bool]:
        """The agreed length, and whether an epoch ends with it on any rank."""
        synchronize(self._handle)
        ranks, lengths, lengths_2, ending = self._sums.tolist()
        equal = ranks == size() and ranks * lengths_2 == lengths**2
        return round(lengths / ranks) if equal else 1, ending > 0
