"""Horovod's optimizer under a strategy: creation, steps, checkpoints."""
