"""What a strategy optimizer adds to its state dictionary, and reads from one.

Other optimizers ignore these entries. Each part of the optimizer with a state of its own has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hvd_autosync.runtime.guard.fallback import fall_back_to_exact

_Hook: TypeAlias = Callable[[Any, dict[str, Any]], Any]
#: Keys of the entries; they are part of the checkpoint format.
_CODEC_STATES = "hvd_autosync_codecs"
_ROUNDS = "hvd_autosync_rounds"
_PHASES = "hvd_autosync_phases"
_EXACT = "hvd_autosync_exact"


def keep_in_checkpoints(optimizer: Any) -> None:
    """Extend ``state_dict()`` and ``load_state_dict()`` of ``optimizer`` by its parts' states."""
    saved: list[_Hook] = [_save_codec_states, _save_owned_states]
    loaded: list[_Hook] = [_load_codec_states]
    if optimizer._local is not None:
        saved.append(_save_rounds)
        loaded.append(_load_rounds)
    if optimizer._phases is not None:
        saved.append(_save_phases)
        loaded.append(_load_phases)
    if optimizer._guard is not None:
        saved.append(_save_exact)
        loaded.append(_load_exact)
    for save in saved:
        optimizer.register_state_dict_post_hook(save)
    for load in loaded:
        optimizer.register_load_state_dict_pre_hook(load)


def _save_owned_states(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict["state"].update(self._exchange.whole_states())


def _save_codec_states(self: Any, state_dict: dict[str, Any]) -> None:
    states = self._exchange.dispatcher.codec_states()
    if states:
        state_dict[_CODEC_STATES] = states


def _load_codec_states(self: Any, state_dict: dict[str, Any]) -> None:
    self._exchange.dispatcher.load_codec_states(state_dict.get(_CODEC_STATES, {}))


def _save_exact(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict[_EXACT] = self._exact


def _load_exact(self: Any, state_dict: dict[str, Any]) -> None:
    if state_dict.get(_EXACT):
        fall_back_to_exact(self)


def _save_rounds(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict[_ROUNDS] = self._local.save()


def _load_rounds(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = state_dict.get(_ROUNDS)
    own = self._local.load(saved) if saved else None
    return state_dict if own is None else {**state_dict, "state": own}


def _save_phases(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict["state"].update(self._phases.whole_states())
    state_dict[_PHASES] = self._phases.save()


def _load_phases(self: Any, state_dict: dict[str, Any]) -> None:
    saved = state_dict.get(_PHASES)
    if saved:
        self._phases.load(saved)
