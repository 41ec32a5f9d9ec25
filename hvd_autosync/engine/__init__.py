"""Tuning and training of one job by real launches."""
