"""The table of options (name, type, default, help) and the order of their sources.

A value is taken from the first source that has it: an option of ``horovodrun`` or
``hvd-autosync``, the environment (``HVD_AUTOSYNC_TRIALS`` for ``--autosync-trials``), the section
``autosync`` of Horovod's ``--config-file``, the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hvd_autosync.engine.option_conflicts import check_together
from hvd_autosync.engine.option_values import (
    PREFIX,
    at_least,
    file_path,
    folder,
    lossy_groups,
    number,
    one_of,
    option_name,
    positive,
    store_location,
    switch,
    variable_name,
)
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space.knobs import LOSSY_GROUPS
from hvd_autosync.study import defaults

#: Variables with that prefix that are not options: read elsewhere, or set by drivers for workers.
_READ_ELSEWHERE = ("DISABLE", "EXTENSIONS", "LIVE", "LOG")
_OF_DRIVERS = (
    "DRIVER",
    "FILES",
    "FOLDER",
    "JOB",
    "JUDGED",
    "REFUSAL",
    "RESTARTED",
    "STOPPED",
    "TRIAL",
    "TRIAL_ID",
)

#: Options that name files.
_PATHS = ("space", "store")
REUSE_CHOICES = ("auto", "never", "only")
TRANSFER_CHOICES = ("auto", "never")
SEARCH_CHOICES = ("bayesian", "binary")
RUNNER_CHOICES = ("auto", "cold")
MODES = ("auto", "live", "launched")


def _option(default: Any, parse: Callable[[str], Any], metavar: str, help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": help})


@dataclass(frozen=True)
class Options:
    """The parsed options of one tuning. The fields are the table of options."""

    trials: int = _option(
        defaults.TRIALS,
        at_least(defaults.LEAST["trials"]),
        "N",
        "Maximum number of trials before confirmation, including the trial of the default "
        "strategy; a live stage after launched trials has as many again.",
    )
    minutes: float | None = _option(
        None,
        positive,
        "M",
        "Maximum duration of tuning in minutes, including confirmation; a live stage after "
        "launched trials has as many again.",
    )
    expected_hours: float | None = _option(
        None,
        positive,
        "H",
        "Expected duration of the training in hours. Exploration stops when another trial would "
        f"cost more time than it is expected to save. Default: {defaults.EXPECTED_HOURS:g}. "
        "A script that ends within its first trial is tuned only if this option or "
        "--autosync-tune-only is given.",
    )
    steps: int | None = _option(
        None,
        at_least(defaults.LEAST["steps"]),
        "N",
        f"Number of measured steps per trial. Default: {defaults.STEPS}, or fewer if steps are "
        "long.",
    )
    warmup: int | None = _option(
        None,
        at_least(defaults.LEAST["warmup"]),
        "N",
        f"Number of warm-up steps per trial, which are not measured. Default: {defaults.WARMUP}; "
        "after the trial of the default strategy fewer if steps are long, and at most 3 in live "
        "trials.",
    )
    quality_steps: int = _option(
        defaults.QUALITY_STEPS,
        at_least(defaults.LEAST["quality_steps"]),
        "N",
        "Number of steps of each quality trial, which compares the losses of a lossy strategy with "
        "those of the default; up to eight times as many if the default's loss does not fall in "
        "them. Unused if only exact knobs are tuned.",
    )
    quality_minutes: float = _option(
        defaults.QUALITY_MINUTES,
        positive,
        "M",
        "Maximum total duration of all quality trials in minutes. A lossy strategy that is not "
        "judged by then is not used.",
    )
    loss_tolerance: float = _option(
        defaults.LOSS_TOLERANCE,
        positive,
        "SHARE",
        "Largest accepted increase of the loss under a lossy strategy over the default's, as a "
        "share of the decrease of the default's loss since the start. A strategy that is not shown "
        "to stay below it is not used.",
    )
    goal: str = _option(
        defaults.GOAL,
        one_of(defaults.GOALS),
        "{steps,time-to-loss}",
        "When the loss of a lossy strategy is compared with the default's: after the same number "
        "of steps, or after the same time (for trainings with a time limit).",
    )
    allow: tuple[str, ...] = _option(
        (),
        lossy_groups,
        "GROUP,...",
        "Also tune the lossy knobs (those that can change the trained model) of these groups: "
        f"{', '.join(LOSSY_GROUPS)}. Without this option only exact knobs are tuned.",
    )
    space: str | None = _option(
        None, file_path, "FILE", "TOML file that restricts or fixes knobs (see hvd-autosync space)."
    )
    strategy: str | None = _option(
        None,
        file_path,
        "FILE",
        "Run the job without tuning, under the strategy in this TOML file, as written by "
        "hvd-autosync show --take. Implies --autosync.",
    )
    replay: str | None = _option(
        None,
        file_path,
        "TRACE",
        "Run the job without tuning, under the winner of a trace file or of a study in the store "
        "(its id, or last: the newest one that did not fail, of whatever job). Prints how this job "
        "differs from the recorded one. Implies --autosync.",
    )
    store: str | None = _option(
        None,
        store_location,
        "URL-or-PATH",
        "Trace store: path of an SQLite file, or an SQLAlchemy URL. "
        "Default: hvd-autosync/traces.db in the user's data folder.",
    )
    reuse: str = _option(
        "auto",
        one_of(REUSE_CHOICES),
        "{auto,never,only}",
        "If this task was tuned before: use that winner (auto, only), or tune again (never), from "
        "the beginning if that was interrupted. If it was not: tune it (auto, never), or stop with "
        "an error (only).",
    )
    transfer: str = _option(
        "auto",
        one_of(TRANSFER_CHOICES),
        "{auto,never}",
        "Whether finished studies of similar jobs and clusters in the store are used as a prior "
        "(auto) or not (never). A study that the measured trials contradict is dropped.",
    )
    recurring: bool = _option(
        False,
        switch,
        "",
        "For a job that runs repeatedly: each run trains another share f of its work under BSP and "
        "the rest under ASP. Runs are compared by the metric that the script passes to "
        "hvd_autosync.outcome(), until the fastest f that meets the target is found. No trials are "
        "run.",
    )
    search: str = _option(
        "bayesian",
        one_of(SEARCH_CHOICES),
        "{bayesian,binary}",
        "How recurring runs search for f: by a Bayesian model of its effect, or by binary search "
        "as in Sync-Switch.",
    )
    target: float | None = _option(
        None,
        number,
        "METRIC",
        "Target metric of recurring runs; larger is better. Default: the metric of the baseline "
        "runs, which use BSP only.",
    )
    tolerance: float | None = _option(
        None,
        positive,
        "METRIC",
        "Largest accepted shortfall of a recurring run below the target. Default: 1 % of the "
        "target, or up to 2 % if there are several baseline runs that differ.",
    )
    repeats: int = _option(
        1,
        at_least(1),
        "N",
        "Number of baseline runs, which use BSP only; with --autosync-search binary also the "
        "number of runs of each tested f.",
    )
    runner: str = _option(
        "auto",
        one_of(RUNNER_CHOICES),
        "{auto,cold}",
        "How trials are started: forked from processes that have already imported the script's "
        "modules, if possible (auto), or each by a new launch (cold), for scripts that must not be "
        "forked.",
    )
    mode: str = _option(
        "auto",
        one_of(MODES),
        "{auto,live,launched}",
        "Where trials run: in the steps of the training itself, which is started once (live), or "
        "each in a launch of its own before the training (launched). Live trials change exact "
        "knobs only, and not the controller, the fusion threshold, the cycle time, "
        "batch_d2d_memcopies, variables of NCCL or the number of threads. With auto: live if "
        "options, job and script allow it, else launched, with the reason. Lossy knobs "
        "(--autosync-allow) are judged in launched trials, and the training is then tuned live "
        "under what they find.",
    )
    keep_trial_files: str | None = _option(
        None,
        folder,
        "DIR",
        "Keep the files that trials write, as DIR/TRIAL/HOST/PATH. Without this option they are "
        "deleted. Later trials and the training never see them.",
    )
    tune_only: bool = _option(False, switch, "", "Stop after tuning; do not start the training.")
    dry_run: bool = _option(
        False, switch, "", "Print the search space and the plan without launching anything."
    )
    seed: int = _option(
        defaults.SEED,
        at_least(0, below=defaults.SEEDS),
        "N",
        "Seed of the tuner's random choices, below 2**32.",
    )

    @property
    def again(self) -> str:
        """What the same command or call does after a tuning that was ended early."""
        return "tune from scratch" if self.reuse == "never" else "resume tuning"


#: Options that imply ``--autosync``.
IMPLY = frozenset(("strategy", "replay"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--autosync`` and its options to ``parser`` as a separate argument group."""
    group = parser.add_argument_group(
        "autosync arguments",
        "Find the fastest synchronization strategy for this job in trials of a few steps, confirm "
        "it against the default strategy, and train with it. Each option can also be set by "
        f"an environment variable, for example {variable_name('trials')}; horovodrun ignores the "
        "variables without --autosync.",
    )
    group.add_argument(
        "--autosync",
        action="store_true",
        help="Tune this job in the first steps of its training, or before it "
        "(--autosync-mode), and train under the strategy that was found.",
    )
    for each in fields(Options):
        flag = each.metadata["metavar"] == ""
        default = "" if flag or each.default in (None, ()) else f" Default: {each.default}."
        keywords: dict[str, Any] = (
            {"action": "store_true"} if flag else {"metavar": each.metadata["metavar"]}
        )
        # argparse formats help texts with "%".
        text = f"{each.metadata['help']}{default}".replace("%", "%%")
        group.add_argument(
            option_name(each.name),
            default=None,
            dest=f"autosync_{each.name}",
            help=text,
            **keywords,
        )


def given_options(arguments: argparse.Namespace) -> list[str]:
    """Names of our options that the command line contains."""
    names = [each.name for each in fields(Options)]
    return [name for name in names if getattr(arguments, f"autosync_{name}", None) is not None]


def after_command(command: Sequence[str]) -> list[str]:
    """Names of our options among the words of a command, where they have no effect."""
    ours = {"--autosync", *(option_name(each.name) for each in fields(Options))}
    return [name for word in command if (name := word.partition("=")[0]) in ours]


def resolve_options(
    arguments: argparse.Namespace,
    environment: Mapping[str, str] = os.environ,
    section: Mapping[str, Any] | None = None,
) -> Options:
    """Resolve the options from their sources, in the order of the module's docstring.

    Args:
        arguments: Parsed command line.
        environment: Environment variables.
        section: The section ``autosync`` of the configuration file.

    Raises:
        ConfigurationError: A value is invalid; the message names source, value and remedy. Or a
            variable or an entry of the file is not an option, or options exclude each other.
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
                f"invalid value{_shown(each.name, text)} for {source}: {error}",
                hint=each.metadata["help"],
            ) from None
    if section:
        raise ConfigurationError(
            f"unknown entry autosync.{next(iter(section))} in the configuration file",
            hint=f"Known entries are {', '.join(each.name for each in fields(Options))}.",
        )
    options = Options(**values)
    check_together(options, given_options(arguments))
    return options


def as_text(value: object) -> str:
    """Return a value from a file or a call, formatted as on the command line."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, set)) else str(value)


def _shown(name: str, value: object) -> str:
    """Return an option's value for a message; nothing if it may have a password."""
    secret = name == "store" and re.search(r"://.*[@?]", as_text(value), re.DOTALL)
    return "" if secret else f" {value!r}"


def _refuse_unknown(environment: Mapping[str, str]) -> None:
    """Reject variables with our prefix that are not options, such as misspelt ones."""
    of_users = [variable_name(each.name) for each in fields(Options)]
    of_users += [f"{PREFIX}{name}" for name in _READ_ELSEWHERE]
    known = {*of_users, *(f"{PREFIX}{name}" for name in _OF_DRIVERS)}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, of_users, 1)
            raise ConfigurationError(
                f"unknown environment variable {name}",  # its value may be a secret
                hint=f"Did you mean {near[0]}? Otherwise unset it." if near else "Unset it.",
            )


def options_environment(
    options: Options, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables that give these options to a live training's helper.

    Args:
        options: The options.
        environment: The variables that it has otherwise, such as one that an option overrules.
    """
    # The helper knows its mode; a variable of the user's may say the one that was overruled.
    options = replace(options, mode=Options.mode)
    variables = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if value == each.default and variable_name(each.name) in environment:
            variables[variable_name(each.name)] = ""  # counts as absent
        elif value != each.default:
            path = each.name in _PATHS and "://" not in value
            text = str(Path(value).absolute()) if path else as_text(value)
            variables[variable_name(each.name)] = "1" if value is True else text
    return variables


def without_our_options(words: Sequence[str]) -> tuple[str, ...]:
    """``words`` without our options: those of ``horovodrun`` itself."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    _, rest = parser.parse_known_args(list(words))
    return tuple(rest)
