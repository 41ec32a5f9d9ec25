"""The catalogue of knobs, and the search space of a task.

Each knob is declared once, in a module of :mod:`hvd_autosync.search_space.families`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.families.codecs import CODECS
from hvd_autosync.search_space.families.exchanges import EXCHANGES
from hvd_autosync.search_space.families.horovod import HOROVOD
from hvd_autosync.search_space.families.local_steps import LOCAL
from hvd_autosync.search_space.families.protocols import PROTOCOLS
from hvd_autosync.search_space.families.transport import TRANSPORT
from hvd_autosync.search_space.knobs import Knob, Value
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.registry import KnobRegistry
from hvd_autosync.search_space.resources import Resources
from hvd_autosync.search_space.space import SearchSpace

FAMILIES = (HOROVOD, TRANSPORT, EXCHANGES, CODECS, LOCAL, PROTOCOLS)
#: The knobs of the catalogue and those that users' files have added to this process.
REGISTRY = KnobRegistry(FAMILIES)
#: The knobs of the catalogue.
CATALOGUE: tuple[Knob, ...] = tuple(spec.knob for spec in REGISTRY)


def catalogue_knob(name: str) -> Knob:
    """Return the knob called ``name``, of the catalogue or of an extension.

    Raises:
        SpaceError: No knob has that name.
    """
    return REGISTRY[name].knob


def is_exact(strategy: Mapping[str, Value]) -> bool:
    """Return whether ``strategy`` trains the model as Horovod does, whatever a space's default is.

    An unknown knob, as of an extension that is not loaded, may change the model.
    """
    try:
        knobs = [(catalogue_knob(name), value) for name, value in strategy.items()]
    except SpaceError:
        return False
    return all(knob.exact or value == knob.default for knob, value in knobs)


def every_knob() -> tuple[Knob, ...]:
    """Return the knobs of the catalogue and of extensions."""
    return tuple(spec.knob for spec in REGISTRY)


def build_space(
    model: ModelProfile,
    resources: Resources,
    *,
    held: Mapping[str, Value] | None = None,
    owned: Collection[str] = (),
    allow: Collection[str] = (),
    default_controller: str = "gloo",
    registry: KnobRegistry = REGISTRY,
) -> SearchSpace:
    """Return the knobs that can matter for this model on these resources.

    Args:
        model: Profile of the model.
        resources: The cluster and the Horovod build.
        held: Knobs that the user set by option, environment or file, with their values.
        owned: Knobs that the script sets itself (an argument of ``DistributedOptimizer``); they
            are neither tuned nor changed.
        allow: Lossy groups that the user opted into.
        default_controller: The controller that ``horovodrun`` chooses by default.
        registry: The knobs to choose from.

    Raises:
        SpaceError: ``allow`` names an unknown group.
    """
    return registry.space(
        model, resources, held=held, owned=owned, allow=allow, default_controller=default_controller
    )
