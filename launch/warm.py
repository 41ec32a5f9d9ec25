"""The warm trial runner: each trial is forked from processes with torch and Horovod imported.

A trial takes its own steps, the script's own set-up and a few tenths of a second, without the
seconds of a launch and of the imports of torch and Horovod. See
:mod:`hvd_autosync.launch.fork_server`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.command import strategy_environment
from hvd_autosync.launch.fork_servers import ForkServers, ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.rendezvous import rendezvous
from hvd_autosync.launch.runner import TrialProgress, to_stderr
from hvd_autosync.launch.signals import stop_if_asked
from hvd_autosync.launch.trial_files import TrialFiles
from hvd_autosync.launch.user_script import UserScript
from hvd_autosync.runtime.driver.environment import TRIAL_ID_VARIABLE, worker_environment
from hvd_autosync.runtime.driver.wire import Message
from hvd_autosync.search_space import Host, TrialResult, TrialSpec

_POLL_S = 0.1
#: Time for the other ranks to fail by themselves after the first one has failed.
_GRACE_S = 1.0
#: Time for the servers to end a trial after the order to end it.
_END_S = 10.0


class WarmRunner:
    """Runs trials in forked children (see :class:`hvd_autosync.launch.runner.TrialRunner`).

    Args:
        job: The job, which runs under Gloo.
        script: The job's script.
        say: Prints a line for the user.
        files: Settings of the trials' files; ``None``: trials write as the script does.
    """

    def __init__(
        self,
        job: Job,
        script: UserScript,
        say: Callable[[str], None] = to_stderr,
        files: TrialFiles | None = None,
    ) -> None:
        self._say = say
        self._job = job
        self._script = script
        self._files = files
        self._servers: ForkServers | None = None

    def run(
        self, spec: TrialSpec, limits: Limits, progress: Callable[[TrialProgress], None]
    ) -> TrialResult:
        """Run one trial to its end.

        Raises:
            ForkServersError: The servers cannot be started.
            NotPrivateError: The trial's files cannot be private; the script was not started.
        """
        hosts = spec.probe or self._job.hosts
        world_size = sum(host.slots for host in hosts)
        if self._servers is not None and not self._servers.alive:  # no fault of this strategy's
            self._servers.kill()
            self._servers = None
        if self._servers is None:
            starting = Collector(spec, world_size).progress()
            self._servers = ForkServers(
                self._job, self._script, self._say, lambda: progress(starting)
            )
        servers, collector, done = self._servers, Collector(spec, world_size), False
        try:
            with rendezvous(servers.rendezvous_address, hosts) as rank_variables:
                more = self._files.variables(spec) if self._files else {}
                orders = (_order(spec, slot | more, servers.name) for slot in rank_variables)
                slots = _slots(self._job.hosts, hosts)
                servers.run(dict(zip(slots, orders, strict=True)), collector)
                result = self._watch(servers, collector, limits, progress)
            done = True
        except ForkServersError as error:  # for example, a host is lost
            return collector.result(1, str(error))
        finally:
            if not done:
                self._servers = None
                servers.kill()
        if self._files:
            self._files.process_messages(collector)
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
        """Wait until all ranks have ended; end the trial if one fails or exceeds a limit."""
        failed_at: float | None = None
        while len(exits := collector.exits(_POLL_S)) < collector.world_size:
            stop_if_asked()
            progress(collector.progress())
            overdue = collector.overdue(limits)
            if any(exits.values()):
                failed_at = failed_at or time.monotonic()
            failed = failed_at is not None and time.monotonic() - failed_at > _GRACE_S
            if overdue or failed:
                servers.end_trial()
                if len(collector.exits(_END_S)) < collector.world_size:
                    raise ForkServersError(overdue or "a rank failed and the others did not end")
                return collector.result(1, "" if failed else overdue, exits)
            if not servers.alive:
                raise ForkServersError("the fork servers have ended")
        status = next((abs(code) for code in exits.values() if code), 0)
        return collector.result(status, "", exits)


def _slots(job: Sequence[Host], part: Sequence[Host]) -> list[int]:
    """Return the job's ranks on a part of its hosts, in the rank order of the part."""
    first, ranks = 0, {}
    for host in job:
        ranks[host.name] = range(first, first + host.slots)
        first += host.slots
    return [rank for host in part for rank in ranks[host.name][: host.slots]]


def _order(spec: TrialSpec, slot: dict[str, str], servers: str) -> Message:
    """Return the order to a server to run a trial.

    Args:
        spec: The trial.
        slot: Variables with the rank and the rendezvous address.
        servers: The trial id in the environment of all processes of the servers.
    """
    environment = strategy_environment(spec.strategy) | worker_environment(spec)
    environment |= slot | {TRIAL_ID_VARIABLE: servers}
    return {
        "type": "run",
        "trial": spec.trial_id,
        "spec": spec.to_json(),
        "environment": environment,
    }
