"""The gradient exchange of one optimizer: attached to it with a plan, and detached between steps.

A gradient exchange brings along what its plan needs: a dispatcher with buckets, owners' steps for
``sharded``, deferred updates for ``priority``, watched layers for ``factors``. Between two steps it
can be detached, and another attached in its place. The optimizer then has whole parameters and
states on every rank, as Horovod's own would.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import agree_any, agree_order
from hvd_autosync.runtime.collectives.levels import two_levels
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.runtime.exchange.buckets import Bucket
from hvd_autosync.runtime.exchange.deferred_update import DeferredUpdate, collect_dropped
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.factors import agree_linear
from hvd_autosync.runtime.exchange.planning import Planning
from hvd_autosync.runtime.exchange.zero_step import FetchedStates, ZeroStep
from hvd_autosync.runtime.patches.linear import watch_linear
from hvd_autosync.search_space.exchange_plan import ExchangePlan, check_parameters


class GradientExchange:
    """Reduces an optimizer's gradients by a plan; creating it attaches it, which is a collective.

    In the first step gradients are sent at its end, because buckets follow their order of arrival.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        plan: The plan.
        names: Parameter -> its name and its class; of all that the optimizer reduces, in its order.
        scaling: Factors of the reductions.

    Attributes:
        name: Its name.
        plan: The plan.
        parameters: All that the optimizer reduces, in its order.
        dispatcher: Sends the gradients.

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
    ) -> None:
        check_plan(plan, names)
        self.plan = plan
        self.name = name
        self.parameters = list(names)
        self._planning = Planning(plan, names, scaling)
        self._linear = watch_linear(
            p for p, (_, own) in names.items() if plan.of(own).exchange == "factors"
        )
        self.dispatcher = Dispatcher(
            name,
            self._make_buckets,
            self._planning.plain(self.parameters),
            self._some_rank_is_absent,
            priority=plan.order == "priority",
        )
        self._zero_step: ZeroStep | None = None
        self._close_server: Callable[[], object] = lambda: None
        if plan.sharded:
            fetched = FetchedStates()
            server = StateServer(name, fetched.answer)
            # Another rank may save an optimizer that this one has dropped.
            closing = weakref.finalize(optimizer, server.close)
            closing.atexit = False
            self._close_server = closing
            zero_step = ZeroStep(name, optimizer, self.dispatcher, fetched, server.fetch_all)
            self._zero_step = zero_step
        self._deferred_update: DeferredUpdate | None = None
        if plan.order == "priority":
            collect_dropped(self.parameters)
            self._deferred_update = DeferredUpdate(optimizer, self.dispatcher)

    def detach(self) -> None:
        """End between two steps, with whole states on every rank; a collective.

        Raises:
            ConfigurationError: Gradients have arrived on some rank that no step has used yet.
        """
        if any(agree_any([self.dispatcher.begun], f"{self.name}.begun")):
            raise ConfigurationError(
                "the exchange of gradients cannot change between backward() and step()",
                hint="Change it after step().",
            )
        if self._deferred_update is not None:
            self._deferred_update.close()
        self.collect()
        self._close_server()
        self._linear = {}
        self.dispatcher.close()

    def computed(self, parameter: torch.nn.Parameter) -> None:
        """A backward pass has added to the gradient of ``parameter``."""
        if self._deferred_update is not None:
            self._deferred_update.arrived(parameter)

    def arrived(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete."""
        self.dispatcher.arrived(parameter)

    def synchronize(self, *, in_step: bool) -> None:
        """Wait until gradients can be used.

        Args:
            in_step: Whether the optimizer's own step alone uses them.
        """
        deferred: Collection[Bucket] = ()
        if self._deferred_update is not None:
            self._deferred_update.settle_all()
            deferred = self._deferred_update.choose() if in_step else ()
        if self._zero_step is not None:
            self._zero_step.vote(in_step=in_step)
        self.dispatcher.finish(deferred)
        if self._zero_step is not None:
            self._zero_step.synchronized()
        if self._deferred_update is not None and deferred:
            self._deferred_update.begin(deferred)

    def step_ended(self) -> bool:
        """The optimizer's step is over; returns whether parameters are still to be shared."""
        if self._deferred_update is not None:
            self._deferred_update.put_back()
        return self._zero_step is not None and self._zero_step.put_back()

    def share_parameters(self) -> None:
        """Distribute what owners have stepped."""
        if self._zero_step is not None:
            self._zero_step.share()

    def settle(self) -> None:
        """Make all deferred updates."""
        if self._deferred_update is not None:
            self._deferred_update.settle_all()

    def before_loading(self) -> None:
        """End what some ranks have begun, because the optimizer is about to load states."""
        self.settle()
        self.dispatcher.finish_if_started()
        self.forget_states()

    def collect(self) -> None:
        """Let every rank have the whole states; a collective."""
        if self._zero_step is not None:
            self._zero_step.collect()

    def forget_states(self) -> None:
        """Drop the owners' states, because others are about to be loaded."""
        if self._zero_step is not None:
            self._zero_step.forget()

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """As :meth:`ZeroStep.whole_states`; empty if every rank has them."""
        return {} if self._zero_step is None else self._zero_step.whole_states()

    def dropping_gradients(self) -> AbstractContextManager[None]:
        """As :meth:`DeferredUpdate.dropping_gradients`."""
        if self._deferred_update is None:
            return contextlib.nullcontext()
        return self._deferred_update.dropping_gradients()

    def _make_buckets(self, arrivals: Iterable[torch.nn.Parameter]) -> list[Bucket]:
        # Parameters whose gradients never arrived come last, in the optimizer's order.
        parameters = self.parameters
        index = {parameter: i for i, parameter in enumerate(parameters)}
        arrived = dict.fromkeys([*arrivals, *parameters])
        order = agree_order([index[parameter] for parameter in arrived], self.name)
        sparse = agree_any([_has_sparse_gradient(p) for p in parameters], self.name)
        chosen = agree_linear(parameters, self._linear, self.name)
        self._linear = {}  # buckets hold those of theirs; the others are watched no longer
        return self._planning.buckets(
            [parameters[i] for i in order],
            {p for p, flag in zip(parameters, sparse, strict=True) if flag},
            chosen,
        )

    def _some_rank_is_absent(self) -> None:
        for layer in self._linear.values():
            layer.clear()
        self.collect()


def check_plan(plan: ExchangePlan, names: Mapping[torch.nn.Parameter, tuple[str, str]]) -> None:
    """Check that a plan fits the parameters and the job.

    Args:
        plan: The plan.
        names: Parameter -> its name and its class.

    Raises:
        SpaceError: It does not.
    """
    if plan.two_levels:
        two_levels()  # raises if there are none
    check_parameters(plan, {n: (c, tuple(p.shape)) for p, (n, c) in names.items()})


def _has_sparse_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse
