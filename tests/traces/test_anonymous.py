"""What a shared study tells, and what it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.commands.cli import app
from hvd_autosync.search_space import Strategy, TrialResult, TrialStatus
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import (
    Fallback,
    StudyRecord,
    StudyStatus,
    TraceStore,
    export_study,
    import_studies,
)
from hvd_autosync.traces.anonymous import anonymous, anonymous_id

SECRETS = (
    "our secret project",
    "train_secret",
    "secret.layer",
    "secret-host",
    "secret output",
    "secret loss",
    "2.718281",
    "feedfeedfeed",
    "beefbeefbeef",
)


@pytest.fixture
def secretive(store: TraceStore, finished: StudyRecord) -> StudyRecord:
    """A study that names things all over."""
    assert finished.task is not None
    model, resources = finished.task.model, finished.task.resources
    named = replace(model.parameters[0], name="secret.layer")
    host = replace(resources.hosts[0], name="secret-host")
    task = replace(
        finished.task,
        model=replace(model, parameters=(named, *model.parameters[1:])),
        resources=replace(resources, hosts=(host, *resources.hosts[1:])),
    )
    names = ("loss", "default_loss", "allowed", "bound", "difference")
    losses = dict.fromkeys(names, 2.718281)
    verdict = {"strategy": {}, "outcome": "worse", "reason": "its loss is 2.718281", "pairs": 3}
    outcome = {**(finished.outcome or {}), "verdicts": [verdict | losses], "source": "feedfeedfeed"}
    study = replace(
        finished,
        outcome=outcome,
        settings={**finished.settings, "judged_by": "beefbeefbeef"},
        study_id="0123456789ab",
        job_key="our secret project",
        task=task,
        command=("horovodrun", "train_secret.py"),
    )
    trials = []
    for trial in store.trials(finished.study_id):
        result = trial.result
        if result is not None:
            ranks = tuple(replace(rank, host="secret-host") for rank in result.ranks)
            result = replace(result, ranks=ranks, stderr_tail="secret output")
        info = {**trial.info, "related": [["feedfeedfeed", 0.5]], "priors": ["feedfeedfeed"]}
        trials.append(replace(trial, study_id=study.study_id, info=info, result=result))
    failed = TrialResult(TrialStatus.CRASHED, "secret output", stderr_tail="secret output")
    trials[2] = replace(trials[2], result=failed)
    store.add([(study, trials)])
    store.keep_drift(study.study_id, ["rank 3 on secret-host computes more slowly"])
    ended = Fallback(Strategy({"cycle_time_ms": 5.0}), 64, "secret loss")
    store.keep_fallback(study.study_id, ended)
    return study


def test_nothing_tells_whose_it_is(
    store: TraceStore, secretive: StudyRecord, tmp_path: Path
) -> None:
    path = tmp_path / "shared.jsonl"
    export_study(store, secretive.study_id, path, anonymously=True)
    text = path.read_text()
    for secret in (*SECRETS, secretive.study_id):
        assert secret not in text
    times = [json.loads(line) for line in text.splitlines()]
    assert [each["step"] for each in times[1]["outcome"]["fallbacks"]] == [64]
    assert [each["outcome"] for each in times[1]["outcome"]["verdicts"]] == ["worse"]
    assert Verdict.from_json(times[1]["outcome"]["verdicts"][0]).pairs == 3
    assert times[1]["settings"]["judged_by"] == anonymous_id("beefbeefbeef")
    assert times[1]["created_at"].endswith("T00:00:00.000000+00:00")


def test_all_that_can_be_learned_is_kept(
    store: TraceStore, secretive: StudyRecord, tmp_path: Path
) -> None:
    path = tmp_path / "shared.jsonl.gz"
    export_study(store, secretive.study_id, path, anonymously=True)
    other = TraceStore("sqlite://")
    (study_id,) = import_studies(other, path)
    shared, original = other.study(study_id), secretive
    assert shared.status is StudyStatus.FINISHED and shared.space == original.space
    assert shared.winner == original.winner and shared.versions == original.versions
    assert shared.task is not None and original.task is not None
    assert [p.shape for p in shared.task.model.parameters] == [
        p.shape for p in original.task.model.parameters
    ]
    assert shared.task.resources.links == original.task.resources.links
    for ours, theirs in zip(other.trials(study_id), store.trials(original.study_id), strict=True):
        assert ours.strategy == theirs.strategy and ours.kind == theirs.kind
        if theirs.result is not None:
            assert ours.result is not None
            assert ours.result.status == theirs.result.status
            assert ours.result.step_time == theirs.result.step_time


def test_it_is_the_same_each_time(store: TraceStore, secretive: StudyRecord) -> None:
    trials = store.trials(secretive.study_id)
    assert anonymous(secretive, trials) == anonymous(secretive, trials)


def test_a_command_writes_it(
    store: TraceStore, secretive: StudyRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{tmp_path}/traces.db"
    TraceStore(url).add([(secretive, store.trials(secretive.study_id))])
    done = CliRunner().invoke(app, ["traces", "contribute", "last", "--store", url])
    assert done.exit_code == 0, done.output
    path = tmp_path / done.stdout.strip()
    assert path.suffixes == [".jsonl", ".gz"] and path.exists()
    assert "Check the file" in done.stderr
