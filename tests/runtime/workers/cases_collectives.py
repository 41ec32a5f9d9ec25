"""What the runtime expects of its ranks' operations, whatever carries them.

Ranks of a job run these cases over Horovod, threads of one process over threads
(``tests/runtime/collectives/test_over_threads.py``).
"""

import torch

from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Max,
    Sum,
    all_ranks,
    allgather,
    allgather_async,
    allgather_into,
    allreduce,
    allreduce_async_,
    alltoall_async,
    alltoall_into,
    broadcast_,
    collectives,
    copies_to_host,
    join,
    poll,
    rank,
    size,
    synchronize,
)


def raises(action) -> str:
    """The message of the error of an operation that must fail."""
    try:
        action()
    except CollectiveError as error:
        return str(error)
    raise AssertionError("it has not failed")


def case_sums_and_maxima() -> None:
    own = torch.tensor([1.0, -rank()])
    total = allreduce(own, name="contract.sum", op=Sum)
    assert total.tolist() == [size(), -sum(range(size()))]
    assert own.tolist() == [1.0, -rank()], "only the result has changed"
    most = allreduce(torch.tensor([rank(), -rank()]), name="contract.max", op=Max)
    assert most.tolist() == [size() - 1, 0] and most.dtype == torch.int64


def case_sums_in_place_with_factors() -> None:
    own = torch.full((3,), 2.0 * (rank() + 1))
    handle = allreduce_async_(
        own, name="contract.factors", op=Sum, prescale_factor=0.5, postscale_factor=10.0
    )
    assert synchronize(handle) is own
    assert own.tolist() == [10.0 * sum(range(1, size() + 1))] * 3


def case_a_handle_is_done_after_some_polls() -> None:
    own = torch.ones(4)
    handle = allreduce_async_(own, name="contract.polled", op=Sum)
    while not poll(handle):
        pass
    synchronize(handle)
    assert own.tolist() == [size()] * 4


def case_operations_in_different_orders() -> None:
    names = [f"contract.order.{i}" for i in range(6)]
    own = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    order = names if rank() else names[::-1]
    handles = {name: allreduce_async_(own[name], name=name, op=Sum) for name in order}
    for name in names:
        synchronize(handles[name])
    assert [own[name].tolist() for name in names] == [[i * size()] * 2 for i in range(6)]


def case_gathering_of_different_lengths() -> None:
    own = torch.full((rank() + 1, 2), rank(), dtype=torch.int32)
    gathered = allgather(own, name="contract.gathered")
    wanted = [[other] * 2 for other in range(size()) for _ in range(other + 1)]
    assert gathered.tolist() == wanted and gathered.dtype == torch.int32
    handle = allgather_async(own, name="contract.gathered", process_set=all_ranks())
    assert synchronize(handle).tolist() == wanted
    output = torch.empty(len(wanted) * 2, dtype=torch.int32)
    handle = allgather_into(output, own.view(-1), name="contract.into", process_set=all_ranks())
    synchronize(handle)
    assert output.view(-1, 2).tolist() == wanted


def case_a_piece_for_each_rank() -> None:
    # To rank r go r + 1 elements.
    splits = torch.arange(1, size() + 1, dtype=torch.int32)
    own = torch.cat([torch.full((n,), 10.0 * rank() + n) for n in splits.tolist()])
    received, counts = synchronize(alltoall_async(own, splits, name="contract.pieces"))
    mine = rank() + 1
    assert counts.tolist() == [mine] * size()
    assert received.tolist() == [
        10.0 * other + mine for other in range(size()) for _ in range(mine)
    ]
    output, into = torch.empty(mine * size()), torch.empty(size(), dtype=torch.int32)
    synchronize(alltoall_into(output, into, own, splits, name="contract.pieces.into"))
    assert torch.equal(output, received) and into.tolist() == counts.tolist()


def case_broadcast() -> None:
    last = size() - 1
    own = torch.tensor([rank(), 7])
    assert broadcast_(own, last, name="contract.broadcast") is own
    assert own.tolist() == [last, 7]


def case_results_in_place_leave_versions() -> None:
    """By its version a tensor that the script has changed is told from a result."""
    own = torch.ones(3)
    if copies_to_host(own):
        return  # a copy of torch's, which counts
    before = own._version
    synchronize(allreduce_async_(own, name="contract.version.sum", op=Sum))
    assert own.tolist() == [size()] * 3 and own._version == before
    own.data.fill_(rank())
    broadcast_(own, size() - 1, name="contract.version.broadcast")
    assert own.tolist() == [size() - 1] * 3 and own._version == before


def case_zeros_take_the_place_of_a_rank_in_join() -> None:
    # Rank r leaves after r sums, rank 0 once it is alone.
    for _ in range(rank()):
        allreduce(torch.ones(1), name="contract.joined", op=Sum)
    while rank() == 0 and allreduce(torch.ones(1), name="contract.joined", op=Sum).item() > 1:
        pass
    assert join() == 0


def case_join_is_watched() -> None:
    seen = []

    def watch(inner):
        def watched(device: int) -> int:
            seen.append("before")
            last = inner(device)
            seen.append(last)
            return last

        return watched

    collectives().wrap_join(watch)
    last = join()
    assert seen == ["before", last] and 0 <= last < size()


def case_ranks_that_disagree_are_told() -> None:
    own = torch.zeros(2 + rank() % 2)
    message = raises(lambda: allreduce(own, name="contract.shapes", op=Sum))
    assert "shape" in message or "(3,)" in message, message
    # Later operations are not affected.
    assert allreduce(torch.ones(1), name="contract.after", op=Sum).item() == size()
