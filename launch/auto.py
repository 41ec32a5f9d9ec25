"""The default trial runner: warm if the job can be forked, else cold."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace

from hvd_autosync.errors import ConfigurationError, FolderInUseError
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.fork_servers import ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.lost_trials import revert_lost_trials
from hvd_autosync.launch.private_files import NotPrivateError
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.signals import signals_deferred
from hvd_autosync.launch.trial_files import TrialFiles
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.launch.watched_files import WatchedFiles
from hvd_autosync.search_space import TrialResult, TrialSpec, TrialStatus
from hvd_autosync.search_space.trial import OUT_OF_TIME

#: Longest time for a launch and the imports of torch, possibly from a network file system.
_LAUNCH_S = 60.0
#: Outcomes that forking can cause.
_FAILED = (TrialStatus.CRASHED, TrialStatus.HUNG)


class AutoRunner:
    """Runs trials warm, and cold if only a fresh launch can run them.

    Under MPI every rank is started by MPI's own process manager, so MPI trials are cold. So are
    those of Gloo where the job itself runs under MPI: a forked script may be slower, and only
    trials of one kind can be compared. If a job cannot be forked, the reason is printed once and
    all its trials run cold.

    Args:
        job: The job.
        say: Prints a line for the user.
        cold: Whether all trials run cold.
        keep_files: Folder that keeps the files that trials write; "": they are discarded.
        own_files: Files that the driver itself writes; changes of them are not reverted.

    Raises:
        ConfigurationError: There is no temporary folder.
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
        _check_temporary_folder()
        self._job = job
        self._say = say
        self._files = TrialFiles(say, keep_files)
        self._cold = ColdRunner(job, say, self._files)
        self._warm: WarmRunner | None = None
        self._trusted = False
        self._own = own_files
        self._keep_files = keep_files
        self._watch: WatchedFiles | None = None
        controller = job.controller or default_controller(horovod_build())
        if not cold and controller == "gloo":
            try:
                self._warm = _warm_runner(job, say, self._files)
            except ConfigurationError as error:
                self._disable_warm(error.message)

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
        if not self._files.private and not spec.probe:
            return self._run_watched(spec, limits, progress)
        try:
            result = self._launch(spec, limits, progress)
        except NotPrivateError as error:
            self._share_files(str(error))
            return self._run_watched(spec, limits, progress)
        failed = result.status in (*_FAILED, TrialStatus.ENDED_EARLY)
        if failed and not spec.probe and not self._files.cleared:
            suspicion = self._files.suspicion(result, len(self._job.hosts))
            if suspicion:
                return self._retry_not_private(result, suspicion, spec, limits, progress)
        return result

    def _run_watched(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run a trial whose files are not private, and revert its changes afterwards.

        Raises:
            TrialFilesError: A changed file cannot be restored.
        """
        watch = self._watched()
        watch.begin(spec.trial_id)
        try:
            return self._launch(spec, limits, progress)
        finally:
            with signals_deferred():  # half of the user's files would stay as the trial left them
                watch.end()

    def _watched(self) -> WatchedFiles:
        if self._watch is None:
            revert_lost_trials(self._say)
            self._watch = WatchedFiles(self._job.command, self._say, self._own, self._keep_files)
        return self._watch

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _launch(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        if self._warm is None:
            return self._run_cold(spec, limits, progress)
        try:
            result = self._warm.run(spec, limits, progress)
        except ForkServersError as error:
            self._disable_warm(str(error))
            return self._run_cold(spec, limits, progress)
        if spec.probe:
            return result  # a probe does not run the script
        if result.status not in _FAILED:  # a script that ends early does so when cold, too
            self._trusted = True
        elif not self._trusted:
            return self._retry_cold(result, spec, limits, progress)
        return result

    def close(self) -> None:
        """End the processes and remove the copies that were kept for the next trial."""
        try:
            self._close_warm()
        finally:
            self._unwatch()

    def _close_warm(self) -> None:
        if self._warm is not None:
            self._warm.close()

    def _retry_not_private(
        self,
        result: TrialResult,
        suspicion: str,
        spec: TrialSpec,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> TrialResult:
        """Repeat a failed trial without private files, to see whether these are the cause."""
        try:
            self._watched()
        except FolderInUseError as error:
            self._say(f"a failed trial is not repeated without private files: {error.message}")
            return result
        self._files.private = False
        again = self._run_watched(spec, _after(result, limits), progress)
        if _ran_out(again):
            self._files.private = True
            return _instead_of(again, result)
        if again.status in (*_FAILED, TrialStatus.ENDED_EARLY):
            self._files.private = self._files.cleared = True
            self._unwatch()
            return _instead_of(again, result)
        self._share_files(f"a trial failed with private files ({result.reason}); {suspicion}")
        return _instead_of(result, again)

    def _share_files(self, reason: str) -> None:
        self._files.private = False
        self._say(f"trial files are not private: {reason}")

    def _retry_cold(
        self,
        result: TrialResult,
        spec: TrialSpec,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> TrialResult:
        """Repeat the failed first warm trial cold, to see whether forking is the cause."""
        again = self._run_cold(spec, _after(result, limits), progress)
        if _ran_out(again):
            return _instead_of(again, result)
        if again.status not in _FAILED:
            self._disable_warm(f"the script fails in a forked process ({result.reason})")
        return _instead_of(result, again)

    def _run_cold(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        # The limit may come from a warm default trial, without a launch and without imports.
        return self._cold.run(spec, replace(limits, setup_s=limits.setup_s + _LAUNCH_S), progress)

    def _disable_warm(self, reason: str) -> None:
        self._say(f"trials run cold, each as a fresh launch: {reason}")
        self._close_warm()
        self._warm = None


def _check_temporary_folder() -> None:
    """Check that there is a folder for temporary files, which trials need.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"trials need a folder for temporary files: {error.strerror}",
            hint="Set TMPDIR to a folder that you may write to, on a disk that is not full.",
        ) from None


def _after(result: TrialResult, limits: Limits) -> Limits:
    """Return the limits of the repetition of a trial that has taken its time already."""
    return replace(limits, total_s=max(limits.total_s - _spent_s(result), 0.0))


def _ran_out(repetition: TrialResult) -> bool:
    """Return whether a repetition shows nothing, because no time was left for it."""
    return repetition.status is TrialStatus.CUT_SHORT and repetition.reason == OUT_OF_TIME


def _instead_of(discarded: TrialResult, result: TrialResult) -> TrialResult:
    """Return the result of a trial that was run twice, with the time of the other run."""
    return replace(result, discarded_s=result.discarded_s + _spent_s(discarded))


def _spent_s(result: TrialResult) -> float:
    return result.total_s + result.discarded_s


def _warm_runner(job: Job, say: Callable[[str], None], files: TrialFiles) -> WarmRunner:
    """Make a warm runner for ``job``.

    Raises:
        ConfigurationError: The job cannot be forked; the message gives the reason.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"forking is not supported on {sys.platform}", hint="")
    if not horovod_build().gloo:
        raise ConfigurationError("this Horovod was built without Gloo", hint="")
    return WarmRunner(job, user_script(job.command), say, files)
