"""When exploring comes before judging."""

from __future__ import annotations

from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob
from hvd_autosync.study.stage_budget import explored, turn_to_explore
from hvd_autosync.traces import TrialRecord

CYCLE = float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help="")
CODEC = categorical_knob("codec", ("none", "topk"), "none", help="", exact=False)
SPACE = SearchSpace((CYCLE, CODEC))


def trials(*kinds: str) -> list[TrialRecord]:
    """Trials of these kinds; ``judge`` is one of a candidate, ``quality`` of the default."""
    made = []
    for number, kind in enumerate(kinds):
        strategy = Strategy({"codec": "topk"} if kind == "judge" else {})
        kind = "quality" if kind == "judge" else kind
        made.append(TrialRecord("study", number, kind, strategy, "", None, {}, None))
    return made


def test_judging_begins_before_the_trials_are_used_up() -> None:
    assert turn_to_explore(SPACE, trials("default", *["model"] * 4), 10)
    assert not turn_to_explore(SPACE, trials("default", *["model"] * 5), 10)


def test_two_trials_are_explored_after_each_judgement() -> None:
    begun = ["default", *["model"] * 5, "quality"]
    assert not turn_to_explore(SPACE, trials(*begun), 10)
    begun += ["quality", "quality", "judge"]
    assert turn_to_explore(SPACE, trials(*begun), 10)
    assert turn_to_explore(SPACE, trials(*begun, "model"), 10)
    assert not turn_to_explore(SPACE, trials(*begun, "model", "sobol"), 10)
    assert turn_to_explore(SPACE, trials(*begun, "model", "sobol", "judge"), 10)


def test_nothing_is_judged_in_an_exact_space() -> None:
    assert turn_to_explore(SearchSpace((CYCLE,)), trials("default", *["model"] * 50), 10)


def test_what_judges_or_confirms_is_not_explored() -> None:
    kinds = ("default", "sobol", "quality", "judge", "model", "confirm")
    assert [trial.kind for trial in explored(trials(*kinds))] == ["default", "sobol", "model"]
