"""Actions after the import of a module."""

from __future__ import annotations

import sys

import pytest

from hvd_autosync.util.import_hook import when_imported


def test_several_actions_follow_an_import_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    done: list[str] = []
    for each in ("first", "second"):
        when_imported("this", lambda _, each=each: done.append(each))
    import this

    assert done == ["first", "second"]
    assert this.__spec__ is not None and this.__spec__.loader is this.__loader__
    when_imported("this", lambda _: done.append("at once"))
    assert done[-1] == "at once"


def test_a_finder_of_old_kind_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python passes it over, too, or asks it itself; vendored packages still bring some."""
    monkeypatch.setattr(sys, "meta_path", [object(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "this", raising=False)
    done: list[str] = []
    when_imported("this", lambda _: done.append("imported"))
    import this

    assert this.__name__ == "this" and done == ["imported"]
