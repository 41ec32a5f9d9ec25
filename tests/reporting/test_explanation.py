from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvd_autosync.api.results import Study
from hvd_autosync.launch.facts import default_controller
from hvd_autosync.reporting import answer_line
from hvd_autosync.reporting.explain_trials import parts_text
from hvd_autosync.reporting.explanation import explain
from hvd_autosync.reporting.plain import trial_line
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.search_space import Strategy, TrialStatus, build_space, restrict_space
from hvd_autosync.search_space.restrictions import space_under
from hvd_autosync.traces import (
    Fallback,
    StudyRecord,
    StudyStatus,
    TraceStore,
    export_study,
    import_autotune_log,
    import_studies,
)


def shown(
    store: TraceStore, study_id: str = "last", width: int = 120, option: str | None = ""
) -> str:
    console = Console(width=width, markup=False, highlight=False)
    with console.capture() as captured:
        for section in explain(store, study_id, option):
            console.print(section, crop=False)
    return captured.get()


def section(text: str, title: str) -> str:
    """The lines under one heading."""
    found = re.search(rf"^{re.escape(title)} *\n(.*?)(?=\n *\n|\Z)", text, re.M | re.S)
    assert found, f"no section {title!r} in\n{text}"
    return found[1]


@pytest.fixture
def text(store: TraceStore, finished: StudyRecord) -> str:
    return shown(store)


def test_a_study_explained(text: str, finished: StudyRecord) -> None:
    """One rendering, because the effects of the knobs take a moment."""
    assert finished.study_id in text.splitlines()[0]

    answer = section(text, "Result")
    assert answer.splitlines()[0].strip().startswith("1.32x faster than the default (90 %")
    assert "50.0 ms per step became 37.9 ms." in answer
    assert "Exploring ended because all 20 trials were used." in answer

    went = section(text, "Duration of trials")
    assert "A trial took 5.0 s on average: set-up 2.0 s, warm-up 0." in went

    task = section(text, "Task")
    assert "5,242,880 parameters in 20 tensors, 20 MiB of gradients per step" in task
    assert "4 ranks on 2 hosts (a:2, b:2)" in task
    assert "across   allreduce over 2 ranks: latency 1.20 ms, bandwidth 11.5 MiB/s" in task
    assert "30 % of the step, waiting for communication" in task

    knobs = section(text, "Effect of each knob")
    effect = re.search(r"buckets +0 +8 +(\S+)x +(\S+)x to (\S+)x +\w", knobs)
    assert effect is not None, knobs
    speedup, low, high = map(float, effect.groups())
    assert speedup > 1 and low < speedup < high

    lost = section(text, "Other strategies")
    assert re.search(
        r"buckets=4 *\n +1\.25x \(90 % interval 1\.2\dx to 1\.2\dx\), "
        r"40\.\d ms per step \(predicted 42\.4 ms\): slower than the winner",
        lost,
    )

    failed = section(text, "Failed trials")
    assert "trial 3: controller=mpi, fusion_threshold_bytes=0 MiB" in failed
    assert "crashed: rank 1 exited with status 3: RuntimeError: [Errno 12] no memory" in failed

    recipe = section(text, "Without tuning")
    take, line, *_ = recipe.splitlines()
    assert take == f"hvd-autosync show {finished.study_id} --take winner > strategy.toml"
    assert line.startswith("hvd-autosync run --strategy strategy.toml -np 4 -H a:2,b:2 python")
    assert "\nbuckets = 8\n" in recipe and "\ncycle_time_ms = 5.0\n" in recipe


def test_the_step_times_are_those_of_the_rounds_of_the_comparison(
    store: TraceStore, author: Any
) -> None:
    """Their ratio is the speed-up; a round in which the winner was not measured counts in none."""
    author.explore()
    author.trial("confirm", dict(author.space.default), mean_s=0.2)
    author.confirm()
    answer = section(shown(store), "Result")
    assert re.search(r"1\.3[12]x faster than the default", answer)
    assert re.search(r"50\.0 ms per step became (37\.9|38\.[01]) ms\.", answer)


def test_a_winner_that_the_loss_guard_has_ended_is_reported(
    store: TraceStore, finished: StudyRecord
) -> None:
    assert finished.winner is not None
    ended = Fallback(finished.winner, 1234, "the loss has risen to 9 from 2")
    store.keep_fallback(finished.study_id, ended)
    answer = " ".join(section(shown(store), "Result").split())
    assert "was ended by the loss guard at step 1234 of a training" in answer
    assert "because the loss has risen to 9 from 2" in answer


def test_lines_to_be_copied_are_never_cut(store: TraceStore, finished: StudyRecord) -> None:
    lines = shown(store, width=60).splitlines()
    (line,) = (each for each in lines if each.startswith("hvd-autosync run"))
    assert line.endswith("-np 4 -H a:2,b:2 python train.py --token '***'")


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        ("", ["To list every trial:", "hvd-autosync traces show {}"]),
        (" --store a.db", ["To list every trial:", "hvd-autosync traces show {} --store a.db"]),
        (
            None,
            [
                "To list every trial, import this trace file first:",
                "hvd-autosync traces import FILE",
                "hvd-autosync traces show {}",
            ],
        ),
    ],
)
def test_how_to_list_the_strategies_that_are_not_shown(
    option: str | None, lines: list[str], store: TraceStore, author: Any
) -> None:
    author.explore()
    for number in range(4):
        author.trial("model", {"cycle_time_ms": 30.0 + number})
    author.confirm()
    others = section(shown(store, option=option), "Other strategies").splitlines()
    expected = ["and 2 more", *(line.format(author.study_id) for line in lines)]
    assert [line.strip() for line in others[-len(expected) :]] == expected


def test_no_gain_comes_first_and_the_job_stays_as_it_is(
    store: TraceStore, no_gain: StudyRecord
) -> None:
    text = shown(store)
    answer = section(text, "Result")
    assert answer.splitlines()[0].strip() == "No gain found: use the default."
    best = r"The best candidate was buckets=8, .*controller=mpi.*: 0\.9\dx \(90 % interval"
    assert re.search(best, answer)
    assert section(text, "Without hvd_autosync").strip() == "Run the job unchanged."
    lost = " ".join(section(text, "Other strategies").split())
    assert "confirmation did not show a significant gain over the default" in lost
    assert "Effect of each knob" not in text


@pytest.mark.parametrize("factor", [1.0, 1.35])
def test_a_restricted_default_is_not_the_unchanged_job(
    store: TraceStore, author: Any, factor: float
) -> None:
    document = {"knobs": {"fusion_threshold_bytes": {"fixed": 1 << 20}}}
    model, resources = author.task.model, author.task.resources
    space = build_space(model, resources, default_controller=default_controller(resources.build))
    author.space = restrict_space(space, document)
    store.describe_task(author.study_id, author.task, author.space)
    author.trial("default", {}, mean_s=0.02)
    author.trial("default", dict(author.space.default), mean_s=0.05)
    author.trial("model", {"controller": "gloo"}, mean_s=0.06)
    author.confirm(factor)
    progress = TuningProgress()
    progress.start(author.study)
    first, second, *_ = (each.strategy for each in progress.ended)
    assert (first, second) == ("the unchanged job", "the restricted default")
    assert progress.best is not None and progress.best.strategy == second
    assert "against" not in trial_line(progress.ended[0])
    text = shown(store)
    answer = " ".join(section(text, "Result").split())
    gain, none = "x faster than your restricted default", "No gain found: use your restricted"
    assert (gain if factor == 1 else none) in answer
    assert "default is the job with fusion_threshold_bytes=1 MiB." in answer
    assert "The unchanged job: 20.0 ms per step." in answer
    assert "the unchanged job" not in section(text, "Other strategies")
    assert "1048576" in text.partition("\nWithout ")[2]
    assert "your restricted default" in answer_line(author.study.record)


def test_after_a_rest_the_unchanged_job_is_as_slow_as_the_restricted_default(
    store: TraceStore, author: Any
) -> None:
    document = {"knobs": {"fusion_threshold_bytes": {"fixed": 1 << 20}}}
    model, resources = author.task.model, author.task.resources
    space = build_space(model, resources, default_controller=default_controller(resources.build))
    author.space = restrict_space(space, document)
    store.describe_task(author.study_id, author.task, author.space)
    author.trial("default", {}, mean_s=0.02)
    author.trial("default", dict(author.space.default), mean_s=0.05)
    author.trial("default", dict(author.space.default), mean_s=0.1)  # on a slower day
    author.trial("model", {"controller": "gloo"}, mean_s=0.12)
    author.confirm()
    answer = " ".join(section(shown(store), "Result").split())
    assert "The unchanged job: 40." in answer or "The unchanged job: 39." in answer


@pytest.mark.parametrize(
    ("changed", "begun"),
    [
        ({}, "the job unchanged"),
        ({"controller": "gloo"}, "controller=gloo"),
        ({"cycle_time_ms": 5.0}, "cycle_time_ms=5 ms"),
    ],
)
def test_what_a_training_tuned_live_began_with(
    store: TraceStore, new_author: Callable[..., Any], changed: dict[str, Any], begun: str
) -> None:
    author = new_author(mode="live", judged_by="beefbeefbeef")
    model, resources = author.task.model, author.task.resources
    space = build_space(model, resources, default_controller=default_controller(resources.build))
    author.space = space_under(space, Strategy(changed), ())
    store.describe_task(author.study_id, author.task, author.space)
    author.trial("default", {})
    author.confirm()
    answer = " ".join(section(shown(store, author.study_id), "Result").split())
    assert f"trials were launched: {begun}. Its lossy" in answer


def test_a_running_study_has_no_answer_yet(store: TraceStore, author: Any) -> None:
    author.explore()
    text = shown(store)
    assert section(text, "Result").strip() == "None yet after 6 trials."
    assert "crashed" in section(text, "Failed trials")


def test_only_a_study_that_was_interrupted_here_is_resumed(
    store: TraceStore, author: Any, tmp_path: Path
) -> None:
    author.trial("default", {})
    file = tmp_path / "study.jsonl"
    export_study(store, author.study_id, file)
    other = TraceStore("sqlite://")
    import_studies(other, file)
    answer = section(shown(other, option=None), "Result").strip()
    assert answer == "None: its trace was written before its end, after 1 trial."
    store.let_go(author.study_id)
    answer = " ".join(section(shown(store), "Result").split())
    assert "interrupted after 1 trial. Run its command again to resume it, unless" in answer


def test_a_failed_study_says_why(store: TraceStore, author: Any) -> None:
    author.trial("default", {}, ranks=(), status=TrialStatus.CRASHED, reason="no such file")
    store.finish(author.study_id, StudyStatus.FAILED, {"reason": "no such file"}, None)
    text = shown(store)
    assert "None: the study failed: no such file" in section(text, "Result")
    assert "Without hvd_autosync" not in text
    assert str(Study(store, store.study(author.study_id))).endswith(" failed: no such file")


def test_a_study_that_took_over_a_winner_is_explained(
    store: TraceStore, finished: StudyRecord, new_author: Callable[..., Any]
) -> None:
    author = new_author()
    author.trial("default", {})
    assert finished.outcome is not None
    outcome = {**finished.outcome, "stopped": "this task was tuned before"}
    store.finish(author.study_id, StudyStatus.FINISHED, outcome, finished.winner)
    text = shown(store, author.study_id)
    assert "50.0 ms per step became 37.9 ms." in section(text, "Result")


def test_samples_of_horovods_own_tuner_are_shown_with_their_score(
    store: TraceStore, tmp_path: Path
) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text(
        "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score\n0,0,1,5,32,101.5\n0,0,1,2.5,16,203.25\n"
    )
    text = shown(store, import_autotune_log(store, log), width=200)
    answer = section(text, "Result")
    assert "which is not a step time" in answer
    first, second = (line.split()[:2] for line in answer.splitlines()[2:4])
    assert (first, second) == (["1", "203.2"], ["0", "101.5"])
    assert "export HOROVOD_CYCLE_TIME=2.5" in section(text, "Without hvd_autosync")
    assert "horovodrun YOUR-OPTIONS YOUR-COMMAND" in text


def test_steps_between_live_trials_are_counted(store: TraceStore, finished: StudyRecord) -> None:
    trials = store.trials(finished.study_id)
    made = [
        replace(trial, result=replace(trial.result, steps_before=40 * trial.number))
        for trial in trials[:3]
        if trial.result is not None
    ]
    assert parts_text(made).endswith(" Between trials the training made 120 steps.")
    assert "Between trials" not in parts_text(trials)
