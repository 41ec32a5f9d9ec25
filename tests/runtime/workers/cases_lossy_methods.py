"""What must survive where lossy ways to synchronize take turns with any other.

No reference trains the same, so each switch is held against what the documentation promises of it
(``docs/protocols.md``): moments, running statistics, counted steps. Of a model whose gradients do
not depend on its parameters the result is known, too.
"""

import gc
import io
import itertools

import horovod.torch as hvd
import torch
from cases_exchanges import OPTIMIZERS, groups_of, loss_of
from cases_methods import (
    EXACT,
    EXCHANGED,
    LOSSY,
    STRETCH,
    Constant,
    epochs,
    handles_stragglers,
    phase_of,
)
from cases_switching import Model, walk
from common import OURS, assert_close, assert_same_on_all_ranks, clipped_step, synchronized_by

import hvd_autosync
from hvd_autosync.runtime.sync.phase import Phase
from hvd_autosync.runtime.sync.synchronizer import switch

PLANS = {**EXACT, **LOSSY}
#: Each lossy plan, some between exact ones and some between lossy ones.
SOME = (
    *("as Horovod", "rounds", "sharded", "coded rounds", "ASP", "topk", "SSP(2)", "lossless"),
    *("rounds, then ASP", "int8", "ASP", "rounds", "slices"),
)
#: In which phase a training is after a few steps under a plan.
PHASES = dict.fromkeys(("rounds", "coded rounds", "rounds, then ASP"), Phase.ROUNDS)
PHASES |= dict.fromkeys(("SSP(0)", "ASP", "SSP(2)"), Phase.NO_BARRIER)
PHASES |= dict.fromkeys((*EXCHANGED, "topk", "int8"), Phase.EXCHANGE)
RATE = 0.1


def flat(tensors):
    return torch.cat([each.detach().float().view(-1) for each in tensors])


def mean(tensors, name):
    return hvd.allreduce(flat(tensors), name=name)


def moments(optimizer):
    """Tensors of the whole state, as a script would save them."""
    states = optimizer.state_dict()["state"]
    found = (value for _, state in sorted(states.items()) for _, value in sorted(state.items()))
    return [value for value in found if isinstance(value, torch.Tensor)]


def statistics(model):
    return [model.running.running_mean, model.running.running_var]


def steps_of(plan, phase):
    """How many steps an optimizer makes in one of the training.

    Without a barrier it makes one of the gradient of each rank; under SSP(0), that of BSP.
    """
    together = phase is not Phase.NO_BARRIER or plan.protocol.staleness == 0
    return 1 if together else hvd.size()


def begin(model, base, name):
    with synchronized_by(PLANS[name]):
        optimizer = OPTIMIZERS[base](groups_of(model))
        return OURS(optimizer, named_parameters=model.named_parameters())


def save(model, optimizer):
    """Bytes that rank 0 has saved where parameters are equal; all ranks have them afterwards."""
    hvd_autosync.average(optimizer)
    file = io.BytesIO()
    if hvd.rank() == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    return hvd.broadcast_object(file.getvalue(), name="checkpoint")


def change(model, optimizer, name):
    """Change to another plan; moments and statistics are then as documented, on all ranks.

    What parameter servers have is known without other ranks' later gradients only after it.
    """
    phase = phase_of(optimizer)
    own = flat(statistics(model))
    before = None if phase is Phase.NO_BARRIER else mean(moments(optimizer), "moments")
    averaged = mean(statistics(model), "statistics")
    switch(optimizer, PLANS[name])
    after = flat(moments(optimizer))
    if before is not None:  # first, as all ranks fail in it, and none waits for others then
        assert_close([after], [before], atol=1e-6, rtol=1e-5)
    apart = phase in (Phase.ROUNDS, Phase.NO_BARRIER)
    assert_close([flat(statistics(model))], [averaged if apart else own])
    assert_same_on_all_ranks([after, flat(model.parameters())])


def survive(sequence, base, save_at=()):
    """Train under each plan of a sequence for some steps, from checkpoints at ``save_at``."""
    model = Model()
    optimizer = begin(model, base, sequence[0])
    made = counted = stepped = 0
    for place, name in enumerate(sequence):
        if place:
            try:
                change(model, optimizer, name)
                assert optimizer._sync._progress.step == counted
                assert model.running.num_batches_tracked == made
                for each in model.body.parameters():
                    state = optimizer.state[each]
                    assert state["momentum_buffer" if base == "momentum" else "exp_avg"].any()
                    assert state.get("step", stepped) == stepped
            except AssertionError as error:
                raise AssertionError(f"from {sequence[place - 1]} to {name}, {place}") from error
        numbers = epochs()  # so that the end of an epoch is known
        for number in itertools.islice(numbers, STRETCH):
            phase = phase_of(optimizer)
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            made, counted, stepped = made + 1, counted + 1, stepped + steps_of(PLANS[name], phase)
        assert phase_of(optimizer) is PHASES.get(name, phase_of(optimizer)), (place, name)
        if place in save_at:
            saved = save(model, optimizer)
            del model, optimizer, numbers
            gc.collect()  # hooks and loaders end with them
            model = Model()
            optimizer = begin(model, base, name)
            of_model, of_optimizer = torch.load(io.BytesIO(saved))
            model.load_state_dict(of_model)
            optimizer.load_state_dict(of_optimizer)
            # Without a schedule or a protocol no checkpoint says how far the training is.
            counted *= PLANS[name].replicas_may_differ
            restored = PHASES.get(name) is Phase.ROUNDS
            assert (phase_of(optimizer) is Phase.RESTORED) is restored, (place, name)


def case_moments_of_adam_survive_some_methods():
    survive(SOME, "Adam", save_at=(2, 4, 8, 11))


def case_momentum_survives_any_two_methods():
    """Between every other two plans there is a checkpoint, and between the others with Adam."""
    names = walk([*PLANS])
    survive(names, "momentum", save_at=range(1, len(names), 2))


def case_moments_of_adam_survive_any_two_methods():
    names = walk([*PLANS])
    survive(names, "Adam", save_at=range(0, len(names), 2))


def clipped(gradients):
    """As ``clipped_step`` clips them."""
    factor = min(1.0, 0.05 / (flat(gradients).norm().item() + 1e-6))
    return [each * factor for each in gradients]


class Expected:
    """Plain SGD of the gradients of all ranks, in this process.

    Args:
        parameters: What the optimizer begins with.
        momentum: Of SGD.
    """

    def __init__(self, parameters, momentum):
        self.parameters = [each.detach().double().requires_grad_() for each in parameters]
        self.optimizer = torch.optim.SGD(self.parameters, RATE, momentum)

    def step(self, of_ranks, clip, apart):
        """A rank that steps apart clips its own gradients, else those of all are clipped."""
        if clip and apart:
            of_ranks = [clipped(each) for each in of_ranks]
        means = [torch.stack(each).mean(0) for each in zip(*of_ranks, strict=True)]
        for parameter, each in zip(
            self.parameters, clipped(means) if clip and not apart else means, strict=True
        ):
            parameter.grad = each.double()
        self.optimizer.step()


def count_gradients(sequence, step=None, passes=1, momentum=0.0, parts=1):
    """Each gradient counts once, as in ``cases_methods.py``.

    Of several optimizers, for parts of the model, all but the first change half as often.
    """
    model = Constant()
    slopes = dict(zip(model.parameters(), model.slopes, strict=True))
    groups = [[*each.parameters()] for each in ([model] if parts == 1 else model.children())]
    options = {"backward_passes_per_step": passes} if passes > 1 else {}
    names = {p: name for name, p in model.named_parameters()}
    with synchronized_by(PLANS[sequence[0]]):
        optimizers = [
            OURS(torch.optim.SGD(each, RATE, momentum), [(names[p], p) for p in each], **options)
            for each in groups
        ]
    expected, numbers = [Expected(each, momentum) for each in groups], epochs()
    count, seen = len(model.slopes[0]), set()

    def gradient(rank, number, parameter):
        """Of one backward pass."""
        return slopes[parameter][(number * hvd.size() + rank) % count] / passes

    for place, name in enumerate([*sequence, "as Horovod"]):
        for which, optimizer in enumerate(optimizers):
            if place and (which == 0 or place % 2 or place == len(sequence)):
                switch(optimizer, PLANS[name])
        for number in itertools.islice(numbers, STRETCH):
            passed = range(passes * number, passes * (number + 1))
            for optimizer in optimizers:
                optimizer.zero_grad()
            for each in passed:
                sum((p * gradient(hvd.rank(), each, p)).sum() for p in slopes).backward()
            for which, optimizer in enumerate(optimizers):
                apart = phase_of(optimizer) in (Phase.ROUNDS, Phase.NO_BARRIER)
                seen.add((name, phase_of(optimizer)))
                (step or type(optimizer).step)(optimizer)
                of_ranks = [
                    [sum(gradient(rank, each, p) for each in passed) for p in groups[which]]
                    for rank in range(hvd.size())
                ]
                expected[which].step(of_ranks, step is clipped_step, apart)
    for optimizer, group, other in zip(optimizers, groups, expected, strict=True):
        wanted = [each.detach().float() for each in other.parameters]
        assert_close([p.detach() for p in group], wanted, atol=2e-5, rtol=2e-5)
        if momentum:
            buffers = [other.optimizer.state[p]["momentum_buffer"] for p in other.parameters]
            ours = [optimizer.state[p]["momentum_buffer"].double() for p in group]
            assert_close(ours, buffers, atol=2e-5, rtol=2e-5)
    for name, phase in (("rounds", Phase.ROUNDS), ("ASP", Phase.NO_BARRIER)):
        assert name not in sequence or (name, phase) in seen, seen


#: Rounds, steps without a barrier and exact plans after each other; none splits batches, or
#: handles stragglers, as only one optimizer may.
COUNTED = (
    *("slices", "rounds", "SSP(0)", "ASP", "sharded", "rounds, then ASP", "SSP(2)", "lossless"),
    *("ASP", "rounds", "SSP(2)"),
)


def case_no_gradient_is_lost_with_accumulation():
    count_gradients(COUNTED, passes=2)


def case_no_gradient_is_lost_with_clipping():
    count_gradients(COUNTED, step=clipped_step)


def case_no_gradient_is_lost_of_two_optimizers():
    assert not any(handles_stragglers(PLANS[name]) for name in COUNTED)
    count_gradients(COUNTED, parts=2)


def case_momentum_of_rounds_is_that_of_mean_gradients():
    """Means of momentum are the momentum of means, so rounds and exact plans train the same."""
    count_gradients(walk([*EXACT, "rounds"]), momentum=0.5)
