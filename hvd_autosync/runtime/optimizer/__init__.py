"""Horovod's optimizer under a strategy, from the script's call to its checkpoints."""
