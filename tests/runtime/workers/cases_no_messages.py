"""Message endpoints in a process that did not prepare for them."""

import unittest

import horovod.torch as hvd
from common import raises

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.initialization import last_initialization
from hvd_autosync.runtime.collectives.messaging import open_endpoint


def case_mpi4py_has_to_be_imported_before_init():
    if not hvd.mpi_enabled():
        raise unittest.SkipTest("ZeroMQ needs nothing beforehand")
    if last_initialization() is not None:
        raise unittest.SkipTest("what can be initialized again has imported it beforehand")
    for _ in range(2):
        with raises(AutosyncError, "rank 0: mpi4py.MPI was not imported before hvd.init()"):
            open_endpoint("unprepared", lambda *message: None)
