from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hvd_autosync.search_space import FloatKnob, SearchSpace, Strategy
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.traces.validity import strict_study, strict_trial


def _plain(record: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(json.dumps(record.to_json()))
    return fields


def _with(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``fields`` with one value replaced, added, or removed (``...``)."""
    fields = copy.deepcopy(fields)
    *parents, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    place: Any = fields
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return fields


def test_what_we_write_is_accepted(store: TraceStore, finished: StudyRecord) -> None:
    study = strict_study(_plain(finished))
    assert study.to_json() == finished.to_json()
    for number, trial in enumerate(store.trials(finished.study_id)):
        assert strict_trial(_plain(trial), study, number).to_json() == trial.to_json()


def test_keys_of_earlier_versions_are_read(store: TraceStore, finished: StudyRecord) -> None:
    study = strict_study(_with(_plain(finished), "settings", {"anew": True, "fewer": False}))
    assert study.settings == {"retune": True, "adaptive_steps": False}
    trial = _with(_plain(store.trials(finished.study_id)[0]), "info", {"experts": ["cost model"]})
    assert strict_trial(trial, study, 0).info == {"priors": ["cost model"]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("study_id", "0123456789AB"),
        ("study_id", 12),
        ("study_id", "../../etc/passwd"),
        ("created_at", "yesterday"),
        ("created_at", "2026-01-01T00:00:00"),
        ("created_at", None),
        ("created_at", "9999-12-31T23:59:59.999999-12:00"),
        ("job_key", "a\nb"),
        ("job_key", "\ud800"),
        ("job_key", "x" * 300),
        ("job_key", ["job"]),
        ("command", "horovodrun"),
        ("command", [1]),
        ("command", None),
        ("command", ...),
        ("settings", []),
        ("settings", None),
        ("versions", {"torch": 2}),
        ("status", "paused"),
        ("status", None),
        ("outcome", "fine"),
        ("extra", 1),
        ("task", {}),
        ("task", []),
        ("task.model", ...),
        ("task.extra", 1),
        ("task.model.forward_s", "0.1"),
        ("task.model.forward_s", -1),
        ("task.model.wrapped", 1),
        ("task.model.parameters", {}),
        ("task.model.parameters.0.shape", [-1, 2]),
        ("task.model.parameters.0.shape", "ab"),
        ("task.model.parameters.0.extra", 1),
        ("task.model.parameters.0.ready_order", 1.5),
        ("task.model.parameters.0.sparse", None),
        ("task.resources.hosts.0.slots", -2),
        ("task.resources.hosts.0.slots", True),
        ("task.resources.build.mpi", "yes"),
        ("task.resources.links.across.latency_s", -1e-4),
        ("task.resources.links.across.bandwidth_bytes_per_s", 0),
        ("task.resources.links.across.ranks", 1),
        ("task.resources.links.within", 5),
        ("task.resources.links", []),
        ("space", {"knobs": []}),
        ("space", "all"),
        ("space.fixed", []),
        ("space.fixed", {"cpu_operations": ["gloo"]}),
        ("space.knobs.0.kind", "matrix"),
        ("space.knobs.0.condition", {"knob": "later", "values": [1]}),
        ("space.knobs.0.help", 1),
        ("winner", {"cycle_time_ms": "fast"}),
        ("winner", {"cycle_time_ms": 1e9}),
        ("winner", {"cycle_time_ms": True}),
        ("winner", {"cycle_time_ms": None}),
        ("winner", {"controller": "start-timeout=0 --network-interfaces=x"}),
        ("winner", {"no_such_knob": 1}),
        ("winner", ["cycle_time_ms"]),
        ("winner", ""),
    ],
)
def test_studies_that_we_never_write(finished: StudyRecord, path: str, value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        strict_study(_with(_plain(finished), path, value))
    assert str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("study_id", "0123456789ab"),
        ("number", 2),
        ("number", -1),
        ("number", True),
        ("number", "1"),
        ("kind", 3),
        ("kind", "a\x1b[2J"),
        ("asked_at", "now"),
        ("told_at", None),
        ("told_at", 5),
        ("result", None),
        ("info", []),
        ("info", None),
        ("strategy", None),
        ("strategy", {"controller": "mpi-args"}),
        ("strategy", {"x": 1}),
        ("strategy", {"fusion_threshold_bytes": 1.5}),
        ("strategy", {"cycle_time_ms": [1]}),
        ("result.status", "great"),
        ("result.status", ...),
        ("result.reason", None),
        ("result.ranks", {}),
        ("result.ranks", "ab"),
        ("result.ranks.0", None),
        ("result.ranks.0.step_s", "0123456789"),
        ("result.ranks.0.step_s", [0.1, "0.1"]),
        ("result.ranks.0.step_s", [0.1, None]),
        ("result.ranks.0.step_s", [0.1, -0.1]),
        ("result.ranks.0.blocked_s", [True]),
        ("result.ranks.0.losses", ["low"]),
        ("result.ranks.0.peak_memory_bytes", -1),
        ("result.ranks.0.host", 5),
        ("result.ranks.0.extra", 1),
        ("result.warmup_steps", -1),
        ("result.warmup_steps", 1.5),
        ("result.setup_s", -1),
        ("result.setup_s", "1"),
        ("result.exit_status", None),
        ("result.links", {}),
        ("result.profile", {"parameters": []}),
        ("result.owned", "abc"),
        ("result.owned", [1]),
        ("result.device", 0),
        ("result.extra", 1),
        ("result", []),
    ],
)
def test_trials_that_we_never_write(
    store: TraceStore, finished: StudyRecord, path: str, value: Any
) -> None:
    trial = store.trials(finished.study_id)[1]
    with pytest.raises(ValueError) as caught:
        strict_trial(_with(_plain(trial), path, value), finished, 1)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("cycle_time_ms", "unit", "s"),
        ("cycle_time_ms", "high", 1e6),
        ("cycle_time_ms", "low", 0.001),
        ("cycle_time_ms", "exact", False),
        ("cycle_time_ms", "kind", "categorical"),
        ("fusion_threshold_bytes", "unit", "MB"),
        ("fusion_threshold_bytes", "multiple", 0),
        ("controller", "choices", ["gloo", "mpi --mpi-args=x"]),
    ],
)
def test_catalogue_knobs_cannot_be_redefined(
    finished: StudyRecord, name: str, field: str, value: Any
) -> None:
    fields = _plain(finished)
    index = [knob["name"] for knob in fields["space"]["knobs"]].index(name)
    with pytest.raises(ValueError):
        strict_study(_with(fields, f"space.knobs.{index}.{field}", value))


def test_a_restricted_space_is_accepted(finished: StudyRecord) -> None:
    assert finished.space is not None
    knobs = tuple(
        knob.restrict(0.5, 2.0) if isinstance(knob, FloatKnob) else knob
        for knob in finished.space.knobs
    )
    fields = {**_plain(finished), "space": SearchSpace(knobs, finished.space.fixed).to_json()}
    study = strict_study(json.loads(json.dumps(fields)))
    assert study.space is not None and study.space["cycle_time_ms"].to_unit(2.0) == 1.0


def _own_knob(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "float",
        "name": "own",
        "help": "",
        "group": "horovod",
        "exact": True,
        "unit": "",
        "condition": None,
        "low": 0.0,
        "high": 1.0,
        "default": 0.5,
        "scale": "linear",
        "log_offset": 0.0,
        **changes,
    }


def _own_space(knob: dict[str, Any]) -> dict[str, Any]:
    return {"knobs": [knob], "fixed": {}, "holds_job": True}


def test_own_knobs_of_a_space_are_accepted_on_their_domain(finished: StudyRecord) -> None:
    fields = _plain(finished) | {"space": _own_space(_own_knob())}
    study = strict_study(fields | {"winner": {"own": 0.25}})
    assert study.winner == Strategy({"own": 0.25})
    with pytest.raises(ValueError, match="winner: knob own"):
        strict_study(fields | {"winner": {"own": 2.0}})


@pytest.mark.parametrize(
    "changes",
    [
        {"low": -1e308, "high": 1e308},
        {"low": 2.0},
        {"low": "0"},
        {"default": 5.0},
        {"scale": "cubic"},
        {"scale": "log"},
        {"kind": "integer", "multiple": 0, "default": 0},
        {"log_offset": None},
        {"name": 5},
    ],
)
def test_own_knobs_must_work(finished: StudyRecord, changes: dict[str, Any]) -> None:
    space = _own_space(_own_knob(**changes))
    with pytest.raises(ValueError):
        strict_study(_plain(finished) | {"space": space, "winner": {}})
