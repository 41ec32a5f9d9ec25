"""Options: their sources, their order, their refusals."""

import argparse
from pathlib import Path

import pytest

from hvd_autosync.engine.option_values import option_name
from hvd_autosync.engine.options import Options, add_options, resolve_options, without_our_options
from hvd_autosync.errors import ConfigurationError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def test_option_then_variable_then_file_then_default() -> None:
    environment = {"HVD_AUTOSYNC_TRIALS": "7", "HVD_AUTOSYNC_STEPS": "30"}
    section = {"trials": 5, "steps": 25, "warmup": 3}
    options = resolve_options(parsed("--autosync-trials", "9"), environment, section)
    assert (options.trials, options.steps, options.warmup, options.seed) == (9, 30, 3, 0)


def test_defaults_are_the_documented_ones() -> None:
    assert resolve_options(parsed(), {}) == Options(
        trials=20,
        minutes=None,
        steps=None,
        warmup=None,
        allow=(),
        reuse="auto",
        mode="auto",
        seed=0,
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trials", "0"),
        ("trials", "many"),
        ("minutes", "-1"),
        ("minutes", "inf"),
        ("expected_hours", "0"),
        ("expected_hours", "nan"),
        ("transfer", "maybe"),
        ("steps", "3"),
        ("warmup", "0"),
        ("allow", "magic"),
        ("allow", "codec,magic"),
        ("reuse", "maybe"),
        ("seed", "-1"),
        ("seed", "4294967296"),
        ("seed", "9" * 5000),
        ("store", "sqlite://"),
        ("store", "sqlite:///:memory:"),
    ],
)
def test_unusable_values_are_named_with_their_source(option: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{value}' for {option_name(option)}") as caught:
        resolve_options(parsed(f"{option_name(option)}={value}"), {})
    assert caught.value.hint
    with pytest.raises(ConfigurationError, match=f"HVD_AUTOSYNC_{option.upper()}"):
        resolve_options(parsed(), {f"HVD_AUTOSYNC_{option.upper()}": value})


def test_unknown_entries_of_the_file_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"autosync.trails"):
        resolve_options(parsed(), {}, {"trails": 3})


def test_unknown_variables_are_named() -> None:
    with pytest.raises(ConfigurationError, match="variable HVD_AUTOSYNC_TRAILS\n") as caught:
        resolve_options(parsed(), {"HVD_AUTOSYNC_TRAILS": "3"})
    assert "Did you mean HVD_AUTOSYNC_TRIALS?" in str(caught.value.hint)
    with pytest.raises(ConfigurationError, match="TRIALZ") as caught:
        resolve_options(parsed(), {"HVD_AUTOSYNC_TRIALZ": "3"})
    assert "Did you mean HVD_AUTOSYNC_TRIALS?" in str(caught.value.hint)
    resolve_options(parsed(), {"HVD_AUTOSYNC_EXTENSIONS": "knobs.py", "HVD_AUTOSYNC_STORE": "a"})


def test_switches_come_from_variables_too() -> None:
    assert resolve_options(parsed(), {"HVD_AUTOSYNC_DRY_RUN": "1"}).dry_run
    assert not resolve_options(parsed(), {"HVD_AUTOSYNC_DRY_RUN": "no"}).dry_run


@pytest.mark.parametrize(
    "store",
    ["t.db", "sqlite:///t.db", "sqlite+pysqlite:////tmp/t.db?timeout=1", "postgresql://h/d"],
)
def test_stores_that_outlive_the_process_are_taken(store: str) -> None:
    assert resolve_options(parsed("--autosync-store", store), {}).store == store


def test_only_our_options_are_taken_out() -> None:
    words = ["-np", "2", "--autosync", "--autosync-trials", "4", "-H", "a:1", "--mpi-args=--x y"]
    assert without_our_options(words) == ("-np", "2", "-H", "a:1", "--mpi-args=--x y")


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("strategy=a.toml", "replay=b.jsonl"), {}, "strategy and --autosync-replay"),
        (("recurring", "replay=last"), {}, "recurring and --autosync-replay"),
        (("tune-only", "replay=last"), {}, "replay and --autosync-tune-only"),
        (("tune-only",), {"STRATEGY": "a.toml"}, "strategy and --autosync-tune-only"),
        (("dry-run", "strategy=a.toml"), {}, "strategy and --autosync-dry-run"),
        (("dry-run", "replay=last"), {}, "replay and --autosync-dry-run"),
    ],
)
def test_two_answers_to_one_question_are_refused(
    words: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    environment = {f"HVD_AUTOSYNC_{name}": value for name, value in variables.items()}
    with pytest.raises(ConfigurationError, match=f"--autosync-{said} are mutually exclusive"):
        resolve_options(parsed(*(f"--autosync-{word}" for word in words)), environment)


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        *(
            ((f"{name}=3",), {}, f"{name} has no effect without --autosync-recurring")
            for name in ("target", "tolerance", "repeats")
        ),
        (("search=binary",), {}, "search has no effect without --autosync-recurring"),
        (("goal=time-to-loss",), {}, "goal has no effect without --autosync-allow"),
        (("quality-steps=50", "allow="), {}, "quality-steps has no effect without"),
        (("strategy=a.toml", "trials=3"), {}, "trials has no effect with --autosync-strategy"),
        (("strategy=a.toml", "space=b.toml"), {}, "space has no effect with --autosync-strategy"),
        (("replay=last", "goal=time-to-loss"), {}, "goal has no effect with --autosync-replay"),
        (("recurring", "allow=codec", "quality-minutes=5"), {}, "quality-minutes has no effect"),
        (("recurring", "seed=1"), {}, "seed has no effect with --autosync-recurring"),
        (("mode=launched",), {"STRATEGY": "a.toml"}, "mode has no effect with --autosync-strategy"),
        (("mode=live", "replay=last"), {}, "mode has no effect with --autosync-replay"),
        (("mode=live", "runner=cold"), {}, "runner cold has no effect with --autosync-mode live"),
    ],
)
def test_options_without_effect_are_refused_with_a_remedy(
    words: tuple[str, ...], variables: dict[str, str], said: str
) -> None:
    environment = {f"HVD_AUTOSYNC_{name}": value for name, value in variables.items()}
    with pytest.raises(ConfigurationError, match=f"--autosync-{said}") as caught:
        resolve_options(parsed(*(f"--autosync-{word}" for word in words)), environment)
    assert caught.value.hint.startswith(("Remove ", "Add "))


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("mode=live",), {"RUNNER": "cold"}),
        (("strategy=a.toml",), {"MODE": "live"}),
        (("replay=last",), {"MODE": "live"}),
        (("recurring",), {"MODE": "live"}),
        (("dry-run",), {"STRATEGY": "a.toml"}),
        (("dry-run",), {"REPLAY": "last", "TRIALS": "3"}),
        (("goal=steps", "quality-steps=200", "search=bayesian", "repeats=1"), {}),
        (("strategy=a.toml", "trials=20"), {"ALLOW": "codec"}),
    ],
)
def test_variables_for_all_jobs_and_defaults_that_are_given_do_no_harm(
    words: tuple[str, ...], variables: dict[str, str]
) -> None:
    environment = {f"HVD_AUTOSYNC_{name}": value for name, value in variables.items()}
    resolve_options(parsed(*(f"--autosync-{word}" for word in words)), environment)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (("recurring", "target=0.9", "space=a.toml", "store=t.db", "dry-run"), {}),
        (("target=0.9",), {"RECURRING": "1"}),
        # They decide whether the lossy winner of an earlier study may be used.
        (("recurring", "allow=codec", "loss-tolerance=0.05"), {}),
        (("recurring", "allow=codec", "goal=time-to-loss", "quality-steps=100"), {}),
        (("goal=steps", "allow=codec"), {}),
        (("strategy=a.toml", "store=t.db"), {"TRIALS": "3", "TARGET": "0.9"}),  # set for all jobs
    ],
)
def test_options_with_an_effect_are_taken(
    words: tuple[str, ...], variables: dict[str, str]
) -> None:
    environment = {f"HVD_AUTOSYNC_{name}": value for name, value in variables.items()}
    resolve_options(parsed(*(f"--autosync-{word}" for word in words)), environment)


def test_a_folder_for_files_of_trials_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (str(tmp_path / "file"), ""):
        with pytest.raises(ConfigurationError, match=f"'{path}' for --autosync-keep-trial-files"):
            resolve_options(parsed(f"--autosync-keep-trial-files={path}"), {})
    for path in (str(tmp_path), str(tmp_path / "new" / "folder")):
        options = resolve_options(parsed("--autosync-keep-trial-files", path), {})
        assert options.keep_trial_files == path


def test_lists_in_the_file_are_lists() -> None:
    section = {"allow": ["codec", "schedule"]}
    assert resolve_options(parsed(), {}, section).allow == ("codec", "schedule")


def test_an_address_with_a_password_is_in_no_message() -> None:
    for text in ("postgresql://me:s3cret@host/\0", "postgresql://host/\0?password=s3cret"):
        with pytest.raises(ConfigurationError, match="HVD_AUTOSYNC_STORE") as caught:
            resolve_options(argparse.Namespace(), {"HVD_AUTOSYNC_STORE": text})
        assert "s3cret" not in str(caught.value)


def test_the_value_of_an_unknown_variable_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="HVD_AUTOSYNC_API_KEY") as caught:
        resolve_options(argparse.Namespace(), {"HVD_AUTOSYNC_API_KEY": "s3cret"})
    assert "s3cret" not in str(caught.value)
