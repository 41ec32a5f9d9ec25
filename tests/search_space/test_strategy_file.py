"""Strategies as files: what is written is read again, and what cannot work is refused."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space import (
    CATALOGUE,
    Host,
    ModelProfile,
    ParameterProfile,
    Strategy,
    strategy_file,
)
from hvd_autosync.search_space.knobs import categorical_knob
from hvd_autosync.search_space.strategy_file import (
    check_fits,
    check_model,
    read_strategy,
    strategy_text,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLASSES = {"embedding": ("table.*",), "large": ("fc1.weight",)}
MODEL = ModelProfile(
    (
        ParameterProfile("table.weight", (1000, 8), "float32"),
        ParameterProfile("fc1.weight", (32, 100), "float32"),
        ParameterProfile("steps", (1,), "int64"),
    )
)


def read(text: str) -> tuple[Strategy, Any]:
    return read_strategy(tomllib.loads(text))


@given(st.data())
def test_what_is_written_is_read(data: st.DataObject) -> None:
    free = [knob for knob in CATALOGUE if knob.condition is None]
    chosen = data.draw(st.lists(st.sampled_from(free), unique_by=lambda knob: knob.name))
    values = {knob.name: knob.from_unit(data.draw(st.floats(0, 1))) for knob in chosen}
    strategy = Strategy(values)
    again, classes = read(strategy_text(strategy, CLASSES))
    assert again == strategy
    for name, members in classes.items():
        assert members == CLASSES[name]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
def test_any_name_of_a_parameter_is_written_as_toml(names: list[str]) -> None:
    classes = {"large": ('\N{SNAKE}\x7f"\\.weight', *names)}
    text = strategy_text(Strategy({"large_exchange": "sharded"}), classes)
    assert text.isascii() and read(text)[1] == classes


def test_any_knob_of_an_extension_is_written_as_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    own = categorical_knob("own knob", ("a", "\N{SNAKE}"), "a", help="Lines\n  of help.\n")
    known = strategy_file.catalogue_knob
    monkeypatch.setattr(
        strategy_file, "catalogue_knob", lambda name: own if name == own.name else known(name)
    )
    strategy = Strategy({own.name: "\N{SNAKE}", "buckets": 2})
    text = strategy_text(strategy, {})
    assert "# Lines of help.\n" in text and read(text)[0] == strategy


def test_it_says_what_knobs_do() -> None:
    text = strategy_text(Strategy({"buckets": 4, "embedding_exchange": "rows"}), CLASSES)
    assert "# Number of gradient buckets" in text
    assert 'embedding = ["table.*"]' in text
    assert "large" not in text.partition("[classes]")[2]  # nothing treats it differently


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "sets no knob"),
        ("[knob]\nbuckets = 4", "'knob'"),
        ("knobs = 4", "'knobs' is not a table"),
        ("[knobs]\nspeed = 11", "unknown knob 'speed'"),
        ("[knobs]\nbuckets = 1000", "buckets: 1000 is out of bounds"),
        ("[knobs]\nbuckets = 2.5", "2.5 is not a whole number"),
        ('[knobs]\nrest_codec = "zip"', "'zip' is not one of its choices"),
        ('[knobs]\nlarge_codec = "topk"\nlarge_ratio = 0.0\n[classes]\nlarge = ["*"]', "0.0"),
        ('[knobs]\nlarge_rank = 2\n[classes]\nlarge = ["*"]', "no effect without large_codec"),
        ('[knobs]\nbucket_rule = "size"', "no effect without buckets"),
        ('[knobs]\nembedding_exchange = "rows"', "no parameter is of class embedding"),
        ('[classes]\nhuge = ["*"]', "unknown class of parameters 'huge'"),
        ('[classes]\nrest = ["*"]', "unknown class of parameters 'rest'"),
        ('[classes]\nlarge = "fc1"', "is not a list of names"),
        ("[classes]\nlarge = [1]", "is not a list of names"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, named: str) -> None:
    with pytest.raises(SpaceError) as caught:
        read(text)
    assert named in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "hosts", [(Host("a", 4),), (Host("a", 1), Host("b", 1)), (Host("a", 2), Host("b", 3))]
)
@pytest.mark.parametrize(
    "strategy", [{"rest_exchange": "hierarchical"}, {"large_exchange": "hierarchical_factors"}]
)
def test_two_levels_need_two_levels(strategy: dict[str, str], hosts: tuple[Host, ...]) -> None:
    with pytest.raises(SpaceError, match="does not fit the hosts a:"):
        check_fits(Strategy(strategy), hosts, {})
    check_fits(Strategy(strategy), (Host("a", 2), Host("b", 2)), {})


def test_knobs_that_the_job_decides_are_not_decided_twice() -> None:
    strategy = Strategy({"cycle_time_ms": 2.0})
    with pytest.raises(SpaceError, match=r"your options or environment set 5.0"):
        check_fits(strategy, (Host("a", 2),), {"cycle_time_ms": 5.0})
    check_fits(strategy, (Host("a", 2),), {"cycle_time_ms": 2.0})


@pytest.mark.parametrize(
    ("knobs", "classes", "named"),
    [
        ({"embedding_exchange": "rows"}, {"embedding": ("tabel.*",)}, "'tabel.*' matches no param"),
        (
            {"large_codec": "powersgd", "large_rank": 32},
            {"large": ("table.weight",)},
            "large_rank = 32 is above the rank of table.weight, which has the shape 1000 x 8",
        ),
        ({"rest_codec": "int8"}, {}, "rest_codec = 'int8' cannot encode steps"),
    ],
)
def test_the_model_must_fit(
    knobs: dict[str, Any], classes: dict[str, tuple[str, ...]], named: str
) -> None:
    with pytest.raises(SpaceError) as caught:
        check_model(Strategy(knobs), classes, MODEL)
    assert named in caught.value.message
    check_model(Strategy({"buckets": 2}), CLASSES, MODEL)
