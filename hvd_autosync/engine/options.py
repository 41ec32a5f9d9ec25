"""Every option in one table: name, type, default, help; and where its value comes from.

The order is: option of ``horovodrun`` or ``hvd-autosync``, then environment
(``HVD_AUTOSYNC_TRIALS`` for ``--autosync-trials``), then the section ``autosync`` of Horovod's
``--config-file``, then the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space.knobs import LOSSY_GROUPS

_PREFIX = "HVD_AUTOSYNC_"
#: Variables with that prefix that are no options: read elsewhere, or set by drivers for workers.
_OTHER_VARIABLES = ("DISABLE", "DRIVER", "EXTENSIONS", "FILES", "TRIAL", "TRIAL_ID")

#: Options that say what is run instead of a tuning and then the training: one of them at most.
_PURPOSES = ("recurring", "strategy", "replay", "tune_only")
#: Where the user does not say how long the training will run.
DEFAULT_EXPECTED_HOURS = 10.0
DEFAULT_STEPS, DEFAULT_WARMUP = 40, 10
REUSE_CHOICES = ("auto", "never", "only")
TRANSFER_CHOICES = ("auto", "never")
SEARCH_CHOICES = ("bayesian", "binary")
RUNNER_CHOICES = ("auto", "cold")
GOALS = ("steps", "time-to-loss")


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("must be a whole number") from None
        if value < minimum:
            raise ValueError(f"must be at least {minimum}")
        return value

    return parse


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise ValueError("must be more than 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not float("-inf") < value < float("inf"):
        raise ValueError("must be a finite number")
    return value


def _groups(text: str) -> tuple[str, ...]:
    groups = tuple(sorted({word.strip() for word in text.split(",") if word.strip()}))
    for group in groups:
        if group not in LOSSY_GROUPS:
            raise ValueError(f"{group!r} is not one of {', '.join(LOSSY_GROUPS)}")
    return groups


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
        raise ValueError("must be 1 or 0")
    return text.lower() in ("1", "true", "yes", "on")


def _option(default: Any, parse: Callable[[str], Any], metavar: str, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help})


@dataclass(frozen=True)
class Options:
    """The options of one tuning, parsed. The fields are the table."""

    trials: int = _option(
        20, _at_least(1), "N", "Most trials before the winner is confirmed, the default's included."
    )
    minutes: float | None = _option(
        None, _positive, "M", "Most minutes to spend on tuning, confirming what was found included."
    )
    expected_hours: float | None = _option(
        None,
        _positive,
        "H",
        "Hours that the training is expected to run: exploring stops when another trial would take "
        f"longer than it is expected to save. Default: {DEFAULT_EXPECTED_HOURS:g}; a script that "
        "ends within its first trial is not tuned unless this is given.",
    )
    steps: int | None = _option(
        None,
        _at_least(5),
        "N",
        f"Steps measured in each trial. Default: {DEFAULT_STEPS}, or fewer where steps are long.",
    )
    warmup: int | None = _option(
        None,
        _at_least(1),
        "N",
        f"Steps run before those, not measured. Default: {DEFAULT_WARMUP}, and after the default's "
        "trial fewer likewise.",
    )
    quality_steps: int = _option(
        200,
        _at_least(40),
        "N",
        "Steps of each trial that judges by its losses whether a lossy strategy is as good for the "
        "model; of no account where only exact knobs are tuned.",
    )
    quality_minutes: float = _option(
        30.0,
        _positive,
        "M",
        "Most minutes of all trials that judge losses; who was not judged by then may not be used.",
    )
    loss_tolerance: float = _option(
        0.01,
        _positive,
        "SHARE",
        "How much the loss of a lossy strategy may be above the default's, as a share of what the "
        "default's has fallen since the beginning; what cannot be shown to be below may not be "
        "used.",
    )
    goal: str = _option(
        "steps",
        _one_of(GOALS),
        "{steps,time-to-loss}",
        "Whether a lossy strategy must be as good as the default after as many steps, or after as "
        "much time, for trainings that end by the clock.",
    )
    allow: tuple[str, ...] = _option(
        (),
        _groups,
        "GROUP,...",
        f"Also tune knobs that can change the trained model, of these groups: "
        f"{', '.join(LOSSY_GROUPS)}. Without this, tuning never changes what is trained.",
    )
    space: str | None = _option(
        None, str, "FILE", "TOML file that restricts or fixes knobs; see hvd-autosync space."
    )
    strategy: str | None = _option(
        None,
        str,
        "FILE",
        "Run the job under the strategy of a TOML file, without tuning; hvd-autosync show writes "
        "one. Implies --autosync.",
    )
    replay: str | None = _option(
        None,
        str,
        "TRACE",
        "Run the job under the winner of a trace file, or of a study of the store (its id, or "
        "last), without tuning; in what the job differs from that study is said. Implies "
        "--autosync.",
    )
    store: str | None = _option(
        None,
        str,
        "URL-or-PATH",
        "Where traces are kept: an SQLite file or an SQLAlchemy URL. "
        "Default: hvd-autosync/traces.db in the user's data folder.",
    )
    reuse: str = _option(
        "auto",
        _one_of(REUSE_CHOICES),
        "{auto,never,only}",
        "What to do when this task was tuned before: take that winner (auto), tune again (never), "
        "or refuse to tune (only).",
    )
    transfer: str = _option(
        "auto",
        _one_of(TRANSFER_CHOICES),
        "{auto,never}",
        "Whether finished studies of similar jobs and clusters in the store tell where to begin "
        "(auto); they are believed as long as the trials do not contradict them.",
    )
    recurring: bool = _option(
        False,
        _switch,
        "",
        "Each run of this job tries another share f of its work under BSP, the rest without a "
        "barrier (asp), and is compared with earlier ones by what the script gives to "
        "hvd_autosync.outcome(), until the fastest f that is as good is found. Nothing is tuned.",
    )
    search: str = _option(
        "bayesian",
        _one_of(SEARCH_CHOICES),
        "{bayesian,binary}",
        "How recurring runs look for f: by a model of its effect, or by halving as in Sync-Switch.",
    )
    target: float | None = _option(
        None,
        _number,
        "METRIC",
        "What recurring runs must come to, larger is better; what the first runs, under BSP "
        "alone, come to if not given.",
    )
    tolerance: float | None = _option(
        None,
        _positive,
        "METRIC",
        "By how much a recurring run may be below that; 1 % of it if not given, and at least two "
        "standard deviations of the first runs where there are several.",
    )
    repeats: int = _option(
        1,
        _at_least(1),
        "N",
        "First recurring runs under BSP alone; in the binary search runs of every f.",
    )
    runner: str = _option(
        "auto",
        _one_of(RUNNER_CHOICES),
        "{auto,cold}",
        "How trials are run: forked from processes that have imported everything, where that is "
        "possible (auto), or each as a fresh launch (cold), for scripts that must not be forked.",
    )
    keep_trial_files: str | None = _option(
        None,
        str,
        "DIR",
        "Keep what trials write, in DIR/TRIAL/HOST/PATH. Without this it is thrown away: no trial "
        "changes a file that later ones or the training see.",
    )
    tune_only: bool = _option(False, _switch, "", "Stop after tuning; do not run the training.")
    dry_run: bool = _option(
        False, _switch, "", "Print the search space and the plan; launch nothing."
    )
    seed: int = _option(0, _at_least(0), "N", "Seed of every random choice of the tuner.")


def option_name(name: str) -> str:
    """``--autosync-tune-only`` for ``tune_only``."""
    return f"--autosync-{name.replace('_', '-')}"


def variable_name(name: str) -> str:
    """``HVD_AUTOSYNC_TUNE_ONLY`` for ``tune_only``."""
    return f"{_PREFIX}{name.upper()}"


#: Options that say all that is wanted, so that ``--autosync`` need not be given with them.
IMPLY = frozenset(map(option_name, ("strategy", "replay")))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--autosync`` and its options to ``parser``, in a group of their own."""
    group = parser.add_argument_group(
        "autosync arguments",
        "Find the fastest synchronization strategy for this job by running it for a few steps at "
        "a time, confirm it against the default, then run the job with it. Each option can be "
        f"given as a variable too, for example {variable_name('trials')}; variables alone "
        "have no effect.",
    )
    group.add_argument(
        "--autosync", action="store_true", help="Tune this job, then run it with what was found."
    )
    for each in fields(Options):
        flag = each.metadata["metavar"] == ""
        default = "" if flag or each.default in (None, ()) else f" Default: {each.default}."
        keywords: dict[str, Any] = (
            {"action": "store_true"} if flag else {"metavar": each.metadata["metavar"]}
        )
        # argparse would take a per cent sign for a place to fill in.
        text = f"{each.metadata['help']}{default}".replace("%", "%%")
        group.add_argument(
            option_name(each.name),
            default=None,
            dest=f"autosync_{each.name}",
            help=text,
            **keywords,
        )


def given_options(arguments: argparse.Namespace) -> list[str]:
    """Names on the command line of our options that were given."""
    return [
        option_name(each.name)
        for each in fields(Options)
        if getattr(arguments, f"autosync_{each.name}", None) is not None
    ]


def resolve_options(
    arguments: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    section: Mapping[str, Any] | None = None,
) -> Options:
    """The options from their sources, in the order of the module's docstring.

    Args:
        arguments: Parsed command line.
        environment: Variables.
        section: The section ``autosync`` of the configuration file.

    Raises:
        ConfigurationError: A value cannot be used; names the source, the value and the remedy. Or
            a variable or an entry of the file is no option.
    """
    _refuse_unknown(environment)
    section = dict(section or {})
    values: dict[str, Any] = {}
    for each in fields(Options):
        given = getattr(arguments, f"autosync_{each.name}", None)
        variable = variable_name(each.name)
        in_file = section.pop(each.name, None)
        if given is not None:
            source, text = option_name(each.name), given
        elif environment.get(variable):
            source, text = variable, environment[variable]
        elif in_file is not None:
            source, text = f"autosync.{each.name} in the configuration file", in_file
        else:
            continue
        try:
            values[each.name] = each.metadata["parse"](as_text(text))
        except ValueError as error:
            raise ConfigurationError(
                f"{source}: {text!r} cannot be used: {error}", hint=each.metadata["help"]
            ) from None
    if section:
        raise ConfigurationError(
            f"unknown entry autosync.{next(iter(section))} in the configuration file",
            hint=f"Known entries are {', '.join(each.name for each in fields(Options))}.",
        )
    options = Options(**values)
    given_purposes = [option_name(name) for name in _PURPOSES if getattr(options, name)]
    if len(given_purposes) > 1:
        raise ConfigurationError(
            f"{' and '.join(given_purposes)} both say what to run",
            hint="Give one of them, as an option, as a variable or in the configuration file.",
        )
    return options


def as_text(value: object) -> str:
    """A value from a file or a call as it would stand on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, set)) else str(value)


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Refuse variables that look like ours and mean nothing, as misspelt ones do."""
    known = [variable_name(each.name) for each in fields(Options)]
    known += [f"{_PREFIX}{name}" for name in _OTHER_VARIABLES]
    for name in environment:
        if name.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigurationError(
                f"{name} is set to {environment[name]!r}, and no option",
                hint=f"Did you mean {near[0]}? Else unset it." if near else "Unset it.",
            )


def without_our_options(words: Sequence[str]) -> tuple[str, ...]:
    """The options of ``horovodrun`` among ``words``, ours left out."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    _, rest = parser.parse_known_args(list(words))
    return tuple(rest)
