"""``hvd_autosync.Study``: a study with its best strategy, trials and figures."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvd_autosync import extensions
from hvd_autosync.errors import StoreError
from hvd_autosync.learner.base import Learner, check_learner
from hvd_autosync.reporting.closing import answer_line
from hvd_autosync.reporting.words import default_text, judged_by, seconds_text, speedup_text
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.resumed import at_one_speed, has_rested, repeated_defaults
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Trial
from hvd_autosync.traces import StudyStatus, default_result
from hvd_autosync.traces.opening import open_trace
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable

if TYPE_CHECKING:
    import pandas as pd

    from hvd_autosync.api.training import Training
    from hvd_autosync.figures import Evidence, Figures


@dataclass(frozen=True)
class Best:
    """The best strategy of a study so far.

    Attributes:
        strategy: The strategy.
        step_s: Seconds of a step under it; NaN if unknown.
        speedup: Speed-up over the default; NaN if unknown.
        low: Lower end of the speed-up's 90 % interval; NaN unless confirmed.
        high: Upper end of the interval; NaN unless confirmed.
        confirmed: Whether it is the final result: confirmed against the default, or the default.
        text: The strategy as text, for people.
    """

    strategy: Strategy
    step_s: float
    speedup: float
    low: float
    high: float
    confirmed: bool
    text: str

    def __str__(self) -> str:
        if self.confirmed and math.isnan(self.low):  # the default
            return f"{self.text}: no faster strategy was found"
        sure = "confirmed" if self.confirmed else "not confirmed"
        speed = f"{speedup_text(self.speedup)}, " if math.isfinite(self.speedup) else ""
        return f"{self.text}: {speed}{seconds_text(self.step_s)} per step ({sure})"


class Study(AskTellStudy):
    """One optimization, with its results.

    :func:`hvd_autosync.tune` and :meth:`load` return a study; :meth:`create` makes one for a
    custom launcher, which calls ``ask()`` and ``tell()``.
    """

    _training: Training | None = None
    #: Whether it goes on with trials of an earlier process, perhaps of another day.
    _loaded = False

    @property
    def training(self) -> Training | None:
        """The training that this process has started last to be tuned as this study, if any."""
        from hvd_autosync.api.training import training_of

        if self._training is None:
            self._training = training_of(self.study_id)
        return self._training

    @training.setter
    def training(self, training: Training | None) -> None:
        self._training = training

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] = "last",
        store: str | None = None,
        *,
        learner: Learner | None = None,
    ) -> Study:
        """Load a running, finished or exported study.

        Args:
            source: Id of the study, the beginning of one, ``"last"``, or the path of a trace file,
                of which the first study is used.
            store: The store; ``None``: that of ``HVD_AUTOSYNC_STORE``, else the default store. A
                trace file is not imported into it.
            learner: The learner that proposes further strategies, as of :meth:`create`; ``None``:
                ours.

        Raises:
            StoreError: There is no such study, or the store cannot be read.
            TraceFormatError: The file is damaged, of a newer version, or not a trace.
            ConfigurationError: A file of extensions cannot be loaded, or the learner is none.
        """
        if not isinstance(source, (str, os.PathLike)):
            raise StoreError(
                f"{source!r:.200} names no study", hint='Give an id, "last" or the path of a trace.'
            )
        extensions.load()  # whose knobs it may have
        check_learner(learner)
        study = cls(*open_trace(os.fspath(source), store), learner)
        study._loaded = True
        return study

    def ask(self) -> Trial | None:
        """Return the next trial, as of :meth:`AskTellStudy.ask`.

        A loaded study that has rested measures its default again first.
        """
        if self._loaded and self.record.status is StudyStatus.RUNNING and self._has_rested():
            trial = self.ask_default()
            self._loaded = False
            return trial
        self._loaded = False
        return super().ask()

    def _has_rested(self) -> bool:
        known = self.history
        if default_result(known) is None:
            return False
        last = known[-1]
        if last.result is not None and last.number in repeated_defaults(known):
            return False  # a process for each trial would measure nothing but the default
        return has_rested(known)

    def __str__(self) -> str:
        running = self.record.status is StudyStatus.RUNNING
        result = "it has not ended" if running else answer_line(self.record)
        return printable(f"study {self.study_id}, {amount(len(self.history), 'trial')}: {result}")

    @property
    def best(self) -> Best:
        """The winner; before the study has ended, the fastest of the tried exact strategies.

        Raises:
            StudyError: The study has no search space: its default trial has not ended, or has
                failed, or Horovod's own tuner made it.
        """
        evidence = self._evidence()
        strategy, conclusion = evidence.best, self.conclusion
        text = evidence.name(strategy)
        if strategy == self.space.default and (judged := judged_by(self.record)):
            text = default_text(self.space, judged)
        if conclusion is not None and conclusion.best is not None:
            won = conclusion.best
            return Best(strategy, conclusion.winner_s, won.speedup, won.low, won.high, True, text)
        confirmed = conclusion is not None
        if strategy == self.space.default and self.space.holds_job:
            return Best(strategy, evidence.default_s, 1.0, math.nan, math.nan, confirmed, text)
        seen = [o.step_s for o in evidence.observations if o.measured and o.strategy == strategy]
        step_s = min((s for s in seen if s is not None), default=math.nan)
        speedup = evidence.default_s / step_s
        return Best(strategy, step_s, speedup, math.nan, math.nan, confirmed, text)

    @property
    def trials(self) -> pd.DataFrame:
        """One row per trial; the columns are those of ``hvd_autosync.traces.trials_frame``."""
        from hvd_autosync.traces import trials_frame

        return trials_frame(self._store, self.study_id)

    @property
    def plot(self) -> Figures:
        """Figures: ``study.plot.convergence()`` and others.

        Raises:
            ConfigurationError: Plotly is not installed.
        """
        from hvd_autosync.figures import Figures

        return Figures(self._evidence())

    def _evidence(self) -> Evidence:
        from hvd_autosync.figures import Evidence

        # Another process may run it. A finished one stays as it was given: where the loss guard has
        # ended its winner, the record that tune() returns has the next best instead.
        if self.record.status is StudyStatus.RUNNING:
            self.record = self._store.study(self.study_id)
        problem = self.problem if self.record.space is not None else None
        return Evidence(self.record, at_one_speed(self.history), problem)
