"""The commands of ``hvd-autosync``, one module per idea.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""
