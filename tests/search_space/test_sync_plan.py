"""The synchronization plan: made from a strategy by one function."""

from __future__ import annotations

from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.knob_spec import PlanField
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import DEFAULT_CAP, Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan, beyond_horovod, schedule_of, sync_plan

CLASSES = {"large": ("body.*",)}
WHOLE = {
    "buckets": 2,
    "large_exchange": "sharded",
    "large_codec": "topk",
    "local_steps": 4,
    "protocol": "ssp",
    "staleness": 3,
    "sync_share": 0.5,
    "stragglers": "greedy",
}


def test_a_strategy_becomes_one_value() -> None:
    assert sync_plan(WHOLE, CLASSES) == SyncPlan(
        ExchangePlan(buckets=2, large=ClassPlan("sharded", codec="topk")),
        CLASSES,
        Schedule(4, cap=DEFAULT_CAP),
        Protocol("ssp", 3, share=0.5, stragglers="greedy"),
    )


def test_what_horovod_does_by_itself_needs_no_plan() -> None:
    for strategy in ({}, {"cycle_time_ms": 2.0}, {"local_steps": 1}, {"protocol": "bsp"}):
        assert sync_plan(strategy, CLASSES) is None and not beyond_horovod(strategy)
    for name in ("buckets", "local_steps", "protocol"):
        assert beyond_horovod({name: WHOLE[name]})


def test_replicas_that_may_differ_have_whole_parameters() -> None:
    plan = sync_plan(WHOLE)
    assert plan is not None and plan.effective_exchange.large.exchange == "allreduce"
    alone = sync_plan({"large_exchange": "sharded"})
    assert alone is not None and alone.effective_exchange == alone.exchange


def test_the_exact_plan_keeps_the_exchanges() -> None:
    plan = sync_plan(WHOLE, CLASSES)
    assert plan is not None and plan.lossy and not plan.exact().lossy
    large = ClassPlan("sharded")
    assert plan.exact() == SyncPlan(ExchangePlan(buckets=2, large=large), CLASSES)


def test_a_script_with_steps_of_its_own_keeps_the_rest() -> None:
    plan = sync_plan(WHOLE)
    assert plan is not None
    rest = plan.without_local_steps()
    assert rest is not None and rest.schedule is None and rest.protocol == plan.protocol
    alone = sync_plan({"local_steps": 4})
    assert alone is not None and alone.without_local_steps() is None


def test_a_knob_that_is_left_out_is_at_its_default() -> None:
    """Also where another knob switches it on."""
    seen = 0
    for spec in REGISTRY:
        if not isinstance(spec.sets, PlanField) or spec.name in ("local_steps", "stragglers"):
            continue
        condition = spec.knob.condition
        on = {} if condition is None else {condition.knob: condition.values[-1]}
        strategy = {"local_steps": 4, "stragglers": "greedy", **on}
        assert sync_plan({**strategy, spec.name: spec.knob.default}) == sync_plan(strategy), spec
        seen += 1
    assert seen > 20


def test_the_rule_for_local_steps_has_the_documented_alpha() -> None:
    assert schedule_of({"local_power": 2}) == Schedule(1, 2, 0.01, cap=DEFAULT_CAP)
