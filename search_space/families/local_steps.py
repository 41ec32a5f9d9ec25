"""Knobs of the schedule: local steps between two averages of parameters."""

from __future__ import annotations

from hvd_autosync.search_space.knob_spec import Family, KnobSpec, PlanField, Situation, nowhere
from hvd_autosync.search_space.knobs import (
    Condition,
    IntegerKnob,
    Knob,
    categorical_knob,
    float_knob,
    integer_knob,
)
from hvd_autosync.search_space.schedule import DEFAULT_CAP

_IN_FILES = "only in a strategy file (docs/local-steps.md)"
#: Longest round of local steps that is tuned: a trial has to measure several rounds. How rounds
#: should grow later cannot be measured in a trial of the first steps; set it in a strategy file.
_MOST_TUNED = 16


def _can_be_local(situation: Situation) -> bool:
    model = situation.model
    return model.wrapped and model.has_epochs and situation.resources.world_size > 1


def _measurable(knob: Knob, situation: Situation) -> Knob:
    assert isinstance(knob, IntegerKnob)
    return knob.restrict(1, _MOST_TUNED)


LOCAL_STEPS = KnobSpec(
    integer_knob(
        "local_steps",
        1,
        1024,
        1,
        group="schedule",
        exact=False,
        scale="log",
        help="Least number of local steps of each rank between two averages of parameters.",
    ),
    sets=PlanField("schedule", "base"),
    when="--autosync-allow schedule; hvd.DistributedOptimizer; several ranks; epochs that are "
    "seen; more than 16 only in a strategy file",
    applies=_can_be_local,
    narrow=_measurable,
    cost="rounds",
    doc="""
    is the number of steps that each rank takes on its own before parameters are averaged. It
    matters most of all knobs on slow networks: 1 / H of the bytes and of the waiting. Measured: 2.0
    times with H = 4 in a long training of the digits at 100 Mbit/s, as accurate. In short trainings
    half a percent was missing, and a language model was clearly worse. So it is subject to the
    quality constraint. Codecs apply to changes of parameters then, where `fp16` means `bf16`.
    """,
)
LOCAL_POWER = KnobSpec(
    categorical_knob(
        "local_power",
        (0, 1, 2, 3),
        0,
        group="schedule",
        exact=False,
        help="Exponent p of the rule (alpha / learning rate)^p for the number of local steps; 2 is "
        "QSR.",
    ),
    sets=PlanField("schedule", "power"),
    when=_IN_FILES,
    applies=nowhere,
    cost="rounds",
    doc="""
    is the p of the rule (alpha / learning rate)^p by which rounds grow as the learning rate falls:
    0 keeps them constant, 2 is QSR (Gu et al., ICLR 2024). Measured: QSR 3.6 times at 13 % of the
    bytes and the same accuracy, in the long training of the digits; p = 1 and 3 were alike.
    """,
)
LOCAL_ALPHA = KnobSpec(
    float_knob(
        "local_alpha",
        1e-6,
        100.0,
        0.01,
        group="schedule",
        exact=False,
        scale="log",
        help="alpha of the rule (alpha / learning rate)^p, in units of the learning rate.",
        condition=Condition(LOCAL_POWER.name, (1, 2, 3)),
    ),
    sets=PlanField("schedule", "alpha"),
    when=_IN_FILES,
    applies=nowhere,
    doc="""
    is the alpha of that rule, in units of the learning rate. It matters only with a `local_power`;
    too large a value hurts. Published values are 1.2 to 2.2 times the peak learning rate for AdamW
    and 0.2 to 0.3 times it for SGD.
    """,
)
LOCAL_START = KnobSpec(
    integer_knob(
        "local_start",
        0,
        10_000_000,
        0,
        group="schedule",
        exact=False,
        scale="log",
        log_offset=1.0,
        help="Number of steps with gradient exchange before local steps begin (post-local SGD).",
    ),
    sets=PlanField("schedule", "start"),
    when=_IN_FILES,
    applies=nowhere,
    doc="""
    is the number of steps in which gradients are exchanged before the first local one (post-local
    SGD). It matters if the beginning of a training must not be disturbed. Measured: rounds of 8
    after half of the training were 1.4 to 1.6 times as fast as an exchange in every step, and as
    good on the digits.
    """,
)
LOCAL_CAP = KnobSpec(
    integer_knob(
        "local_cap",
        1,
        100_000,
        DEFAULT_CAP,
        group="schedule",
        exact=False,
        scale="log",
        help="Largest number of local steps between two averages of parameters.",
    ),
    sets=PlanField("schedule", "cap"),
    when=_IN_FILES,
    applies=nowhere,
    cost="rounds",
    doc="""
    is the most steps between two averages, whatever the rule gives. There is always a cap. It
    matters at the end of schedules that approach a learning rate of zero, where the rule would let
    replicas diverge for good.
    """,
)

LOCAL = Family(
    "Local steps: `--autosync-allow schedule`",
    (LOCAL_STEPS, LOCAL_POWER, LOCAL_ALPHA, LOCAL_START, LOCAL_CAP),
    intro="""
    Only `local_steps` is tuned, from 1 to 16. Trials run the beginning of a training and cannot
    measure how rounds should grow later; the other four are for [strategy files](local-steps.md).
    """,
)
