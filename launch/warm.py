"""The warm trial runner: each trial is a fork of processes that have imported everything already.

A trial costs its own steps, the script's own set-up and a few tenths of a second, instead of the
seconds that a launch and the imports of torch and Horovod take. See :mod:`..launch.fork_server`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.fork_servers import ForkServers, ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.rendezvous import rendezvous
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.user_script import UserScript
from hvd_autosync.launch.worker_environment import TRIAL_ID_VARIABLE, worker_environment
from hvd_autosync.search_space import TrialResult, TrialSpec, horovod_settings
from hvd_autosync.search_space.horovod_settings import RENDEZVOUS_PORT

_POLL_S = 0.1
#: How long other ranks may take to fail by themselves after the first one failed.
_GRACE_S = 1.0
#: How long the servers may take to end a trial that they were told to end.
_END_S = 10.0


class WarmRunner:
    """Runs trials in forked children (see :class:`hvd_autosync.launch.runner.TrialRunner`).

    Args:
        job: The job, which runs under Gloo.
        script: Its script.
    """

    def __init__(self, job: Job, script: UserScript) -> None:
        self._job = job
        self._script = script
        self._servers: ForkServers | None = None

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end.

        Raises:
            ForkServersError: The servers cannot be started.
        """
        collector = Collector(spec, self._job.world_size)
        if self._servers is None:
            progress(collector.progress())
            self._servers = ForkServers(self._job, self._script)
            collector = Collector(spec, self._job.world_size)
        servers, done = self._servers, False
        try:
            with rendezvous(servers.meeting_address, self._job.hosts) as port:
                servers.send(_order(spec, port, servers.name), collector)
                result = self._watch(servers, collector, limits, progress)
            done = True
        except ForkServersError as error:  # as after a host was lost
            return collector.result(1, str(error))
        finally:
            if not done:
                self._servers = None
                servers.kill()
        return result

    def close(self) -> None:
        """End the servers."""
        if self._servers is not None:
            self._servers.close()
            self._servers = None

    def _watch(
        self,
        servers: ForkServers,
        collector: Collector,
        limits: Limits,
        progress: Callable[[TrialProgress], None],
    ) -> TrialResult:
        """Wait until all ranks are gone, and see to it when they do not go by themselves."""
        failed_at: float | None = None
        while len(exits := collector.exits(_POLL_S)) < self._job.world_size:
            progress(collector.progress())
            overdue = collector.overdue(limits)
            if any(exits.values()):
                failed_at = failed_at or time.monotonic()
            failed = failed_at is not None and time.monotonic() - failed_at > _GRACE_S
            if overdue or failed:
                servers.send({"type": "end"})
                if len(collector.exits(_END_S)) < self._job.world_size:
                    raise ForkServersError(overdue or "a rank failed and the others did not end")
                return collector.result(1, "" if failed else overdue, exits)
            if not servers.alive:
                raise ForkServersError("the fork servers are gone")
        status = next((abs(code) for code in exits.values() if code), 0)
        return collector.result(status, "", exits)


def _order(spec: TrialSpec, port: int, servers: str) -> dict[str, object]:
    """What the servers are told to run."""
    environment = dict(horovod_settings(spec.strategy).environment) | worker_environment(spec)
    environment |= {RENDEZVOUS_PORT: str(port), TRIAL_ID_VARIABLE: servers}
    return {
        "type": "run", "trial": spec.trial_id, "spec": spec.to_json(), "environment": environment,
    }  # fmt: skip
