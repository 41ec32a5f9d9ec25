"""Training loops as scripts have them (``tests/scripts/loops``): each exchange trains the same."""

import importlib.util
from pathlib import Path

import cases_factors
import horovod.torch as hvd
import torch
from cases_exchanges import BY_FACTORS, BY_ROWS, SHARDED, plan
from common import HOROVODS, OURS, assert_close, assert_same_on_all_ranks

from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

LOOPS = Path(__file__).parents[2] / "scripts" / "loops"
PLANS = {
    "as Horovod": ExchangePlan(),
    "buckets": ExchangePlan(buckets=3),
    "sharded": ExchangePlan(large=SHARDED),
    "all sharded": ExchangePlan(2, "ordered", "arrival", SHARDED, SHARDED, SHARDED),
    "factors": ExchangePlan(large=BY_FACTORS),
    "rows": ExchangePlan(embedding=BY_ROWS),
    "slices": ExchangePlan(2, "size", large=ClassPlan(slices=2)),
    "lossless": ExchangePlan(2, large=ClassPlan(lossless=True)),
    "priority": ExchangePlan(order="priority"),
    "mixed": ExchangePlan(3, "ordered", "priority", BY_ROWS, BY_FACTORS, SHARDED),
}


def classes_of(named):
    """Tables are embeddings, other matrices large."""
    tables = tuple(name for name, _ in named if "embed" in name)
    large = [name for name, parameter in named if parameter.dim() == 2 and name not in tables]
    return {"embedding": tables, "large": tuple(large)}


def load(name):
    specification = importlib.util.spec_from_file_location(name, LOOPS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run(loop, factory, chosen, options):
    """What the loop has trained, name by name."""

    def distribute(optimizer, named_parameters, **arguments):
        named = list(named_parameters)
        with plan(chosen, classes_of(named)):
            return factory(optimizer, named_parameters=named, **arguments)

    before, hvd.DistributedOptimizer = hvd.DistributedOptimizer, distribute
    try:
        trained = loop.train(**options)
    finally:
        hvd.DistributedOptimizer = before
    return {name: tensor.detach().clone() for name, tensor in trained.items()}


def compare(name, *, apart=(), plans=PLANS, **options):
    """Train under both; parameters whose names begin with ``apart`` differ between the ranks."""
    loop = load(name)
    expected = run(loop, HOROVODS, None, options)
    for label, chosen in plans.items():
        ours = run(loop, OURS, chosen, options)
        assert ours.keys() == expected.keys()
        try:
            assert_close(ours.values(), expected.values(), atol=2e-5, rtol=2e-5)
            common = [tensor for key, tensor in ours.items() if not key.startswith(apart)]
            assert_same_on_all_ranks(common)
        except AssertionError as error:
            raise AssertionError(f"under the plan {label!r}") from error
    for key, tensor in expected.items():
        if apart and key.startswith(apart):
            own = hvd.allgather(tensor.flatten()[None], name=f"apart.{key}")
            assert not torch.equal(own[0], own[1]), key


def case_transformer():
    compare("transformer", steps=12)


def case_transformer_with_an_output_layer_of_its_own():
    compare("transformer", steps=12, tied=False)


def case_module_loop():
    compare("module_loop")


def case_checkpointing():
    compare("checkpointing")


def case_reentrant_checkpointing():
    compare("checkpointing", reentrant=True)


def case_gan():
    compare("gan", steps=16)


def case_gan_that_drops_gradients():
    compare("gan", freeze=False, steps=16)


def case_added_group_reduced_by_hand():
    compare("added_group")


def case_added_group_in_another_optimizer():
    compare("added_group", how="again", steps=16)


def case_added_group_that_nobody_reduces():
    compare("added_group", how="not at all", apart=("added",))


def case_ema():
    compare("ema")


def case_frozen():
    compare("frozen")


def case_frozen_in_another_optimizer():
    compare("frozen", how="again")


def case_frozen_when_wrapped():
    compare("frozen", how="too late", apart=("body", "embedding"))


# From the first compilation on no update is deferred in this process: these cases come last.


def case_compiled():
    compare("compiled", backend="aot_eager", steps=15)


def case_compiled_by_inductor():
    compare("compiled", backend="inductor", steps=15)


def case_no_factors_of_compiled_modules():
    def make():
        model = cases_factors.Net()
        model.second.compile(backend="aot_eager")
        return model

    cases_factors.compare(None, make=make, steps=8, without="second.weight")
