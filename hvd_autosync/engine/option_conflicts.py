"""Options that exclude each other, or that have no effect beside others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvd_autosync.engine.option_values import option_name, variable_name
from hvd_autosync.errors import ConfigurationError

if TYPE_CHECKING:
    from hvd_autosync.engine.options import Options

#: Mutually exclusive options that replace "tune, then train".
_PURPOSES = ("recurring", "strategy", "replay", "tune_only")
#: Further pairs: without tuning there is no plan to print. A dry run on the command line goes
#: before a variable, which may be set for all jobs.
_PAIRS = (("strategy", "dry_run"), ("replay", "dry_run"))
#: Options that have an effect only beside another one.
_NEEDING = {
    "recurring": ("search", "target", "tolerance", "repeats"),
    "allow": ("quality_steps", "quality_minutes", "loss_tolerance", "goal"),
}
#: The only options that have an effect beside one that runs no trials.
_BESIDE = {
    "recurring": (
        *("allow", "space", "store", "dry_run"),
        *_NEEDING["recurring"],
        # They decide whether the lossy winner of an earlier study may be used.
        *("loss_tolerance", "goal", "quality_steps"),
    ),
    "strategy": ("store", "dry_run"),
    "replay": ("store", "dry_run"),
}


def check_together(options: Options, given: Sequence[str]) -> None:
    """Check options of all sources against each other.

    Args:
        options: The options.
        given: Names of those on the command line. Only these are refused for having no effect,
            and only with another value than the default: variables and the configuration file may
            be set for all jobs.

    Raises:
        ConfigurationError: Some exclude each other, or one has no effect.
    """
    # Those of _BESIDE tune nothing; a variable may set the mode for all jobs.
    if options.mode == "live" and not any(getattr(options, name) for name in _BESIDE):
        check_live(options)
        if "runner" in given and options.runner == "cold":
            raise ConfigurationError(
                "--autosync-runner cold has no effect with --autosync-mode live, which launches no "
                "trials",
                hint="Remove it, or choose --autosync-mode launched.",
            )
    for exclusive in (_PURPOSES, *_PAIRS):
        names = [option_name(name) for name in exclusive if getattr(options, name)]
        overruled = "dry_run" in exclusive and [*{*exclusive} & {*given}] == ["dry_run"]
        if len(names) > 1 and not overruled:
            raise ConfigurationError(
                f"{' and '.join(names)} are mutually exclusive",
                hint="Keep one of them, on the command line, in the environment or in the "
                "configuration file.",
            )
    default = type(options)()
    for name in given:
        if getattr(options, name) == getattr(default, name):
            continue
        for purpose, others in _BESIDE.items():
            if getattr(options, purpose) and name not in (purpose, *others):
                raise ConfigurationError(
                    f"{option_name(name)} has no effect with {option_name(purpose)}, which runs no "
                    "trials",
                    hint=f"Remove one of them ({variable_name(purpose)} is the latter, too).",
                )
        for needed, others in _NEEDING.items():
            if name in others and not getattr(options, needed):
                raise ConfigurationError(
                    f"{option_name(name)} has no effect without {option_name(needed)}",
                    hint=f"Add {option_name(needed)}, or remove {option_name(name)}.",
                )


def check_live(options: Options) -> None:
    """Check that options mean something where a training is tuned in its own steps.

    Raises:
        ConfigurationError: One does not.
    """
    if reason := not_live(options):
        raise ConfigurationError(reason, hint="Remove it, or choose --autosync-mode launched.")


def check_elastic(options: Options) -> None:
    """Check that options mean something in an elastic job, which only its own steps can tune.

    Raises:
        ConfigurationError: One does not.
    """
    reason = not_live(options)
    for name, value in (("mode", "launched"), ("runner", "cold")):
        if getattr(options, name) == value:
            reason = f"{option_name(name)} {value} launches trials"
    if reason:
        raise not_elastic(reason)


def not_elastic(reason: str) -> ConfigurationError:
    """Return the error of an elastic job that cannot be tuned for this reason."""
    return ConfigurationError(
        "an elastic job is tuned in its own steps only, because its ranks could change in a "
        f"launched trial: {reason}",
        hint="Remove what asks for that, or tune with fixed hosts (-H, without --min-np).",
    )


def not_live(options: Options) -> str:
    """Return why options exclude live tuning; empty if they do not."""
    if options.allow:
        return (
            f"lossy knobs ({', '.join(options.allow)}) cannot be tuned live: their losses are "
            "compared in launched trials"
        )
    for name in (*_PURPOSES, "keep_trial_files"):
        if getattr(options, name):
            return f"{option_name(name)} has no meaning where the training itself is tuned"
    return ""
