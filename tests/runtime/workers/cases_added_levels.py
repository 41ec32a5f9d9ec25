"""Process sets of two levels where ``hvd.init()`` has not made them."""

import horovod.torch as hvd
import torch
from common import raises

from hvd_autosync.runtime.collectives.levels import two_levels
from hvd_autosync.runtime.collectives.operations import add_process_set


def sum_over(members, name):
    """The sum of 2 to the power of each rank."""
    own = torch.tensor([2.0 ** hvd.rank()])
    return hvd.allreduce(own, op=hvd.Sum, name=name, process_set=members).item()


def case_levels_are_added():
    levels = two_levels()
    assert levels is two_levels()
    host = hvd.rank() // 2
    assert levels.within.ranks == [2 * host, 2 * host + 1]
    assert levels.across.ranks == [hvd.local_rank(), hvd.local_rank() + 2]
    own = torch.tensor([float(hvd.rank())])
    within = hvd.allreduce(own, op=hvd.Sum, name="within", process_set=levels.within)
    total = hvd.allreduce(within, op=hvd.Sum, name="across", process_set=levels.across)
    assert (within.item(), total.item()) == (4.0 * host + 1, 6.0)


def case_the_script_adds_and_removes_sets_of_levels():
    host = hvd.rank() // 2
    for _ in range(2):
        sets = [hvd.add_process_set([0, 1]), hvd.add_process_set(hvd.ProcessSet([3, 2]))]
        assert sets[host].rank() == hvd.local_rank() and sets[host].size() == 2
        with raises(ValueError, "duplicate process set"):
            hvd.mpi_ops.add_process_set([0, 1])
        assert sum_over(sets[host], "script's") == 3 * 4**host
        assert sum_over(two_levels().within, "ours") == 3 * 4**host
        hvd.barrier()  # none removes a set that another one still uses
        copied = hvd.ProcessSet(sets[0].ranks)
        copied.process_set_id = sets[0].process_set_id
        for each in sets:
            assert hvd.remove_process_set(each) and each.process_set_id is None
        assert not hvd.remove_process_set(sets[0]) and not hvd.remove_process_set(copied)
    assert sum_over(two_levels().within, "ours again") == 3 * 4**host


def case_levels_are_sets_that_the_script_has_added():
    mine = {0: [0, 3], 3: [0, 3], 1: [1, 2], 2: [1, 2]}[hvd.rank()]
    scripts = {tuple(ranks): hvd.add_process_set(ranks) for ranks in ([0, 3], [1, 2])}
    ours = {tuple(ranks): add_process_set(ranks) for ranks in ([0, 3], [1, 2])}
    script, own = scripts[tuple(mine)], ours[tuple(mine)]
    assert own is add_process_set(mine) and own is not script
    expected = sum(2.0**rank for rank in mine)
    assert sum_over(own, "shared") == sum_over(script, "shared") == expected
    with raises(ValueError, "duplicate process set"):
        hvd.add_process_set([1, 2])
    hvd.barrier()
    for each in scripts.values():
        assert hvd.remove_process_set(each)
    assert sum_over(own, "shared") == expected
    assert hvd.remove_process_set(hvd.add_process_set([1, 2]))
