"""Untrusted input is data: changed inputs are refused or accepted, and nothing else happens.

Traces, autotune logs, space files, and what arrives at the control port and in a job's output are
changed at random, thousands of times, from a seed. A refusal is one of our own errors. What is
accepted must be usable wherever such a thing is used. Meanwhile nothing may start a process, load
a pickle, connect somewhere, or write outside of the test's folder, and no input may take long.

    pytest tests/test_fuzz.py --fuzz-inputs 100000        # for each of the targets
    python tests/test_fuzz.py --first 0 --minutes 20      # all in turn, and says what came of it
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import hmac
import io
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from hvd_autosync.engine.study_options import load_restrictions
from hvd_autosync.errors import AutosyncError, TraceFormatError
from hvd_autosync.launch.channel import ChannelError, ControlReceiver, ControlSender
from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.masking import redact
from hvd_autosync.reporting.closing import closing_lines
from hvd_autosync.reporting.explanation import explain
from hvd_autosync.reporting.listing import studies_table, trials_table
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.messages import read_message
from hvd_autosync.runtime.driver.wire import encode_message
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    RankReport,
    Resources,
    Strategy,
    Task,
    TrialResult,
    TrialSpec,
    TrialStatus,
    build_space,
    catalogue_knob,
    horovod_settings,
    restrict_space,
)
from hvd_autosync.search_space.catalogue import every_knob
from hvd_autosync.search_space.documents import read_toml
from hvd_autosync.search_space.schedule import rounds
from hvd_autosync.search_space.strategy_file import (
    check_fits,
    check_model,
    read_strategy,
    strategy_text,
)
from hvd_autosync.search_space.sync_plan import (
    beyond_horovod,
    exchange_plan,
    protocol_of,
    schedule_of,
)
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TraceStore, export_study, import_studies, trials_frame
from hvd_autosync.traces.autotune_csv import import_autotune_log
from hvd_autosync.util.printable import shell_line

#: Of this process's time, so that others on the machine do not count; far more than any needs.
_LONGEST_S = 20
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.find_class",
    "socket.connect",
    "os.remove",
    "os.rename",
    "shutil.rmtree",
)
_ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    5e-324,
    1e308,
    -1e308,
    2**31,
    2**63,
    -(2**63),
    10**30,
    float("nan"),
    float("inf"),
    "",
    "0",
    "gloo",
    "gloo --verbose",
    "completed",
    "\x00",
    "\x1b[2J",
    "\ud800",
    "a\nb",
    "../../x",
    "$(id)",
    "[bold]",
    "[/]",
    "x" * 300,
    [],
    {},
    [[]],
    {"": None},
    [1] * 50,
    {"knobs": []},
    "2026-01-01T00:00:00.000000+00:00",
]
_ODD_BYTES = [
    b"",
    b"\n",
    b"\0",
    b"{}",
    b"[",
    b'"',
    b"1e999",
    b"-",
    b"\xff\xfe",
    b"null",
    b"[[" * 99,
    b"9" * 400,
    b"=",
    b"#",
    b",",
    b"nan",
    b"\xe2\x80\xae",
]


#: How many inputs of the running target ended how.
_OUTCOMES: Counter[str] = Counter()


@pytest.fixture
def inputs(request: pytest.FixtureRequest) -> range:
    """The numbers of the inputs; each is the seed of its own changes.

    Where each takes long, two parts: the first third, and the others.
    """
    every = range(int(request.config.getoption("--fuzz-inputs")))
    third = len(every) // 3
    return {"all": every, "first": every[:third], "others": every[third:]}[
        getattr(request, "param", "all")
    ]


class _Watch:
    """Whatever is done while it watches: no process, no pickle, no connection, no other file."""

    folder: str | None = None

    @classmethod
    def audit(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.folder is None or threading.current_thread() is not threading.main_thread():
            return
        if event in _FORBIDDEN:
            raise AssertionError(f"{event}{arguments!r:.200} while reading untrusted input")
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path, flags = os.fsdecode(arguments[0]), arguments[2]
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes and not os.path.abspath(path).startswith((cls.folder, "/dev/null")):
                raise AssertionError(f"{path} was opened for writing")


sys.addaudithook(_Watch.audit)


@contextlib.contextmanager
def harmless(folder: Path, number: int) -> Iterator[None]:
    """Watch input ``number``; our own errors are fine."""

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"input {number} took more than {_LONGEST_S} s")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, _LONGEST_S)
    _Watch.folder = str(folder)
    try:
        yield
        _OUTCOMES["accepted"] += 1
    except AutosyncError as error:
        assert error.message and str(error)
        _OUTCOMES["refused"] += 1
    except AssertionError:
        raise
    except BaseException as error:
        raise AssertionError(f"input {number}: {type(error).__name__}: {error}") from error
    finally:
        _Watch.folder = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# Changes


def changed_tree(value: Any, dice: random.Random) -> Any:
    """A copy of plain JSON with one to three changes."""
    value = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        container, key = dice.choice(places)
        action = dice.random()
        if action < 0.45:
            container[key] = copy.deepcopy(dice.choice(_ODD))
        elif action < 0.6:
            del container[key]
        elif action < 0.75:
            other, place = dice.choice(places)
            container[key] = copy.deepcopy(other[place])
        elif action < 0.85:
            container[key] = _bent(container[key], dice)
        elif isinstance(container, dict):
            container[dice.choice(("extra", "type", "knob", "", "\ud800"))] = dice.choice(_ODD)
        else:
            container.insert(key, copy.deepcopy(container[key]))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    for key in keys:
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _bent(value: Any, dice: random.Random) -> Any:
    """Something of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        factor = dice.choice((-1, 0, 1e-9, 1e9, 1.5, 1e300))
        bent = value * factor
        return int(bent) if isinstance(value, int) and abs(bent) < 1e18 else bent
    if isinstance(value, str):
        return dice.choice((value[::-1], value + value, value[:-1], value.upper(), f" {value}"))
    if isinstance(value, list):
        return dice.choice((value[::-1], value + value, value[:-1], [value]))
    return {"inner": value}


def changed_bytes(data: bytes, dice: random.Random) -> bytes:
    """A copy with one to four places cut out, repeated, replaced or filled."""
    for _ in range(dice.randint(1, 4)):
        begin = dice.randint(0, len(data))
        end = min(len(data), begin + dice.choice((0, 1, 1, 4, 30)))
        middle = dice.choice(
            (dice.choice(_ODD_BYTES), dice.randbytes(dice.randint(1, 6)), data[begin:end] * 2)
        )
        data = data[:begin] + middle + data[end:]
    return data


# Traces


def a_task() -> Task:
    """A model with an embedding on two hosts."""
    parameters = tuple(
        ParameterProfile(f"layer{i}.weight", (64, 256), "float32", i == 0, i, 1e-3 * i)
        for i in range(6)
    )
    link = Link(2, 1e-3, 1e7)
    resources = Resources(
        (Host("a", 2), Host("b", 2)),
        "cpu",
        HorovodBuild("0.28.1", gloo=True, mpi=True),
        Links(Link(4, 2e-3, 5e6), link, link),
    )
    return Task(ModelProfile(parameters, 0.01, 0.02), resources)


def a_trace(folder: Path) -> list[Any]:
    """The lines of a study that found a gain, as our own loop writes it."""
    task = a_task()
    space = build_space(task.model, task.resources)
    store = TraceStore(folder / "source.db")
    command = ("horovodrun", "-np", "4", "-H", "a:2,b:2", "python", "train.py")
    study = AskTellStudy.create(
        space, store=store, task=task, settings=StudySettings(trials=7, seed=1), command=command
    )
    dice = random.Random(1)
    while (trial := study.ask()) is not None:
        values = space.complete(trial.strategy)
        step_s = 0.05 if values["controller"] == space.default["controller"] else 0.03
        steps = tuple(step_s * dice.uniform(0.99, 1.01) for _ in range(12))
        ranks = tuple(
            RankReport(r, "ab"[r // 2], steps, tuple(s / 3 for s in steps), (2.0, 1.0), 1 << 28)
            for r in range(4)
        )
        crashed = trial.number == 2
        result = TrialResult(
            TrialStatus.CRASHED if crashed else TrialStatus.COMPLETED,
            "rank 1 was killed by SIGKILL" if crashed else "",
            ranks,
            2,
            1.0,
            2.0,
            stderr_tail="last [words]\n",
            profile=task.model if trial.number == 0 else None,
        )
        study.tell(trial, result)
    path = folder / "study.jsonl"
    export_study(store, study.study_id, path)
    store.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


def seal(lines: list[Any]) -> bytes:
    """The file of ``lines`` with a footer that fits, as somebody hostile would write it."""
    body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    footer = {
        "type": "footer",
        "trials": len(lines) - 2,
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return body + json.dumps(footer).encode() + b"\n"


def use_trace(store: TraceStore, path: Path) -> None:
    """Import, and everything that is done with a study afterwards."""
    try:
        ids = import_studies(store, path)
    except TraceFormatError:
        assert store.studies() == []
        raise
    console = Console(file=io.StringIO(), width=100, markup=False)
    for study_id in ids:
        study, trials = store.study(study_id), store.trials(study_id)
        console.print(studies_table([study]), trials_table(study, trials))
        assert len(trials_frame(store, study_id)) == len(trials)
        for strategy in (study.winner or Strategy(), *(trial.strategy for trial in trials)):
            horovod_settings(strategy)
        if study.task is not None and study.space is not None:
            store.finished_of_task(study.task.fingerprint, study.space.key)
        export_study(store, study_id, io.StringIO())
        with contextlib.suppress(AutosyncError):
            console.print(*explain(store, study_id))
        with contextlib.suppress(AutosyncError):
            console.print(*closing_lines(study))
        with contextlib.suppress(AutosyncError):
            TuningProgress().start(AskTellStudy(store, study))
        store.delete(study_id)


@pytest.mark.parametrize(
    "inputs", ["first", pytest.param("others", marks=pytest.mark.wide)], indirect=True
)
def test_traces(inputs: range, tmp_path: Path) -> None:
    lines = a_trace(tmp_path)
    *records, _ = lines
    store, path = TraceStore("sqlite://"), tmp_path / "changed.jsonl"
    path.write_bytes(seal(records))
    use_trace(store, path)  # and what asks for our own mpirun's version does so now
    accepted = 0
    for number in inputs:
        dice = random.Random(number)
        data = seal(changed_tree(records, dice) if dice.random() < 0.8 else records)
        path.write_bytes(changed_bytes(data, dice) if dice.random() < 0.25 else data)
        with harmless(tmp_path, number):
            use_trace(store, path)
            accepted += 1
    assert 0 < accepted < len(inputs)
    assert {"default", "model", "confirm"} <= {line.get("kind") for line in records}


@pytest.mark.parametrize("kinds", [{"default"}, {"default", "sobol", "model", "confirm"}])
def test_a_trace_with_steps_of_no_time(kinds: set[str], tmp_path: Path) -> None:
    *records, _ = a_trace(tmp_path)
    store, path = TraceStore("sqlite://"), tmp_path / "changed.jsonl"
    path.write_bytes(seal(records))
    use_trace(store, path)  # and what asks for our own mpirun's version does so now
    for record in records:
        if record.get("kind") in kinds and record["result"] is not None:
            for rank in record["result"]["ranks"]:
                rank["step_s"] = [0.0] * len(rank["step_s"])
    path.write_bytes(seal(records))
    with harmless(tmp_path, 0):
        use_trace(store, path)


# Horovod's autotune logs

_LOG = b"""cycle_time_ms,tensor_fusion_threshold,hierarchical_allreduce,cache_enabled,score
1.0,64,0,1,103.2
5.5,32.25,0,1,111.9
25,0,0,0,98.0
5.5,32.25,0,1,111.9
"""


def test_autotune_logs(inputs: range, tmp_path: Path) -> None:
    store, path = TraceStore("sqlite://"), tmp_path / "changed.csv"
    console = Console(file=io.StringIO(), width=100, markup=False)
    accepted = 0
    for number in inputs:
        path.write_bytes(changed_bytes(_LOG, random.Random(number)))
        with harmless(tmp_path, number):
            study_id = import_autotune_log(store, path)
            console.print(*explain(store, study_id), trials_table(store.study(study_id), []))
            store.delete(study_id)
            accepted += 1
    assert 0 < accepted < len(inputs)


# Space files

_SPACE = {
    "knobs": {
        "cycle_time_ms": {"low": 0.5, "high": 10},
        "fusion_threshold_bytes": {"fixed": 67108864},
        "cache_capacity": {"choices": [0, 1024]},
        "controller": {"choices": ["gloo"]},
        "buckets": {"low": 1, "high": 4},
    }
}


def as_toml(document: dict[str, Any]) -> str:
    """The document as TOML, values spelled as JSON (which most TOML is)."""
    text = ""
    for table, knobs in document.items():
        if not isinstance(knobs, dict):
            text += f"{json.dumps(table)} = {json.dumps(knobs)}\n"
            continue
        plain = {knob: value for knob, value in knobs.items() if not isinstance(value, dict)}
        text += f"[{json.dumps(table)}]\n" if plain else ""
        text += "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in plain.items())
        for knob, entries in knobs.items():
            if knob not in plain:
                text += f"[{json.dumps(table)}.{json.dumps(knob)}]\n"
                text += "".join(f"{json.dumps(k)} = {json.dumps(v)}\n" for k, v in entries.items())
    return text


def test_space_files(inputs: range, tmp_path: Path) -> None:
    task = a_task()
    space = build_space(task.model, task.resources)
    path = tmp_path / "space.toml"
    accepted = 0
    for number in inputs:
        dice = random.Random(number)
        data = as_toml(changed_tree(_SPACE, dice)).encode()
        path.write_bytes(changed_bytes(data, dice) if dice.random() < 0.4 else data)
        with harmless(tmp_path, number):
            restricted = restrict_space(space, load_restrictions(str(path)))
            accepted += 1
            for corner in (0.0, 0.5, 1.0):
                strategy = restricted.decode([corner] * restricted.dimension)
                point = restricted.encode(strategy)
                assert ((point >= 0) & (point <= 1)).all()
                horovod_settings(strategy)
    assert 0 < accepted < len(inputs)


# Command lines with a secret, and texts of foreign origin

_SECRET_NAMES = (
    "token",
    "password",
    "passwd",
    "secret",
    "api_key",
    "apikey",
    "access-key",
    "auth",
    "credentials",
    "private.key",
    "cookie",
    "session",
    "jwt",
)
_FORMS = (
    ["--N", "X"],
    ["--N=X"],
    ["N=X"],
    ["+N=X"],
    ["-e", "N=X"],
    ["--env", "N:X"],
    ['{"N": "X"}'],
    ["--config={'N':'X'}"],
    ["https://host.org/a?b=1&N=X"],
    ["https://me:X@host.org/N"],
    ["--header", "N: X"],
    ["--set", "a.N=X"],
    ["--N=a X"],
    ["sh", "-c", "N=X python a.py --lr 1"],
)
_HARMLESS = (
    "--lr",
    "0.1",
    "--epochs=3",
    "train.py",
    "-m",
    "a.b",
    "--",
    "data/x",
    "a=b",
    "\x1b[2J",
    "--config",
    "{",
    "'",
    "",
    "x" * 300,
    "$(id)",
    "[1,2]",
    "\ud800",
)


def test_commands_with_a_secret(inputs: range, tmp_path: Path) -> None:
    """Whatever stands around it, and however its name is written, no secret is left."""
    redact(["python", "--token", "x"])  # it makes the key
    for number in inputs:
        dice = random.Random(number)
        name = dice.choice(_SECRET_NAMES)
        name = dice.choice((str, str.upper, str.title))(name)
        name = dice.choice(("", "my_", "HF-", "wandb.", "x")) + name + dice.choice(("", "_2", "X"))
        secret = "".join(dice.choices("abcdefgh0123456789", k=dice.randint(12, 30)))
        form = [re.sub(r"\bX\b", secret, word.replace("N", name)) for word in dice.choice(_FORMS)]
        before, after = (dice.choices(_HARMLESS, k=dice.randint(0, 4)) for _ in range(2))
        words = ["python", *before, *form, *after]
        with harmless(tmp_path, number):
            shown = redact(words)
            assert not any(secret in word for word in shown), f"{words} is shown as {shown}"
            assert shell_line(shown).isprintable()


# Strategy files

_CLASSES = {"embedding": ["layer0.*"], "large": ["layer1.*", "layer2.*"]}


def a_strategy(dice: random.Random) -> dict[str, Any]:
    """A valid strategy of the catalogue as a file's document, each knob's value at random."""
    chosen: dict[str, Any] = {}
    for knob in every_knob():  # a knob stands behind what it depends on
        condition = knob.condition
        parents = {condition.knob: catalogue_knob(condition.knob).default} if condition else {}
        if dice.random() < 0.5 and (condition is None or condition.holds({**parents, **chosen})):
            chosen[knob.name] = knob.from_unit(dice.random())
    return {"knobs": chosen, "classes": copy.deepcopy(_CLASSES)}


def lightly_changed(document: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """``document`` with one knob at another valid value, at an end of its range, or left out."""
    knobs = document["knobs"]
    if knobs:
        name = dice.choice(list(knobs))
        knob = catalogue_knob(name)
        knobs[name] = knob.from_unit(dice.choice((0.0, 1.0, dice.random())))
        if dice.random() < 0.3:
            del knobs[name]
    return document


def use_strategy(path: Path) -> None:
    """Read a strategy file, and do everything with it that is done before ranks get it."""
    strategy, classes = read_strategy(read_toml(str(path), "the strategy file"))
    path.write_text(strategy_text(strategy, classes))
    assert read_strategy(read_toml(str(path), "the strategy file"))[0] == strategy
    for _, text in horovod_settings(strategy).environment:
        assert isinstance(text, str) and "\x00" not in text
    spec = TrialSpec("t", strategy, 1, 5, classes=classes)
    assert TrialSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False))) == spec
    schedule = schedule_of(strategy)
    if schedule is not None:
        assert all(length >= 1 for length in rounds(schedule, [0.1] * 50))
    protocol_of(strategy)
    exchange_plan(strategy)
    beyond_horovod(strategy)
    with contextlib.suppress(AutosyncError):
        check_model(strategy, classes, a_task().model)
    with contextlib.suppress(AutosyncError):
        check_fits(strategy, (Host("a", 2), Host("b", 2)), {})


def test_strategy_files(inputs: range, tmp_path: Path) -> None:
    """Half of them are changed so lightly that most are strategies still."""
    path = tmp_path / "strategy.toml"
    accepted = 0
    for number in inputs:
        dice = random.Random(number)
        document = a_strategy(dice)
        if dice.random() < 0.5:
            data = as_toml(lightly_changed(document, dice)).encode()
        else:
            data = as_toml(changed_tree(document, dice)).encode()
            data = changed_bytes(data, dice) if dice.random() < 0.4 else data
        path.write_bytes(data)
        with harmless(tmp_path, number):
            use_strategy(path)
            accepted += 1
    assert len(inputs) / 4 < accepted < len(inputs)


# What arrives from a job's output

_MESSAGES: list[dict[str, Any]] = [
    {"type": "hello", "host": "a", "device": "cpu"},
    {"type": "profile", "profile": a_task().model.to_json(), "owned": ["compression"]},
    {"type": "link", "ranks": 2, "latency_s": 1e-3, "bandwidth_bytes_per_s": 1e7},
    {
        "type": "steps",
        "first": 0,
        "step_s": [0.1] * 12,
        "blocked_s": [0.01] * 12,
        "losses": [1.0] * 12,
    },
    {"type": "end", "cause": "steps", "peak_memory_bytes": 1 << 28},
    {"type": "exit", "trial": "t", "status": 0},  # a fork server's, which no rank may send
]


def test_messages_in_a_jobs_output(inputs: range, tmp_path: Path) -> None:
    completed = linked = 0
    for number in inputs:
        dice = random.Random(number)
        spec = TrialSpec("t", Strategy(), 2, 10)
        collector = Collector(spec, 2)
        output = b""
        for place, message in enumerate(_MESSAGES):
            for rank in range(2):
                if dice.random() < 0.3:
                    message = changed_tree(message, dice)
                    _OUTCOMES["changed messages in these"] += 1
                output += encode_message(spec.key, rank, place, message)
        if dice.random() < 0.3:
            output = changed_bytes(output, dice)
        with harmless(tmp_path, number):
            for line in output.split(b"\n"):
                collector.feed(line + b"\n")
            collector.progress()
            assert not collector.exits()
            result = collector.result(0, "", collector.exits())
            json.dumps(result.to_json(), allow_nan=False)
            linked += result.link is not None
            completed += result.status is TrialStatus.COMPLETED and result.step_time is not None
    assert 0 < completed < len(inputs) and 0 < linked < len(inputs)


def test_changed_lines_of_a_jobs_output(inputs: range, tmp_path: Path) -> None:
    """A changed line is no message, or still the same one: only the rank has the key.

    What a script prints beside it, and what a launcher puts before it, changes nothing.
    """
    spec = TrialSpec("t", Strategy(), 2, 10)
    forged = TrialSpec("t", Strategy(), 2, 10)
    assert spec.key != forged.key
    written = [
        encode_message(key, rank, 1, message).strip()
        for key in (spec.key, forged.key)
        for message in _MESSAGES
        for rank in range(3)
    ]
    known = [read_message(json.dumps(message).encode()) for message in _MESSAGES]
    complete = 0
    for number in inputs:
        dice = random.Random(number)
        line = dice.choice(written)
        if dice.random() < 0.9:
            line = changed_bytes(line, dice)
        decoder = MessageDecoder(spec.key, 2)
        with harmless(tmp_path, number):
            for each in line.split(b"\n"):
                _, decoded = decoder.feed(b"[1]<stderr>:" + each + b"\n")
                if decoded is not None:
                    rank, message = decoded
                    assert rank < 2 and message in known
                    complete += 1
    assert 0 < complete < len(inputs) / 4


# What arrives at a control port


def test_control_messages(inputs: range, tmp_path: Path) -> None:
    """No message of a client without the secret may be accepted."""
    secret, others = b"s" * 32, b"o" * 32
    order = b'{"type": "run", "trial": "t", "spec": "{}", "environment": {"A": "b"}}'
    for number in range(len(inputs) // 10):  # each needs a connection
        dice = random.Random(number)
        receiver = ControlReceiver("127.0.0.1", secret)
        port = receiver.port

        def attack(port: int = port, dice: random.Random = dice) -> None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port)) as peer,
            ):
                nonces = peer.recv(32) + b"n" * 32
                forged = hmac.digest(others, b"proof of the peer" + nonces, "sha256")
                signed = struct.pack("!Q", len(order)) + forged + order + forged
                forged = nonces[32:] + forged + signed
                peer.sendall(changed_bytes(forged, dice))
                peer.shutdown(socket.SHUT_WR)
                peer.recv(1)
            with contextlib.suppress(ChannelError, OSError):
                ControlSender(("127.0.0.1", port), secret).send({"type": "end"})

        thread = threading.Thread(target=attack)
        thread.start()
        with harmless(tmp_path, number):
            assert receiver.accept(120) == {"type": "end"}
        thread.join()
        receiver.close()


# A campaign

#: Target -> inputs of a turn; those of slow ones are few.
_TURNS: dict[Callable[[range, Path], None], int] = {
    test_traces: 30,
    test_autotune_logs: 200,
    test_space_files: 400,
    test_messages_in_a_jobs_output: 400,
    test_changed_lines_of_a_jobs_output: 150_000,
    test_commands_with_a_secret: 20_000,
    test_control_messages: 100,
}


def main() -> None:
    """Run all targets in turn, each turn with seeds of its own, and say what came of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first inputs")
    parser.add_argument("--minutes", type=float, default=20, help="begin no turn after so many")
    arguments = parser.parse_args()
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()
    until_s = monotonic() + 60 * arguments.minutes
    totals: dict[str, Counter[str]] = {}
    turn = 0
    while monotonic() < until_s:
        for target, count in _TURNS.items():
            first = arguments.first + turn * count
            _OUTCOMES.clear()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    target(range(first, first + count), Path(folder))
            except AssertionError as error:
                _OUTCOMES["faults"] += 1
                print(f"{target.__name__}, of seeds {first} to {first + count - 1}: {error}")
            totals.setdefault(target.__name__, Counter()).update(_OUTCOMES)
        turn += 1
        print(f"after {turn} turns:")
        for name, outcomes in totals.items():
            print(
                f"  {name}: {', '.join(f'{n:,} {what}' for what, n in outcomes.items())}",
                flush=True,
            )


if __name__ == "__main__":
    main()
