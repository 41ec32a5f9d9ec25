"""The cases of ``workers/cases_*.py``, each file run once by the ranks of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parent / "workers"
PLAIN = (
    "cases_arguments", "cases_drop_in", "cases_exactness", "cases_measuring", "cases_state",
    "cases_local_steps", "cases_guard", "cases_drift", "cases_no_mail",
)  # fmt: skip
EXAMPLES = ("cases_examples",)
EXCHANGES = ("cases_exchanges", "cases_owners", "cases_deferral", "cases_reaching")
CODECS = ("cases_codecs", "cases_extensions")
TWO_LEVELS, ADDED_LEVELS = ("cases_two_levels",), ("cases_added_levels",)
MAIL = ("cases_mail",)
PHASES = ("cases_protocols",)
STRAGGLERS = ("cases_stragglers",)
#: Four ranks that wait actively on two processors, beside other tests, take minutes.
_LIMIT_S = 560
pytestmark = pytest.mark.timeout(600)
Outcomes = Callable[[str, tuple[str, ...]], list[dict[str, str]]]


def cases(modules: tuple[str, ...]) -> list[str]:
    """Names of the cases of some files."""
    texts = [(WORKERS / f"{module}.py").read_text() for module in modules]
    return re.findall(r"^(?:def|   ) (case_\w+)", "".join(texts), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(launch: Any, tmp_path_factory: Any) -> Outcomes:
    """``outcomes(launcher, modules)``: case -> traceback, for each rank."""
    known: dict[tuple[str, tuple[str, ...]], list[dict[str, str]]] = {}

    def run(launcher: str, modules: tuple[str, ...]) -> list[dict[str, str]]:
        if (launcher, modules) not in known:
            known[launcher, modules] = [{}]  # where the job hangs, it does so once
            folder = tmp_path_factory.mktemp("cases")
            # Steps without end, so that the cases run while everything is measured.
            job = launch(
                "run_cases.py", str(folder), *modules, under=launcher, limit_s=_LIMIT_S,
                warmup_steps=0, measured_steps=10**6,
            )  # fmt: skip
            files = sorted(folder.iterdir())
            assert len(files) == (2 if launcher in ("gloo", "mpi") else 4), job.output
            known[launcher, modules] = [dict(map(json.loads, open(f))) for f in files]
            assert job.status == 0, job.output
        return known[launcher, modules]

    return run


def check(ranks: list[dict[str, str]], case: str) -> None:
    """Fail or skip as the case did on any rank."""
    for rank, reports in enumerate(ranks):
        report = reports.get(case, "was not reached")
        if report.startswith("skipped: "):
            pytest.skip(report.removeprefix("skipped: "))
        assert not report, f"rank {rank}: {report}"


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(PLAIN))
def test_under_gloo(outcomes: Outcomes, case: str) -> None:
    check(outcomes("gloo", PLAIN), case)


@pytest.mark.mpi
@pytest.mark.parametrize("case", cases(PLAIN))
def test_under_mpi(outcomes: Outcomes, case: str) -> None:
    check(outcomes("mpi", PLAIN), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(EXCHANGES))
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("four ranks", marks=pytest.mark.mpi)])
def test_exchanges(outcomes: Outcomes, launcher: str, case: str) -> None:
    check(outcomes(launcher, EXCHANGES), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(CODECS))
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("four ranks", marks=pytest.mark.mpi)])
def test_codecs(outcomes: Outcomes, launcher: str, case: str) -> None:
    check(outcomes(launcher, CODECS), case)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(EXAMPLES))
def test_exchanges_of_examples(outcomes: Outcomes, case: str) -> None:
    check(outcomes("gloo", EXAMPLES), case)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("case", cases(TWO_LEVELS))
def test_exchanges_of_two_levels(outcomes: Outcomes, case: str) -> None:
    check(outcomes("two levels", TWO_LEVELS), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(ADDED_LEVELS))
def test_levels_that_are_added(outcomes: Outcomes, case: str) -> None:
    check(outcomes("two levels", ADDED_LEVELS), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(MAIL))
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_mail(outcomes: Outcomes, launcher: str, case: str) -> None:
    check(outcomes(launcher, MAIL), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(PHASES))
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_phases(outcomes: Outcomes, launcher: str, case: str) -> None:
    check(outcomes(launcher, PHASES), case)


@pytest.mark.cluster
@pytest.mark.parametrize("case", cases(STRAGGLERS))
@pytest.mark.parametrize("launcher", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_stragglers(outcomes: Outcomes, launcher: str, case: str) -> None:
    check(outcomes(launcher, STRAGGLERS), case)
