"""The table of private names against a search of the sources."""

from __future__ import annotations

import ast
import configparser
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import horovod.torch
import pytest

import hvd_autosync
from hvd_autosync.util import private_names
from hvd_autosync.util.private_names import PRIVATE_NAMES, PrivateNames

ROOT = Path(hvd_autosync.__file__).parent
_PRIVATE = re.compile(r"_(?!_)\w+")
#: Set on the class of the distributed optimizer, outside of its definition.
_OURS = frozenset(
    "_horovod_step _horovod_synchronize _horovod_zero_grad "
    "_in_step _reduced _stepping _sync".split()
)
#: Documented by Python.
_DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe"}


class Search:
    """Uses of private names in one module.

    Attributes:
        found: Dotted names, and private attributes (``._name``) of objects of unknown class.
    """

    def __init__(self, tree: ast.Module, inherited: set[str]) -> None:
        self.found: set[str] = set()
        self._inherited = inherited
        self._aliases: dict[str, str] = {}
        nodes = list(_nodes(tree))
        for node in nodes:
            self._learn(node)
        own = {name for node in nodes if isinstance(node, ast.ClassDef) for name in defined(node)}
        self._own = own | _OURS
        in_classes = {
            id(inner) for n in nodes if isinstance(n, ast.ClassDef) for inner in ast.walk(n)
        }
        for node in nodes:
            self._look_at(node, id(node) in in_classes)
        self.found = {
            name for name in self.found if not any(o.startswith(f"{name}.") for o in self.found)
        }

    def _learn(self, node: ast.AST) -> None:
        """Record what a local name stands for, anywhere in the module."""
        if isinstance(node, ast.Import):
            for each in node.names:
                first = each.name.partition(".")[0]
                self._aliases[each.asname or first] = each.name if each.asname else first
                self._add(each.name)
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                name = f"{node.module}.{each.name}"
                self._aliases[each.asname or each.name] = name
                self._add(name)
        elif isinstance(node, ast.arg):
            if node.arg == "launcher" and ast.unparse(node.annotation or node) == "ModuleType":
                self._aliases[node.arg] = "horovod.runner.launch"
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            parts = [each.elts for each in (target, value) if isinstance(each, ast.Tuple)]
            starred = any(isinstance(part, ast.Starred) for each in parts for part in each)
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and not starred:
                pairs = list(zip(target.elts, value.elts, strict=True))
            for each, its in pairs:
                name = self._dotted(its)
                if isinstance(each, ast.Name) and name:
                    self._aliases.setdefault(each.id, name)

    def _look_at(self, node: ast.AST, in_class: bool) -> None:
        owner, name = _access(node)
        if owner is None:
            # Keys of a dictionary may become attributes of a class.
            for key in node.keys if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    self._add_attribute(key.value, self._own)
            return
        dotted = self._dotted(owner)
        if dotted:
            hidden = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            self._add(f"{dotted}.{name}", hidden=hidden)
        elif in_class and isinstance(owner, ast.Name) and owner.id in ("self", "cls"):
            self._add_attribute(name, self._own | self._inherited)
        else:
            self._add_attribute(name, self._own)

    def _dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._aliases.get(node.id)
        owner, name = _access(node)
        dotted = self._dotted(owner) if owner is not None else None
        return dotted and f"{dotted}.{name}"

    def _add(self, dotted: str, *, hidden: bool = False) -> None:
        if dotted.startswith("hvd_autosync") or dotted in _DOCUMENTED:
            return
        dotted = re.sub(r"\.__\w+__$", "", dotted)
        if hidden or _is_private(dotted):
            self.found.add(dotted)

    def _add_attribute(self, name: str, own: set[str]) -> None:
        if _PRIVATE.fullmatch(name) and name not in own and not name.startswith("_hvd_autosync"):
            self.found.add(f".{name}")


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, also of code in strings."""
    for node in ast.walk(tree):
        yield node
        if isinstance(node, ast.Constant) and "import " in str(node.value):
            try:
                yield from ast.walk(ast.parse(node.value))
            except SyntaxError:
                continue


def _access(node: ast.AST) -> tuple[ast.AST | None, str]:
    """Object and name of ``x.n``, ``getattr(x, "n")``, ``vars(x)["n"]``, ``vars(x).pop("n")``."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    key: ast.AST | None = None
    owner: ast.AST | None = None
    if isinstance(node, ast.Subscript):
        owner, key = _namespace(node.value), node.slice
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            owner, key = node.args[:2]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        owner, key = _namespace(node.func.value), node.args[0]
    if owner is not None and isinstance(key, ast.Constant) and isinstance(key.value, str):
        return owner, key.value
    return None, ""


def _namespace(node: ast.AST) -> ast.AST | None:
    """``x`` of ``vars(x)`` and ``x.__dict__``."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return node.args[0]
    return None


def _is_private(dotted: str) -> bool:
    package, *parts = dotted.split(".")
    if any(_PRIVATE.fullmatch(part) for part in parts):
        return True
    documented = vars(horovod.torch)
    return package == "horovod" and not (
        dotted in ("horovod", "horovod.torch")
        or (parts[:1] == ["torch"] and parts[-1] in ("mpi_ops", "functions", "optimizer"))
        or any(p in documented and not isinstance(documented[p], ModuleType) for p in parts)
    )


def defined(tree: ast.AST) -> set[str]:
    """Attributes that classes define: methods, class attributes and those of ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def search(sources: dict[str, str]) -> dict[str, set[str]]:
    """Name -> the modules that use it."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    classes = [n for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    inherited = set().union(*map(defined, classes))
    used = defaultdict(set)
    for path, tree in trees.items():
        for name in Search(tree, inherited).found:
            used[name].add(path)
    return used


def differences(used: dict[str, set[str]], table: tuple[PrivateNames, ...]) -> list[str]:
    """A line for each name that the table lacks, or has without a use, or at other places."""
    lines = []
    seen: dict[PrivateNames, set[str]] = {row: set() for row in table}
    left = dict(used)
    for row in table:
        for name in row.dotted:
            places = left.pop(name, set()) | used.get(f".{name.rpartition('.')[2]}", set())
            if not places:
                lines.append(f"{name} is used nowhere: remove it from PRIVATE_NAMES")
            seen[row] |= places
    attributes = {f".{name.rpartition('.')[2]}" for row in table for name in row.dotted}
    for name in sorted(set(left) - attributes):
        lines.append(f"{name} is not in PRIVATE_NAMES; used in {', '.join(sorted(left[name]))}")
    for row, places in seen.items():
        if places and places != set(row.used_in):
            lines.append(f"{row.owner} {row.names}: used in {sorted(places)}, not {row.used_in}")
    return lines


def test_the_table_has_every_private_name_and_no_other() -> None:
    folders = [ROOT, *(path for path in ROOT.iterdir() if path.is_symlink())]  # rglob follows none
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for folder in folders
        for path in folder.rglob("*.py")
    }
    assert "launch/rendezvous.py" in sources and "runtime/current.py" in sources
    assert differences(search(sources), PRIVATE_NAMES) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._new()", "torch._new"),
        ("import torch as t\nf = t.nn\nf._new()", "torch.nn._new"),
        ("from torch import _new", "torch._new"),
        ("from torch._new import public", "torch._new.public"),
        ("import torch._new.public", "torch._new.public"),
        ("import torch._new\ntorch._new.public", "torch._new.public"),
        ("import torch\ngetattr(torch, '_new', None)", "torch._new"),
        ("import torch\nvars(torch)['Hidden']", "torch.Hidden"),
        ("import torch\ntorch.Tensor.__dict__.get('_new')", "torch.Tensor._new"),
        ("def f(loader):\n    return loader._new", "._new"),
        ("class A:\n    _own = 1\n    def f(self):\n        return self._own + self._new", "._new"),
        ("class A:\n    _own = 1\ndef f(self):\n    return self._new + self._own", "._new"),
        ("methods = {'_new': 1}", "._new"),
        ("from horovod.torch import mpi_ops\nmpi_ops.rank(), mpi_ops.new()", "*.mpi_ops.new"),
        ("from horovod.runner.new import it", "horovod.runner.new.it"),
        ("CODE = 'from horovod.runner import it'", "horovod.runner.it"),
        ("def f(launcher: ModuleType):\n    launcher.new = 1", "horovod.runner.launch.new"),
    ],
)
def test_the_search_finds(source: str, name: str) -> None:
    assert [*search({"a.py": source})] == [name.replace("*", "horovod.torch")]


def test_documented_names_and_our_own_are_not_private() -> None:
    source = """
import os, torch, horovod
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import rank
from hvd_autosync.util import versions
class A:
    def __init__(self): self._own = torch.__version__, horovod.__version__
    def f(self, other): return other._own, self._inherited, os._exit, versions._x
"""
    base = "class B:\n    def _inherited(self): pass"
    assert search({"a.py": source, "b.py": base}) == {}


def test_what_the_table_lacks_or_has_too_much_is_told() -> None:
    row = PrivateNames("torch.Tensor", "_new _old", ("a.py",), "to test it")
    missing, renamed = differences({"._new": {"b.py"}, "torch._more": {"b.py"}}, (row,))[1:]
    assert missing == "torch._more is not in PRIVATE_NAMES; used in b.py"
    assert renamed == "torch.Tensor _new _old: used in ['b.py'], not ('a.py',)"
    (unused,) = differences({"._new": {"a.py"}}, (row,))
    assert unused == "torch.Tensor._old is used nowhere: remove it from PRIVATE_NAMES"


def test_the_installed_packages_have_every_name() -> None:
    assert list(private_names.missing_names()) == []


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._gone",
        "torch._gone.module.name",
        "torch.utils.data.dataloader._BaseDataLoaderIter._gone",
        "torch.utils.data.dataloader._Gone._num_yielded",
        "torch.utils.data.dataloader._BaseDataLoaderIter._num_yielded.more",
        "horovod.torch.mpi_ops.mpi_lib.horovod_torch_gone",
        "horovod.torch.mpi_ops._basics.MPI_LIB_CTYPES.horovod_gone",
        "horovod.runner.launch._gone",
    ],
)
def test_a_name_that_is_gone_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, _, last = name.rpartition(".")
    row = PrivateNames(owner, last, (), "")
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", (row,))
    assert list(private_names.missing_names()) == [(name, row)]


def test_names_of_what_is_not_installed_or_too_old_are_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = (
        PrivateNames("no_such_package", "_gone", (), ""),
        PrivateNames("torch", "_gone", (), "", since="99.0"),
    )
    monkeypatch.setattr(private_names, "PRIVATE_NAMES", rows)
    assert list(private_names.missing_names()) == []


def test_the_tested_versions_are_those_that_are_set_up() -> None:
    repository = Path(__file__).parents[2]
    torch, horovod_ = (private_names.TESTED_VERSIONS[each] for each in ("torch", "horovod"))
    assert f"torch=={torch})\n" in (repository / "Makefile").read_text()
    build = (repository / "tools" / "horovod_build.py").read_text()
    assert f'HOROVOD_VERSION = "{horovod_}"' in build


def test_no_package_that_is_installed_with_this_one_is_in_the_table() -> None:
    """Such a package would need an upper bound, and requirements have lower bounds only."""
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    required = re.findall(r"^[\w-]+", setup["options"]["install_requires"], re.M)
    packages = {row.package for row in PRIVATE_NAMES}
    assert "numpy" in required and packages.isdisjoint(each.lower() for each in required)


def test_a_newer_version_is_untested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not private_names.untested("torch") and "torch" in sys.modules
    monkeypatch.setattr(private_names, "version", lambda _: "2.14.0+cpu")
    assert private_names.untested("torch")
    assert private_names.is_newer("2.14", "2.9.1") and not private_names.is_newer("2.9.3", "2.9")
