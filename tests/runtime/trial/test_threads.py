"""The number of threads of torch, if a script chooses it."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from hvd_autosync.runtime import current  # noqa: E402
from hvd_autosync.runtime.install import activation, hooks  # noqa: E402
from hvd_autosync.runtime.trial.threads import ScriptThreads  # noqa: E402
from hvd_autosync.search_space.families.transport import THREADS_VARIABLE  # noqa: E402


@pytest.fixture
def number(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Torch's own number, which each test leaves as it was."""
    before: int = torch.get_num_threads()
    for name in ("threads_variable", "threads_at_import"):
        monkeypatch.setattr(current, name, str(before))
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize("forked", [True, False])
def test_a_forked_script_that_sets_the_variable_has_as_many_threads(
    number: int, forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a process of its own, where torch is loaded after it."""
    monkeypatch.setattr(current, "torch_was_loaded", forked)
    threads = ScriptThreads()
    threads.follow()
    assert torch.get_num_threads() == number and not threads.chosen()
    monkeypatch.setattr(current, "threads_at_import", str(number + 2))
    threads.follow()
    assert torch.get_num_threads() == number + 2 * forked and threads.chosen()


def test_torchs_function_comes_before_the_variable(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "torch_was_loaded", True)
    threads = ScriptThreads()
    monkeypatch.setattr(current, "threads_at_import", str(number + 2))
    torch.set_num_threads(number + 1)
    threads.follow()
    assert torch.get_num_threads() == number + 1 and threads.chosen()


@pytest.mark.parametrize("called", [True, False])
def test_a_script_that_has_called_torchs_function_before_it_imports_horovod_has_chosen(
    number: int, called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("torch_was_loaded", False),
        ("loaded_threads", number),
        ("script_set_threads", False),
    ):
        monkeypatch.setattr(current, name, value)
    monkeypatch.setenv(THREADS_VARIABLE, str(number + 2))
    if called:
        torch.set_num_threads(number + 1)
    activation._set_threads({"threads_per_rank": number + 2})
    assert torch.get_num_threads() == number + (1 if called else 2)
    assert ScriptThreads().chosen() is called


@pytest.mark.parametrize("value", ["", "many"])
def test_a_variable_that_is_no_number_sets_none(
    number: int, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "torch_was_loaded", True)
    threads = ScriptThreads()
    monkeypatch.setattr(current, "threads_at_import", value)
    threads.follow()
    assert torch.get_num_threads() == number


@pytest.mark.parametrize("trial", [True, False])
def test_the_variable_counts_as_it_is_where_a_forked_script_imports_torch(
    trial: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sets later has no effect in a process of its own."""
    imports = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", imports)
    for name, value in (("trial", trial), ("torch_was_loaded", True), ("threads_at_import", None)):
        monkeypatch.setattr(current, name, value)
    hooks.watch_first_import()
    lines = "import json", "from .torch import nn", "from torch import nn", "import torch"
    for value, line in zip("2345", lines, strict=True):
        monkeypatch.setenv(THREADS_VARIABLE, value)
        with contextlib.suppress(ImportError):
            exec(line, {"__package__": "json"})
        if value < "4":
            assert current.threads_at_import is None
    assert current.threads_at_import == ("4" if trial else None)
    assert builtins.__import__ is imports
