"""The parts of ``tuning_gain.py``: the workloads, the tuners, the match, and the tables."""
