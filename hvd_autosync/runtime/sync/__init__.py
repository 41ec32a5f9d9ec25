"""Synchronization of ranks: local steps, phases with and without a barrier."""
