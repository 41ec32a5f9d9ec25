"""The one declaration of a knob: domain, where its value goes, when it applies, documentation.

Search spaces, the mapping onto Horovod and NCCL, the tables of ``hvd-autosync space``,
``docs/knobs.md`` and the schema of the space file are made of these values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.exchange_plan import Classes, class_of, parameter_classes
from hvd_autosync.search_space.knobs import CategoricalKnob, IntegerKnob, Knob, Value
from hvd_autosync.search_space.model_profile import ModelProfile, ParameterProfile
from hvd_autosync.search_space.resources import Resources


@dataclass(frozen=True)
class Situation:
    """A task, and what the job has decided itself: what decides whether a knob applies.

    Attributes:
        model: Profile of the model.
        resources: The cluster and the Horovod build.
        held: Knobs that the user set by option, environment or file, with their values.
        default_controller: The controller that ``horovodrun`` chooses by default.
    """

    model: ModelProfile
    resources: Resources
    held: Mapping[str, Value] = field(default_factory=dict)
    default_controller: str = "gloo"

    @property
    def on_gpu(self) -> bool:
        """Whether gradients are on GPUs and Horovod reduces them with NCCL."""
        return self.resources.has_gpu and self.resources.build.nccl

    @property
    def free_controller(self) -> bool:
        """Whether Horovod has both controllers, and neither the user nor the script needs one."""
        build = self.resources.build
        either = build.gloo and build.mpi and self.held.get("controller") is None
        return either and not self.model.needs_launcher

    @property
    def can_be_under_mpi(self) -> bool:
        """Whether MPI coordinates the ranks, by some strategy or by all."""
        build = self.resources.build
        fixed = self.held.get("controller") or (self.default_controller if build.gloo else "mpi")
        return build.mpi and (self.free_controller or fixed == "mpi")

    @cached_property
    def classes(self) -> Classes:
        """The classes of the model's parameters."""
        return parameter_classes(self.model)

    @cached_property
    def dense(self) -> tuple[ParameterProfile, ...]:
        """Parameters with dense gradients."""
        return tuple(p for p in self.model.parameters if p.ready_order >= 0 and not p.sparse)

    @cached_property
    def dense_classes(self) -> frozenset[str]:
        """Classes with dense gradients."""
        return frozenset(class_of(p.name, self.classes) for p in self.dense)


@dataclass(frozen=True)
class Variable:
    """The value goes into an environment variable of each rank; at the default it is not set.

    Attributes:
        name: Name of the variable.
        library: The library that reads it. Horovod's variables must have values that we understand;
            another library may understand more, and keeps what the user has set.
        reread: Whether Horovod reads it at each initialization, so that another value can take
            effect in a running job (``horovod/common/operations.cc``).
        kept: Whether Horovod keeps its value when it is initialized again without the variable
            (``parameter_manager.cc``).
    """

    name: str
    library: str = "Horovod"
    reread: bool = False
    kept: bool = False

    @property
    def foreign(self) -> bool:
        """Whether another library than Horovod reads the variable."""
        return self.library != "Horovod"

    def text(self, value: Value) -> str:
        """Return ``value`` as the text of the variable."""
        return str(int(value) if isinstance(value, bool) else value)

    def value(self, knob: Knob, text: str) -> Value:
        """Return the value of ``knob`` that the variable's text means.

        A text for another library that we do not understand is returned as it is.

        Raises:
            ValueError: Horovod would misread the text.
            SpaceError: The same.
        """
        try:
            return _parsed(knob, text.strip().lower() if self.foreign else text)
        except (ValueError, SpaceError):
            if self.foreign:
                return text
            raise


def _parsed(knob: Knob, text: str) -> Value:
    if isinstance(knob, CategoricalKnob) and isinstance(knob.default, bool):
        return bool(int(text))
    if isinstance(knob, CategoricalKnob) and isinstance(knob.default, str):
        knob.validate(text)
        return text
    return int(text) if isinstance(knob, (IntegerKnob, CategoricalKnob)) else float(text)


@dataclass(frozen=True)
class LauncherOption:
    """The value is an option of ``horovodrun`` (``--gloo``); it is always named.

    Attributes:
        variables: Variables by which the user can choose it, too.
    """

    variables: tuple[str, ...] = ()


#: The parts of a :class:`~hvd_autosync.search_space.sync_plan.SyncPlan` that knobs set.
PlanPart: TypeAlias = Literal["exchange", "schedule", "protocol"]


@dataclass(frozen=True)
class PlanField:
    """The value is a field of what the optimizer follows.

    :mod:`hvd_autosync.search_space.sync_plan` makes plans of these declarations alone.

    Attributes:
        part: The part of the plan.
        name: The field, as ``large.codec``.
    """

    part: PlanPart
    name: str


Target: TypeAlias = Variable | LauncherOption | PlanField


def everywhere(situation: Situation) -> bool:
    """Apply to every job."""
    return True


def nowhere(situation: Situation) -> bool:
    """Apply to no job: the knob is for strategy files."""
    return False


def unchanged(knob: Knob, situation: Situation) -> Knob | None:
    """Keep the whole domain."""
    return knob


@dataclass(frozen=True)
class KnobSpec:
    """The declaration of one knob.

    Attributes:
        knob: Name, domain, default, unit, exactness, group and help.
        sets: Where its value goes.
        when: When it is tuned, in words.
        applies: When it is tuned, as a predicate.
        narrow: Returns the knob with the part of its domain that can matter; ``None`` if nothing is
            left of it.
        cost: The part of a prediction that it changes, in words; "": the cost model does not get
            its values (:mod:`hvd_autosync.cost.columns`).
        doc: Its section in ``docs/knobs.md``, to be read after the knob's name.
    """

    knob: Knob
    sets: Target
    when: str
    applies: Callable[[Situation], bool] = everywhere
    narrow: Callable[[Knob, Situation], Knob | None] = unchanged
    cost: str = ""
    doc: str = ""

    @property
    def name(self) -> str:
        """Name of the knob."""
        return self.knob.name

    @property
    def at_launch(self) -> bool:
        """Whether the launch sets the value, not the script's optimizer."""
        return not isinstance(self.sets, PlanField)


@dataclass(frozen=True)
class Family:
    """Knobs that are documented together.

    Attributes:
        title: Heading in ``docs/knobs.md``.
        specs: The knobs; a knob comes after the knob on which its condition depends.
        intro: Text below the heading.
    """

    title: str
    specs: Sequence[KnobSpec]
    intro: str = ""
