"""The data types of all packages: knobs, strategies, tasks, search spaces and trials.

They are plain values that convert to JSON and back without loss. Nothing here starts a process or
imports a framework.
"""

from hvd_autosync.search_space.catalogue import CATALOGUE, build_space, catalogue_knob, every_knob
from hvd_autosync.search_space.horovod_settings import (
    HorovodSettings,
    held_by_environment,
    horovod_settings,
)
from hvd_autosync.search_space.knobs import (
    CategoricalKnob,
    Condition,
    FloatKnob,
    IntegerKnob,
    Knob,
    Value,
)
from hvd_autosync.search_space.model_profile import ModelProfile, ParameterProfile
from hvd_autosync.search_space.resources import HorovodBuild, Host, Link, Links, Resources
from hvd_autosync.search_space.restrictions import check_restrictions, restrict_space
from hvd_autosync.search_space.space import SearchSpace
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.task import Task
from hvd_autosync.search_space.trial import (
    RankReport,
    StepTime,
    TrialResult,
    TrialSpec,
    TrialStatus,
)

__all__ = [
    "CATALOGUE",
    "CategoricalKnob",
    "Condition",
    "FloatKnob",
    "HorovodBuild",
    "HorovodSettings",
    "Host",
    "IntegerKnob",
    "Knob",
    "Link",
    "Links",
    "ModelProfile",
    "ParameterProfile",
    "RankReport",
    "Resources",
    "SearchSpace",
    "StepTime",
    "Strategy",
    "Task",
    "TrialResult",
    "TrialSpec",
    "TrialStatus",
    "Value",
    "build_space",
    "catalogue_knob",
    "check_restrictions",
    "every_knob",
    "held_by_environment",
    "horovod_settings",
    "restrict_space",
]
