"""Training under our optimizer against training under Horovod's, in the same process."""

import unittest
import warnings

import horovod.torch as hvd
import torch
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    mlp,
    raises,
    sgd,
    strategy,
    train,
    wrap,
)
from torch import nn


def case_default_is_identical():
    ours = train(OURS)
    assert_identical(ours, train(HOROVODS))
    assert_same_on_all_ranks(ours)


def case_double_precision():
    assert_identical(train(OURS, dtype=torch.float64), train(HOROVODS, dtype=torch.float64))


def case_adam():
    def adam(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    assert_identical(train(OURS, base=adam), train(HOROVODS, base=adam))


def case_sum():
    assert_identical(train(OURS, op=hvd.Sum), train(HOROVODS, op=hvd.Sum))


def case_gradient_predivide_factor():
    factor = {"gradient_predivide_factor": 2.0}
    with strategy(buckets=2):
        ours = train(OURS, **factor)
    assert_identical(ours, train(HOROVODS, **factor))
    assert_close(ours, train(HOROVODS))


def case_buckets_of_the_strategy():
    for rule in ("ordered", "size"):
        with strategy(buckets=2, bucket_rule=rule):
            assert_identical(train(OURS), train(HOROVODS))


def case_more_buckets_than_parameters():
    with strategy(buckets=100):
        assert_close(train(OURS), train(HOROVODS))


def case_buckets_of_mixed_types():
    def run(factory):
        torch.manual_seed(3)
        parts = nn.ModuleList([nn.Linear(12, 4), nn.Linear(12, 4).double()])
        distributed = wrap(factory, parts)
        for step in range(3):
            distributed.zero_grad()
            x = batch(step)
            (parts[0](x).pow(2).mean() + parts[1](x.double()).pow(2).mean()).backward()
            distributed.step()
        return [parameter.detach() for parameter in parts.parameters()]

    with strategy(buckets=1):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_groups_as_lists():
    def run(factory):
        model = mlp()
        weights = [p for p in model.parameters() if p.dim() == 2]
        distributed = wrap(factory, model, groups=[weights[:2], weights[2:]])
        assert len(distributed._p_to_group[weights[0]]) == 2
        for step in range(3):
            distributed.zero_grad()
            model(batch(step)).pow(2).mean().backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    with strategy(buckets=3):
        ours = run(OURS)
    assert_identical(ours, run(HOROVODS))


def _train_embedding(factory, **options):
    torch.manual_seed(5)
    model = nn.Embedding(30, 4, sparse=True)
    distributed = wrap(factory, model, sgd(model, momentum=0), **options)
    for step in range(3):
        distributed.zero_grad()
        rows = torch.tensor([0, 1 + hvd.rank(), 10 + step])
        model(rows).pow(2).sum().backward()
        assert model.weight.grad.is_sparse
        distributed.step()
    return [model.weight.detach()]


def case_sparse_gradients():
    assert_close(_train_embedding(OURS), _train_embedding(HOROVODS), atol=0, rtol=1e-6)


def case_sparse_as_dense():
    with strategy(buckets=1):
        ours = _train_embedding(OURS, sparse_as_dense=True)
    assert_identical(ours, _train_embedding(HOROVODS, sparse_as_dense=True))


def case_gradient_aggregation():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model, backward_passes_per_step=3)
        for step in range(3):
            distributed.zero_grad()
            for part in range(3):
                (model(batch(3 * step + part)).pow(2).mean() / 3).backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert_identical(run(OURS), run(HOROVODS))
    with strategy(buckets=2):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_set_backward_passes_per_step():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model)
        for step, passes in enumerate((1, 2, 2, 1)):
            distributed.set_backward_passes_per_step(passes)
            distributed.zero_grad()
            for part in range(passes):
                model(batch(10 * step + part)).pow(2).mean().backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert_identical(run(OURS), run(HOROVODS))


def case_step_before_all_backward_passes():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model, backward_passes_per_step=4)
        model(batch(0)).pow(2).mean().backward()
        distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    ours = run(OURS)
    assert_identical(ours, run(HOROVODS))
    assert_same_on_all_ranks(ours)


def case_too_many_backward_passes():
    model = mlp()
    distributed = wrap(OURS, model)
    model(batch(0)).pow(2).mean().backward()
    with raises(AssertionError, "backward_passes_per_step"):
        model(batch(1)).pow(2).mean().backward()
    distributed.step()


def case_zero_grad_between_backward_and_step():
    model = mlp()
    distributed = wrap(OURS, model)
    model(batch(0)).pow(2).mean().backward()
    with raises(AssertionError, "race condition"):
        distributed.zero_grad()
    distributed.step()
    distributed.zero_grad()


def case_gradient_clipping():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(4):
                distributed.zero_grad()
                model(10 * batch(step)).pow(2).sum().backward()
                distributed.synchronize()
                before = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert before > 0.1
                with distributed.skip_synchronize():
                    distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert_identical(run(OURS), run(HOROVODS))


def case_synchronize_without_skip_warns():
    model = mlp()
    distributed = wrap(OURS, model)
    model(batch(0)).pow(2).mean().backward()
    distributed.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        distributed.step()
    assert [w for w in caught if "skip_synchronize" in str(w.message)]


class TwoHeads(nn.Module):
    """Each rank's loss needs another head, so each head has no gradient on some rank."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(12, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x):
        body = torch.tanh(self.body(x))
        return self.left(body) if hvd.rank() == 0 else self.right(body)


def case_parameters_without_gradient_on_some_rank():
    def run(factory):
        torch.manual_seed(11)
        model = TwoHeads()
        distributed = wrap(factory, model)
        for step in range(4):
            distributed.zero_grad()
            model(batch(step)).pow(2).mean().backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    ours = run(OURS)
    assert_identical(ours, run(HOROVODS))
    assert_same_on_all_ranks(ours)


def case_requires_grad_changes_and_two_optimizers():
    def run(factory):
        torch.manual_seed(13)
        generator, judge = nn.Linear(12, 6), nn.Linear(6, 1)
        optimizers = {
            generator: factory(
                torch.optim.SGD(generator.parameters(), lr=0.1),
                named_parameters=generator.named_parameters(prefix="generator"),
            ),
            judge: factory(
                torch.optim.SGD(judge.parameters(), lr=0.1),
                named_parameters=judge.named_parameters(prefix="judge"),
            ),
        }
        for step in range(6):
            trained = generator if step % 2 else judge
            for network in (generator, judge):
                network.requires_grad_(network is trained)
                optimizers[network].zero_grad()
            judge(generator(batch(step))).pow(2).mean().backward()
            optimizers[trained].step()
            other = judge if trained is generator else generator
            optimizers[other].synchronize()
        return [p.detach() for network in optimizers for p in network.parameters()]

    ours = run(OURS)
    assert_identical(ours, run(HOROVODS))
    assert_same_on_all_ranks(ours)


def case_without_names():
    assert_identical(train(OURS, named_parameters=None), train(HOROVODS, named_parameters=None))


def case_process_sets():
    mine = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
    try:
        with strategy(buckets=2):
            for process_set in mine:
                ours = train(OURS, process_set=process_set)
                theirs = train(HOROVODS, process_set=process_set)
                if process_set.included():
                    assert_identical(ours, theirs)
                assert not torch.equal(ours[0], mlp()[0].weight)
    finally:
        for process_set in mine:
            hvd.remove_process_set(process_set)


def case_join_with_uneven_batches():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model)
        for step in range(3 + 2 * hvd.rank()):
            distributed.zero_grad()
            model(batch(step)).pow(2).mean().backward()
            distributed.step()
        assert hvd.join() == hvd.size() - 1
        return [parameter.detach() for parameter in model.parameters()]

    assert_identical(run(OURS), run(HOROVODS))


def case_adasum():
    if not hvd.mpi_enabled():
        raise unittest.SkipTest("Horovod has Adasum under MPI only")
    with strategy(buckets=2):
        ours = train(OURS, op=hvd.Adasum)
    assert_identical(ours, train(HOROVODS, op=hvd.Adasum))
    assert_same_on_all_ranks(ours)


def case_learning_rate_schedule():
    def run(factory):
        model = mlp()
        distributed = wrap(factory, model)
        schedule = torch.optim.lr_scheduler.StepLR(distributed, step_size=2, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(5):
                distributed.zero_grad()
                model(batch(step)).pow(2).mean().backward()
                distributed.step()
                schedule.step()
        assert distributed.param_groups[0]["lr"] == 0.025
        return [parameter.detach() for parameter in model.parameters()]

    assert_identical(run(OURS), run(HOROVODS))
