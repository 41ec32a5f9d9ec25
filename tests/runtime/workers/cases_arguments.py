"""The arguments of our optimizer: the same errors as Horovod's; the script's choice wins."""

import inspect
import itertools
import warnings

import horovod.torch
import horovod.torch as hvd
import torch
from common import HOROVODS, OURS, exchange_of, mlp, raises, strategy, wrap
from torch import nn

from hvd_autosync.runtime.exchange.dispatcher import Dispatcher


def _both_raise(error, text, **options):
    for factory in (HOROVODS, OURS):
        with raises(error, text):
            wrap(factory, mlp(), **options)


def case_replaces_horovods_own():
    from horovod.torch.optimizer import DistributedOptimizer

    assert hvd.DistributedOptimizer is DistributedOptimizer is OURS is not HOROVODS
    assert OURS.__module__ == HOROVODS.__module__


def case_same_signature():
    ours, theirs = (inspect.signature(f).parameters for f in (OURS, HOROVODS))
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]


def case_duplicate_names():
    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    base = torch.optim.SGD(itertools.chain(left.parameters(), right.parameters()), lr=0.1)
    with raises(ValueError, "must be unique"):
        OURS(base, itertools.chain(left.named_parameters(), right.named_parameters()))


def case_missing_names():
    model = mlp()
    with raises(ValueError, "were not named"):
        wrap(OURS, model, named_parameters=list(model.named_parameters())[:1])


def case_names_that_are_no_pairs():
    model = mlp()
    with raises(ValueError, "sequence of tuples"):
        wrap(OURS, model, named_parameters=model.parameters())


def case_no_backward_passes():
    _both_raise(ValueError, "must be > 0", backward_passes_per_step=0)


def case_predivide_without_average():
    _both_raise(ValueError, "op != Average", gradient_predivide_factor=2.0, op=hvd.Sum)


def case_invalid_groups():
    _both_raise(ValueError, "groups should be", groups=0)
    _both_raise(ValueError, "groups should be", groups=-1)
    _both_raise(ValueError, "must consist of torch.Tensor", groups=[["weight"]])
    for factory in (HOROVODS, OURS):
        model = mlp()
        weight = next(model.parameters())
        with raises(ValueError, "only appear once"):
            wrap(factory, model, groups=[[weight], [weight]])


def case_num_groups_is_deprecated():
    with strategy(buckets=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distributed = wrap(OURS, mlp(), num_groups=3)
    assert distributed._groups == 3
    assert [w for w in caught if issubclass(w.category, DeprecationWarning)]


def case_strategy_fills_what_is_open():
    with strategy(buckets=2):
        distributed = wrap(OURS, mlp())
    assert isinstance(exchange_of(distributed).dispatcher, Dispatcher)


def case_script_decides():
    class Own(hvd.Compression.none):
        pass

    own = hvd.add_process_set([0])
    try:
        for options in (
            {"compression": Own},
            {"groups": 5},
            {"sparse_as_dense": True},
            {"process_set": own},
        ):
            with strategy(buckets=2):
                assert not hasattr(wrap(OURS, mlp(), **options), "_sync"), options
    finally:
        hvd.remove_process_set(own)


def case_other_imports_are_untouched():
    assert horovod.torch.allreduce.__module__ == "horovod.torch.mpi_ops"
    assert horovod.torch.__spec__.loader is horovod.torch.__loader__
    assert type(horovod.torch.__loader__).__module__ == "_frozen_importlib_external"
