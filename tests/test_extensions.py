"""Knobs, exchanges and codecs that others add: in the space, in the settings, refused if wrong."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_autosync import extensions
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.engine.mode import why_launched
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import tuning_key
from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import (
    CATALOGUE,
    CategoricalKnob,
    Host,
    Knob,
    ModelProfile,
    Resources,
    Strategy,
    build_space,
    catalogue_knob,
    every_knob,
    held_by_environment,
    horovod_settings,
)
from hvd_autosync.search_space.catalogue import FAMILIES, REGISTRY
from hvd_autosync.search_space.horovod_settings import kept_by_horovod, launch_knobs
from hvd_autosync.search_space.knob_spec import KnobSpec, Variable
from hvd_autosync.search_space.knobs import Condition, categorical_knob, integer_knob
from hvd_autosync.search_space.registry import KnobRegistry

EXAMPLES = Path(__file__).parents[1] / "examples" / "extending"
CORES = categorical_knob("cores", ("free", "0,1"), "free", help="Where threads run.")


def declared(knob: Knob, variable: str, **read: bool) -> KnobSpec:
    """A declaration of a knob that always applies."""
    return KnobSpec(knob, Variable(variable, **read), "always")


def make_nothing(*arguments: Any) -> Any:
    """Stands for the function that makes an exchange or a codec."""


@pytest.fixture(autouse=True)
def _nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's files add to this process is gone after it."""
    monkeypatch.setattr(REGISTRY, "_specs", dict(REGISTRY._specs))
    monkeypatch.setattr(extensions.ADDED, "_loaded", {})
    monkeypatch.setattr(extensions.ADDED, "_files", {})
    monkeypatch.setattr(extensions.ADDED, "knobs", set())


@pytest.fixture
def registry() -> KnobRegistry:
    """The catalogue, to which a test may add."""
    return KnobRegistry(FAMILIES)


@pytest.fixture
def added(registry: KnobRegistry) -> extensions.Extensions:
    """Adds to that registry."""
    return extensions.Extensions(registry)


def space_names(model: ModelProfile, resources: Resources, **options: Any) -> list[str]:
    return [knob.name for knob in build_space(model, resources, **options).knobs]


def test_a_knob_is_tuned_where_it_applies(
    model: ModelProfile,
    slow_network: Resources,
    registry: KnobRegistry,
    added: extensions.Extensions,
) -> None:
    added.add_knob(
        KnobSpec(
            CORES,
            Variable("HOROVOD_CORES"),
            "four ranks",
            applies=lambda job: job.resources.world_size == 4,
        )
    )
    assert space_names(model, slow_network, registry=registry)[-1] == "cores"
    alone = Resources((Host("a", 1),), "cpu", slow_network.build, slow_network.links)
    assert "cores" not in space_names(model, alone, registry=registry)
    held = {"cores": "0,1"}
    assert "cores" not in space_names(model, slow_network, held=held, registry=registry)
    assert tuple(spec.knob for spec in registry) == (*CATALOGUE, CORES)
    assert registry["cores"].when == "four ranks"


def test_a_registry_that_is_passed_leaves_the_process_as_it_was(
    model: ModelProfile, slow_network: Resources, added: extensions.Extensions
) -> None:
    added.add_knob(declared(CORES, "HOROVOD_CORES"))
    added.add_exchange("gather", make_nothing)
    assert every_knob() == CATALOGUE and "gather" not in extensions.EXCHANGES
    assert "cores" not in space_names(model, slow_network)


def test_a_knob_is_a_variable_both_ways(
    registry: KnobRegistry, added: extensions.Extensions
) -> None:
    added.add_knob(declared(CORES, "HOROVOD_CORES"))
    assert horovod_settings(Strategy({"cores": "free"}), registry).environment == ()
    chosen = horovod_settings(Strategy({"cores": "0,1"}), registry)
    assert chosen.environment == (("HOROVOD_CORES", "0,1"),)
    assert held_by_environment({"HOROVOD_CORES": "0,1"}, registry) == {"cores": "0,1"}
    with pytest.raises(ConfigurationError, match="HOROVOD_CORES='2'"):
        held_by_environment({"HOROVOD_CORES": "2"}, registry)


def test_knobs_that_cannot_be_added(registry: KnobRegistry, added: extensions.Extensions) -> None:
    with pytest.raises(SpaceError, match="knob 'cycle_time_ms' already exists"):
        added.add_knob(declared(catalogue_knob("cycle_time_ms"), "HOROVOD_CYCLES"))
    lossy = integer_knob("x", 0, 1, 0, group="codec", exact=False, help="")
    with pytest.raises(SpaceError, match="of the group 'codec'"):
        added.add_knob(declared(lossy, "X"))
    with pytest.raises(SpaceError, match="cycle_time_ms is not categorical"):
        registry.add_choice("cycle_time_ms", "short")
    assert tuple(spec.knob for spec in registry) == CATALOGUE


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("add_knob('mine')", "'mine' declares no knob"),
        ("add_knob(KnobSpec('mine', Variable('A'), ''))", "'mine' is no knob"),
        ("add_knob(KnobSpec(integer_knob('', 0, 9, 1, help=''), Variable('A'), ''))", "name ''"),
        ("add_knob(KnobSpec(MINE, 'A', ''))", "mine sets 'A'"),
        ("add_knob(KnobSpec(MINE, PlanField('exchange', 'buckets'), ''))", "mine sets PlanField"),
        ("add_knob(KnobSpec(MINE, Variable(''), ''))", "mine sets ''"),
        ("add_knob(KnobSpec(MINE, Variable('A=B'), ''))", "mine sets 'A=B'"),
        ("add_knob(KnobSpec(MINE, Variable('A'), '', applies=True))", "applies .* is True"),
        ("add_knob(KnobSpec(MINE, Variable('A'), '', narrow=7))", "narrow .* is 7"),
        ("add_knob(KnobSpec(MINE, Variable('A'), '', cost='some'))", "mine says what it costs"),
        (
            "add_knob(KnobSpec(MINE, Variable('HOROVOD_CYCLE_TIME'), ''))",
            "as knob cycle_time_ms does",
        ),
        (
            "add_knob(KnobSpec(integer_knob('large_pages', 0, 9, 1, help=''), Variable('A'), ''))",
            "knob large_pages has a name like",
        ),
        ("add_exchange(' ', print)", "has the name ' '"),
        ("add_exchange('gather', object())", "makes exchange 'gather' is <object"),
        ("add_codec('sign', None)", "makes codec 'sign' is None"),
        ("add_codec('sign', print, 'large')", "for the classes 'large'"),
        ("add_codec('sign', print, ())", r"for the classes \(\)"),
        ("import sys; sys.exit()", "SystemExit"),
    ],
)
def test_what_a_file_cannot_add_is_refused_with_its_name(
    added: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from hvd_autosync.extensions import add_codec, add_exchange, add_knob\n"
        "from hvd_autosync.search_space.knob_spec import KnobSpec, PlanField, Variable\n"
        "from hvd_autosync.search_space.knobs import integer_knob\n"
        "MINE = integer_knob('mine', 0, 9, 1, help='')\n"
        f"{added}\n"
    )
    monkeypatch.setenv(extensions.VARIABLE, str(file))
    with pytest.raises(ConfigurationError, match=said) as caught:
        extensions.load()
    assert str(file) in caught.value.message and caught.value.hint


def test_exchanges_and_codecs_are_choices_of_their_classes(
    model: ModelProfile,
    slow_network: Resources,
    registry: KnobRegistry,
    added: extensions.Extensions,
) -> None:
    make = make_nothing
    added.add_exchange("gather", make, classes=("large",))
    added.add_codec("sign", make, classes=("large", "rest"))
    added.add_codec("sign", make, classes=("large",))  # as when a cell is run again
    space = build_space(model, slow_network, allow=("codec",), registry=registry)

    def choices(name: str) -> tuple[Any, ...]:
        knob = space[name]
        assert isinstance(knob, CategoricalKnob)
        return knob.choices

    assert choices("large_exchange") == ("allreduce", "hierarchical", "sharded", "gather")
    assert "gather" not in choices("rest_exchange") + choices("embedding_exchange")
    assert choices("large_codec")[-1] == "sign" and choices("rest_codec")[-1] == "sign"
    assert choices("large_codec").count("sign") == 1 and "sign" not in choices("embedding_codec")
    for add in (added.add_exchange, added.add_codec):
        with pytest.raises(SpaceError, match="already"):
            add("rows" if add == added.add_exchange else "int8", make)


@pytest.mark.parametrize("added", ["codec('sign'", "exchange('gather'"])
def test_two_files_add_no_choice_of_one_name(
    added: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Studies would be recorded under a value that means one of them.

    A script may import a file that the variable names, too.
    """
    kind, _, name = added.partition("(")
    files = [tmp_path / "own_a.py", tmp_path / "own_b.py"]
    for file in files:
        file.write_text(
            f"from hvd_autosync.extensions import add_{kind}\n"
            f"def make(*arguments): pass\nadd_{kind}({name}, make)\n"
        )
    monkeypatch.setenv(extensions.VARIABLE, str(files[0]))
    extensions.load()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("own_a")
    monkeypatch.setenv(extensions.VARIABLE, os.pathsep.join(map(str, files)))
    with pytest.raises(SpaceError, match=f"{kind} {name} exists already: .*own_a.py.*own_b.py"):
        extensions.load()


def test_files_are_loaded_once_and_make_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from hvd_autosync.extensions import add_knob\n"
        "from hvd_autosync.search_space.knob_spec import KnobSpec, Variable\n"
        "from hvd_autosync.search_space.knobs import integer_knob\n"
        "mine = integer_knob('mine', 0, 9, 1, help='Mine.')\n"
        "add_knob(KnobSpec(mine, Variable('HOROVOD_MINE'), 'always'))\n"
        f"open({str(tmp_path / 'runs')!r}, 'a').write('x')\n"
    )
    job = Job((), ("python", "train.py"), (Host("a", 2),))
    before = tuning_key(job, Options(), {})
    monkeypatch.setenv(extensions.VARIABLE, f"{file}{os.pathsep}{file}")
    extensions.load()
    extensions.load()
    assert (tmp_path / "runs").read_text() == "x"
    assert catalogue_knob("mine").default == 1
    assert tuning_key(job, Options(), {}) != before


@pytest.mark.parametrize("text", ["x = 2", None])
def test_a_file_that_was_changed_since_it_was_loaded_starts_no_job(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a kernel, whose spaces and keys are those of the earlier file."""
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    monkeypatch.setenv(extensions.VARIABLE, str(file))
    words = ["-np", "2", "python", "train.py"]
    read_job(parse_words(words), words)
    file.unlink()
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match="was changed since it was loaded") as caught:
        read_job(parse_words(words), words)
    assert str(file) in str(caught.value) and "Restart" in caught.value.hint


def test_a_knob_that_is_read_at_the_start_is_tuned_by_launched_trials(tmp_path: Path) -> None:
    job = Job((), ("python", "train.py"), (Host("localhost", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    assert why_launched(job, options) is None
    mine = integer_knob("mine", 0, 9, 1, help="Mine.")
    extensions.add_knob(declared(mine, "HOROVOD_MINE", reread=True, kept=True))
    assert kept_by_horovod()["HOROVOD_MINE"] == "1"
    assert why_launched(job, options) is None
    assert "mine" not in launch_knobs(reinitializes=True)
    assert "mine" in launch_knobs(reinitializes=False)
    extensions.add_knob(declared(mine, "HOROVOD_MINE"))
    assert why_launched(job, options) == "ranks read mine of your extensions at their start"


@pytest.mark.parametrize(
    ("text", "said"), [("1 / 0", "ZeroDivisionError"), (None, "FileNotFoundError")]
)
def test_a_file_that_cannot_be_loaded_is_named(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "broken.py"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(extensions.VARIABLE, str(file))
    with pytest.raises(ConfigurationError, match=said) as caught:
        extensions.load()
    assert str(file) in str(caught.value)


def test_the_example_of_a_knob(
    model: ModelProfile, slow_network: Resources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv(extensions.VARIABLE, str(EXAMPLES / "affinity_knob.py"))
    extensions.load()
    assert "thread_affinity" in space_names(model, slow_network)
    (setting,) = horovod_settings(Strategy({"thread_affinity": "3,2,1,0"})).environment
    assert setting == ("HOROVOD_THREAD_AFFINITY", "3,2,1,0")
    crowded = replace(slow_network, hosts=(Host("a", 5),))
    assert "thread_affinity" not in space_names(model, crowded)
    assert REGISTRY["thread_affinity"].when == "each rank of a host can have a core of its own"


def test_a_script_that_passes_a_strategy_finds_the_files_of_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in a job without the flag, which loads none of them."""
    import hvd_autosync.torch as hvd

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    monkeypatch.setattr(extensions.ADDED, "exchanges", {})
    wanted = {"rest_exchange": "gather"}
    with pytest.raises(SpaceError, match="gather"):
        hvd._chosen(wanted, None, optimizer, None)
    monkeypatch.setenv(extensions.VARIABLE, str(EXAMPLES / "gather_exchange.py"))
    assert hvd._chosen(wanted, None, optimizer, None) == (Strategy(wanted), {})


def test_a_knob_goes_with_the_one_on_which_it_depends(
    model: ModelProfile,
    slow_network: Resources,
    registry: KnobRegistry,
    added: extensions.Extensions,
) -> None:
    def four_ranks(job: Any) -> bool:
        return bool(job.resources.world_size == 4)

    parent = categorical_knob("pinned", (False, True), False, help="")
    added.add_knob(KnobSpec(parent, Variable("HOROVOD_PINNED"), "four ranks", applies=four_ranks))
    child = integer_knob("pin_from", 0, 3, 0, help="", condition=Condition("pinned", (True,)))
    added.add_knob(declared(child, "HOROVOD_PIN_FROM"))
    assert space_names(model, slow_network, registry=registry)[-2:] == ["pinned", "pin_from"]
    alone = Resources((Host("a", 1),), "cpu", slow_network.build, slow_network.links)
    assert not {"pinned", "pin_from"} & {*space_names(model, alone, registry=registry)}
