"""The two lines that are printed after the real training."""

from __future__ import annotations

import shlex

from hvd_autosync.reporting.words import answer_text
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord
from hvd_autosync.traces.location import resolve_location


def closing_lines(study: StudyRecord, store: str | None = None) -> tuple[str, str]:
    """What was chosen, and where the trace is.

    Args:
        study: The finished study that the training followed.
        store: Its store as the user named it; ``None`` for the default one.
    """
    location = resolve_location(store)
    option = "" if store is None else f" --store {shlex.quote(location.address)}"
    trace = f"trace: hvd-autosync show {study.study_id}{option}"
    return answer_line(study), trace if store is not None else f"{trace} (in {location.name})"


def answer_line(study: StudyRecord) -> str:
    """What a study found, in one line."""
    study = with_knob_order(study)
    conclusion = Conclusion.of(study)
    if conclusion is None or study.space is None:
        return f"study {study.study_id} found nothing to compare"
    return answer_text(conclusion, study.space)
