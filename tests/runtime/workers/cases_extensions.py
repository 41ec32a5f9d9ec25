"""The examples of an exchange and a codec of one file: exact, or owing what they leave out."""

import os
from pathlib import Path

import cases_exchanges
import horovod.torch as hvd
import torch
from cases_codecs import SIZE, data, mean, reduce
from common import HOROVODS, OURS, assert_close, assert_same_on_all_ranks, raises

from hvd_autosync import extensions
from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime.exchange.codecs import make_codec
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

EXAMPLES = Path(__file__).parents[3] / "examples" / "extending"
os.environ[extensions.VARIABLE] = os.pathsep.join(map(str, sorted(EXAMPLES.glob("*.py"))))
extensions.load()


def case_the_exchange_is_exact():
    gather = ClassPlan(exchange="gather")
    for chosen in (
        ExchangePlan(large=gather, rest=gather),
        ExchangePlan(2, "size", "arrival", ClassPlan("rows"), ClassPlan("gather", 3), gather),
    ):
        expected = cases_exchanges.train(HOROVODS)
        with cases_exchanges.plan(chosen):
            ours = cases_exchanges.train(OURS)
        assert_close(ours, expected, atol=2e-5, rtol=2e-5)
        assert_same_on_all_ranks(ours)


def case_what_the_codec_leaves_out_comes_later():
    codec = make_codec(ClassPlan(codec="sign"), SIZE, torch.zeros(0), hvd.size(), 1)
    results, means = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(20):
        results += reduce(codec, data(step), "sign")
        means += mean(data(step))
    owed = mean(codec.left_out())
    assert owed.abs().max() > 0.1
    torch.testing.assert_close(results + owed, means, atol=2e-4, rtol=1e-4)


def case_the_codec_forgets_overflows_and_keeps_zeros():
    codec = make_codec(ClassPlan(codec="sign"), SIZE, torch.zeros(0), hvd.size(), 1)
    assert not reduce(codec, torch.zeros(SIZE), "sign").any()
    bad = data()
    bad[7] = float("inf")
    assert not reduce(codec, bad, "sign").isfinite().all()
    assert reduce(codec, data(), "sign").isfinite().all()


def case_the_codec_trains():
    chosen = ExchangePlan(large=ClassPlan(codec="sign"))
    with cases_exchanges.plan(chosen):
        ours = cases_exchanges.train(OURS)
    assert_same_on_all_ranks(ours)
    assert all(each.isfinite().all() for each in ours)


def case_what_no_file_has_added_is_refused():
    for chosen in (ClassPlan("telepathy"), ClassPlan(codec="telepathy")):
        chosen_plan = cases_exchanges.plan(ExchangePlan(rest=chosen))
        with raises(SpaceError, "telepathy"), chosen_plan:
            cases_exchanges.train(OURS)
