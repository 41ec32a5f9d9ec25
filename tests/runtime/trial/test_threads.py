"""The number of threads of torch, if a script chooses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from hvd_autosync.runtime import current  # noqa: E402
from hvd_autosync.runtime.trial.threads import ScriptThreads  # noqa: E402
from hvd_autosync.search_space.families.transport import THREADS_VARIABLE  # noqa: E402


@pytest.fixture
def number(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Torch's own number, which each test leaves as it was."""
    before: int = torch.get_num_threads()
    monkeypatch.setattr(current, "threads_variable", str(before))
    monkeypatch.setenv(THREADS_VARIABLE, str(before))
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
    monkeypatch.setenv(THREADS_VARIABLE, str(number + 2))
    threads.follow()
    assert torch.get_num_threads() == number + 2 * forked and threads.chosen()


def test_torchs_function_comes_before_the_variable(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "torch_was_loaded", True)
    threads = ScriptThreads()
    monkeypatch.setenv(THREADS_VARIABLE, str(number + 2))
    torch.set_num_threads(number + 1)
    threads.follow()
    assert torch.get_num_threads() == number + 1 and threads.chosen()


@pytest.mark.parametrize("value", ["", "many"])
def test_a_variable_that_is_no_number_sets_none(
    number: int, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "torch_was_loaded", True)
    threads = ScriptThreads()
    monkeypatch.setenv(THREADS_VARIABLE, value)
    threads.follow()
    assert torch.get_num_threads() == number
