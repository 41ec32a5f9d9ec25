"""Tools for tests and benchmarks, here and in projects that extend this one.

:class:`Testbed` makes several hosts on one machine; :func:`testbed_missing` returns why that is
impossible here, as the reason to skip a test. :func:`run_as_namespace_root` runs a program that
makes them without root.
"""

from hvd_autosync.testing.namespaces import TestbedError, run_as_namespace_root
from hvd_autosync.testing.testbed import Testbed, testbed_missing

__all__ = ["Testbed", "TestbedError", "run_as_namespace_root", "testbed_missing"]
