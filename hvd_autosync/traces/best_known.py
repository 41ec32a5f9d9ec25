"""A program of its own: the best strategy for a model, for a worker.

It reads a question from its input and writes the strategy, as the document of a strategy file, to
its output; nothing where none is known. Where the store cannot be used it writes the error's
``message`` and ``hint``. All are JSON.
"""

from __future__ import annotations

import json
import os
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
    """The winner of the newest study of a model on a layout of ranks, as a document.

    One whose steps became slower in training, or that the loss guard has ended, is not taken.

    Args:
        store: Where studies are.
        parameters: Name, shape and type of each of the model's parameters.
        slots: Ranks per host.
        device: What they compute on, as studies name it.
    """
    # Another optimizer of the same script may hold the rest of the model.
    wanted = {(name, tuple(shape), dtype) for name, shape, dtype in parameters}
    for study in sorted(store.studies(), key=lambda each: each.created_at, reverse=True):
        if study.task is None or study.winner is None or study.status is not StudyStatus.FINISHED:
            continue
        model, resources = study.task.model, study.task.resources
        if study.drift or study.fallbacks or resources.device != device:
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
    """Answer one question."""
    question = json.load(sys.stdin)
    answer: dict[str, Any] | None
    try:
        store = TraceStore(os.environ.get("HVD_AUTOSYNC_STORE"))
        answer = best_known(store, question["parameters"], question["slots"], question["device"])
    except AutosyncError as error:
        answer = {"message": error.message, "hint": error.hint}
    if answer is not None:
        json.dump(answer, sys.stdout)
