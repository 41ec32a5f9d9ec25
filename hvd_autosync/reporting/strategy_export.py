"""Export of a study's strategy as a file for ``hvd-autosync run --strategy``."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_autosync.engine.compatibility import winner_of
from hvd_autosync.errors import StudyError
from hvd_autosync.reporting.explain_quality import trade_offs
from hvd_autosync.search_space import Strategy, Value
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.exchange_plan import (
    PARAMETER_CLASSES,
    REST,
    ClassPlan,
    parameter_classes,
)
from hvd_autosync.search_space.strategy_file import strategy_text
from hvd_autosync.search_space.sync_plan import exchange_plan
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.traces.anonymous import NO_NAMES_HINT, is_anonymous
from hvd_autosync.traces.validity import UnknownValueError

#: The word for the winner in place of a row's number.
WINNER = "winner"


def exported_strategy(store: TraceStore, study: StudyRecord, which: str) -> str:
    """Return the strategy file of the winner, or of a row of the table of judged lossy strategies.

    Args:
        store: The store that contains the study.
        study: The study.
        which: ``"winner"``, or the number of a row as
            :func:`hvd_autosync.reporting.explain_quality.quality_lines` gives it.

    Raises:
        StudyError: The study has no winner yet; there is no such row; the strategy cannot be
            written to a file.
        StoreError: The store cannot be read.
    """
    strategy = winner_of(study) if which == WINNER else _judged(store, study, which)
    return strategy_file(study, strategy)


def strategy_file(study: StudyRecord, strategy: Mapping[str, Value]) -> str:
    """Return the strategy file of a strategy of ``study``.

    Raises:
        StudyError: The strategy needs classes of parameters, but the study is anonymous; a knob is
            not known to this process.
    """
    unknown = [name for name in strategy if name not in REGISTRY]
    if unknown:
        values = ", ".join(f"{name}={value}" for name, value in strategy.items())
        raise StudyError(
            f"unknown knob {unknown[0]!r} in the strategy {values}", hint=UnknownValueError.hint
        )
    if is_anonymous(study):
        return strategy_text(_without_classes(study, strategy), {})
    return strategy_text(strategy, parameter_classes(study.task.model) if study.task else {})


def _without_classes(study: StudyRecord, strategy: Mapping[str, Value]) -> Strategy:
    """Return a strategy without the knobs of classes whose exchange is that of plain Horovod.

    Raises:
        StudyError: The exchange of a class is another one.
    """
    plan = exchange_plan(strategy)
    kept = dict(strategy)
    for name in PARAMETER_CLASSES:
        knobs = [knob for knob in strategy if knob.startswith(f"{name}_") and name != REST]
        if knobs and plan is not None and {plan.of(name), plan.rest} != {ClassPlan()}:
            raise StudyError(
                f"a strategy of study {study.study_id} needs the class of parameters {name!r}, but "
                "the trace is anonymous: it has no names of parameters",
                hint=NO_NAMES_HINT,
            )
        for knob in knobs:
            del kept[knob]
    return Strategy(kept)


def _judged(store: TraceStore, study: StudyRecord, row: str) -> Strategy:
    conclusion = Conclusion.of(study)
    judged = (
        trade_offs(study.space, store.trials(study.study_id), conclusion)
        if study.space is not None and conclusion is not None
        else []
    )
    if not row.isdecimal() or not 1 <= int(row) <= len(judged):
        rows = f"rows 1 to {len(judged)}" if judged else "no lossy strategies"
        raise StudyError(
            f"study {study.study_id} has no judged strategy in row {row!r}; it has {rows}",
            hint=f"Give {WINNER!r} or a row that hvd-autosync show {study.study_id} prints.",
        )
    return judged[int(row) - 1].verdict.strategy
