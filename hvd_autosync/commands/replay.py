"""``hvd-autosync replay``: replay, verify or rerun a recorded study."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import StoreOption, console, mention_failed, refuse_without_effect
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.util.amounts import amount, be
from hvd_autosync.util.printable import printable, raw

if TYPE_CHECKING:
    from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord

#: Slowest replay: a sleep has a maximum.
_SLOWEST = 1e-3
#: Of the decisions that :func:`_verify` repeats.
_WITHOUT_NAMES = (
    "the trace is anonymous, without losses and names of parameters: decisions that depend on them "
    "can differ"
)


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(replay)


def replay(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE", help="A trace file, the id of a study, a prefix of it, or 'last'."
        ),
    ] = "last",
    speed: Annotated[
        str, typer.Option(metavar="X", help="Speed relative to the recording, or 'max'.")
    ] = "10",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Repeat every decision of the study, and report the differences."
        ),
    ] = False,
    learner: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Run these learners on the recorded measurements: transfer (ours), cost-model, "
            "botorch (ours without priors), optuna-tpe, optuna-gp, sobol, random.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=2, help="Trials of each learner. Default: the number of trials of the study."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of each learner.")] = 3,
    store: StoreOption = None,
) -> None:
    """Replay a study, verify it, or run other learners on its measurements, without a cluster.

    \b
      hvd-autosync replay last --speed 50
      hvd-autosync replay trace.jsonl.gz --verify
      hvd-autosync replay trace.jsonl.gz --learner transfer,optuna-tpe,random
    """
    from hvd_autosync.traces.opening import open_trace

    if verify and learner is not None:
        raise ConfigurationError(
            "--verify and --learner are mutually exclusive", hint="Give one of them."
        )
    if learner is None:
        refuse_without_effect(context, "without --learner", "trials", "seeds")
    if verify or learner is not None:
        refuse_without_effect(context, "with --verify or --learner", "speed")
    traces, study = open_trace(trace, store)
    mention_failed(traces, trace, store)
    recorded = traces.trials(study.study_id)
    if verify:
        raise typer.Exit(_verify(traces, study, recorded))
    if learner is not None:
        _rerun(traces, study, recorded, learner.split(","), trials, seeds)
        return
    from contextlib import closing

    from hvd_autosync.engine.replay import play
    from hvd_autosync.reporting import progress_listener

    factor = _speed(speed)
    try:
        with closing(progress_listener()) as listener:
            play(study, recorded, listener, factor)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _speed(text: str) -> float:
    try:
        factor = math.inf if text == "max" else float(text)
    except ValueError:
        factor = math.nan
    if not factor >= _SLOWEST:
        raise ConfigurationError(
            f"invalid value {text!r} for --speed",
            hint=f"Give a number from {_SLOWEST:g} on, or max.",
        )
    return factor


def _verify(traces: TraceStore, study: StudyRecord, recorded: list[TrialRecord]) -> int:
    from hvd_autosync.engine.replay import verify
    from hvd_autosync.reporting.replayed import differences_table, missing_sources
    from hvd_autosync.traces.anonymous import is_anonymous
    from hvd_autosync.util.versions import other_deciding_versions

    lines = [*other_deciding_versions(study.versions), *missing_sources(traces, recorded)]
    if is_anonymous(study):
        lines.append(_WITHOUT_NAMES)
    for line in lines:
        print(printable(line), file=sys.stderr)
    checks = []
    for check in verify(traces, study, recorded):
        checks.append(check)
        if sys.stderr.isatty():
            line = f"\rverifying: {len(checks)} of {len(recorded)}"
            print(line, end="", file=raw(sys.stderr))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    wrong = [check for check in checks if not check.same]
    left_out = [check.kind for check in checks if check.again is None and check.same]
    rested = left_out.count("default")
    others, asked = len(left_out) - rested, len(checks) - len(left_out)
    kinds = {check.kind for check in checks if check.again is not None or not check.same}
    if not asked or (others and not wrong and kinds == {"default"}):
        print(
            "nothing could be verified: this program chose no trial of the study but the default's"
        )
        return 1
    if wrong:
        console().print(differences_table(study, wrong))
    same = asked - len(wrong)
    print(f"{same} of {amount(asked, 'decision')} {be(same)} identical, bit for bit")
    if rested:
        print(f"{amount(rested, 'further trial')} of the default followed a rest of the study")
    if others:
        what = "a decision" if others == 1 else "decisions"
        print(f"{others} more {be(others)} {what} of a learner that is not part of this program")
    return 1 if wrong else 0


def _rerun(
    traces: TraceStore,
    study: StudyRecord,
    recorded: list[TrialRecord],
    learners: list[str],
    trials: int | None,
    seeds: int,
) -> None:
    from hvd_autosync.engine.replay import rerun
    from hvd_autosync.learner.registry import learner_spec
    from hvd_autosync.reporting.replayed import reruns_table
    from hvd_autosync.study.resumed import at_one_speed
    from hvd_autosync.study.stage_budget import explored

    for name in learners:
        learner_spec(name)  # raises for unknown names before the long computation
    recorded = at_one_speed(recorded)
    count = trials or len(explored(recorded))
    found = []
    for name in learners:
        for seed in range(seeds):

            def tell(number: int, name: str = name, seed: int = seed) -> None:
                if sys.stderr.isatty():
                    line = f"\r{name}, seed {seed + 1} of {seeds}: trial {number + 1} of {count} "
                    print(line, end="", file=raw(sys.stderr))

            found.append(rerun(traces, study, recorded, name, count, seed, tell))
    if sys.stderr.isatty():
        print(file=sys.stderr)
    for part in reruns_table(study, recorded, found):
        console().print(part)
