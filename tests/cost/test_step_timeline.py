"""One step taken apart: what the pieces say together is what the cost model says."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hvd_autosync.api.results import Study
from hvd_autosync.cost import CostModel
from hvd_autosync.cost.coefficients import UNCALIBRATED, Coefficients
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.step_timeline import step_timeline
from hvd_autosync.search_space import Task, Value

TABLES = Path(__file__).parents[2] / "benchmarks" / "traces"


@pytest.fixture(scope="module", params=["vgg-100mbit-codec", "bert-1000mbit"])
def task(request: pytest.FixtureRequest) -> Task:
    task = Study.load(TABLES / f"{request.param}.jsonl.gz").record.task
    assert task is not None
    return task


STRATEGIES: list[dict[str, Value]] = [
    {},
    {"buckets": 4},
    {"buckets": 3, "bucket_rule": "size"},
    {"fusion_threshold_bytes": 0},
    {"large_codec": "powersgd", "large_rank": 2},
    {"local_steps": 8},
    {"protocol": "asp"},
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_message_ends_where_communication_does(
    task: Task, strategy: dict[str, Value]
) -> None:
    model = CostModel(task.model, task.resources)
    found = step_timeline(model, strategy)
    assert found.step_s == pytest.approx(model.predict([strategy])[0])
    prepared = model.phases(Columns.of([strategy])).typical
    assert prepared.items is not None

    end_s, _ = prepared._communication(1, *np.ones((3, 1)))
    assert found.messages[-1].end_s == pytest.approx(
        (found.forward_s if found.local == 1 else found.backward_s) + end_s[0]
    )
    assert len(prepared.ends(UNCALIBRATED)) == len(found.messages)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_messages_follow_each_other_and_carry_everything(
    task: Task, strategy: dict[str, Value]
) -> None:
    found = step_timeline(CostModel(task.model, task.resources), strategy)
    sent = [p.size_bytes for p in task.model.parameters if p.ready_order >= 0]
    assert sum(message.size_bytes for message in found.messages) == pytest.approx(sum(sent))
    ends = [message.end_s for message in found.messages]
    assert ends == sorted(ends)
    assert all(m.ready_s <= m.begin_s <= m.end_s for m in found.messages)
    assert found.forward_s < found.backward_s < found.step_s


def test_slower_computation_moves_all_of_it(task: Task) -> None:

    model = CostModel(task.model, task.resources)
    usual, slow = (
        step_timeline(model, {}),
        step_timeline(model, {}, Coefficients(compute=math.log(2))),
    )
    assert slow.backward_s == pytest.approx(2 * usual.backward_s)
    assert slow.messages[0].ready_s == pytest.approx(2 * usual.messages[0].ready_s)
