"""The cases of ``workers/cases_*.py``, run by the ranks of one job for each group and launcher.

A job runs the cases that pytest has selected: ``-k case_momentum`` is one case on two ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parent / "workers"
#: Of a job. Four ranks that wait actively on two processors, beside other tests, take minutes.
_LIMIT_S = 560
#: Of one with cases of whole matrices, which take long alone.
_WIDE_LIMIT_S = 1760
#: Before the cases of a job whose launcher is "again ..." Horovod is initialized so often again.
_AGAIN = 50
_MPI = ("mpi", "four ranks")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(_WIDE_LIMIT_S + 40)]
Outcomes = Callable[[str, str], list[dict[str, str]]]


@dataclass(frozen=True)
class Group:
    """Cases that run in one job.

    A matrix also has each case after Horovod was initialized again and again.

    Attributes:
        modules: The files.
        launchers: How the job is launched (``LAUNCHERS`` of ``conftest.py``).
        elsewhere: Under launchers but the first these cases, or files, are no part of a matrix:
            they depend on the controller, or stand for the others.
        wide: These cases, or files, are never but part of a matrix.
        slow: Whether it takes long under each.
    """

    modules: tuple[str, ...]
    launchers: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    slow: bool = False


GROUPS = {
    "plain": Group(
        (
            "cases_collectives",
            "cases_arguments",
            "cases_drop_in",
            "cases_exactness",
            "cases_measuring",
            "cases_state",
            "cases_local_steps",
            "cases_guard",
            "cases_drift",
            "cases_no_messages",
        ),
        ("gloo", "mpi"),
        (
            "cases_exactness",
            "cases_measuring",
            "cases_state",
            "cases_no_messages",
            "case_rounds_are_those_of_local_sgd",
            "case_a_loss_that_rises_ends_a_codec",
        ),
        wide=(
            "case_a_window_may_end_right_before_join",
            "case_a_loss_that_lags_ends_a_codec_and_local_steps",
            "case_long_rounds_that_nothing_is_predicted_for_are_named",
            "case_several_optimizers_have_no_prediction",
            "case_a_healthy_training_goes_on",
        ),
    ),
    "exchanges": Group(
        (
            "cases_exchanges",
            "cases_factors",
            "cases_switching",
            "cases_owners",
            "cases_deferred_updates",
            "cases_reaching",
        ),
        ("gloo", "four ranks"),
        (
            "case_momentum",
            "case_join",
            "case_factors_bit_for_bit",
            "case_factors_of_uneven_batches",
            "case_sparse_gradients",
            "case_steps_wait_until_forward",
            "case_a_saved_state_is_taken_up_again",
        ),
        wide=(
            "case_sgd",
            "case_adam",
            "case_adamw",
            "case_switching_between_every_two_plans",
            "case_switching_with_clipping_and_accumulation",
            "case_switching_between_checkpoints",
            "case_scripts_whose_reading_is_not_seen",
            "case_factors_of_weights_that_differ_from_the_beginning",
            "case_compiled_scripts_whose_reading_is_not_seen",
        ),
    ),
    "codecs": Group(
        ("cases_codecs", "cases_extensions"),
        ("gloo", "four ranks"),
        ("case_rounding_is_small_and_the_same_everywhere",),
    ),
    "lossless": Group(
        ("cases_lossless",),
        ("gloo", "four ranks", "two levels"),
        (
            "case_sums_have_the_bits_of_horovods",
            "case_training_under_autocast_has_the_bits_of_horovods",
            "case_what_is_done_to_a_tensor_that_was_sent_is_noticed_and_done_to_none",
            "case_what_does_not_pay_is_tried_less_and_less_often",
        ),
    ),
    "examples": Group(
        ("cases_examples",),
        ("gloo",),
        wide=("case_ncf", "case_vgg", "case_bert", "case_digits", "case_language_model"),
        slow=True,
    ),
    "loops": Group(
        ("cases_autocast", "cases_loops"),
        ("gloo",),
        wide=(
            "case_compiled",
            "case_compiled_by_inductor",
            "case_transformer",
            "case_transformer_with_an_output_layer_of_its_own",
            "case_module_loop",
            "case_checkpointing",
            "case_reentrant_checkpointing",
            "case_gan_that_drops_gradients",
            "case_added_group_reduced_by_hand",
            "case_added_group_that_nobody_reduces",
            "case_added_group_in_another_optimizer",
            "case_ema",
            "case_frozen",
            "case_frozen_in_another_optimizer",
            "case_frozen_when_wrapped",
            "case_exact_exchanges_under_autocast",
            "case_codecs_under_autocast",
            "case_codecs_under_autocast_with_a_scaler",
            "case_local_steps_under_autocast",
        ),
        slow=True,
    ),
    "habits": Group(("cases_habits",), ("gloo",), slow=True),
    "two levels": Group(("cases_two_levels",), ("two levels",), wide=("case_adam",), slow=True),
    "switching": Group(("cases_switching",), ("two levels",), wide=("cases_switching",)),
    "added levels": Group(("cases_added_levels", "cases_factors_of_levels"), ("two levels",)),
    "reinitialize": Group(
        ("cases_reinitialize",),
        ("gloo", "mpi"),
        (
            "case_a_training_has_the_bits_of_one_without",
            "case_variables_are_those_of_the_request",
            "case_process_sets_stay",
        ),
        wide=(
            "case_cycle_time_takes_effect",
            "case_plans_go_on",
            "case_codes_and_join_go_on",
            "case_rounds_of_local_steps_go_on",
            "case_a_phase_with_a_barrier_goes_on",
            "case_other_threads_wait",
        ),
    ),
    "reinitialize more": Group(
        ("cases_reinitialize",), ("four ranks", "two levels"), wide=("cases_reinitialize",)
    ),
    "levels again": Group(("cases_levels_again",), ("two levels",)),
    "messages": Group(("cases_messages",), ("gloo", "mpi"), ("cases_messages",)),
    "phases": Group(
        ("cases_protocols",),
        ("gloo", "mpi"),
        ("case_ssp_of_no_staleness_is_bsp",),
        wide=(
            "case_the_guard_catches_a_learning_rate_that_is_not_divided",
            "case_a_loss_that_is_no_number_ends_steps_without_a_barrier",
        ),
    ),
    "methods": Group(
        ("cases_methods", "cases_lossy_methods"),
        ("gloo", "mpi"),
        ("case_no_gradient_is_lost_between_some_methods",),
        wide=(
            "case_every_exact_method_after_every_other",
            "case_every_exact_method_after_every_other_with_momentum",
            "case_every_exact_method_after_every_other_with_clipping",
            "case_every_exact_method_after_every_other_between_checkpoints",
            "case_no_gradient_is_lost_between_any_two_methods",
            "case_exact_methods_with_accumulation",
            "case_exact_methods_between_checkpoints",
            "case_a_guard_begins_with_a_lossy_plan",
            "case_exact_methods_of_two_optimizers",
            "case_momentum_survives_any_two_methods",
            "case_moments_of_adam_survive_any_two_methods",
            "case_momentum_of_rounds_is_that_of_mean_gradients",
        ),
    ),
    "stragglers": Group(
        ("cases_stragglers",),
        ("gloo", "mpi"),
        ("case_others_go_on_without_a_straggler",),
        wide=(
            "case_nobody_waits_for_a_straggler_until_the_end_of_a_pass",
            "case_nobody_waits_as_long_as_there_is_a_straggler",
        ),
    ),
}


#: Groups whose cases can run in one job: they begin Horovod in the same way (``run_cases.py``).
_TOGETHER = (
    ("gloo", ("codecs", "lossless", "examples", "loops")),
    ("gloo", ("methods", "stragglers")),
    ("mpi", ("phases", "methods", "stragglers")),
    ("four ranks", ("exchanges", "codecs", "lossless")),
    ("two levels", ("lossless", "added levels")),
)


def cases(module: str) -> list[str]:
    """Names of the cases of a file."""
    text = (WORKERS / f"{module}.py").read_text()
    return re.findall(r"^(?:def|   ) (case_\w+)", text, flags=re.MULTILINE)


def parameters() -> list[Any]:
    """Group, launcher, file and case of each test."""
    found = []
    for name, group in GROUPS.items():
        again = [f"again {each}" for each in group.launchers]
        for launcher in (*group.launchers, *again * ("reinitialize" not in name)):
            for module in group.modules:
                for case in cases(module):
                    marks = [pytest.mark.mpi] if launcher.removeprefix("again ") in _MPI else []
                    marks += [pytest.mark.slow] if group.slow else []
                    first = launcher == group.launchers[0]
                    stands = launcher not in again and {module, case} & {*group.elsewhere}
                    if {module, case} & {*group.wide} or not (first or stands):
                        marks.append(pytest.mark.wide)
                    found.append(pytest.param(name, launcher, f"{module}.{case}", marks=marks))
    return found


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """Those of a test; empty if it has none."""
    called = getattr(item, "callspec", None)
    return {} if called is None else called.params


@pytest.fixture(scope="module")
def outcomes(
    launch: Any, tmp_path_factory: Any, case_times: dict[str, float], request: pytest.FixtureRequest
) -> Outcomes:
    """``outcomes(group, launcher)``: case -> traceback, for each rank."""
    known: dict[tuple[str, str], list[dict[str, str]]] = {}

    def selected(groups: tuple[str, ...], launcher: str) -> list[pytest.Item]:
        """Tests of some groups, in their order."""
        found = [item for item in request.session.items if "group" in parameters_of(item)]
        return [
            item
            for item in found
            if parameters_of(item)["group"] in groups
            and parameters_of(item)["launcher"] == launcher
        ]

    def wide(groups: tuple[str, ...], launcher: str) -> bool:
        return any(item.get_closest_marker("wide") for item in selected(groups, launcher))

    def together(group: str, launcher: str) -> tuple[str, ...]:
        """The groups of a job; whole matrices take too long beside others."""
        for each, groups in _TOGETHER:
            if each == launcher and group in groups:
                return (group,) if wide(groups, launcher) else groups
        return (group,)

    def run(group: str, launcher: str) -> list[dict[str, str]]:
        if (group, launcher) not in known:
            groups = together(group, launcher)
            for each in groups:
                known[each, launcher] = [{}]  # where the job hangs, it does so once
            folder = tmp_path_factory.mktemp("cases")
            # Steps without end, so that the cases run while everything is measured.
            limit_s = _WIDE_LIMIT_S if wide(groups, launcher) else _LIMIT_S
            job = launch(
                "run_cases.py",
                str(folder),
                str(limit_s - 20),
                str(_AGAIN if launcher.startswith("again ") else 0),
                *(parameters_of(item)["case"] for item in selected(groups, launcher)),
                under=launcher.removeprefix("again "),
                limit_s=limit_s,
                warmup_steps=0,
                measured_steps=10**6,
            )
            files = sorted(folder.iterdir())
            ranks = 4 if launcher.endswith(("four ranks", "two levels")) else 2
            assert len(files) == ranks, job.output
            lines = [list(map(json.loads, file.read_text().splitlines())) for file in files]
            reports = [{case: report for case, report, _ in each} for each in lines]
            for case, _, took_s in lines[0]:
                case_times[f"{case} ({launcher})"] = took_s
            for each in groups:
                known[each, launcher] = reports
            assert job.status == 0, job.output
        return known[group, launcher]

    return run


@pytest.mark.parametrize(("group", "launcher", "case"), parameters())
def test_on_ranks(outcomes: Outcomes, group: str, launcher: str, case: str) -> None:
    """A failure on any rank counts before a skip on another."""
    reports = [rank.get(case, "was not reached") for rank in outcomes(group, launcher)]
    skips = [report for report in reports if report.startswith("skipped: ")]
    failures = {rank: text for rank, text in enumerate(reports) if text and text not in skips}
    assert not failures, "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
    if skips:
        pytest.skip(skips[0].removeprefix("skipped: "))
