"""Launching: the user's job, its hosts, and the trial runners.

A runner takes a trial's specification and returns its result, however the trial ends. The warm
runner forks the job's ranks from servers that have imported torch and Horovod. The cold runner
launches the user's command through Horovod's own launcher. ``auto`` chooses between them.
"""
