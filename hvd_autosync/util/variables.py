"""Environment variables: names needed where the module that uses them is not imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

#: Lowest level that :mod:`hvd_autosync.util.log` writes; without this variable there is no log.
LOG_VARIABLE = "HVD_AUTOSYNC_LOG"
#: The address of the store.
STORE_VARIABLE = "HVD_AUTOSYNC_STORE"
#: Whether a training is tuned live, by whatever launcher its ranks were started.
LIVE_VARIABLE = "HVD_AUTOSYNC_LIVE"
#: The job of a training that the flag tunes live, as JSON.
JOB_VARIABLE = "HVD_AUTOSYNC_JOB"
#: The working directory of the flag that tunes a training live.
FOLDER_VARIABLE = "HVD_AUTOSYNC_FOLDER"
#: File in which rank 0 of such a training writes why it cannot be tuned so. The ranks then end, and
#: the flag goes on with launched trials.
REFUSAL_VARIABLE = "HVD_AUTOSYNC_REFUSAL"
#: Id of the study of launched trials under whose winner such a training begins.
JUDGED_VARIABLE = "HVD_AUTOSYNC_JUDGED"
#: Id of the study of such a training that was started again, because it had failed in a trial: that
#: is resumed whatever the options say, or the strategy would be tried again.
RESTARTED_VARIABLE = "HVD_AUTOSYNC_RESTARTED"
#: File that the flag creates when it is told to stop such a training, as by Ctrl-C.
STOPPED_VARIABLE = "HVD_AUTOSYNC_STOPPED"
#: Files that rank 0 creates beside that one: it has begun to be tuned; its script has ended by
#: itself; its tuning has ended without a result, with the reason.
BEGUN_NOTE, ENDED_NOTE, TUNING_ENDED_NOTE = "begun", "ended", "tuning-ended"
#: File that any rank creates there: the script has gone on from a checkpoint.
RESUMED_NOTE = "resumed"
#: File there with the id of the study, which the helper of rank 0 creates.
STUDY_NOTE = "study"
#: File that a notebook creates there to end the tuning of such a training, which then goes on.
END_TUNING_NOTE = "end-tuning"

#: Controllers that Horovod has, as the driver knows: its launcher need not look again.
CONTROLLERS_VARIABLE = "HVD_AUTOSYNC_CONTROLLERS"

#: Texts of a switch that is off, in small letters; so they are in hvd_autosync.pth.
OFF = ("", "0", "false", "no", "off")


def is_on(text: str) -> bool:
    """Return whether the text of a variable switches something on."""
    return text.lower() not in OFF


def set_variables(variables: Mapping[str, str | None]) -> None:
    """Set environment variables of this process; those that are ``None`` are unset."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Have environment variables set, or unset if ``None``, while the context is open."""
    before = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        set_variables(before)
