"""``--autosync-dry-run`` and ``hvd-autosync space``: the search space and the plan of a job."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from rich.console import Console, RenderableType

from hvd_autosync.engine.options import Options
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.remote import remote_hosts
from hvd_autosync.reporting.console import PrintableConsole
from hvd_autosync.reporting.space import applies_when, catalogue_table, space_table
from hvd_autosync.reporting.words import steps_text
from hvd_autosync.search_space import (
    Knob,
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    build_space,
    every_knob,
    restrict_space,
)
from hvd_autosync.search_space.horovod_settings import launch_knobs
from hvd_autosync.search_space.restrictions import without_choices
from hvd_autosync.study.confirm import MAX_ROUNDS, MIN_ROUNDS
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.traces.location import check_creatable
from hvd_autosync.util.amounts import amount

#: Number of cores of a rank that every rule treats as several.
_MANY_CORES = 64
#: Number of tensors of a model that every rule treats as large.
_LARGE_MODEL = 4096


def print_plan(job: Job, options: Options, console: Console | None = None) -> None:
    """Print the search space and the plan of ``job`` without launching anything.

    Args:
        job: The job.
        options: The options of its tuning.
        console: The console; standard output by default.

    Raises:
        ConfigurationError: The space file cannot be used, an elastic job or one that is to be
            tuned live cannot be, or ``reuse`` is ``only`` and there is nothing to reuse.
        StoreError: The store cannot be read, or not be created.
    """
    console = console or PrintableConsole()
    for each in plan(job, options):
        console.print(each)


def plan(job: Job, options: Options) -> Iterator[RenderableType]:
    """Yield the parts of what :func:`print_plan` prints."""
    from hvd_autosync.engine.compatibility import nothing_to_reuse
    from hvd_autosync.engine.mode import check_what_is_read, last_study
    from hvd_autosync.engine.study_options import load_restrictions, tuning_key

    restrictions = load_restrictions(options.space, options.allow)
    where = _where(job, options)
    store = TraceStore(options.store, create=False, or_empty=True)
    if _stores_here(job, options):
        check_creatable(options.store)
    if options.reuse == "never":  # the run does not read its conclusion, which may be damaged
        reused, again = None, ""
        known = store.find_finished(tuning_key(job, options, restrictions))
    else:
        known, again = last_study(store, job, options)
        reused = None if again else known
    if reused is None and options.reuse == "only" and _is_refused(job, options):
        raise nothing_to_reuse(again)
    if options.mode == "live" and (reused is None or not _stores_here(job, options)):
        check_what_is_read(job, options, create=False)
    if known is not None and known.space is not None:
        yield space_table(known.space, f"The search space of this job (study {known.study_id})")
    else:
        yield from _possible(job, options, restrictions, live=where is not None)
    yield from (
        "",
        _plan_text(options, reused, _again_text(known, again), where or "")
        + _live_stage(job, options, reused),
    )
    if reused is not None or options.reuse != "only":
        yield f"The trace is stored in {store.name}."


def _stores_here(job: Job, options: Options) -> bool:
    """Return whether the store is used from this host, and not from that of a remote rank 0."""
    in_place = job.elastic or options.mode == "live"
    return not in_place or job.hosts[0] not in remote_hosts(job)


def _where(job: Job, options: Options) -> str | None:
    """Return the sentence on where trials run, if that is in the training; else ``None``."""
    from hvd_autosync.engine.mode import check_what_is_read, why_launched

    steps = "Trials are steps of the training itself"
    if job.elastic:
        check_what_is_read(job, options, create=False)
        return f" {steps}, and whenever its ranks change, tuning starts over."
    if options.mode == "live":
        return f" {steps}."
    if options.mode == "auto" and why_launched(job, options) is None:
        return f" {steps}, unless its ranks find that impossible: then they are launched before it."
    return None


def _is_refused(job: Job, options: Options) -> bool:
    """Return whether a run is refused if ``reuse`` is ``only`` and there is nothing to reuse.

    A training whose rank 0 looks for the result goes on untuned instead.
    """
    from hvd_autosync.engine.mode import only_trains

    return not job.elastic and (options.mode != "live" or only_trains(job, options))


def _live_stage(job: Job, options: Options, reused: StudyRecord | None) -> str:
    """Return the sentence on the live stage of the training; empty without one.

    Args:
        job: The job.
        options: The options of its tuning.
        reused: The earlier study of the job whose winner is used.
    """
    from hvd_autosync.engine.live_stage import UNLESS_KEPT, has_live_stage, live_study, why_kept

    if not has_live_stage(job, options):
        return ""
    limits = "as many trials" if options.minutes is None else "as many trials and minutes"
    then = (
        " The exact knobs are then tuned in the steps of the training, which begins under it, with "
        f"{limits} again"
    )
    if reused is None:
        return f"{then}, {UNLESS_KEPT}."
    tuned = live_study(job, options, reused)
    if tuned is not None:
        return f" Its training was tuned in its own steps, too, by study {tuned.study_id}."
    return "" if why_kept(reused) or options.reuse == "only" else f"{then}."


def _possible(
    job: Job, options: Options, restrictions: dict[str, Any], *, live: bool
) -> Iterator[RenderableType]:
    """Yield what is known of the space before the trial of the default has profiled the model.

    Args:
        job: The job.
        options: The options of its tuning.
        restrictions: The parsed space file.
        live: Whether trials are steps of the training.
    """
    from hvd_autosync.engine.mode import choices_not_live

    fixed_knobs = launch_knobs(reinitializes=not job.elastic) if live else ()
    unwanted = choices_not_live(elastic=job.elastic, adds_levels=not job.elastic) if live else {}
    possible = _possible_spaces(job, options, fixed_knobs)
    spaces = [without_choices(restrict_space(each, restrictions), unwanted) for each in possible]
    knobs: dict[str, Knob] = {knob.name: knob for space in spaces for knob in space.knobs}
    names = [knob.name for knob in every_knob() if knob.name in knobs]
    sure = [n for n in names if all(n in (k.name for k in space.knobs) for space in spaces)]
    fixed = spaces[0].fixed
    yield space_table(SearchSpace(tuple(knobs[n] for n in sure), fixed), "Knobs of this job")
    if sure != names:
        maybe = [knobs[name] for name in names if name not in sure]
        yield ""
        yield catalogue_table(maybe, "Knobs that depend on the result of the default trial")
    absent = [k.name for k in every_knob() if k.name not in knobs and k.name not in dict(fixed)]
    if absent:
        yield ""
        yield "Not in this job:"
        yield from (f"  {name} (applies: {applies_when(name)})" for name in absent)


def _possible_spaces(
    job: Job, options: Options, fixed_knobs: Collection[str]
) -> Iterator[SearchSpace]:
    """Yield the space for models and devices on both sides of each rule, largest model last."""
    build = horovod_build()
    gpus = [Resources(job.hosts, "gpu", build)] if build.nccl else []
    cpus = [Resources(job.hosts, "cpu", build, cores=cores) for cores in (1, _MANY_CORES)]
    for resources in (*cpus, *gpus):
        for model in _possible_models():
            yield build_space(
                model,
                resources,
                held=job.chosen,
                owned=fixed_knobs,
                allow=options.allow,
                default_controller=default_controller(build),
            )


def _possible_models() -> Iterator[ModelProfile]:
    for count, dtype, sparse in (
        (1, "float16", False),
        (2, "float32", True),
        (_LARGE_MODEL, "float32", False),
    ):
        parameters = tuple(
            ParameterProfile(f"p{i}", (1,), dtype, sparse, ready_order=i) for i in range(count)
        )
        yield ModelProfile(parameters)


def _again_text(known: StudyRecord | None, again: str) -> str:
    """Return after which study and why a job is tuned again; empty if it is not."""
    if known is None or not again:
        return ""
    return f"tune again after study {known.study_id}, because {again}: "


def _plan_text(options: Options, reused: StudyRecord | None, again: str, where: str) -> str:
    """Describe a tuning with these options.

    Args:
        options: The options.
        reused: The earlier study of the job whose winner is used.
        again: The beginning of the plan of a job that is tuned again; empty if it is not.
        where: A sentence on where trials run; empty if before the training.
    """
    if reused is not None:
        return (
            f"The plan: reuse the winner of study {reused.study_id}, which tuned this job before. "
            "To tune again: --autosync-reuse never."
        )
    if options.reuse == "only":
        return (
            "The plan: use an earlier result if the host of rank 0 has one; else the training goes "
            "on untuned."
        )
    from hvd_autosync.engine.compatibility import RETUNE_TRIALS
    from hvd_autosync.engine.study_options import settings_of

    trials = min(options.trials, RETUNE_TRIALS) if again else options.trials
    steps = steps_text(settings_of(options), live=bool(where))
    minutes = options.minutes
    limit = f" or {amount(minutes, 'minute')}" if minutes is not None else ""
    after = "then stop" if options.tune_only else "then run the job with the winner"
    return (
        f"The plan: {again}measure the default strategy; try other strategies, up to "
        f"{amount(trials, 'trial')}{limit} in all, each with {steps}, "
        "and stop when no further gain is likely; confirm the best in "
        f"{MIN_ROUNDS} to {MAX_ROUNDS} rounds, each with a trial of the default; {after}.{where}"
    )
