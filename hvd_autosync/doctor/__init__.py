"""Checks for problems that would prevent tuning, with remedies."""
