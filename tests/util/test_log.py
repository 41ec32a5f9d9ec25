from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hvd_autosync.util.log import start_log
from hvd_autosync.util.variables import LOG_VARIABLE


@pytest.fixture(autouse=True)
def _no_log_stays() -> Iterator[None]:
    logger = logging.getLogger("hvd_autosync")
    before = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.handlers[:] = before[2]
    logger.setLevel(before[0])
    logger.propagate = before[1]


def test_each_line_has_its_rank_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("rank 1", {LOG_VARIABLE: "debug"})
    logging.getLogger("hvd_autosync.runtime.guard").debug("a loss of %g\nat step %d", 2.5, 3)
    assert capsys.readouterr().err == (
        "hvd-autosync debug [rank 1] runtime.guard: a loss of 2.5\n"
        "hvd-autosync debug [rank 1] runtime.guard: at step 3\n"
    )


def test_a_fork_is_another_rank_and_writes_each_line_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for who in ("driver", "rank 0"):
        start_log(who, {LOG_VARIABLE: "INFO"})
    logger = logging.getLogger("hvd_autosync.launch")
    logger.debug("too much")
    logger.warning("enough")
    assert capsys.readouterr().err == "hvd-autosync warning [rank 0] launch: enough\n"


def test_without_the_variable_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    start_log("driver", {})
    logging.getLogger("hvd_autosync.launch").debug("nobody asked")
    assert capsys.readouterr().err == ""
    assert logging.getLogger("hvd_autosync").handlers == []


def test_a_level_that_is_none_is_named() -> None:
    named = "HVD_AUTOSYNC_LOG is 'loud'; the levels are debug, info, warning"
    with pytest.raises(ValueError, match=named):
        start_log("driver", {LOG_VARIABLE: "loud"})
