"""Figures of a study, each with a caption that says what to look for.

The study may be running, finished or imported. The same data are available as numbers:
``study.trials``, ``hvd-autosync show``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.figures.evidence import Evidence

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["Evidence", "Figures"]


class Figures:
    """All figures of one study, as ``study.plot``.

    Args:
        evidence: The study.

    Raises:
        ConfigurationError: Plotly is not installed.
    """

    def __init__(self, evidence: Evidence) -> None:
        try:
            import plotly  # noqa: F401
        except ImportError:
            raise ConfigurationError(
                "figures need Plotly, which is not installed",
                hint="Install it: pip install 'hvd-autosync[notebook]'",
            ) from None
        self._evidence = evidence

    def convergence(self) -> go.Figure:
        """Step time of each trial, and of the fastest so far."""
        from hvd_autosync.figures.course import convergence

        return convergence(self._evidence)

    def step_times(self) -> go.Figure:
        """Spread of single steps under the default and under the confirmed strategies."""
        from hvd_autosync.figures.course import step_times

        return step_times(self._evidence)

    def importance(self) -> go.Figure:
        """Importance of each knob over the whole space."""
        from hvd_autosync.figures.knobs import importance

        return importance(self._evidence)

    def parallel(self) -> go.Figure:
        """Return all trials as lines through their values of all knobs, coloured by step time."""
        from hvd_autosync.figures.knobs import parallel

        return parallel(self._evidence)

    def slice(self, knob: str) -> go.Figure:
        """Step time along one knob, the others as in the best strategy.

        Args:
            knob: Name of the knob.

        Raises:
            SpaceError: The knob was not searched.
        """
        from hvd_autosync.figures.knobs import slice

        return slice(self._evidence, knob)

    def contour(self, a: str, b: str) -> go.Figure:
        """Expected step time over two knobs, the others as in the best strategy.

        Args:
            a: Name of the knob on the horizontal axis.
            b: Name of the knob on the vertical axis.

        Raises:
            SpaceError: A knob was not searched, or both are the same.
        """
        from hvd_autosync.figures.knobs import contour

        return contour(self._evidence, a, b)

    def pareto(self) -> go.Figure:
        """Speed against loss, of the lossy strategies that were judged."""
        from hvd_autosync.figures.quality import pareto

        return pareto(self._evidence)

    def transfer(self) -> go.Figure:
        """Return the priors used in each trial: the cost model, related studies."""
        from hvd_autosync.figures.course import transfer

        return transfer(self._evidence)

    def timeline(self, trial: int) -> go.Figure:
        """Timeline of one step of a trial: forward, backward, messages, exposed communication.

        Args:
            trial: Number of the trial.

        Raises:
            StudyError: There is no such trial.
        """
        from hvd_autosync.figures.step import timeline

        return timeline(self._evidence, trial)
