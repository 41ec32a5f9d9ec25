"""Ranks in threads: they do what Horovod does, fail in bounded time, and are the same again."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.runtime.collectives.levels import two_levels
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Max,
    Sum,
    allgather,
    allreduce,
    allreduce_async_,
    collectives,
    join,
    poll,
    rank,
    size,
    synchronize,
)
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks

CASES = Path(__file__).parents[1] / "workers" / "cases_collectives.py"


def _contract() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases_collectives", CASES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONTRACT = _contract()


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", [name for name in vars(CONTRACT) if name.startswith("case_")])
def test_what_horovod_does(case: str, ranks: int, turns: bool) -> None:
    for seed in range(10):
        ThreadRanks(ranks, seed=seed, turns=turns).run(getattr(CONTRACT, case))


def test_the_numbers_of_reductions_are_horovods() -> None:
    from horovod.torch import mpi_ops

    assert (Sum, Max) == (mpi_ops.Sum, mpi_ops.Max)


def test_results_are_in_the_order_of_ranks() -> None:
    assert ThreadRanks(3).run(lambda: (rank(), size())) == [(0, 3), (1, 3), (2, 3)]
    assert ThreadRanks(2).run([lambda: "first", lambda: "second"]) == ["first", "second"]


def test_other_threads_have_horovods() -> None:
    ThreadRanks(2).run(lambda: allreduce(torch.ones(1), name="one", op=Sum))
    assert type(collectives()).__name__ == "OverHorovod"


def test_hosts() -> None:
    def body() -> tuple[int, int, float]:
        levels = two_levels()
        own = torch.tensor([float(rank())])
        synchronize(allreduce_async_(own, name="within", op=Sum, process_set=levels.within))
        return levels.across.rank(), levels.within.rank(), own.item()

    within = [1.0, 1.0, 5.0, 5.0]
    assert ThreadRanks(4, hosts=2).run(body) == [
        (host, slot, within[2 * host]) for host in (0, 1) for slot in (0, 1)
    ]


def _order(seed: int) -> list[int]:
    order: list[int] = []

    def body() -> None:
        for step in range(5):
            allreduce(torch.ones(1), name=f"step {step}", op=Sum)
            order.append(rank())

    ThreadRanks(3, seed=seed).run(body)
    return order


def test_the_seed_is_the_order() -> None:
    orders = [_order(seed) for seed in range(10)]
    assert orders == [_order(seed) for seed in range(10)]
    assert len({tuple(order) for order in orders}) > 5


def test_polls_notice_late() -> None:
    def body() -> int:
        handle = allreduce_async_(torch.ones(1), name="polled", op=Sum)
        polls = 1
        while not poll(handle):
            polls += 1
        synchronize(handle)
        return polls

    assert len({ThreadRanks(1, seed=seed).run(body)[0] for seed in range(30)}) > 2


def test_operations_are_counted() -> None:
    ranks = ThreadRanks(2)

    def body() -> None:
        allreduce(torch.ones(3), name="sum", op=Sum)
        allgather(torch.ones(rank() + 1, dtype=torch.int64), name="all")

    ranks.run(body)
    assert ranks.calls == {"allreduce": 2, "allgather": 2}
    assert ranks.sent_bytes == {"allreduce": 24, "allgather": 24}
    assert ranks.names == {0: ["sum", "all"], 1: ["sum", "all"]}


@pytest.mark.parametrize("turns", [True, False])
def test_names_that_differ_end_in_an_error_without_a_limit(turns: bool) -> None:
    outcomes = ThreadRanks(2, turns=turns, limit_s=3600).outcomes(
        lambda: allreduce(torch.ones(1), name=f"of {rank()}", op=Sum)
    )
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveError)
        assert "rank 0 waits for allreduce 'of 0'" in str(outcome)
        assert "ranks [0] have not called 'of 1'" in str(outcome)


@pytest.mark.parametrize("turns", [True, False])
def test_a_rank_that_has_ended_is_missed(turns: bool) -> None:
    def body() -> None:
        if rank():
            allreduce(torch.ones(1), name="alone", op=Sum)

    first, second = ThreadRanks(2, turns=turns).outcomes(body)
    assert first is None and isinstance(second, CollectiveError)
    assert "ranks [0] have ended without 'alone'" in str(second)


def test_a_poll_without_end_is_stuck() -> None:
    def body() -> None:
        handle = allreduce_async_(torch.ones(1), name=f"of {rank()}", op=Sum)
        while not poll(handle):
            pass
        synchronize(handle)

    for outcome in ThreadRanks(2).outcomes(body):
        assert "no rank can go on" in str(outcome)


def test_a_loop_without_operations_is_ended() -> None:
    ended: list[bool] = []

    def body() -> None:
        while not ended:
            time.sleep(0.001)

    with pytest.raises(TimeoutError, match=r"ranks \[0\] are not in an operation"):
        ThreadRanks(1, limit_s=0.1).run(body)
    ended.append(True)


@pytest.mark.parametrize(
    ("of_rank_0", "of_rank_1", "told"),
    [
        (torch.ones(2), torch.ones(3), "(3,)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float64"),
        (torch.ones(2), torch.ones(1, 2), "(1, 2)"),
    ],
)
def test_tensors_that_differ_are_described(
    of_rank_0: torch.Tensor, of_rank_1: torch.Tensor, told: str
) -> None:
    tensors = [of_rank_0, of_rank_1]
    for outcome in ThreadRanks(2).outcomes(lambda: allreduce(tensors[rank()], name="sum", op=Sum)):
        assert isinstance(outcome, CollectiveError)
        assert "ranks disagree about 'sum'" in str(outcome) and told in str(outcome)


def test_kinds_and_reductions_that_differ() -> None:
    def kinds() -> torch.Tensor:
        if rank():
            return allreduce(torch.ones(1), name="it", op=Sum)
        return allgather(torch.ones(1), name="it")

    def reductions() -> torch.Tensor:
        return allreduce(torch.ones(1), name="it", op=(Sum, Max)[rank()])

    for body in (kinds, reductions):
        for outcome in ThreadRanks(2).outcomes(body):
            assert "ranks disagree about 'it'" in str(outcome)


def test_a_tensor_that_changes_in_progress() -> None:
    def body() -> None:
        own = torch.ones(2)
        handle = allreduce_async_(own, name="changed", op=Sum)
        if rank() == 0:
            own[1] = 5
        synchronize(handle)

    # Where the other rank has called it before, the operation is done before the change.
    outcomes = [ThreadRanks(2, seed=seed).outcomes(body) for seed in range(10)]
    failed = [each for each in outcomes if isinstance(each[0], CollectiveError)]
    assert failed and all("rank 0 has changed a tensor" in str(each[1]) for each in failed)


def test_the_same_name_twice() -> None:
    def body() -> None:
        allreduce_async_(torch.ones(1), name="twice", op=Sum)
        allreduce_async_(torch.ones(1), name="twice", op=Sum)

    with pytest.raises(CollectiveError, match="calls 'twice' again before its first call is done"):
        ThreadRanks(2, seed=1).run([body, lambda: allreduce(torch.ones(1), name="other", op=Sum)])


def test_no_gathering_while_a_rank_is_in_join() -> None:
    def body() -> None:
        if rank():
            allgather(torch.ones(1), name="all")
        join()

    first, second = ThreadRanks(2).outcomes(body)
    assert "while a rank waits in join()" in str(second)
    assert isinstance(first, CollectiveError), "its peer is gone"


def test_no_join_with_an_operation_in_progress() -> None:
    def body() -> None:
        allreduce_async_(torch.ones(1), name="open", op=Sum)
        join()

    with pytest.raises(CollectiveError, match=r"calls join\(\) with \['open'\] in progress"):
        ThreadRanks(2).run(body)


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("at", range(4))
def test_a_rank_that_dies(at: int, turns: bool) -> None:
    def body() -> int:
        for step in range(3):
            allreduce(torch.ones(1), name=f"step {step}", op=Sum)
        return join()

    outcomes = ThreadRanks(3, dies={1: at}, turns=turns).outcomes(body)
    assert isinstance(outcomes[1], RankDied)
    for other in (outcomes[0], outcomes[2]):
        assert isinstance(other, CollectiveError)
        assert "rank 1 is gone: RankDied" in str(other)


def test_an_operation_that_fails() -> None:
    def body() -> None:
        for step in range(3):
            allreduce(torch.ones(1), name=f"step {step}", op=Sum)

    ranks = ThreadRanks(2, breaks_at=1)
    for outcome in ranks.outcomes(body):
        assert isinstance(outcome, CollectiveError) and "'step 1' was to fail" in str(outcome)
    assert ranks.names[0] == ["step 0", "step 1"]


def test_an_error_of_one_rank_is_raised_before_those_that_follow_from_it() -> None:
    def body() -> None:
        if rank() == 2:
            raise KeyError("the cause")
        allreduce(torch.ones(1), name="sum", op=Sum)

    with pytest.raises(KeyError, match="the cause"):
        ThreadRanks(3).run(body)
