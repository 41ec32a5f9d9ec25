"""Knobs of the protocol: whether ranks wait for each other, and what is done about stragglers."""

from __future__ import annotations

from hvd_autosync.search_space.knob_spec import Family, KnobSpec, PlanField, nowhere
from hvd_autosync.search_space.knobs import (
    Condition,
    Knob,
    categorical_knob,
    float_knob,
    integer_knob,
)
from hvd_autosync.search_space.protocol import MOMENTUM_MODES, STRAGGLER_POLICIES


def _protocol_knob(knob: Knob, attribute: str, *, cost: str = "", doc: str) -> KnobSpec:
    return KnobSpec(
        knob,
        sets=PlanField("protocol", attribute),
        when="only in a strategy file or by --autosync-recurring (docs/protocols.md)",
        applies=nowhere,
        cost=cost,
        doc=doc,
    )


PROTOCOL = _protocol_knob(
    categorical_knob(
        "protocol",
        ("bsp", "asp", "ssp"),
        "bsp",
        group="protocol",
        exact=False,
        help="Synchronization protocol: ranks wait for each other in every step (bsp), only at "
        "the ends of epochs (asp), or also for ranks that are more than staleness steps behind "
        "(ssp).",
    ),
    "kind",
    cost="steps without a barrier",
    doc="""
    says whether ranks wait for each other in every step (`bsp`), only at the ends of epochs
    (`asp`), or also for those that are too far behind (`ssp`). It matters if ranks or links are
    uneven, or stall now and then. Between the switch and the end the model is trained in another
    way, so watch the losses.
    """,
)
_NO_BARRIER = Condition(PROTOCOL.name, ("asp", "ssp"))
STALENESS = _protocol_knob(
    integer_knob(
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
    ),
    "staleness",
    doc="""
    is the number of steps that a rank may be ahead of the slowest under `ssp`. 0 makes the steps of
    BSP, over another path; a few tolerate short stalls; many are ASP. It matters only under `ssp`.
    """,
)
SYNC_SHARE = _protocol_knob(
    float_knob(
        "sync_share",
        0.0,
        1.0,
        0.0,
        group="protocol",
        exact=False,
        help="Share of the samples that is trained under bsp (Sync-Switch).",
        condition=_NO_BARRIER,
    ),
    "share",
    cost="steps without a barrier",
    doc="""
    is the share of the work under BSP, Sync-Switch's f. It matters most of the protocol knobs:
    stale gradients do most harm at the beginning of a training. Only whole trainings can find its
    best value; recurring jobs search for it.
    """,
)
ASYNC_FIRST = _protocol_knob(
    categorical_knob(
        "async_first",
        (False, True),
        False,
        group="protocol",
        exact=False,
        help="Train the share under bsp last instead of first.",
        condition=_NO_BARRIER,
    ),
    "async_first",
    doc="""
    puts that share at the end. It is worse at every f by the paper (Sync-Switch, ICDCS 2021) and
    exists for comparison. It matters only with a share between 0 and 1.
    """,
)
SWITCH_RATE = _protocol_knob(
    categorical_knob(
        "switch_rate",
        ("divided", "kept"),
        "divided",
        group="protocol",
        exact=False,
        help="Whether the learning rate is divided by the number of ranks under asp and ssp, or "
        "kept.",
    ),
    "rate",
    doc="""
    = `kept` leaves the learning rate undivided while there is no barrier. The rate was scaled up
    for the mean of all ranks' gradients, so most trainings diverge with it, and the loss guard has
    to catch that. It matters only without a barrier.
    """,
)
SWITCH_MOMENTUM = _protocol_knob(
    categorical_knob(
        "switch_momentum",
        MOMENTUM_MODES,
        "kept",
        group="protocol",
        exact=False,
        help="Momentum under asp and ssp: kept, set to zero, divided by the number of ranks "
        "(scaled), or divided and then raised step by step (ramped).",
    ),
    "momentum",
    doc="""
    sets the momentum while there is no barrier: kept, zero, divided by the number of ranks, or
    divided and ramped up again. Kept is the best by the paper. It matters for optimizers with
    momentum or betas.
    """,
)
STRAGGLERS = _protocol_knob(
    categorical_knob(
        "stragglers",
        STRAGGLER_POLICIES,
        "none",
        group="protocol",
        exact=False,
        help="Straggler policy: none; no barrier while there is a straggler (greedy); exclude it "
        "until the end of the epoch (elastic); batch sizes in proportion to the speed of the ranks "
        "(balance).",
    ),
    "stragglers",
    cost="replicas",
    doc="""
    is the straggler policy under BSP, for a rank that computes clearly longer than the others.
    `none` does nothing. `greedy` has no barrier while there is a straggler. `elastic` excludes it
    until the end of the others' epoch, and it skips the rest of its own. `balance` is [dynamic
    batching](protocols.md): batch sizes in proportion to the speed of the ranks, over the same
    samples as before. It matters on shared or failing hosts, `balance` on hosts of different kinds.
    By the paper elastic keeps the accuracy and greedy costs about 2 points.
    """,
)
TOTAL_SAMPLES = _protocol_knob(
    integer_knob(
        "total_samples",
        0,
        10**15,
        0,
        group="protocol",
        exact=False,
        scale="log",
        log_offset=1.0,
        help="Total number of samples of the training over all ranks, to which sync_share refers; "
        "0: unknown, or under --autosync-recurring as many as in an earlier run.",
    ),
    "total",
    cost="steps without a barrier",
    doc="""
    is the whole work of which `sync_share` is a share: samples of all ranks together. 0 means
    unknown: with a share between 0 and 1 the training then stays under BSP (but for the straggler
    policy). Recurring jobs count it in their first run. With the shares 0, the default, and 1 it is
    not needed: 0 begins without a barrier as soon as all ranks know the ends of their epochs, 1 is
    BSP.
    """,
)

PROTOCOLS = Family(
    "Protocol knobs",
    (
        PROTOCOL,
        STALENESS,
        SYNC_SHARE,
        ASYNC_FIRST,
        SWITCH_RATE,
        SWITCH_MOMENTUM,
        STRAGGLERS,
        TOTAL_SAMPLES,
    ),
    intro="""
    Trials tune none of these, because they run only the beginning of a training. They are for
    strategy files and for [recurring jobs](protocols.md).
    """,
)
