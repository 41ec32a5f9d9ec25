"""Knobs of lossless codes: whether each class's gradients travel as shorter codes."""

from __future__ import annotations

from hvd_autosync.search_space.exchange_plan import BY_FACTORS, EMBEDDING, LARGE, REST, class_knob
from hvd_autosync.search_space.knob_spec import KnobSpec, PlanField, Situation
from hvd_autosync.search_space.knobs import Condition, categorical_knob
from hvd_autosync.search_space.repeating import repeating_classes


def _lossless(parameter_class: str, which: str, *, when: str, doc: str) -> KnobSpec:
    def applies(situation: Situation) -> bool:
        ranks = situation.resources.world_size
        repeating = repeating_classes(situation.dense, situation.classes, ranks)
        return situation.model.wrapped and parameter_class in repeating

    exchange = class_knob(parameter_class, "exchange")
    coded = ("allreduce", "hierarchical", *(BY_FACTORS if parameter_class == LARGE else ()))
    return KnobSpec(
        categorical_knob(
            class_knob(parameter_class, "lossless"),
            (False, True),
            False,
            group="exchange",
            help=f"Whether gradients of {which} travel as lossless codes, which are shorter where "
            "bits repeat.",
            # Those of the class "rest" have no other exchange.
            condition=Condition(exchange, coded) if parameter_class != REST else None,
        ),
        sets=PlanField("exchange", f"{parameter_class}.lossless"),
        when=f"hvd.DistributedOptimizer; bits that repeat (docs/exchanges.md); {when}",
        applies=applies,
        cost="exchange",
        doc=doc,
    )


LOSSLESS = (
    _lossless(
        EMBEDDING,
        "embedding tables (a batch touches few rows)",
        when="tables of which batches touch few rows",
        doc="""
        lets gradients of tables travel as [lossless codes](exchanges.md#lossless). A row that a
        batch does not touch takes a bit for each element or less. It matters where `rows` does, and
        more where touched rows have zeros, too. Measured: 0.03 of the bytes of a model of
        collaborative filtering.
        """,
    ),
    _lossless(
        LARGE,
        "large matrices",
        when="gradients of 256 KiB or more",
        doc="""
        does so for large matrices, or for [factors](exchanges.md) in their place, half of which are
        zeros behind a ReLU: two thirds of their bytes. Measured at 100 Mbit/s on two slow cores:
        1.15 times (1.08 to 1.22) as fast as factors alone for a model of digits; for a VGG-like one
        0.89 times, before codes kept their length from step to step, and not again since. It
        changes no bit of the training among two ranks. It matters most under bfloat16 or float16
        autocast, whose gradients have 16 bits in 32, and for models with dead units, if steps wait
        for the network. Measured between two hosts at 100 Mbit/s, on a busy machine: 3.1 times (a
        VGG-like model) and 2.2 (BERT-like) under bfloat16 autocast, in float32 2.1 and 0.9.
        """,
    ),
    _lossless(
        REST,
        "all other parameters",
        when="256 KiB of other gradients or more",
        doc="""
        is the same for all other parameters, where they have 256 KiB together: convolutional
        networks of many small layers. Measured: 0.83 of the bytes of a small ResNet in float32,
        0.34 under bfloat16 autocast.
        """,
    ),
)
