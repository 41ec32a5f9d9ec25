"""Knobs below Horovod: NCCL's transport on GPUs, and PyTorch's threads on CPUs.

Names, values and defaults are those of NCCL's environment variables (NCCL's user guide,
"Environment Variables") and of OpenMP. 0 and ``auto`` leave the choice to the library, and set no
variable. NCCL reads its variables when a communicator is made, at the first collective.
"""

from __future__ import annotations

from hvd_autosync.search_space.knob_spec import Family, KnobSpec, Situation, Variable
from hvd_autosync.search_space.knobs import IntegerKnob, Knob, categorical_knob, integer_knob

_MIB = 1024 * 1024
_GROUP = "transport"
#: Channels of a communicator; newer versions have up to 64.
_MOST_CHANNELS = 32
#: NCCL's limit of the product of socket threads and sockets per thread. Where only one of them is
#: set, NCCL's own choice of the other is at most 8, so neither may be more than that.
MOST_SOCKETS = 64
_MOST_EACH = 8
_MOST_THREADS = 1024
#: The variable of :data:`THREADS_PER_RANK`. Ranks also call ``torch.set_num_threads``
#: (``runtime/install/activation.py``), because OpenMP reads it when it is loaded.
THREADS_VARIABLE = "OMP_NUM_THREADS"


def _on_gpu(situation: Situation) -> bool:
    return situation.on_gpu and situation.resources.world_size > 1


def _between_hosts(situation: Situation) -> bool:
    return situation.on_gpu and situation.resources.several_hosts


def _spare_cores(situation: Situation) -> bool:
    return not situation.resources.has_gpu and situation.resources.cores > 1


def _up_to_the_cores(knob: Knob, situation: Situation) -> Knob:
    assert isinstance(knob, IntegerKnob)
    return knob.restrict(0, min(situation.resources.cores, _MOST_THREADS))


def _beside_held(knob: Knob, situation: Situation) -> Knob:
    """Keep the product of both socket knobs within the limit, if the user has set the other."""
    assert isinstance(knob, IntegerKnob)
    other = SOCKETS_PER_THREAD if knob.name == SOCKET_THREADS.name else SOCKET_THREADS
    held = situation.held.get(other.name)
    most = MOST_SOCKETS // held if isinstance(held, int) and held > 0 else _MOST_EACH
    return knob.restrict(0, min(most, _MOST_EACH))


ALGORITHM = KnobSpec(
    categorical_knob(
        "nccl_algorithm",
        ("auto", "ring", "tree"),
        "auto",
        group=_GROUP,
        help="Algorithm of NCCL's collectives; auto: NCCL decides by message size.",
    ),
    sets=Variable("NCCL_ALGO", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the algorithm of NCCL's collectives. A ring moves the fewest bytes, a tree has the fewest
    steps; NCCL's own choice depends on the size of the message and on a model of the hardware,
    which a cluster of its own kind may not fit. Other algorithms (CollNet, NVLS, PAT) need hardware
    that cannot be seen before a trial, and are left to NCCL. Newer versions of NCCL refuse `tree`
    for collectives that have no tree, such as allgather: such a trial fails, and does not win. Not
    run on GPUs.
    """,
)
PROTOCOL = KnobSpec(
    categorical_knob(
        "nccl_protocol",
        ("auto", "ll", "simple"),
        "auto",
        group=_GROUP,
        help="Protocol of NCCL's messages: low latency (ll) or full bandwidth (simple); auto: NCCL "
        "decides by message size.",
    ),
    sets=Variable("NCCL_PROTO", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the protocol of NCCL's messages. `ll` sends a flag with every 4 bytes of data, which saves
    latency and costs half of the bandwidth; `simple` is for large messages. `ll128` is not tried:
    by NCCL's guide it corrupts data where the hardware does not support it, and NCCL chooses it by
    itself where it does. It matters for models of many small gradients. Not run on GPUs.
    """,
)
MIN_CHANNELS = KnobSpec(
    integer_knob(
        "nccl_min_channels",
        0,
        _MOST_CHANNELS,
        0,
        group=_GROUP,
        scale="log",
        log_offset=1.0,
        help="Least of NCCL's channels, each a block of threads on the GPU; 0: NCCL's choice.",
    ),
    sets=Variable("NCCL_MIN_NCHANNELS", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the least number of channels, over which NCCL spreads a collective. Each is a block of
    threads that takes a multiprocessor from the computation. More channels can fill a fast link, or
    several. NCCL applies the maximum first and then copies channels up to the minimum, so a minimum
    above the maximum is valid. Not run on GPUs.
    """,
)
MAX_CHANNELS = KnobSpec(
    integer_knob(
        "nccl_max_channels",
        0,
        _MOST_CHANNELS,
        0,
        group=_GROUP,
        scale="log",
        log_offset=1.0,
        help="Most of NCCL's channels, each a block of threads on the GPU; 0: NCCL's choice.",
    ),
    sets=Variable("NCCL_MAX_NCHANNELS", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the largest number of channels. Fewer leave more multiprocessors to the backward, behind
    which communication hides, and are enough for a slow network. Not run on GPUs.
    """,
)
BUFFER_SIZE = KnobSpec(
    categorical_knob(
        "nccl_buffer_bytes",
        tuple(_MIB << power for power in range(6)),
        4 * _MIB,
        group=_GROUP,
        unit="B",
        help="Size of the buffers through which NCCL sends between two GPUs.",
    ),
    sets=Variable("NCCL_BUFFSIZE", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the size of the buffers between each pair of GPUs, in powers of two, as NCCL's guide
    recommends. A message travels in parts of a buffer: larger ones keep a link with a high latency
    busy, smaller ones save memory and let a pipeline of many GPUs fill earlier. Not run on GPUs.
    """,
)
THREADS_PER_BLOCK = KnobSpec(
    categorical_knob(
        "nccl_threads",
        (0, 64, 128, 256, 512),
        0,
        group=_GROUP,
        help="Threads of a block of NCCL's kernels; 0: NCCL's choice.",
    ),
    sets=Variable("NCCL_NTHREADS", "NCCL"),
    when="NCCL; GPUs; several ranks",
    applies=_on_gpu,
    doc="""
    is the number of threads of each block of NCCL's kernels. NCCL's own choice is 512 on recent
    GPUs. More help where the GPU's clock is low, fewer disturb computation less. Not run on GPUs.
    """,
)
SOCKET_THREADS = KnobSpec(
    integer_knob(
        "nccl_socket_threads",
        0,
        _MOST_EACH,
        0,
        group=_GROUP,
        scale="log",
        log_offset=1.0,
        help="CPU threads of each of NCCL's connections over sockets; 0: NCCL's choice.",
    ),
    sets=Variable("NCCL_SOCKET_NTHREADS", "NCCL"),
    when="NCCL; GPUs; several hosts",
    applies=_between_hosts,
    narrow=_beside_held,
    doc="""
    is the number of CPU threads that serve a connection between two hosts. One thread cannot fill a
    fast Ethernet: by NCCL's guide, 4 suit 100 Gbit/s. It matters only where NCCL uses TCP sockets,
    not InfiniBand. NCCL allows at most 64 sockets, which are threads times sockets per thread; each
    of the two is tuned up to 8. Not run on GPUs.
    """,
)
SOCKETS_PER_THREAD = KnobSpec(
    integer_knob(
        "nccl_sockets_per_thread",
        0,
        _MOST_EACH,
        0,
        group=_GROUP,
        scale="log",
        log_offset=1.0,
        help="Sockets that each of these threads opens; 0: NCCL's choice.",
    ),
    sets=Variable("NCCL_NSOCKS_PERTHREAD", "NCCL"),
    when="NCCL; GPUs; several hosts",
    applies=_between_hosts,
    narrow=_beside_held,
    doc="""
    is the number of TCP connections of each of these threads. It matters where the rate of one
    connection is limited, as in clouds. Not run on GPUs.
    """,
)
THREADS_PER_RANK = KnobSpec(
    integer_knob(
        "threads_per_rank",
        0,
        _MOST_THREADS,
        0,
        group=_GROUP,
        scale="log",
        log_offset=1.0,
        help="CPU threads with which PyTorch computes in each rank; 0: PyTorch decides.",
    ),
    sets=Variable(THREADS_VARIABLE, "OpenMP"),
    when="CPUs; more cores than ranks on a host; the script sets no number of threads",
    applies=_spare_cores,
    narrow=_up_to_the_cores,
    doc="""
    is the number of threads with which PyTorch computes on CPUs (`torch.set_num_threads`).
    PyTorch's own choice is one for each core of the host, whatever the number of ranks there, and
    then ranks, their data loaders and Horovod's threads wait for each other. It is exact up to the
    order of additions, which depends on the number of threads. A script that calls
    `torch.set_num_threads`, or sets `OMP_NUM_THREADS` in its first lines, keeps its number. No gain
    was measured here: the machine has no more cores than ranks.
    """,
)

TRANSPORT = Family(
    "Transport knobs: NCCL, and threads on CPUs",
    (
        ALGORITHM,
        PROTOCOL,
        MIN_CHANNELS,
        MAX_CHANNELS,
        BUFFER_SIZE,
        THREADS_PER_BLOCK,
        SOCKET_THREADS,
        SOCKETS_PER_THREAD,
        THREADS_PER_RANK,
    ),
    intro="""
    Libraries below Horovod read these variables. They are not tuned if you have set them. The knobs
    of NCCL were not run on GPUs: tests show that the variables reach the ranks, and nothing more.
    `hvd-autosync show --nccl-tuner` writes a winner as the configuration of NCCL's [tuner
    plugin](clusters.md#nccls-tuner-plugin).
    """,
)
