"""Knobs of codecs: how each class's gradients are compressed."""

from __future__ import annotations

from hvd_autosync.search_space.exchange_plan import (
    EMBEDDING,
    LARGE,
    REST,
    class_knob,
    class_of,
    matrix_shape,
)
from hvd_autosync.search_space.families.exchanges import OF_CLASS
from hvd_autosync.search_space.knob_spec import Family, KnobSpec, PlanField, Situation
from hvd_autosync.search_space.knobs import (
    Condition,
    IntegerKnob,
    Knob,
    categorical_knob,
    float_knob,
    integer_knob,
)

_ALLOWED = "--autosync-allow codec; hvd.DistributedOptimizer; float32 or float64"
#: The exchanges that apply a codec.
_CODED = ("allreduce", "hierarchical")


def _has_floats(situation: Situation, parameter_class: str) -> bool:
    coded = (p for p in situation.dense if p.dtype in ("float32", "float64"))
    return situation.model.wrapped and any(
        class_of(p.name, situation.classes) == parameter_class for p in coded
    )


def _codec(parameter_class: str, *others: str, when: str = "", doc: str) -> KnobSpec:
    exchange = class_knob(parameter_class, "exchange")
    return KnobSpec(
        categorical_knob(
            class_knob(parameter_class, "codec"),
            ("none", "fp16", "bf16", "int8", *others),
            "none",
            group="codec",
            exact=False,
            help=f"Compression of gradients {OF_CLASS[parameter_class]}.",
            condition=Condition(exchange, _CODED) if parameter_class != REST else None,
        ),
        sets=PlanField("exchange", f"{parameter_class}.codec"),
        when=f"{_ALLOWED}; {when}" if when else _ALLOWED,
        applies=lambda situation: _has_floats(situation, parameter_class),
        cost="exchange",
        doc=doc,
    )


def _ratio(parameter_class: str, *, doc: str) -> KnobSpec:
    codec = class_knob(parameter_class, "codec")
    return KnobSpec(
        float_knob(
            class_knob(parameter_class, "ratio"),
            0.001,
            0.25,
            0.01,
            group="codec",
            exact=False,
            scale="log",
            help="Share of elements that the codec topk sends.",
            condition=Condition(codec, ("topk",)),
        ),
        sets=PlanField("exchange", f"{parameter_class}.ratio"),
        when=f"as {codec}, if it is topk",
        applies=lambda situation: _has_floats(situation, parameter_class),
        cost="exchange",
        doc=doc,
    )


def _up_to_the_matrices(knob: Knob, situation: Situation) -> Knob:
    """At most the smallest matrix's rank.

    Includes parameters without gradients: the runtime checks every parameter of the class.
    """
    assert isinstance(knob, IntegerKnob)
    large = [p for p in situation.model.parameters if p.name in situation.classes.get(LARGE, ())]
    return knob.restrict(1, min(min(matrix_shape(p.shape)) for p in large))


EMBEDDING_CODEC = _codec(
    EMBEDDING,
    "topk",
    when="tables of which batches touch few rows",
    doc="""
    compresses gradients of tables, while they travel by `allreduce` or `hierarchical`. It matters
    if `rows` does not help, because batches of all ranks together touch most of the table.
    Measured: `topk` on its tables made the model of collaborative filtering 6.3 times as fast at
    100 Mbit/s, while `rows` made it 4.6 times.
    """,
)
EMBEDDING_RATIO = _ratio(
    EMBEDDING,
    doc="""
    is the share of a table's elements that `topk` sends; the rest is added to the next gradient
    (error feedback). Each element that is sent takes 8 bytes, so a share of 0.25 saves half of the
    bytes with two ranks and none with four. Small shares lose most quality
    (`benchmarks/guarding.py`).
    """,
)
LARGE_CODEC = _codec(
    LARGE,
    "topk",
    "powersgd",
    when="gradients of 256 KiB or more",
    doc="""
    compresses gradients of large matrices, which are most of the bytes of most models. It matters
    if steps wait for the network. Measured: with `powersgd` 10.6 times (6.1 to 18.4) for a VGG-like
    and 4.0 (3.1 to 5.0) for a BERT-like model at 100 Mbit/s; `fp16` 1.5 to 2.0 and `int8` 1.3 to
    2.4 at 50 and 100 Mbit/s. At 1000 Mbit/s 2.6 (1.25 to 5.4) is left for the first model, and
    nothing for the second. On processors `fp16` is slow, because Horovod adds half-precision
    numbers one by one there; `bf16` is not. Under local steps `fp16` sends averages as `bf16`.
    """,
)
LARGE_RATIO = _ratio(
    LARGE,
    doc="""
    is the share of a matrix's elements that `topk` sends. It matters as much as the codec. 1 % sent
    0.07 bytes for each byte of gradients, while Horovod's ring sent 1.62, and was 1.3 to 8 times as
    fast. In `benchmarks/guarding.py`, 5 % and 10 % were worse than the default by more than two
    tolerances.
    """,
)
LARGE_RANK = KnobSpec(
    integer_knob(
        class_knob(LARGE, "rank"),
        1,
        32,
        2,
        group="codec",
        exact=False,
        scale="log",
        help="Rank of the matrices of the codec powersgd.",
        condition=Condition(class_knob(LARGE, "codec"), ("powersgd",)),
    ),
    sets=PlanField("exchange", "large.rank"),
    when="as large_codec, if it is powersgd",
    applies=lambda situation: _has_floats(situation, LARGE),
    narrow=_up_to_the_matrices,
    cost="exchange",
    doc="""
    is the rank of the matrices that `powersgd` sends. The bytes are proportional to it, and the
    missing part is added to the next gradient (error feedback). Ranks of 16 and 32 were admitted
    for a small language model, and rank 10 for the digits, which came to the same accuracy 9.4
    times as fast together with 16 local steps.
    """,
)
REST_CODEC = _codec(
    REST,
    doc="""
    compresses all other gradients. They are small, so it saves little latency and few bytes. It
    matters once the large ones are compressed. `int8` and `bf16` are in most winners with codecs,
    and no loss of quality could be measured.
    """,
)

CODECS = Family(
    "Codecs: `--autosync-allow codec`",
    (EMBEDDING_CODEC, EMBEDDING_RATIO, LARGE_CODEC, LARGE_RATIO, LARGE_RANK, REST_CODEC),
)
