"""The knobs of a task: Horovod's own and those of our exchanges, where each can matter.

Defaults are those of Horovod 0.28.1 (``horovod/common/global_state.h`` and
``parameter_manager.cc``); the conditions follow ``horovod/common/operations.cc``, which ignores
several flags on builds without NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.exchange_plan import (
    EMBEDDING,
    LARGE,
    REST,
    class_knob,
    class_of,
    matrix_shape,
    parameter_classes,
)
from hvd_autosync.search_space.knobs import (
    EXACT_GROUPS,
    LOSSY_GROUPS,
    CategoricalKnob,
    Condition,
    FloatKnob,
    IntegerKnob,
    Knob,
    Value,
    categorical_knob,
    float_knob,
    integer_knob,
)
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.protocol import MOMENTUM_MODES, STRAGGLER_POLICIES
from hvd_autosync.search_space.resources import Resources
from hvd_autosync.search_space.schedule import DEFAULT_CAP
from hvd_autosync.search_space.space import SearchSpace

MIB = 1024 * 1024

FUSION_THRESHOLD = integer_knob(
    "fusion_threshold_bytes",
    0,
    256 * MIB,
    128 * MIB,
    unit="B",
    scale="log",
    log_offset=64 * 1024,
    multiple=64 * 1024,
    help="Most bytes of gradients that Horovod fuses into one collective; 0 fuses nothing.",
)
CYCLE_TIME = float_knob(
    "cycle_time_ms",
    0.1,
    100.0,
    1.0,
    unit="ms",
    scale="log",
    help="Pause between two looks of Horovod for ready gradients; longer fuses more, waits longer.",
)
CACHE_CAPACITY = categorical_knob(
    "cache_capacity",
    (0, 1024, 4096),
    1024,
    help="Tensors whose negotiated response is remembered; 0 negotiates every tensor every step.",
)
HIERARCHICAL_ALLREDUCE = categorical_knob(
    "hierarchical_allreduce",
    (False, True),
    False,
    help="NCCL within a host, MPI across hosts, NCCL within a host again.",
)
TORUS_ALLREDUCE = categorical_knob(
    "torus_allreduce",
    (False, True),
    False,
    help="Two-dimensional NCCL allreduce: within hosts and across them.",
    condition=Condition("hierarchical_allreduce", (False,)),
)
HIERARCHICAL_ALLGATHER = categorical_knob(
    "hierarchical_allgather",
    (False, True),
    False,
    help="Gather sparse gradients within a host through shared memory first.",
)
NUM_NCCL_STREAMS = integer_knob(
    "num_nccl_streams", 1, 4, 1, help="NCCL streams that collectives are spread over."
)
BATCHED_COPIES = categorical_knob(
    "batch_d2d_memcopies",
    (False, True),
    True,
    help="Copy small tensors into the fusion buffer with one kernel.",
)
# One knob for controller and CPU operations: Horovod 0.28.1 dies of a segmentation fault in its
# first allreduce when the two differ (HOROVOD_CPU_OPERATIONS=gloo under --mpi).
CONTROLLER = categorical_knob(
    "controller",
    ("gloo", "mpi"),
    "gloo",
    help="Library that coordinates the ranks and carries collectives on the CPU.",
)
BUCKETS = integer_knob(
    "buckets",
    0,
    64,
    0,
    group="exchange",
    scale="log",
    log_offset=1.0,
    help="Number of buckets that gradients are gathered in; 0 lets Horovod fuse what is ready.",
)
BUCKET_RULE = categorical_knob(
    "bucket_rule",
    ("ordered", "size"),
    "ordered",
    group="exchange",
    help="Whether a bucket holds gradients that arrive one after another, or of like size.",
    condition=Condition("buckets", tuple(range(1, 65))),
)

ORDER = categorical_knob(
    "order",
    ("arrival", "priority"),
    "arrival",
    group="order",
    exact=False,
    help="priority sends first layers first and lets a layer's step wait until its next forward; "
    "exact for scripts that reach parameters through their modules only.",
)


def _exchange(parameter_class: str, *others: str) -> CategoricalKnob:
    return categorical_knob(
        class_knob(parameter_class, "exchange"),
        ("allreduce", *others),
        "allreduce",
        group="exchange",
        help=f"How gradients {_OF[parameter_class]} are made equal.",
    )


def _slices(parameter_class: str) -> IntegerKnob:
    return integer_knob(
        class_knob(parameter_class, "slices"),
        1,
        16,
        1,
        group="exchange",
        scale="log",
        help=f"Pieces that each gradient {_OF[parameter_class]} is cut into.",
    )


def _codec(parameter_class: str, *others: str) -> CategoricalKnob:
    return categorical_knob(
        class_knob(parameter_class, "codec"),
        ("none", "fp16", "bf16", "int8", *others),
        "none",
        group="codec",
        exact=False,
        help=f"How gradients {_OF[parameter_class]} are compressed.",
    )


def _ratio(parameter_class: str) -> FloatKnob:
    return float_knob(
        class_knob(parameter_class, "ratio"),
        0.001,
        0.25,
        0.01,
        group="codec",
        exact=False,
        scale="log",
        help="Share of the elements that the codec topk sends.",
        condition=Condition(class_knob(parameter_class, "codec"), ("topk",)),
    )


def _rank(parameter_class: str) -> IntegerKnob:
    return integer_knob(
        class_knob(parameter_class, "rank"),
        1,
        32,
        2,
        group="codec",
        exact=False,
        scale="log",
        help="Rank of the matrices that the codec powersgd sends.",
        condition=Condition(class_knob(parameter_class, "codec"), ("powersgd",)),
    )


LOCAL_STEPS = integer_knob(
    "local_steps",
    1,
    1024,
    1,
    group="schedule",
    exact=False,
    scale="log",
    help="Steps that each rank takes on its own before parameters are averaged, at least.",
)
LOCAL_POWER = categorical_knob(
    "local_power",
    (0, 1, 2, 3),
    0,
    group="schedule",
    exact=False,
    help="p of the rule (alpha / learning rate)^p by which rounds of local steps grow; 2 is QSR.",
)
LOCAL_ALPHA = float_knob(
    "local_alpha",
    1e-6,
    100.0,
    0.01,
    group="schedule",
    exact=False,
    scale="log",
    help="alpha of that rule, in units of the learning rate.",
    condition=Condition(LOCAL_POWER.name, (1, 2, 3)),
)
LOCAL_START = integer_knob(
    "local_start",
    0,
    10_000_000,
    0,
    group="schedule",
    exact=False,
    scale="log",
    log_offset=1.0,
    help="Steps before the first local one, in which gradients are exchanged (post-local SGD).",
)
LOCAL_CAP = integer_knob(
    "local_cap",
    1,
    100_000,
    DEFAULT_CAP,
    group="schedule",
    exact=False,
    scale="log",
    help="Most steps between two averages of parameters.",
)
#: Longest rounds that are tuned: a trial has to measure several. How rounds grow later in a
#: training no trial of its beginning can tell; that is for those who write a strategy.
_MOST_TUNED = 16
SCHEDULE_KNOBS: tuple[Knob, ...] = (LOCAL_STEPS, LOCAL_POWER, LOCAL_ALPHA, LOCAL_START, LOCAL_CAP)

PROTOCOL = categorical_knob(
    "protocol",
    ("bsp", "asp", "ssp"),
    "bsp",
    group="protocol",
    exact=False,
    help="Whether ranks wait for each other in every step (bsp), never (asp), or for those that "
    "are too far behind (ssp).",
)
_NO_BARRIER = Condition(PROTOCOL.name, ("asp", "ssp"))
STALENESS = integer_knob(
    "staleness",
    0,
    64,
    2,
    group="protocol",
    exact=False,
    scale="log",
    log_offset=1.0,
    help="Most steps that a rank is ahead of the slowest under ssp.",
    condition=Condition(PROTOCOL.name, ("ssp",)),
)
SYNC_SHARE = float_knob(
    "sync_share",
    0.0,
    1.0,
    0.0,
    group="protocol",
    exact=False,
    help="Share of the work, in samples, that is trained under bsp (Sync-Switch).",
    condition=_NO_BARRIER,
)
ASYNC_FIRST = categorical_knob(
    "async_first",
    (False, True),
    False,
    group="protocol",
    exact=False,
    help="Train that share at the end and not at the beginning.",
    condition=_NO_BARRIER,
)
SWITCH_RATE = categorical_knob(
    "switch_rate",
    ("divided", "kept"),
    "divided",
    group="protocol",
    exact=False,
    help="Whether the learning rate is divided by the number of ranks while these do not wait.",
)
SWITCH_MOMENTUM = categorical_knob(
    "switch_momentum",
    MOMENTUM_MODES,
    "kept",
    group="protocol",
    exact=False,
    help="What happens to momentum while ranks do not wait for each other.",
)
STRAGGLERS = categorical_knob(
    "stragglers",
    STRAGGLER_POLICIES,
    "none",
    group="protocol",
    exact=False,
    help="What is done about a rank that is slower than the others: nothing, no barrier while "
    "there is one (greedy), the others go on without it until their pass is over (elastic), or "
    "ranks have batches as large as they are fast (balance).",
)
TOTAL_SAMPLES = integer_knob(
    "total_samples",
    0,
    10**15,
    0,
    group="protocol",
    exact=False,
    scale="log",
    log_offset=1.0,
    help="Samples of the whole training, of all ranks together, of which sync_share is a share; 0: "
    "not known, or under --autosync-recurring as many as in an earlier run.",
)
PROTOCOL_KNOBS: tuple[Knob, ...] = (
    PROTOCOL,
    STALENESS,
    SYNC_SHARE,
    ASYNC_FIRST,
    SWITCH_RATE,
    SWITCH_MOMENTUM,
    STRAGGLERS,
    TOTAL_SAMPLES,
)

_OF = {
    EMBEDDING: "of tables of which a batch touches few rows",
    LARGE: "of large matrices",
    REST: "of all other parameters",
}
EMBEDDING_EXCHANGE = _exchange(EMBEDDING, "rows", "hierarchical", "sharded")
LARGE_EXCHANGE = _exchange(LARGE, "hierarchical", "sharded")
REST_EXCHANGE = _exchange(REST, "hierarchical")
LARGE_SLICES = _slices(LARGE)
#: What travels by other exchanges is not coded.
_CODED = ("allreduce", "hierarchical")
EMBEDDING_CODEC = replace(
    _codec(EMBEDDING, "topk"), condition=Condition(EMBEDDING_EXCHANGE.name, _CODED)
)
LARGE_CODEC = replace(
    _codec(LARGE, "topk", "powersgd"), condition=Condition(LARGE_EXCHANGE.name, _CODED)
)
REST_CODEC = _codec(REST)
EMBEDDING_RATIO, LARGE_RATIO = _ratio(EMBEDDING), _ratio(LARGE)
LARGE_RANK = _rank(LARGE)
_CODEC_KNOBS: tuple[Knob, ...] = (
    EMBEDDING_CODEC,
    EMBEDDING_RATIO,
    LARGE_CODEC,
    LARGE_RATIO,
    LARGE_RANK,
    REST_CODEC,
)

CATALOGUE: tuple[Knob, ...] = (
    CONTROLLER,
    FUSION_THRESHOLD,
    CYCLE_TIME,
    CACHE_CAPACITY,
    HIERARCHICAL_ALLREDUCE,
    TORUS_ALLREDUCE,
    HIERARCHICAL_ALLGATHER,
    NUM_NCCL_STREAMS,
    BATCHED_COPIES,
    BUCKETS,
    BUCKET_RULE,
    ORDER,
    EMBEDDING_EXCHANGE,
    LARGE_EXCHANGE,
    REST_EXCHANGE,
    LARGE_SLICES,
    *_CODEC_KNOBS,
    *SCHEDULE_KNOBS,
    *PROTOCOL_KNOBS,
)

#: With what others have added (:mod:`hvd_autosync.extensions`).
_BY_NAME = {knob.name: knob for knob in CATALOGUE}
_ADDED: dict[str, Callable[[ModelProfile, Resources], bool]] = {}


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


def every_knob() -> tuple[Knob, ...]:
    """The catalogue, with what others have added to it."""
    return tuple(_BY_NAME.values())


def add_knob(knob: Knob, applies: Callable[[ModelProfile, Resources], bool]) -> None:
    """Let ``knob`` be in the spaces of the jobs to which it applies.

    Raises:
        SpaceError: The catalogue has a knob of that name.
    """
    if any(knob.name == own.name for own in CATALOGUE):
        raise SpaceError(f"there is a knob {knob.name!r} already", hint="Choose another name.")
    _BY_NAME[knob.name] = knob
    _ADDED[knob.name] = applies


def add_choice(name: str, choice: str) -> None:
    """Let a knob of categories have one more.

    Raises:
        SpaceError: No knob of categories has that name.
    """
    knob = catalogue_knob(name)
    if not isinstance(knob, CategoricalKnob):
        raise SpaceError(f"knob {name} has no choices", hint="Name a knob of categories.")
    if choice not in knob.choices:
        _BY_NAME[name] = replace(knob, choices=(*knob.choices, choice))


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
        *(_exchange_knobs(model, resources) if model.wrapped else ()),
        *_schedule_knobs(model, resources),
        *(_BY_NAME[name] for name, applies in _ADDED.items() if applies(model, resources)),
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


def _schedule_knobs(model: ModelProfile, resources: Resources) -> list[Knob]:
    """How often replicas are made equal."""
    several = model.wrapped and resources.world_size > 1
    return [LOCAL_STEPS.restrict(1, _MOST_TUNED)] if several else []


def _exchange_knobs(model: ModelProfile, resources: Resources) -> list[Knob]:
    """Knobs of our own optimizer: how the gradients of each class travel."""
    classes = parameter_classes(model)
    dense = [p for p in model.parameters if p.ready_order >= 0 and not p.sparse]
    present = {class_knob(class_of(p.name, classes), "exchange") for p in dense}
    knobs: list[Knob] = []
    if len(dense) > 1:
        buckets = BUCKETS.restrict(0, len(dense))
        some = tuple(range(1, int(buckets.high) + 1))
        knobs += [buckets, replace(BUCKET_RULE, condition=Condition(BUCKETS.name, some)), ORDER]
    for own in (EMBEDDING_EXCHANGE, LARGE_EXCHANGE, REST_EXCHANGE):
        knob = _BY_NAME[own.name]
        assert isinstance(knob, CategoricalKnob)
        choices = [c for c in knob.choices if c != "hierarchical" or resources.even_levels]
        if knob.name in present and len(choices) > 1:
            knobs.append(knob.restrict(choices))
    if LARGE in classes:
        knobs.append(LARGE_SLICES)
    coded = {class_of(p.name, classes) for p in dense if p.dtype in ("float32", "float64")}
    codecs = [_BY_NAME[knob.name] for knob in _CODEC_KNOBS]
    knobs += [knob for knob in codecs if knob.name.rpartition("_")[0] in coded]
    # Gradients or not: the runtime checks every parameter of the class.
    large = [p for p in model.parameters if p.name in classes.get(LARGE, ())]
    ranks = [min(matrix_shape(p.shape)) for p in large]
    return [k.restrict(1, min(ranks)) if k is LARGE_RANK else k for k in knobs]
