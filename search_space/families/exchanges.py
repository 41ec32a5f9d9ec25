"""Knobs of the exchange of gradients: buckets, their order, and each class's exchange."""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.search_space.exchange_plan import (
    BY_FACTORS,
    EMBEDDING,
    FACTORS,
    HIERARCHICAL_FACTORS,
    LARGE,
    OF_TWO_LEVELS,
    REST,
    can_send_factors,
    class_knob,
)
from hvd_autosync.search_space.families.lossless import LOSSLESS
from hvd_autosync.search_space.knob_spec import Family, KnobSpec, PlanField, Situation
from hvd_autosync.search_space.knobs import (
    CategoricalKnob,
    Condition,
    IntegerKnob,
    Knob,
    categorical_knob,
    integer_knob,
)

#: The gradients of each class, in words.
OF_CLASS = {
    EMBEDDING: "of embedding tables (a batch touches few rows)",
    LARGE: "of large matrices",
    REST: "of all other parameters",
}


def _several_gradients(situation: Situation) -> bool:
    return situation.model.wrapped and len(situation.dense) > 1


def _up_to_the_gradients(knob: Knob, situation: Situation) -> IntegerKnob:
    assert isinstance(knob, IntegerKnob)
    return knob.restrict(0, len(situation.dense))


def _with_buckets(knob: Knob, situation: Situation) -> Knob:
    most = int(_up_to_the_gradients(BUCKETS.knob, situation).high)
    return replace(knob, condition=Condition(BUCKETS.name, tuple(range(1, most + 1))))


BUCKETS = KnobSpec(
    integer_knob(
        "buckets",
        0,
        64,
        0,
        group="exchange",
        scale="log",
        log_offset=1.0,
        help="Number of gradient buckets; 0 leaves fusion to Horovod.",
    ),
    sets=PlanField("exchange", "buckets"),
    when="hvd.DistributedOptimizer; several dense gradients",
    applies=_several_gradients,
    narrow=_up_to_the_gradients,
    cost="buckets",
    doc="""
    gathers gradients in that many buckets of about equal bytes; 0 lets Horovod fuse what is ready.
    It matters for models of many tensors, if the cycle of Horovod's fusion and the arrival of
    gradients do not fit. Measured: four buckets were within the noise of no buckets for three
    models at 50 and 100 Mbit/s (0.92 to 1.24).
    """,
)
BUCKET_RULE = KnobSpec(
    categorical_knob(
        "bucket_rule",
        ("ordered", "size"),
        "ordered",
        group="exchange",
        help="Gradients in a bucket: consecutive in order of arrival (ordered) or of similar size "
        "(size).",
        condition=Condition("buckets", tuple(range(1, 65))),
    ),
    sets=PlanField("exchange", "rule"),
    when="as buckets, if buckets is not 0",
    applies=_several_gradients,
    narrow=_with_buckets,
    cost="buckets",
    doc="""
    says whether a bucket holds gradients that arrive one after another (`ordered`: a bucket is
    complete early) or of similar sizes (`size`). It matters only with several buckets, and most if
    few tensors have most of the bytes. It was not measured separately.
    """,
)
ORDER = KnobSpec(
    categorical_knob(
        "order",
        ("arrival", "priority"),
        "arrival",
        group="order",
        exact=False,
        help="Order of gradient transfers: by arrival, or the first layers first with each "
        "layer's update deferred to its next forward pass (priority). priority is exact only for "
        "scripts that access parameters through their modules.",
    ),
    sets=PlanField("exchange", "order"),
    when="--autosync-allow order; hvd.DistributedOptimizer; several dense gradients",
    applies=_several_gradients,
    cost="deferred updates",
    doc="""
    = `priority` sends the gradients of the first layers first and defers the update of a layer
    until its next forward, so communication hides behind forward too. It matters if forward and
    communication take about equally long; at 100 Mbit/s a forward of 10 ms hides nothing of 600 ms.
    Measured: 0.82 to 1.15, within the noise. It is allowed by name because not every reader of a
    parameter can be seen; no update is deferred [where readers are known to be
    unseen](exchanges.md#priority-order-autosync-allow-order), as under `torch.compile`.
    """,
)


def _exchange(parameter_class: str, *others: str, when: str, doc: str) -> KnobSpec:
    """Declare the exchange of one class; it applies where the class has several to choose from."""

    def narrow(knob: Knob, situation: Situation) -> Knob | None:
        assert isinstance(knob, CategoricalKnob)
        absent = set() if situation.resources.even_levels else {*OF_TWO_LEVELS}
        large = [p for p in situation.dense if p.name in situation.classes.get(LARGE, ())]
        ranks = situation.resources.world_size
        if not any(can_send_factors(p, ranks) for p in large):
            absent |= {*BY_FACTORS}
        choices = [choice for choice in knob.choices if choice not in absent]
        return knob.restrict(choices) if len(choices) > 1 else None

    return KnobSpec(
        categorical_knob(
            class_knob(parameter_class, "exchange"),
            ("allreduce", *others),
            "allreduce",
            group="exchange",
            help=f"How gradients {OF_CLASS[parameter_class]} are reduced over the ranks.",
        ),
        sets=PlanField("exchange", f"{parameter_class}.exchange"),
        when=f"hvd.DistributedOptimizer; {when}",
        applies=lambda s: s.model.wrapped and parameter_class in s.dense_classes,
        narrow=narrow,
        cost="exchange",
        doc=doc,
    )


EMBEDDING_EXCHANGE = _exchange(
    EMBEDDING,
    "rows",
    "hierarchical",
    "sharded",
    when="tables of which batches touch few rows",
    doc="""
    is the exchange for gradients of tables of which a batch touches few rows. `rows` sends only
    touched rows (sparse rows). It matters if such tables are much of the model, as in
    recommendation. Measured: 4.0 to 4.6 times for a model of neural collaborative filtering at 50
    to 100 Mbit/s, with a thirteenth of the bytes, and 3.7 to 5.5 times with the rest under
    `hierarchical`; nothing for models without tables.
    """,
)
LARGE_EXCHANGE = _exchange(
    LARGE,
    "hierarchical",
    "sharded",
    FACTORS,
    HIERARCHICAL_FACTORS,
    when="gradients of 256 KiB or more",
    doc="""
    is the exchange for gradients of large matrices. `factors` sends the inputs and output gradients
    of linear layers in place of their product. It matters if large linear layers meet small
    batches, on slow links. Measured: 6.2 times for a VGG-like model at 100 Mbit/s with two ranks on
    each of two hosts, with a seventeenth of the bytes; nothing for models whose batches have more
    rows than their layers. `hierarchical_factors` exchanges them across hosts before it does within
    them: with two ranks on each of two hosts two thirds of the factors leave a host, in one
    operation more. Measured: 1.13 times as fast as `factors` for a model of digits at 50 Mbit/s and
    1.0 at 100, for a VGG-like one 1.09 at 20 and 0.9 at 100. With `hierarchical` each of two hosts
    with two ranks sends one byte for
    each byte of gradients, while a ring sends 1.5. `sharded` saves each rank work and memory of the
    optimizer. Measured: `hierarchical` 1.18 to 1.49 at 100 Mbit/s, 1.06 to 1.15 at 300, at most 1.5
    by theory; `sharded` 0.70 to 0.85 at 50 and 100, because it sends more with two ranks per host
    and these models have little optimizer work to save.
    """,
)
REST_EXCHANGE = _exchange(
    REST,
    "hierarchical",
    when="several hosts with several ranks each",
    doc="""
    is the same for all other parameters: biases, normalizations, small matrices. It matters for
    models of many small tensors, with several ranks on each of several hosts. The figures of
    `hierarchical` above are for all classes together.
    """,
)
LARGE_SLICES = KnobSpec(
    integer_knob(
        class_knob(LARGE, "slices"),
        1,
        16,
        1,
        group="exchange",
        scale="log",
        help=f"Number of slices of each gradient {OF_CLASS[LARGE]}.",
    ),
    sets=PlanField("exchange", "large.slices"),
    when="hvd.DistributedOptimizer; gradients of 256 KiB or more",
    applies=lambda situation: situation.model.wrapped and LARGE in situation.dense_classes,
    cost="buckets",
    doc="""
    cuts large tensors into slices that travel separately. It matters if one tensor is most of the
    model: its first slice is sent while others are coded. In the winners found for a VGG-like and a
    BERT-like model at 100 Mbit/s there are 4 and 3 slices, at 1000 Mbit/s none.
    """,
)

EXCHANGES = Family(
    "Exchange knobs",
    (
        BUCKETS,
        BUCKET_RULE,
        ORDER,
        EMBEDDING_EXCHANGE,
        LARGE_EXCHANGE,
        REST_EXCHANGE,
        LARGE_SLICES,
        *LOSSLESS,
    ),
    intro="""
    Our optimizer reads these knobs. It replaces Horovod's, so they need `hvd.DistributedOptimizer`
    in the script. [How gradients travel](exchanges.md) explains the classes of parameters
    (`embedding`, `large`, `rest`) and the exchanges.
    """,
)
