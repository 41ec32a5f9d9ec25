"""Collectives of the ranks, with and without Horovod's operations, and messages between ranks."""
