"""What a strategy optimizer adds to its state dictionary, and reads from one.

Other optimizers ignore these entries, and a method of synchronization those of others.
"""

from __future__ import annotations

from typing import Any

from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.state.optimizer_states import OptimizerStates


def keep_in_checkpoints(optimizer: Any) -> None:
    """Extend ``state_dict()`` and ``load_state_dict()`` of ``optimizer`` by its method's states."""
    optimizer.register_state_dict_pre_hook(_settle)
    optimizer.register_state_dict_post_hook(_save)
    optimizer.register_load_state_dict_pre_hook(_load)


def _settle(self: Any) -> None:
    self._sync.method.settle()
    if isinstance(self.state, OptimizerStates):
        self.state.saving = True


def _save(self: Any, state_dict: dict[str, Any]) -> None:
    state_dict["state"].update(self._sync.method.whole_states())
    state_dict.update(self._sync.state_dict())


def _load(self: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    sync = self._sync
    own = sync.load_state_dict(state_dict)
    if sync.guard.watches and sync.is_exact(state_dict):
        fall_back_to_exact(self)
    return state_dict if own is None else {**state_dict, "state": own}
