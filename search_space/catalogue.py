"""The knobs of a task: Horovod's own, tensor groups and compression, where each can matter.

Defaults are those of Horovod 0.28.1 (``horovod/common/global_state.h`` and
``parameter_manager.cc``); the conditions follow ``horovod/common/operations.cc``, which ignores
several flags on builds without NCCL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.knobs import (
    EXACT_GROUPS,
    LOSSY_GROUPS,
    CategoricalKnob,
    Condition,
    IntegerKnob,
    Knob,
    Value,
    categorical_knob,
    float_knob,
    integer_knob,
)
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.resources import Resources
from hvd_autosync.search_space.space import SearchSpace

MIB = 1024 * 1024

FUSION_THRESHOLD = integer_knob(
    "fusion_threshold_bytes", 0, 256 * MIB, 128 * MIB, unit="B", scale="log",
    log_offset=64 * 1024, multiple=64 * 1024,
    help="Most bytes of gradients that Horovod fuses into one collective; 0 fuses nothing.",
)
CYCLE_TIME = float_knob(
    "cycle_time_ms", 0.1, 100.0, 1.0, unit="ms", scale="log",
    help="Pause between two looks of Horovod for ready gradients; longer fuses more, waits longer.",
)
CACHE_CAPACITY = categorical_knob(
    "cache_capacity", (0, 1024, 4096), 1024,
    help="Tensors whose negotiated response is remembered; 0 negotiates every tensor every step.",
)
HIERARCHICAL_ALLREDUCE = categorical_knob(
    "hierarchical_allreduce", (False, True), False,
    help="NCCL within a host, MPI across hosts, NCCL within a host again.",
)
TORUS_ALLREDUCE = categorical_knob(
    "torus_allreduce", (False, True), False,
    help="Two-dimensional NCCL allreduce: within hosts and across them.",
    condition=Condition("hierarchical_allreduce", (False,)),
)
HIERARCHICAL_ALLGATHER = categorical_knob(
    "hierarchical_allgather", (False, True), False,
    help="Gather sparse gradients within a host through shared memory first.",
)
NUM_NCCL_STREAMS = integer_knob(
    "num_nccl_streams", 1, 4, 1, help="NCCL streams that collectives are spread over.",
)
BATCHED_COPIES = categorical_knob(
    "batch_d2d_memcopies", (False, True), True,
    help="Copy small tensors into the fusion buffer with one kernel.",
)
GROUP_FUSION = categorical_knob(
    "group_fusion", (False, True), True,
    help="Let Horovod fuse a tensor group with other tensors.",
)
# One knob for controller and CPU operations: Horovod 0.28.1 dies of a segmentation fault in its
# first allreduce when the two differ (HOROVOD_CPU_OPERATIONS=gloo under --mpi).
CONTROLLER = categorical_knob(
    "controller", ("gloo", "mpi"), "gloo",
    help="Library that coordinates the ranks and carries collectives on the CPU.",
)
TENSOR_GROUPS = integer_knob(
    "tensor_groups", 0, 128, 0, group="exchange", scale="log", log_offset=1.0,
    help="Number of groups of gradients that are reduced all at once; 0 reduces as they arrive.",
)
COMPRESSION = categorical_knob(
    "compression", ("none", "fp16"), "none", group="codec", exact=False,
    help="Cast gradients to half precision before they travel.",
)

CATALOGUE: tuple[Knob, ...] = (
    CONTROLLER, FUSION_THRESHOLD, CYCLE_TIME, CACHE_CAPACITY,
    HIERARCHICAL_ALLREDUCE, TORUS_ALLREDUCE, HIERARCHICAL_ALLGATHER, NUM_NCCL_STREAMS,
    BATCHED_COPIES, TENSOR_GROUPS, GROUP_FUSION, COMPRESSION,
)  # fmt: skip

_BY_NAME = {knob.name: knob for knob in CATALOGUE}


def catalogue_knob(name: str) -> Knob:
    """The knob called ``name``.

    Raises:
        SpaceError: No knob has that name.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise SpaceError(
            f"unknown knob {name!r}", hint=f"Known knobs are {', '.join(_BY_NAME)}."
        ) from None


def build_space(
    model: ModelProfile,
    resources: Resources,
    *,
    held: Mapping[str, Value] | None = None,
    owned: Collection[str] = (),
    allow: Collection[str] = (),
    default_controller: str = "gloo",
) -> SearchSpace:
    """The knobs that can matter for this model on these resources.

    Args:
        model: Profile of the model.
        resources: The cluster and the Horovod build.
        held: Knobs that the user set by option, environment or file, with their values.
        owned: Knobs that the script decides itself (an argument of its own to
            ``DistributedOptimizer``); they are neither tuned nor touched.
        allow: Lossy groups that the user opted into.
        default_controller: What ``horovodrun`` would choose by itself.

    Raises:
        SpaceError: ``allow`` names an unknown group.
    """
    for group in allow:
        if group not in LOSSY_GROUPS:
            raise SpaceError(
                f"unknown group {group!r} of lossy knobs",
                hint=f"Allow any of {', '.join(LOSSY_GROUPS)}.",
            )
    held = dict(held or {})
    controller = held.get("controller")
    applicable = [
        *_job_knobs(model, resources, controller, default_controller),
        *(_optimizer_knobs(model) if model.wrapped else ()),
    ]
    groups = {*EXACT_GROUPS, *allow}
    absent: set[str] = {*held, *owned}
    knobs = []
    for knob in applicable:
        parent_gone = knob.condition is not None and knob.condition.knob in absent - {*held}
        if knob.name in absent or knob.group not in groups or parent_gone:
            absent.add(knob.name)
        else:
            knobs.append(knob)
    return SearchSpace(tuple(knobs), tuple(sorted(held.items())))


def _job_knobs(
    model: ModelProfile, resources: Resources, controller: Value | None, default_controller: str
) -> list[Knob]:
    """Knobs that belong to the launch and the environment."""
    build = resources.build
    on_gpu = resources.has_gpu and build.nccl
    knobs: list[Knob] = []
    choice = build.gloo and build.mpi and controller is None
    if choice:
        knobs.append(replace(CONTROLLER, default=default_controller))
    knobs += [FUSION_THRESHOLD, CYCLE_TIME, _cache_knob(len(model.parameters))]
    if on_gpu and resources.two_levels:
        knobs += [HIERARCHICAL_ALLREDUCE, TORUS_ALLREDUCE]
    if resources.two_levels and model.has_sparse and build.mpi and not on_gpu:
        if choice or controller in ("mpi", None):
            under_mpi = Condition(CONTROLLER.name, ("mpi",)) if choice else None
            knobs.append(replace(HIERARCHICAL_ALLGATHER, condition=under_mpi))
    if on_gpu:
        knobs += [NUM_NCCL_STREAMS, BATCHED_COPIES]
    return knobs


def _cache_knob(tensors: int) -> CategoricalKnob:
    """A cache larger than the default matters only to models with more tensors than that."""
    return CACHE_CAPACITY if tensors > 1024 else CACHE_CAPACITY.restrict((0, 1024))


def _optimizer_knobs(model: ModelProfile) -> list[Knob]:
    """Knobs that belong to ``DistributedOptimizer``."""
    knobs: list[Knob] = []
    received = [p for p in model.parameters if p.ready_order >= 0]
    # Horovod's grouped path reads the gradient of every member: sparse or missing ones break it.
    if len(received) > 1 and len(received) == len(model.parameters) and not model.has_sparse:
        groups = TENSOR_GROUPS.restrict(0, len(received))
        knobs += [groups, _group_fusion(groups)]
    if any(p.dtype == "float32" for p in model.parameters):
        knobs.append(COMPRESSION)
    return knobs


def _group_fusion(groups: IntegerKnob) -> CategoricalKnob:
    """Group fusion matters only while there are groups."""
    some = tuple(range(1, int(groups.high) + 1))
    return replace(GROUP_FUSION, condition=Condition(groups.name, some))
