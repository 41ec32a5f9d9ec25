"""The mapping between strategies and the settings of Horovod 0.28.1.

Forward, it maps a strategy to environment variables and ``horovodrun`` options. Backward, it maps a
job's environment to the knobs that the user has fixed. No other module spells ``HOROVOD_``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.search_space.catalogue import catalogue_knob
from hvd_autosync.search_space.exchange_plan import exchange_plan
from hvd_autosync.search_space.knobs import CategoricalKnob, IntegerKnob, Knob, Value

#: Knob name -> variable read by ``horovod/common/operations.cc``.
_VARIABLES = {
    "fusion_threshold_bytes": "HOROVOD_FUSION_THRESHOLD",
    "cycle_time_ms": "HOROVOD_CYCLE_TIME",
    "cache_capacity": "HOROVOD_CACHE_CAPACITY",
    "hierarchical_allreduce": "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "torus_allreduce": "HOROVOD_TORUS_ALLREDUCE",
    "hierarchical_allgather": "HOROVOD_HIERARCHICAL_ALLGATHER",
    "num_nccl_streams": "HOROVOD_NUM_NCCL_STREAMS",
    "batch_d2d_memcopies": "HOROVOD_BATCH_D2D_MEMCOPIES",
}
#: Variable that allows process sets to be added after ``hvd.init()``, which the script calls.
#: Horovod takes any number above 0 for true; this value shows that the user has not set it.
PROCESS_SETS_VARIABLE, OURS_ALONE = "HOROVOD_DYNAMIC_PROCESS_SETS", "2"

#: Variables that choose the controller, as ``--gloo`` and ``--mpi`` do.
_CONTROLLER_VARIABLES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")

#: Enables Horovod's own tuner, which must not run during ours.
AUTOTUNE_VARIABLE = "HOROVOD_AUTOTUNE"
#: The file of Horovod's timeline, or that one may be started later.
TIMELINE_VARIABLE = "HOROVOD_TIMELINE"
#: "1" in the ranks of an elastic job.
ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
#: Variables with a process's rank, of Horovod's launcher and of MPI.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
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
FUSION_VARIABLE = _VARIABLES["fusion_threshold_bytes"]
CYCLE_VARIABLE = _VARIABLES["cycle_time_ms"]
#: Variables whose value Horovod keeps when it is initialized again without them, with its defaults
#: (``horovod/common/operations.cc``, ``parameter_manager.cc``).
KEPT_BY_HOROVOD = {
    FUSION_VARIABLE: str(128 * 1024**2),
    CYCLE_VARIABLE: "1",
    _VARIABLES["cache_capacity"]: "1024",
    _VARIABLES["num_nccl_streams"]: "1",
}
#: Variables that Horovod reads at each initialization, so that other values can take effect. The
#: flags not among them, such as batched copies, cannot be changed back.
CHANGEABLE = (
    *KEPT_BY_HOROVOD,
    _VARIABLES["hierarchical_allreduce"],
    _VARIABLES["torus_allreduce"],
    _VARIABLES["hierarchical_allgather"],
)


def launched_by_mpi(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these variables is a rank of a job under MPI.

    Under Gloo, Horovod's launcher sets its own variable, even if it runs inside a rank of MPI.
    """
    return OWN_RANK not in environment and any(name in environment for name in RANK_VARIABLES)


def add_variable(knob: str, variable: str) -> None:
    """Map a knob of an extension to ``variable``."""
    _VARIABLES[knob] = variable


@dataclass(frozen=True)
class HorovodSettings:
    """The settings of Horovod for a strategy.

    Attributes:
        environment: Variables to set, sorted by name.
        options: Options of ``horovodrun``, such as ``--mpi``.
    """

    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


def horovod_settings(strategy: Mapping[str, Value]) -> HorovodSettings:
    """Return the settings of ``strategy``. Horovod's own defaults set no variable.

    So the default trial is exactly the user's job. A controller is always set as an option, because
    Horovod's default depends on its build. The exchange plan itself is no setting of Horovod, but a
    plan with hierarchical exchanges needs process sets, which are one.

    Raises:
        SpaceError: A knob is unknown.
    """
    environment: dict[str, str] = {}
    options: list[str] = []
    for name, value in strategy.items():
        knob = catalogue_knob(name)
        if name == "controller":
            options.append(f"--{value}")
        elif name in _VARIABLES and value != knob.default:
            environment[_VARIABLES[name]] = str(int(value) if isinstance(value, bool) else value)
    plan = exchange_plan(strategy)
    if plan is not None and plan.two_levels:
        environment[PROCESS_SETS_VARIABLE] = OURS_ALONE
    return HorovodSettings(tuple(sorted(environment.items())), tuple(options))


def held_by_environment(environment: Mapping[str, str]) -> dict[str, Value]:
    """Return the knobs that the job's environment fixes, with their values.

    Args:
        environment: The environment with the ``horovodrun`` options already written into it
            (``horovod.runner.common.util.config_parser.set_env_from_args``).

    Raises:
        ConfigurationError: A variable has a value that Horovod would misread.
    """
    held: dict[str, Value] = {}
    for variable in _CONTROLLER_VARIABLES:
        if variable in environment:
            held["controller"] = environment[variable].lower()
    for name, variable in _VARIABLES.items():
        text = environment.get(variable)
        if text is not None:
            try:
                held[name] = _parse(catalogue_knob(name), text)
            except (ValueError, SpaceError):
                raise ConfigurationError(
                    f"{variable}={text!r} is not a value that Horovod understands",
                    hint=f"Unset {variable} or correct it.",
                ) from None
    return held


def _parse(knob: Knob, text: str) -> Value:
    convert: Callable[[str], Value]
    if isinstance(knob, CategoricalKnob) and isinstance(knob.default, bool):
        return bool(int(text))
    if isinstance(knob, CategoricalKnob) and isinstance(knob.default, str):
        knob.validate(text)
        return text
    convert = int if isinstance(knob, (IntegerKnob, CategoricalKnob)) else float
    return convert(text)
