"""An extension that makes studies surveys; it adds nothing to their spaces.

Ranks load it, too, and do nothing: only the process that starts them, or the helper of a live
training, has a learner.
"""

from __future__ import annotations

import os

if "HOROVOD_RANK" not in os.environ:
    from hvd_autosync import learner
    from survey.learner import SurveyLearner

    class _Survey(SurveyLearner):
        """A survey of as many trials as the study has."""

        def __init__(self) -> None:
            super().__init__(int(os.environ["HVD_AUTOSYNC_TRIALS"]))

    learner.BayesianLearner = _Survey  # type: ignore[assignment,misc]
