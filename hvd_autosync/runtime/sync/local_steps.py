"""Local steps: ranks train apart for the steps of a round, then average their parameters.

A round never ends after a pass over the training data does, so that whatever a script evaluates or
saves between passes is the same on all ranks. As long as no end of a pass is known, and before the
schedule's start, gradients are exchanged in every step as without a schedule::

    parallel ... | vote | H steps, average | H steps, average | ...
                          ^ lengths are agreed on in the first step of each round
"""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

import torch
from horovod.torch.mpi_ops import Sum, allreduce, allreduce_async_, size, synchronize

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import agree_steps, same_on_all, tell_all
from hvd_autosync.runtime.collectives.warn_once import WarnOnce
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.patches.join_hook import JoinHook, tell_of_joins
from hvd_autosync.runtime.state.normalization import running_statistics
from hvd_autosync.runtime.state.rank_states import RankStates, States
from hvd_autosync.runtime.sync.averaging import Averaging, moments
from hvd_autosync.search_space.schedule import Schedule

#: Parallel steps between two votes on whether local steps can begin.
_VOTE_EVERY = 8
#: Of a round of so many steps one is near the average that it began with.
_NEAR = 32


class LocalSteps(JoinHook):
    """The rounds of one optimizer.

    Args:
        name: Tells its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        schedule: Lengths of the rounds.
        averaging: Makes the parameters equal.

    Attributes:
        states: What each rank's optimizer carries.
        running: Whether steps are local now: gradients stay where they are.
        owed: Whether gradients were synchronized that no step was made of.
        step: Steps so far.
        averages: Collectives of all parameters or gradients so far.
        highest: The highest learning rate of any of them.
    """

    def __init__(self, name: str, optimizer: Any, schedule: Schedule, averaging: Averaging) -> None:
        self.states = RankStates(name, optimizer)
        self.running = False
        self.step = self.averages = 0
        self.highest = 0.0
        self._name = f"hvd_autosync.rounds.{name}"
        # Weakly: who is dropped with an open round must be gone on all ranks at once.
        self._optimizer = weakref.ref(optimizer)
        self._schedule = schedule
        self._averaging = averaging
        self._epochs = Epochs(self)
        tell_of_joins(self)
        self._proposal: _Proposal | None = None
        self._length = self._done = 0
        self._ends_pass = False
        #: Whether the script itself says when parameters must be equal.
        self._script_averages = False
        self._restored = self._stopped = self._paused = False
        self._no_ends = WarnOnce(
            "local steps wait until an end of a pass is known; feed the training by a "
            "torch.utils.data.DataLoader that has a length, or call "
            "hvd_autosync.average(optimizer) where parameters must be the same on all ranks"
        )
        self.owed = False
        #: Whether ranks have left ``join()`` since parameters were last the same.
        self._joined = False
        self._lock = threading.Lock()
        self._statistics: list[torch.Tensor] | None = None

    @property
    def samples(self) -> int:
        """Samples of this rank so far, where batches have a size."""
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
        """Gradients of a local step are about to be used, by the optimizer or by the script.

        A script may make no step of them, as where those of its own rank alone have overflowed. It
        counts, or the rank would come to the end of its pass a step before the others.
        """
        assert not self.owed, "it was settled"
        if self._joined and self._done == 0:
            # What is the same on all ranks again, as after a broadcast, is where the round begins.
            self._averaging.begin()
            self._joined = False
        self.owed = True

    def about_to_join(self) -> None:
        """Wait for what ranks hold to be the length of a round that has just begun."""
        if self._proposal is not None:
            self._proposal.agreed()
        self._proposal = None

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective."""
        self.step = agree_steps(self.step, self._name)
        self._joined = self.running
        self._length = self._done = 0

    def settle(self) -> None:
        """Count the step whose gradients were synchronized, and that was not made.

        Whoever counts steps does: the protocols, and the guard.
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
        """Make parameters equal before another pass, as for an evaluation; a collective."""
        self.average()

    def average_for_script(self) -> None:
        """The script calls for an average; it need not have passes that can be seen."""
        self._script_averages = True
        self.average()

    @property
    def equal(self) -> bool:
        """Whether parameters are the same on all ranks."""
        if self.running:
            return self._done == 0 and not self.owed
        return not self._restored

    @property
    def round_steps(self) -> int:
        """Steps of the round that runs; 0 where none does."""
        return self._length if self.running else 0

    @property
    def near_average(self) -> bool:
        """Whether parameters are equal or so few steps old that they still are near the average.

        The first steps of a long round: one loss of hundreds would tell too little of an average.
        """
        return self.equal or (self.running and self._done * _NEAR < self._length)

    def stop(self) -> None:
        """Exchange gradients in every step for good; parameters are the same on all ranks now.

        A collective.
        """
        self.pause()
        self._stopped = True

    def pause(self) -> None:
        """Have no rounds until :meth:`resume`; parameters are the same on all ranks now.

        A collective, after which moments are the same, too.
        """
        if self.running:
            found = moments(self._owner)
            described = [(name, list(value.shape)) for name, value in found]
            if same_on_all(described, f"{self._name}.moments"):
                tensors = [value for _, value in found]
                self._averaging.average_tensors("moments", tensors, size())
            else:  # as where some rank had no gradient
                self._owner.state.clear()
        self.running, self._restored, self._paused = False, False, True
        self._length = self._done = 0
        self._proposal = None

    def resume(self) -> None:
        """Have rounds again from now on, where all ranks make steps together; a collective."""
        self.step = agree_steps(self.step, self._name)
        self._paused = False

    def save(self) -> dict[str, Any]:
        """What has to be saved for the schedule to go on, with the states of all ranks."""
        return {
            **self._place(),
            "codecs": self._averaging.dispatcher.codec_states(),
            "ranks": self.states.save() if self.running or self._restored else {},
        }

    def load(self, saved: dict[str, Any]) -> States | None:
        """Go on where :meth:`save` was called; a round that was open is begun anew.

        Returns:
            This rank's optimizer state by place of the parameter, if it had one of its own.
        """
        self._go_to(saved)
        self._averaging.dispatcher.load_codec_states(saved["codecs"])
        return self.states.load(saved["ranks"])

    def share(self, root: int) -> None:
        """Let all ranks go on where rank ``root`` is; a collective."""
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
        """Begin local steps if there are any, and every rank sees its passes end; a collective.

        Rounds of one step are none: with gradients exchanged, moments stay the same on all ranks.
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
            self._no_ends.seen(self.step)
        if known:
            self._no_ends.gone()

    def _average_parameters(self) -> None:
        """Make replicas equal that moments of each rank's own have driven apart since a resume."""
        self._averaging.average_tensors("parameters", self._averaging.parameters, size())

    def _propose(self) -> None:
        known = self._epochs.remaining()
        most = 1 if known is None and not self._script_averages else known
        highest = max(self.highest, self._rate())
        length = self._schedule.length(self.step, self._rate(), highest, most)
        self._proposal = _Proposal(self._name, length, known == length)

    def _begin_round(self) -> None:
        assert self._proposal is not None
        self._length, self._ends_pass = self._proposal.agreed()
        self._proposal = None

    def _end_round(self, *, early: bool) -> None:
        self._done = 0
        self.averages += 1
        here = torch.tensor([1, early], dtype=torch.int32)
        handle = allreduce_async_(here, name=f"{self._name}.end", op=Sum)
        self._averaging.exchange()
        synchronize(handle)
        ranks, ended_early = here.tolist()
        if ended_early not in (0, ranks):
            raise ConfigurationError(
                f"{ended_early} of {ranks} ranks have ended a round of local steps early, the "
                "others go on; or one of them has failed, then see its error",
                hint="Evaluate on all ranks or between passes, where parameters are equal, or "
                "leave schedule knobs out of the strategy.",
            )
        self._averaging.take(ranks)
        if early or self._ends_pass:
            if self._statistics is None:
                self._statistics = running_statistics(self._averaging.parameters)
            self._averaging.average_tensors("statistics", self._statistics, ranks)


class _Proposal:
    """What a rank holds to be the length of the round that begins.

    Only sums, where Horovod puts in zeros for a rank that waits in ``hvd.join()``: n numbers are
    equal if n times the sum of their squares is the square of their sum.

    Args:
        name: Name of the operation.
        length: Length of the round.
        ends_pass: Whether a pass ends with it.
    """

    def __init__(self, name: str, length: int, ends_pass: bool) -> None:
        numbers = [1, length, length**2, ends_pass]
        self._sums = torch.tensor(numbers, dtype=torch.float64)
        self._handle = allreduce_async_(self._sums, name=f"{name}.length", op=Sum)

    def agreed(self) -> tuple[int, bool]:
        """The length, and whether a pass ends with it anywhere."""
        synchronize(self._handle)
        ranks, lengths, lengths_2, ending = self._sums.tolist()
        equal = ranks == size() and ranks * lengths_2 == lengths**2
        return round(lengths / ranks) if equal else 1, ending > 0
