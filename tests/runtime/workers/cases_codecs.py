"""Codecs: how far they are off, what they owe and pay later, and what they put on the wire."""

import contextlib
import copy
import io
import os
import socket
import stat
import sys
import unittest

import horovod.torch as hvd
import torch
from cases_exchanges import CLASSES, OPTIMIZERS, Model, loss_of, plan
from common import HOROVODS, OURS, assert_identical, raises, seeded
from horovod.torch.mpi_ops import global_process_set, synchronize

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.exchange.codecs import Fp16Codec, make_codec
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

SIZE, COLUMNS = 3000, 50
PLANS = {
    "fp16": ClassPlan(codec="fp16"),
    "bf16": ClassPlan(codec="bf16"),
    "int8": ClassPlan(codec="int8"),
    "topk": ClassPlan(codec="topk", ratio=0.1),
    "powersgd": ClassPlan(codec="powersgd", rank=2),
}


def make(name, size=SIZE, **changes):
    chosen = ClassPlan(**{**vars(PLANS[name]), **changes})
    return make_codec(chosen, size, torch.zeros(0), hvd.size(), COLUMNS)


def data(step=0, size=SIZE):
    generator = seeded(97 * hvd.rank() + step)
    return torch.randn(size, generator=generator)


def reduce(codec, tensor, name="codec"):
    """The mean of ``tensor`` over all ranks, by ``codec``."""
    result = tensor.clone()
    steps = codec(result, name, Scaling(1.0, 1 / hvd.size()), global_process_set)
    handle = next(steps, None)
    while handle is not None:
        try:
            handle = steps.send(synchronize(handle))
        except StopIteration:
            handle = None
    return result


def mean(tensor):
    return hvd.allreduce(tensor, name="mean")


def case_rounding_is_small_and_the_same_everywhere():
    tensor = data()
    expected = mean(tensor)
    for name, most in (("fp16", 2e-3), ("bf16", 2e-2), ("int8", 5e-2)):
        codec = make(name)
        for step in range(2):  # twice, for memory is used again
            result = reduce(codec, tensor, f"{name}.{step}")
            assert (result - expected).abs().max() < most, name
            first = hvd.broadcast(result, 0, name=f"first.{name}.{step}")
            assert torch.equal(result, first), name


def case_sizes_that_fill_no_block():
    for size in (1, 255, 257, 1023):
        for name in ("bf16", "int8"):
            tensor = data(size=size)
            result = reduce(make(name, size), tensor, f"{name}.{size}")
            assert (result - mean(tensor)).abs().max() < 5e-2


def case_zeros_stay_zeros():
    for name in PLANS:
        assert not reduce(make(name), torch.zeros(SIZE), name).any(), name


def case_stochastic_rounding_is_right_on_average():
    tensor, codec = data(), make("int8")
    expected, count = mean(tensor), 400
    average = torch.zeros(SIZE)
    for step in range(count):
        average += reduce(codec, tensor, f"int8.{step % 2}") / count
    # One rounding is off by up to 1/127 of a block's largest, about 3.2; the average of 400 that
    # are independent by a twentieth of its standard deviation.
    assert (average - expected).abs().max() < 0.006
    assert abs((average - expected).mean()) < 2e-4


def case_random_numbers_of_the_script_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name in PLANS:
        reduce(make(name), data(), name)
    assert torch.equal(torch.rand(3), expected)


def case_topk_of_everything_is_exact():
    tensor = data()
    torch.testing.assert_close(reduce(make("topk", ratio=1.0), tensor), mean(tensor))


def case_full_rank_is_exact():
    tensor = data()
    result = reduce(make("powersgd", rank=COLUMNS), tensor)
    torch.testing.assert_close(result, mean(tensor), atol=1e-4, rtol=1e-4)


def case_low_rank_matrices_are_found_by_powersgd():
    left = torch.randn(SIZE // COLUMNS, 2, generator=seeded(1))
    right = torch.randn(2, COLUMNS, generator=seeded(2))
    tensor = (left @ right).view(-1) * (1 + hvd.rank())
    torch.testing.assert_close(reduce(make("powersgd"), tensor), mean(tensor), atol=1e-4, rtol=1e-4)


def case_what_is_left_out_comes_later():
    """All results together are all means together, but for what is still owed."""
    for name in ("topk", "powersgd"):
        codec = make(name)
        results, means = torch.zeros(SIZE), torch.zeros(SIZE)
        for step in range(20):
            results += reduce(codec, data(step), name)
            means += mean(data(step))
        owed = mean(codec.state()["left_out"].reshape(-1)[:SIZE].contiguous())
        assert owed.abs().max() > 0.1, name
        torch.testing.assert_close(results + owed, means, atol=2e-4, rtol=1e-4)


def case_overflows_are_seen_and_forgotten():
    """As mixed precision needs: no step hides them, and none comes back."""
    for name in PLANS:
        codec = make(name)
        for bad in (float("inf"), float("nan")):
            tensor = data()
            tensor[1234 if hvd.rank() == 0 else 5] = bad
            assert not reduce(codec, tensor, name).isfinite().all(), (name, bad)
            for step in range(3):
                assert reduce(codec, data(step), name).isfinite().all(), (name, bad)


def coded_plan(name):
    each = PLANS[name]
    rest = each if name in ("fp16", "bf16", "int8", "topk") else ClassPlan(codec="int8")
    return ExchangePlan(2, "ordered", "arrival", ClassPlan("rows"), each, rest)


def _steps(model, distributed, numbers):
    for number in numbers:
        distributed.zero_grad()
        loss_of(model, number).backward()
        distributed.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def case_training_under_codecs_resembles_exact_training():
    model = Model()
    start = [p.detach().clone() for p in model.parameters()]
    exact = _steps(
        model, HOROVODS(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters()), range(30)
    )
    way = torch.cat([(e - s).flatten() for e, s in zip(exact, start, strict=True)])
    for name in PLANS:
        model = Model()
        with plan(coded_plan(name), CLASSES):
            distributed = OURS(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters())
        coded = _steps(model, distributed, range(30))
        off = torch.cat([(c - e).flatten() for c, e in zip(coded, exact, strict=True)])
        most = 0.05 if name in ("fp16", "bf16", "int8") else 0.6
        assert off.norm() < most * way.norm(), (name, off.norm() / way.norm())


def case_gradients_that_a_script_refuses_leave_nothing_behind():
    """As after a norm that is too large; who drops them is the script's choice."""
    for name in ("topk", "powersgd"):
        for dropped_by_model in (False, True):
            model = torch.nn.Linear(COLUMNS, COLUMNS, bias=False)
            with plan(ExchangePlan(1, rest=PLANS[name]), {}):
                optimizer = OURS(torch.optim.SGD(model.parameters(), lr=1.0))
            (given,) = model.parameters()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            for factor in (0.0, 1000.0, 0.0, 0.0):
                before = given.detach().clone()
                (factor * given * data(size=COLUMNS**2).view(COLUMNS, COLUMNS)).sum().backward()
                optimizer.synchronize()
                if not factor:
                    with optimizer.skip_synchronize():
                        optimizer.step()
                assert torch.equal(given, before), (name, dropped_by_model)
                (model if dropped_by_model else optimizer).zero_grad()


def case_what_codecs_owe_is_saved_and_restored():
    for name in ("topk", "powersgd"):
        model = Model()
        with plan(
            coded_plan("topk") if name == "topk" else ExchangePlan(large=PLANS[name]), CLASSES
        ):
            distributed = OURS(OPTIMIZERS["momentum"](model.parameters()), model.named_parameters())
            _steps(model, distributed, range(5))
            file = io.BytesIO()
            torch.save(distributed.state_dict(), file)
            saved = copy.deepcopy(model.state_dict())
            expected = _steps(model, distributed, range(5, 9))
            again = Model()
            again.load_state_dict(saved)
            resumed = OURS(OPTIMIZERS["momentum"](again.parameters()), again.named_parameters())
            file.seek(0)
            resumed.load_state_dict(torch.load(file))
            # Buckets follow the first step's order of arrival, which is the same here.
            assert_identical(_steps(again, resumed, range(5, 9)), expected)
            plain = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
            file.seek(0)
            plain.load_state_dict(torch.load(file))  # others ignore what is ours


#: Of ``struct tcp_info`` in ``linux/tcp.h``: where ``tcpi_bytes_acked`` is.
_BYTES_ACKED = 120


def _sent_by_this_rank():
    """Bytes that arrived of all that this process has sent by TCP."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is closed meanwhile, or no TCP
            if not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as peer:
                about = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
            total += int.from_bytes(about[_BYTES_ACKED:], sys.byteorder)
    return total


def case_bytes_on_the_wire():
    if hvd.mpi_enabled():
        raise unittest.SkipTest("ranks of one host use shared memory under MPI")
    size = 2_000_000
    for name, changes in (("fp16", {}), ("bf16", {}), ("int8", {}), ("topk", {}), ("powersgd", {})):
        codec, tensor = make(name, size, **changes), data(size=size)
        reduce(codec, tensor, name)
        counted = []
        for _ in range(8):
            hvd.barrier()
            before = _sent_by_this_rank()
            hvd.barrier()
            reduce(codec, tensor, name)
            hvd.barrier()
            own = torch.tensor(float(_sent_by_this_rank() - before), dtype=torch.float64)
            counted.append(hvd.allreduce(own, name="sent").item())
        # Negotiation goes on all the time, so that a busy machine adds to it.
        sent = min(counted)
        # That, the barriers and sizes come on top.
        assert codec.sent_bytes() < sent < 1.05 * codec.sent_bytes() + 20_000, (
            name,
            sent,
            codec.sent_bytes(),
        )


def case_half_is_horovods_half():
    tensor = data()
    theirs = hvd.allreduce(tensor, name="half", compression=hvd.Compression.fp16)
    codec = Fp16Codec(SIZE, torch.zeros(0), hvd.size())
    torch.testing.assert_close(reduce(codec, tensor), theirs, atol=1e-3, rtol=1e-3)


def case_types_that_cannot_be_reduced():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with plan(ExchangePlan(2), {}), raises(AutosyncError, "complex64"):
        OURS(torch.optim.SGD([weight], lr=0.1), [("spectrum", weight)])


def case_ranks_above_the_matrix():
    model = torch.nn.Linear(5, 4, bias=False)
    chosen = ExchangePlan(large=ClassPlan(codec="powersgd", rank=5))
    with plan(chosen, {"large": ("*",)}), raises(AutosyncError, "weight"):
        OURS(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
