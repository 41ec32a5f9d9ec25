"""Lossless codes: two ranks get the bits of Horovod's own sums, more ranks all the same ones."""

import contextlib

import horovod.torch as hvd
import torch
from cases_exchanges import FEW, OPTIMIZERS, STEPS, plan
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    clipped_step,
    device_type,
    seeded,
)
from horovod.torch.mpi_ops import global_process_set, synchronize
from torch import nn

from hvd_autosync.runtime.collectives.levels import two_levels
from hvd_autosync.runtime.exchange import lossless_sum
from hvd_autosync.runtime.exchange.exchanges import Scaling, allreduce
from hvd_autosync.runtime.exchange.lossless import header_of
from hvd_autosync.runtime.exchange.lossless_sum import LosslessSum
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

SIZE = 20_000
CLASSES = {"large": ("*weight",)}
SCALINGS = (Scaling(), Scaling(1.0, 1 / hvd.size()), Scaling(1 / 3, 3 / hvd.size()))


def plans():
    """Everything by lossless codes; between hosts only, where there are several."""
    exchange = "hierarchical" if hvd.cross_size() > 1 else "allreduce"
    coded = ClassPlan(exchange, lossless=True)
    sliced = ClassPlan(exchange, slices=3, lossless=True)
    return {
        "one bucket": ExchangePlan(1, "ordered", "arrival", coded, coded, coded),
        "by size": ExchangePlan(3, "size", "arrival", coded, coded, ClassPlan(exchange)),
        "slices": ExchangePlan(0, "ordered", "arrival", coded, sliced, coded),
    }


def bits(tensor):
    return tensor.view(torch.int32)


def assert_same_bits(left, right):
    """Bits are equal, where neither is NaN."""
    assert torch.equal(left.isnan(), right.isnan())
    there = ~left.isnan()
    assert torch.equal(bits(left)[there], bits(right)[there])


def tensors():
    """This rank's tensors of many kinds."""
    draw = seeded(31 * hvd.rank() + 1)
    normal = torch.randn(SIZE, generator=draw) * 1e-3
    zeros = normal * (torch.rand(SIZE, generator=draw) < 0.5)
    random = torch.randint(-(2**31), 2**31, (SIZE,), generator=draw).to(torch.int32)
    special = torch.tensor([0.0, -0.0, 1e-45, -3e-39, 3e38, -3e38, float("inf"), float("nan"), 1.0])
    mixed = special[torch.randint(len(special), (SIZE,), generator=draw)]
    tiny = normal.view(torch.int32).bitwise_and(0x007FFFFF).view(torch.float32)
    found = {
        "normal": normal,
        "bfloat16": normal.to(torch.bfloat16).float(),
        "float16": normal.to(torch.float16).float(),
        "zeros": zeros,
        "zeros in bfloat16": zeros.to(torch.bfloat16).float(),
        "nothing but zeros": torch.zeros(SIZE),
        "any bits": random.view(torch.float32),
        "special": mixed,
        "denormal": tiny,
        "of one rank": normal if hvd.rank() == 0 else torch.zeros(SIZE),
        "of other kinds": normal if hvd.rank() == 0 else random.view(torch.float32),
        "few": normal[:3],
        "one": normal[:1],
    }
    found["exceptions"] = found["bfloat16"].clone()
    found["exceptions"][100:200] = normal[100:200]
    return found


def drive(steps):
    """Run a reduction to its end."""
    handle = next(steps, None)
    while handle is not None:
        try:
            handle = steps.send(synchronize(handle))
        except StopIteration:
            handle = None


def case_sums_have_the_bits_of_horovods():
    for name, tensor in tensors().items():
        for number, scaling in enumerate(SCALINGS):
            ours, theirs = tensor.clone(), tensor.clone()
            drive(LosslessSum()(ours, f"{name}.{number}", scaling, global_process_set))
            drive(allreduce(theirs, f"{name}.{number}.plain", scaling, global_process_set))
            if hvd.size() == 2:
                assert_same_bits(ours, theirs)
            elif bool(theirs.isfinite().all()):
                torch.testing.assert_close(ours, theirs, atol=1e-8, rtol=1e-5)
            first = hvd.broadcast(bits(ours), 0, name=f"{name}.{number}.first")
            assert torch.equal(bits(ours), first), name


def case_what_is_done_to_a_tensor_that_was_sent_is_noticed_and_done_to_none():
    for name in ("normal", "bfloat16", "zeros", "few"):
        tensor = tensors()[name]
        expected, ours, changes = tensor.clone(), tensor.clone(), []
        drive(LosslessSum()(expected, f"{name}.kept", Scaling(), global_process_set))

        def change(steps, tensor=ours):
            handle = next(steps)
            if hvd.rank() == 0:
                tensor.data.add_(1)
            yield from _continued(steps, handle)

        reduction = LosslessSum(lambda changes=changes: changes.append(1))
        drive(change(reduction(ours, f"{name}.changed", Scaling(), global_process_set)))
        assert torch.equal(bits(ours), bits(expected)), name
        assert bool(changes) == (hvd.rank() == 0), name


def _continued(steps, handle):
    """Go on with a generator of which ``handle`` is the first."""
    with contextlib.suppress(StopIteration):
        while True:
            handle = steps.send((yield handle))


def _network():
    torch.manual_seed(11)
    layers = nn.Linear(24, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, 4))


def _train(factory, *, autocast=False, optimizer="momentum", step=None, passes=1, steps=None):
    steps = steps or (FEW if hvd.cross_size() > 1 else STEPS)
    model = _network()
    options = {"backward_passes_per_step": passes} if passes > 1 else {}
    base = OPTIMIZERS[optimizer](model.parameters())
    distributed = factory(base, named_parameters=model.named_parameters(), **options)
    for number in range(steps if isinstance(steps, int) else steps[hvd.rank()]):
        distributed.zero_grad()
        for part in range(passes):
            draw = seeded(1000 * hvd.rank() + passes * number + part)
            inputs = torch.randn(7 if number % 10 else 2, 24, generator=draw)
            with torch.autocast(device_type(), torch.bfloat16, enabled=autocast):
                loss = model(inputs).float().pow(2).mean() / passes
            loss.backward()
        (step or type(distributed).step)(distributed)
    return [parameter.detach() for parameter in model.parameters()]


@contextlib.contextmanager
def forms():
    """The forms of the codes that this rank makes meanwhile."""
    made, encode = [], lossless_sum.encode

    def noting(*arguments, **options):
        code = encode(*arguments, **options)
        made.append(header_of(code).form)
        return code

    lossless_sum.encode = noting
    try:
        yield made
    finally:
        lossless_sum.encode = encode


def _compare(*, after=None, same_on_all_ranks=True, **options):
    expected = _train(HOROVODS, **options)
    if after is not None:
        after()
    for name, chosen in plans().items():
        with plan(chosen, CLASSES), forms() as made:
            ours = _train(OURS, **options)
            if after is not None:
                after()
        try:
            if hvd.size() == 2:
                assert_identical(ours, expected)
            else:
                assert_close(ours, expected, atol=2e-5, rtol=2e-4)
            if same_on_all_ranks:
                assert_same_on_all_ranks(ours)
        except AssertionError as error:
            raise AssertionError(f"under the plan {name!r}") from error
        assert any(form.planes for form in made), name
        if options.get("autocast") and hvd.cross_size() == 1:
            assert any(form.words == "bfloat16" for form in made), name


def case_training_has_the_bits_of_horovods():
    _compare()


def case_training_under_autocast_has_the_bits_of_horovods():
    if hvd.size() > 2:  # rounding to bfloat16 makes more of the order of additions
        expected = _train(HOROVODS, autocast=True, steps=FEW)
        for chosen in plans().values():
            with plan(chosen, CLASSES), forms() as made:
                ours = _train(OURS, autocast=True, steps=FEW)
            assert_close(ours, expected, atol=2e-3, rtol=2e-2)
            assert_same_on_all_ranks(ours)
            assert hvd.cross_size() > 1 or any(form.words == "bfloat16" for form in made)
        return
    _compare(autocast=True)
    _compare(autocast=True, optimizer="AdamW")


def case_clipping_of_what_synchronize_returns():
    _compare(step=clipped_step, steps=FEW)


def case_accumulated_gradients():
    _compare(passes=3, steps=FEW)


def case_a_rank_that_has_joined():
    uneven = [FEW + 2 * rank for rank in range(hvd.size())]
    _compare(steps=uneven, after=hvd.join, same_on_all_ranks=False)


def case_bfloat16_parameters_travel_in_half():
    """They are summed as float32 numbers, whose lower halves are zero."""
    for chosen in plans().values():
        with plan(chosen, CLASSES), forms() as made:
            model = _network().to(torch.bfloat16)
            base = torch.optim.SGD(model.parameters(), lr=1.0)
            distributed = OURS(base, model.named_parameters())
            model(torch.randn(3, 24).to(torch.bfloat16)).float().pow(2).mean().backward()
            own = {name: p.grad.float() for name, p in model.named_parameters()}
            distributed.synchronize()
        for key, parameter in model.named_parameters():
            mean = hvd.allreduce(own[key], name=f"expected.{key}").to(torch.bfloat16)
            assert parameter.grad.dtype is torch.bfloat16
            torch.testing.assert_close(parameter.grad, mean)
        assert hvd.cross_size() > 1 or any(form.words == "bfloat16" for form in made)
        with distributed.skip_synchronize():
            distributed.step()


def case_other_types_travel_as_they_are():
    for chosen in plans().values():
        results = []
        for factory in (HOROVODS, OURS):
            with plan(chosen, CLASSES), forms() as made:
                model = _network().double()
                distributed = factory(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
                )
                draw = seeded(hvd.rank())
                for _ in range(3):
                    distributed.zero_grad()
                    model(torch.randn(3, 24, generator=draw).double()).pow(2).mean().backward()
                    distributed.step()
            results.append([parameter.detach() for parameter in model.parameters()])
            assert not made
        assert_close(*results)


def _draws(step, repeats):
    """Numbers of any exponents, so that no bits repeat, unless their lower halves are zeros.

    Those of rank 0 are the largest: in their sums with the others' no exponents repeat either.
    """
    draw = seeded(7 * hvd.rank() + step)
    lowest, highest = (0x40000000, 0x7F000000) if hvd.rank() == 0 else (0, 0x40000000)
    random = torch.randint(lowest, highest, (SIZE,), generator=draw)
    random -= torch.randint(2, (SIZE,), generator=draw) << 31  # the sign
    bits_of_all = random.to(torch.int32)
    return (bits_of_all & ~0xFFFF if repeats else bits_of_all).view(torch.float32).clone()


def case_what_does_not_pay_is_tried_less_and_less_often():
    """And on all ranks in the same steps, also if it pays on one of them only."""
    tried, reduction, step = [], LosslessSum(), 0

    def reduce(repeats):
        nonlocal step
        ours = _draws(step, repeats)
        theirs = ours.clone()
        with forms() as made:
            drive(reduction(ours, "tried", Scaling(), global_process_set))
        drive(allreduce(theirs, "plain", Scaling(), global_process_set))
        torch.testing.assert_close(ours, theirs)
        if made:
            tried.append(step)
        step += 1

    while step < 140:
        reduce(False)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 127], tried
    while step < 193:
        reduce(hvd.rank() == 0)  # from the next try on it pays on rank 0
    assert tried[8:] == [191, 192], tried
    count = len(tried)
    for _ in range(3):
        reduce(False)
    assert tried[count:] == [193, 194], tried


def case_only_what_leaves_a_host_is_coded():
    """On one host the whole tensor or, among more than two ranks, its parts."""
    levels = two_levels() if hvd.cross_size() > 1 else None
    if levels is not None:
        expected = {SIZE // levels.within.size()}
    else:
        expected = {SIZE} if hvd.size() == 2 else {SIZE // hvd.size()}
    sizes, encode = [], lossless_sum.encode
    with plan(plans()["one bucket"], CLASSES):
        weight = nn.Parameter(torch.zeros(SIZE))
        distributed = OURS(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])

    def noting(tensor, **options):
        sizes.append(len(tensor))
        return encode(tensor, **options)

    lossless_sum.encode = noting
    try:
        (weight * tensors()["bfloat16"]).sum().backward()
        distributed.step()
    finally:
        lossless_sum.encode = encode
    assert set(sizes) == expected, sizes
