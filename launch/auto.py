"""The trial runner that everyone uses: warm where it can, cold where it must."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.fork_servers import ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.private_files import NotPrivateError
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.trial_files import TrialFiles
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.launch.watched_files import WatchedFiles
from hvd_autosync.search_space import TrialResult, TrialSpec, TrialStatus

#: Longest time of a launch and the imports of torch, from a network's file system perhaps.
_LAUNCH_S = 60.0
#: What a script may do because it was forked.
_FAILED = (TrialStatus.CRASHED, TrialStatus.HUNG)


class AutoRunner:
    """Runs trials warm, and cold those that only a fresh launch can run.

    Under MPI every rank is started by MPI's own process manager, so MPI trials are cold. A job
    that cannot be forked at all is told so once and runs cold from then on.

    Args:
        job: The job.
        say: Takes a line for the user.
        cold: Never run warm.
        keep_files: Folder in which what trials write stays; "": nowhere.
        own_files: Files of ours that trials do not write.
    """

    def __init__(
        self,
        job: Job,
        say: Callable[[str], None],
        *,
        cold: bool = False,
        keep_files: str = "",
        own_files: Collection[str] = (),
    ) -> None:
        self._job = job
        self._say = say
        self._files = TrialFiles(say, keep_files)
        self._cold = ColdRunner(job, say, self._files)
        self._warm: WarmRunner | None = None
        self._trusted = False
        self._own = own_files
        self._keep_files = keep_files
        self._watch: WatchedFiles | None = None
        if not cold:
            try:
                self._warm = _warm_runner(job, say, self._files)
            except ConfigurationError as error:
                self._give_up(error.message)

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
        if not self._files.private and not spec.probe:
            return self._watched(spec, limits, progress)
        try:
            result = self._launch(spec, limits, progress)
        except NotPrivateError as error:
            self._share_files(str(error))
            return self._watched(spec, limits, progress)
        if result.status in (*_FAILED, TrialStatus.ENDED_EARLY) and not self._files.cleared:
            suspicion = self._files.suspicion(result, len(self._job.hosts))
            if suspicion:
                return self._suspected(result, suspicion, spec, limits, progress)
        return result

    def _watched(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """A trial whose files are not private: what it changes is put back.

        Raises:
            TrialFilesError: That cannot be done.
        """
        if self._watch is None:
            self._watch = WatchedFiles(self._job.command, self._say, self._own, self._keep_files)
        self._watch.begin()
        try:
            return self._launch(spec, limits, progress)
        finally:
            self._watch.end()

    def _launch(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        if self._warm is None or self._controller(spec) != "gloo":
            return self._run_cold(spec, limits, progress)
        try:
            result = self._warm.run(spec, limits, progress)
        except ForkServersError as error:
            self._give_up(str(error))
            return self._run_cold(spec, limits, progress)
        if spec.probe:
            return result  # it says nothing of the script
        if result.status not in _FAILED:  # what ends too soon does so in a fresh process too
            self._trusted = True
        elif not self._trusted:
            return self._doubted(result, spec, limits, progress)
        return result

    def close(self) -> None:
        """End what was kept for the next trial."""
        if self._warm is not None:
            self._warm.close()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _suspected(
        self,
        result: TrialResult,
        suspicion: str,
        spec: TrialSpec,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> TrialResult:
        """A trial failed: was it the job, or that its files were private?"""
        self._files.private = False
        again = self._watched(spec, limits, progress)
        if again.status in (*_FAILED, TrialStatus.ENDED_EARLY):
            self._files.private = self._files.cleared = True
            return result
        self._share_files(f"with private files a trial fails ({result.reason}); {suspicion}")
        return again

    def _share_files(self, reason: str) -> None:
        self._files.private = False
        self._say(f"trials have no files of their own: {reason}")

    def _doubted(
        self,
        result: TrialResult,
        spec: TrialSpec,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> TrialResult:
        """The first warm trial failed: was it the job, or the fork?"""
        again = self._run_cold(spec, limits, progress)
        if again.status not in _FAILED:
            self._give_up(f"the script fails in a forked process ({result.reason})")
        return again

    def _run_cold(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        # The limit may come from a warm default, which launched and imported nothing.
        return self._cold.run(spec, replace(limits, setup_s=limits.setup_s + _LAUNCH_S), progress)

    def _give_up(self, reason: str) -> None:
        self._say(f"each trial is a fresh launch: {reason}")
        self.close()
        self._warm = None

    def _controller(self, spec: TrialSpec) -> object:
        chosen = spec.strategy.get("controller", self._job.controller)
        return chosen or default_controller(horovod_build())


def _warm_runner(job: Job, say: Callable[[str], None], files: TrialFiles) -> WarmRunner:
    """A warm runner for ``job``.

    Raises:
        ConfigurationError: The job cannot be forked; says why.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"forking is not supported on {sys.platform}", hint="")
    if not horovod_build().gloo:
        raise ConfigurationError("this Horovod was built without Gloo", hint="")
    return WarmRunner(job, user_script(job.command), say, files)
