"""An optimizer's states while parts of them are elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any


class OptimizerStates(defaultdict[Any, Any]):
    """An optimizer's dictionary of states, without those that others have between steps.

    Attributes:
        cleared: Whether the script has cleared it since they have them.
        fetch: Called before the script reads it, to put in what others have; ``None`` if a reader
            is to find what is here.
        saving: Whether the next look at all items is that of ``state_dict()``, which adds what
            others have by itself.
    """

    cleared = False
    fetch: Callable[[], None] | None = None
    saving = False

    @classmethod
    def put_into(cls, optimizer: Any) -> OptimizerStates:
        """Let an optimizer have such a dictionary, not cleared yet; return it."""
        if not isinstance(optimizer.state, cls):
            optimizer.state = cls(dict, optimizer.state)
        states: OptimizerStates = optimizer.state
        states.cleared, states.fetch = False, None
        return states

    def clear(self) -> None:
        """As of ``dict``."""
        super().clear()
        self.cleared, self.fetch = True, None

    def reset_in(self, optimizer: Any) -> bool:
        """Return whether the script has reset the states of an optimizer, which had this."""
        return self.cleared or optimizer.state is not self

    # Each way to read a dictionary, or to write one entry: its own methods, after a fetch.

    def __missing__(self, key: Any) -> Any:
        self._fetch()
        if key in self:
            return self[key]
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._fetch()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._fetch()
        return super().__iter__()

    def __len__(self) -> int:
        self._fetch()
        return super().__len__()

    def __delitem__(self, key: Any) -> None:
        self._fetch()
        super().__delitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._fetch()
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def get(self, key: Any, default: Any = None) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().pop(key, *default)

    def popitem(self) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().popitem()

    def update(self, *others: Any, **more: Any) -> None:
        """As of ``dict``."""
        self._fetch()
        super().update(*others, **more)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().setdefault(key, default)

    def keys(self) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().keys()

    def values(self) -> Any:
        """As of ``dict``."""
        self._fetch()
        return super().values()

    def items(self) -> Any:
        """As of ``dict``."""
        if self.saving:
            self.saving = False
        else:
            self._fetch()
        return super().items()

    def _fetch(self) -> None:
        if self.fetch is not None:
            fetch, self.fetch = self.fetch, None  # which reads and fills it
            fetch()


def held_state(optimizer: Any, parameter: Any) -> Any:
    """Return the state that an optimizer itself has of ``parameter``; ``None``: none. No fetch."""
    states = optimizer.state
    return dict.get(states, parameter) if isinstance(states, dict) else states.get(parameter)
