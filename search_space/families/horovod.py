"""Knobs of Horovod itself, set by its variables and options.

Defaults are those of Horovod 0.28.1 (``horovod/common/global_state.h`` and
``parameter_manager.cc``); the conditions follow ``horovod/common/operations.cc``, which ignores
several flags on builds without NCCL.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.search_space.knob_spec import (
    Family,
    KnobSpec,
    LauncherOption,
    Situation,
    Variable,
)
from hvd_autosync.search_space.knobs import (
    CategoricalKnob,
    Condition,
    Knob,
    categorical_knob,
    float_knob,
    integer_knob,
)

_MIB = 1024 * 1024
#: Number of tensors in Horovod's cache by default.
_CACHED = 1024


def _several_gpus_per_host(situation: Situation) -> bool:
    return situation.on_gpu and situation.resources.two_levels


def _several_gpus_per_host_under_mpi(situation: Situation) -> bool:
    return _several_gpus_per_host(situation) and situation.can_be_under_mpi


def _on_gpu(situation: Situation) -> bool:
    return situation.on_gpu


def _with_horovods_default(knob: Knob, situation: Situation) -> Knob:
    assert isinstance(knob, CategoricalKnob)
    return replace(knob, default=situation.default_controller)


def _for_the_tensors(knob: Knob, situation: Situation) -> Knob:
    """More than the default only where more tensors than that are trained."""
    assert isinstance(knob, CategoricalKnob)
    trained = [p for p in situation.model.parameters if p.ready_order >= 0]
    few = len(trained) <= _CACHED
    return knob.restrict((0, _CACHED)) if few else knob


def _gathers_sparse_gradients(situation: Situation) -> bool:
    sparse = situation.model.has_sparse and not situation.on_gpu
    return situation.resources.two_levels and sparse and situation.can_be_under_mpi


def _only_under_mpi(knob: Knob, situation: Situation) -> Knob:
    under_mpi = Condition(CONTROLLER.name, ("mpi",)) if situation.free_controller else None
    return replace(knob, condition=under_mpi)


# One knob for controller and CPU operations: if the two differ, Horovod 0.28.1 crashes with a
# segmentation fault in its first allreduce (HOROVOD_CPU_OPERATIONS=gloo under --mpi).
CONTROLLER = KnobSpec(
    categorical_knob(
        "controller",
        ("gloo", "mpi"),
        "gloo",
        help="Library that coordinates the ranks and runs collectives on the CPU.",
    ),
    sets=LauncherOption(("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS")),
    when="Horovod has Gloo and MPI; neither --gloo nor --mpi is given; the script uses neither "
    "mpi4py nor variables of its launcher",
    applies=lambda situation: situation.free_controller,
    narrow=_with_horovods_default,
    doc="""
    chooses the library that coordinates the ranks and carries collectives on CPUs. It matters on
    CPUs; on GPUs gradients go through NCCL either way. It is one knob, because Horovod 0.28.1
    crashes if the controller and the CPU operations differ. Measured: with one rank on each of two
    hosts at 100 Mbit/s, the change from MPI (Open MPI 5 as packaged for Python) to Gloo was nearly
    all of a speed-up of 1.37 (1.26 to 1.48).
    """,
)
FUSION_THRESHOLD = KnobSpec(
    integer_knob(
        "fusion_threshold_bytes",
        0,
        256 * _MIB,
        128 * _MIB,
        unit="B",
        scale="log",
        log_offset=64 * 1024,
        multiple=64 * 1024,
        help="Size of Horovod's fusion buffer: most bytes of gradients in one collective; 0 "
        "disables fusion.",
    ),
    sets=Variable("HOROVOD_FUSION_THRESHOLD", reread=True, kept=True),
    when="always",
    cost="background loop",
    doc="""
    is the size of the fusion buffer: the most bytes that Horovod fuses into one collective. A large
    one fuses many small gradients, which saves latency; a small one lets the first gradients leave
    early. It matters for models of many small tensors, and where communication hides behind
    backward. On processors hiding gains little: the ring and the backward share the cores.
    """,
)
CYCLE_TIME = KnobSpec(
    float_knob(
        "cycle_time_ms",
        0.1,
        100.0,
        1.0,
        unit="ms",
        scale="log",
        help="Duration of a cycle of Horovod's background loop; a longer cycle fuses more "
        "gradients but delays them.",
    ),
    sets=Variable("HOROVOD_CYCLE_TIME", reread=True, kept=True),
    when="always",
    cost="background loop",
    doc="""
    is the pause between two cycles of Horovod's background loop, in which it looks for ready
    gradients. A long one fuses more and waits longer. Each exchange of several operations (`rows`,
    `sharded`, most codecs) waits for a cycle between them, so a short one is better there. It
    matters if a step takes few milliseconds. Measured, with the threshold: Horovod's own documented
    recipe for both gave 1.02 and 1.03 between hosts and 1.21 (1.00 to 1.48) on one host, for a
    small ResNet.
    """,
)
CACHE_CAPACITY = KnobSpec(
    categorical_knob(
        "cache_capacity",
        (0, _CACHED, 4096),
        _CACHED,
        help="Number of tensors in Horovod's response cache; 0 negotiates every tensor in every "
        "step.",
    ),
    sets=Variable("HOROVOD_CACHE_CAPACITY", reread=True, kept=True),
    when="always; 4096 only for models of more than 1024 trained tensors",
    narrow=_for_the_tensors,
    cost="background loop",
    doc="""
    is the number of tensors in Horovod's response cache, which keeps the agreement on them; with 0
    each tensor is negotiated in every step. It matters for models of more than 1,024 tensors, for
    which the default cache is too small, and in large jobs. No gain was measured here, where models
    have up to 71 tensors.
    """,
)
HIERARCHICAL_ALLREDUCE = KnobSpec(
    categorical_knob(
        "hierarchical_allreduce",
        (False, True),
        False,
        help="Hierarchical allreduce: NCCL within each host, MPI across hosts, NCCL within each "
        "host.",
    ),
    sets=Variable("HOROVOD_HIERARCHICAL_ALLREDUCE", reread=True),
    when="NCCL; MPI; several hosts with several ranks each",
    applies=_several_gpus_per_host_under_mpi,
    narrow=_only_under_mpi,
    doc="""
    sums by NCCL within a host, by MPI across hosts, and distributes by NCCL. It matters with
    several GPUs per host and a network much slower than their links. Not run here, for lack of
    GPUs. Without MPI, and on processors, Horovod ignores the variable; our exchange `hierarchical`
    is the counterpart.
    """,
)
TORUS_ALLREDUCE = KnobSpec(
    categorical_knob(
        "torus_allreduce",
        (False, True),
        False,
        help="Two-dimensional (torus) NCCL allreduce: within hosts and across hosts.",
    ),
    sets=Variable("HOROVOD_TORUS_ALLREDUCE", reread=True),
    when="NCCL; several hosts with several ranks each",
    applies=_several_gpus_per_host,
    doc="""
    is NCCL's allreduce in two dimensions, within hosts and across them. It matters where
    `hierarchical_allreduce` does, also without MPI; where both are on, that one is used. Not run
    here, for lack of several GPUs on several hosts.
    """,
)
HIERARCHICAL_ALLGATHER = KnobSpec(
    categorical_knob(
        "hierarchical_allgather",
        (False, True),
        False,
        help="Hierarchical allgather of sparse gradients: first within a host, through shared "
        "memory.",
    ),
    sets=Variable("HOROVOD_HIERARCHICAL_ALLGATHER", reread=True),
    when="sparse gradients; MPI; CPUs; several hosts with several ranks each",
    applies=_gathers_sparse_gradients,
    narrow=_only_under_mpi,
    doc="""
    gathers sparse gradients in a host's shared memory before they cross the network. It matters
    only under MPI, on processors, with sparse gradients and several ranks on each of several hosts.
    No gain was measured; the exchange `rows` is mostly the better choice for tables.
    """,
)
NUM_NCCL_STREAMS = KnobSpec(
    integer_knob("num_nccl_streams", 1, 4, 1, help="Number of NCCL streams for collectives."),
    sets=Variable("HOROVOD_NUM_NCCL_STREAMS", reread=True, kept=True),
    when="NCCL; GPUs",
    applies=_on_gpu,
    doc="""
    is the number of NCCL streams that collectives are spread over. More than one can overlap small
    collectives on GPUs whose link one collective does not fill. Not run here, for lack of GPUs.
    """,
)
BATCHED_COPIES = KnobSpec(
    categorical_knob(
        "batch_d2d_memcopies",
        (False, True),
        True,
        help="Copy small tensors into the fusion buffer with a single kernel.",
    ),
    # Not reread: Horovod cannot switch it on again.
    sets=Variable("HOROVOD_BATCH_D2D_MEMCOPIES"),
    when="NCCL; GPUs",
    applies=_on_gpu,
    doc="""
    copies many small tensors into the fusion buffer with one kernel. Off can only help if tensors
    are few and large; it is on by default in Horovod. Not run here, for lack of GPUs.
    """,
)

HOROVOD = Family(
    "Horovod's own knobs",
    (
        CONTROLLER,
        FUSION_THRESHOLD,
        CYCLE_TIME,
        CACHE_CAPACITY,
        HIERARCHICAL_ALLREDUCE,
        TORUS_ALLREDUCE,
        HIERARCHICAL_ALLGATHER,
        NUM_NCCL_STREAMS,
        BATCHED_COPIES,
    ),
)
