"""The two lines that are printed after the training."""

from __future__ import annotations

from hvd_autosync.reporting.words import answer_text, first_line, judged_by
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, StudyStatus
from hvd_autosync.traces.location import resolve_location, store_option
from hvd_autosync.util.amounts import amount


def closing_lines(study: StudyRecord, store: str | None = None) -> tuple[str, str]:
    """Return the result of the study, and the command that shows its trace.

    Args:
        study: The finished study before the training.
        store: Its store as named by the user; ``None`` for the default store.
    """
    option = store_option(store)
    trace = f"trace: hvd-autosync show {study.study_id}{option}"
    if not option:
        trace += f" (in {resolve_location(store).name})"
    return answer_line(study), trace


def ended_line(study: AskTellStudy, earlier: StudyRecord | None = None) -> str:
    """Return what a training runs under whose tuning was ended early.

    Args:
        study: The study that was ended.
        earlier: The study whose result stays, if the ended one has proven nothing.
    """
    strategy = study.proven
    what = "no strategy is confirmed yet, so the training runs unchanged"
    if judged := judged_by(study.record):
        what = f"no strategy is confirmed yet, so the training keeps the winner of study {judged}"
    if earlier is not None:
        what = f"the training keeps the result of study {earlier.study_id}"
    if strategy is not None:
        space = with_knob_order(study.record, study.history).space or study.space
        what = f"the training runs with the confirmed strategy {space.describe(strategy)}"
    ended = sum(trial.result is not None for trial in study.history)
    return f"tuning was ended after {amount(ended, 'trial')}: {what}"


def answer_line(study: StudyRecord) -> str:
    """Return the result of a study in one line."""
    study = with_knob_order(study)
    if study.status is StudyStatus.FAILED:
        return f"study {study.study_id} failed: {first_line(study.failure)}"
    conclusion = Conclusion.of(study)
    if conclusion is None or study.space is None:
        return f"study {study.study_id} has no comparison with the default"
    return answer_text(conclusion, study.space, judged_by(study))
