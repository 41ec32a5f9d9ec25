"""Jobs that cannot be tuned: the errors after a trial of their default."""

from __future__ import annotations

from hvd_autosync.errors import DefaultTrialError, ShortJobError
from hvd_autosync.search_space import SearchSpace, Strategy, TrialResult, TrialStatus
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS
from hvd_autosync.study.values import StudySettings
from hvd_autosync.util.amounts import amount


def why_unfit(
    strategy: Strategy,
    result: TrialResult,
    settings: StudySettings,
    space: SearchSpace | None,
    *,
    pays: bool,
) -> DefaultTrialError | None:
    """Return the error for a job that cannot be tuned; ``None`` if it can.

    Args:
        strategy: The strategy of its default trial, which may be that of a space file.
        result: Result of that trial.
        settings: The settings of its study.
        space: The search space, if it is known already.
        pays: Whether tuning may pay although a trial takes as long as the whole job.
    """
    if result.status is TrialStatus.ENDED_EARLY:
        return _too_short(result, settings, pays=pays)
    if result.step_time is None and result.status is TrialStatus.CUT_SHORT:
        return ShortJobError(
            f"the limit of {amount(settings.minutes or 0, 'minute')} was reached before the job "
            "was measured as it is",
            hint="Allow more with --autosync-minutes.",
        )
    if result.step_time is not None:
        return None
    restricted = space is not None and not space.holds_job and strategy == space.default
    return _restricted_default_failed(result, strategy) if restricted else _default_failed(result)


def _restricted_default_failed(result: TrialResult, strategy: Strategy) -> DefaultTrialError:
    """Return the error for a job that fails with the defaults that the space file leaves."""
    fixed = ", ".join(f"{name}={value}" for name, value in strategy.items())
    return DefaultTrialError(
        f"the job fails with the defaults that the space file leaves, {fixed}: {result.reason}",
        hint="Allow more in the space file.",
        exit_status=result.exit_status or 1,
    )


def _too_short(result: TrialResult, settings: StudySettings, *, pays: bool) -> ShortJobError | None:
    """Return the error for a job that ended within its default trial; ``None`` if it may pay."""
    steps = min((len(rank.step_s) for rank in result.ranks), default=0)
    if steps == 0:
        return ShortJobError(
            "the script ended without a single step of hvd.DistributedOptimizer",
            hint="Wrap the optimizer with hvd.DistributedOptimizer, or, if the script reduces "
            "gradients by hand, call hvd_autosync.step() after each step.",
        )
    if result.step_time is None:
        return ShortJobError(
            f"the script ended after {amount(steps, 'step')}; at least "
            f"{settings.warmup + MIN_MEASURED_STEPS} are needed "
            f"({settings.warmup} to warm up, {MIN_MEASURED_STEPS} measured)",
            hint="Let it train longer, or lower --autosync-warmup.",
        )
    if not pays:
        return ShortJobError(
            f"the script ended by itself after {amount(steps, 'step')}, within its first trial of "
            f"{settings.warmup + settings.steps}: no trial could pay",
            hint="If it will run often, tune it with --autosync-tune-only, or say how long it "
            "trains in all with --autosync-expected-hours.",
        )
    return None


def _default_failed(result: TrialResult) -> DefaultTrialError:
    """Return the error for a job that fails without any change."""
    output = f"\n{result.stderr_tail}" if result.stderr_tail else ""
    return DefaultTrialError(
        f"the job fails as it is, before anything was changed: {result.reason}{output}",
        hint="Make the job run without --autosync first.",
        exit_status=result.exit_status or 1,
    )
