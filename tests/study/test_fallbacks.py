"""Strategies that the loss guard has ended: what counts as one of them."""

from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob
from hvd_autosync.study.fallbacks import is_excluded, known_fallback
from hvd_autosync.traces import Fallback, StudyStatus, TraceStore

SPACE = SearchSpace(
    (
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),
        integer_knob("local_steps", 1, 16, 1, scale="log", help="", exact=False),
        categorical_knob("rest_codec", ("none", "bf16"), "none", help="", exact=False),
    )
)
LEFT = (Strategy({"local_steps": 4, "cycle_time_ms": 2.0}), Strategy({"unknown": 1}))


def test_what_trains_the_same_model_is_left_too() -> None:
    assert is_excluded(Strategy({"local_steps": 4}), LEFT, SPACE)
    assert is_excluded(Strategy({"local_steps": 4, "cycle_time_ms": 9.0}), LEFT, SPACE)
    assert not is_excluded(Strategy({"local_steps": 4, "rest_codec": "bf16"}), LEFT, SPACE)
    assert not is_excluded(Strategy({"cycle_time_ms": 2.0}), LEFT, SPACE)
    assert not is_excluded(Strategy({"local_steps": 4}), LEFT), "without a space they are compared"
    assert is_excluded(LEFT[0], LEFT)


def test_a_winner_found_live_is_ended_with_the_one_under_which_its_training_began() -> None:
    store = TraceStore("sqlite://")
    launched = store.create_study(job_key="job", command=(), settings={}, versions={})
    store.finish(launched.study_id, StudyStatus.FINISHED, {}, LEFT[0])
    settings = {"judged_by": launched.study_id}
    live = store.create_study(job_key="job", command=(), settings=settings, versions={})
    assert known_fallback(store, live) == ""
    store.keep_fallback(launched.study_id, Fallback(LEFT[0], 64, "it has risen"))
    assert "was ended by the loss guard at step 64" in known_fallback(store, live)
    assert known_fallback(TraceStore("sqlite://"), live) == "", "a file has this study alone"
