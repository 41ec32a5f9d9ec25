"""``import hvd_autosync.torch as hvd``: Horovod's API, and strategies by choice."""

import contextlib
import inspect
import os
import pathlib
import tempfile
import unittest.mock
import warnings

import horovod.torch
import torch
from common import HOROVODS, HOROVODS_BROADCAST, RUN, assert_close, batch, mlp, raises, sgd

import hvd_autosync.torch as hvd
from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.optimizer.arguments import EXCHANGE_KNOBS
from hvd_autosync.runtime.trial.profiling import device_name
from hvd_autosync.search_space.sync_plan import SyncPlan

BUCKETS = {"buckets": 2, "large_slices": 3}
CLASSES = {"large": ("*.weight",)}


def wrap(model, **options):
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def plan_of(distributed):
    plan, classes = distributed._sync.plan.exchange, distributed._sync.plan.classes
    return plan.buckets, plan.large.slices, classes


def case_everything_of_horovod_is_there():
    for name in dir(horovod.torch):
        if name != "DistributedOptimizer" and not name.startswith("__"):
            assert getattr(hvd, name) is getattr(horovod.torch, name), name
    for their_own, our_own in (
        (HOROVODS, hvd.DistributedOptimizer),
        (HOROVODS_BROADCAST, hvd.broadcast_optimizer_state),
    ):
        assert our_own is not their_own
        theirs = list(inspect.signature(their_own).parameters.values())
        ours = list(inspect.signature(our_own).parameters.values())
        assert [p.name for p in ours[: len(theirs)]] == [p.name for p in theirs]
        assert [p.default for p in ours[: len(theirs)]] == [p.default for p in theirs]


def case_without_a_strategy_it_is_horovods():
    assert not hasattr(wrap(mlp()), "_sync")


def case_a_strategy_of_the_launch_is_none_of_the_scripts():
    current.sync_plan = SyncPlan()
    try:
        assert not wrap(mlp())._sync.chosen
    finally:
        current.sync_plan = None


def case_arguments_that_say_how_to_exchange_cannot_be_combined_with_a_strategy():
    """Before anything is read, which would wait for ranks outside of a process set."""
    for strategy in ("no-such-file", "tuned", BUCKETS):
        with raises(AutosyncError, "cannot be combined"):
            wrap(mlp(), strategy=strategy, compression=hvd.Compression.fp16)


def case_a_strategy_that_does_not_fit_is_an_error_in_a_training_that_is_tuned_live():
    """It would not be where Horovod's own optimizer could take the place of the default."""
    current.live = unittest.mock.Mock()
    try:
        with raises(AutosyncError):
            wrap(mlp(), strategy={"large_exchange": "hierarchical"}, classes=CLASSES)
    finally:
        current.live = None


def case_a_strategy_as_knobs():
    model, reference = mlp(), mlp()
    ours = wrap(model, strategy=BUCKETS, classes=CLASSES)
    theirs = HOROVODS(sgd(reference), reference.named_parameters())
    assert plan_of(ours) == (2, 3, CLASSES)
    assert [*RUN._optimizers._fixed.values()][-1] == EXCHANGE_KNOBS  # the script has decided
    assert ours._sync.chosen
    for step in range(4):
        for network, optimizer in ((model, ours), (reference, theirs)):
            optimizer.zero_grad()
            network(batch(step)).pow(2).mean().backward()
            optimizer.step()
    assert_close(list(model.parameters()), list(reference.parameters()))


def case_a_strategy_as_a_file():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "strategy.toml")
        path.write_text('[knobs]\nbuckets = 2\nlarge_slices = 3\n[classes]\nlarge = ["*.weight"]\n')
        assert plan_of(wrap(mlp(), strategy=path)) == (2, 3, CLASSES)
        assert plan_of(wrap(mlp(), strategy=str(path))) == (2, 3, CLASSES)
        with raises(AutosyncError, "cannot be read"):
            wrap(mlp(), strategy=str(path) + "x")


def case_strategies_that_cannot_work_are_refused():
    for knobs, named in (
        ({"speed": 11}, "'speed'"),
        ({"buckets": -1}, "out of bounds"),
        ({"large_slices": 2}, "no parameter is of class large"),
    ):
        with raises(AutosyncError, named):
            wrap(mlp(), strategy=knobs)


def case_knobs_of_the_launch_are_reported():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(mlp(), strategy={"cycle_time_ms": 7.5, "buckets": 2})
    warned = [w for w in caught if "HOROVOD_CYCLE_TIME=7.5" in str(w.message)]
    assert bool(warned) == (hvd.rank() == 0)


@contextlib.contextmanager
def store(model, slots):
    """A store in which some model was tuned."""
    from hvd_autosync.search_space import (
        HorovodBuild,
        Host,
        ModelProfile,
        ParameterProfile,
        Resources,
        SearchSpace,
        Strategy,
        Task,
        catalogue_knob,
    )
    from hvd_autosync.traces import StudyStatus, TraceStore

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "traces.db")
        profile = ModelProfile(
            tuple(
                ParameterProfile(name, tuple(p.shape), "float32", ready_order=0)
                for name, p in model.named_parameters()
            )
        )
        hosts = (Host("somewhere", slots),)
        traces = TraceStore(path)
        study = traces.create_study(job_key="k", command=(), settings={}, versions={}).study_id
        task = Task(
            profile,
            Resources(
                hosts, device_name(torch.empty(0).device), HorovodBuild("0.28.1", True, True)
            ),
        )
        traces.describe_task(study, task, SearchSpace((catalogue_knob("buckets"),)))
        traces.finish(study, StudyStatus.FINISHED, {}, Strategy({"buckets": 3}))
        traces.close()
        os.environ["HVD_AUTOSYNC_STORE"] = path
        try:
            yield
        finally:
            del os.environ["HVD_AUTOSYNC_STORE"]


def case_the_best_known_strategy():
    with store(mlp(), hvd.size()):
        assert plan_of(wrap(mlp(), strategy="tuned"))[0] == 3
        other = mlp(sizes=(12, 5, 3))
        assert not hasattr(wrap(other, strategy="tuned"), "_sync")
    with store(mlp(), hvd.size() + 1):
        assert not hasattr(wrap(mlp(), strategy="tuned"), "_sync")
