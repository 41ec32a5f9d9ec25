"""The cost model: the time of a step under a strategy, from the model and the cluster.

:class:`CostModel` simulates one step for many strategies at once; it needs no trial. Trials of the
task calibrate a few factors of it (:func:`calibrate`).
"""

from __future__ import annotations

from hvd_autosync.cost.calibration import Calibration, calibrate
from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.cost_model import CostModel

__all__ = ["Calibration", "Coefficients", "CostModel", "calibrate"]
