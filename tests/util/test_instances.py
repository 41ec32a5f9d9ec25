"""Objects are found by their class, frozen ones too, and nothing is kept for it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from hvd_autosync.util.instances import instances


class Held:
    """What is looked for."""


class Proxy:
    """Stands for something else, and does something when it is asked for its class."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("asked for its class")


def test_objects_are_found_before_and_after_the_script_has_frozen_them() -> None:
    held, inherited = Held(), type("Inherited", (Held,), {})()
    found = instances(Held)
    assert len(found) == 2 and held in found and inherited in found
    gc.freeze()
    later = Held()
    assert {*instances(Held)} == {held, inherited, later}


def test_a_proxy_is_not_asked_for_what_it_stands_for() -> None:
    proxy = Proxy()
    assert instances(Held) == []
    assert [type(each) for each in instances(Proxy)] == [Proxy]
    del proxy


def test_what_the_script_drops_later_is_collected() -> None:
    """Frozen by the script, or created since."""
    frozen = Held()
    gc.freeze()
    created = Held()
    gone = [weakref.ref(frozen), weakref.ref(created)]
    for each in (frozen, created):
        each.itself = each
    assert len(instances(Held)) == 2
    del frozen, created, each
    gc.collect()
    assert [each() for each in gone] == [None, None]
