"""A program that finds the best known strategy for a worker's model.

It reads a request from standard input and writes the strategy, as the document of a strategy file;
nothing if there is none. If the store cannot be used, it writes the error's
``message`` and ``hint``. All are JSON. Lines for the user go to the error output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from hvd_autosync.engine.reuse import is_conclusive
from hvd_autosync.errors import AutosyncError, SpaceError, TraceFormatError
from hvd_autosync.search_space.catalogue import is_exact
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.traces.records import StudyRecord, StudyStatus
from hvd_autosync.traces.store import TraceStore
from hvd_autosync.traces.validity import UnknownValueError, check_strategy
from hvd_autosync.util.print_line import print_line


def best_known(
    store: TraceStore, parameters: Sequence[Sequence[Any]], slots: Sequence[int], device: str
) -> dict[str, Any] | None:
    """Return the winner of the newest study of a model on a layout, as a strategy document.

    Studies with drift, damaged ones, and those that kept the default before they had tried others,
    or in the midst of their confirmation, are skipped; so are winners that nothing here knows,
    those that the loss guard has ended in a training, and lossy ones: the losses that admitted them
    are those of another training.

    Args:
        store: The store of the studies.
        parameters: Name, shape and type of each of the model's parameters.
        slots: Ranks per host.
        device: Device of the ranks, as studies name it.
    """
    # A subset matches: another optimizer of the same script may have the other parameters.
    wanted = {(name, tuple(shape), dtype) for name, shape, dtype in parameters}
    studies = store.studies(skip_damaged=True)
    ended = {fallback.strategy for study in studies for fallback in study.fallbacks}
    lossy = ""
    for study in studies:
        if study.status is not StudyStatus.FINISHED or study.task is None or study.winner is None:
            continue
        model, resources = study.task.model, study.task.resources
        if study.drift or resources.device != device or study.winner in ended:
            continue
        if not _is_conclusive(store, study):
            continue
        known = {(p.name, p.shape, p.dtype) for p in model.parameters}
        if wanted <= known and sorted(host.slots for host in resources.hosts) == sorted(slots):
            try:
                check_strategy(f"the winner of study {study.study_id}", study.winner, None)
            except UnknownValueError as error:
                print_line(f"{error}; it is not used. {error.hint}")
                continue
            if not is_exact(study.winner):
                lossy = lossy or study.study_id
                continue
            classes = parameter_classes(model)
            return {
                "knobs": dict(study.winner),
                "classes": {name: list(names) for name, names in classes.items()},
            }
    if lossy:
        print_line(
            f"the winner of study {lossy} is not used: it is lossy, and was judged by the losses "
            'of another training; strategy="tuned" takes exact strategies only'
        )
    return None


def _is_conclusive(store: TraceStore, study: StudyRecord) -> bool:
    try:
        return is_conclusive(store, study, expected_hours=0.0)
    except (TraceFormatError, SpaceError):
        return False


def main(answers: TextIO) -> None:
    """Answer one request.

    Args:
        answers: Where the answer goes.
    """
    request = json.load(sys.stdin)
    response: dict[str, Any] | None
    try:
        store = TraceStore(create=False, or_empty=True)
        response = best_known(store, request["parameters"], request["slots"], request["device"])
    except AutosyncError as error:
        response = {"message": error.message, "hint": error.hint}
    if response is not None:
        json.dump(response, answers)
