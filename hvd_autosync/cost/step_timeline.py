"""The step timeline: when each part of a step happens, according to the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hvd_autosync.cost.coefficients import UNCALIBRATED, Coefficients
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.cost_model import CostModel
from hvd_autosync.search_space import Value


@dataclass(frozen=True)
class Message:
    """The transfer of a gradient or of a bucket of gradients.

    Times are in seconds from the start of the step.

    Attributes:
        name: Name of the parameter; for a bucket, of its last parameter.
        size_bytes: Bytes of its gradients.
        ready_s: When all of it has been computed.
        begin_s: When the wire is free for it.
        end_s: When it is reduced on all ranks, or its owners have answered.
    """

    name: str
    size_bytes: float
    ready_s: float
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """One step; all times in seconds from its start.

    Attributes:
        forward_s: End of forward.
        backward_s: End of backward.
        messages: Messages in the order of sending. With local steps they are those of an averaging
            of parameters, which happens once in ``local`` steps.
        step_s: End of the step.
        local: Steps between two averagings of parameters; 1: gradients are sent in every step.
    """

    forward_s: float
    backward_s: float
    messages: tuple[Message, ...]
    step_s: float
    local: int


def step_timeline(
    model: CostModel, strategy: Mapping[str, Value], coefficients: Coefficients = UNCALIBRATED
) -> StepTimeline:
    """Return a step of ``model`` under ``strategy``, in the phase that has most of the work.

    Args:
        model: The cost model of the task.
        strategy: Values of knobs by name; absent knobs have their default.
        coefficients: The factors, as calibrated on trials of the task.
    """
    prepared = model.phases(Columns.of([strategy])).typical
    compute = float(np.exp(coefficients.compute))
    forward_s, backward_s = prepared.forward_s * compute, prepared.backward_s * compute
    (step_s,) = prepared.seconds([coefficients])[0]
    local = int(prepared.local[0])
    start = forward_s if local == 1 else forward_s + backward_s
    messages: list[Message] = []
    ends = prepared.ends(coefficients)
    if prepared.items is not None and len(ends):
        there = np.flatnonzero(prepared.items.size_bytes[:, 0] > 0)
        ready = start + prepared.items.arrival_s[there, 0] * compute
        begin = np.maximum(ready, start + np.concatenate([[-np.inf], ends[:-1]]))
        for index, item in enumerate(there):
            messages.append(
                Message(
                    model.names[item],
                    float(prepared.items.size_bytes[item, 0]),
                    float(ready[index]),
                    float(begin[index]),
                    float(start + ends[index]),
                )
            )
    return StepTimeline(forward_s, forward_s + backward_s, tuple(messages), float(step_s), local)
