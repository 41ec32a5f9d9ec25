"""Compatibility of a recorded study, or of its winner, with another job or a running training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hvd_autosync.engine.options import Options
from hvd_autosync.engine.preflight import check_controller
from hvd_autosync.engine.reuse import kept_for_shorter
from hvd_autosync.engine.training_context import known_model
from hvd_autosync.errors import ConfigurationError, SpaceError, StudyError
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import redact, without_digests
from hvd_autosync.search_space import Host, ModelProfile, Strategy, catalogue_knob
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, Classes, parameter_classes
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.restrictions import without_choices
from hvd_autosync.search_space.strategy_file import check_fits, check_model
from hvd_autosync.study import defaults
from hvd_autosync.study.candidate_selection import may_be_used
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyRecord, StudyStatus
from hvd_autosync.traces.anonymous import NO_NAMES_HINT, is_anonymous
from hvd_autosync.traces.validity import UnknownValueError, check_strategy
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import shell_line
from hvd_autosync.util.versions import MEASURED, other_versions

#: Maximum number of trials before confirmation if a job is tuned again, because of drift or because
#: the loss guard abandoned its winner.
RETUNE_TRIALS = 8
#: Settings that are not stored where they are these.
_LEFT_OUT: dict[str, object] = {"mode": "launched", "excluded": [], "judged_by": ""}


def winner_of(study: StudyRecord) -> Strategy:
    """Return the winner of ``study``.

    Raises:
        StudyError: It has none yet, or never will.
    """
    if study.winner is None:
        raise StudyError(
            f"study {study.study_id} has no winner: it is {study.status.value}",
            hint="Wait for its end, run its command again if its driver was stopped (not if it was "
            "imported), or choose a finished study."
            if study.status is StudyStatus.RUNNING
            else "Choose a finished study; hvd-autosync traces list shows them.",
        )
    return study.winner


def winner_for(study: StudyRecord, job: Job) -> Strategy:
    """Return the winner of ``study``, after a check that ``job`` can run under it.

    Raises:
        ConfigurationError: There is no winner, or this Horovod lacks its controller.
        SpaceError: The winner does not fit the job's hosts or options, or has a value that nothing
            here knows, as of an extension.
    """
    try:
        winner = winner_of(study)
    except StudyError as error:  # the option names it, and nothing was launched
        raise ConfigurationError(error.message, hint=error.hint) from None
    try:
        check_strategy(f"the winner of study {study.study_id}", winner, None)
    except UnknownValueError as error:
        raise SpaceError(str(error), hint=error.hint) from None
    fixed = dict(study.space.fixed) if study.space is not None else {}
    if (controller := winner.get("controller", fixed.get("controller"))) is not None:
        check_controller(job, controller)
    check_fits(winner, job.hosts, job.chosen)
    return winner


def why_not_in_place(
    study: StudyRecord, fixed: Collection[str], unwanted: Mapping[str, Collection[Value]]
) -> str:
    """Return why a running training cannot take over a study's winner; empty if it can.

    Args:
        study: The study.
        fixed: Knobs that the training cannot change.
        unwanted: Choices of knobs that it shall not make.
    """
    moved = [
        (name, value)
        for name, value in (study.winner or Strategy()).items()
        if (name in fixed or value in unwanted.get(name, ())) and _own_value(study, name) != value
    ]
    untried = [f"{name}={value}" for name, value in moved if name not in fixed]
    at_start = [f"{name}={value}" for name, value in moved if name in fixed]
    if at_start:
        return f"its winner needs {', '.join(at_start)} from the start"
    return f"its winner has {', '.join(untried)}, which is not tried live" if untried else ""


def _own_value(study: StudyRecord, name: str) -> Value | None:
    """Return the value of a knob with which the training has begun, such as the job's own."""
    if study.space is not None and study.space.holds_job:
        return study.space.default.get(name)
    if name == "controller":
        return default_controller(horovod_build())
    return catalogue_knob(name).default


def why_again(known: StudyRecord, feasible: StudyRecord, options: Options) -> str:
    """Return the reason to tune a job again; empty if its last study can be reused.

    With ``reuse`` ``only`` it is reused whatever its steps have become, but not a lossy winner that
    the options of now do not admit.

    Args:
        known: The last study of the job.
        feasible: The same study without abandoned strategies
            (:func:`hvd_autosync.study.fallbacks.without_excluded`).
        options: The options of now.
    """
    refused = why_not_admitted(feasible, options)
    if options.reuse == "only":
        return refused
    if known.drift:
        return known.drift[0]
    if refused:
        return refused
    hours = options.expected_hours or defaults.EXPECTED_HOURS
    if kept_for_shorter(known, hours):
        return f"it kept the default for a training of fewer than {amount(hours, 'hour')}"
    conclusion = Conclusion.of(feasible)
    found_another = conclusion is not None and conclusion.best is not None
    if feasible is known or found_another or StudySettings.from_json(known.settings).retune:
        return ""
    return "the loss guard ended its winner, and no other strategy was confirmed to be faster"


def nothing_to_reuse(again: str) -> ConfigurationError:
    """Return the error that ``reuse`` is ``only`` and no study of the job can be reused.

    Args:
        again: Why its last study cannot; empty: it has none.
    """
    return ConfigurationError(
        f"{again or 'this store has no finished study of this job'}, and --autosync-reuse is "
        "'only'",
        hint="Tune once with --autosync-reuse auto, or check --autosync-store.",
    )


def why_not_admitted(study: StudyRecord, options: Options, winner: Strategy | None = None) -> str:
    """Return why the options of now do not admit a study's lossy winner; empty if they do.

    Args:
        study: The study, without abandoned strategies.
        options: The options of now.
        winner: A strategy of its space to judge instead of its winner.

    Raises:
        SpaceError: It is none.
    """
    conclusion = Conclusion.of(study)
    if conclusion is None or not study.space:
        return ""
    winner = conclusion.winner if winner is None else winner
    if study.space.is_exact(winner):
        return ""
    settings = StudySettings.from_json(study.settings)
    if settings.loss_tolerance > options.loss_tolerance:
        return f"its lossy winner was admitted with a loss tolerance of {settings.loss_tolerance}"
    if settings.goal != options.goal:
        return f"its lossy winner was admitted for the goal {settings.goal!r}"
    if settings.quality_steps < options.quality_steps:
        return f"its lossy winner was judged in trials of {settings.quality_steps} steps"
    if any(verdict.admissible and not verdict.pairs for verdict in conclusion.verdicts):
        return "its lossy winner was admitted by the rule of an earlier version"
    alike = study.space.lossy_part(winner) == study.space.lossy_part(study.space.default)
    if not alike and not may_be_used(study.space, winner, conclusion.verdicts):
        return "its lossy winner was admitted by the verdict on one that may train another model"
    return ""


def why_not_resumed(
    study: StudyRecord,
    settings: StudySettings,
    fixed: Collection[str],
    unwanted: Mapping[str, Collection[Value]],
) -> str:
    """Return why an interrupted study is not resumed; empty if it is.

    Args:
        study: The study.
        settings: The settings of now.
        fixed: Knobs that cannot be changed now.
        unwanted: Choices of knobs that shall not be tried now.
    """
    own = settings.to_json()
    if study.settings != own:
        was, now = {**_LEFT_OUT, **study.settings}, {**_LEFT_OUT, **own}
        texts = [
            f"{name} {was.get(name)}, now {value}"
            for name, value in now.items()
            if was.get(name) != value
        ]
        return f"has other settings ({'; '.join(texts) or 'of another version'})"
    measured = {name: study.versions[name] for name in MEASURED if name in study.versions}
    if apart := "; ".join(other_versions(measured)):
        return f"was measured under other versions ({apart})"
    if study.space is None:
        return ""
    kept = without_choices(study.space, unwanted)
    both = zip(study.space.knobs, kept.knobs, strict=True)
    free = {k.name for k in study.space.knobs if k.from_unit(0.0) != k.from_unit(1.0)}
    names = [knob.name for knob, now in both if knob.name in free & {*fixed} or knob != now]
    return f"has what is not tried any more ({', '.join(names)})" if names else ""


def classes_for(study: StudyRecord, job: Job, location: str | None) -> Classes:
    """Return the parameter classes of the job that the winner of ``study`` needs.

    An anonymous trace has no names of parameters. Then the classes are those of an earlier study of
    the same command in the store, if its model has the same shapes in the same order.

    Args:
        study: The study.
        job: The job.
        location: The user's store.

    Raises:
        ConfigurationError: The trace has no names of parameters, and the store has none either.
        SpaceError: The store has the job's model, and the model does not fit the winner.
    """
    assert study.winner is not None, "winner_for has checked"
    by_class = any(
        knob.startswith(f"{name}_") for knob in study.winner for name in PARAMETER_CLASSES
    )
    if study.task is None or not by_class:
        return {}
    here = known_model(location, redact(job.command))
    if not is_anonymous(study):
        classes = parameter_classes(study.task.model)
        if here is not None:
            check_model(study.winner, classes, here)
        return classes
    if here is None or _shapes(here) != _shapes(study.task.model):
        raise ConfigurationError(
            f"the winner of study {study.study_id} needs classes of parameters, but its trace is "
            "anonymous: it has no names of parameters",
            hint=NO_NAMES_HINT,
        )
    return parameter_classes(here)


def _shapes(model: ModelProfile) -> list[tuple[tuple[int, ...], str]]:
    return [(parameter.shape, parameter.dtype) for parameter in model.parameters]


def differences(study: StudyRecord, job: Job) -> Iterator[str]:
    """Yield a line for each difference between ``job`` and the job that ``study`` measured.

    Without one, both are the same job, perhaps under other versions of packages. Of an anonymous
    study only the layout can be compared.
    """
    line = without_digests(redact(job.command))
    if not is_anonymous(study) and without_digests(study.command[-len(line) :]) != line:
        yield f"different command: the study ran {shell_line(study.command)}"
    if study.task is not None:
        there, here = _layout(study.task.resources.hosts), _layout(job.hosts)
        if there != here:
            yield f"different layout: {there} in the study, {here} here"


def _layout(hosts: tuple[Host, ...]) -> str:
    """``2 x 4 ranks``, or ``4 + 2 ranks`` if hosts differ."""
    slots = [host.slots for host in hosts]
    if len(set(slots)) == 1:
        return f"{len(hosts)} x {slots[0]} ranks"
    return f"{' + '.join(map(str, slots))} ranks"
