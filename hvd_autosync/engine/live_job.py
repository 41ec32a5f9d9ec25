"""What the helper process of a live training is told: the options of its tuning, and its job.

It reads this while the learner's libraries are still loading.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

from hvd_autosync import extensions
from hvd_autosync.engine.option_conflicts import check_live
from hvd_autosync.engine.options import Options, resolve_options
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host
from hvd_autosync.search_space.horovod_settings import held_by_environment
from hvd_autosync.util.packed_text import unpack
from hvd_autosync.util.variables import JOB_VARIABLE, JUDGED_VARIABLE


def live_options() -> Options:
    """Return the options of live tuning, from environment variables.

    Raises:
        ConfigurationError: A variable is invalid, or its option has no meaning here.
    """
    options = replace(resolve_options(argparse.Namespace(), os.environ), mode="live")
    check_live(replace(options, allow=()) if os.environ.get(JUDGED_VARIABLE) else options)
    return options


def live_job(begin: dict[str, Any]) -> Job:
    """Return the job of a training that has begun.

    Args:
        begin: The first message of its rank 0.

    Raises:
        ConfigurationError: A variable of Horovod has a value that it would misread.
    """
    extensions.load()
    # Ranks of one host need not follow each other.
    hosts = tuple(Host(name, count) for name, count in Counter(begin["hosts"]).items())
    if begin.get("elastic"):
        hosts = tuple(sorted(hosts, key=lambda host: host.name))  # one that comes back is the last
    if given := os.environ.get(JOB_VARIABLE):
        job = Job.from_json(json.loads(unpack(given)))
        return replace(job, hosts=hosts) if begin.get("elastic") else job
    held = held_by_environment(os.environ)
    controller = held.pop("controller", None)
    return Job(
        options=(),
        command=tuple(begin["command"]),
        hosts=hosts,
        controller=None if controller is None else str(controller),
        held=tuple(sorted(held.items())),
    )
