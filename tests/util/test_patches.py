"""What is replaced in other packages: only what the registry lists, and it can be put back."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvd_autosync
from hvd_autosync.util import patches, private_names
from hvd_autosync.util.patches import PATCHES, Patch

ROOT = Path(hvd_autosync.__file__).parent

#: Installs each patch by the function that workers call, and prints what that changed.
_SCRIPT = """
import contextlib, json, os, random, sys
from collections import defaultdict
from types import ModuleType

os.environ |= {
    f"HOROVOD_{name}": str(value)
    for name, value in {
        "RANK": 3, "SIZE": 4, "LOCAL_RANK": 1, "LOCAL_SIZE": 2, "CROSS_RANK": 1, "CROSS_SIZE": 2
    }.items()
}
import horovod.runner.launch
import horovod.torch
import numpy as np
import torch
import torch._dynamo.callback
from hvd_autosync.commands.flag import extend_launcher
from hvd_autosync.engine.job_line import extend_parser
from hvd_autosync.launch.driven_launcher import (
    become_mpirun,
    order_interfaces,
    pass_on_all_bytes,
    spare_checks,
)
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import initialization, standstill
from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.collectives.levels import prepare_levels
from hvd_autosync.runtime.collectives.operation_names import name_operations
from hvd_autosync.runtime.collectives.over_horovod import HOROVOD
from hvd_autosync.runtime.collectives.shared_sets import shared_process_set
from hvd_autosync.runtime.exchange.compiling import before_compiling
from hvd_autosync.runtime.install import hooks
from hvd_autosync.runtime.install.activation import activate
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.patches import epochs
from hvd_autosync.runtime.patches.backward import watch_backward
from hvd_autosync.runtime.collectives.launcher_use import finalize_at_end
from hvd_autosync.runtime.patches.evaluation import watch_evaluation
from hvd_autosync.runtime.patches.exits import call_at_exit, watch_failed_operations
from hvd_autosync.runtime.patches.gradient_weight import weight_backward
from hvd_autosync.runtime.patches.linear import watch_linear
from hvd_autosync.runtime.patches.scalers import watch_scalers
from hvd_autosync.runtime.patches.seeds import seed_everything
from hvd_autosync.runtime.state.normalization import count_layers
from hvd_autosync.search_space import Strategy, TrialSpec
from hvd_autosync.util import patches

class Weight:
    def now(self):
        return 1.0

weight = Weight()
plain = TrialSpec("t", Strategy(), warmup_steps=0, measured_steps=0)
held = []

def watch_imports():
    current.trial = current.torch_was_loaded = True
    hooks.watch_first_import()
    current.trial = current.torch_was_loaded = False

def share():
    with contextlib.suppress(ValueError):  # Horovod is not initialized
        shared_process_set([0])

def enter(context):
    context.__enter__()
    return context

installers = {
    "strategy optimizer": lambda: activate(plain),
    "optimizer broadcast": lambda: activate(plain),
    "process sets": prepare_levels,
    "shared process sets": share,
    "initialization": record_initialization,
    "end of the process": lambda: held.append(enter(initialization._nothing_at_exit())),
    "standstill": lambda: held.append(enter(standstill.others_wait())),
    "operations without a name": name_operations,
    "join": lambda: HOROVOD.wrap_join(lambda join: join),
    "join and shutdown": lambda: HOROVOD.before_leaving(print),
    "losses": lambda: watch_backward(Losses()),
    "gradient weights": lambda: weight_backward(weight.now),
    "gradient scalers": watch_scalers,
    "epochs": epochs._listen,
    "evaluation": lambda: watch_evaluation(print),
    "end without clean-up": lambda: call_at_exit(int),
    "end of MPI": finalize_at_end,
    "first import of torch": watch_imports,
    "failed operations": watch_failed_operations,
    "linear layers": lambda: held.append(watch_linear(torch.nn.Linear(2, 2).parameters())),
    "normalization layers": count_layers,
    "compilers": lambda: before_compiling(print),
    "seeds": lambda: seed_everything(1),
    "launcher options": extend_parser,
    "check of gloo": lambda: spare_checks(["gloo"]),
    "check of mpi": lambda: spare_checks(["mpi"]),
    "shell of mpirun": become_mpirun,
    "order of interfaces": order_interfaces,
    "decoder of output": pass_on_all_bytes,
    "launcher": extend_launcher,
}
ABSENT = object()

def places(patch):
    for target in patch.targets.split():
        path, _, attribute = target.rpartition(".")
        owner = patches._owner(path)
        getattr(owner, attribute)  # ctypes makes it when it is read
        yield target, owner, attribute

def now(patch):
    return {name: vars(owner).get(own, ABSENT) for name, owner, own in places(patch)}

def everything():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "horovod", "numpy", "random", "argparse"):
            for attribute, value in list(vars(module).items()):
                found[f"{name}.{attribute}"] = value
                if isinstance(value, type):
                    for own, inner in list(vars(value).items()):
                        if own not in ("__doc__", "__abstractmethods__", "_abc_impl"):
                            found[f"{name}.{attribute}.{own}"] = inner
    return found

report = defaultdict(dict)
assert set(installers) == {patch.name for patch in patches.PATCHES}
for patch in patches.PATCHES:  # whatever they import and cache is there after this
    installers[patch.name]()
assert patches.uninstall_all() == []
whole = everything()
for patch in patches.PATCHES:
    before = now(patch)
    installers[patch.name]()
    first = now(patch)
    own = report[patch.name]
    own["replaced"] = sum(first[name] is not before[name] for name in before)
    own["targets"] = len(before)
    installers[patch.name]()
    again = now(patch)
    own["same when installed twice"] = all(again[name] is first[name] for name in first)
    own["left"] = patches.uninstall_all()
    after = now(patch)
    own["put back"] = all(after[name] is before[name] for name in before)
for patch in patches.PATCHES:
    installers[patch.name]()
report["all"]["left"] = patches.uninstall_all()
end = everything()
report["all"]["changed"] = sorted(
    name for name, value in end.items() if whole.get(name, value) is not value and callable(value)
)
torch.nn.BatchNorm1d(3), torch.Generator().manual_seed(1), random.Random(2), np.random.seed(3)
print(json.dumps(report))
"""


@cache
def installed() -> Any:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HVD_AUTOSYNC")}
    environment |= {"PYTHONPATH": str(ROOT.parent), "HOROVOD_DYNAMIC_PROCESS_SETS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", [patch.name for patch in PATCHES])
def test_a_patch_replaces_its_targets_once_and_puts_back_what_was_there(name: str) -> None:
    own = installed()[name]
    assert own["replaced"] == own["targets"] > 0
    assert own["same when installed twice"]
    assert own["left"] == [] and own["put back"]


@pytest.mark.slow
def test_all_together_leave_every_function_and_class_as_it_was() -> None:
    assert installed()["all"] == {"left": [], "changed": []}


#: Modules of Python whose attributes are there to be set.
_OUR_OWN = ("hvd_autosync", "sys", "os")


def assignments(source: str) -> list[str]:
    """Dotted names of other packages that a module assigns to or deletes, in any way."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                aliases[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {
                each.asname or each.name: f"{node.module}.{each.name}" for each in node.names
            }

    def dotted(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "vars"):
            owner = dotted(node.args[0]) if node.args else None
            last = ast.unparse(node.args[1]).strip("'\"") if len(node.args) > 1 else "__dict__"
            return owner and f"{owner}.{last}"
        if isinstance(node, ast.Subscript) and (owner := dotted(node.value)):
            inside, _, last = owner.rpartition(".")
            return f"{inside}.{ast.unparse(node.slice)}" if last == "__dict__" else None
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and (found := dotted(value)):
                        aliases.setdefault(name.id, found)

    def changed() -> Iterator[str | None]:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(
                node.ctx, ast.Load
            ):
                yield dotted(node)
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in ("setattr", "delattr"):
                    owner = dotted(node.args[0])
                    yield owner and f"{owner}.{ast.unparse(node.args[1])}"
                elif isinstance(node.func, ast.Attribute) and node.func.attr in ("update", "pop"):
                    owner = dotted(node.func.value)
                    yield owner if owner and owner.endswith("__dict__") else None

    return [name for name in changed() if name and name.partition(".")[0] not in _OUR_OWN]


@pytest.mark.parametrize(
    "change",
    [
        "torch.f = 1",
        "f = torch.nn.Module\nf.forward = 1",
        "vars(torch.nn)['Linear'] = 1",
        "torch.nn.__dict__['Linear'] = 1",
        "setattr(torch, 'f', 1)",
        "del torch.f",
        "vars(torch).update(f=1)",
        "from horovod.torch import mpi_ops\nmpi_ops.join = 1",
        "from horovod.torch import mpi_ops as m\na, b = 1, m.mpi_lib\nb.horovod_torch_join = 1",
        "x = getattr(torch.amp, 'GradScaler')\nx.step = 1",
    ],
)
def test_the_search_finds(change: str) -> None:
    assert assignments(f"import torch\n{change}")


def test_nothing_is_patched_outside_the_registry() -> None:
    folders = [ROOT, *(path for path in ROOT.iterdir() if path.is_symlink())]  # rglob follows none
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 200
    found = {path.name: names for path in sources if (names := assignments(path.read_text()))}
    assert found == {}


def test_the_table_says_where_each_patch_is_installed() -> None:
    for patch in PATCHES:
        text = (ROOT / patch.used_in).read_text()
        assert f'"{patch.name}"' in text and "patches.install(" in text, patch
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a function under two names, and patches of it."""
    module: Any = SimpleNamespace(f=lambda: 1)
    module.g = module.f
    monkeypatch.setitem(sys.modules, "target", module)
    rows = tuple(Patch(name, "target.f target.g", "", "to test it") for name in ("one", "two"))
    monkeypatch.setattr(patches, "PATCHES", rows)
    monkeypatch.setattr(patches, "_installed", {})
    return module


def plus(count: int) -> patches.Maker:
    return lambda own: lambda: own() + count


def test_two_names_of_one_object_get_one_replacement(target: Any) -> None:
    patches.install("one", plus(10))
    assert target.f is target.g and target.f() == 11
    patches.install("one", plus(100))
    assert target.f() == 11


def test_patches_of_the_same_target_are_put_back_from_the_last(target: Any) -> None:
    own, undone = target.f, []
    patches.install("one", plus(10), undo=lambda: undone.append("one"))
    patches.install("two", plus(100))
    assert target.f() == 111
    assert not patches.uninstall("one") and patches.is_installed("one") and not undone
    assert patches.uninstall_all() == []
    assert target.f is target.g is own and undone == ["one"]
    assert patches.uninstall("one")


def test_what_the_script_has_put_over_it_stays(target: Any) -> None:
    patches.install("one", plus(10))
    target.f = scripts_own = lambda: 5
    assert patches.uninstall_all() == ["one"]
    assert target.f is scripts_own
    patches.install("one", plus(10))
    assert target.f is scripts_own


def test_a_maker_that_fails_changes_nothing(target: Any) -> None:
    own = target.f

    def fail(_: Any) -> Any:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError):
        patches.install("one", plus(10), fail)
    assert target.f is own and not patches.is_installed("one")


def test_every_target_exists_here() -> None:
    assert list(patches.missing_targets()) == []


@pytest.mark.parametrize("name", ["torch.nn.gone", "torch.gone.f", "horovod.torch.mpi_ops.a.b"])
def test_a_target_that_is_gone_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    row = Patch("p", f"torch.nn.Module {name} no_such_package.f", "", "")
    monkeypatch.setattr(patches, "PATCHES", (row,))
    assert list(patches.missing_targets()) == [(name, row)]


def test_versions_are_compared_with_the_tested_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {"torch": "1.0", "numpy": "99.0", "horovod": "0.28.9", "no_such_package": "1"}
    monkeypatch.setattr(patches, "TESTED_VERSIONS", tested)
    assert [patches.tested_here(package) for package in tested] == [
        "newer than tested",
        "older than tested",
        "tested",
        "not installed",
    ]
    assert private_names.TESTED_VERSIONS is not tested
