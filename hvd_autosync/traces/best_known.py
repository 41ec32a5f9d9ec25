"""A program that finds the best known strategy for a worker's model.

It reads a request from standard input and writes the strategy, as the document of a strategy file,
to standard output; nothing if there is none. If the store cannot be used, it writes the error's
``message`` and ``hint``. All are JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from hvd_autosync.errors import AutosyncError
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.traces.records import StudyStatus
from hvd_autosync.traces.store import TraceStore


def best_known(
    store: TraceStore, parameters: Sequence[Sequence[Any]], slots: Sequence[int], device: str
) -> dict[str, Any] | None:
    """Return the winner of the newest study of a model on a layout, as a strategy document.

    Studies with drift or a fallback are skipped, and damaged ones; so are those of trainings that
    began under a winner which the loss guard has ended.

    Args:
        store: The store of the studies.
        parameters: Name, shape and type of each of the model's parameters.
        slots: Ranks per host.
        device: Device of the ranks, as studies name it.
    """
    # A subset matches: another optimizer of the same script may have the other parameters.
    wanted = {(name, tuple(shape), dtype) for name, shape, dtype in parameters}
    studies = store.studies(status=StudyStatus.FINISHED, skip_damaged=True)
    ended = {study.study_id for study in studies if study.fallbacks}
    for study in studies:
        if study.task is None or study.winner is None:
            continue
        model, resources = study.task.model, study.task.resources
        if study.drift or resources.device != device:
            continue
        if not ended.isdisjoint([study.study_id, study.settings.get("judged_by")]):
            continue
        known = {(p.name, p.shape, p.dtype) for p in model.parameters}
        if wanted <= known and sorted(host.slots for host in resources.hosts) == sorted(slots):
            classes = parameter_classes(model)
            return {
                "knobs": dict(study.winner),
                "classes": {name: list(names) for name, names in classes.items()},
            }
    return None


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin)
    response: dict[str, Any] | None
    try:
        store = TraceStore()
        response = best_known(store, request["parameters"], request["slots"], request["device"])
    except AutosyncError as error:
        response = {"message": error.message, "hint": error.hint}
    if response is not None:
        json.dump(response, sys.stdout)
