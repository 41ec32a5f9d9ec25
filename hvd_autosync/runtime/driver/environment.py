"""Environment variables by which a driver configures its workers.

Whoever may read a process's environment may read them: nothing in them is secret from those. The
key of a trial's messages prevents that ordinary text is taken for a message. It does not stop
anyone who can write into the job's output on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvd_autosync.search_space.trial import TrialSpec
from hvd_autosync.util.packed_text import pack, unpack

#: The trial's specification, packed.
TRIAL_VARIABLE = "HVD_AUTOSYNC_TRIAL"
#: The trial's name as plain text, by which leftover processes are found.
TRIAL_ID_VARIABLE = "HVD_AUTOSYNC_TRIAL_ID"
#: Process id of the driver; a launcher that has it ends with the driver.
DRIVER_VARIABLE = "HVD_AUTOSYNC_DRIVER"
#: The key with which fork servers sign messages; a trial's key is in its specification.
KEY_VARIABLE = "HVD_AUTOSYNC_KEY"
#: Set by the user to disable the hook at the start of Python.
DISABLE_VARIABLE = "HVD_AUTOSYNC_DISABLE"


def worker_environment(spec: TrialSpec) -> dict[str, str]:
    """Return the variables that pass a worker its trial."""
    return {TRIAL_VARIABLE: pack(spec.to_json()), TRIAL_ID_VARIABLE: spec.trial_id}


def spec_from_environment(environment: Mapping[str, str] = os.environ) -> TrialSpec | None:
    """Return the trial of this process, or ``None`` if it is no worker of ours."""
    text = environment.get(TRIAL_VARIABLE)
    return TrialSpec.from_json(unpack(text)) if text else None
