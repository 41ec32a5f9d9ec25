"""Strategy files: TOML files for users, which ``--autosync-strategy FILE`` runs.

An example::

    [knobs]
    cycle_time_ms = 2.5
    buckets = 4
    embedding_exchange = "rows"

    # Names of parameters, * and ? allowed; all other parameters are of class "rest".
    [classes]
    embedding = ["user_table.weight", "item_table.weight"]
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.catalogue import catalogue_knob
from hvd_autosync.search_space.exchange_plan import (
    OF_TWO_LEVELS,
    PARAMETER_CLASSES,
    REST,
    Classes,
    check_parameters,
    class_knob,
    class_of,
)
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.model_profile import ModelProfile
from hvd_autosync.search_space.resources import Host
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.sync_plan import exchange_plan

#: Most names of parameters that an error lists.
_MOST_NAMES = 8
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CLASSES_HINT = "Name parameters, as in [classes] embedding = ['*_table.weight']."


def strategy_text(strategy: Mapping[str, Value], classes: Classes) -> str:
    """Return ``strategy`` as the text of a TOML file, with each knob's help as a comment."""
    lines = ["[knobs]"]
    for name, value in strategy.items():
        knob = catalogue_knob(name)
        unit = f" ({knob.unit})" if knob.unit else ""
        help_line = " ".join(knob.help.split())  # an extension may break it
        lines += [f"# {help_line}{unit}", f"{_key(name)} = {_toml(value)}"]
    used = [name for name in classes if any(knob.startswith(f"{name}_") for knob in strategy)]
    if used:
        lines += ["", "# Parameters by class, * and ? allowed; all others are of class rest."]
        lines += ["[classes]"]
        lines += [f"{name} = [{', '.join(map(_toml, classes[name]))}]" for name in used]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    """Return a knob's name as a key of TOML; an extension may give it any name."""
    return name if _BARE_KEY.fullmatch(name) else _toml(name)


def _toml(value: Value) -> str:
    """Return ``value`` in TOML, in ASCII; unlike JSON, it has no pairs of surrogates."""
    if not isinstance(value, str):
        return json.dumps(value)
    return f'"{"".join(map(_escaped, value))}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    if character.isascii() and character.isprintable():
        return character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def read_strategy(document: Mapping[str, Any]) -> tuple[Strategy, Classes]:
    """Return the strategy and the classes of parameters of a parsed file.

    Raises:
        SpaceError: The document is empty, a table, knob or class is unknown, a value is outside its
            knob's domain, a knob's condition does not hold, or a class has knobs but no parameters.
    """
    if not document:  # such as the output of a command that failed
        raise SpaceError(
            "the strategy file sets no knob",
            hint="Write it again, as with hvd-autosync show STUDY --take winner; for the unchanged "
            "job leave the table [knobs] empty.",
        )
    unknown = sorted(set(document) - {"knobs", "classes"})
    if unknown:
        raise SpaceError(
            f"unknown table or key {unknown[0]!r} in the strategy file",
            hint="Use the tables [knobs] and [classes].",
        )
    knobs, tables = document.get("knobs", {}), document.get("classes", {})
    for name, table in (("knobs", knobs), ("classes", tables)):
        if not isinstance(table, Mapping):
            raise SpaceError(f"{name!r} is not a table", hint=f"Write [{name}] above its lines.")
    for name, value in knobs.items():
        catalogue_knob(name).validate(value)
    strategy = Strategy(knobs)
    _check_conditions(strategy)
    classes = {name: _members(name, names) for name, names in tables.items()}
    for name in PARAMETER_CLASSES:
        used = [knob for knob in strategy if knob.startswith(f"{name}_")]
        if used and name != REST and not classes.get(name):
            raise SpaceError(
                f"{used[0]} is set, but no parameter is of class {name}", hint=_CLASSES_HINT
            )
    return strategy, classes


def _check_conditions(strategy: Strategy) -> None:
    for name in strategy:
        condition = catalogue_knob(name).condition
        if condition is not None:
            parent = catalogue_knob(condition.knob)
            if not condition.holds({condition.knob: parent.default, **strategy}):
                raise SpaceError(
                    f"knob {name} has no effect without {condition.knob}",
                    hint=f"Set {condition.knob} too, or leave {name} out.",
                )


def _members(name: str, names: object) -> tuple[str, ...]:
    if name not in PARAMETER_CLASSES or name == REST:
        known = ", ".join(c for c in PARAMETER_CLASSES if c != REST)
        raise SpaceError(
            f"unknown class of parameters {name!r}",
            hint=f"Use {known}; all other parameters are of class {REST}.",
        )
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise SpaceError(f"class {name}: {names!r} is not a list of names", hint=_CLASSES_HINT)
    return tuple(names)


def check_fits(
    strategy: Mapping[str, Value], hosts: Sequence[Host], held: Mapping[str, Value]
) -> None:
    """Check that a job can run under ``strategy``.

    Args:
        strategy: The strategy, of a file or of a recorded study.
        hosts: The job's hosts, with the slots that it uses.
        held: Knobs that the job's options and environment fix, with their values.

    Raises:
        SpaceError: A hierarchical exchange does not fit the hosts, or the job's own options fix a
            knob to another value.
    """
    for name, value in strategy.items():
        if name in held and held[name] != value:
            raise SpaceError(
                f"knob {name} is {value!r} in the strategy, but your options or environment set "
                f"{held[name]!r}",
                hint="Leave out that option or variable, or the knob in a strategy file.",
            )
    slots = {host.slots for host in hosts}
    for name in PARAMETER_CLASSES:
        knob = class_knob(name, "exchange")
        uneven = len(hosts) < 2 or len(slots) > 1 or slots == {1}
        if strategy.get(knob) in OF_TWO_LEVELS and uneven:
            layout = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
            raise SpaceError(
                f"{knob} = {strategy[knob]!r} does not fit the hosts {layout}",
                hint="It needs several hosts with the same number of slots, two or more.",
            )


def check_model(strategy: Mapping[str, Value], classes: Classes, model: ModelProfile) -> None:
    """Check that ``strategy`` fits the parameters of a model.

    Raises:
        SpaceError: A name of a class matches no parameter, a codec's rank exceeds that of a matrix,
            or a codec would get gradients that are not floating-point numbers.
    """
    plan = exchange_plan(strategy)
    if plan is None or not model.parameters:
        return
    names = [parameter.name for parameter in model.parameters]
    for parameter_class, patterns in classes.items():
        for pattern in patterns:
            if not any(class_of(name, {parameter_class: (pattern,)}) != REST for name in names):
                raise SpaceError(
                    f"class {parameter_class}: {pattern!r} matches no parameter of the model",
                    hint=f"Its parameters are {_some(names)}.",
                )
    members = {p: class_of(p.name, classes) for p in model.parameters}
    check_parameters(plan, {p.name: (c, p.shape) for p, c in members.items()})
    for parameter, parameter_class in members.items():
        codec = plan.of(parameter_class).codec
        if codec != "none" and "float" not in parameter.dtype:
            raise SpaceError(
                f"{class_knob(parameter_class, 'codec')} = {codec!r} cannot encode "
                f"{parameter.name}, which is of type {parameter.dtype}",
                hint=f"Put {parameter.name} into a class without a codec.",
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
