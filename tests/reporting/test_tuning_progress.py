from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.terminal import trials_so_far
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.reporting.widget import trials_html
from hvd_autosync.search_space import Strategy, catalogue_knob
from hvd_autosync.study.values import Trial


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Follower:
    """A listener that only keeps a standing; each trial takes two seconds of its clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.standing = TuningProgress(self.clock)
        self.rounds: list[int] = []
        self.left_s: list[float] = []

    def on_study_start(self, study: Any, *, resumed: bool) -> None:
        self.standing.start(study)

    def on_links_progress(self, study: Any, progress: Any) -> None: ...

    def on_ask_start(self, study: Any) -> None:
        self.standing.waiting()
        self.left_s.append(self.standing.left_s(study))

    def on_trial_start(self, study: Any, trial: Trial) -> None:
        self.standing.begin(study, trial)
        self.rounds.append(self.standing.next_round(study, trial))
        self.clock.now += 2

    def on_trial_progress(self, study: Any, trial: Trial, progress: Any) -> None: ...

    def on_trial_end(self, study: Any, trial: Trial, result: Any) -> None:
        self.standing.end(study, trial, result)

    def on_study_end(self, study: Any, conclusion: Any) -> None: ...


@pytest.fixture
def follower(author: Any) -> Follower:
    listener = Follower()
    author.play(listener)
    return listener


def test_trials_have_their_words_times_and_speedups(follower: Follower) -> None:
    ended = follower.standing.ended
    assert [t.kind for t in ended[:6]] == ["default", "sobol", "sobol", "model", "model", "model"]
    assert ended[0].strategy == "default"
    assert ended[1].strategy == "buckets=4"
    assert ended[1].speedup == pytest.approx(1.25, rel=0.01)
    assert ended[3].time is None and math.isnan(ended[3].speedup)
    assert ended[3].reason == "rank 1 exited with status 3"
    assert follower.standing.explored == 6
    assert follower.standing.spent_s == 60, "as recorded, in a replay at another speed, too"


def test_a_trial_without_a_recorded_duration_is_timed(author: Any) -> None:
    author.listener = follower = Follower()
    author.trial("default", {}, total_s=math.nan)
    assert follower.standing.spent_s == 2


def test_the_best_of_the_exploration_is_kept_apart_from_the_confirmation(
    follower: Follower,
) -> None:
    best = follower.standing.best
    assert best is not None and best.number == 5


def test_a_lossy_strategy_is_not_the_best_whatever_its_speed(author: Any) -> None:
    author.explore()
    knobs = (*author.space.knobs, catalogue_knob("rest_codec"))
    author.space = replace(author.space, knobs=knobs)
    author.store.describe_task(author.study_id, author.task, author.space)
    author.trial("model", {"rest_codec": "fp16"}, mean_s=0.01)
    author.trial("model", {"cycle_time_ms": 21.0})
    standing = TuningProgress(Clock())
    standing.start(author.study)
    assert [each.exact for each in standing.ended] == [True] * 6 + [False, True]
    assert standing.best is not None and standing.best.number == 5
    assert "5.0x" not in standing.best_text(author.study)
    console = Console(width=120, markup=False, color_system="truecolor", force_terminal=True)
    with console.capture() as captured:
        console.print(trials_so_far(standing.ended))
    (green,) = (line for line in captured.get().splitlines() if "\x1b[32m" in line)
    assert "buckets=8" in green
    (green,) = re.findall(r"<tr style='color:#009e73'>.*?</tr>", trials_html(standing.ended))
    assert "buckets=8" in green


def test_rounds_of_the_confirmation_are_counted_per_contender(follower: Follower) -> None:
    assert follower.rounds == [0] * 6 + [1, 1, 2, 2, 3, 3]
    assert [t.round for t in follower.standing.ended] == follower.rounds


def test_a_confirmed_candidate_is_compared_with_the_default(author: Any, follower: Any) -> None:
    (comparison,) = follower.standing.comparisons(author.study)
    assert comparison.rounds == 3
    assert comparison.speedup == pytest.approx(1 / 0.8 / 0.95, rel=0.01)


def test_the_time_left_counts_trials_and_confirmation(follower: Follower) -> None:
    assert math.isnan(follower.left_s[0])
    # After one of 20 trials: 19 more, and three rounds of default and candidate.
    assert follower.left_s[1] == pytest.approx((19 + 6) * 5)
    # The confirmation ends the exploration: two of its six trials are done.
    assert follower.left_s[8] == pytest.approx(4 * 5)


def test_the_time_left_is_that_of_the_minutes_at_most(author: Any) -> None:
    author.explore()
    study = author.study
    study.settings = replace(study.settings, minutes=1.0)
    standing = TuningProgress(clock := Clock())
    standing.start(study)
    assert standing.spent_s == 6 * 5.0
    assert standing.left_s(study) == pytest.approx(30.0)
    study.settings = replace(study.settings, minutes=32 / 60)
    clock.now += 4
    assert standing.left_s(study) == 0.0, "the limit is exceeded"


def test_a_running_trial_counts_down_but_not_below_the_others(author: Any) -> None:
    follower = Follower()
    author.play(follower)
    standing, clock = follower.standing, follower.clock
    standing.waiting()
    before = standing.left_s(author.study)
    clock.now += 4
    assert standing.left_s(author.study) == pytest.approx(before - 4)
    clock.now += 100
    assert standing.left_s(author.study) == pytest.approx(before - 5)


def test_a_resumed_study_goes_on_with_its_trials(author: Any) -> None:
    author.explore()
    standing = TuningProgress(Clock())
    standing.start(author.study)
    assert standing.explored == 6
    assert standing.best is not None and standing.best.number == 5
    assert standing.spent_s == pytest.approx(6 * 5.0)


@pytest.mark.parametrize("resumed", [False, True])
def test_two_candidates_make_a_longer_confirmation(author: Any, resumed: bool) -> None:
    author.explore()
    standing = TuningProgress(Clock())
    standing.start(author.study)
    default = author.space.default
    info = {"stopped": "all trials were used", "candidates": [{}, {}]}
    number = author.store.ask(author.study_id, default, "confirm", info)
    standing.begin(author.study, Trial(number, "confirm", default))
    if resumed:
        author.store.tell(author.study_id, number, author.study.history[0].result)
        standing = TuningProgress(Clock())
        standing.start(author.study)
    # 14 trials are left to explore as long as nothing is confirmed, each of five seconds.
    to_do = 8 if resumed else 14 + 9
    assert standing.left_s(author.study) == pytest.approx(to_do * 5)


def test_a_trial_before_the_space_is_known_is_the_default(store: Any) -> None:
    from hvd_autosync.study.study import AskTellStudy

    study = AskTellStudy.create(store=store)
    standing = TuningProgress(Clock())
    standing.start(study)
    assert standing.describe(study, Trial(0, "default", Strategy())) == "default"


def test_a_repeated_default_explores_nothing(author: Any) -> None:
    author.explore()
    author.trial("default", {})
    standing = TuningProgress(Clock())
    standing.start(author.study)
    assert standing.explored == 6
    # The same 14 trials are left to explore as before it.
    assert standing.left_s(author.study) == pytest.approx((14 + 6) * 5)


def test_trials_that_judge_explore_nothing(author: Any) -> None:
    author.explore()
    author.space = replace(author.space, knobs=(*author.space.knobs, catalogue_knob("rest_codec")))
    author.store.describe_task(author.study_id, author.task, author.space)
    author.trial("quality", {})
    author.trial("quality", {"rest_codec": "fp16"})
    standing = TuningProgress(Clock())
    standing.start(author.study)
    assert standing.explored == 6
    assert standing.best is not None and standing.best.number == 5
    # Of four trials of the default that judge, and four of each of six candidates.
    to_do = (20 - 6) + (4 * 7 - 2) + 6
    assert standing.left_s(author.study) == pytest.approx(to_do * 5)


def test_a_launch_without_a_step_is_doubted_only_where_the_script_never_trained(
    follower: Follower, author: Any
) -> None:
    silent = TrialProgress("starting", 0, 50, 61.0)
    first, late = Trial(0, "default", Strategy()), Trial(18, "model", Strategy())
    fresh = TuningProgress(Clock())
    assert fresh.hint(first, replace(silent, elapsed_s=59.0)) is None
    said = fresh.hint(first, silent)
    assert said is not None and "if the script does not train with horovod.torch" in said
    assert fresh.hint(first, silent) is None, "it is said once"

    trained = sum(trial.time is not None for trial in follower.standing.ended)
    resumed = TuningProgress(Clock())
    resumed.start(author.study)
    for standing in (follower.standing, resumed):
        said = standing.hint(late, silent)
        assert said is not None and f"trained in {trained} earlier trials" in said
        assert "horovod.torch" not in said and "DistributedOptimizer" not in said
