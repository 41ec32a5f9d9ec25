"""User-facing output: progress of a tuning, explanations of studies, search spaces and plans.

:func:`progress_listener` shows the progress of a tuning, :func:`closing_lines` are printed after
the training, :func:`explain` explains a study, and :func:`print_plan` prints what would be tuned.
"""

from __future__ import annotations

from hvd_autosync.reporting.closing import answer_line, closing_lines, ended_line
from hvd_autosync.reporting.explanation import explain
from hvd_autosync.reporting.plan import print_plan
from hvd_autosync.reporting.progress import progress_listener
from hvd_autosync.reporting.space import catalogue_table, space_table

__all__ = [
    "answer_line",
    "catalogue_table",
    "closing_lines",
    "ended_line",
    "explain",
    "print_plan",
    "progress_listener",
    "space_table",
]
