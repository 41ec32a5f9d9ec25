"""Attaches a strategy to the optimizers of a running training, between two steps."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_any, gather_texts
from hvd_autosync.runtime.collectives.initialization import variables_read
from hvd_autosync.runtime.collectives.levels import can_add_levels, levels_to_add, made_levels
from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.collectives.reinitialize import (
    NotNowError,
    check_reinitialize,
    reinitialize,
)
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.live.memory import free_bytes
from hvd_autosync.runtime.sync.synchronizer import Synchronizer, switch
from hvd_autosync.search_space.exchange_plan import (
    HIERARCHICAL_FACTORS,
    LARGE,
    PARAMETER_CLASSES,
    Classes,
    ExchangePlan,
)
from hvd_autosync.search_space.horovod_settings import (
    CYCLE_VARIABLE,
    horovod_settings,
    is_elastic,
    live_variables,
)
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.sync_plan import SyncPlan, sync_plan

#: So many times the bytes of all gradients a strategy may need: buckets, and what is received. With
#: lossless codes also a rank's own codes and those of all, or what is decoded from these
#: (``runtime/exchange/lossless_sum.py``).
_COPIES, _LOSSLESS_COPIES = 2, 4


class Attacher:
    """Attaches strategies; the empty one is that under which the training has begun.

    The job's own values of Horovod's variables are those at its creation, except that the job sets
    none that the training's strategy has set.

    Attributes:
        variables: Horovod's variables that strategies change, as they are set now.
    """

    def __init__(self) -> None:
        self._begun = current.strategy or Strategy(), current.sync_plan or SyncPlan()
        self._plan = self._begun[1]
        self.variables = {name: os.environ.get(name) for name in live_variables()}
        unset = dict.fromkeys(dict(horovod_settings(self._begun[0]).environment))
        self._own = {name: unset.get(name, value) for name, value in self.variables.items()}

    def abilities(self) -> dict[str, bool]:
        """Return what strategies may change here; a collective.

        Returns:
            ``reinitializes``: Horovod's variables; ``adds_levels``: its process sets.
        """
        again = self.reinitializes()
        return {"reinitializes": again, "adds_levels": again and can_add_levels()}

    def reinitializes(self) -> bool:
        """Return whether strategies may change Horovod's variables here; a collective.

        What the script sets after it has imported Horovod is not known to the process that tunes.
        Ranks whose own values differ would ask for different ones. Once Horovod has read the cycle
        time, a further initialization would change the fusion threshold.
        """
        own = [name for name, value in self.variables.items() if os.environ.get(name) != value]
        of_ranks = map(json.loads, gather_texts(json.dumps(own), "live.changed"))
        if changed := sorted({name for names in of_ranks for name in names}):
            warn_on_rank_0(
                f"the script sets {', '.join(changed)} after it has imported horovod.torch, so "
                "live trials change none of Horovod's variables; set them before"
            )
            return False
        cycle = CYCLE_VARIABLE in variables_read()
        if any(agree_any([cycle], "live.cycle")):
            warn_on_rank_0(
                f"{CYCLE_VARIABLE} is set, and Horovod would fuse no more than 1 MiB after it is "
                "initialized again, so live trials change none of its variables; unset it, or tune "
                "with --autosync-mode launched"
            )
            return False
        values = gather_texts(json.dumps(self._own), "live.variables")
        differ = [
            name
            for name, *each in zip(
                self._own, *(json.loads(v).values() for v in values), strict=True
            )
            if len(set(each)) > 1
        ]
        if differ:
            warn_on_rank_0(
                f"ranks have different values of {', '.join(differ)}, so live trials change none "
                "of Horovod's variables; give all ranks the same"
            )
            return False
        reason = check_reinitialize({})
        if reason is not None:
            warn_on_rank_0(f"live trials change none of Horovod's variables: {reason}")
        return reason is None

    def attach(self, optimizers: Sequence[Any], strategy: Strategy, classes: Classes) -> None:
        """Synchronize by ``strategy`` from the next step on; a collective.

        Args:
            optimizers: Strategy optimizers, in the order of their creation.
            strategy: A strategy with the lossy knobs with which the training has begun.
            classes: Which parameters are in which class of its plan.

        Raises:
            NotNowError: Operations are under way on some rank, or a step has begun.
            ConfigurationError: The strategy does not fit the parameters, the job or some rank's
                memory.
            CannotReinitializeError: It needs other variables or process sets, and Horovod cannot
                be initialized again.
            NotOnAllError: Some rank cannot do its part, such as serve its part of the states.
        """
        plan = sync_plan(strategy, classes) or SyncPlan()
        if not strategy:
            strategy, plan = self._begun
        if plan.exchange != ExchangePlan():
            _check_memory(optimizers, _copies(plan.exchange, size()))
        settings = dict(horovod_settings(strategy).environment)
        wanted = {name: settings.get(name, own) for name, own in self._own.items()}
        # Each process set delays all operations: only a strategy that needs them has them.
        made, needed = made_levels(), plan.exchange.two_levels
        added = levels_to_add() if needed and not made else []
        removed = [] if needed else made
        before = self._plan
        if removed:  # first: no bucket may have process sets that go
            _switch(optimizers, plan)
            self._plan = plan
        if wanted != self.variables or added or removed:
            try:
                changed = {n: v for n, v in wanted.items() if v != self.variables[n]}
                reinitialize(changed, added, removed)
            except NotNowError:
                if removed:  # as if nothing had been done
                    _switch(optimizers, before)
                    self._plan = before
                raise
            self.variables = wanted
        if not removed:
            _switch(optimizers, plan)
        self._plan = plan


def _switch(optimizers: Sequence[Any], plan: SyncPlan) -> None:
    for optimizer in optimizers:
        switch(optimizer, plan)


def _copies(plan: ExchangePlan, ranks: int) -> float:
    """Return how many times the bytes of all gradients a plan may need beside them.

    An owner also keeps its share of the sums. Factors pay up to twice the gradient's bytes from all
    ranks, of which a rank also keeps its own message; over two levels it sends as much within its
    host as it receives there.
    """
    sent = _COPIES if plan.of(LARGE).exchange == HIERARCHICAL_FACTORS else 0
    if any(plan.of(name).lossless for name in PARAMETER_CLASSES):
        return _LOSSLESS_COPIES + sent
    if plan.by_factors:
        return _COPIES + sent + 2 / ranks
    return _COPIES + 1 / ranks if plan.sharded else _COPIES


def _check_memory(optimizers: Sequence[Any], copies: float) -> None:
    """Check that all ranks have memory for buckets beside the gradients; a collective."""
    gradients = [p for each in optimizers for p in each._requires_update]
    needed = math.ceil(copies * sum(p.numel() * p.element_size() for p in gradients))
    free = min((free_bytes(device) for device in {p.device for p in gradients}), default=needed)
    if any(agree_any([free < needed], "live.memory")):
        raise SpaceError(
            f"buckets and codes may need {needed >> 20} MiB beside the gradients, which some rank "
            "does not have",
            hint="Tune with --autosync-mode launched.",
        )


def with_remedy(reason: str) -> str:
    """Return why tuning has ended with what to do, where launched trials can tune the script."""
    if current.strategy is not None:
        return f"{reason}; it keeps the strategy that launched trials have found"
    possible = size() > 1 and not is_elastic(os.environ)
    return f"{reason}; tune it with --autosync-mode launched" if possible else reason


def why_not(optimizers: Sequence[Any], barred: str, own_because: str, *, has_helper: bool) -> str:
    """Return why this rank cannot be tuned live; empty if it can.

    Args:
        optimizers: The wrapped optimizers of the script.
        barred: Why it is not to be; empty: it is.
        own_because: Why an optimizer is Horovod's own, on all ranks; empty: none has to be.
        has_helper: Whether it has started the process that tunes.
    """
    if size() == 1:
        return "the job has a single rank, which synchronizes with no other"
    if rank() == 0 and not has_helper:
        return "rank 0 has not started the process that tunes"
    problem = not_switchable(optimizers)
    return barred or (problem and (own_because or problem))


def refused(own: str, optimizers: Sequence[Any]) -> str:
    """Return why some rank, or all together, cannot be tuned live; a collective.

    Args:
        own: Why this rank cannot; empty: it can.
        optimizers: The wrapped optimizers of the script.
    """
    refusals = gather_texts(own or " ", "live.refusals")
    return next((each for each in refusals if each.strip()), "") or _differing(optimizers)


def _differing(optimizers: Sequence[Any]) -> str:
    """Return why strategies fit no optimizer, as ranks have different ones; a collective.

    Horovod's own exchange, under which those of an elastic job begin, needs no such agreement.

    Args:
        optimizers: The wrapped optimizers of the script.

    Returns:
        The reason, the same on all ranks; empty if there is none.
    """
    if is_elastic(os.environ):
        counts = gather_texts(str(len(optimizers)), "live.counts")
        common = switchable_on_all(optimizers) if len(set(counts)) == 1 else []
        if not common:
            return (
                f"ranks have different optimizers, and hold {', '.join(counts)}: a script that "
                "makes its own again after a reset has to drop the one of before"
            )
        try:
            for optimizer in common:
                optimizer._sync.check()
        except ConfigurationError as error:
            return error.message
    return ""


def switchable(optimizers: Sequence[Any]) -> list[Any]:
    """Those of a script's wrapped optimizers whose synchronization can change.

    Not those with a strategy that the script has chosen, which no trial may replace.
    """
    # One without parameters to reduce has that of its class only, which is attached to nothing.
    found = [(each, vars(each).get("_sync")) for each in optimizers]
    return [each for each, sync in found if isinstance(sync, Synchronizer) and not sync.chosen]


def switchable_on_all(optimizers: Sequence[Any]) -> list[Any]:
    """Those of a script's wrapped optimizers that all ranks can change; a collective.

    Args:
        optimizers: All, in the order of their creation; ``None``: one that the script has dropped.
            Ranks collect these at different times.
    """
    own = [i for i, each in enumerate(optimizers) if each is not None and switchable([each])]
    texts = gather_texts(json.dumps(own), "live.optimizers")
    return [optimizers[i] for i in sorted(set(own).intersection(*map(json.loads, texts)))]


def has_begun(optimizer: Any) -> bool:
    """Return whether gradients of the next step have been computed, on this rank."""
    delays = optimizer._allreduce_delay.values()
    return any(delay < optimizer.backward_passes_per_step for delay in delays)


def not_switchable(optimizers: Sequence[Any]) -> str:
    """Return why strategies cannot change in this training; empty if they can.

    Args:
        optimizers: The wrapped optimizers of the script.
    """
    if not optimizers:
        return (
            "the script reduces gradients without hvd.DistributedOptimizer, and how it does that "
            "cannot change while it runs"
        )
    if any(getattr(vars(each).get("_sync"), "chosen", False) for each in optimizers):
        return (
            "the script passes strategy= to DistributedOptimizer, and a live trial would replace "
            "that strategy"
        )
    lossy = current.sync_plan is not None and current.sync_plan.lossy
    if lossy and any(getattr(vars(each).get("_sync"), "exact", False) for each in optimizers):
        return "the loss guard had ended its lossy strategy before its checkpoint was saved"
    if not switchable(optimizers):
        return "the arguments of the script's DistributedOptimizer say how gradients are exchanged"
    return ""
