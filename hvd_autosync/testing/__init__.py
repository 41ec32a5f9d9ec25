"""What tests and benchmarks share, here and in projects that extend this one.

:class:`Testbed` makes several hosts out of one machine; :func:`testbed_missing` says why it
cannot be used here, for skipping.
"""

from hvd_autosync.testing.namespaces import TestbedError
from hvd_autosync.testing.testbed import Testbed, testbed_missing

__all__ = ["Testbed", "TestbedError", "testbed_missing"]
