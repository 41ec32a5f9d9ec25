"""What a step costs under a strategy, from the model, the cluster and physics; no trial needed.

:class:`CostModel` simulates one step for many strategies at once. Trials of the task calibrate a
few factors of it (:func:`calibrate`).
"""

from __future__ import annotations

from hvd_autosync.cost.calibration import Calibration, calibrate
from hvd_autosync.cost.coefficients import Coefficients
from hvd_autosync.cost.cost_model import CostModel

__all__ = ["Calibration", "Coefficients", "CostModel", "calibrate"]
