"""The cold trial runner: each trial is a fresh launch of the user's command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.command import start_launcher
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.remote import sweep_remote_hosts
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.signals import signals_deferred
from hvd_autosync.launch.sweep import end_launch
from hvd_autosync.search_space import TrialResult, TrialSpec

_PROBE = (sys.executable, "-m", "hvd_autosync.runtime.probe")
_POLL_S = 0.1
_DRAIN_S = 5.0


class ColdRunner:
    """Runs each trial through Horovod's own launcher (see :mod:`hvd_autosync.launch.command`)."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
        job = replace(self._job.on(spec.probe), command=_PROBE) if spec.probe else self._job
        collector, clean = Collector(spec, job.world_size), False
        with signals_deferred():
            process = start_launcher(job, spec.strategy, spec)
        try:
            assert process.stdout is not None and process.stderr is not None
            collector.read(process.stdout)
            collector.read(process.stderr)
            killed_because = self._watch(process, collector, limits, progress)
            clean = process.poll() == 0
        finally:
            with signals_deferred():
                self._clean_up(process, spec, everywhere=not clean)
        collector.join(_DRAIN_S)
        return collector.result(process.returncode, killed_because)

    def close(self) -> None:
        """Nothing is kept."""

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        collector: Collector,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> str:
        """Wait for the launcher's exit; a reason when the wait was given up."""
        while process.poll() is None:
            progress(collector.progress())
            if overdue := collector.overdue(limits):
                return overdue
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                pass
        return ""

    def _clean_up(
        self, process: subprocess.Popen[bytes], spec: TrialSpec, *, everywhere: bool
    ) -> None:
        """Leave no process of the trial."""
        end_launch(process, spec.trial_id)
        if everywhere:
            for line in sweep_remote_hosts(self._job, spec.trial_id):
                print(f"hvd-autosync: {line}", file=sys.stderr)
