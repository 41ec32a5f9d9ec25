"""The gradient exchange of one optimizer: attached to it with a plan, and detached between steps.

A gradient exchange brings along what its plan needs: a dispatcher with buckets, owners' steps for
``sharded``, deferred updates for ``priority``, watched layers for ``factors``. Between two steps it
can be detached, and another attached in its place. The optimizer then has whole parameters and
states on every rank, as Horovod's own would.

Owners' steps and deferred updates are no methods around it: both are of buckets, of which one plan
may have either kind, and each step interleaves them with what the dispatcher does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from hvd_autosync.runtime.collectives.agreement import agree_any, agree_most, agree_order
from hvd_autosync.runtime.collectives.levels import check_levels, two_levels
from hvd_autosync.runtime.collectives.operations import copies_to_host, rank, size
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.exchange.buckets import Bucket, GradientBucket, dense_gradient
from hvd_autosync.runtime.exchange.changed_gradients import HELD, ChangedGradients, Habits
from hvd_autosync.runtime.exchange.deferred_update import DeferredUpdate, collect_dropped
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.factors import agree_linear, pays
from hvd_autosync.runtime.exchange.planning import Planning, share_memory
from hvd_autosync.runtime.exchange.zero_bucket import can_be_owned
from hvd_autosync.runtime.exchange.zero_step import FetchedStates, ZeroStep
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.patches.linear import watch_linear
from hvd_autosync.runtime.state.progress import Progress
from hvd_autosync.search_space.exchange_plan import (
    BY_FACTORS,
    HIERARCHICAL_FACTORS,
    ExchangePlan,
    check_parameters,
)
from hvd_autosync.util.weak_methods import once_gone, weakly

_T = TypeVar("_T")
#: Keys of entries of checkpoints, which are part of their format.
CODEC_STATES = "hvd_autosync_codecs"
_CODEC_RANK = "hvd_autosync_codecs_rank"


class GradientExchange(SyncMethod):
    """Reduces an optimizer's gradients by a plan; creating it attaches it, which is a collective.

    In the first step gradients are sent at its end, because buckets follow their order of arrival.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        plan: The plan.
        names: Parameter -> its name and its class; of all that the optimizer reduces, in its order.
        scaling: Factors of the reductions.
        progress: Counts the steps.
        habits: What exchanges before have noticed, to which this one adds.

    Attributes:
        dispatcher: Sends the gradients.
        arrival_order: The parameters in the order in which their gradients arrived in the first
            step, once that is over; the same on all ranks.

    Raises:
        SpaceError: The plan does not fit the parameters or the job.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        plan: ExchangePlan,
        names: Mapping[torch.nn.Parameter, tuple[str, str]],
        scaling: Scaling,
        progress: Progress,
        habits: Habits,
    ) -> None:
        check_plan(plan, names)
        self._name = name
        self._rank = rank()  # a script may save once it has shut Horovod down
        self._parameters = list(names)
        self._progress = progress
        self._by_owners = False
        #: Gradients of this step as they have arrived, but in the form in which they are sent.
        self._arrived: dict[torch.nn.Parameter, torch.Tensor] = {}
        #: Parameters whose gradients are exchanged as sparse tensors, with their dimensions.
        self._by_rows: dict[torch.nn.Parameter, int] = {}
        #: Sparse gradients of this step, which dense buckets make dense, and their sparse
        #: dimensions.
        self._sparse: dict[torch.nn.Parameter, int] = {}
        self.arrival_order: list[torch.nn.Parameter] = []
        #: Whether gradients were exchanged of which no step was made.
        self._owed = False
        self._planning = Planning(plan, names, scaling, weakly(self._hold))
        ranks = size()
        self._linear = watch_linear(
            (p for p, (_, own) in names.items() if plan.of(own).exchange in BY_FACTORS),
            worth=lambda rows, weight, item_bytes: pays(ranks * rows, weight, item_bytes),
        )
        self.dispatcher = Dispatcher(
            name,
            self._make_buckets,
            self._planning.plain(self._parameters),
            self._some_rank_is_absent,
            priority=plan.order == "priority",
        )
        # In the first step nothing is sent before its end, so there is time for more.
        self.dispatcher.changes = ChangedGradients(with_bits=plan != ExchangePlan())
        self._habits = habits
        self._zero_step: ZeroStep | None = None
        self._close_server: Callable[[], object] = lambda: None
        if plan.sharded:
            fetched = FetchedStates()
            server = StateServer(name, fetched.answer)
            # Another rank may save an optimizer that this one has dropped.
            self._close_server = once_gone(optimizer, server.close)
            sharded = [p for p, (_, own) in names.items() if plan.of(own).exchange == "sharded"]
            owned = list(filter(can_be_owned, sharded))
            self._zero_step = ZeroStep(
                name, optimizer, self.dispatcher, fetched, server.fetch_all, owned
            )
        self._deferred_update: DeferredUpdate | None = None
        if plan.order == "priority":
            collect_dropped(self._parameters)
            self._deferred_update = DeferredUpdate(optimizer, self.dispatcher)

    def on_gradient_added(self, parameter: torch.nn.Parameter) -> None:
        """A backward pass has added to the gradient of ``parameter``."""
        if self._zero_step is not None:
            self._zero_step.gradients_change()
        if self._deferred_update is not None:
            self._deferred_update.arrived(parameter)

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete."""
        gradient = parameter.grad
        if gradient is not None:
            if gradient.is_sparse:
                self._sparse[parameter] = gradient.sparse_dim()
                if self.dispatcher.buckets and parameter not in self._by_rows:
                    gradient = dense_gradient(parameter)
            elif not gradient.is_contiguous():
                gradient = dense_gradient(parameter)
            self._arrived[parameter] = gradient
            if self.dispatcher.changes is not None:
                self.dispatcher.changes.note(parameter, gradient)
        self.dispatcher.arrived(parameter)

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        """Wait until gradients can be used.

        Args:
            in_step: Whether the optimizer's own step alone uses them.
            fresh: Whether there are new ones; on some rank there may be in any case.
        """
        self._owed = True
        deferred: Collection[Bucket] = ()
        if self._deferred_update is not None:
            self._deferred_update.settle_all()
        self._put_back_replaced()
        if self.dispatcher.changes is not None:
            self._notice_changes(self.dispatcher.changes)
        if self._deferred_update is not None:
            deferred = self._deferred_update.choose(in_step=in_step)
        if self._zero_step is not None:
            self._zero_step.vote(in_step=in_step)
        self.dispatcher.finish(deferred)
        if self._zero_step is not None:
            self._zero_step.synchronized()
        self._make_sparse_again(deferred)
        if self._deferred_update is not None and deferred:
            self._deferred_update.begin(deferred)

    def run_step(self, step: Callable[[], _T]) -> _T:
        """Run the optimizer's own step, on what this rank is to step now."""
        try:
            return step()
        finally:
            if self._deferred_update is not None:
                self._deferred_update.put_back()
            self._by_owners = self._zero_step is not None and self._zero_step.put_back()

    def on_step_end(self) -> None:
        """A step was made: distribute what owners have stepped."""
        self._owed = False
        if self._zero_step is not None and self._by_owners:
            self._by_owners = False
            self._zero_step.share()
        self._progress.stepped()

    @property
    def keeps_left_out(self) -> bool:
        """As of :class:`SyncMethod`."""
        return bool(self.dispatcher.left_outs)

    def on_skip(self) -> None:
        """A gradient scaler may have skipped the step, on all ranks: then error feedback restarts.

        It has the gradients of that step, and lacks what was sent. To restore it takes a copy of
        it, or of the gradients.
        """
        if self._owed:
            self._owed = False
            for left_out in self.dispatcher.left_outs:
                left_out.zero_()

    def on_drop(self) -> None:
        """Likewise: error feedback has those gradients, which the script may have refused."""
        self.on_skip()

    def on_rescale(self, factor: float) -> None:
        """The loss scale was multiplied by ``factor``; gradients are kept as they were scaled."""
        for left_out in self.dispatcher.left_outs:
            left_out.mul_(factor)

    def settle(self) -> None:
        """Make all deferred updates."""
        if self._deferred_update is not None:
            self._deferred_update.settle_all()

    def dropping_gradients(self) -> AbstractContextManager[None]:
        """As :meth:`DeferredUpdate.dropping_gradients`."""
        if self._zero_step is not None:
            self._zero_step.gradients_change()
        if self._deferred_update is None:
            return contextlib.nullcontext()
        return self._deferred_update.dropping_gradients()

    def before_loading(self) -> None:
        """End what some ranks have begun, because the optimizer is about to load states."""
        self.settle()
        self._arrived.clear()
        if self.dispatcher.changes is not None:
            self.dispatcher.changes.clear()
        self.dispatcher.finish_if_started()
        self._make_sparse_again()
        self.forget_states()

    def make_whole(self) -> None:
        """Let every rank have the whole states; a collective."""
        if self._zero_step is not None:
            self._zero_step.collect()

    def before_sharing(self) -> None:
        """As :meth:`make_whole`."""
        self.make_whole()

    def forget_states(self) -> None:
        """Drop the owners' states, because others are about to be loaded."""
        if self._zero_step is not None:
            self._zero_step.forget()

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """As :meth:`ZeroStep.whole_states`; empty if every rank has them."""
        return {} if self._zero_step is None else self._zero_step.whole_states()

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint: what error feedback keeps."""
        states = self.dispatcher.codec_states()
        return {CODEC_STATES: states, _CODEC_RANK: self._rank} if states else {}

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called."""
        self.dispatcher.load_codec_states(entries.get(CODEC_STATES, {}), entries.get(_CODEC_RANK))

    def make_exact(self, *, together: bool) -> None:
        """Exchange all gradients uncompressed from now on."""
        self.dispatcher.drop_codecs()

    def detach(self) -> dict[str, Any]:
        """End after a step, with whole states on every rank; a collective.

        Returns:
            As of :meth:`state_dict`.
        """
        if self._deferred_update is not None:
            self._deferred_update.close()
        self.make_whole()
        entries = {CODEC_STATES: self.dispatcher.codec_states()}
        self.abandon()
        return entries

    def abandon(self) -> None:
        """As of :class:`SyncMethod`; parts of states that other ranks have are lost."""
        if self._zero_step is not None:
            self._zero_step.close()
        self._close_server()
        self._linear = {}
        self.dispatcher.close()

    def _put_back_replaced(self) -> None:
        """Put back each gradient that the script has replaced since it has arrived.

        It may be in flight. Horovod, too, lets the step find the mean of what has arrived.
        """
        for parameter, gradient in self._arrived.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._arrived.clear()

    def _notice_changes(self, changes: ChangedGradients) -> None:
        found = changes.found()
        changes.clear()
        self._habits.changes_gradients |= found
        if found and self.dispatcher.buckets:
            # They are lost or not, by what was in flight. Ranks need not agree when each sends.
            self._hold()

    def _hold(self) -> None:
        self._habits.changes_gradients = True
        if self.dispatcher.changes is not None:
            self.dispatcher.changes.clear()  # exchanges under way still know it
            self.dispatcher.changes = None
        if not self.dispatcher.hold:
            self.dispatcher.hold = True
            warn_on_rank_0(HELD)

    def _make_sparse_again(self, deferred: Collection[Bucket] = ()) -> None:
        """Let the step find sparse gradients where backward has left such.

        Args:
            deferred: Buckets that are still under way; optimizers whose steps are deferred update
                each element by itself, as well from dense gradients.
        """
        under_way = {parameter for bucket in deferred for parameter in bucket.parameters}
        for parameter, dimensions in self._sparse.items():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and parameter not in under_way:
                parameter.grad = gradient.to_sparse(dimensions)
        self._sparse.clear()

    def _make_buckets(self, arrivals: Iterable[torch.nn.Parameter]) -> list[Bucket]:
        # Parameters whose gradients never arrived come last, in the optimizer's order.
        parameters = self._parameters
        index = {parameter: i for i, parameter in enumerate(parameters)}
        arrived = dict.fromkeys([*arrivals, *parameters])
        order = agree_order([index[parameter] for parameter in arrived], self._name)
        dimensions = agree_most(map(_sparse_dimensions, parameters), f"{self._name}.sparse")
        self._by_rows = {p: most for p, most in zip(parameters, dimensions, strict=True) if most}
        flags = agree_any(share_memory(parameters), f"{self._name}.shared")
        shared = {p for p, flag in zip(parameters, flags, strict=True) if flag}
        self.arrival_order = [parameters[i] for i in order]
        chosen = agree_linear(parameters, self._linear, self._name)
        self._linear = {}  # buckets hold those of theirs; the others are watched no longer
        buckets = self._planning.buckets(self.arrival_order, self._by_rows, shared, chosen)
        if all(isinstance(bucket, GradientBucket) for bucket in buckets):
            self.dispatcher.changes = None  # as in Horovod, a change is one of what is in flight
        elif agree_any([self._habits.changes_gradients], f"{self._name}.changed")[0]:
            self._hold()
        elif any(map(copies_to_host, parameters)):
            self.dispatcher.changes = None  # these copies look like changes
        return buckets

    def _some_rank_is_absent(self) -> None:
        for layer in self._linear.values():
            layer.clear()
        if self._zero_step is not None:
            self._zero_step.missed = True
        self.make_whole()


def check_plan(plan: ExchangePlan, names: Mapping[torch.nn.Parameter, tuple[str, str]]) -> None:
    """Check that a plan fits the parameters and the job.

    Args:
        plan: The plan.
        names: Parameter -> its name and its class.

    Raises:
        SpaceError: It does not.
    """
    if plan.even_levels:
        check_levels("hierarchical" if plan.two_levels else HIERARCHICAL_FACTORS)
    if plan.two_levels:
        two_levels()  # raises if there are none
    check_parameters(plan, {n: (c, tuple(p.shape)) for p, (n, c) in names.items()})


def _sparse_dimensions(parameter: torch.nn.Parameter) -> int:
    gradient = parameter.grad
    return gradient.sparse_dim() if gradient is not None and gradient.is_sparse else 0
