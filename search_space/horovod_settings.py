"""The one mapping between strategies and Horovod 0.28.1.

Forward: a strategy to environment variables and ``horovodrun`` options. Backward: the environment
that a job already has to the knobs that the user has set. Only here is ``HOROVOD_`` spelled.
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
#: Lets process sets be added after ``hvd.init()``, which the script calls. Horovod takes any number
#: above 0 for true; by this one it is told that no script has asked for it.
PROCESS_SETS_VARIABLE, OURS_ALONE = "HOROVOD_DYNAMIC_PROCESS_SETS", "2"

#: Variables that choose the library by other means than ``--gloo`` and ``--mpi``.
_CONTROLLER_VARIABLES = ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")

#: Set by Horovod's own tuner, which must not run beside ours.
AUTOTUNE_VARIABLE = "HOROVOD_AUTOTUNE"
#: "1" in the ranks of an elastic job.
ELASTIC_VARIABLE = "HOROVOD_ELASTIC"
#: Variables of the process that Horovod's launcher sets for each rank.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
#: What the launcher tells a rank under Gloo (``horovod/runner/gloo_run.py``): its rank, its network
#: interface, and where the ranks meet.
OWN_RANK, OWN_INTERFACE = "HOROVOD_RANK", "HOROVOD_GLOO_IFACE"
RENDEZVOUS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
#: Its place among the ranks, too: index and count in the job, on its host, and over the hosts.
PLACE_VARIABLES = (
    OWN_RANK,
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)


def launched_by_mpi(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables is a rank of a job under MPI.

    Horovod's launcher for Gloo, which may itself run in a rank of MPI's, tells its own rank.
    """
    return OWN_RANK not in environment and any(name in environment for name in RANK_VARIABLES)


def add_variable(knob: str, variable: str) -> None:
    """Let ``variable`` carry the value of a knob that others have added."""
    _VARIABLES[knob] = variable


@dataclass(frozen=True)
class HorovodSettings:
    """What a strategy means to Horovod.

    Attributes:
        environment: Variables to set, in order of name.
        options: Options of ``horovodrun``, such as ``--mpi``.
    """

    environment: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


def horovod_settings(strategy: Mapping[str, Value]) -> HorovodSettings:
    """What ``strategy`` sets. Values equal to Horovod's own defaults set no variable.

    Leaving defaults unset keeps the default trial exactly the user's job. A controller is always
    an option, because which one Horovod takes without it depends on its build. How gradients
    travel is none of Horovod's settings, but what it needs of Horovod is among them.

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
    """The knobs that the job's environment sets already, with their values.

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
