"""Partitions of any sizes among any number of ranks, and the states that are cut by them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.state.partition import (
    Part,
    Partition,
    cut_evenly,
    part_entry,
    put_together,
)
from hvd_autosync.runtime.state.states import encode_entries, parameters_of, take_states

#: Scalars, tensors without elements and single elements among them.
SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=6)
RANKS = st.integers(1, 6)
States = dict[int, dict[str, Any]]


def parameters_like(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@st.composite
def partitions(draw: Any) -> Partition:
    """Even, of whole tensors, or of any sizes, empty shares among them."""
    parameters, ranks = parameters_like(draw(SHAPES)), draw(RANKS)
    kind = draw(st.sampled_from(["even", "whole tensors", "any"]))
    if kind == "even":
        return Partition.evenly(parameters, ranks)
    if kind == "whole tensors":
        return Partition.of_whole_tensors(parameters, ranks)
    total = sum(parameter.numel() for parameter in parameters)
    cuts = draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
    ends = [0, *sorted(cuts), total]
    return Partition(parameters, [end - begin for begin, end in itertools.pairwise(ends)])


def owners(partition: Partition) -> range:
    return range(len(partition.shares))


def state_of(parameter: torch.nn.Parameter, place: int) -> dict[str, Any]:
    """A state as Adam's, with values of other kinds beside it."""
    return {
        "step": torch.tensor(3.0 + place),
        "exp_avg": torch.randn_like(parameter.detach()),
        "mask": torch.randint(0, 99, parameter.shape),
        "rate": 0.1 * place,
        "name": None,
    }


def assert_same(found: States, wanted: States) -> None:
    assert found.keys() == wanted.keys()
    for place, state in wanted.items():
        assert found[place].keys() == state.keys()
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert found[place][name].dtype is value.dtype
                assert torch.equal(found[place][name], value)
            else:
                assert found[place][name] == value


def cut(partition: Partition, states: States) -> list[bytes]:
    """The answer of each rank, which has its pieces alone."""
    return [
        encode_entries(
            [
                piece.entry(piece.place, piece.cut_state(states[piece.place]))
                for piece in partition.pieces(owner)
            ]
        )
        for owner in owners(partition)
    ]


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 7))
def test_an_even_cut_has_every_element_once_and_whole_units(
    size: int, count: int, unit: int
) -> None:
    runs = cut_evenly(size, count, unit)
    assert len(runs) == count
    assert [element for run in runs for element in range(*run)] == list(range(size))
    assert all(begin % unit == 0 for begin, end in runs if begin < end)
    units = [-(-(end - begin) // unit) for begin, end in runs]
    assert max(units) - min(units) <= 1


@given(partitions())
def test_every_element_has_one_owner(partition: Partition) -> None:
    found: dict[int, list[int]] = {place: [] for place in range(len(partition.parameters))}
    for owner in owners(partition):
        pieces = partition.pieces(owner)
        assert sum(piece.count for piece in pieces) == partition.shares[owner]
        assert all(piece.count or not piece.whole.numel() for piece in pieces)
        for piece in pieces:
            assert piece.whole is partition.parameters[piece.place]
            found[piece.place] += range(piece.begin, piece.begin + piece.count)
    for parameter, elements in zip(partition.parameters, found.values(), strict=True):
        assert elements == list(range(parameter.numel()))


@given(partitions())
def test_a_parameter_without_elements_has_one_owner_too(partition: Partition) -> None:
    pieces = [piece for owner in owners(partition) for piece in partition.pieces(owner)]
    for place, parameter in enumerate(partition.parameters):
        if not parameter.numel():
            assert [piece.place for piece in pieces].count(place) == 1


@given(partitions())
def test_shares_and_pieces_are_views_of_the_same_elements(partition: Partition) -> None:
    flat = torch.cat(partition.runs_of([each.detach() for each in partition.parameters]))
    shares = [partition.share(owner, flat) for owner in owners(partition)]
    assert torch.equal(torch.cat(shares), flat)
    for owner, share in zip(owners(partition), shares, strict=True):
        parts = partition.split_share(owner, share)
        for part, piece in zip(parts, partition.pieces(owner), strict=True):
            assert torch.equal(part, piece.of(piece.whole.detach().view(-1)))
            assert part.shape == piece.shape
            part.neg_()
    for negated, parameter in zip(partition.split(flat), partition.parameters, strict=True):
        assert torch.equal(negated, -parameter.detach().view(-1))


@given(SHAPES, RANKS)
def test_shares_are_even_or_cut_no_tensor(shapes: list[tuple[int, ...]], ranks: int) -> None:
    parameters = parameters_like(shapes)
    even = Partition.evenly(parameters, ranks).shares
    assert max(even) - min(even) <= 1
    whole = Partition.of_whole_tensors(parameters, ranks)
    for owner in range(ranks):
        assert all(piece.shape == piece.whole.shape for piece in whole.pieces(owner))


@given(partitions(), st.randoms(use_true_random=False))
def test_states_that_were_cut_are_put_together(partition: Partition, random: Any) -> None:
    states = {place: state_of(each, place) for place, each in enumerate(partition.parameters)}
    answers = cut(partition, states)
    random.shuffle(answers)
    assert_same(put_together([], partition.parameters, answers), states)


@given(SHAPES, RANKS, RANKS)
def test_states_pass_from_one_number_of_ranks_to_another(
    shapes: list[tuple[int, ...]], ranks: int, later: int
) -> None:
    parameters = parameters_like(shapes)
    states = {place: state_of(each, place) for place, each in enumerate(parameters)}
    saved = put_together([], parameters, cut(Partition.evenly(parameters, ranks), states))
    again = cut(Partition.of_whole_tensors(parameters, later), saved)
    assert_same(put_together([], parameters, again), states)


@given(st.integers(1, 60), RANKS, st.integers(1, 5))
def test_slices_of_one_parameter_are_partitions_of_their_own(
    size: int, ranks: int, slices: int
) -> None:
    (parameter,) = parameters_like([(size,)])
    states = {0: state_of(parameter, 0)}
    every = [Partition.evenly([parameter], ranks, run) for run in cut_evenly(size, slices)]
    runs = [partition.runs_of([parameter.detach()])[0] for partition in every]
    assert torch.equal(torch.cat(runs), parameter.detach())
    answers = [answer for partition in every for answer in cut(partition, states)]
    assert_same(put_together([], [parameter], answers), states)


@given(partitions(), st.data())
def test_a_missing_piece_is_an_error(partition: Partition, data: Any) -> None:
    states = {place: state_of(each, place) for place, each in enumerate(partition.parameters)}
    answers = cut(partition, states)
    gone = data.draw(st.sampled_from(owners(partition)))
    del answers[gone]
    lacking = {piece.place for piece in partition.pieces(gone) if piece.count}
    known = {piece.place for o in owners(partition) if o != gone for piece in partition.pieces(o)}
    if lacking & known:
        with pytest.raises(AutosyncError, match="elements of exp_avg are known, because ranks"):
            put_together([], partition.parameters, answers)
    else:  # whole parameters, whose states no rank that is left knows of
        found = put_together([], partition.parameters, answers)
        assert_same(found, {place: states[place] for place in known})


def test_a_state_of_another_shape_belongs_to_every_piece() -> None:
    (parameter,) = parameters_like([(3, 4)])
    states = {0: {"rows": torch.arange(3.0), "whole": torch.ones(3, 4)}}
    for cut_by in (Partition.evenly, Partition.of_whole_tensors):
        assert_same(put_together([], [parameter], cut(cut_by([parameter], 2), states)), states)


def test_pieces_of_a_state_are_copies() -> None:
    (parameter,) = parameters_like([(4,)])
    state = {"exp_avg": torch.zeros(4), "step": torch.tensor(1.0), "history": [1]}
    (piece,) = Partition.evenly([parameter], 1).pieces(0)
    own = piece.cut_state(state)
    own["exp_avg"] += 1
    own["step"] += 1
    own["history"].append(2)
    assert state["exp_avg"].sum() == 0
    assert (state["step"].item(), state["history"]) == (1.0, [1])


def test_pieces_of_a_state_are_where_they_are_wanted() -> None:
    (parameter,) = parameters_like([(4,)])
    state = {"exp_avg": torch.zeros(4), "factors": [torch.zeros(2), {"root": torch.zeros(2)}]}
    (piece,) = Partition.evenly([parameter], 1).pieces(0)
    own = piece.cut_state(state, "meta")
    first, second = own["factors"]
    assert {each.device.type for each in (own["exp_avg"], first, second["root"])} == {"meta"}


def test_an_entry_is_no_copy() -> None:
    state = {"exp_avg": torch.zeros(2, 2)}
    entry = part_entry(0, 0, state, torch.Size([2, 2]))
    entry.state["exp_avg"] += 1
    assert state["exp_avg"].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("in_place", [True, False], ids=["ZeRO step", "parameter server"])
@given(SHAPES, RANKS)
def test_the_steps_of_all_parts_are_the_step_of_the_whole(
    in_place: bool, shapes: list[tuple[int, ...]], ranks: int
) -> None:
    """With a group that is added in between: the places of earlier parameters stay."""
    alone, cut_up = parameters_like(shapes), parameters_like(shapes)
    reference = torch.optim.Adam(alone)
    whole = torch.optim.Adam(cut_up)
    for clock in range(3):
        if clock == 2:
            for optimizer in (reference, whole):
                optimizer.add_param_group({"params": parameters_like([(2, 3)]), "lr": 0.1})
        for parameter in parameters_of(reference):
            parameter.grad = torch.full_like(parameter, 1.0 + clock)
        reference.step()
        parameters = parameters_of(whole)
        partition = Partition.evenly(parameters, ranks)
        answers = [step_share(partition, owner, whole, clock, in_place) for owner in range(ranks)]
        take_states(whole, put_together([], parameters, answers))
    for found, wanted in zip(parameters_of(whole), parameters_of(reference), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
        for name, value in reference.state[wanted].items():
            torch.testing.assert_close(whole.state[found][name], value, rtol=1e-6, atol=1e-7)


def step_share(partition: Partition, owner: int, whole: Any, clock: int, in_place: bool) -> bytes:
    """One rank's steps of its parts; in place, or of copies that are written back."""
    views = [each.of(each.whole.detach().view(-1)) for each in partition.pieces(owner)]
    parts = [
        Part(piece, torch.nn.Parameter(view if in_place else view.clone()))
        for piece, view in zip(partition.pieces(owner), views, strict=True)
    ]
    rates = {p: group["lr"] for group in whole.param_groups for p in group["params"]}
    groups = [{"params": [part.values], "lr": rates[part.piece.whole]} for part in parts]
    if not groups:
        return encode_entries([])
    optimizer = torch.optim.Adam(groups)
    for part in parts:
        part.values.grad = torch.full_like(part.values, 1.0 + clock)
        if state := whole.state.get(part.piece.whole):
            optimizer.state[part.values] = part.piece.cut_state(state)
    optimizer.step()
    for part, view in zip(parts, views, strict=True):
        view.copy_(part.values.detach())
    return encode_entries(
        [part.piece.entry(part.piece.place, optimizer.state[part.values]) for part in parts]
    )
