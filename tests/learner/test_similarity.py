from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_autosync.learner.similarity import descriptor, similarity
from hvd_autosync.search_space import Host, Link, Links, ModelProfile, Resources, Task


@pytest.fixture
def task(model: ModelProfile, slow_network: Resources) -> Task:
    return Task(model, slow_network)


def with_network(task: Task, factor: float) -> Task:
    links = task.resources.links

    def scaled(link: Link | None) -> Link | None:
        return link and replace(link, bandwidth_bytes_per_s=factor * link.bandwidth_bytes_per_s)

    faster = Links(scaled(links.overall), links.within, scaled(links.across))
    return replace(task, resources=replace(task.resources, links=faster))


def test_a_task_is_like_itself(task: Task) -> None:
    assert similarity(task, task) == 1.0
    assert similarity(task, with_network(task, 1.1)) > 0.95


def test_the_nearer_network_is_more_alike(task: Task) -> None:
    nearer, farther = with_network(task, 3), with_network(task, 100)
    assert 1 > similarity(task, nearer) > similarity(task, farther) > 0
    assert similarity(task, nearer) == similarity(nearer, task)


def test_tables_are_not_matrices(task: Task) -> None:
    """The same bytes, but all rows of the table are touched."""
    dense = replace(task.model.parameters[0], touched_rows=1.0)
    other = replace(task.model, parameters=(dense, *task.model.parameters[1:]))
    assert similarity(task, replace(task, model=other)) < 0.1


def test_layouts_count(task: Task) -> None:
    one_level = replace(
        task.resources,
        hosts=(Host("a", 1), Host("b", 1)),
        links=Links(Link(2, 1e-3, 12.5e6), None, Link(2, 1e-3, 12.5e6)),
    )
    assert similarity(task, replace(task, resources=one_level)) < 0.6
    on_gpu = replace(task.resources, device="a GPU")
    assert similarity(task, replace(task, resources=on_gpu)) == 0.0


def test_what_was_not_measured_does_not_hurt(task: Task) -> None:
    unknown = Task(ModelProfile(task.model.parameters), replace(task.resources, links=Links()))
    assert similarity(unknown, unknown) == 1.0
    by_hand = Task(ModelProfile(wrapped=False), task.resources)
    assert descriptor(by_hand).shape == descriptor(task).shape
    assert similarity(by_hand, by_hand) == 0.0  # all of them look alike
