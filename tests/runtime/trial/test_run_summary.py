"""What a run of a recurring job tells the driver."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime import current  # noqa: E402
from hvd_autosync.runtime.measure.losses import Losses  # noqa: E402
from hvd_autosync.runtime.optimizer import optimizer as optimizer_module  # noqa: E402
from hvd_autosync.runtime.trial import run_summary as run_summary  # noqa: E402
from hvd_autosync.runtime.trial.run_summary import RunSummary  # noqa: E402
from hvd_autosync.search_space.trial import LOSS_WINDOW, OUTCOME_FILE  # noqa: E402


class Optimizer:
    """Something that is not the other."""

    process_set: object


class Training:
    """Steps of a training of two ranks on a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
        monkeypatch.setattr(run_summary, "rank", lambda: rank)
        monkeypatch.setattr(run_summary, "size", lambda: 2)
        self.now, self.losses, self.optimizer = 0.0, Losses(), Optimizer()
        self.file = folder / OUTCOME_FILE
        self.run_summary = RunSummary(self.losses, str(folder), clock=lambda: self.now)

    def steps(self, count: int, loss: float = 1.0, seconds: float = 0.01) -> None:
        loader = torch.utils.data.DataLoader(list(range(4 * count)), batch_size=4)
        for _ in loader:
            self.now += seconds
            self.losses.seen(torch.tensor(loss))
            self.run_summary.optimizer_stepped(self.optimizer)

    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Training:
    return Training(tmp_path, monkeypatch)


def test_samples_of_all_ranks_and_the_last_losses(training: Training) -> None:
    training.steps(100, loss=5.0)
    training.steps(5 * LOSS_WINDOW, loss=2.0)
    training.run_summary.write()
    said = training.said()
    assert said["samples"] == 2 * 4 * (100 + 5 * LOSS_WINDOW)
    assert (said["steps"], said["metric"]) == (100 + 5 * LOSS_WINDOW, None)
    assert said["loss"] == pytest.approx(2.0)


def test_the_loss_of_a_skipped_step_is_no_part_of_the_metric(training: Training) -> None:
    training.steps(3, loss=2.0)
    with training.losses.skipping():
        training.steps(1, loss=float("nan"))
    training.run_summary.write()
    assert (training.said()["steps"], training.said()["loss"]) == (4, pytest.approx(2.0))


def test_steps_of_some_ranks_are_none(training: Training) -> None:
    of_some = Optimizer()
    of_some.process_set = object()
    for _ in range(3):
        training.run_summary.optimizer_stepped(of_some)
        training.steps(1)
    training.run_summary.write()
    assert training.said()["steps"] == 3


def test_several_losses_are_no_metric(training: Training) -> None:
    optimizers = training.optimizer, Optimizer()
    for _ in range(3):
        for optimizer in optimizers:
            training.losses.seen(torch.tensor(1.0))
            training.losses.stepped(optimizer)
            training.run_summary.optimizer_stepped(optimizer)
    training.run_summary.write()
    assert training.said()["steps"] == 3 and training.said()["loss"] is None


def test_the_last_metric_counts_and_is_written_at_once(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "run_summary", training.run_summary)
    training.steps(3)
    current.outcome(0.5)
    current.outcome(torch.tensor(0.75))
    assert training.said()["metric"] == 0.75


def test_it_is_written_while_the_training_runs(training: Training) -> None:
    training.steps(LOSS_WINDOW, seconds=0.01)
    assert not training.file.exists()
    training.steps(LOSS_WINDOW, seconds=1.0)
    assert training.said()["samples"] == 2 * 4 * 2 * LOSS_WINDOW


def test_other_ranks_are_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch, rank=1)
    training.steps(3)
    training.run_summary.outcome(0.5)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_where_the_driver_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "absent", Path("")):
        training = Training(folder, monkeypatch)
        training.steps(3)
        training.run_summary._folder = "" if folder == Path("") else str(folder)
        training.run_summary.outcome(0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_recorded(training: Training) -> None:
    training.steps(3, loss=float("nan"))
    training.run_summary.write()
    assert training.said()["loss"] != training.said()["loss"]


def wrapped(kind: Any = torch.optim.Adam) -> Any:
    class Wrapped(kind):
        """In place of what Horovod makes of the script's optimizer."""

        def synchronize(self) -> None:
            """Nothing to wait for."""

    own = Wrapped(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    return optimizer_module.DistributedOptimizer(own)


def stepped() -> Any:
    """A wrapped optimizer that has made a step, as :func:`broadcast_optimizer_state` does."""
    made = wrapped()
    for group in made.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    torch.optim.Adam.step(made)
    return made


def from_a_checkpoint(training: Training) -> None:
    wrapped().load_state_dict(stepped().state_dict())


def without_counters(training: Training) -> None:
    """As of SGD with momentum."""
    state = {0: {"momentum_buffer": torch.ones(1, 2)}}
    made = wrapped(torch.optim.SGD)
    made.load_state_dict({**made.state_dict(), "state": state})


def of_a_new_optimizer(training: Training) -> None:
    wrapped().load_state_dict(wrapped().state_dict())


def that_has_counted_no_step(training: Training) -> None:
    """As of Adagrad, which has states from the start."""
    state = {0: {"step": torch.tensor(0.0), "sum": torch.zeros(1, 2)}}
    wrapped().load_state_dict({**wrapped().state_dict(), "state": state})


def its_own(training: Training) -> None:
    """``load_state_dict(broadcast_object(state_dict()))`` after ``broadcast_optimizer_state()``."""
    made = stepped()
    made.load_state_dict(made.state_dict())


def after_a_step(training: Training) -> None:
    """As where a script returns to its best epoch."""
    made = wrapped()
    training.steps(1)
    made.load_state_dict(copy.deepcopy(stepped().state_dict()))


@pytest.mark.parametrize(
    ("load", "resumed"),
    [
        (from_a_checkpoint, True),
        (without_counters, True),
        (of_a_new_optimizer, False),
        (that_has_counted_no_step, False),
        (its_own, False),
        (after_a_step, False),
    ],
)
def test_a_state_that_is_loaded_before_the_first_step_is_a_checkpoint(
    load: Callable[[Training], None],
    resumed: bool,
    training: Training,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(optimizer_module, "_horovods_own", lambda own, named, **_: own)
    monkeypatch.setattr(current, "run_summary", training.run_summary)
    load(training)
    training.steps(3)
    training.run_summary.write()
    assert training.said()["resumed"] is resumed


def test_outside_of_recurring_jobs_nothing_happens() -> None:
    assert current.run_summary is None
    current.outcome(0.5)
