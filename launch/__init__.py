"""Launching: a job as given, its hosts, trial runners, and the worker's side of the wire.

A runner takes a trial's specification and returns its result, whatever happens in between. The
cold runner starts the user's command anew for each trial through Horovod's own launcher. Workers
import only ``wire`` and ``worker_environment`` from here.
"""
