"""The catalogue of knobs, and which of them a task's search space contains.

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
    factors_share,
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
from hvd_autosync.search_space.repeating import LOSSLESS_KNOBS, repeating_classes
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
    help="Size of Horovod's fusion buffer: most bytes of gradients in one collective; 0 disables "
    "fusion.",
)
CYCLE_TIME = float_knob(
    "cycle_time_ms",
    0.1,
    100.0,
    1.0,
    unit="ms",
    scale="log",
    help="Duration of a cycle of Horovod's background loop; a longer cycle fuses more gradients "
    "but delays them.",
)
CACHE_CAPACITY = categorical_knob(
    "cache_capacity",
    (0, 1024, 4096),
    1024,
    help="Number of tensors in Horovod's response cache; 0 negotiates every tensor in every step.",
)
HIERARCHICAL_ALLREDUCE = categorical_knob(
    "hierarchical_allreduce",
    (False, True),
    False,
    help="Hierarchical allreduce: NCCL within each host, MPI across hosts, NCCL within each host.",
)
TORUS_ALLREDUCE = categorical_knob(
    "torus_allreduce",
    (False, True),
    False,
    help="Two-dimensional (torus) NCCL allreduce: within hosts and across hosts.",
    condition=Condition("hierarchical_allreduce", (False,)),
)
HIERARCHICAL_ALLGATHER = categorical_knob(
    "hierarchical_allgather",
    (False, True),
    False,
    help="Hierarchical allgather of sparse gradients: first within a host, through shared memory.",
)
NUM_NCCL_STREAMS = integer_knob(
    "num_nccl_streams", 1, 4, 1, help="Number of NCCL streams for collectives."
)
BATCHED_COPIES = categorical_knob(
    "batch_d2d_memcopies",
    (False, True),
    True,
    help="Copy small tensors into the fusion buffer with a single kernel.",
)
# One knob for controller and CPU operations: if the two differ, Horovod 0.28.1 crashes with a
# segmentation fault in its first allreduce (HOROVOD_CPU_OPERATIONS=gloo under --mpi).
CONTROLLER = categorical_knob(
    "controller",
    ("gloo", "mpi"),
    "gloo",
    help="Library that coordinates the ranks and runs collectives on the CPU.",
)
BUCKETS = integer_knob(
    "buckets",
    0,
    64,
    0,
    group="exchange",
    scale="log",
    log_offset=1.0,
    help="Number of gradient buckets; 0 leaves fusion to Horovod.",
)
BUCKET_RULE = categorical_knob(
    "bucket_rule",
    ("ordered", "size"),
    "ordered",
    group="exchange",
    help="Gradients in a bucket: consecutive in order of arrival (ordered) or of similar size "
    "(size).",
    condition=Condition("buckets", tuple(range(1, 65))),
)

ORDER = categorical_knob(
    "order",
    ("arrival", "priority"),
    "arrival",
    group="order",
    exact=False,
    help="Order of gradient transfers: by arrival, or the first layers first with each layer's "
    "update deferred to its next forward pass (priority). priority is exact only for scripts that "
    "access parameters through their modules.",
)


def _exchange(parameter_class: str, *others: str) -> CategoricalKnob:
    return categorical_knob(
        class_knob(parameter_class, "exchange"),
        ("allreduce", *others),
        "allreduce",
        group="exchange",
        help=f"How gradients {_OF[parameter_class]} are reduced over the ranks.",
    )


def _slices(parameter_class: str) -> IntegerKnob:
    return integer_knob(
        class_knob(parameter_class, "slices"),
        1,
        16,
        1,
        group="exchange",
        scale="log",
        help=f"Number of slices of each gradient {_OF[parameter_class]}.",
    )


def _codec(parameter_class: str, *others: str) -> CategoricalKnob:
    return categorical_knob(
        class_knob(parameter_class, "codec"),
        ("none", "fp16", "bf16", "int8", *others),
        "none",
        group="codec",
        exact=False,
        help=f"Compression of gradients {_OF[parameter_class]}.",
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
        help="Share of elements that the codec topk sends.",
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
        help="Rank of the matrices of the codec powersgd.",
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
    help="Least number of local steps of each rank between two averages of parameters.",
)
LOCAL_POWER = categorical_knob(
    "local_power",
    (0, 1, 2, 3),
    0,
    group="schedule",
    exact=False,
    help="Exponent p of the rule (alpha / learning rate)^p for the number of local steps; 2 is "
    "QSR.",
)
LOCAL_ALPHA = float_knob(
    "local_alpha",
    1e-6,
    100.0,
    0.01,
    group="schedule",
    exact=False,
    scale="log",
    help="alpha of the rule (alpha / learning rate)^p, in units of the learning rate.",
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
    help="Number of steps with gradient exchange before local steps begin (post-local SGD).",
)
LOCAL_CAP = integer_knob(
    "local_cap",
    1,
    100_000,
    DEFAULT_CAP,
    group="schedule",
    exact=False,
    scale="log",
    help="Largest number of local steps between two averages of parameters.",
)
#: Longest round of local steps that is tuned: a trial has to measure several rounds. How rounds
#: should grow later cannot be measured in a trial of the first steps; set it in a strategy file.
_MOST_TUNED = 16
SCHEDULE_KNOBS: tuple[Knob, ...] = (LOCAL_STEPS, LOCAL_POWER, LOCAL_ALPHA, LOCAL_START, LOCAL_CAP)

PROTOCOL = categorical_knob(
    "protocol",
    ("bsp", "asp", "ssp"),
    "bsp",
    group="protocol",
    exact=False,
    help="Synchronization protocol: ranks wait for each other in every step (bsp), never (asp), or "
    "only for ranks that are more than staleness steps behind (ssp).",
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
    help="Largest lead of a rank over the slowest rank under ssp, in steps.",
    condition=Condition(PROTOCOL.name, ("ssp",)),
)
SYNC_SHARE = float_knob(
    "sync_share",
    0.0,
    1.0,
    0.0,
    group="protocol",
    exact=False,
    help="Share of the samples that is trained under bsp (Sync-Switch).",
    condition=_NO_BARRIER,
)
ASYNC_FIRST = categorical_knob(
    "async_first",
    (False, True),
    False,
    group="protocol",
    exact=False,
    help="Train the share under bsp last instead of first.",
    condition=_NO_BARRIER,
)
SWITCH_RATE = categorical_knob(
    "switch_rate",
    ("divided", "kept"),
    "divided",
    group="protocol",
    exact=False,
    help="Whether the learning rate is divided by the number of ranks under asp and ssp, or kept.",
)
SWITCH_MOMENTUM = categorical_knob(
    "switch_momentum",
    MOMENTUM_MODES,
    "kept",
    group="protocol",
    exact=False,
    help="Momentum under asp and ssp: kept, set to zero, divided by the number of ranks (scaled), "
    "or divided and then raised step by step (ramped).",
)
STRAGGLERS = categorical_knob(
    "stragglers",
    STRAGGLER_POLICIES,
    "none",
    group="protocol",
    exact=False,
    help="Straggler policy: none; no barrier while there is a straggler (greedy); exclude it until "
    "the end of the epoch (elastic); batch sizes in proportion to the speed of the ranks "
    "(balance).",
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
    help="Total number of samples of the training over all ranks, to which sync_share refers; 0: "
    "unknown, or under --autosync-recurring as many as in an earlier run.",
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
    EMBEDDING: "of embedding tables (a batch touches few rows)",
    LARGE: "of large matrices",
    REST: "of all other parameters",
}
EMBEDDING_EXCHANGE = _exchange(EMBEDDING, "rows", "hierarchical", "sharded")
LARGE_EXCHANGE = _exchange(LARGE, "hierarchical", "sharded", "factors")
REST_EXCHANGE = _exchange(REST, "hierarchical")
LARGE_SLICES = _slices(LARGE)
#: The exchanges that apply a codec.
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
    *LOSSLESS_KNOBS,
    *_CODEC_KNOBS,
    *SCHEDULE_KNOBS,
    *PROTOCOL_KNOBS,
)

#: Including the knobs of extensions (:mod:`hvd_autosync.extensions`).
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
    """The knobs of the catalogue and of extensions."""
    return tuple(_BY_NAME.values())


def add_knob(knob: Knob, applies: Callable[[ModelProfile, Resources], bool]) -> None:
    """Add ``knob`` to the spaces of the jobs to which it applies.

    Raises:
        SpaceError: The catalogue already has a knob of that name.
    """
    if any(knob.name == own.name for own in CATALOGUE):
        raise SpaceError(f"knob {knob.name!r} already exists", hint="Choose another name.")
    _BY_NAME[knob.name] = knob
    _ADDED[knob.name] = applies


def add_choice(name: str, choice: str) -> None:
    """Add ``choice`` to a categorical knob.

    Raises:
        SpaceError: No categorical knob has that name.
    """
    knob = catalogue_knob(name)
    if not isinstance(knob, CategoricalKnob):
        raise SpaceError(f"knob {name} is not categorical", hint="Name a categorical knob.")
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
        owned: Knobs that the script sets itself (an argument of ``DistributedOptimizer``); they
            are neither tuned nor changed.
        allow: Lossy groups that the user opted into.
        default_controller: The controller that ``horovodrun`` chooses by default.

    Raises:
        SpaceError: ``allow`` names an unknown group.
    """
    for group in allow:
        if group not in LOSSY_GROUPS:
            raise SpaceError(
                f"unknown group of lossy knobs {group!r}",
                hint=f"Known groups are {', '.join(LOSSY_GROUPS)}.",
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
    """Knobs that are set by launcher options and environment variables."""
    build = resources.build
    on_gpu = resources.has_gpu and build.nccl
    knobs: list[Knob] = []
    choice = build.gloo and build.mpi and controller is None
    if choice:
        knobs.append(replace(CONTROLLER, default=default_controller))
    knobs += [FUSION_THRESHOLD, CYCLE_TIME, _cache_knob(len(model.parameters))]
    if on_gpu and resources.two_levels:
        knobs += [HIERARCHICAL_ALLREDUCE, TORUS_ALLREDUCE]
    by_mpi = build.mpi and (choice or controller in ("mpi", None))
    if resources.two_levels and model.has_sparse and by_mpi and not on_gpu:
        under_mpi = Condition(CONTROLLER.name, ("mpi",)) if choice else None
        knobs.append(replace(HIERARCHICAL_ALLGATHER, condition=under_mpi))
    if on_gpu:
        knobs += [NUM_NCCL_STREAMS, BATCHED_COPIES]
    return knobs


def _cache_knob(tensors: int) -> CategoricalKnob:
    """The knob of the cache; more than the default only for models with more than 1024 tensors."""
    return CACHE_CAPACITY if tensors > 1024 else CACHE_CAPACITY.restrict((0, 1024))


def _schedule_knobs(model: ModelProfile, resources: Resources) -> list[Knob]:
    """Knobs of the period between synchronizations."""
    several = model.wrapped and resources.world_size > 1
    return [LOCAL_STEPS.restrict(1, _MOST_TUNED)] if several else []


def _exchange_knobs(model: ModelProfile, resources: Resources) -> list[Knob]:
    """Knobs of our optimizer: how the gradients of each class are exchanged."""
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
        absent = set() if resources.even_levels else {"hierarchical"}
        large = [p for p in dense if p.name in classes.get(LARGE, ())]
        if not any(factors_share(p, resources.world_size) < 1 for p in large):
            absent.add("factors")
        choices = [choice for choice in knob.choices if choice not in absent]
        if knob.name in present and len(choices) > 1:
            knobs.append(knob.restrict(choices))
    if LARGE in classes:
        knobs.append(LARGE_SLICES)
    repeating = repeating_classes(dense, classes, resources.world_size)
    knobs += [knob for knob in LOSSLESS_KNOBS if knob.name.rpartition("_")[0] in repeating]
    coded = {class_of(p.name, classes) for p in dense if p.dtype in ("float32", "float64")}
    codecs = [_BY_NAME[knob.name] for knob in _CODEC_KNOBS]
    knobs += [knob for knob in codecs if knob.name.rpartition("_")[0] in coded]
    # Includes parameters without gradients: the runtime checks every parameter of the class.
    large = [p for p in model.parameters if p.name in classes.get(LARGE, ())]
    ranks = [min(matrix_shape(p.shape)) for p in large]
    return [k.restrict(1, min(ranks)) if k is LARGE_RANK else k for k in knobs]
