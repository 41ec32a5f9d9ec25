"""Makes optimizer states equal that ranks have changed separately, in rounds of local steps."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.agreement import gather_texts, tell_all
from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.state.states import (
    Entry,
    decode_entries,
    encode_entries,
    parameters_of,
    take_states,
)
from hvd_autosync.runtime.sync.averaging import Averaging
from hvd_autosync.util.amounts import amount

#: Types of the tensors that are averaged.
_AVERAGED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def equalize_states(name: str, optimizer: Any, averaging: Averaging) -> None:
    """Make the states of an optimizer equal on all ranks; a collective.

    Floating-point tensors become their means over ranks. Other values have no mean: codes of
    quantized moments, lists of tensors, the count of a rank that has skipped a step. If those of a
    parameter differ between ranks, all take over rank 0's whole state of it, because codes belong
    to the scales beside them. It begins again if some rank has none, because that has seen no
    gradient of the parameter, or one with tensors of other names or shapes, or one that cannot be
    sent.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: Horovod's optimizer, of our class.
        averaging: Averages tensors.
    """
    parameters = parameters_of(optimizer)
    states = {
        place: dict(state)
        for place, parameter in enumerate(parameters)
        if (state := optimizer.state.get(parameter))
    }
    own = {str(place): _describe(state) for place, state in states.items()}
    ranks = [json.loads(text) for text in gather_texts(json.dumps(own), f"{name}.moments")]
    apart, of_first, averaged = [], [], []
    for place in sorted({int(place) for each in ranks for place in each}):
        found = [each.get(str(place)) for each in ranks]
        first = found[0]
        if any(each is None or each[1] is None or each[0] != first[0] for each in found):
            apart.append(place)
        elif any(each != first for each in found):
            of_first.append(place)
        else:
            averaged.append(place)
    for place in apart:
        optimizer.state.pop(parameters[place], None)
    tensors = [each for place in averaged for each in _tensors(states[place]).values()]
    averaging.average_tensors("moments", tensors, size())
    if of_first:
        entries = [Entry(place, 0, states[place]) for place in of_first] if rank() == 0 else []
        received = tell_all(encode_entries(entries), f"{name}.of_first")
        if rank() != 0:
            take_states(optimizer, {each.place: each.state for each in decode_entries(received)})
        count = amount(len(of_first), "parameter")
        warn_on_rank_0(
            f"states of the optimizer for {count} become those of rank 0: they hold values that "
            "differ between ranks and cannot be averaged"
        )
    if apart:
        names = ", ".join(str(optimizer._parameter_names[parameters[p]]) for p in apart)
        warn_on_rank_0(
            f"states of the optimizer begin again, because not all ranks have them: {names}"
        )


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a parameter's state that are averaged, in the order of their names."""
    return {
        name: state[name]
        for name in sorted(state, key=str)
        if isinstance(state[name], torch.Tensor)
        and state[name].dtype in _AVERAGED
        and state[name].layout is torch.strided
    }


def _describe(state: dict[str, Any]) -> tuple[dict[str, list[int]], str | None]:
    """Return the shapes of the tensors that are averaged, and a digest of all else.

    The digest is ``None`` if other ranks could not take over the state.
    """
    tensors = _tensors(state)
    rest = {name: state[name] for name in sorted(state, key=str) if name not in tensors}
    shapes = {str(name): list(each.shape) for name, each in tensors.items()}
    try:
        encoded = encode_entries([Entry(0, 0, rest)])
    except ConfigurationError:
        return shapes, None
    return shapes, hashlib.sha256(encoded).hexdigest()
