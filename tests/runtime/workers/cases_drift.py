"""Real steps under the watch of a real training."""

import contextlib
import io
import itertools
import os
import statistics
import tempfile
import time

import horovod.torch as hvd
from common import OURS, batch, mlp, strategy, wrap

from hvd_autosync.runtime import current
from hvd_autosync.runtime.measure import drift

WINDOW = drift._WINDOW_STEPS = 16


def watched(expected_s, steps, pause_s=lambda step: 0.0):
    """What ranks say of a training, and what they write for the driver."""
    run, current.run = current.run, None
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(said):
        current.watch = drift.DriftWatch(expected_s, folder, window_s=0.0)
        try:
            model = mlp()
            optimizer = wrap(OURS, model)
            for step in range(steps):
                optimizer.zero_grad()
                time.sleep(pause_s(step))
                model(batch(step)).pow(2).mean().backward()
                optimizer.step()
        finally:
            current.watch, current.run = None, run
        return said.getvalue(), os.listdir(folder)


def case_steps_slower_than_tuning_measured():
    for knobs in ({}, {"buckets": 2}):
        with strategy(**knobs):
            said, written = watched(1e-7, WINDOW * 9)
        assert ("steps have become slower" in said) == (hvd.rank() == 0), said
        assert bool(written) == (hvd.rank() == 0), written


def case_steps_faster_than_tuning_measured():
    said, written = watched(100.0, WINDOW * 9)
    assert ("steps have become faster" in said) == (hvd.rank() == 0), said
    assert "computes more slowly" not in said, said
    assert bool(written) == (hvd.rank() == 0), written


def case_a_rank_that_becomes_slow_is_distinguished_from_those_that_wait():
    """By twice what its steps took before, however busy this machine is."""
    slow, begins = 1, WINDOW * 6
    began = []

    def pause(step):
        began.append(time.perf_counter())
        if hvd.rank() != slow or step <= begins:
            return 0.0
        steps_s = [b - a for a, b in itertools.pairwise(began[:begins])]
        return max(0.05, 2 * statistics.median(steps_s))

    said, _ = watched(0.03, WINDOW * 16, pause)
    assert ("per step without waiting" in said) == (hvd.rank() == slow), said
    assert ("steps have become slower" in said) == (hvd.rank() == 0), said
