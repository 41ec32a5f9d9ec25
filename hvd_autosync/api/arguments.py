"""The arguments of :func:`hvd_autosync.tune`: checked before anything is written or started."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from numbers import Real

from hvd_autosync.engine.options import Options
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.study.defaults import MODES

#: Options of the flag that replace tuning; ``tune()`` rejects them from any source.
INSTEAD = ("dry_run", "strategy", "replay", "recurring")
#: All options that are not arguments of ``tune()``.
_FLAG_ONLY = (*INSTEAD, "mode", "tune_only", "search", "target", "tolerance", "repeats")
_PATHS = ("space", "store", "keep_trial_files")


def check_arguments(arguments: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Check the types of all arguments of ``tune()``, and the values of its own.

    Args:
        arguments: Those that ``tune()`` names.
        settings: The others, whose values :func:`hvd_autosync.engine.options.resolve_options`
            checks.

    Raises:
        ConfigurationError: An argument is unknown or invalid.
    """
    for name, value in arguments.items():
        is_valid, remedy = _OWN[name]
        if not is_valid(value):
            raise _invalid(name, value, remedy)
    command = arguments["command"]
    if isinstance(command, str):
        try:
            shlex.split(command)
        except ValueError as error:
            raise _invalid("command", command, f"Close its quotes ({error}).") from None
    if not callable(command) and (arguments["args"] or arguments["kwargs"]):
        raise ConfigurationError(
            "args and kwargs need a function as the command",
            hint="Put the script's arguments into the command.",
        )
    known = [each.name for each in fields(Options) if each.name not in _FLAG_ONLY]
    for name, value in settings.items():
        if name not in known:
            raise ConfigurationError(
                f"tune() has no argument {name!r}", hint=f"Known arguments: {', '.join(known)}."
            )
        if name in _PATHS and not isinstance(value, (str, os.PathLike, type(None))):
            raise _invalid(name, value, "Give a path as a text.")
        if name != "allow" and isinstance(value, (list, tuple, set)):
            raise _invalid(name, value, "Give a single value.")


def _invalid(name: str, value: object, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"invalid value {value!r:.200} for {name}", hint=remedy)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _is_word(value: object) -> bool:
    return isinstance(value, (str, os.PathLike, Real)) and "\0" not in str(value)


def _is_command(value: object) -> bool:
    if callable(value):
        return True
    if isinstance(value, str):
        return _is_word(value)
    return isinstance(value, Sequence) and _is_list(value) and all(map(_is_word, value))


def _are_options(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and _is_list(value)
        and all(isinstance(word, str) and word for word in value)
    )


#: Name of an argument -> whether a value is valid, and the remedy if it is not.
_OWN: dict[str, tuple[Callable[[object], bool], str]] = {
    "command": (_is_command, "Give a command line, a list of its words, or a function."),
    "np": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1,
        "Give the number of ranks, 1 or more.",
    ),
    "hosts": (
        lambda value: value is None or (isinstance(value, str) and bool(value)),
        'Give one text such as "a:4,b:4", or leave it out: this host only.',
    ),
    "options": (_are_options, 'Give a list of texts such as ["--gloo"].'),
    "args": (_is_list, "Give a list or tuple of the function's arguments."),
    "kwargs": (
        lambda value: (
            value is None
            or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
        ),
        "Give a dictionary from the names of arguments to their values.",
    ),
    "on_trial_end": (
        lambda value: value is None or callable(value),
        "Give a function of the study and the trial's record, or leave it out.",
    ),
    "mode": (lambda value: value in MODES, f"Choose one of {', '.join(MODES)}."),
}
