"""What people see: progress while a tuning runs, explanations afterwards, spaces and plans.

A tuning is watched through :func:`progress_listener`; :func:`closing_lines` are printed when the
training has ended, :func:`explain` tells a study's whole story, :func:`print_plan` says what
would be tuned.
"""

from __future__ import annotations

from hvd_autosync.reporting.closing import answer_line, closing_lines
from hvd_autosync.reporting.explanation import explain
from hvd_autosync.reporting.plan import print_plan
from hvd_autosync.reporting.progress import progress_listener
from hvd_autosync.reporting.space import catalogue_table, space_table

__all__ = [
    "answer_line",
    "catalogue_table",
    "closing_lines",
    "explain",
    "print_plan",
    "progress_listener",
    "space_table",
]
