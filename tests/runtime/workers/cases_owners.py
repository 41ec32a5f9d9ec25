"""Owners' steps: their states, asked for at any place of a script."""

import copy
import gc
import io
import threading
import time

import horovod.torch as hvd
import torch
from cases_exchanges import SHARDED, plan
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    exchange_of,
    mlp,
    raises,
    seeded,
    wrap,
)

from hvd_autosync.errors import AutosyncError
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

ALL = ExchangePlan(2, "ordered", "arrival", SHARDED, SHARDED, SHARDED)
IN_SLICES = ExchangePlan(0, "ordered", "arrival", SHARDED, SHARDED, ClassPlan("sharded", slices=3))
BASES = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.02, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.02),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps),
    "RAdam": lambda ps: torch.optim.RAdam(ps),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, centered=True),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps),
}


def make(factory, base="Adam", chosen=ALL):
    model = mlp()
    with plan(chosen, {}):
        return model, wrap(factory, model, BASES[base](model.parameters()))


def step(model, distributed, number):
    distributed.zero_grad()
    model(batch(number)).pow(2).mean().backward()
    distributed.step()


def states(state_dict):
    return [
        (place, name, torch.as_tensor(value, dtype=torch.float64))
        for place, entry in sorted(state_dict["state"].items())
        for name, value in sorted(entry.items())
        if value is not None
    ]


def assert_states(ours, expected):
    assert [entry[:2] for entry in states(ours)] == [entry[:2] for entry in states(expected)]
    values = [[entry[2] for entry in states(each)] for each in (ours, expected)]
    assert_close(*values, atol=1e-5, rtol=1e-4)


def case_every_elementwise_optimizer():
    for base in BASES:
        expected, right = make(HOROVODS, base)
        for number in range(6):
            step(expected, right, number)
        for chosen in (ALL, IN_SLICES):
            ours, left = make(OURS, base, chosen)
            for number in range(6):
                step(ours, left, number)
            try:
                assert_close(list(ours.parameters()), list(expected.parameters()))
                assert_same_on_all_ranks(p.detach() for p in ours.parameters())
                assert_states(left.state_dict(), right.state_dict())
            except AssertionError as error:
                raise AssertionError(base) from error


def case_states_are_only_with_their_owners():
    model, distributed = make(OURS)
    step(model, distributed, 0)
    own = sum(s["exp_avg"].numel() for s in exchange_of(distributed)._zero_step._states.values())
    total = sum(parameter.numel() for parameter in model.parameters())
    counts = hvd.allgather(torch.tensor([own]), name="counts")
    assert int(counts.sum()) == total and int(counts.max()) <= total // hvd.size() + 2
    assert not dict.__len__(distributed.state)  # a look by any other way fetches all


def case_one_rank_saves_while_others_wait_in_a_collective():
    model, distributed = make(OURS)
    reference, expected = make(HOROVODS)
    for number in range(4):
        step(model, distributed, number)
        step(reference, expected, number)
        if hvd.rank() == 0:
            saved = distributed.state_dict()
            assert_states(saved, expected.state_dict())
        assert hvd.allreduce(torch.ones(1), name="metric").item() == 1


def case_one_rank_saves_while_others_train_on():
    model, distributed = make(OURS)
    reference, expected = make(HOROVODS)
    for number in range(4):
        step(reference, expected, number)
        kept = copy.deepcopy(expected.state_dict())
        step(model, distributed, number)
        if hvd.rank() == hvd.size() - 1:
            assert_states(distributed.state_dict(), kept)


def case_a_saved_state_is_taken_up_again():
    model, distributed = make(OURS)
    reference, expected = make(HOROVODS)
    for number in range(3):
        step(model, distributed, number)
        step(reference, expected, number)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": distributed.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for chosen in (ALL, IN_SLICES, ExchangePlan(buckets=1)):
        again, restored = make(OURS, chosen=chosen)
        step(again, restored, 9)  # it has states of its own, which must go
        again.load_state_dict(saved["model"])
        restored.load_state_dict(copy.deepcopy(saved["optimizer"]))
        continued, theirs = copy.deepcopy(reference), None
        theirs = wrap(HOROVODS, continued, BASES["Adam"](continued.parameters()))
        theirs.load_state_dict(copy.deepcopy(expected.state_dict()))
        for number in range(3, 6):
            step(again, restored, number)
            step(continued, theirs, number)
        assert_close(list(again.parameters()), list(continued.parameters()))


def case_broadcast_of_the_state():
    model, distributed = make(OURS)
    reference, expected = make(HOROVODS)
    for number in range(4):
        for optimizer in (distributed, expected):
            if number in (0, 2):
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        step(model, distributed, number)
        step(reference, expected, number)
    assert_close(list(model.parameters()), list(reference.parameters()))


def case_one_rank_alone_looks_at_its_gradients():
    """The others only step: who steps what is agreed all the same."""
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for number in range(6):
        for model, distributed in pairs:
            distributed.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            if hvd.rank() == 0 and number in (0, 3):
                distributed.synchronize()
                with distributed.skip_synchronize():
                    distributed.step()
            else:
                distributed.step()
    (ours, _), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert_same_on_all_ranks([parameter.detach() for parameter in ours.parameters()])


def case_hooks_of_steps_see_whole_gradients():
    """It runs before Horovod's step, when gradients travel, and again right before the base's."""
    seen = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory, "momentum")
        norms = []

        def look(optimizer, args, kwargs, norms=norms):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norms[-1] = [parameter.grad.norm() for parameter in parameters]

        for number in range(5):
            norms.append([])
            if number == 2:
                distributed.register_step_pre_hook(look)
            step(model, distributed, number)
        seen.append([torch.stack(each) for each in norms[2:]])
    assert_close(*seen)


def case_a_rank_that_has_joined_saves_its_last_state():
    states = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory)
        for number in range(4 if hvd.rank() else 2):
            step(model, distributed, number)
        hvd.join()
        if hvd.rank() == 0:
            states.append(distributed.state_dict())
        hvd.barrier()
    if states:
        assert_states(*states)


def case_a_broadcast_of_another_state():
    _broadcast(lambda _, distributed: hvd.broadcast_optimizer_state(distributed, root_rank=0))


def case_a_state_of_an_elastic_job():
    def sync(model, distributed):
        hvd.elastic.TorchState(model=model, optimizer=distributed).sync()

    _broadcast(sync)


def _broadcast(broadcast):
    """Broadcast a state as after a checkpoint that rank 0 alone has loaded."""
    results = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory)
        for number in range(2):
            step(model, distributed, number)
        saved = copy.deepcopy(distributed.state_dict())
        for number in range(2, 4):
            step(model, distributed, number)
        if hvd.rank() == 0:
            distributed.load_state_dict(saved)
        broadcast(model, distributed)
        for number in range(4, 6):
            step(model, distributed, number)
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)
    assert_same_on_all_ranks(results[0])


def case_a_script_that_begins_to_clip():
    """From the first look at the gradients on, every rank has whole states and steps."""
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for number in range(6):
        for model, distributed in pairs:
            if number < 3:
                step(model, distributed, number)
                continue
            distributed.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            distributed.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with distributed.skip_synchronize():
                distributed.step()
    (ours, left), (expected, right) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert left.state and not exchange_of(left)._zero_step._states
    assert_states(left.state_dict(), right.state_dict())


def case_a_learning_rate_that_changes():
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for model, distributed in pairs:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(distributed, 0.7)
        for number in range(5):
            step(model, distributed, number)
            scheduler.step()
    (ours, _), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))


def case_parameters_that_move_to_other_memory():
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for model, distributed in pairs:
        for number in range(6):
            if number == 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            step(model, distributed, number)
    (ours, _), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))


def case_two_parameters_of_one_memory():
    """Horovod's optimizer makes both updates, one after the other."""
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for model, distributed in pairs:
        model[2].weight.data = model[0].weight.data.view(-1)[:160].view(8, 20)
        for number in range(5):
            step(model, distributed, number)
    (ours, _), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert_same_on_all_ranks([parameter.detach() for parameter in ours.parameters()])


def case_replicas_that_differ_from_the_beginning():
    """As from seeds by rank, without a broadcast: Horovod keeps the difference."""
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for model, distributed in pairs:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * hvd.rank()
        for number in range(5):
            step(model, distributed, number)
    (ours, left), (expected, right) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert_states(left.state_dict(), right.state_dict())


def case_epochs_of_other_lengths_without_a_broadcast():
    """Who has waited in ``join()`` goes on with its own parameters, and spoils nobody else's."""
    pairs = [make(OURS, "momentum"), make(HOROVODS, "momentum")]
    for model, distributed in pairs:
        for epoch in range(2):
            for number in range(3 + hvd.rank()):
                step(model, distributed, 10 * epoch + number)
            hvd.join()
    (ours, _), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))


def train_like_horovods(change, base="momentum", steps=6, factory_of=make):
    """Train ours and Horovod's, with ``change(number, model, optimizer)`` after each step."""
    pairs = [factory_of(OURS, base), factory_of(HOROVODS, base)]
    seen = [[], []]
    for number in range(steps):
        for (model, distributed), values in zip(pairs, seen, strict=True):
            step(model, distributed, number)
            values += change(number, model, distributed) or []
    (ours, left), (expected, right) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert_close(*seen)
    assert_states(left.state_dict(), right.state_dict())
    return left


def is_by_owners(distributed):
    return not exchange_of(distributed)._zero_step._given_up


def case_a_wrapper_keeps_slow_weights_in_the_state():
    """As Lookahead does, which also restarts the momentum."""

    def look_ahead(number, model, distributed):
        for group in distributed.param_groups:
            for parameter in group["params"]:
                state = distributed.state[parameter]
                if "slow" not in state:
                    state["slow"] = parameter.detach().clone()
                elif number % 2:
                    with torch.no_grad():
                        state["slow"].lerp_(parameter, 0.5)
                        parameter.copy_(state["slow"])
                    state["momentum_buffer"].zero_()

    assert not is_by_owners(train_like_horovods(look_ahead))


def case_a_script_reads_the_averages_of_asgd():
    def look(number, model, distributed):
        if number == 3:
            return [distributed.state[parameter]["ax"].clone() for parameter in model.parameters()]
        return []

    train_like_horovods(look, "ASGD")


def case_any_way_to_read_the_state_finds_all():
    ways = (
        lambda states, one: list(states.values()),
        lambda states, one: [state for _, state in states.items()],
        lambda states, one: [states[each] for each in states],
        lambda states, one: [states[each] for each in states.keys()],  # noqa: SIM118
        lambda states, one: [states.get(one)],
        lambda states, one: [states.pop(one)],
        lambda states, one: [states.setdefault(one, {})],
        lambda states, one: [states[one]] if one in states else [],
        lambda states, one: list(copy.copy(states).values()) if len(states) else [],
        lambda states, one: list(dict(states).values()),
        lambda states, one: list({**states}.values()),
        lambda states, one: list(copy.deepcopy(states).values()),
    )
    for way in ways:

        def look(number, model, distributed, way=way):
            if number != 2:
                return []
            one = next(model.parameters())
            found = [state["momentum_buffer"] for state in way(distributed.state, one)]
            return [torch.stack([each.norm() for each in found]).sort().values]

        train_like_horovods(look, steps=4)


def case_a_checkpoint_leaves_the_step_to_owners():
    def save(number, model, distributed):
        distributed.state_dict()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)  # on all ranks alike

    assert is_by_owners(train_like_horovods(save))


def case_slices_leave_the_step_to_owners():
    """Of one parameter there are several, and its gradient is one."""

    def in_slices(factory, base):
        return make(factory, base, IN_SLICES)

    left = train_like_horovods(lambda *_: [], factory_of=in_slices)
    assert is_by_owners(left) and exchange_of(left)._zero_step._apart


def case_a_script_looks_at_gradients_after_the_step():
    def norms(number, model, distributed):
        gradients = [parameter.grad for parameter in model.parameters()]
        if number == 2:
            assert all(
                g.shape == p.shape for g, p in zip(gradients, model.parameters(), strict=True)
            )
            return []
        if number < 4:
            return []
        return [each.norm() for each in gradients] + [*torch._foreach_norm(gradients)]

    assert not is_by_owners(train_like_horovods(norms))


def case_a_script_prunes_by_gradients_after_the_step():
    def prune(number, model, distributed):
        if number % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter[parameter.grad.abs() < 1e-3] = 0

    train_like_horovods(prune)


def case_gradients_that_are_added_up_over_steps():
    """Without ``zero_grad()``: the next passes add to what the step has left."""
    pairs = [make(OURS, "SGD"), make(HOROVODS, "SGD")]
    for number in range(4):
        for model, distributed in pairs:
            model(batch(number)).pow(2).mean().backward()
            distributed.step()
    (ours, left), (expected, _) = pairs
    assert_close(list(ours.parameters()), list(expected.parameters()))
    assert is_by_owners(left)


def case_learning_rates_that_come_to_differ_by_rank():
    def drift(number, model, distributed):
        if number == 2:
            distributed.param_groups[0]["lr"] *= 1 + hvd.rank()

    assert not is_by_owners(train_like_horovods(drift))


def case_states_that_one_rank_alone_has_loaded():
    def load(number, model, distributed):
        if number == 2 and hvd.rank() == 0:
            saved = distributed.state_dict()
            for state in saved["state"].values():
                state["momentum_buffer"] = 2 * state["momentum_buffer"]
            distributed.load_state_dict(saved)

    assert not is_by_owners(train_like_horovods(load))


def case_weights_that_one_rank_alone_changes():
    def change(number, model, distributed):
        if number == 2 and hvd.rank() == 0:
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)

    assert not is_by_owners(train_like_horovods(change))


def case_weights_that_a_forward_pass_changes_by_rank():
    """As ``max_norm`` of an embedding does with the rows of its own batch."""

    def embed(factory, base):
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Embedding(40, 8, max_norm=0.5), torch.nn.Linear(8, 3))
        with plan(ALL, {}):
            return model, wrap(factory, model, BASES[base](model.parameters()))

    models = []
    for factory in (OURS, HOROVODS):
        model, distributed = embed(factory, "momentum")
        for number in range(5):
            distributed.zero_grad()
            rows = torch.randint(40, (6,), generator=seeded(10 * hvd.rank() + number))
            model(rows).pow(2).mean().backward()
            distributed.step()
        models.append(list(model.parameters()))
    assert_close(*models)


class Coupled(torch.optim.SGD):
    """An optimizer of the user's, of which nothing is known: here, a step of the whole norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + parameter.grad.norm()))


def case_other_optimizers_take_whole_steps():
    models = []
    for factory in (OURS, HOROVODS):
        model = mlp()
        with plan(ALL, {}):
            distributed = wrap(factory, model, Coupled(model.parameters(), lr=0.1))
        for number in range(5):
            step(model, distributed, number)
        models.append(list(model.parameters()))
    assert_close(*models)


def case_parameters_that_do_not_lie_in_order():
    """Convolutions in channels_last cannot be shared out; they travel whole."""
    models = []
    for chosen in (ALL, ExchangePlan(buckets=1)):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Flatten())
        model = model.to(memory_format=torch.channels_last)
        with plan(chosen, {}):
            distributed = wrap(OURS, model)
        for number in range(4):
            distributed.zero_grad()
            generator = seeded(10 * hvd.rank() + number)
            model(torch.randn(2, 4, 5, 5, generator=generator)).pow(2).mean().backward()
            distributed.step()
        models.append(list(model.parameters()))
    assert_same_on_all_ranks([parameter.detach().contiguous() for parameter in models[0]])
    assert_close(*models)


def case_a_state_in_the_midst_of_a_step_is_refused():
    model, distributed = make(OURS)
    for number in range(2):
        step(model, distributed, number)
    distributed.zero_grad()
    model(batch(2)).pow(2).mean().backward()
    for _ in range(3000):  # of 0.01 s: the participation check may come late
        if exchange_of(distributed).dispatcher.busy:
            break
        time.sleep(0.01)
        exchange_of(distributed).dispatcher.arrived(next(iter(model.parameters())))
    assert exchange_of(distributed).dispatcher.busy
    with raises(AutosyncError, "between backward() and step()"):
        distributed.state_dict()
    distributed.step()
    distributed.state_dict()


def case_a_dropped_optimizer_answers_no_more():
    model, distributed = make(OURS)
    step(model, distributed, 0)
    peers = [t for t in threading.enumerate() if t.name == "hvd_autosync state server"]
    hvd.barrier()
    del distributed
    gc.collect()
    peers[-1].join(120)
    assert not peers[-1].is_alive()
