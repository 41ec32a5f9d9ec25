"""The driver's side of the fork servers: their common launch, and a connection to each."""

from __future__ import annotations

import os
import subprocess
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import IO

from hvd_autosync.launch.channel import ChannelError, ControlSender
from hvd_autosync.launch.collector import Collector, lines_of
from hvd_autosync.launch.command import start_launcher
from hvd_autosync.launch.fork_server import START_S
from hvd_autosync.launch.horovodrun_options import OUTPUT, without_option
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.remote import sweep_remote_hosts
from hvd_autosync.launch.signals import signals_deferred
from hvd_autosync.launch.sweep import end_launch
from hvd_autosync.launch.tail import Tail
from hvd_autosync.launch.user_script import UserScript
from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.environment import KEY_VARIABLE, TRIAL_ID_VARIABLE
from hvd_autosync.runtime.driver.messages import Exit, Server
from hvd_autosync.runtime.driver.wire import Message
from hvd_autosync.search_space import Strategy
from hvd_autosync.util.awake_clock import AwakeClock
from hvd_autosync.util.program import run_main

_MODULE = "hvd_autosync.launch.fork_server"
_CLOSE_S = 3.0
_POLL_S = 0.5
#: Longest wait for the last output of a launcher that has ended.
_LAST_OUTPUT_S = 2.0


class ForkServersError(Exception):
    """The fork servers cannot be started, or have ended."""


class ForkServers:
    """All fork servers of a job, started together by Horovod's own launcher.

    Args:
        job: The job.
        script: Its script.
        say: Prints a line for the user.
        waiting: Called about twice a second while the servers start.

    Raises:
        ForkServersError: They did not start.
    """

    def __init__(
        self, job: Job, script: UserScript, say: Callable[[str], None], waiting: Callable[[], None]
    ) -> None:
        self._job = job
        self._say = say
        self._name = f"servers-{uuid.uuid4().hex}"
        self._key = os.urandom(16).hex()
        self._decoder = MessageDecoder(self._key, job.world_size)
        self._server_messages: dict[int, Server] = {}
        self._arrived = threading.Condition()
        self._collector: Collector | None = None
        self._tail = Tail(job.world_size)
        self._controls: dict[int, ControlSender] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._readers: list[threading.Thread] = []
        try:
            with signals_deferred():
                self._process = start_launcher(
                    _server_job(job, script),
                    Strategy(),
                    variables={TRIAL_ID_VARIABLE: self._name, KEY_VARIABLE: self._key},
                )
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
                reader.start()
                self._readers.append(reader)
            self._connect(waiting)
        except BaseException:
            self.kill()
            raise

    @property
    def rendezvous_address(self) -> str:
        """The driver's address on the job's network, as Horovod's launcher chose it."""
        return self._server_messages[0].rendezvous

    @property
    def name(self) -> str:
        """The trial id in the environment of all processes of the servers."""
        return self._name

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self._process is not None and self._process.poll() is None

    def run(self, orders: Mapping[int, Message], collector: Collector) -> None:
        """Order the servers to run a trial.

        Args:
            orders: Message to the server of each rank that takes part.
            collector: Receives the job's output from now on.

        Raises:
            ForkServersError: A server has ended.
        """
        self._collector = collector
        self._send(orders)

    def end_trial(self) -> None:
        """Order all servers to end the trial, if it still runs.

        Raises:
            ForkServersError: A server has ended.
        """
        self._send({rank: {"type": "end"} for rank in self._controls})

    def _send(self, messages: Mapping[int, Message]) -> None:
        try:
            for rank, message in messages.items():
                self._controls[rank].send(message)
        except ChannelError as error:
            raise ForkServersError(f"a fork server has ended: {error}") from None

    def close(self) -> None:
        """Close the connections, which ends the servers with all their children."""
        for control in self._controls.values():
            control.close()
        try:
            if self._process is not None:
                self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill all processes of the servers, on every host."""
        with signals_deferred():
            if self._process is not None:
                end_launch(self._process, self._name)
                for line in sweep_remote_hosts(self._job, self._name):
                    self._say(line)

    def _read(self, stream: IO[bytes]) -> None:
        for line in lines_of(stream):
            self._take_line(line)
        with self._arrived:
            self._arrived.notify_all()

    def _take_line(self, line: bytes) -> None:
        """Process a line of output, from a server or from the trial that it runs."""
        collector = self._collector
        with self._arrived:
            is_message, complete = self._decoder.feed(line)
            if complete is None and collector is None and not is_message:
                self._tail.add(line)
            elif complete is not None and isinstance(complete[1], Server):
                self._server_messages[complete[0]] = complete[1]
                self._arrived.notify_all()
        if collector is None:
            return
        if complete is None:
            collector.feed(line)
        elif isinstance(complete[1], Exit):
            collector.exited(complete[0], complete[1].trial, complete[1].status)

    def _connect(self, waiting: Callable[[], None]) -> None:
        ranks = range(self._job.world_size)
        clock = AwakeClock()
        with self._arrived:
            while len(self._server_messages) < len(ranks) and self.alive and clock.now() < START_S:
                waiting()
                self._arrived.wait(_POLL_S)
        if not self.alive:  # its last output may still be on its way
            for reader in self._readers:
                reader.join(_LAST_OUTPUT_S)
        with self._arrived:
            missing = [str(rank) for rank in ranks if rank not in self._server_messages]
            if missing:
                last_line = self._tail.whole().strip().rpartition("\n")[2]
                reason = f": {last_line}" if last_line else ""
                raise ForkServersError(f"no fork server for rank {', '.join(missing)}{reason}")
        for rank, hello in sorted(self._server_messages.items()):
            try:
                self._controls[rank] = ControlSender(
                    (hello.address, hello.port), bytes.fromhex(hello.secret)
                )
                # Complete the handshake now: a server waits for it for a limited time only.
                self._controls[rank].send({"type": "end"})
            except (ChannelError, ValueError) as error:
                raise ForkServersError(f"rank {rank} cannot be reached: {error}") from None


def _server_job(job: Job, script: UserScript) -> Job:
    """Return the job that starts the servers: the user's, with another command.

    Its output holds the servers' secrets, so ``--output-filename`` is removed.
    """
    words = [script.interpreter, *script.options, *run_main(_MODULE)[1:]]
    kind = "-m" if script.module else "-f"
    options = list(without_option(job.options, OUTPUT))
    if job.controller is None:
        options.append("--gloo")
    command = (*words, kind, script.target, *script.arguments)
    return replace(job, options=tuple(options), command=command, controller="gloo")
