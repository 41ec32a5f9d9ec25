"""The trial runner that everyone uses: warm where it can, cold where it must."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.fork_servers import ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
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
    """

    def __init__(self, job: Job, say: Callable[[str], None], *, cold: bool = False) -> None:
        self._job = job
        self._say = say
        self._cold = ColdRunner(job, say)
        self._warm: WarmRunner | None = None
        self._trusted = False
        if not cold:
            try:
                self._warm = _warm_runner(job, say)
            except ConfigurationError as error:
                self._give_up(error.message)

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end; see :class:`hvd_autosync.launch.runner.TrialRunner`."""
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


def _warm_runner(job: Job, say: Callable[[str], None]) -> WarmRunner:
    """A warm runner for ``job``.

    Raises:
        ConfigurationError: The job cannot be forked; says why.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigurationError(f"forking is not supported on {sys.platform}", hint="")
    if not horovod_build().gloo:
        raise ConfigurationError("this Horovod was built without Gloo", hint="")
    return WarmRunner(job, user_script(job.command), say)
