"""The synchronization plan of a strategy: all that says how ranks synchronize, as one value.

It joins how gradients or changes are exchanged, when replicas are averaged, and when ranks wait for
each other. Without any knob of these the job keeps Horovod's own optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.exchange_plan import (
    PARAMETER_CLASSES,
    Classes,
    ClassPlan,
    ExchangePlan,
    replicated,
)
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.registry import KnobRegistry
from hvd_autosync.search_space.schedule import DEFAULT_CAP, Schedule


@dataclass(frozen=True)
class SyncPlan:
    """How the ranks of one training synchronize.

    Attributes:
        exchange: How gradients are exchanged, and the changes of replicas.
        classes: Which parameters are in which class of ``exchange``.
        schedule: When replicas are averaged; ``None``: after every step.
        protocol: When ranks wait for each other, and what they do about stragglers; ``None``: in
            every step, and nothing.
    """

    exchange: ExchangePlan = field(default_factory=ExchangePlan)
    classes: Classes = field(default_factory=dict, hash=False)
    schedule: Schedule | None = None
    protocol: Protocol | None = None

    @property
    def replicas_may_differ(self) -> bool:
        """Whether ranks may have different parameters between two steps."""
        return self.schedule is not None or self.protocol is not None

    @property
    def lossy(self) -> bool:
        """Whether the trained model can differ from that of exact steps."""
        return self.exchange.lossy or self.replicas_may_differ

    @property
    def effective_exchange(self) -> ExchangePlan:
        """The exchange as it is used: replicas that may differ have whole parameters."""
        return replicated(self.exchange) if self.replicas_may_differ else self.exchange

    def exact(self) -> SyncPlan:
        """Return the plan without codecs, local steps and protocols."""
        embedding, large, rest = (
            replace(self.exchange.of(name), codec="none") for name in PARAMETER_CLASSES
        )
        exact = replace(self.exchange, embedding=embedding, large=large, rest=rest)
        return SyncPlan(exact, self.classes)

    def without_local_steps(self) -> SyncPlan | None:
        """Return the rest of the plan; ``None`` if that is what Horovod's own optimizer does."""
        rest = replace(self, schedule=None)
        return None if rest.exchange == ExchangePlan() and rest.protocol is None else rest


def exchange_plan(
    strategy: Mapping[str, Value], registry: KnobRegistry = REGISTRY
) -> ExchangePlan | None:
    """Return the exchange plan of ``strategy``; ``None`` if Horovod's own optimizer is enough."""
    own: dict[str, Value] = {}
    of_class: dict[str, dict[str, Value]] = {}
    for name, value in registry.plan_fields("exchange", strategy).items():
        parameter_class, _, attribute = name.rpartition(".")
        (of_class.setdefault(parameter_class, {}) if parameter_class else own)[attribute] = value
    classes = {name: ClassPlan(**fields) for name, fields in of_class.items()}  # type: ignore[arg-type]
    plan = ExchangePlan(**own, **classes)  # type: ignore[arg-type]
    return None if plan == ExchangePlan() else plan


def schedule_of(
    strategy: Mapping[str, Value], registry: KnobRegistry = REGISTRY
) -> Schedule | None:
    """Return the schedule of ``strategy``; ``None`` without local steps.

    Raises:
        SpaceError: A number is invalid.
    """
    chosen = {"cap": DEFAULT_CAP, **registry.plan_fields("schedule", strategy)}
    schedule = Schedule(**chosen)  # type: ignore[arg-type]
    return None if schedule.parallel else schedule


def protocol_of(
    strategy: Mapping[str, Value], registry: KnobRegistry = REGISTRY
) -> Protocol | None:
    """Return the protocols of ``strategy``; ``None`` for BSP without a straggler policy.

    Raises:
        SpaceError: A value is invalid.
    """
    chosen = registry.plan_fields("protocol", strategy)
    if chosen.setdefault("kind", "bsp") == "bsp":
        chosen |= {"kind": Protocol.kind, "share": 1.0}
    protocol = Protocol(**chosen)  # type: ignore[arg-type]
    return None if protocol.share == 1 and protocol.stragglers == "none" else protocol


def sync_plan(strategy: Mapping[str, Value], classes: Classes | None = None) -> SyncPlan | None:
    """Return the plan of a strategy; ``None`` if Horovod's own optimizer does all that it says.

    Args:
        strategy: Knob -> value.
        classes: Which parameters are in which class.

    Raises:
        SpaceError: A value is invalid.
    """
    exchange = exchange_plan(strategy)
    plan = SyncPlan(
        exchange or ExchangePlan(), classes or {}, schedule_of(strategy), protocol_of(strategy)
    )
    return None if exchange is None and not plan.replicas_may_differ else plan


def beyond_horovod(strategy: Mapping[str, Value]) -> bool:
    """Return whether ``strategy`` needs the strategy optimizer, not only Horovod's settings."""
    return sync_plan(strategy) is not None
