"""The schema of the space file accepts what the reader accepts, and nothing else."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import CATALOGUE, check_restrictions
from hvd_autosync.search_space.space_schema import space_schema

SCHEMA = space_schema(CATALOGUE)


def test_it_is_a_schema_with_every_knob() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]["knobs"]["properties"]) == {knob.name for knob in CATALOGUE}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"knobs": {"cycle_time_ms": {"low": 0.5, "high": 10}}},
        {"knobs": {"cycle_time_ms": {"low": -5, "high": 1e6}}},
        {"knobs": {"fusion_threshold_bytes": {"fixed": 67108864}}},
        {"knobs": {"controller": {"choices": ["gloo"]}}},
        {"knobs": {"hierarchical_allreduce": {"fixed": True}}},
    ],
)
def test_files_that_are_accepted(document: dict[str, Any]) -> None:
    check_restrictions(document)
    jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize(
    "document",
    [
        {"knob": {}},
        {"knobs": {"speed": {"fixed": 1}}},
        {"knobs": {"cycle_time_ms": {"choices": [1.0]}}},
        {"knobs": {"cycle_time_ms": {"low": 101}}},
        {"knobs": {"cycle_time_ms": {"fixed": 0.01}}},
        {"knobs": {"buckets": {"fixed": "four"}}},
        {"knobs": {"buckets": 4}},
        {"knobs": {"controller": {"choices": ["tcp"]}}},
        {"knobs": {"controller": {"choices": []}}},
        {"knobs": {"controller": {"choices": ["gloo"], "fixed": "gloo"}}},
        {"knobs": {"cycle_time_ms": {"fixed": 2, "high": 4}}},
        {"knobs": {"hierarchical_allreduce": {"fixed": "on"}}},
    ],
)
def test_files_that_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(SpaceError):
        check_restrictions(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)
