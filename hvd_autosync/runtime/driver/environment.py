"""The variables by which a driver reaches its workers.

Who may read a process's environment may read them: nothing in them is secret from those. The key of
a trial's messages is there so that text is not taken for a message, and keeps nobody out who
can write into the job's output on purpose.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Mapping

from hvd_autosync.search_space.trial import TrialSpec

#: Carries the trial's specification: compressed, for Linux allows 128 KiB for one variable and for
#: the line that Gloo's launcher makes of all of them, and in base64 so that any launcher passes it
#: on unchanged.
TRIAL_VARIABLE = "HVD_AUTOSYNC_TRIAL"
#: The trial's name in the clear, by which left-over processes are found.
TRIAL_ID_VARIABLE = "HVD_AUTOSYNC_TRIAL_ID"
#: Process number of the driver; a launcher that has it ends with the driver.
DRIVER_VARIABLE = "HVD_AUTOSYNC_DRIVER"
#: What fork servers sign messages with; the key of a trial is in its specification.
KEY_VARIABLE = "HVD_AUTOSYNC_KEY"
#: Set by the user to switch every hook off.
DISABLE_VARIABLE = "HVD_AUTOSYNC_DISABLE"


def worker_environment(spec: TrialSpec) -> dict[str, str]:
    """The variables that tell a worker its trial."""
    text = base64.b64encode(zlib.compress(spec.to_json().encode())).decode()
    return {TRIAL_VARIABLE: text, TRIAL_ID_VARIABLE: spec.trial_id}


def spec_from_environment(environment: Mapping[str, str] = os.environ) -> TrialSpec | None:
    """The trial of this process, or ``None`` in a process that is no worker of ours."""
    text = environment.get(TRIAL_VARIABLE)
    return TrialSpec.from_json(zlib.decompress(base64.b64decode(text)).decode()) if text else None
