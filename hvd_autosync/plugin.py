"""The ``--autosync`` option of ``horovodrun``: parse, tune, then run the training.

:func:`extend_launcher` is called once Horovod's launcher module has been loaded. It adds our
options to Horovod's own parser and takes over ``_run`` for jobs that ask for us; every other job
goes through untouched.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

from hvd_autosync import extensions
from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.launch.facts import horovod_build
from hvd_autosync.launch.job import Job, assign_hosts
from hvd_autosync.launch.masking import redact
from hvd_autosync.options import (
    IMPLY,
    Options,
    add_options,
    given_options,
    resolve_options,
    without_our_options,
)
from hvd_autosync.printable import printable, printable_lines, printable_output
from hvd_autosync.search_space.horovod_settings import AUTOTUNE_VARIABLE, held_by_environment

_PREFIX = "hvd-autosync"


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class _Parser(argparse.ArgumentParser):
    """Horovod's parser with our options, and our refusals before anything starts."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        add_options(self)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed: argparse.Namespace = super().parse_args(args, namespace)
        given = given_options(parsed)
        parsed.autosync |= not IMPLY.isdisjoint(given)
        if given and not parsed.autosync:
            self.error(f"{given[0]} has no effect without --autosync; add --autosync or drop it")
        if parsed.autosync and not parsed.check_build:
            try:
                _refuse(parsed)
                resolve_options(parsed, section=_file_section(parsed.config_file))
            except ConfigurationError as error:
                self.error(str(error))
        return parsed

    def error(self, message: str) -> NoReturn:
        """As Horovod's; without the usage of all its options where one of ours is given."""
        ours = [word for word in sys.argv if word.startswith("--autosync")]
        if not ours:
            super().error(message)
        unknown = [word for word in ours if word in message.split()]
        for word in unknown if message.startswith("unrecognized arguments") else ():
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            message += f"\n  Did you mean {near[0]}?" if near else ""
        self.exit(2, printable_lines(f"{self.prog}: error: {message}\n"))


def _refuse(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be tuned, before anything is launched.

    Raises:
        ConfigurationError: Says what and why.
    """
    if not arguments.command:
        raise ConfigurationError(
            "there is no command to tune",
            hint="Append it: horovodrun -np 2 --autosync python train.py",
        )
    if arguments.host_discovery_script or arguments.min_num_proc is not None:
        raise ConfigurationError(
            "elastic jobs cannot be tuned: their number of ranks changes under the measurement",
            hint="Tune with fixed hosts (-H), then run the elastic job with the result.",
        )
    if arguments.autotune:
        raise ConfigurationError(
            "--autotune and --autosync would both change the same parameters while they measure",
            hint="Drop one of them.",
        )
    if arguments.use_jsrun:
        raise ConfigurationError("jsrun jobs are not supported", hint="Use --gloo or --mpi.")


def extend_launcher(launcher: ModuleType) -> None:
    """Add ``--autosync`` to ``horovod.runner.launch``."""
    shim = ModuleType("argparse")
    shim.__dict__.update(vars(argparse))
    shim.ArgumentParser = _Parser  # type: ignore[attr-defined]
    launcher.argparse = shim  # type: ignore[attr-defined]
    run_unchanged: Callable[[argparse.Namespace], Any] = launcher._run

    def run(arguments: argparse.Namespace) -> Any:
        if not getattr(arguments, "autosync", False):
            return run_unchanged(arguments)
        sys.exit(guarded(lambda: autosync(arguments, sys.argv[1:])))

    launcher._run = run  # type: ignore[attr-defined]


def guarded(action: Callable[[], int]) -> int:
    """Run ``action``; turn our errors and Ctrl-C into a message and an exit status."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, stop)
    try:
        with printable_output():
            return action()
    except AutosyncError as error:
        print(f"{_PREFIX}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is cleaned up; the rest is the goodbye
        print(
            f"{_PREFIX}: stopped; the same command goes on where it was stopped", file=sys.stderr
        )
        return 130


def autosync(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Tune the job of a parsed ``horovodrun`` line, then run it.

    Args:
        arguments: What Horovod's parser made of ``words``.
        words: The command line behind ``horovodrun``.

    Returns:
        The exit status of the training, or 0 after tuning only.
    """
    job, options = read_job(arguments, words)
    check_command(job)
    if options.recurring:
        from hvd_autosync.recurring.runs import run_recurring

        if not options.dry_run:
            check_hosts(job)
        return run_recurring(job, options)
    if options.dry_run:
        horovod_build()  # says so where torch, which the tuner needs too, cannot be imported
        from hvd_autosync.reporting import print_plan

        print_plan(job, options)
        return 0
    if options.strategy is not None:
        return _run_file(job, options)
    if options.replay is not None:
        return _run_winner(job, options, options.replay)
    check_hosts(job)
    horovod_build()
    from hvd_autosync.tune_and_train import tune_and_train

    return tune_and_train(job, options)


def _run_file(job: Job, options: Options) -> int:
    """Run ``job`` under the strategy of a file."""
    from hvd_autosync.documents import read_toml
    from hvd_autosync.earlier import known_model, predicted_losses
    from hvd_autosync.search_space.schedule import beyond_horovod
    from hvd_autosync.search_space.strategy_file import check_fits, check_model, read_strategy
    from hvd_autosync.search_space.trial import LossPrediction
    from hvd_autosync.training import Known, run_training
    from hvd_autosync.tuning import tuning_keys

    assert options.strategy is not None
    strategy, classes = read_strategy(read_toml(options.strategy, "the strategy file"))
    check_fits(strategy, job.hosts, job.chosen)
    prediction = LossPrediction()
    if beyond_horovod(strategy):  # workers need this package then
        check_hosts(job)
        line = redact(job.command)
        model = known_model(options.store, line)
        if model is not None:
            check_model(strategy, classes, model)
        prediction = predicted_losses(options.store, tuning_keys(job), strategy)
    return run_training(job, strategy, Known(classes, prediction)).status


def _run_winner(job: Job, options: Options, trace: str) -> int:
    """Run ``job`` under the winner of a study that was recorded, here or elsewhere."""
    from dataclasses import replace

    from hvd_autosync.earlier import known_of
    from hvd_autosync.fallbacks import fallback_line
    from hvd_autosync.fitting import classes_for, differences, winner_for
    from hvd_autosync.reporting import answer_line
    from hvd_autosync.search_space.schedule import beyond_horovod
    from hvd_autosync.traces.opening import open_trace
    from hvd_autosync.training import run_training

    store, study = open_trace(trace, options.store)
    strategy, classes = winner_for(study, job), classes_for(study, job, options.store)
    if beyond_horovod(strategy):  # workers need this package then
        check_hosts(job)
    answer = printable(answer_line(study))
    print(f"{_PREFIX}: study {study.study_id}: {answer}", file=sys.stderr)
    if ended := fallback_line(study):
        print(f"{_PREFIX}: {printable(ended)}", file=sys.stderr)
    apart = list(differences(study, job))
    for line in apart:
        print(f"{_PREFIX}: {printable(line)}", file=sys.stderr)
    known = replace(known_of(study, store), classes=classes)
    if apart:  # then steps need not take as long as there
        known = replace(known, expected_step_s=0.0)
    return run_training(job, strategy, known).status


def read_job(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[Job, Options]:
    """The job and the options of a parsed ``horovodrun`` line.

    Raises:
        ConfigurationError: Something in them cannot be used; nothing was launched.
    """
    from horovod.runner.common.util import config_parser, hosts
    from horovod.runner.util.lsf import LSFUtils

    extensions.load()
    section = _file_section(arguments.config_file)
    options = resolve_options(arguments, section=section)
    _refuse(arguments)  # again: the configuration file may have switched autotune on
    environment = config_parser.set_env_from_args(dict(os.environ), arguments)
    if environment.get(AUTOTUNE_VARIABLE, "0") not in ("", "0"):
        raise ConfigurationError(
            f"{AUTOTUNE_VARIABLE} is set: Horovod's own tuner would change parameters meanwhile",
            hint=f"Unset {AUTOTUNE_VARIABLE}.",
        )
    given_hosts = arguments.hosts
    if not given_hosts and arguments.hostfile:
        try:
            given_hosts = hosts.parse_host_files(arguments.hostfile)
        except (OSError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"the hostfile {arguments.hostfile!r} cannot be read: {error}",
                hint="Write a line such as `node1 slots=4` for each host, and no other.",
            ) from None
    if not given_hosts and LSFUtils.using_lsf():
        raise ConfigurationError(
            "hosts and slots would come from LSF, which --autosync does not read",
            hint="Name them with -H, and choose --gloo or --mpi.",
        )
    given_hosts = given_hosts or f"localhost:{arguments.num_proc}"
    command = tuple(arguments.command)
    controller = "gloo" if arguments.use_gloo else "mpi" if arguments.use_mpi else None
    job = Job(
        options=without_our_options(words[: len(words) - len(command)]),
        command=command,
        hosts=assign_hosts(given_hosts, arguments.num_proc, exact=controller != "mpi"),
        controller=controller,
        held=tuple(sorted(held_by_environment(environment).items())),
        ssh=(arguments.ssh_port, arguments.ssh_identity_file),
    )
    return job, options


def _file_section(path: str | None) -> Mapping[str, Any]:
    """The section ``autosync`` of Horovod's configuration file.

    Raises:
        ConfigurationError: The file is missing, or nothing that Horovod or we can read.
    """
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"the configuration file {path!r} cannot be read: {error}",
            hint="Write YAML as in `horovodrun --help`, under --config-file.",
        ) from None
    if not isinstance(document, Mapping):
        raise ConfigurationError(
            f"the configuration file {path!r} has no sections",
            hint="Write a section such as `autosync:`, and entries such as trials: 20 below it.",
        )
    section = document.get("autosync") or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"autosync in {path!r} is not a section", hint="Write entries such as trials: 20."
        )
    return section


def check_command(job: Job) -> None:
    """Refuse a program or Python script that is not here, if this host takes part.

    Raises:
        ConfigurationError: Names it.
    """
    from hvd_autosync.launch.command import search_path
    from hvd_autosync.launch.remote import remote_hosts
    from hvd_autosync.launch.user_script import script_word

    if len(remote_hosts(job)) == len(job.hosts):
        return
    # Horovod's ranks are started by ``env``, which takes assignments before a command.
    words = list(itertools.dropwhile(_ASSIGNMENT.match, job.command))
    if not words or any(word.startswith("PATH=") for word in job.command):
        return
    if shutil.which(words[0], path=search_path()) is None:
        raise ConfigurationError(
            f"the command's program {words[0]!r} is not found",
            hint="Mend its name, or make it executable and name it with its path.",
        )
    script = script_word(words)
    if script is not None and not os.path.isfile(script):
        raise ConfigurationError(
            f"the script {script!r} is no file in {os.getcwd()}", hint="Mend its path."
        )


def check_hosts(job: Job) -> None:
    """Refuse hosts that cannot take part, before the job is tried on them.

    Raises:
        ConfigurationError: Names them, and why.
    """
    from hvd_autosync.launch.remote import hosts_without_package, ssh_remedy, unreachable_hosts

    if unreachable := unreachable_hosts(job):
        raise ConfigurationError(
            f"hosts cannot be reached by ssh: {_listed(unreachable)}",
            hint=" ".join(ssh_remedy(*finding) for finding in unreachable),
        )
    if lacking := hosts_without_package(job):
        raise ConfigurationError(
            f"hosts cannot take part: {_listed(lacking)}",
            hint=f"Install hvd_autosync there too, for {sys.executable}.",
        )


def _listed(findings: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{host}: {said}" for host, said in findings)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse a ``horovodrun`` line as Horovod does, ``--autosync`` understood and implied."""
    from horovod.runner import launch

    if not issubclass(launch.argparse.ArgumentParser, _Parser):
        extend_launcher(launch)
    before = sys.argv
    sys.argv = ["horovodrun", "--autosync", *words]
    try:
        parsed: argparse.Namespace = launch.parse_args()
    finally:
        sys.argv = before
    return parsed


def tune_command(words: Sequence[str]) -> int:
    """``hvd-autosync tune``: tune the job of a ``horovodrun`` line without running it after."""
    return guarded(lambda: autosync(parse_words(["--autosync-tune-only", *words]), words))


def run_command(path: str, words: Sequence[str]) -> int:
    """``hvd-autosync run``: run the job of a ``horovodrun`` line under the strategy of a file."""

    def run() -> int:
        line, chosen = list(words), ["--autosync-strategy", path]
        command = parse_words([*chosen, *line]).command
        if command[:1] == ["--"]:  # between the options and the command
            del line[len(line) - len(command)]
        return autosync(parse_words([*chosen, *line]), line)

    return guarded(run)


def space_command(words: Sequence[str]) -> int:
    """``hvd-autosync space``: print the space and the plan of a ``horovodrun`` line."""
    return guarded(lambda: autosync(parse_words(["--autosync-dry-run", *words]), words))
