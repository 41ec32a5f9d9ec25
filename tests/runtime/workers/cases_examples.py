"""Some steps of every example: each exchange trains what Horovod's own optimizer trains."""

import functools
import importlib.util
import itertools
import sys
import types
from pathlib import Path

import horovod.torch as hvd
import torch
from cases_exchanges import BY_ROWS, HIERARCHICAL, SHARDED, plan
from common import HOROVODS, OURS

from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL_NCF = ("--factors", "8", "--batch-size", "128")
STEPS = 25
#: A matrix or table of so many elements is large in these models.
LARGE = 4096
FLAT = {
    "buckets, rows, sharded": ExchangePlan(3, "ordered", "arrival", BY_ROWS, SHARDED),
    "slices, sharded tables": ExchangePlan(0, "ordered", "arrival", SHARDED, ClassPlan(slices=4)),
    "priority": ExchangePlan(4, "size", "priority", BY_ROWS),
}
TWO_LEVELS = {
    "hierarchical": ExchangePlan(2, "ordered", "arrival", *[HIERARCHICAL] * 3),
    "hierarchical, rows": ExchangePlan(0, "ordered", "arrival", BY_ROWS, HIERARCHICAL),
}


class Enough(BaseException):
    """So many steps were made."""


def load(name):
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    if hasattr(module, "read_functions"):  # of the whole standard library
        module.read_functions = lambda read=module.read_functions: itertools.islice(read(), 2000)
    for reader in ("load_data", "load_text"):
        if hasattr(module, reader):
            setattr(module, reader, functools.cache(getattr(module, reader)))
    return module


def classes_of(named):
    classes = {"embedding": [], "large": []}
    for name, parameter in named:
        if parameter.dim() > 1 and parameter.numel() >= LARGE:
            table = any(word in name for word in ("gmf", "mlp_", "token", "embed"))
            classes["embedding" if table else "large"].append(name)
    return {name: tuple(names) for name, names in classes.items()}


def train(module, words, factory, chosen=None):
    """The parameters before, and after some steps of the example's ``main()``."""
    seen = {}

    def distribute(optimizer, named_parameters, **options):
        named = list(named_parameters)
        with plan(chosen, classes_of(named)):
            distributed = factory(optimizer, named_parameters=named, **options)
        seen["before"] = [parameter.detach().clone() for _, parameter in named]
        seen["after"] = [parameter for _, parameter in named]
        seen["steps"], seen["optimizer"] = 0, distributed
        step = distributed.step

        def counted(self, *args):
            result = step(*args)
            seen["steps"] += 1
            if seen["steps"] == STEPS:
                raise Enough
            return result

        distributed.step = types.MethodType(counted, distributed)
        return distributed

    arguments, before = sys.argv, hvd.DistributedOptimizer
    sys.argv, hvd.DistributedOptimizer = [module.__file__, *words], distribute
    try:
        module.main()
        raise AssertionError(f"{words} makes only {seen['steps']} steps")
    except Enough:
        pass
    finally:
        sys.argv, hvd.DistributedOptimizer = arguments, before
    seen["optimizer"].state_dict()  # no step waits any more
    return seen["before"], [parameter.detach().clone() for parameter in seen["after"]]


def compare(name, *words, most=1e-6):
    module = load(name)
    plans = FLAT
    if hvd.cross_size() > 1:
        # Two summands have one order; with four, each exchange adds in an order of its own, which
        # training amplifies. So the last digit is one that does not matter.
        torch.set_default_dtype(torch.float64)
        plans, most = TWO_LEVELS, 1e-9
    try:
        before, expected = train(module, words, HOROVODS)
        moved = distance(expected, before)
        for label, chosen in plans.items():
            _, ours = train(module, words, OURS, chosen)
            off = distance(ours, expected) / moved
            assert off < most, (label, off)
    finally:
        torch.set_default_dtype(torch.float32)


def distance(left, right):
    parts = [(a - b).double().norm() for a, b in zip(left, right, strict=True)]
    return torch.stack(parts).norm().item()


def case_digits():
    compare("train_digits", "--hidden", "256")


def case_ncf():
    compare("train_ncf", *SMALL_NCF)


def case_sparse_ncf():
    # A row that one rank's batch touches more than once is summed in an order of its own as well.
    compare("train_ncf", "--sparse", *SMALL_NCF, most=1e-4)


def case_language_model():
    compare("train_lm", "--max-mb", "0.5", "--width", "64", "--batch-size", "4")


def case_vgg():
    compare("synthetic_benchmark", "--model", "vgg", "--width", "8")


def case_resnet():
    compare("synthetic_benchmark", "--model", "resnet", "--width", "4", "--depth", "2")


def case_bert():
    compare("synthetic_benchmark", "--model", "bert", "--width", "64", "--depth", "2")
