"""Launching: a job as given, its hosts, trial runners, and the worker's side of the wire.

A runner takes a trial's specification and returns its result, whatever happens in between. The
warm runner forks the job's ranks from servers that have imported everything; the cold runner
starts the user's command anew through Horovod's own launcher; ``auto`` chooses. Workers import
``wire`` and ``worker_environment`` from here, and forked ones what forks them.
"""
