"""The commands of ``hvd-autosync``, one module per command or group.

Large libraries are imported only when a command runs, so that ``--help`` is fast.
"""
