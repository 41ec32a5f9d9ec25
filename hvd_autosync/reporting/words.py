"""Text forms of numbers and conclusions, shared by all reports."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

from hvd_autosync.launch.live_runner import WARMUP_STEPS
from hvd_autosync.study.confirm import CONFIDENCE, MAX_ROUNDS, MIN_ROUNDS, Comparison
from hvd_autosync.util.amounts import amount

if TYPE_CHECKING:
    from hvd_autosync.search_space import SearchSpace, StepTime
    from hvd_autosync.study.forecast import Forecast
    from hvd_autosync.study.values import Conclusion, StudySettings
    from hvd_autosync.traces import StudyRecord

LEVEL = f"{CONFIDENCE * 100:.0f} %"
#: Half-width of a two-sided interval of that level, in standard errors.
STANDARD_ERRORS = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
#: Share of a mean below which a half-width is printed as 0.
_NEGLIGIBLE = 1e-6


def again_live_text(again: str) -> str:
    """Return how a training is tuned again that goes on without its tuning.

    Args:
        again: As ``Options.again``.
    """
    return f"to {again}: study.training.stop(), then the same call"


def seconds_text(seconds: float) -> str:
    """Return a step time: ``812 µs``, ``41.2 ms``, ``1.32 s``."""
    if not math.isfinite(seconds):
        return "unknown"
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{_digits(seconds * scale, 3)} {unit}"
    return f"{_digits(seconds * 1e6, 3)} µs"


def _digits(value: float, count: int) -> str:
    """``value`` with ``count`` significant digits, never with an exponent."""
    return f"{value:.{_decimals(value, count)}f}"


def _decimals(value: float, count: int) -> int:
    """Number of decimals for ``count`` significant digits of ``value``."""
    if value <= 0:
        return 0
    rounded = float(f"{value:.{count - 1}e}")  # 0.9996 has three digits as 1.00
    return max(count - 1 - math.floor(math.log10(rounded)), 0)


def step_time_text(time: StepTime) -> str:
    """``41.2 ± 0.4 ms``: the mean and the half-width of its interval."""
    scale, unit = (1.0, "s") if time.mean_s >= 0.9995 else (1e3, "ms")
    mean, half = time.mean_s * scale, STANDARD_ERRORS * time.standard_error_s * scale
    decimals = _decimals(mean, 3)
    if half < _NEGLIGIBLE * mean:  # equal times, but for rounding
        half = 0.0
    if round(half, decimals) == 0:
        decimals = _decimals(half, 1)
    return f"{_digits(mean, 3)} ± {half:.{decimals}f} {unit}"


def span_text(seconds: float) -> str:
    """Return a duration: ``45 s``, ``4 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def size_text(size_bytes: float) -> str:
    """``640 B``, ``12 KiB``, ``97.5 MiB``, ``2.6 GiB``."""
    size, units = size_bytes, ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.4g} {units[0]}"


def speedup_text(ratio: float) -> str:
    """``1.21x``; a dash if unknown."""
    return f"{ratio:.2f}x" if math.isfinite(ratio) else "-"


def interval_text(low: float, high: float) -> str:
    """``1.17x to 1.25x``; a phrase if there is no interval after one round."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown after one round"
    return f"{low:.2f}x to {high:.2f}x"


def evidence_text(comparison: Comparison) -> str:
    """Return the interval of a confirmed speed-up and its number of rounds."""
    rounds = amount(comparison.rounds, "round")
    return f"{LEVEL} interval {interval_text(comparison.low, comparison.high)}, {rounds}"


def default_text(space: SearchSpace, judged_by: str = "") -> str:
    """Return what strategies are compared with.

    Args:
        space: The space; restrictions may have moved the default.
        judged_by: As of :class:`hvd_autosync.study.values.StudySettings`.
    """
    if judged_by:
        return f"the winner of study {judged_by}"
    return "the default" if space.holds_job else "your restricted default"


def gain_text(comparison: Comparison, space: SearchSpace, judged_by: str = "") -> str:
    """Return the speed-up of a proven strategy over the default; arguments as before."""
    speedup = speedup_text(comparison.speedup)
    return f"{speedup} faster than {default_text(space, judged_by)} ({evidence_text(comparison)})"


def answer_text(conclusion: Conclusion, space: SearchSpace, judged_by: str = "") -> str:
    """Return the result of a study in one line; arguments as of :func:`default_text`."""
    best = conclusion.best
    if best is None:
        why = f": {conclusion.reason}" if conclusion.reason else ""  # shared traces have none
        return f"no gain found, {default_text(space, judged_by)} is kept{why}"
    return f"{gain_text(best, space, judged_by)}: {space.describe(conclusion.winner)}"


def judged_by(study: StudyRecord) -> str:
    """Return the id of the study under whose winner a study's training began; empty: none."""
    return str(study.settings.get("judged_by", ""))


def steps_text(settings: StudySettings, *, live: bool) -> str:
    """Return the steps of a trial; ``live``: it is a part of the training."""
    warmup = min(settings.warmup, WARMUP_STEPS) if live else settings.warmup
    fewer = " (fewer if steps are long)" if settings.adaptive_steps else ""
    return f"{amount(warmup, 'warm-up step')} and {settings.steps} measured steps{fewer}"


def forecast_text(forecast: Forecast) -> str:
    """Return how long a tuning will take, in one line."""
    part = ""
    if forecast.setup_s > forecast.trial_s / 2:
        part = f" ({span_text(forecast.setup_s)} of it before the end of the first step)"
    judging = f", at most {span_text(forecast.judging_s)} of quality trials" * (
        forecast.judging_s > 0
    )
    unjudged = f"; no lossy strategy is judged: {forecast.unjudged}" * bool(forecast.unjudged)
    low, high = span_text(forecast.low_s), span_text(forecast.high_s)
    whole = high if low == high else f"{low} to {high}"
    stop = (
        "; Ctrl-C ends tuning and trains with the best confirmed strategy"
        if forecast.trains
        else ""
    )
    return (
        f"each trial about {span_text(forecast.trial_s)}{part}; at most "
        f"{amount(forecast.trials, 'more trial')}{judging} and {MIN_ROUNDS} to {MAX_ROUNDS} "
        f"rounds of confirmation: {whole}; tuning stops earlier if further trials cost more time "
        "than they are expected to save in a "
        f"training of {forecast.training_s / 3600:g} h (--autosync-expected-hours){stop}{unjudged}"
    )


def first_line(text: str) -> str:
    """Return the first line of ``text``, for one-line reports."""
    return text.strip().partition("\n")[0]
