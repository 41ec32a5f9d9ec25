"""Export of a winner as a configuration of NCCL's example tuner plugin.

The format is that of ``ext-tuner/example`` in NCCL's sources: lines of comma-separated values, of
which the first that matches a collective is applied.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvd_autosync.engine.compatibility import winner_of
from hvd_autosync.errors import StudyError
from hvd_autosync.search_space import Value, catalogue_knob, horovod_settings
from hvd_autosync.search_space.families.transport import (
    ALGORITHM,
    MAX_CHANNELS,
    MIN_CHANNELS,
    PROTOCOL,
)
from hvd_autosync.traces import StudyRecord

_HEADER = "# collective,minBytes,maxBytes,algorithm,protocol,channels,nNodes,nRanks"
_PREFIX = "NCCL_"
#: The plugin reads sizes as 64-bit numbers.
_MOST_BYTES = 2**64 - 1
#: Collectives that Horovod calls and that have the algorithm.
_COLLECTIVES = {
    "ring": ("allreduce", "allgather", "reducescatter", "broadcast"),
    "tree": ("allreduce",),
}
#: The plugin's word for its own default is -1, but it then returns one channel; 0 lets NCCL choose.
_NCCLS_CHOICE = 0


def tuner_config(study: StudyRecord) -> str:
    """Return the winner's algorithm and protocol as the text of a configuration.

    What the plugin cannot set is named in comments.

    Raises:
        StudyError: The study has no winner, or the winner sets no algorithm and protocol of NCCL.
    """
    values = {**(dict(study.space.fixed) if study.space else {}), **winner_of(study)}
    variables = _nccl_variables(values)
    if not variables:
        raise StudyError(
            f"the winner of study {study.study_id} sets no knob of NCCL",
            hint="Tune a job on GPUs with a Horovod that was built with NCCL; "
            "hvd-autosync space lists the knobs.",
        )
    algorithm = values.get(ALGORITHM.name, ALGORITHM.knob.default)
    protocol = values.get(PROTOCOL.name, PROTOCOL.knob.default)
    if algorithm not in _COLLECTIVES or protocol == PROTOCOL.knob.default:
        shown = " ".join(f"{name}={text}" for name, text in variables.items())
        raise StudyError(
            f"the winner of study {study.study_id} leaves algorithm or protocol to NCCL, and a "
            "line of the plugin has to name both",
            hint=f"Set the winner's variables instead: {shown}.",
        )
    channels = _channels(values)
    said = {ALGORITHM.name, PROTOCOL.name}
    if channels != _NCCLS_CHOICE:
        said |= {MIN_CHANNELS.name, MAX_CHANNELS.name}
    rest = _nccl_variables({name: value for name, value in values.items() if name not in said})
    resources = study.task.resources if study.task else None
    place = f"{len(resources.hosts)},{resources.world_size}" if resources else "-1,-1"
    lines = [
        f"{collective},0,{_MOST_BYTES},{algorithm},{protocol},{channels},{place}"
        for collective in _COLLECTIVES[str(algorithm)]
    ]
    also = [f"# also set {name}={text}" for name, text in rest.items()]
    return "\n".join([f"# winner of study {study.study_id}", *also, _HEADER, *lines]) + "\n"


def _nccl_variables(values: Mapping[str, Value]) -> dict[str, str]:
    settings = horovod_settings(values).environment
    return {name: text for name, text in settings if name.startswith(_PREFIX)}


def _channels(values: Mapping[str, Value]) -> int:
    """Return the number of channels, if the winner leaves no choice of it."""
    least, most = (
        values.get(spec.name, catalogue_knob(spec.name).default)
        for spec in (MIN_CHANNELS, MAX_CHANNELS)
    )
    numbers = isinstance(least, int) and isinstance(most, int)
    # NCCL applies the maximum first, so a minimum above it is what holds.
    return int(least) if numbers and 0 < int(most) <= int(least) else _NCCLS_CHOICE
