"""Trials with numbers that no job gives, as in a trace that was edited or damaged."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.traces import TrialRecord


@contextlib.contextmanager
def named_if_damaged(trials: Sequence[TrialRecord]) -> Iterator[None]:
    """Raise an error that names the study if a calculation with its trials is impossible.

    Args:
        trials: Trials of one study.

    Raises:
        TraceFormatError: A result is too large for a number, or trials are missing without which
            others say nothing.
    """
    try:
        yield
    except (OverflowError, statistics.StatisticsError) as error:
        study_id = trials[0].study_id if trials else "without trials"
        raise TraceFormatError(
            f"the trials of study {study_id} are damaged: some are missing, or have impossible "
            f"numbers ({error})",
            hint="Use an unchanged copy of its trace, or forget the study: hvd-autosync traces "
            f"delete {study_id}",
        ) from error
