"""The mapping between strategies and the settings of Horovod 0.28.1 and of libraries below it.

Forward, it maps a strategy to environment variables and ``horovodrun`` options. Backward, it maps a
job's environment to the knobs that the user has fixed. The variables of knobs stand in their
declarations (:mod:`hvd_autosync.search_space.families`), others of Horovod's here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.knob_spec import LauncherOption, Variable
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.registry import KnobRegistry
from hvd_autosync.search_space.sync_plan import exchange_plan

#: Variable that allows process sets to be added after ``hvd.init()``, which the script calls.
#: Horovod takes any number above 0 for true; this value shows that the user has not set it.
PROCESS_SETS_VARIABLE, OURS_ALONE = "HOROVOD_DYNAMIC_PROCESS_SETS", "2"

#: Enables Horovod's own tuner, which must not run during ours.
AUTOTUNE_VARIABLE = "HOROVOD_AUTOTUNE"
#: The file of Horovod's timeline, or that one may be started later.
TIMELINE_VARIABLE = "HOROVOD_TIMELINE"
_ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
#: Variables with a process's rank, of Horovod's launcher and of MPI.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
#: Beginnings of the names of variables that Open MPI and other process managers set for a rank.
_PREFIXES_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL")
#: Variables of a rank under Gloo (``horovod/runner/gloo_run.py``): its rank, its network interface,
#: and the rendezvous address.
OWN_RANK, OWN_INTERFACE = "HOROVOD_RANK", "HOROVOD_GLOO_IFACE"
RENDEZVOUS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
#: Variables of a rank's place: index and count in the job, on its host, and across the hosts.
PLACE_VARIABLES = (
    OWN_RANK,
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
#: The two variables of which a process may set one only, if Horovod is initialized repeatedly.
FUSION_VARIABLE, CYCLE_VARIABLE = (
    REGISTRY.variables[name][1].name for name in ("fusion_threshold_bytes", "cycle_time_ms")
)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those by which a launcher makes a process a rank of its job."""
    return {
        name: value
        for name, value in environment.items()
        if name not in PLACE_VARIABLES and not name.startswith(_PREFIXES_OF_MPI)
    }


def launched_by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is a rank of a job under MPI.

    Under Gloo, Horovod's launcher sets its own variable, even if it runs inside a rank of MPI.
    """
    return OWN_RANK not in environment and any(name in environment for name in RANK_VARIABLES)


def is_elastic(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is a rank of an elastic job."""
    return environment.get(_ELASTIC_VARIABLE) == "1"


def changeable_variables() -> tuple[str, ...]:
    """Return the variables that Horovod reads at each initialization, those of extensions too."""
    return tuple(each.name for _, each in REGISTRY.variables.values() if each.reread)


def kept_by_horovod() -> dict[str, str]:
    """Return the variables whose value Horovod keeps when it is initialized again without them.

    Returns:
        Name -> Horovod's default. Those of extensions are among them.
    """
    return {
        variable.name: variable.text(spec.knob.default)
        for spec, variable in REGISTRY.variables.values()
        if variable.kept
    }


def live_variables() -> tuple[str, ...]:
    """Return the variables that live tuning changes.

    Not the fusion threshold: the buckets of a plan take its place. Nor the cycle time: once it was
    set, Horovod's fusion threshold is 1 MiB after each further initialization
    (:mod:`hvd_autosync.runtime.collectives.reinitialize`).
    """
    held = (FUSION_VARIABLE, CYCLE_VARIABLE)
    return tuple(name for name in changeable_variables() if name not in held)


def launch_knobs(*, reinitializes: bool) -> frozenset[str]:
    """Return the knobs that live tuning cannot change.

    Args:
        reinitializes: Whether the job can initialize Horovod again.
    """
    live = live_variables() if reinitializes else ()
    changed = {name for name, (_, each) in REGISTRY.variables.items() if each.name in live}
    return frozenset(spec.name for spec in REGISTRY if spec.at_launch) - changed


@dataclass(frozen=True)
class HorovodSettings:
    """The settings of Horovod for a strategy.

    Attributes:
        environment: Variables to set, sorted by name.
        options: Options of ``horovodrun``, such as ``--mpi``.
    """

    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


def horovod_settings(
    strategy: Mapping[str, Value], registry: KnobRegistry = REGISTRY
) -> HorovodSettings:
    """Return the settings of ``strategy``. A knob's default sets no variable.

    So the default trial is exactly the user's job. A controller is always set as an option, because
    Horovod's default depends on its build. The exchange plan itself is no setting of Horovod, but a
    plan with hierarchical exchanges needs process sets, which are one.

    Raises:
        SpaceError: A knob is unknown.
    """
    environment: dict[str, str] = {}
    options: list[str] = []
    for name, value in strategy.items():
        spec = registry[name]
        if isinstance(spec.sets, LauncherOption):
            options.append(f"--{value}")
        elif isinstance(spec.sets, Variable) and value != spec.knob.default:
            environment[spec.sets.name] = spec.sets.text(value)
    plan = exchange_plan(strategy, registry)
    if plan is not None and plan.two_levels:
        environment[PROCESS_SETS_VARIABLE] = OURS_ALONE
    return HorovodSettings(tuple(sorted(environment.items())), tuple(options))


def held_by_environment(
    environment: Mapping[str, str], registry: KnobRegistry = REGISTRY
) -> dict[str, Value]:
    """Return the knobs that the job's environment fixes, with their values.

    Args:
        environment: The environment with the ``horovodrun`` options already written into it
            (``horovod.runner.common.util.config_parser.set_env_from_args``).
        registry: The known knobs.

    Raises:
        ConfigurationError: A variable has a value that Horovod would misread.
    """
    held: dict[str, Value] = {}
    for spec, option in registry.options:
        for variable in option.variables:
            if variable in environment:
                held[spec.name] = environment[variable].lower()
    for name, (spec, target) in registry.variables.items():
        text = environment.get(target.name)
        if text is None or (target.foreign and not text.strip()):
            continue
        try:
            held[name] = target.value(spec.knob, text)
        except (ValueError, SpaceError):
            raise ConfigurationError(
                f"{target.name}={text!r} is not a value that Horovod understands",
                hint=f"Unset {target.name} or correct it.",
            ) from None
    return held


def without_held(
    settings: Mapping[str, str], environment: Mapping[str, str], registry: KnobRegistry = REGISTRY
) -> dict[str, str]:
    """Return ``settings`` without other libraries' variables that the user has set.

    A strategy that was found before the user set them must not overrule the user.

    Args:
        settings: Variables of a strategy.
        environment: The user's environment.
        registry: The known knobs.
    """
    foreign = {target.name for _, target in registry.variables.values() if target.foreign}
    held = {name for name in foreign if environment.get(name, "").strip()}
    return {name: text for name, text in settings.items() if name not in held}
