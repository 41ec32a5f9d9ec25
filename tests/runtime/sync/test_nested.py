"""A method around another one leaves to that what it does not do itself."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
from hvd_autosync.runtime.method import SyncMethod
from hvd_autosync.runtime.sync.nested import Nested

HOOKS = {name: hook for name, hook in vars(SyncMethod).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_passed_on_to_the_inner_method(name: str) -> None:
    hook, answer, calls = HOOKS[name], object(), []
    inner = SimpleNamespace()
    nested: Any = Nested(inner)
    if isinstance(hook, property):
        setattr(inner, name, answer)
        assert getattr(nested, name) is answer
        return

    def answering(*arguments: Any, **keywords: Any) -> Any:
        calls.append((arguments, keywords))
        return answer

    setattr(inner, name, answering)
    _, *taken = signature(hook).parameters.values()
    keywords = {each.name: object() for each in taken if each.kind is each.KEYWORD_ONLY}
    arguments = tuple(object() for _ in range(len(taken) - len(keywords)))
    returned = getattr(nested, name)(*arguments, **keywords)
    assert calls == [(arguments, keywords)]
    assert returned is (None if signature(hook).return_annotation == "None" else answer)
