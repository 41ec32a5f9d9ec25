"""``hvd_autosync.tune``: in a notebook with a live widget, elsewhere with progress on stderr."""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from hvd_autosync.api.arguments import INSTEAD, check_arguments
from hvd_autosync.api.live_tuning import tune_live
from hvd_autosync.api.results import Study
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.engine.option_values import variable_name
from hvd_autosync.engine.options import Options, as_text, resolve_options
from hvd_autosync.engine.preflight import (
    check_command,
    check_controller,
    check_hosts,
    start_driver_log,
)
from hvd_autosync.engine.tuning import Listener, TuningInterrupted
from hvd_autosync.engine.tuning import tune as tune_job
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.function import function_command
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.lost_trials import revert_lost_trials
from hvd_autosync.launch.masking import redact
from hvd_autosync.reporting import progress_listener
from hvd_autosync.reporting.progress import GuardedProgress
from hvd_autosync.reporting.widget import StopRequested, WidgetProgress
from hvd_autosync.search_space import TrialResult
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.traces import StudyStatus, TraceStore, TrialRecord
from hvd_autosync.traces.location import data_folder
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.printable import shell_line
from hvd_autosync.util.streams import open_standard_streams


def tune(
    command: str | Sequence[str] | Callable[..., object],
    *,
    np: int,
    hosts: str | None = None,
    options: Sequence[str] = (),
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    on_trial_end: Callable[[Study, TrialRecord], None] | None = None,
    mode: str = "launched",
    **settings: Any,
) -> Study:
    """Find the fastest synchronization strategy of a job in trials of a few steps.

    With ``mode="live"`` the trials are steps of the training itself, which is started beside this
    process. The call returns once the winner is known, and the training goes on under it, as
    ``study.training``; it ends with this process.

    It shares the engine and the store with ``horovodrun --autosync``: each uses results of the
    other for the same command, hosts and options.

        >>> study = hvd_autosync.tune("python train.py", np=2, trials=10)  # doctest: +SKIP
        >>> print(study.best)                                              # doctest: +SKIP

    Args:
        command: The training: a command line, a list of its words, or a function that every rank
            calls, which is written to a file in the user's data folder.
        np: Number of ranks.
        hosts: Hosts as for ``horovodrun -H``: ``"a:4,b:4"``; ``None``: this host only.
        options: Further options of ``horovodrun``, for example ``["--gloo"]``; none that another
            argument gives.
        args: Positional arguments of the function.
        kwargs: Keyword arguments of the function.
        on_trial_end: Called after each trial with the study so far and the trial's record, for
            TensorBoard, MLflow and the like. An exception in it ends the tuning, not a live
            training; the next call resumes it, unless ``reuse`` is ``"never"``.
        mode: ``"launched"``: each trial repeats the beginning of the script. ``"live"``: as above.
        settings: The options of ``--autosync`` without that prefix: ``trials``, ``minutes``,
            ``steps``, ``warmup``, ``allow``, ``space``, ``store``, ``reuse``, ``transfer``,
            ``runner``, ``seed``, ``expected_hours``, ``quality_steps``, ``quality_minutes``,
            ``loss_tolerance``, ``goal``, ``keep_trial_files`` (docs/flag.md).

    Returns:
        The finished study; after Stop the study so far, which the next call resumes, unless
        ``reuse`` is ``"never"``. A live training goes on after Stop, too, under the best confirmed
        strategy.

    Raises:
        ConfigurationError: An argument is invalid; nothing was launched.
        DefaultTrialError: The job fails or cannot be measured under the default strategy.
        LiveTuningError: The training cannot be tuned in its own steps, or has failed before.
        StoreError: The store cannot be used.
        TrialFilesError: Files that a trial of a killed driver has changed cannot be restored.
        KeyboardInterrupt: The kernel was interrupted. All measurements are in the store. In a live
            tuning an interrupt is a Stop, once its first trial has begun.
    """
    own = {
        "command": command,
        "np": np,
        "hosts": hosts,
        "options": options,
        "args": args,
        "kwargs": kwargs,
        "on_trial_end": on_trial_end,
        "mode": mode,
    }
    check_arguments(own, settings)
    open_standard_streams()  # a daemon may have closed them
    start_driver_log()
    given = {
        f"autosync_{name}": as_text(value) for name, value in settings.items() if value is not None
    }
    resolve_options(Namespace(**given))  # before the file of a function is written
    words = _words(command, args, kwargs or {})
    job, chosen = _job(words, np, hosts, options, given, live=mode == "live")
    check_command(job)
    revert_lost_trials(print_line)  # a live training, too, starts on these files
    check_hosts(job)
    check_controller(job)
    store = TraceStore(chosen.store)
    training = None
    try:
        with closing(_progress(chosen)) as progress:
            listener = _CallbackListener(progress, on_trial_end)
            if mode == "live":
                record, training = tune_live(job, chosen, listener)
            else:
                record = tune_job(job, chosen, listener)
    except StopRequested as stop:
        if not stop.study_id:  # its training has ended, too
            raise KeyboardInterrupt from None
        record = store.study(stop.study_id)
    except TuningInterrupted:
        raise KeyboardInterrupt from None
    found = Study(store, record)
    found.training = training
    # A widget shows the end of a tuning, and nothing of a study that is reused.
    seen = listener.ended or record.status is StudyStatus.RUNNING
    if not (seen and progress.shows_result):
        print(f"hvd-autosync: {found}", file=sys.stderr)
    return found


class _CallbackListener:
    """Forwards events to a display, and calls a function of the user after each trial.

    Attributes:
        ended: Whether a study has concluded.
    """

    def __init__(
        self, display: Listener, on_trial_end: Callable[[Study, TrialRecord], None] | None
    ) -> None:
        self._display = display
        self._on_trial_end = on_trial_end
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._display, name)

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`."""
        self._display.on_trial_end(study, trial, result)
        if self._on_trial_end is not None:
            so_far = Study(study.store, study.record)
            self._on_trial_end(so_far, so_far.history[trial.number])

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`."""
        self._display.on_study_end(study, conclusion)
        self.ended = True


def _words(
    command: str | Sequence[str] | Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[str]:
    """Return the command as a list of words.

    Raises:
        ConfigurationError: The command is empty, or a function that cannot be written to a file.
    """
    if callable(command):
        return function_command(command, args, kwargs, data_folder() / "functions")
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    if not words:
        raise ConfigurationError(
            "the command is empty", hint='Give a command such as "python train.py".'
        )
    return words


def _job(
    words: Sequence[str],
    ranks: int,
    hosts: str | None,
    options: Sequence[str],
    given: Mapping[str, str],
    *,
    live: bool,
) -> tuple[Job, Options]:
    """Return the job and the options, as for a ``horovodrun`` line with the same words.

    Raises:
        ConfigurationError: An argument or an option is invalid.
    """
    layout = ["-np", str(ranks), *(["-H", hosts] if hosts else [])]
    line = [*layout, *options, *words]
    try:
        arguments = parse_words(line)
    except SystemExit:  # the parser has printed the reason
        raise ConfigurationError(
            f"horovodrun rejects this line: {shell_line(redact(line))}",
            hint="See its message above.",
        ) from None
    twice = [name for name in given if getattr(arguments, name) is not None]
    if arguments.num_proc != ranks:
        twice.append("np")
    if hosts and arguments.hosts != hosts:
        twice.append("hosts")
    if twice:
        name = twice[0].removeprefix("autosync_")
        raise ConfigurationError(
            f"options repeat or contradict the argument {name}: {shell_line(redact(options))}",
            hint=f"Give {name} as an argument alone.",
        )
    for name, text in given.items():
        setattr(arguments, name, text)
    job, chosen = read_job(arguments, line)
    refused = dict.fromkeys(INSTEAD, "use horovodrun --autosync")
    if live:
        refused["tune_only"] = "give mode='launched': the training follows a live tuning"
    elif chosen.mode == "live":
        refused["mode"] = "give mode='live'"
    for name, instead in refused.items():
        if getattr(chosen, name):
            raise ConfigurationError(
                f"tune() does not support {name}, which {variable_name(name)} or the "
                "configuration file sets",
                hint=f"Unset it, or {instead}.",
            )
    return job, chosen


def _progress(options: Options) -> GuardedProgress:
    """Return the progress display: a widget in a notebook, else as for the flag."""
    if _in_notebook():
        try:
            return GuardedProgress(WidgetProgress(options.again), sys.stderr)
        except ImportError as missing:
            print(
                f"hvd-autosync: no progress widget, as {missing.name} is not installed: "
                "pip install 'hvd-autosync[notebook]'",
                file=sys.stderr,
            )
    return progress_listener()


def _in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
