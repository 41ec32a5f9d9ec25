"""``hvd-autosync simulate`` on a study of the store, whose times the cost model has made."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hvd_autosync.commands.cli import app
from hvd_autosync.cost import Coefficients, CostModel
from hvd_autosync.cost.hypothetical import hypothetical_resources
from hvd_autosync.engine.simulation import Simulation, simulate
from hvd_autosync.search_space import (
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    RankReport,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.search_space.restrictions import restrict_space
from hvd_autosync.traces import TraceStore

TRUE = Coefficients(latency=0.4, byte=0.1, compute=0.2, rest=0.5)
TRIED = [
    {},
    {"embedding_exchange": "rows"},
    {"buckets": 4, "cycle_time_ms": 10.0},
    {"fusion_threshold_bytes": 0, "cache_capacity": 0},
]


@pytest.fixture
def store(tmp_path: Path, model: ModelProfile, slow_network: Resources) -> TraceStore:
    return stored(tmp_path / "traces.db", model, slow_network)


def stored(file: Path, model: ModelProfile, resources: Resources) -> TraceStore:
    """A store with a study on these resources."""
    store = TraceStore(file)
    study = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.describe_task(study, Task(model, resources), build_space(model, resources))
    times = CostModel(model, resources).predict(TRIED, TRUE)
    for number, (values, step_s) in enumerate(zip(TRIED, times, strict=True)):
        store.ask(study, Strategy(values), "sobol", {})
        ranks = (RankReport(0, "a", (float(step_s),) * 20),)
        store.tell(study, number, TrialResult(TrialStatus.COMPLETED, ranks=ranks))
    return store


def run(store: TraceStore, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["simulate", "--store", store.name, *words])
    return done.exit_code, re.sub(r"\s+", " ", done.output)


def test_the_winner_elsewhere_is_near_the_best_there(
    store: TraceStore, model: ModelProfile, slow_network: Resources
) -> None:
    (study,) = store.studies()
    elsewhere = hypothetical_resources(slow_network, 8, 2, 1e9 / 8)
    found = simulate(study, store.trials(study.study_id), elsewhere)
    truth = CostModel(model, elsewhere)
    space = build_space(model, elsewhere)
    some = truth.predict([space.decode([x] * space.dimension) for x in (0.1, 0.4, 0.8)], TRUE)
    default, best = truth.predict([{}, found.best], TRUE)
    assert best < min(*some, default)
    assert found.default_s.low < default < found.default_s.high
    assert found.best_s.low < best < found.best_s.high
    assert found.best["embedding_exchange"] in ("rows", "hierarchical")


def test_the_report(store: TraceStore) -> None:
    status, text = run(store, "--hosts", "64", "--slots", "8", "--bandwidth", "25gbit")
    assert status == 0
    assert "64 hosts of 8 ranks, 25 Gbit/s" in text and "4 trials" in text
    assert re.search(r"default strategy +[\d.]+ m?s \([\d.]+ m?s to [\d.]+ m?s\) per step", text)
    assert re.search(
        r"best strategy by the model has speed-up [\d.]+x \([\d.]+x to [\d.]+x\)", text
    )
    assert run(store, "--hosts", "1", "--slots", "1")[1].count("No exact strategy") == 1


def test_uneven_hosts_keep_their_ranks(
    tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    uneven = replace(slow_network, hosts=(Host("a", 4), Host("b", 1)))
    store = stored(tmp_path / "uneven.db", model, uneven)
    for words in ([], ["--bandwidth", "25gbit"]):
        assert "On 5 ranks on 2 hosts (a:4, b:1), " in run(store, *words)[1]
    faster = hypothetical_resources(uneven, None, None, 1e9)
    assert faster.hosts == uneven.hosts and faster.links.overall is not None
    assert faster.links.overall.ranks == 5
    assert "On 3 hosts of 4 ranks" in run(store, "--hosts", "3")[1]


def test_a_strategy_of_a_file_is_predicted_too(
    store: TraceStore, tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    (study,) = store.studies()
    asp = {"protocol": "asp", "sync_share": 0.25, "total_samples": 1000}
    found = simulate(study, store.trials(study.study_id), slow_network, asked=asp)
    default_s, asp_s = CostModel(model, slow_network).predict([{}, asp], TRUE)
    assert found.asked_s is not None and found.asked_speedup is not None
    assert found.asked_s.low < asp_s < found.asked_s.high
    assert found.asked_speedup.value == pytest.approx(default_s / asp_s, rel=0.05)
    file = tmp_path / "asp.toml"
    file.write_text('[knobs]\nprotocol = "asp"\n')
    status, text = run(store, "--strategy", str(file))
    assert status == 0 and re.search(
        r"given strategy has speed-up [\d.]+x \([\d.]+x to [\d.]+x\)", text
    )


@pytest.mark.parametrize(
    ("lines", "words", "named"),
    [
        ("knobs.protocol = 'later'", [], "later"),
        (
            "knobs.large_exchange = 'hierarchical'\nclasses.large = ['matrix']",
            ["--hosts", "1"],
            "does not fit the hosts",
        ),
        ("knobs.large_codec = 'fp16'\nclasses.large = ['nosuch*']", [], "matches no parameter"),
        (
            "knobs.large_codec = 'fp16'\nclasses.large = ['table']",
            [],
            '[classes] large = ["matrix"]',
        ),
    ],
)
def test_a_strategy_that_cannot_be_predicted_is_refused(
    store: TraceStore, tmp_path: Path, lines: str, words: list[str], named: str
) -> None:
    file = tmp_path / "strategy.toml"
    file.write_text(lines)
    status, text = run(store, "--strategy", str(file), *words)
    assert status != 0 and named in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--strategy", "nowhere.toml"], "nowhere.toml"),
        (["--bandwidth", "25"], "'25' for --bandwidth"),
        (["--bandwidth", "0gbit"], "'0gbit' for --bandwidth"),
        (["--bandwidth", "9" * 400 + "gbit"], "9 for --bandwidth"),
        (["--latency", "9" * 400 + "s"], "9 for --latency"),
        (["--latency", "fast"], "'fast' for --latency"),
        (["nothing"], "nothing"),
        (["--hosts", "0"], "--hosts"),
        (["--hosts", "1", "--bandwidth", "1gbit"], "--bandwidth has no effect on one host"),
        (["--hosts", "1", "--latency", "1ms"], "--latency has no effect on one host"),
    ],
)
def test_what_cannot_be_read_is_named(store: TraceStore, words: list[str], named: str) -> None:
    status, text = run(store, *words)
    assert status != 0 and named in text


def test_an_unmeasured_network_must_be_given(
    tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    one_host = replace(slow_network, hosts=(Host("a", 2),))
    store = TraceStore(tmp_path / "one.db")
    study = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.describe_task(study, Task(model, one_host), build_space(model, one_host))
    store.ask(study, Strategy(), "default", {})
    ranks = (RankReport(0, "a", (0.1,) * 9),)
    store.tell(study, 0, TrialResult(TrialStatus.COMPLETED, ranks=ranks))
    status, text = run(store, "--hosts", "4")
    assert status == 2 and "ran on one host" in text and "--bandwidth" in text
    status, text = run(store, "--bandwidth", "1gbit")
    assert status == 2 and "--bandwidth has no effect on one host (--hosts N" in text
    assert run(store, "--hosts", "4", "--bandwidth", "1gbit")[0] == 0


def test_a_study_without_trials_is_refused(
    tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    store = TraceStore(tmp_path / "empty.db")
    study = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    status, text = run(store)
    assert status == 2 and "has no profile of a model" in text
    store.describe_task(study, Task(model, slow_network), build_space(model, slow_network))
    status, text = run(store)
    assert status == 1 and "has no measured trial" in text


def test_what_the_user_and_the_script_decide_stays_so(
    tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    """A held cycle is in every prediction, and knobs that the script owns win nowhere."""
    store = TraceStore(tmp_path / "held.db")
    held = {"cycle_time_ms": 40.0}
    space = build_space(model, slow_network, held=held, owned=["embedding_exchange"])
    study = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.describe_task(study, Task(model, slow_network), space)
    (step_s,) = CostModel(model, slow_network).predict([held], TRUE)
    store.ask(study, Strategy(), "default", {})
    ranks = (RankReport(0, "a", (float(step_s),) * 20),)
    store.tell(study, 0, TrialResult(TrialStatus.COMPLETED, ranks=ranks))
    (record,) = store.studies()
    found = simulate(record, store.trials(study), slow_network)
    assert found.default_s.value == pytest.approx(step_s, rel=0.05)
    assert not {"cycle_time_ms", "embedding_exchange"} & set(found.best)


def of_default(
    store: TraceStore,
    model: ModelProfile,
    resources: Resources,
    space: SearchSpace,
    elsewhere: Resources,
) -> tuple[Simulation, float]:
    """The simulation of a study that has measured its default alone; the seconds of its steps."""
    study = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.describe_task(study, Task(model, resources), space)
    (step_s,) = CostModel(model, resources).predict([space.default], TRUE)
    store.ask(study, space.default, "default", {})
    ranks = (RankReport(0, "a", (float(step_s),) * 20),)
    store.tell(study, 0, TrialResult(TrialStatus.COMPLETED, ranks=ranks))
    (record,) = store.studies()
    return simulate(record, store.trials(study), elsewhere), float(step_s)


@pytest.mark.parametrize("hosts", [2, 1])
def test_what_a_space_file_restricts_stays_so(
    tmp_path: Path, model: ModelProfile, slow_network: Resources, hosts: int
) -> None:
    """On other hosts, too; a choice that these lack is no restriction there."""
    tables = {
        "cycle_time_ms": {"fixed": 40.0},
        "buckets": {"low": 2, "high": 4},
        "embedding_exchange": {"fixed": "hierarchical"},
        "large_exchange": {"choices": ["allreduce", "hierarchical"]},
    }
    space = restrict_space(build_space(model, slow_network), {"knobs": tables})
    store = TraceStore(tmp_path / "file.db")
    elsewhere = hypothetical_resources(slow_network, hosts, 2)
    found, step_s = of_default(store, model, slow_network, space, elsewhere)
    names = {knob.name for knob in found.space.knobs}
    for strategy in (found.best, found.space.default):
        assert strategy["cycle_time_ms"] == 40.0 and 2 <= strategy["buckets"] <= 4
        assert strategy.get("large_exchange") in ("allreduce", "hierarchical", None)
        if hosts > 1:
            assert strategy["embedding_exchange"] == "hierarchical"
    assert hosts > 1 or "cycle_time_ms" in names
    if hosts > 1:
        assert found.default_s.value == pytest.approx(step_s, rel=0.05)


def test_a_knob_goes_with_the_one_that_a_live_training_could_not_change(
    tmp_path: Path, slow_network: Resources
) -> None:
    build = replace(slow_network.build, mpi=True)
    here = Resources((Host("a", 2),), "cpu", build, Links(overall=Link(2, 2e-4, 2e9)))
    sparse = ModelProfile(
        (
            ParameterProfile("table", (1000, 16), "float32", True, 0, 0.01),
            ParameterProfile("w", (64, 64), "float32", False, 1, 0.02),
        ),
        forward_s=0.01,
        backward_s=0.02,
    )
    space = build_space(sparse, here, owned=["controller"])  # as of a live tuning
    elsewhere = hypothetical_resources(here, 2, 2, 1e9 / 8)
    found, _ = of_default(TraceStore(tmp_path / "t.db"), sparse, here, space, elsewhere)
    names = {knob.name for knob in found.space.knobs}
    assert not {"controller", "hierarchical_allgather"} & names


def test_a_lossy_default_stays_the_default(
    tmp_path: Path, model: ModelProfile, slow_network: Resources
) -> None:
    file = {"knobs": {"large_codec": {"fixed": "fp16"}}}
    space = restrict_space(build_space(model, slow_network, allow=("codec",)), file)
    store = TraceStore(tmp_path / "t.db")
    found, _ = of_default(store, model, slow_network, space, slow_network)
    assert found.space.default["large_codec"] == "fp16"
    assert found.best.get("large_codec", "fp16") == "fp16"
