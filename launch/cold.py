"""The cold trial runner: each trial is a fresh launch of the user's command."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from hvd_autosync.launch import enclosed
from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.command import start_launcher
from hvd_autosync.launch.horovodrun_options import OUTPUT, without_option
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.private_files import FILES_VARIABLE
from hvd_autosync.launch.remote import remote_hosts, sweep_remote_hosts
from hvd_autosync.launch.runner import TrialProgress, to_stderr
from hvd_autosync.launch.signals import signals_deferred, stop_if_asked
from hvd_autosync.launch.sweep import end_launch
from hvd_autosync.launch.trial_files import TrialFiles
from hvd_autosync.search_space import Host, TrialResult, TrialSpec
from hvd_autosync.util.program import run_main

_PROBE = tuple(run_main("hvd_autosync.runtime.trial.probe"))
#: Runs the command after it with private files.
_ENCLOSED = (sys.executable, "-I", "-S", enclosed.__file__)
_POLL_S = 0.1
_DRAIN_S = 5.0


class ColdRunner:
    """Runs each trial through Horovod's own launcher (see :mod:`hvd_autosync.launch.command`)."""

    def __init__(
        self, job: Job, say: Callable[[str], None] = to_stderr, files: TrialFiles | None = None
    ) -> None:
        self._job = job
        self._say = say
        self._files = files

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end; see :class:`hvd_autosync.launch.runner.TrialRunner`.

        Raises:
            NotPrivateError: The trial's files cannot be private; the script was not started.
        """
        job = replace(_part(self._job, spec.probe), command=_PROBE) if spec.probe else self._job
        # The launcher itself would write over the outputs of an earlier training.
        job = replace(job, options=without_option(job.options, OUTPUT))
        variables = self._files.variables(spec) if self._files else {}
        if FILES_VARIABLE in variables:
            job = replace(job, command=(*_ENCLOSED, *job.command))
        collector, clean = Collector(spec, job.world_size), False
        process: subprocess.Popen[bytes] | None = None
        try:
            with signals_deferred():
                process = start_launcher(job, spec.strategy, spec, variables=variables)
            assert process.stdout is not None and process.stderr is not None
            collector.read(process.stdout)
            collector.read(process.stderr)
            killed_because = self._watch(process, collector, limits, progress)
            clean = process.poll() == 0
        finally:
            with signals_deferred():
                if process is not None:
                    self._clean_up(process, spec, everywhere=not clean)
        collector.join(_DRAIN_S)
        if self._files:
            self._files.process_messages(collector)
        return collector.result(process.returncode, killed_because)

    def close(self) -> None:
        """Do nothing: a cold runner keeps nothing between trials."""

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        collector: Collector,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> str:
        """Wait for the launcher's exit; return why the trial must be killed, or ""."""
        while process.poll() is None:
            stop_if_asked()
            progress(collector.progress())
            if overdue := collector.overdue(limits):
                return overdue
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return ""

    def _clean_up(
        self, process: subprocess.Popen[bytes], spec: TrialSpec, *, everywhere: bool
    ) -> None:
        """End all processes of the trial."""
        end_launch(process, spec.trial_id)
        if everywhere:
            for line in sweep_remote_hosts(self._job, spec.trial_id):
                self._say(line)


def _part(job: Job, hosts: tuple[Host, ...]) -> Job:
    """Return ``job`` on a part of its hosts and slots."""
    part = job.on(hosts)
    named = any(option.startswith("--network-interface") for option in job.options)
    if part is not job and named and not remote_hosts(part):
        # On one host Horovod uses the loopback interface, which the user's list may lack
        # (get_local_interfaces of horovod/runner/driver/driver_service.py).
        return replace(part, options=(*part.options, "--network-interfaces", "lo"))
    return part
