"""The cases of ``workers/cases_*.py``, run once by two ranks under each controller."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKERS = Path(__file__).parent / "workers"
CASES = [
    name
    for file in sorted(WORKERS.glob("cases_*.py"))
    for name in re.findall(r"^def (case_\w+)", file.read_text(), flags=re.MULTILINE)
]
Outcomes = Callable[[str], list[dict[str, str]]]


@pytest.fixture(scope="module")
def outcomes(launch: Any, tmp_path_factory: Any) -> Outcomes:
    """``outcomes(controller)``: case -> traceback, for each rank."""
    known: dict[str, list[dict[str, str]]] = {}

    def run(controller: str) -> list[dict[str, str]]:
        if controller not in known:
            folder = tmp_path_factory.mktemp(controller)
            # Steps without end, so that the cases run while everything is measured.
            job = launch(
                "run_cases.py", str(folder), under=controller, warmup_steps=0, measured_steps=10**6
            )
            files = sorted(folder.iterdir())
            known[controller] = [dict(map(json.loads, open(f))) for f in files]
            assert len(files) == 2, job.output
            assert job.status == 0, job.output
        return known[controller]

    return run


def check(ranks: list[dict[str, str]], case: str) -> None:
    """Fail or skip as the case did on any rank."""
    for rank, reports in enumerate(ranks):
        report = reports.get(case, "was not reached")
        if report.startswith("skipped: "):
            pytest.skip(report.removeprefix("skipped: "))
        assert not report, f"rank {rank}: {report}"


@pytest.mark.cluster
@pytest.mark.parametrize("case", CASES)
def test_under_gloo(outcomes: Outcomes, case: str) -> None:
    check(outcomes("gloo"), case)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_under_mpi(outcomes: Outcomes, case: str) -> None:
    check(outcomes("mpi"), case)
