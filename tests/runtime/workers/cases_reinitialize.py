"""Horovod is initialized again between two steps, and training goes on as without."""

import contextlib
import copy
import gc
import io
import itertools
import os
import signal
import threading
import time
import unittest.mock
import weakref

import horovod.torch as hvd
import torch
from cases_codecs import PLANS as CODECS
from cases_codecs import coded_plan
from cases_exchanges import CLASSES, OPTIMIZERS, PLANS, groups_of, loss_of, plan
from cases_guard import real_training
from cases_local_steps import local
from cases_local_steps import step as local_step
from cases_protocols import phases
from cases_switching import Model, plans
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    guard_of,
    raises,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hvd_autosync
from hvd_autosync.errors import AutosyncError
from hvd_autosync.extensions import add_knob
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import reinitialize as module
from hvd_autosync.runtime.collectives.addresses import own_address
from hvd_autosync.runtime.collectives.levels import two_levels
from hvd_autosync.runtime.collectives.reinitialize import (
    CannotReinitializeError,
    NotNowError,
    check_reinitialize,
    reinitialize,
)
from hvd_autosync.runtime.collectives.standstill import in_flight
from hvd_autosync.runtime.live import attach
from hvd_autosync.runtime.live.attach import Attacher
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.knob_spec import KnobSpec, Variable
from hvd_autosync.search_space.knobs import categorical_knob
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.sync_plan import SyncPlan
from hvd_autosync.search_space.trial import LOSS_WINDOW

CYCLE, CACHE, FUSION = (
    f"HOROVOD_{name}" for name in ("CYCLE_TIME", "CACHE_CAPACITY", "FUSION_THRESHOLD")
)
#: What a re-initialization changes, over and over.
VARIABLES = [
    {CYCLE: "0.5"},
    {CYCLE: "3", CACHE: "0"},
    {CACHE: None, "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"},
    {CYCLE: None, CACHE: "7"},
    {CACHE: None, "HOROVOD_HIERARCHICAL_ALLREDUCE": None},
]
TIMES = 50


def again(variables=None):
    reinitialize(variables or {})


def files_and_threads(before=None):
    """Open files and threads of this process, once those that are ending have ended.

    On a busy machine it may take a while until there are as many as ``before``.
    """
    deadline = time.monotonic() + 120
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:  # of a rendezvous server, which joins none
            thread.join(120)
    while True:
        time.sleep(0.1)
        found = len(os.listdir("/proc/self/fd")), threading.active_count()
        if before in (None, found) or time.monotonic() > deadline:
            return found


@contextlib.contextmanager
def names_of_reductions():
    """The names of allreduces that this rank starts meanwhile."""
    reduce, names = hvd.mpi_ops._allreduce_async, []

    def reducing(tensor, output, name, *others):
        names.append(name)
        return reduce(tensor, output, name, *others)

    with unittest.mock.patch.object(hvd.mpi_ops, "_allreduce_async", reducing):
        yield names


class Data(Dataset):
    """Batches of this rank, by number."""

    def __init__(self, count, rank):
        self.count, self.rank = count, rank

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        # A forked process cannot use a GPU.
        generator = torch.Generator("cpu").manual_seed(1000 * self.rank + number)
        return torch.randn(6, 12, generator=generator, device="cpu")


def train(between, steps, base):
    """Bits of parameters, statistics and optimizer after some steps; ``between`` any two."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3))
    for parameter in model.parameters():
        # Sums without rounding are the same in whichever order ranks and buffers add up.
        parameter.register_hook(lambda g: (g.clamp(-1, 1) * 2**16).round() / 2**16)
    distributed = OURS(base(model.parameters()), named_parameters=model.named_parameters())
    loader = DataLoader(
        Data(steps // 2, hvd.rank()), batch_size=None, num_workers=1, persistent_workers=True
    )
    for number, x in enumerate(itertools.chain(loader, loader)):
        distributed.zero_grad()
        model(x.to(torch.get_default_device())).pow(2).mean().backward()
        distributed.step()
        between(number)
    states = [v for s in distributed.state.values() for v in s.values() if torch.is_tensor(v)]
    del loader  # and its worker
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *states)]


def case_a_training_has_the_bits_of_one_without():
    before = {name: os.environ.get(name) for each in VARIABLES for name in each}
    seen, steps = [], []

    def between(number):
        steps.append(sorted(names))
        names.clear()
        if number % 2:
            again(VARIABLES[number // 2 % len(VARIABLES)])
            if number // 2 in (4, TIMES - 1):
                seen.append(files_and_threads(*seen))

    adam = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731
    with names_of_reductions() as names:
        ours = train(between, 2 * TIMES, adam)
    assert steps[0] and all(each == steps[0] for each in steps), steps
    assert len(seen) == 2 and seen[0] == seen[1], seen
    assert {name: os.environ.get(name) for name in before} == before
    assert_identical(ours, train(lambda _: None, 2 * TIMES, adam))


def case_variables_are_those_of_the_request():
    rendezvous = {n: v for n, v in os.environ.items() if "RENDEZVOUS" in n}
    again({CACHE: "5", CYCLE: "2"})
    assert os.environ[CACHE] == "5" and os.environ[CYCLE] == "2"
    again({CACHE: None})
    assert CACHE not in os.environ and os.environ[CYCLE] == "2"
    again({CYCLE: None})
    assert {n: v for n, v in os.environ.items() if "RENDEZVOUS" in n} == rendezvous


def case_cycle_time_takes_effect():
    def seconds():
        hvd.barrier()
        began = time.perf_counter()
        for number in range(5):
            hvd.allreduce(torch.ones(1), name=f"cycle.{number}")
        return time.perf_counter() - began

    again({CYCLE: "100"})
    slow = seconds()
    again({CYCLE: None})
    assert slow > 0.3 > seconds() or slow > 3 * seconds(), slow


def case_a_variable_of_an_extension_takes_effect():
    """Once its declaration says that Horovod reads it again."""

    def pinned():
        found = []
        for each in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                found += [each] * (os.sched_getaffinity(int(each)) == {0})
        return found

    name, cores = "HOROVOD_THREAD_AFFINITY", ",".join("0" * hvd.local_size())
    refused({name: cores}, f"{name} cannot be changed")
    knob = categorical_knob("affinity", ("free", cores), "free", help="Cores of Horovod's threads.")
    add_knob(KnobSpec(knob, Variable(name, reread=True), "always"))
    try:
        again({name: cores})
        assert len(pinned()) == 1
        again({name: None})
        assert not pinned()
    finally:
        del REGISTRY._specs[knob.name]


def case_plans_go_on():
    """Each plan before and after, with its owners, deferred updates and factors."""
    names = plans()
    # Adam makes steps of gradients that are zero but for the order in which ranks add up.
    optimizer = "Adam" if hvd.size() == 2 else "momentum"

    def run(factory, number=0):
        model = Model()
        base = OPTIMIZERS[optimizer](groups_of(model))
        distributed = factory(base, named_parameters=model.named_parameters())
        for place, name in enumerate([*names, *reversed(names)]):
            if factory is OURS and place:
                switch(distributed, SyncPlan(PLANS[name], CLASSES))
            for _ in range(2):
                for _ in range(4):
                    distributed.zero_grad()
                    loss_of(model, number).backward()
                    distributed.step()
                    number += 1
                if factory is OURS:
                    again(VARIABLES[place % len(VARIABLES)])
        return [each.detach() for each in (*model.parameters(), *model.buffers())]

    with plan(PLANS[names[0]]):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS), atol=1e-4, rtol=1e-4)
    assert_same_on_all_ranks([p for p in ours if p.dim() == 2])


def case_codes_and_join_go_on():
    """What codecs keep from step to step stays, and ranks that have joined come back."""
    chosen = [coded_plan(name) for name in CODECS]
    chosen.append(ExchangePlan(2, "ordered", "arrival", *[ClassPlan(lossless=True)] * 3))

    def run(between):
        model = Model()
        base = OPTIMIZERS["momentum"](groups_of(model))
        with plan(chosen[0]):
            distributed = OURS(base, named_parameters=model.named_parameters())
        numbers, found = itertools.count(), []

        def step():
            distributed.zero_grad()
            loss_of(model, next(numbers)).backward()
            distributed.step()

        def state():
            return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]

        for place, each in enumerate(chosen):
            if place:
                switch(distributed, SyncPlan(each, CLASSES))
            for _ in range(1 + TIMES // len(chosen)):
                step()
                between()
            found += state()
        for _ in range(1 + hvd.rank()):
            step()
        hvd.join()
        between()
        return found + state()

    counted = itertools.count()
    ours = run(lambda: again(VARIABLES[next(counted) % len(VARIABLES)]))
    assert next(counted) > TIMES
    expected = run(lambda: None)
    if hvd.size() == 2:  # sums of more depend on the order in which ranks add up
        assert_identical(ours, expected)
    assert all(each.isfinite().all() for each in ours)


def case_rounds_of_local_steps_go_on():
    def run(between):
        model, optimizer = local(Schedule(4))
        for number in range(13):
            local_step(model, optimizer, number)
            between(number)
        optimizer.average()
        return [p.detach() for p in model.parameters()]

    ours = run(lambda number: again({CYCLE: "2"} if number % 2 else {CYCLE: None}))
    assert_close(ours, run(lambda _: None))
    assert_same_on_all_ranks(ours)


def case_a_phase_with_a_barrier_goes_on():
    model, optimizer = phases(Protocol("asp", share=1.0))
    for number in range(6):
        local_step(model, optimizer, number)
        again()
    assert_same_on_all_ranks([p.detach() for p in model.parameters()])


def case_process_sets_stay():
    last = hvd.size() - 1
    added = [hvd.add_process_set([0]), hvd.add_process_set([last])]
    copied = copy.deepcopy(added[0])
    mine = [each for each in added if hvd.rank() in each.ranks]
    for frozen in (False, True):
        if frozen:  # as a script does before it forks the workers of a loader
            gc.freeze()
        again({CACHE: "9"})
        assert [each.ranks for each in added] == [[0], [last]]
        assert copied.process_set_id == added[0].process_set_id
        for own in mine:
            total = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="own", process_set=own)
            assert total.item() == own.size() == 1
        hvd.barrier()
        with raises(ValueError, "duplicate"):
            hvd.add_process_set([0])
    # One that is removed does not return, and the other one has another number perhaps.
    assert hvd.remove_process_set(added[0])
    again({CACHE: None})
    assert added[0].process_set_id is None
    assert mine in ([], [added[0]]) or mine[-1].rank() == 0
    later = hvd.add_process_set([0])
    again()
    assert later.included() == (hvd.rank() == 0)
    for each in (later, added[1]):
        assert hvd.remove_process_set(each)


def case_two_levels_stay():
    if hvd.cross_size() > 1:
        levels = two_levels()
        script = hvd.add_process_set([0, 1])
        again()
        assert two_levels() is levels
        with raises(ValueError, "duplicate"):
            hvd.add_process_set([0, 1])
        assert hvd.remove_process_set(script)
        total = torch.ones(1)
        for name in ("within", "across"):
            members = getattr(levels, name)
            total = hvd.allreduce(total, op=hvd.Sum, name=name, process_set=members)
        assert total.item() == hvd.size()


def case_operations_under_way_are_waited_for():
    library, handles = hvd.mpi_ops.mpi_lib, []
    for late in range(hvd.size()):
        own = torch.ones(3)
        if hvd.rank() == late:
            handles = [hvd.allreduce_async_(own, name="late", op=hvd.Sum)]
        with raises(NotNowError, f"1 operation is under way on rank {late}"):
            again({CACHE: "3"})
        assert CACHE not in os.environ and hvd.mpi_ops.mpi_lib is library
        if hvd.rank() != late:
            handles = [hvd.allreduce_async_(own, name="late", op=hvd.Sum)]
        assert hvd.synchronize(handles[0])[0] == hvd.size()
        again()


def case_other_threads_wait():
    results, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            results.append((hvd.rank(), hvd.size(), hvd.mpi_ops.is_initialized()))
            time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    done = 0
    try:
        while done < 10:
            with contextlib.suppress(NotNowError):
                again()
                done += 1
    finally:
        stop.set()
        thread.join()
    assert {*results} == {(hvd.rank(), hvd.size(), True)}


def case_a_thread_inside_an_operation_is_noticed():
    """It waits for the other ranks in a function of Horovod's that has no handle."""
    added = []
    thread = threading.Thread(target=lambda: added.append(hvd.add_process_set([0])), name="adding")
    if hvd.rank() == 0:
        thread.start()
        while not in_flight():
            time.sleep(0.001)
    with raises(NotNowError, "thread 'adding' is inside a call of Horovod on rank 0"):
        again()
    if hvd.rank() > 0:
        added.append(hvd.add_process_set([0]))
    else:
        thread.join()
    again()
    assert hvd.remove_process_set(added[0])


def case_signals_are_handled_afterwards():
    seen = []

    def handler(number, frame):
        seen.append((number, hvd.mpi_ops.is_initialized()))
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, handler)
    # Handlers run between two operations of Python only: this comes before shutdown() and after.
    shutdown = hvd.mpi_ops.shutdown

    def terminated():
        signal.raise_signal(signal.SIGTERM)
        shutdown()
        time.sleep(0)

    hvd.mpi_ops.shutdown = terminated
    try:
        with raises(InterruptedError):
            again()
    finally:
        hvd.mpi_ops.shutdown = shutdown
        assert signal.signal(signal.SIGTERM, before) is handler
    assert seen == [(signal.SIGTERM, True)]
    assert_same_on_all_ranks([torch.ones(3)])


@contextlib.contextmanager
def having(**variables):
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def refused(variables, text):
    library = hvd.mpi_ops.mpi_lib
    assert text in check_reinitialize(variables), check_reinitialize(variables)
    with raises(CannotReinitializeError, text):
        again(variables)
    assert hvd.mpi_ops.mpi_lib is library
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="on").item() == hvd.size()


def case_refusals():
    last = hvd.size() - 1
    with having(HOROVOD_TIMELINE="DYNAMIC") if hvd.rank() == last else contextlib.nullcontext():
        refused({}, f"timeline (HOROVOD_TIMELINE) (rank {last})")
    with having(HOROVOD_AUTOTUNE="1"):
        refused({}, "Horovod's own autotuning")
    with having(HOROVOD_AUTOTUNE=""):  # off, as Horovod reads it
        assert check_reinitialize({}) is None
    with having(HOROVOD_ELASTIC="1"):
        refused({}, "the job is elastic")
    refused({FUSION: "100", CYCLE: "2"}, "both")
    refused({"HOROVOD_RANK": "7"}, "HOROVOD_RANK cannot be changed")
    refused({"HOROVOD_BATCH_D2D_MEMCOPIES": "0"}, "cannot be changed")
    refused({CACHE: str(hvd.rank())}, "different variables")
    again({CYCLE: "1"})
    again({CYCLE: None})
    refused({FUSION: "100"}, "both")
    assert check_reinitialize({CACHE: "1"}) is None
    assert issubclass(CannotReinitializeError, AutosyncError)


def case_where_ranks_cannot_meet():
    """Nothing was done, on any rank, and the training goes on."""

    def no_address(name):
        own_address(name)  # which is a collective
        raise OSError("no IPv4 address")

    def no_server(address):
        raise RuntimeError("can't start new thread")

    if hvd.mpi_enabled():
        return  # they need no place
    known = module._ADDRESS[:]
    own_server = module.rendezvous_server
    for broken, text in (("own_address", "no IPv4 address"), ("rendezvous_server", "new thread")):
        module._ADDRESS.clear()
        if hvd.rank() == 0:
            setattr(module, broken, no_address if broken == "own_address" else no_server)
        with raises(CannotReinitializeError, text):
            again()
        with raises(CannotReinitializeError, text):
            again()
        module.own_address, module.rendezvous_server = own_address, own_server
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="on").item() == hvd.size()
    module._ADDRESS[:] = known
    again()


def reading(*names):
    """Let Horovod have read these variables, as far as live tuning knows."""
    return unittest.mock.patch.object(attach, "variables_read", lambda: {*names})


def case_ranks_with_values_of_their_own():
    said = io.StringIO()
    with having(**{CACHE: str(hvd.rank())}), reading(CACHE), contextlib.redirect_stderr(said):
        assert not Attacher().reinitializes()
    assert ("ranks have different values of " + CACHE in said.getvalue()) == (hvd.rank() == 0)
    with reading(CACHE):
        assert Attacher().reinitializes()


def case_a_variable_that_one_rank_sets_after_the_import():
    attacher, said = Attacher(), io.StringIO()
    last = hvd.rank() == hvd.size() - 1
    with having(**({CACHE: "100"} if last else {})), contextlib.redirect_stderr(said):
        assert not attacher.reinitializes()
    assert (f"the script sets {CACHE} after" in said.getvalue()) == (hvd.rank() == 0)
    with reading(CACHE):
        assert attacher.reinitializes()


def case_a_cycle_time_that_horovod_has_read():
    """No live trial initializes it again, because it would fuse less after that."""
    said = io.StringIO()
    with reading(*[CYCLE] * hvd.rank()), contextlib.redirect_stderr(said):
        assert not Attacher().reinitializes()
    assert (CYCLE in said.getvalue()) == (hvd.rank() == 0)


def case_a_training_that_has_begun_under_a_strategy():
    """The empty strategy is that; a default of Horovod's is the default, and not its value."""
    model = Model()
    coded = ClassPlan(codec="bf16")
    begun = Strategy({"cache_capacity": 0, "rest_codec": "bf16", "large_codec": "bf16"})
    exchange = ExchangePlan(rest=coded, large=coded)
    with having(**{CACHE: "0"}), real_training(), plan(exchange):
        optimizer = OURS(OPTIMIZERS["momentum"](groups_of(model)), model.named_parameters())
        current.strategy = begun
        try:
            attacher = Attacher()
        finally:
            current.strategy = None
        assert attacher.variables[CACHE] == "0"
        for strategy, value in (
            (begun.replacing(cache_capacity=1024), None),
            (begun.replacing(cache_capacity=4096), "4096"),
            (Strategy(), "0"),
        ):
            attacher.attach([optimizer], strategy, {})
            assert attacher.variables[CACHE] == value
            assert optimizer._sync.plan.exchange == exchange
            optimizer.zero_grad()
            loss_of(model, 1).backward()
            optimizer.step()
    again({CACHE: None})


def case_under_a_loss_guard():
    """Between its windows there is always a sum under way."""
    model = Model()
    coded = ClassPlan(codec="bf16")
    with real_training() as said, plan(ExchangePlan(rest=coded, large=coded)):
        optimizer = OURS(OPTIMIZERS["momentum"](groups_of(model)), model.named_parameters())
        guard = guard_of(optimizer)
        windows, accepts = [], guard._envelope.accepts
        guard._envelope.accepts = lambda *args: windows.append(args[1]) or accepts(*args)
        for number in range(4 * LOSS_WINDOW):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            hvd_autosync.report(loss)
            loss.backward()
            optimizer.step()
            if number % LOSS_WINDOW == 5:
                again({CACHE: str(8 + number)})
        again({CACHE: None})
    assert guard.step == 4 * LOSS_WINDOW
    assert windows == [0, 1, 2], (windows, said.getvalue())


def case_after_a_loss_guard_is_gone():
    """With its optimizer, as where a script wraps another one; its last sum is under way."""
    model = Model()
    coded = ClassPlan(codec="bf16")
    with real_training(), plan(ExchangePlan(rest=coded, large=coded)):
        optimizer = OURS(OPTIMIZERS["momentum"](groups_of(model)), model.named_parameters())
        for number in range(LOSS_WINDOW + 1):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            hvd_autosync.report(loss)
            loss.backward()
            optimizer.step()
        gone = weakref.ref(guard_of(optimizer))
        del optimizer
        gc.collect()
        assert gone() is None
        again({CACHE: "9"})
        again({CACHE: None})


def case_in_another_thread():
    reasons = []
    thread = threading.Thread(target=lambda: reasons.append(check_reinitialize({})))
    thread.start()
    thread.join()
    assert "another thread than the main one" in reasons[0]


def case_in_another_thread_of_one_rank():
    """All ranks are told, though only one asks for it there."""
    refused = []

    def ask():
        try:
            reinitialize({CACHE: "17"})
        except CannotReinitializeError as error:
            refused.append(error.message)

    if hvd.rank() == hvd.size() - 1:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    else:
        ask()
    assert "another thread than the main one" in refused[0]
    assert f"(rank {hvd.size() - 1})" in refused[0]
